//! Admission: what a step needs, counted and then taken, or refused with nothing changed.
//!
//! A step never touches the stored streams: it works on copies ([`Reservation::work`]), on top of what the step
//! before it will leave. What it takes from the pool (new pages, shares of forked ones) is written down as
//! claims, and what its commit gives back as drops. So a rollback releases claims, a commit installs the copies
//! and releases drops, and neither has anything to repair.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use mstar_kernels::mutant::planted;

use super::events::KvEvent;
use super::gate::Gate;
use super::ledger::{Ledger, Place};
use super::plan::Row;
use super::stream::{Stream, StreamKey};
use super::{KvConfig, PageId};
use crate::step::{Combined, Fork, KvStep};
use crate::{Error, Label, Outcome, Refusal, RefusalReason, RequestId, Result, Slot, StepSerial};

/// Steps that may be outstanding: the running one, and one planned ahead.
pub(super) const MAX_OUTSTANDING: usize = 2;

/// Pages that a step would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageNeed {
    /// Pages that the step would take, copies of shared ones among them.
    pub needed: usize,
    /// Pages free or evictable now.
    pub available: usize,
    /// Pages that requests may hold at most.
    pub total: usize,
}

/// One owner that a step added to a page.
#[derive(Clone, Copy, Debug)]
struct Claim {
    page: PageId,
    /// Taken from the free list, rather than shared.
    fresh: bool,
}

/// A stream's generation and length when a step built on it; `None` when there was none.
type Base = Option<(u64, usize)>;

/// An outstanding step.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) serial: StepSerial,
    pub(super) slot: Slot,
    pub(super) commit: bool,
    /// Planned ahead, and not promoted yet: nothing may be written.
    pub(super) ahead: bool,
    /// Segments in packed order.
    pub(super) rows: Vec<Row>,
    /// Each touched stream as the commit will leave it.
    pub(super) work: HashMap<StreamKey, Stream>,
    pub(super) combined: Vec<Combined>,
    /// Labels planned, once it is.
    pub(super) planned: Option<Vec<Label>>,
    /// Page copies before the first write, and the step's end.
    pub(super) gate: Arc<Gate>,
    /// What each touched stream was when the step was admitted.
    pub(super) bases: Vec<(StreamKey, Base)>,
    claims: Vec<Claim>,
    /// Owners that the commit gives up.
    drops: Vec<PageId>,
    copies: Vec<(PageId, PageId)>,
}

impl Reservation {
    fn new(serial: StepSerial, slot: Slot, ahead: bool, step: &KvStep) -> Reservation {
        Reservation {
            serial,
            slot,
            commit: step.commit,
            ahead,
            rows: Vec::with_capacity(step.segments.len()),
            work: HashMap::with_capacity(step.segments.len()),
            combined: step.combined.clone(),
            planned: None,
            gate: Arc::default(),
            bases: Vec::with_capacity(step.segments.len()),
            claims: Vec::new(),
            drops: Vec::new(),
            copies: Vec::new(),
        }
    }

    /// Pages that the step owns beside the stored streams, once for each time.
    pub(super) fn claimed(&self) -> impl Iterator<Item = PageId> + '_ {
        self.claims.iter().map(|claim| claim.page)
    }

    /// Whether the step touches a stream of this request.
    pub(super) fn names(&self, request: &RequestId) -> bool {
        self.work.keys().any(|(named, _)| named == request)
    }

    /// Requests named, each once.
    pub(super) fn requests(&self) -> BTreeSet<RequestId> {
        self.work.keys().map(|(request, _)| request.clone()).collect()
    }

    /// Owners that the commit gives up.
    pub(super) fn take_drops(&mut self) -> Vec<PageId> {
        std::mem::take(&mut self.drops)
    }
}

/// Why a reservation did not come about.
enum Stop {
    Refused(Outcome),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
}

impl Ledger {
    /// Admits a step: everything it needs is reserved, or nothing has changed.
    pub(super) fn admit(
        &mut self,
        config: &KvConfig,
        serial: StepSerial,
        slot: Slot,
        ahead: bool,
        step: &KvStep,
    ) -> Result<Outcome> {
        self.check_turn(serial, slot, ahead)?;
        self.check_step(step)?;
        let evicted = self.counters.evictions;
        let mut r = Reservation::new(serial, slot, ahead, step);
        match self.reserve(config, step, &mut r) {
            Ok(()) => {}
            Err(stop) => {
                self.unclaim(&mut r)?;
                return match stop {
                    Stop::Refused(outcome) => Ok(outcome),
                    Stop::Failed(error) => Err(error),
                };
            }
        }
        for request in r.requests() {
            self.request_mut(&request)?.holds += 1;
        }
        r.gate.record(std::mem::take(&mut r.copies));
        let pages = r.claims.iter().filter(|c| c.fresh).count();
        let evicted = (self.counters.evictions - evicted) as usize;
        self.events.push(|| KvEvent::Admitted { serial, pages, evicted });
        self.steps.push_back(r);
        Ok(Outcome::Admitted)
    }

    /// What a step would need, were it admitted after those outstanding. Nothing changes.
    pub(super) fn page_need(&mut self, config: &KvConfig, step: &KvStep) -> Result<PageNeed> {
        self.check_step(step)?;
        if let Some(stale) = (0..self.steps.len()).find(|&at| !self.stands(at)) {
            let why = format!("step {} is stale; promote or roll it back first", self.steps[stale].serial);
            return Err(Error::Order { call: "page_need", why });
        }
        let named = step.segments.iter().map(|s| &s.request);
        for request in named.chain(step.pre_forks.iter().map(|f| &f.request)) {
            if !matches!(self.request(request)?.place, Place::Resident) {
                return Err(self.misuse(format!("request {request} is offloaded; reload it first")));
            }
        }
        let mut r = Reservation::new(StepSerial(u64::MAX), Slot(usize::MAX), true, step);
        let counted = self.fork_all(config, &step.pre_forks, &mut r).and_then(|()| {
            step.segments.iter().try_fold(0, |sum, segment| {
                let key = (segment.request.clone(), segment.label.clone());
                let (copied, grown) = self.count(config, &key, segment.span, &r)?;
                Ok::<_, Stop>(sum + copied + grown)
            })
        });
        self.unclaim(&mut r)?;
        match counted {
            Ok(needed) => Ok(PageNeed { needed, available: self.available(), total: config.usable_pages() }),
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::Refused(_)) => Err(Error::Invariant("counting refuses nothing".into())),
        }
    }

    /// At most two steps, the second planned ahead into a slot of its own.
    fn check_turn(&self, serial: StepSerial, slot: Slot, ahead: bool) -> Result<()> {
        let why = match self.steps.back() {
            Some(_) if self.steps.iter().any(|step| step.serial == serial) => {
                format!("step {serial} is admitted already")
            }
            Some(_) if self.steps.len() == MAX_OUTSTANDING => {
                format!("{MAX_OUTSTANDING} steps are outstanding; commit or roll back one")
            }
            Some(last) if last.ahead => {
                format!("step {} was planned ahead; promote it before planning on top of it", last.serial)
            }
            Some(running) if !ahead => {
                format!("step {} is outstanding; commit it, or plan ahead", running.serial)
            }
            Some(running) if running.slot == slot => {
                format!("slot {} belongs to step {}, which is outstanding", slot.0, running.serial)
            }
            _ => return Ok(()),
        };
        Err(Error::Order { call: "admit", why })
    }

    /// Refuses a step that could never be admitted.
    fn check_step(&self, step: &KvStep) -> Result<()> {
        let mut seen = std::collections::HashSet::with_capacity(step.segments.len());
        for s in &step.segments {
            if !seen.insert((&s.request, &s.label)) {
                return Err(self.misuse(format!("request {} ({}) has two segments", s.request, s.label)));
            }
            if !s.tokens.is_empty() && s.tokens.len() != s.span {
                let got = s.tokens.len();
                let why = format!(
                    "request {} ({}): {got} content keys for a span of {}; give one each or none",
                    s.request, s.label, s.span
                );
                return Err(self.misuse(why));
            }
            self.request(&s.request)?;
        }
        for fork in step.pre_forks.iter().chain(&step.post_forks) {
            self.request(&fork.request)?;
            if fork.from == fork.to {
                return Err(self.misuse(format!("request {} forks {} onto itself", fork.request, fork.to)));
            }
        }
        let mut grouped = std::collections::HashSet::new();
        for group in &step.combined {
            for part in &group.parts {
                if !step.segments.iter().any(|s| s.label == *part) {
                    let why = format!("group {} names label {part}, which no segment has", group.label);
                    return Err(self.misuse(why));
                }
                if !grouped.insert(part) {
                    return Err(self.misuse(format!("label {part} is in two groups, or twice in one")));
                }
            }
        }
        for (i, group) in step.combined.iter().enumerate() {
            let taken = step.segments.iter().any(|s| s.label == group.label && !grouped.contains(&s.label))
                || step.combined[..i].iter().any(|other| other.label == group.label);
            if taken {
                return Err(self.misuse(format!("two plans would be called {}", group.label)));
            }
        }
        Ok(())
    }

    fn reserve(
        &mut self,
        config: &KvConfig,
        step: &KvStep,
        r: &mut Reservation,
    ) -> std::result::Result<(), Stop> {
        let segments = step.segments.iter().map(|s| &s.request);
        let forks = step.pre_forks.iter().chain(&step.post_forks).map(|f| &f.request);
        for request in segments.chain(forks) {
            let reason = RefusalReason::RequestOffloading { request: request.clone() };
            let refusal = Refusal { resource: self.name.clone(), reason };
            match self.request(request)?.place {
                Place::Resident => {}
                Place::Host(_) => return Err(Stop::Refused(Outcome::Refused(refusal))),
                Place::Leaving | Place::Returning(_) => {
                    return Err(Stop::Refused(Outcome::NotReady(refusal)));
                }
            }
        }
        self.fork_all(config, &step.pre_forks, r)?;
        self.check_post_forks(step, r)?;

        let available = self.available();
        let mut needs = Vec::with_capacity(step.segments.len());
        let (mut needed, mut first_short) = (0, None);
        for segment in &step.segments {
            let key = (segment.request.clone(), segment.label.clone());
            let stored = self.working(r, &key).map_or(0, |s| s.len);
            let tokens = stored.saturating_add(segment.span);
            let max_seq_len = self.request(&key.0)?.max_seq_len;
            if tokens > max_seq_len {
                let (request, label) = key;
                let reason = RefusalReason::SequenceTooLong { request, label, tokens, max_seq_len };
                return Err(Stop::Refused(Outcome::Refused(Refusal { resource: self.name.clone(), reason })));
            }
            let need = self.count(config, &key, segment.span, r)?;
            needed += need.0 + need.1;
            if needed > available && first_short.is_none() {
                first_short = Some(key.clone());
            }
            needs.push((key, need));
        }
        if let Some((request, label)) = first_short {
            let (pages_short, pages_needed) = (needed - available, needed);
            let reason = RefusalReason::AllocationFailed { pages_short, pages_needed, request, label };
            return Err(Stop::Refused(Outcome::Refused(Refusal { resource: self.name.clone(), reason })));
        }

        let mut fresh = self.take(needed)?.into_iter();
        // All are claimed before any is placed, so that whatever goes wrong gives all of them back.
        r.claims.extend(fresh.as_slice().iter().map(|&page| Claim { page, fresh: true }));
        for (segment, (key, (_, grown))) in step.segments.iter().zip(needs) {
            let mut stream = self.check_out(r, &key)?;
            let mut next = || fresh.next().ok_or_else(|| Error::Invariant("counted too few pages".into()));
            for i in stream.written_pages(segment.span, config.page_size) {
                let page = stream.table.get(i).expect("written pages are listed");
                if self.is_shared(page)? {
                    let copy = next()?;
                    stream.table.replace(i, copy);
                    stream.generation = self.next_generation();
                    r.copies.push((page, copy));
                    r.drops.push(page);
                    self.counters.copies += 1;
                }
            }
            for _ in 0..grown {
                stream.table.push(next()?);
            }
            stream.len += segment.span;
            stream.content.append(segment.span, &segment.tokens);
            r.rows.push(Row {
                request: key.0.clone(),
                label: key.1.clone(),
                span: segment.span,
                stream: stream.clone(),
            });
            r.drops.extend(stream.retire(config));
            r.work.insert(key, stream);
        }
        self.fork_all(config, &step.post_forks, r)
    }

    /// Refuses forks at commit of a stream that will not be there, before any page is taken or evicted.
    fn check_post_forks(&self, step: &KvStep, r: &Reservation) -> Result<()> {
        for (i, fork) in step.post_forks.iter().enumerate() {
            let from = (fork.request.clone(), fork.from.clone());
            let extended = step.segments.iter().any(|s| s.request == from.0 && s.label == from.1);
            let forked = step.post_forks[..i].iter().any(|f| f.request == from.0 && f.to == from.1);
            if !extended && !forked && self.working(r, &from).is_none() {
                return Err(self.unknown_stream(&from));
            }
        }
        Ok(())
    }

    /// Pages that a segment copies, and pages that it adds.
    fn count(
        &self,
        config: &KvConfig,
        key: &StreamKey,
        span: usize,
        r: &Reservation,
    ) -> std::result::Result<(usize, usize), Stop> {
        let Some(stream) = self.working(r, key) else {
            return Ok((0, span.div_ceil(config.page_size)));
        };
        let mut copied = 0;
        for i in stream.written_pages(span, config.page_size) {
            let page = stream.table.get(i).expect("written pages are listed");
            copied += usize::from(self.is_shared(page)?);
        }
        Ok((copied, stream.pages_to_grow(span, config.page_size)))
    }

    /// Whether a page must be copied before a stream that owns it writes to it.
    fn is_shared(&self, page: PageId) -> Result<bool> {
        let alone = if planted("fork-writes-shared-page") { 2 } else { 1 };
        Ok(self.pool.owners(page)? > alone || self.pool.is_sealed(page)?)
    }

    /// A stream as the step has it so far.
    fn working<'a>(&'a self, r: &'a Reservation, key: &StreamKey) -> Option<&'a Stream> {
        r.work.get(key).or_else(|| self.projected(key))
    }

    /// The step's own copy of a stream, to be put back; an empty one when there is none.
    fn check_out(&mut self, r: &mut Reservation, key: &StreamKey) -> Result<Stream> {
        if let Some(stream) = r.work.remove(key) {
            return Ok(stream);
        }
        let found = self.projected(key).cloned();
        r.bases.push((key.clone(), found.as_ref().map(|s| (s.generation, s.len))));
        match found {
            Some(stream) => Ok(stream),
            None => {
                let root = self.request(&key.0)?.root;
                Ok(Stream::empty(self.next_generation(), root))
            }
        }
    }

    /// Makes forks in order: all pages are shared, and one more owner is claimed for each.
    fn fork_all(
        &mut self,
        config: &KvConfig,
        forks: &[Fork],
        r: &mut Reservation,
    ) -> std::result::Result<(), Stop> {
        for fork in forks {
            let from = (fork.request.clone(), fork.from.clone());
            let to = (fork.request.clone(), fork.to.clone());
            if self.working(r, &from).is_none() {
                return Err(self.unknown_stream(&from).into());
            }
            let source = self.check_out(r, &from)?;
            let made = source.forked(self.next_generation(), config.page_size);
            r.work.insert(from, source);
            for page in made.table.iter() {
                self.retain(page)?;
                r.claims.push(Claim { page, fresh: false });
            }
            let replaced = self.check_out(r, &to)?;
            r.drops.extend(replaced.table.iter());
            r.work.insert(to, made);
        }
        Ok(())
    }

    /// Gives back everything that a step claimed, so that the pool is as it was.
    pub(super) fn unclaim(&mut self, r: &mut Reservation) -> Result<()> {
        let forgotten = usize::from(planted("rollback-forgets-page"));
        for claim in std::mem::take(&mut r.claims).into_iter().skip(forgotten).rev() {
            if claim.fresh {
                self.pool.unallocate(claim.page)?;
            } else {
                self.release(claim.page)?;
            }
        }
        Ok(())
    }
}
