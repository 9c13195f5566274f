//! A stream's pages in order, cheap to copy: forks and reservations share the long front of a table.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::PageId;

/// Entries kept outside the shared front before they join it.
const TAIL: usize = 32;

/// Page ids in stream order: a shared, immutable front and a short tail of its own.
#[derive(Clone, Debug, Default)]
pub(super) struct PageTable {
    front: Arc<Vec<PageId>>,
    start: usize,
    end: usize,
    tail: Vec<PageId>,
}

impl PageTable {
    /// A table of these pages.
    pub(super) fn new(pages: Vec<PageId>) -> PageTable {
        PageTable { start: 0, end: pages.len(), front: Arc::new(pages), tail: Vec::new() }
    }

    /// Pages listed.
    pub(super) fn len(&self) -> usize {
        self.end - self.start + self.tail.len()
    }

    /// The `i`-th page.
    pub(super) fn get(&self, i: usize) -> Option<PageId> {
        let front = &self.front[self.start..self.end];
        front.get(i).or_else(|| self.tail.get(i.wrapping_sub(front.len()))).copied()
    }

    /// One more page at the end.
    pub(super) fn push(&mut self, page: PageId) {
        if self.tail.len() == TAIL {
            *self = PageTable::new(self.to_vec());
        }
        self.tail.push(page);
    }

    /// Another page in the place of the `i`-th, which is returned.
    pub(super) fn replace(&mut self, i: usize, page: PageId) -> PageId {
        let in_front = self.end - self.start;
        if i >= in_front {
            return std::mem::replace(&mut self.tail[i - in_front], page);
        }
        let mut pages = self.to_vec();
        let old = std::mem::replace(&mut pages[i], page);
        *self = PageTable::new(pages);
        old
    }

    /// Drops and returns the first `count` pages.
    pub(super) fn take_front(&mut self, count: usize) -> Vec<PageId> {
        let taken: Vec<PageId> = self.iter().take(count).collect();
        let in_front = taken.len().min(self.end - self.start);
        self.start += in_front;
        self.tail.drain(..taken.len() - in_front);
        taken
    }

    /// Keeps the first `len` pages.
    pub(super) fn truncate(&mut self, len: usize) {
        let in_front = self.end - self.start;
        self.tail.truncate(len.saturating_sub(in_front));
        self.end = self.start + len.min(in_front);
    }

    /// The pages in order.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = PageId> + '_ {
        self.front[self.start..self.end].iter().chain(&self.tail).copied()
    }

    /// The pages in order, owned.
    pub(super) fn to_vec(&self) -> Vec<PageId> {
        let mut pages = Vec::with_capacity(self.len());
        self.append_to(&mut pages, self.len());
        pages
    }

    /// Appends the first `count` pages to `out`.
    pub(super) fn append_to(&self, out: &mut Vec<PageId>, count: usize) {
        let front = &self.front[self.start..self.end];
        out.extend_from_slice(&front[..count.min(front.len())]);
        out.extend_from_slice(&self.tail[..count.saturating_sub(front.len()).min(self.tail.len())]);
    }
}

impl PartialEq for PageTable {
    fn eq(&self, other: &PageTable) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_behaves_as_a_plain_vector_and_copies_do_not_see_each_other() {
        let (mut table, mut plain) = (PageTable::default(), Vec::new());
        for i in 0..200 {
            table.push(i);
            plain.push(i);
            if i % 7 == 0 {
                let at = plain.len() / 2;
                let copy = table.clone();
                assert_eq!(table.replace(at, 1000 + i), std::mem::replace(&mut plain[at], 1000 + i));
                assert!(copy != table);
            }
            if i % 11 == 0 {
                assert_eq!(table.take_front(2), plain.drain(..2.min(plain.len())).collect::<Vec<_>>());
            }
            assert_eq!(table.to_vec(), plain);
            assert_eq!(table.get(plain.len()), None);
            assert_eq!(table.get(plain.len() / 3), plain.get(plain.len() / 3).copied());
        }
        for keep in [70, 33, 5, 0] {
            table.truncate(keep);
            plain.truncate(keep);
            assert_eq!(table.to_vec(), plain);
        }
    }
}
