//! The index of whole pages by content, and the order in which unreferenced ones are evicted.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};

use mstar_kernels::mutant::planted;

use super::key::{PageHash, PageKey};
use crate::kv::PageId;

/// Where a page's key chains from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kv) enum Chain {
    /// The root of a namespace.
    Root(PageKey),
    /// An entry of the index.
    Entry(EntryRef),
}

/// An entry, and the number that tells it from a later one in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kv) struct EntryRef {
    at: usize,
    /// The entry's number, never used twice.
    pub(in crate::kv) number: u64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    parent: Chain,
    key: PageKey,
    tokens: Box<[u64]>,
    page: PageId,
    children: usize,
    /// Children that are held, or have a held descendant.
    pinned_children: usize,
    /// Whether a request owns the page.
    held: bool,
    last_used: u64,
}

impl Entry {
    fn pinned(&self) -> bool {
        self.held || self.pinned_children > 0
    }
}

/// The index.
#[derive(Debug)]
pub(in crate::kv) struct PrefixIndex {
    entries: Vec<Option<Entry>>,
    vacant: Vec<usize>,
    by_key: HashMap<PageKey, Vec<usize>>,
    /// Entry of each page.
    by_page: HashMap<PageId, usize>,
    /// Entries without owner or children, least recently used first.
    leaves: BTreeSet<(u64, usize)>,
    evictable: usize,
    clock: u64,
    next_number: u64,
    hash: PageHash,
}

impl PrefixIndex {
    /// An empty index that keys pages by `hash`.
    pub(in crate::kv) fn new(hash: PageHash) -> PrefixIndex {
        PrefixIndex {
            entries: Vec::new(),
            vacant: Vec::new(),
            by_key: HashMap::new(),
            by_page: HashMap::new(),
            leaves: BTreeSet::new(),
            evictable: 0,
            clock: 0,
            next_number: 0,
            hash,
        }
    }

    /// Entries.
    pub(in crate::kv) fn len(&self) -> usize {
        self.by_page.len()
    }

    /// Pages that evictions could free, one after the other: unreferenced, with no referenced descendant.
    pub(in crate::kv) fn evictable(&self) -> usize {
        self.evictable
    }

    fn entry(&self, at: usize) -> &Entry {
        self.entries[at].as_ref().expect("the index's own links name live entries")
    }

    fn entry_mut(&mut self, at: usize) -> &mut Entry {
        self.entries[at].as_mut().expect("the index's own links name live entries")
    }

    fn live(&self, at: EntryRef) -> Option<&Entry> {
        self.entries.get(at.at)?.as_ref().filter(|e| e.number == at.number)
    }

    /// The key of a page under `parent`; `None` when the parent has been evicted.
    fn key(&self, parent: Chain, tokens: &[u64]) -> Option<PageKey> {
        let parent = match parent {
            Chain::Root(key) => key,
            Chain::Entry(at) => self.live(at)?.key,
        };
        Some((self.hash)(&parent, tokens))
    }

    /// The entry of these tokens under this parent, and its page. `Err` when the parent has been evicted.
    pub(in crate::kv) fn find(
        &self,
        parent: Chain,
        tokens: &[u64],
    ) -> Result<Option<(EntryRef, PageId)>, ()> {
        let key = self.key(parent, tokens).ok_or(())?;
        let same = |&&at: &&usize| {
            let entry = self.entry(at);
            let same_tokens = *entry.tokens == *tokens || planted("prefix-hash-trusted");
            entry.parent == parent && same_tokens
        };
        let found = self.by_key.get(&key).and_then(|all| all.iter().find(same));
        Ok(found.map(|&at| (EntryRef { at, number: self.entry(at).number }, self.entry(at).page)))
    }

    /// Puts an owned page in. The caller has looked that `find` finds none and the parent is there.
    pub(in crate::kv) fn insert(&mut self, parent: Chain, tokens: &[u64], page: PageId) -> EntryRef {
        let key = self.key(parent, tokens).expect("the caller found the parent");
        let number = self.next_number;
        self.next_number += 1;
        self.clock += 1;
        let entry = Entry {
            number,
            parent,
            key,
            tokens: tokens.into(),
            page,
            children: 0,
            pinned_children: 0,
            held: true,
            last_used: self.clock,
        };
        let at = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[at] = Some(entry);
        self.by_key.entry(key).or_default().push(at);
        let previous = self.by_page.insert(page, at);
        assert!(previous.is_none(), "broken invariant: page {page} is in the index twice");
        if let Chain::Entry(up) = parent {
            if !self.entry(up.at).held && self.entry(up.at).children == 0 {
                let last_used = self.entry(up.at).last_used;
                self.leaves.remove(&(last_used, up.at));
            }
            self.entry_mut(up.at).children += 1;
            self.pin_from(up.at);
        }
        EntryRef { at, number }
    }

    /// A child of `at` became pinned: so are its ancestors.
    fn pin_from(&mut self, mut at: usize) {
        loop {
            let entry = self.entry_mut(at);
            let was = entry.pinned();
            entry.pinned_children += 1;
            if was {
                return;
            }
            self.evictable -= 1; // not held and had no pinned child: it was evictable
            match self.entry(at).parent {
                Chain::Entry(up) => at = up.at,
                Chain::Root(_) => return,
            }
        }
    }

    /// A child of `at` is pinned no more: perhaps its ancestors are not either.
    fn unpin_from(&mut self, mut at: usize) {
        loop {
            let entry = self.entry_mut(at);
            entry.pinned_children -= 1;
            if entry.pinned() {
                return;
            }
            self.evictable += 1;
            match self.entry(at).parent {
                Chain::Entry(up) => at = up.at,
                Chain::Root(_) => return,
            }
        }
    }

    /// A cached page has an owner again.
    pub(in crate::kv) fn hold(&mut self, page: PageId) {
        let at = self.by_page[&page];
        let entry = self.entry_mut(at);
        let (was, leaf) = (entry.pinned(), entry.children == 0);
        entry.held = true;
        let (last_used, parent) = (entry.last_used, entry.parent);
        if leaf && !planted("evict-referenced-page") {
            self.leaves.remove(&(last_used, at));
        }
        if !was {
            self.evictable -= 1;
            if let Chain::Entry(up) = parent {
                self.pin_from(up.at);
            }
        }
    }

    /// A page lost its last owner: it is cached, and the most recently used.
    pub(in crate::kv) fn unhold(&mut self, page: PageId) {
        self.clock += 1;
        let (at, clock) = (self.by_page[&page], self.clock);
        let entry = self.entry_mut(at);
        entry.held = false;
        entry.last_used = clock;
        let (pinned, leaf, parent) = (entry.pinned(), entry.children == 0, entry.parent);
        if leaf {
            self.leaves.insert((clock, at));
        }
        if !pinned {
            self.evictable += 1;
            if let Chain::Entry(up) = parent {
                self.unpin_from(up.at);
            }
        }
    }

    /// Drops the least recently used unreferenced entry that has no children; its number and page.
    pub(in crate::kv) fn evict(&mut self) -> Option<(u64, PageId)> {
        let (_, at) = self.leaves.pop_first()?;
        let entry = self.entries[at].take().expect("leaves are live entries");
        self.vacant.push(at);
        self.evictable -= 1;
        self.by_page.remove(&entry.page);
        if let Some(all) = self.by_key.get_mut(&entry.key) {
            all.retain(|&other| other != at);
            if all.is_empty() {
                self.by_key.remove(&entry.key);
            }
        }
        if let Chain::Entry(up) = entry.parent {
            let parent = self.entry_mut(up.at);
            parent.children -= 1;
            if parent.children == 0 && !parent.held {
                let last_used = parent.last_used;
                self.leaves.insert((last_used, up.at));
            }
        }
        Some((entry.number, entry.page))
    }

    /// Walks every entry: links, counts and the eviction order agree. `owners` says how often a page is owned.
    pub(in crate::kv) fn check(&self, owners: impl Fn(PageId) -> u32) -> Result<(), String> {
        let live = || self.entries.iter().enumerate().filter_map(|(at, e)| e.as_ref().map(|e| (at, e)));
        for (at, entry) in live() {
            let is_child =
                |e: &Entry| matches!(e.parent, Chain::Entry(up) if up.at == at && up.number == entry.number);
            let children = live().filter(|(_, e)| is_child(e));
            let pinned = children.clone().filter(|(_, e)| e.pinned()).count();
            let leaf = entry.children == 0 && !entry.held;
            if let Chain::Entry(up) = entry.parent
                && self.live(up).is_none()
            {
                return Err(format!("entry {} outlived its parent", entry.number));
            }
            if children.count() != entry.children
                || pinned != entry.pinned_children
                || entry.held != (owners(entry.page) > 0)
                || self.by_page.get(&entry.page) != Some(&at)
                || leaf != self.leaves.contains(&(entry.last_used, at))
            {
                return Err(format!("entry {} of page {} does not add up", entry.number, entry.page));
            }
        }
        let evictable = live().filter(|(_, e)| !e.pinned()).count();
        if evictable != self.evictable || live().count() != self.by_page.len() {
            return Err(format!("{evictable} entries can be evicted, {} are counted", self.evictable));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::blake3_page;
    use super::*;

    const ROOT: Chain = Chain::Root(PageKey([7; 32]));

    #[test]
    fn f26_a_hash_that_collides_shares_nothing() {
        let constant: PageHash = |_, _| PageKey([0; 32]);
        let parity: PageHash = |_, tokens| PageKey([(tokens[0] % 2) as u8; 32]);
        for hash in [constant, parity, blake3_page] {
            let mut index = PrefixIndex::new(hash);
            let pages = |from: u64| [(from..from + 8).collect::<Vec<_>>(), (from + 8..from + 16).collect()];
            let (a, b) = (pages(1), pages(2));
            let a0 = index.insert(ROOT, &a[0], 1);
            let a1 = index.insert(Chain::Entry(a0), &a[1], 2);
            assert_eq!(index.find(ROOT, &b[0]), Ok(None));
            let b0 = index.insert(ROOT, &b[0], 3);
            assert_eq!(index.find(ROOT, &a[0]), Ok(Some((a0, 1))));
            assert_eq!(index.find(ROOT, &b[0]), Ok(Some((b0, 3))));
            assert_eq!(index.find(Chain::Entry(a0), &a[1]), Ok(Some((a1, 2))));
            assert_eq!(index.find(Chain::Entry(b0), &a[1]), Ok(None));
            assert_eq!(index.find(Chain::Root(PageKey([8; 32])), &a[0]), Ok(None));
            let same = index.insert(Chain::Entry(b0), &a[1], 4);
            assert_eq!(index.find(Chain::Entry(b0), &a[1]), Ok(Some((same, 4))));
            index.check(|_| 1).unwrap();
        }
    }

    #[test]
    fn children_go_before_parents_and_the_least_recently_used_first() {
        let mut index = PrefixIndex::new(blake3_page);
        let a = index.insert(ROOT, &[1], 1);
        let b = index.insert(Chain::Entry(a), &[2], 2);
        index.insert(Chain::Entry(b), &[3], 3);
        index.insert(ROOT, &[9], 4);
        assert_eq!((index.evictable(), index.evict()), (0, None));
        index.unhold(1);
        index.unhold(2);
        assert_eq!((index.evictable(), index.evict()), (0, None)); // page 3 is held below them
        index.unhold(4);
        index.unhold(3);
        assert_eq!(index.evictable(), 4);
        index.hold(2);
        assert_eq!(index.evictable(), 2);
        index.check(|page| u32::from(page == 2)).unwrap();
        index.unhold(2);
        let order: Vec<PageId> = std::iter::from_fn(|| index.evict()).map(|(_, page)| page).collect();
        assert_eq!(order, [4, 3, 2, 1]);
        assert_eq!(index.find(Chain::Entry(a), &[2]), Err(()));
        assert_eq!(index.len(), 0);
    }
}
