//! A request's coming, emptying and going.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use super::events::KvEvent;
use super::ledger::{Ledger, Place, Request};
use super::prefix::Chain;
use super::stream::Stream;
use super::{KvConfig, Namespace};
use crate::resource::{Ingest, KvOverrides};
use crate::{Error, Label, RequestId, Result};

impl Ledger {
    /// Takes a request in and matches its prompts. One that is here already stays as it is.
    pub(super) fn ingest(&mut self, config: &KvConfig, namespace: &Namespace, ingest: &Ingest) -> Result<()> {
        if self.requests.contains_key(&ingest.request) {
            return Ok(());
        }
        for (i, (label, _)) in ingest.prompts.iter().enumerate() {
            if ingest.prompts[..i].iter().any(|(other, _)| other == label) {
                return Err(self.misuse(format!("request {}: two prompts for {label}", ingest.request)));
            }
        }
        let KvOverrides { max_seq_len, prefix_cache } = ingest.kv_overrides(&self.name);
        let max_seq_len = max_seq_len.unwrap_or(usize::MAX).min(config.max_seq_len);
        let indexed = config.prefix_cache && prefix_cache != Some(false);
        let root = indexed.then(|| Chain::Root(namespace.root(ingest.salt.as_deref())));
        let mut streams = BTreeMap::new();
        let mut hits = Vec::with_capacity(ingest.prompts.len());
        for (label, prompt) in &ingest.prompts {
            let (stream, tokens) =
                self.attach(config, (&ingest.request, label), root, prompt, max_seq_len)?;
            streams.insert(label.clone(), stream);
            hits.push((label.clone(), tokens));
        }
        let request = Request { root, streams, max_seq_len, place: Place::Resident, holds: 0, hits };
        self.requests.insert(ingest.request.clone(), request);
        Ok(())
    }

    /// Empties every stream of a request; with `free` its pages go back, else those that are its alone stay as
    /// spare ones. A step planned ahead on the old content is stale from now on.
    pub(super) fn reset(&mut self, request: &RequestId, free: bool) -> Result<()> {
        self.check_settled("reset_request", request)?;
        let running = self.steps.iter().find(|step| !step.ahead && step.names(request));
        if let Some(step) = running {
            let why = format!("step {} holds request {request}; commit or roll it back", step.serial);
            return Err(Error::Order { call: "reset_request", why });
        }
        let found = self.request_mut(request)?;
        let on_host = matches!(found.place, Place::Host(_));
        found.place = Place::Resident;
        let (root, streams) = (found.root, std::mem::take(&mut found.streams));
        for (label, old) in streams {
            let mut new = Stream::empty(self.next_generation(), root);
            if !on_host {
                let mut gone = Vec::new();
                for page in old.table.iter() {
                    // A page that others own, or that the index keeps, is never written again.
                    if !free && self.pool.owners(page)? == 1 && !self.pool.is_sealed(page)? {
                        new.table.push(page);
                    } else {
                        gone.push(page);
                    }
                }
                self.release_all(gone.into_iter())?;
            }
            self.request_mut(request)?.streams.insert(label, new);
        }
        Ok(())
    }

    /// Forgets a request. Its indexed pages stay in the index, as cached ones.
    pub(super) fn remove(&mut self, request: &RequestId) -> Result<()> {
        let Some(found) = self.requests.get(request) else { return Ok(()) };
        if found.holds > 0 {
            let why = format!("an outstanding step holds request {request}; commit or roll it back");
            return Err(Error::Order { call: "remove_request", why });
        }
        self.check_settled("remove_request", request)?;
        let found = self.requests.remove(request).expect("it was just found");
        if matches!(found.place, Place::Resident) {
            for stream in found.streams.values() {
                self.release_all(stream.table.iter())?;
            }
        }
        self.events.push(|| KvEvent::Removed { request: request.clone() });
        Ok(())
    }

    /// Distinct pages of the cache that a request holds.
    pub(super) fn pages_held(&self, request: &RequestId) -> Result<usize> {
        let found = self.request(request)?;
        let distinct =
            |pages: &mut dyn Iterator<Item = i32>| pages.collect::<std::collections::HashSet<_>>().len();
        Ok(match &found.place {
            Place::Host(_) => 0,
            Place::Returning(pages) => pages.len(),
            Place::Resident | Place::Leaving => {
                distinct(&mut found.streams.values().flat_map(|stream| stream.table.iter()))
            }
        })
    }

    /// A stored stream.
    pub(super) fn stream(&self, request: &RequestId, label: &Label) -> Result<&Stream> {
        let key = (request.clone(), label.clone());
        self.request(request)?.streams.get(label).ok_or_else(|| self.unknown_stream(&key))
    }
}
