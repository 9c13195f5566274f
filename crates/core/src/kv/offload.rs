//! Whole requests to the host's memory and back. Bookkeeping under the lock, copies outside it: a request in
//! between is admitted to nothing, and its pages are nobody else's until their copy is done.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::mem::replace;

use super::events::KvEvent;
use super::ledger::{Ledger, Place};
use super::memory::HostPages;
use super::page_table::PageTable;
use super::{KvConfig, PageId};
use crate::{Error, Label, Outcome, Refusal, RefusalReason, RequestId, Result};

/// How a reload begins.
pub(super) enum Reload {
    /// The request is resident already.
    Here,
    /// Not now, or not while things are as they are.
    Not(Outcome),
    /// These saved pages go into these.
    Copy(HostPages, Vec<PageId>),
}

fn in_flight<T>(call: &'static str, request: &RequestId) -> Result<T> {
    let why = format!("request {request} is on its way to or from the host; wait for that call to return");
    Err(Error::Order { call, why })
}

impl Ledger {
    /// Marks a request as leaving: its distinct pages, in the order in which they are to be saved. `None` when
    /// it is on the host already.
    pub(super) fn begin_offload(
        &mut self,
        config: &KvConfig,
        request: &RequestId,
    ) -> Result<Option<Vec<PageId>>> {
        let found = self.request(request)?;
        match found.place {
            Place::Resident if found.holds > 0 => {
                let why = format!("an outstanding step holds request {request}; commit or roll it back");
                return Err(Error::Order { call: "offload", why });
            }
            Place::Resident => {}
            Place::Host(_) => return Ok(None),
            Place::Leaving | Place::Returning(_) => return in_flight("offload", request),
        }
        // Spare pages hold nothing: they stay behind.
        let mut spare = Vec::new();
        for stream in self.request_mut(request)?.streams.values_mut() {
            let used = stream.used_pages(stream.len, config.page_size);
            spare.extend(stream.table.iter().skip(used));
            stream.table.truncate(used);
        }
        self.release_all(spare.into_iter())?;
        let found = self.request_mut(request)?;
        found.place = Place::Leaving;
        let mut seen = std::collections::HashSet::new();
        let pages = found.streams.values().flat_map(|stream| stream.table.iter());
        Ok(Some(pages.filter(|&page| seen.insert(page)).collect()))
    }

    /// The copy is done (or, with `None`, could not be made): gives the pages back.
    pub(super) fn end_offload(
        &mut self,
        request: &RequestId,
        pages: &[PageId],
        host: Option<HostPages>,
    ) -> Result<()> {
        let Some(host) = host else {
            self.request_mut(request)?.place = Place::Resident;
            return Ok(());
        };
        let ordinals: HashMap<PageId, PageId> = pages.iter().copied().zip(0..).collect();
        self.counters.offloads += 1;
        self.counters.offloaded_bytes += host.bytes() as u64;
        self.request_mut(request)?.place = Place::Host(host);
        let labels: Vec<Label> = self.request(request)?.streams.keys().cloned().collect();
        let mut released = Vec::new();
        for label in labels {
            let generation = self.next_generation();
            let streams = &mut self.request_mut(request)?.streams;
            let stream = streams.get_mut(&label).expect("its label was just listed");
            let moved = stream.table.iter().map(|page| ordinals[&page]).collect();
            released.extend(replace(&mut stream.table, PageTable::new(moved)).to_vec());
            stream.generation = generation;
        }
        self.release_all(released.into_iter())?;
        self.events.push(|| KvEvent::Offloaded { request: request.clone(), pages: pages.len() });
        Ok(())
    }

    /// Takes the pages that a request needs to come back, all or none.
    pub(super) fn begin_reload(&mut self, request: &RequestId) -> Result<Reload> {
        let pages_needed = match &self.request(request)?.place {
            Place::Resident => return Ok(Reload::Here),
            Place::Host(host) => host.pages(),
            Place::Leaving | Place::Returning(_) => {
                let reason = RefusalReason::RequestOffloading { request: request.clone() };
                return Ok(Reload::Not(Outcome::NotReady(Refusal { resource: self.name.clone(), reason })));
            }
        };
        if let Some(pages_short) = pages_needed.checked_sub(self.available()).filter(|&short| short > 0) {
            let streams = &self.request(request)?.streams;
            let label = streams.iter().find(|(_, s)| s.table.len() > 0).map(|(label, _)| label.clone());
            let reason = RefusalReason::AllocationFailed {
                pages_short,
                pages_needed,
                request: request.clone(),
                label: label.unwrap_or_else(Label::main),
            };
            return Ok(Reload::Not(Outcome::Refused(Refusal { resource: self.name.clone(), reason })));
        }
        let pages = self.take(pages_needed)?;
        match replace(&mut self.request_mut(request)?.place, Place::Returning(pages.clone())) {
            Place::Host(host) => Ok(Reload::Copy(host, pages)),
            _ => Err(Error::Invariant("a request on the host was elsewhere".into())),
        }
    }

    /// Gives the pages of a reload back whose copy failed; the request is where it was.
    pub(super) fn cancel_reload(
        &mut self,
        request: &RequestId,
        host: HostPages,
        pages: &[PageId],
    ) -> Result<()> {
        self.request_mut(request)?.place = Place::Host(host);
        self.release_all(pages.iter().copied())
    }

    /// The copy is done: the request is resident again.
    pub(super) fn end_reload(&mut self, request: &RequestId, pages: &[PageId]) -> Result<()> {
        let labels: Vec<Label> = self.request(request)?.streams.keys().cloned().collect();
        let mut named = vec![false; pages.len()];
        for label in labels {
            let generation = self.next_generation();
            let streams = &mut self.request_mut(request)?.streams;
            let stream = streams.get_mut(&label).expect("its label was just listed");
            let ordinals = stream.table.to_vec();
            stream.table = PageTable::new(ordinals.iter().map(|&at| pages[at as usize]).collect());
            stream.generation = generation;
            // The first stream to list a page takes the owner that the reload gave it; others add theirs.
            for at in ordinals {
                if replace(&mut named[at as usize], true) {
                    self.retain(pages[at as usize])?;
                }
            }
        }
        self.request_mut(request)?.place = Place::Resident;
        self.counters.reloads += 1;
        self.events.push(|| KvEvent::Reloaded { request: request.clone(), pages: pages.len() });
        Ok(())
    }

    /// Refuses what cannot be done to a request while it moves.
    pub(super) fn check_settled(&self, call: &'static str, request: &RequestId) -> Result<()> {
        match self.request(request)?.place {
            Place::Resident | Place::Host(_) => Ok(()),
            Place::Leaving | Place::Returning(_) => in_flight(call, request),
        }
    }
}
