//! Who owns which page: a first-in first-out free list, owner counts, and sealed pages.
//!
//! Every page but the sink is in exactly one state: *free* (on the list), *held* (one owner or more) or *cached*
//! (no owner, but its content is in the prefix index: it is *sealed*). So free + cached + held = total - 1.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use mstar_kernels::mutant::planted;

use super::SINK_PAGE;

/// A page's id: its index in every layer of every plane.
pub type PageId = i32;

/// A page operation that would have given a page two owners, or freed one twice. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// More releases than owners.
    #[error("page {page} is released more often than it is owned ({owners} owners)")]
    DoubleFree {
        /// The page.
        page: PageId,
        /// Owners that it has.
        owners: u32,
    },
    /// A page that is on the free list.
    #[error("page {page} is free; allocate it first")]
    NotAllocated {
        /// The page.
        page: PageId,
    },
    /// An id that is no page of this cache.
    #[error("page {page} is outside the cache, which has pages 1..{total}")]
    OutOfRange {
        /// The id.
        page: PageId,
        /// Pages, the sink among them.
        total: usize,
    },
    /// Page 0 belongs to nobody.
    #[error("page {SINK_PAGE} is the sink, which no request is given")]
    Sink,
    /// A page sealed twice, or unsealed while it is owned or was never sealed.
    #[error("page {page} cannot change its seal: {owners} owners, sealed: {sealed}")]
    Seal {
        /// The page.
        page: PageId,
        /// Owners that it has.
        owners: u32,
        /// Whether it is sealed.
        sealed: bool,
    },
}

/// Where a page goes when it loses its last owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// Others still own it.
    Owned,
    /// Nobody owns it, and the prefix index keeps its content.
    Cached,
    /// It is on the free list.
    Free,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PageState {
    owners: u32,
    sealed: bool,
    free: bool,
}

/// The pages of one cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePool {
    pages: Vec<PageState>,
    free: VecDeque<PageId>,
    cached: usize,
}

impl PagePool {
    /// A pool of `total` pages, the sink among them; all others free, in order.
    pub fn new(total: usize) -> PagePool {
        let mut pages = vec![PageState { free: true, ..PageState::default() }; total];
        if let Some(sink) = pages.first_mut() {
            sink.free = false;
        }
        let free = (1..total).map(|p| PageId::try_from(p).expect("page ids are checked to fit")).collect();
        PagePool { pages, free, cached: 0 }
    }

    /// Pages, the sink among them.
    pub fn total(&self) -> usize {
        self.pages.len()
    }

    /// Pages on the free list.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages that only the prefix index keeps.
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Pages with an owner.
    pub fn held(&self) -> usize {
        self.pages.len().saturating_sub(1) - self.free.len() - self.cached
    }

    /// Owners of a page.
    ///
    /// # Errors
    /// [`PageError::Sink`] and [`PageError::OutOfRange`].
    pub fn owners(&self, page: PageId) -> Result<u32, PageError> {
        Ok(self.state(page)?.owners)
    }

    /// Whether the prefix index keeps a page's content, which then never changes.
    ///
    /// # Errors
    /// [`PageError::Sink`] and [`PageError::OutOfRange`].
    pub fn is_sealed(&self, page: PageId) -> Result<bool, PageError> {
        Ok(self.state(page)?.sealed)
    }

    fn state(&self, page: PageId) -> Result<PageState, PageError> {
        if page == SINK_PAGE {
            return Err(PageError::Sink);
        }
        let state = usize::try_from(page).ok().and_then(|p| self.pages.get(p));
        state.copied().ok_or(PageError::OutOfRange { page, total: self.pages.len() })
    }

    /// Only for ids that `state` accepted.
    fn entry(&mut self, page: PageId) -> &mut PageState {
        &mut self.pages[page as usize]
    }

    /// The page that has been free longest, with one owner; `None` when none is free.
    pub fn allocate(&mut self) -> Option<PageId> {
        let page = self.free.pop_front()?;
        *self.entry(page) = PageState { owners: 1, sealed: false, free: false };
        Some(page)
    }

    /// One more owner; `true` when the page had none and was only cached.
    ///
    /// # Errors
    /// A page that is free, the sink, or outside the pool.
    pub fn retain(&mut self, page: PageId) -> Result<bool, PageError> {
        let state = self.state(page)?;
        if state.free {
            return Err(PageError::NotAllocated { page });
        }
        self.entry(page).owners += 1;
        self.cached -= usize::from(state.owners == 0);
        Ok(state.owners == 0)
    }

    /// One owner less.
    ///
    /// # Errors
    /// A page without owners, the sink, or an id outside the pool.
    pub fn release(&mut self, page: PageId) -> Result<Released, PageError> {
        self.release_to(page, false)
    }

    /// As [`PagePool::release`], but a page that becomes free is the next to be given out: undoes `allocate`.
    ///
    /// # Errors
    /// As [`PagePool::release`].
    pub fn unallocate(&mut self, page: PageId) -> Result<Released, PageError> {
        self.release_to(page, true)
    }

    fn release_to(&mut self, page: PageId, front: bool) -> Result<Released, PageError> {
        let state = self.state(page)?;
        if state.free {
            return Err(PageError::NotAllocated { page });
        }
        let Some(owners) = state.owners.checked_sub(1) else {
            return Err(PageError::DoubleFree { page, owners: 0 });
        };
        self.entry(page).owners = owners;
        if owners > 0 && !planted("free-referenced-page") {
            return Ok(Released::Owned);
        }
        if state.sealed {
            self.cached += 1;
            return Ok(Released::Cached);
        }
        self.entry(page).free = true;
        if front {
            self.free.push_front(page);
        } else {
            self.free.push_back(page);
        }
        Ok(Released::Free)
    }

    /// One owner less for each entry, all or nothing: a page named more often than it is owned frees none.
    ///
    /// # Errors
    /// As [`PagePool::release`], for the first page at fault.
    pub fn release_all(&mut self, pages: &[PageId]) -> Result<(), PageError> {
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        for same in sorted.chunk_by(|a, b| a == b) {
            let state = self.state(same[0])?;
            if state.free {
                return Err(PageError::NotAllocated { page: same[0] });
            }
            if (state.owners as usize) < same.len() {
                return Err(PageError::DoubleFree { page: same[0], owners: state.owners });
            }
        }
        pages.iter().try_for_each(|&page| self.release(page).map(|_| ()))
    }

    /// Marks an owned page as kept by the prefix index.
    ///
    /// # Errors
    /// A page without an owner, or sealed already.
    pub fn seal(&mut self, page: PageId) -> Result<(), PageError> {
        let PageState { owners, sealed, .. } = self.state(page)?;
        if owners == 0 || sealed {
            return Err(PageError::Seal { page, owners, sealed });
        }
        self.entry(page).sealed = true;
        Ok(())
    }

    /// Gives a cached page back to the free list: the prefix index has forgotten it.
    ///
    /// # Errors
    /// A page that is owned, or not sealed.
    pub fn evict(&mut self, page: PageId) -> Result<(), PageError> {
        let PageState { owners, sealed, .. } = self.state(page)?;
        if owners > 0 || !sealed {
            return Err(PageError::Seal { page, owners, sealed });
        }
        *self.entry(page) = PageState { owners: 0, sealed: false, free: true };
        self.cached -= 1;
        self.free.push_back(page);
        Ok(())
    }

    /// Walks every page: each is in one state, the list holds the free ones once, the counts add up.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check(&self) -> Result<(), String> {
        let mut listed = vec![false; self.pages.len()];
        for &page in &self.free {
            let state = self.state(page).map_err(|e| e.to_string())?;
            if !state.free || state.owners > 0 || state.sealed || listed[page as usize] {
                return Err(format!("page {page} is on the free list but is {state:?}, or is there twice"));
            }
            listed[page as usize] = true;
        }
        let free = self.pages.iter().filter(|s| s.free).count();
        let cached = self.pages.iter().skip(1).filter(|s| !s.free && s.owners == 0 && s.sealed).count();
        let held = self.pages.iter().filter(|s| s.owners > 0).count();
        if free != self.free.len() || cached != self.cached || free + cached + held != self.total() - 1 {
            return Err(format!(
                "{free} free ({} listed) + {cached} cached ({} counted) + {held} held is not {} - 1",
                self.free.len(),
                self.cached,
                self.total()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f29_a_page_is_freed_once_or_the_error_names_it() {
        let mut pool = PagePool::new(8);
        let p = pool.allocate().unwrap();
        let before = pool.clone();
        assert_eq!(pool.release_all(&[p, p]), Err(PageError::DoubleFree { page: p, owners: 1 }));
        assert_eq!(pool.release(5), Err(PageError::NotAllocated { page: 5 }));
        assert_eq!(pool.release(8), Err(PageError::OutOfRange { page: 8, total: 8 }));
        assert_eq!(pool.release(-1), Err(PageError::OutOfRange { page: -1, total: 8 }));
        assert_eq!(pool.release(SINK_PAGE), Err(PageError::Sink));
        assert_eq!(pool.retain(5), Err(PageError::NotAllocated { page: 5 }));
        assert_eq!(pool, before);
        pool.release(p).unwrap();
        assert_eq!(pool.release(p), Err(PageError::NotAllocated { page: p }));
        let mut all: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3, 4, 5, 6, 7]);
        pool.check().unwrap();
    }

    proptest::proptest! {
        /// Whatever is asked, in whatever order: each page has the owners that were added less those released.
        #[test]
        fn f29_no_page_is_in_two_states(ops in proptest::collection::vec((0..6u8, 0..10i32), 1..200)) {
            let mut pool = PagePool::new(8);
            let (mut owners, mut sealed) = ([0u32; 8], [false; 8]);
            for (op, page) in ops {
                let at = page as usize;
                let owned = (1..8).contains(&page) && owners[at] > 0;
                let cached = (1..8).contains(&page) && owners[at] == 0 && sealed[at];
                match op {
                    0 => match pool.allocate() {
                        Some(got) => {
                            assert!(owners[got as usize] == 0 && !sealed[got as usize]);
                            owners[got as usize] = 1;
                        }
                        None => assert!((1..8).all(|p| owners[p] > 0 || sealed[p])),
                    },
                    1 => {
                        assert_eq!(pool.retain(page).is_ok(), owned || cached);
                        if owned || cached {
                            owners[at] += 1;
                        }
                    }
                    2 => {
                        assert_eq!(pool.release(page).is_ok(), owned);
                        if owned {
                            owners[at] -= 1;
                        }
                    }
                    3 => {
                        let twice = pool.release_all(&[page, page]).is_ok();
                        assert_eq!(twice, owned && owners[at] >= 2);
                        if twice {
                            owners[at] -= 2;
                        }
                    }
                    4 => {
                        let done = pool.seal(page).is_ok();
                        assert_eq!(done, owned && !sealed[at]);
                        if done {
                            sealed[at] = true;
                        }
                    }
                    _ => {
                        assert_eq!(pool.evict(page).is_ok(), cached);
                        if cached {
                            sealed[at] = false;
                        }
                    }
                }
                pool.check().unwrap();
                assert_eq!(pool.free() + pool.cached() + pool.held(), 7);
                assert!((1..8).all(|p| pool.owners(p as PageId) == Ok(owners[p])));
            }
        }
    }

    #[test]
    fn the_longest_free_page_comes_first_and_an_undone_allocation_leaves_no_trace() {
        let mut pool = PagePool::new(4);
        let (a, b) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        pool.release(a).unwrap();
        assert_eq!(pool.allocate(), Some(3));
        assert_eq!(pool.allocate(), Some(a));
        pool.release_all(&[b, 3]).unwrap();
        let before = pool.clone();
        let (x, y) = (pool.allocate().unwrap(), pool.allocate().unwrap());
        pool.unallocate(y).unwrap();
        pool.unallocate(x).unwrap();
        assert_eq!(pool, before);
    }

    #[test]
    fn a_sealed_page_without_owners_is_cached_until_evicted() {
        let mut pool = PagePool::new(3);
        let p = pool.allocate().unwrap();
        assert!(pool.evict(p).is_err());
        pool.seal(p).unwrap();
        assert!(pool.seal(p).is_err() && pool.evict(p).is_err());
        assert_eq!(pool.release(p), Ok(Released::Cached));
        assert_eq!(pool.release(p), Err(PageError::DoubleFree { page: p, owners: 0 }));
        assert_eq!((pool.free(), pool.cached(), pool.held()), (1, 1, 0));
        assert_eq!(pool.retain(p), Ok(true));
        assert_eq!(pool.retain(p), Ok(false));
        pool.release_all(&[p, p]).unwrap();
        pool.check().unwrap();
        pool.evict(p).unwrap();
        assert_eq!((pool.free(), pool.cached(), pool.held()), (2, 0, 0));
        pool.check().unwrap();
    }
}
