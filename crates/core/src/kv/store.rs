//! The paged store: one cache's memory and bookkeeping behind one lock, shared by reference.
//!
//! The lock guards the ledger alone and is never held over a copy or a write. What keeps memory apart without
//! it: a page is written by the step that claimed it, or by the one stream that owns it; a step planned ahead
//! writes nothing before it is promoted; copies come before a step's first write, and a step ends only when
//! its writes have (its gate). A request on its way to or from the host is admitted to nothing.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mstar_kernels::mutant::planted;
use mstar_kernels::{Stream, TensorRef};

use super::gate::{Barred, Extent, Gate};
use super::ledger::{Ledger, Place};
use super::memory::KvMemory;
use super::offload::Reload;
use super::prefix::blake3_page;
use super::slots::StagedSlots;
use super::stats::{KvStats, StreamState};
use super::{KvConfig, KvEntries, KvEvent, KvPlan, LayerView, Namespace, PageHash, PageNeed};
use crate::resource::{Ingest, PaddedShape, Promotion};
use crate::step::KvStep;
use crate::{Error, Label, Outcome, PlanId, RequestId, ResourceName, Result, Slot, StepSerial};

/// A paged cache of one geometry.
#[derive(Debug)]
pub struct PagedStore {
    config: KvConfig,
    memory: KvMemory,
    slots: StagedSlots,
    namespace: Mutex<Namespace>,
    ledger: Mutex<Ledger>,
}

impl PagedStore {
    /// A store with all pages free. It allocates exactly [`KvConfig::memory_bytes`].
    ///
    /// # Errors
    /// An impossible geometry, or memory that cannot be had.
    pub fn new(name: ResourceName, config: KvConfig) -> Result<PagedStore> {
        PagedStore::on(Stream::cpu(), name, config)
    }

    /// As [`PagedStore::new`], with pages on `stream`'s device. The store enqueues what it does to them there: give it the
    /// stream that layers run on.
    ///
    /// # Errors
    /// As [`PagedStore::new`].
    pub fn on(stream: Stream, name: ResourceName, config: KvConfig) -> Result<PagedStore> {
        PagedStore::made(stream, name, config, blake3_page)
    }

    /// As [`PagedStore::new`], with page keys of another hash. Tokens and parents are compared whatever it is.
    ///
    /// # Errors
    /// As [`PagedStore::new`].
    pub fn with_hash(name: ResourceName, config: KvConfig, hash: PageHash) -> Result<PagedStore> {
        PagedStore::made(Stream::cpu(), name, config, hash)
    }

    fn made(stream: Stream, name: ResourceName, config: KvConfig, hash: PageHash) -> Result<PagedStore> {
        let memory = KvMemory::new(&config, stream)?;
        let slots = StagedSlots::on(stream);
        let namespace = Mutex::new(Namespace::new(&config, &[]));
        let ledger = Mutex::new(Ledger::new(name, &config, hash));
        Ok(PagedStore { config, memory, slots, namespace, ledger })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The geometry.
    pub fn config(&self) -> &KvConfig {
        &self.config
    }

    /// Says what else stored pages depend on. Requests that come in later are matched within it.
    ///
    /// # Errors
    /// [`Error::Order`] when requests are here, whose pages would be in another namespace.
    pub fn set_namespace(&self, namespace: Namespace) -> Result<()> {
        let ledger = self.ledger();
        let mut current = self.namespace.lock().unwrap_or_else(PoisonError::into_inner);
        if !ledger.requests.is_empty() && *current != namespace {
            let why = format!("{} requests were ingested under another namespace", ledger.requests.len());
            return Err(Error::Order { call: "set_namespace", why });
        }
        *current = namespace;
        Ok(())
    }

    /// Takes a request in and matches its prompts against the prefix index. Idempotent.
    ///
    /// # Errors
    /// Two prompts for one label.
    pub fn ingest(&self, ingest: &Ingest) -> Result<()> {
        let mut ledger = self.ledger();
        let namespace = self.namespace.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ledger.ingest(&self.config, &namespace, ingest)
    }

    /// Tokens of each prompt that were found when the request came in: they are stored, and not to be computed.
    ///
    /// # Errors
    /// An unknown request.
    pub fn ingest_report(&self, request: &RequestId) -> Result<Vec<(Label, usize)>> {
        Ok(self.ledger().request(request)?.hits.clone())
    }

    /// Reserves what a step needs, or says why not and leaves everything as it was. `ahead` says that the step
    /// before it may still run: it is planned on what that one's commit will leave, and must be promoted.
    ///
    /// # Errors
    /// A step that could never be admitted, or a third outstanding one.
    pub fn admit(&self, serial: StepSerial, slot: Slot, ahead: bool, step: &KvStep) -> Result<Outcome> {
        self.ledger().admit(&self.config, serial, slot, ahead, step)
    }

    /// Pages that a step would take after those outstanding, and pages that it could have. Changes nothing.
    ///
    /// # Errors
    /// A step that could never be admitted, or that names an offloaded request.
    pub fn page_need(&self, step: &KvStep) -> Result<PageNeed> {
        self.ledger().page_need(&self.config, step)
    }

    /// Packs an admitted step into one plan for each label or group, padded to `bucket` when there is one, and
    /// makes the copies that its forks need, unless it was planned ahead.
    ///
    /// # Errors
    /// A step that is not outstanding; a plan that does not fit its bucket or 32-bit arrays.
    pub fn plan(&self, serial: StepSerial, bucket: Option<PaddedShape>) -> Result<()> {
        let ahead = {
            let mut ledger = self.ledger();
            let Ledger { steps, plans, name, .. } = &mut *ledger;
            let Some(step) = steps.iter_mut().find(|step| step.serial == serial) else {
                let why = format!("step {serial} is not outstanding; admit it first");
                return Err(Error::Order { call: "plan", why });
            };
            let mut labels: Vec<Label> = Vec::new();
            for row in &step.rows {
                let group = step.combined.iter().find(|group| group.parts.contains(&row.label));
                let label = group.map_or(&row.label, |group| &group.label);
                if !labels.contains(label) {
                    labels.push(label.clone());
                }
            }
            for label in &labels {
                let id = PlanId { slot: step.slot, label: label.clone(), serial };
                let alone = [label.clone()];
                let group = step.combined.iter().find(|group| group.label == *label);
                let parts = group.map_or(&alone[..], |group| &group.parts);
                let rows = parts.iter().flat_map(|part| step.rows.iter().filter(move |r| r.label == *part));
                let packed = plans.pack(id, rows, self.config.page_size, bucket);
                packed.map_err(|why| Error::Step { resource: name.clone(), why })?;
            }
            for label in &labels {
                let id = PlanId { slot: step.slot, label: label.clone(), serial };
                if let Some(plan) = plans.get(&id) {
                    self.slots.stage(&plan)?;
                }
            }
            step.planned = Some(labels);
            step.ahead
        };
        if ahead { Ok(()) } else { self.prepare(serial) }
    }

    /// Makes the page copies that a step's forks need, before anything is read or written. `plan`, `promote` and
    /// the writes do so themselves.
    ///
    /// # Errors
    /// A step that is not outstanding, or not promoted.
    pub fn prepare(&self, serial: StepSerial) -> Result<()> {
        self.gate(serial)?.copy(&self.memory).map_err(|barred| barred_from(serial, barred))
    }

    /// The gate of a step whose turn has come.
    fn gate(&self, serial: StepSerial) -> Result<Arc<Gate>> {
        match self.ledger().step(serial) {
            None => Err(barred_from(serial, Barred::Closed)),
            Some(step) if step.ahead => {
                let why = format!("step {serial} was planned ahead; promote it first");
                Err(Error::Order { call: "write", why })
            }
            Some(step) => Ok(step.gate.clone()),
        }
    }

    /// Whether a step planned ahead still stands. A stale one is to be rolled back, admitted and planned anew.
    ///
    /// # Errors
    /// A step that is not outstanding, in another slot, or whose predecessor still runs.
    pub fn promote(&self, serial: StepSerial, slot: Slot) -> Result<Promotion> {
        let promotion = self.ledger().promote(serial, slot)?;
        if promotion == Promotion::Valid {
            self.prepare(serial)?;
        }
        Ok(promotion)
    }

    /// Keeps what a step did: lengths grow, forks land, filled pages are offered to the prefix index. A step that
    /// said `commit: false` keeps nothing. Waits for its running writes.
    ///
    /// # Errors
    /// [`Error::Order`] for a step that is not the oldest, or not promoted.
    pub fn commit(&self, serial: StepSerial) -> Result<()> {
        let gate = {
            let ledger = self.ledger();
            ledger.check_commit(serial)?;
            ledger.step(serial).expect("the check found it").gate.clone()
        };
        // A step that wrote nothing still keeps its forks' content.
        match gate.copy(&self.memory) {
            Ok(()) => gate.close(),
            Err(Barred::Failed(error)) => return Err(error),
            Err(Barred::Closed | Barred::Busy) => {}
        }
        self.ledger().commit(&self.config, serial)
    }

    /// Undoes a step and whatever was planned on top of it. Waits for its running writes. Idempotent.
    pub fn rollback(&self, serial: StepSerial) {
        let gates: Vec<_> = {
            let ledger = self.ledger();
            let from = ledger.steps.iter().position(|step| step.serial == serial);
            ledger.steps.iter().skip(from.unwrap_or(usize::MAX)).map(|step| step.gate.clone()).collect()
        };
        gates.iter().for_each(|gate| gate.close());
        self.ledger().rollback(serial).expect("a rollback gives back what its own step took");
    }

    /// A plan of an outstanding step.
    ///
    /// # Errors
    /// [`Error::UnknownPlan`] when there is none, or it belongs to another step.
    pub fn kv_plan(&self, id: &PlanId) -> Result<Arc<KvPlan>> {
        let ledger = self.ledger();
        ledger.plans.get(id).ok_or_else(|| Error::UnknownPlan {
            resource: ledger.name.clone(),
            label: id.label.clone(),
            serial: id.serial,
        })
    }

    /// The labels that a step was planned under, in order.
    ///
    /// # Errors
    /// [`Error::Order`] when it was not planned.
    pub fn plan_labels(&self, serial: StepSerial) -> Result<Vec<Label>> {
        let planned = self.ledger().step(serial).and_then(|step| step.planned.clone());
        planned.ok_or_else(|| Error::Order {
            call: "plan_labels",
            why: format!("step {serial} was not planned"),
        })
    }

    /// Where the device reads the slots of the plan `id`; `None` on the CPU.
    pub(super) fn slots_address(&self, id: &PlanId) -> Option<usize> {
        self.slots.address(id.slot, &id.label)
    }

    /// One layer's pages: `k` and `v` `[P, S, G, D]`, or `latent` `[P, S, C + E]`.
    ///
    /// Only what an outstanding step's plan lists may be read, and only while that step is outstanding.
    ///
    /// # Errors
    /// A layer that the cache does not have.
    pub fn layer(&self, layer: usize) -> Result<LayerView<'_>> {
        self.memory.layer(layer)
    }

    /// A plane of one layer, `[P, S, width]`; otherwise as [`PagedStore::layer`].
    ///
    /// # Errors
    /// A layer or plane that the cache does not have.
    pub fn plane(&self, name: &str, layer: usize) -> Result<TensorRef<'_>> {
        self.memory.plane(name, layer)
    }

    /// Writes a step's entries of one layer, token `t` to the plan's `slots[t]`. Allocates nothing.
    ///
    /// # Errors
    /// A stale plan, a step that is not promoted, or tensors that are not the cache's; nothing is written.
    pub fn write_kv(&self, id: &PlanId, layer: usize, entries: KvEntries<'_>, stream: &Stream) -> Result<()> {
        let (plan, gate) = (self.kv_plan(id)?, self.gate(id.serial)?);
        let extent = Extent { plan: Arc::as_ptr(&plan).addr(), layer, plane: 0 };
        let write = || self.slots.of(&plan, |slots| self.memory.write(layer, slots, entries, stream));
        gate.pass(&self.memory, extent, write).map_err(|barred| barred_from(id.serial, barred))?
    }

    /// Writes a step's entries `[T, width]` of one layer of a further plane; otherwise as [`PagedStore::write_kv`].
    ///
    /// # Errors
    /// As [`PagedStore::write_kv`].
    pub fn write_plane(
        &self,
        id: &PlanId,
        name: &str,
        layer: usize,
        entries: TensorRef<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (plan, gate) = (self.kv_plan(id)?, self.gate(id.serial)?);
        let plane = self.memory.plane_index(name)?;
        let extent = Extent { plan: Arc::as_ptr(&plan).addr(), layer, plane };
        let write =
            || self.slots.of(&plan, |slots| self.memory.write_plane(plane, layer, slots, entries, stream));
        gate.pass(&self.memory, extent, write).map_err(|barred| barred_from(id.serial, barred))?
    }

    /// Empties a request's streams; `free` gives its pages back too, else those it alone owns stay for its use.
    ///
    /// # Errors
    /// An unknown request, one that a running step holds, or one that is moving to or from the host.
    pub fn reset(&self, request: &RequestId, free: bool) -> Result<()> {
        self.ledger().reset(request, free)
    }

    /// Forgets a request; its indexed pages stay cached. Idempotent.
    ///
    /// # Errors
    /// A request that an outstanding step holds, or that is moving to or from the host.
    pub fn remove(&self, request: &RequestId) -> Result<()> {
        self.ledger().remove(request)
    }

    /// Moves a request's pages to the host, all of them; returns how many, 0 when they are there already.
    ///
    /// # Errors
    /// An unknown request, one that an outstanding step holds, one that is moving already, or host memory that
    /// cannot be had: then it stays where it is.
    pub fn offload(&self, request: &RequestId) -> Result<usize> {
        let Some(pages) = self.ledger().begin_offload(&self.config, request)? else { return Ok(0) };
        match self.memory.save(&pages) {
            Ok(host) => self.ledger().end_offload(request, &pages, Some(host))?,
            Err(error) => {
                self.ledger().end_offload(request, &pages, None)?;
                return Err(error);
            }
        }
        Ok(pages.len())
    }

    /// Brings a request back, or says how many pages it is short of.
    ///
    /// # Errors
    /// An unknown request.
    pub fn reload(&self, request: &RequestId) -> Result<Outcome> {
        let begun = self.ledger().begin_reload(request)?;
        match begun {
            Reload::Here => Ok(Outcome::Admitted),
            Reload::Not(outcome) => Ok(outcome),
            Reload::Copy(host, pages) => {
                let mut into = pages.clone();
                into.rotate_left(usize::from(planted("reload-wrong-page") && pages.len() > 1));
                if let Err(error) = self.memory.load(&host, &into) {
                    self.ledger().cancel_reload(request, host, &pages)?;
                    return Err(error);
                }
                self.ledger().end_reload(request, &pages)?;
                Ok(Outcome::Admitted)
            }
        }
    }

    /// Whether a request's pages are on the host, or on their way.
    ///
    /// # Errors
    /// An unknown request.
    pub fn is_offloaded(&self, request: &RequestId) -> Result<bool> {
        Ok(!matches!(self.ledger().request(request)?.place, Place::Resident))
    }

    /// Distinct pages of the cache that a request holds; 0 while it is on the host.
    ///
    /// # Errors
    /// An unknown request.
    pub fn pages_held(&self, request: &RequestId) -> Result<usize> {
        self.ledger().pages_held(request)
    }

    /// A stored stream.
    ///
    /// # Errors
    /// An unknown request or label.
    pub fn stream(&self, request: &RequestId, label: &Label) -> Result<StreamState> {
        let ledger = self.ledger();
        let stream = ledger.stream(request, label)?;
        Ok(StreamState {
            len: stream.len,
            first_kept: stream.first_kept,
            kv_offset: stream.kv_offset(self.config.page_size),
            generation: stream.generation,
            pages: stream.table.to_vec(),
        })
    }

    /// Labels of a request's streams.
    ///
    /// # Errors
    /// An unknown request.
    pub fn labels(&self, request: &RequestId) -> Result<Vec<Label>> {
        Ok(self.ledger().request(request)?.streams.keys().cloned().collect())
    }

    /// Requests here, those on the host among them, in order of their ids.
    pub fn requests(&self) -> Vec<RequestId> {
        let mut all: Vec<RequestId> = self.ledger().requests.keys().cloned().collect();
        all.sort();
        all
    }

    /// The cache in numbers.
    pub fn stats(&self) -> KvStats {
        let ledger = self.ledger();
        let offloaded = ledger.requests.values().filter(|r| !matches!(r.place, Place::Resident)).count();
        let c = ledger.counters;
        KvStats {
            pages_total: self.config.usable_pages(),
            pages_free: ledger.pool.free(),
            pages_cached: ledger.pool.cached(),
            pages_held: ledger.pool.held(),
            pages_evictable: ledger.index.evictable(),
            bytes: self.memory.bytes(),
            indexed: ledger.index.len(),
            evictions: c.evictions,
            prompt_tokens: c.prompt_tokens,
            hit_tokens: c.hit_tokens,
            repointed: c.repointed,
            copies: c.copies,
            offloads: c.offloads,
            reloads: c.reloads,
            offloaded_bytes: c.offloaded_bytes,
            requests: ledger.requests.len(),
            offloaded,
        }
    }

    /// Owners of a page: streams that list it, and outstanding steps that claim it. The prefix index is none.
    ///
    /// # Errors
    /// The sink, and ids that are no page.
    pub fn owners(&self, page: i32) -> Result<u32> {
        Ok(self.ledger().pool.owners(page)?)
    }

    /// Drops every page of the prefix index that no request uses; returns how many.
    ///
    /// # Errors
    /// A broken invariant only.
    pub fn evict_cached(&self) -> Result<usize> {
        self.ledger().evict_all()
    }

    /// Starts or stops recording events.
    pub fn record_events(&self, on: bool) {
        self.ledger().events.record(on);
    }

    /// Events since the last call, oldest first.
    pub fn drain_events(&self) -> Vec<KvEvent> {
        self.ledger().events.drain()
    }

    /// Walks all bookkeeping: every page in one state, with exactly the owners that name it.
    ///
    /// # Errors
    /// [`Error::Invariant`] with what does not hold.
    pub fn check(&self) -> Result<()> {
        self.ledger().check().map_err(Error::Invariant)
    }
}

/// Why a step's gate let nobody in.
pub(super) fn barred_from(serial: StepSerial, barred: Barred) -> Error {
    let why = match barred {
        Barred::Failed(error) => return error,
        Barred::Closed => format!("step {serial} is not outstanding; admit and plan it first"),
        Barred::Busy => {
            format!("this layer of step {serial} is being written by another thread; write it once")
        }
    };
    Error::Order { call: "write", why }
}
