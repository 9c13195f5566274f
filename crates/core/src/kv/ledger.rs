//! The bookkeeping of a cache, all of it under the store's one lock: requests, pages, index, steps, plans.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::events::{EventLog, KvEvent};
use super::memory::HostPages;
use super::page_pool::{PagePool, Released};
use super::plan::PlanShelf;
use super::prefix::{Chain, PrefixIndex};
use super::reserve::Reservation;
use super::stats::Counters;
use super::stream::{Stream, StreamKey};
use super::{KvConfig, PageHash, PageId};
use crate::{Error, Label, RequestId, ResourceName, Result};

/// Where a request's pages are.
#[derive(Debug)]
pub(super) enum Place {
    /// In the cache.
    Resident,
    /// Being copied to the host; tables still list the cache's pages.
    Leaving,
    /// On the host; tables list ordinals of the saved pages.
    Host(HostPages),
    /// Being copied back into these pages; tables still list ordinals.
    Returning(Vec<PageId>),
}

/// One request.
#[derive(Debug)]
pub(super) struct Request {
    /// Where its streams' page keys chain from; `None` when pages are not indexed.
    pub(super) root: Option<Chain>,
    pub(super) streams: BTreeMap<Label, Stream>,
    /// Tokens that each of its streams may hold.
    pub(super) max_seq_len: usize,
    pub(super) place: Place,
    /// Outstanding steps that name it.
    pub(super) holds: usize,
    /// Tokens found in the prefix index when it came in.
    pub(super) hits: Vec<(Label, usize)>,
}

/// Everything that the lock guards.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) name: ResourceName,
    pub(super) pool: PagePool,
    pub(super) index: PrefixIndex,
    pub(super) requests: HashMap<RequestId, Request>,
    /// Outstanding steps, oldest first: at most two.
    pub(super) steps: VecDeque<Reservation>,
    pub(super) plans: PlanShelf,
    pub(super) events: EventLog,
    pub(super) counters: Counters,
    generations: u64,
}

impl Ledger {
    pub(super) fn new(name: ResourceName, config: &KvConfig, hash: PageHash) -> Ledger {
        Ledger {
            name,
            pool: PagePool::new(config.max_num_pages),
            index: PrefixIndex::new(hash),
            requests: HashMap::new(),
            steps: VecDeque::new(),
            plans: PlanShelf::default(),
            events: EventLog::default(),
            counters: Counters::default(),
            generations: 0,
        }
    }

    /// A generation that no stream of this cache has had.
    pub(super) fn next_generation(&mut self) -> u64 {
        self.generations += 1;
        self.generations
    }

    pub(super) fn request(&self, request: &RequestId) -> Result<&Request> {
        self.requests.get(request).ok_or_else(|| self.unknown_request(request))
    }

    pub(super) fn request_mut(&mut self, request: &RequestId) -> Result<&mut Request> {
        match self.requests.get_mut(request) {
            Some(found) => Ok(found),
            None => Err(Error::UnknownRequest { resource: self.name.clone(), request: request.clone() }),
        }
    }

    pub(super) fn unknown_request(&self, request: &RequestId) -> Error {
        Error::UnknownRequest { resource: self.name.clone(), request: request.clone() }
    }

    pub(super) fn unknown_stream(&self, (request, label): &StreamKey) -> Error {
        let (request, label) = (request.clone(), label.clone());
        Error::UnknownStream { resource: self.name.clone(), request, label }
    }

    pub(super) fn misuse(&self, why: impl Into<String>) -> Error {
        Error::Step { resource: self.name.clone(), why: why.into() }
    }

    /// A stream as the outstanding steps' commits will leave it.
    pub(super) fn projected(&self, key: &StreamKey) -> Option<&Stream> {
        let ahead = self.steps.iter().rev().filter(|step| step.commit).find_map(|step| step.work.get(key));
        ahead.or_else(|| self.stored(key))
    }

    /// A stream as it is stored.
    pub(super) fn stored(&self, (request, label): &StreamKey) -> Option<&Stream> {
        self.requests.get(request)?.streams.get(label)
    }

    /// Pages that a step can have: the free ones and those that the prefix index would give up.
    pub(super) fn available(&self) -> usize {
        self.pool.free() + self.index.evictable()
    }

    /// One more owner of an allocated or cached page.
    pub(super) fn retain(&mut self, page: PageId) -> Result<()> {
        if self.pool.retain(page)? {
            self.index.hold(page);
        }
        Ok(())
    }

    /// One owner less; a page without owners is cached when it is indexed, else free.
    pub(super) fn release(&mut self, page: PageId) -> Result<()> {
        if self.pool.release(page)? == Released::Cached {
            self.index.unhold(page);
        }
        Ok(())
    }

    /// Releases pages in reverse, so that of a chain the later page becomes the less recently used.
    pub(super) fn release_all(&mut self, pages: impl DoubleEndedIterator<Item = PageId>) -> Result<()> {
        pages.rev().try_for_each(|page| self.release(page))
    }

    /// Takes `count` pages, evicting what must go. The caller has seen that they are available.
    pub(super) fn take(&mut self, count: usize) -> Result<Vec<PageId>> {
        while self.pool.free() < count {
            let Some((entry, page)) = self.index.evict() else {
                let (free, counted) = (self.pool.free(), self.index.evictable());
                return Err(Error::Invariant(format!(
                    "{count} pages were promised; {free} are free and none of {counted} can be evicted"
                )));
            };
            self.pool.evict(page)?;
            self.counters.evictions += 1;
            self.events.push(|| KvEvent::Evicted { entry });
        }
        Ok((0..count).map_while(|_| self.pool.allocate()).collect())
    }

    /// Walks everything: pool, index, and that each page has exactly the owners that name it.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        self.pool.check()?;
        self.index.check(|page| self.pool.owners(page).unwrap_or(0))?;
        let mut owners = vec![0u32; self.pool.total()];
        let mut count = |page: PageId| owners[page as usize] += 1;
        for request in self.requests.values() {
            match &request.place {
                Place::Resident | Place::Leaving => {
                    request.streams.values().flat_map(|s| s.table.iter()).for_each(&mut count);
                }
                Place::Returning(pages) => pages.iter().copied().for_each(&mut count),
                Place::Host(_) => {}
            }
        }
        self.steps.iter().flat_map(|step| step.claimed()).for_each(&mut count);
        for (page, &named) in owners.iter().enumerate().skip(1) {
            let owned = self.pool.owners(page as PageId).map_err(|e| e.to_string())?;
            if owned != named {
                return Err(format!("page {page} has {owned} owners, {named} name it"));
            }
        }
        let sealed = (1..self.pool.total()).filter(|&p| self.pool.is_sealed(p as PageId) == Ok(true)).count();
        if sealed != self.index.len() {
            return Err(format!("{sealed} pages are sealed, the index has {}", self.index.len()));
        }
        for (id, request) in &self.requests {
            let named = self.steps.iter().filter(|step| step.names(id)).count();
            if request.holds != named {
                return Err(format!("request {id} is held {} times, {named} steps name it", request.holds));
            }
        }
        Ok(())
    }
}
