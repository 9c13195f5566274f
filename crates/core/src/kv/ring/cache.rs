//! The ring as a resource of a spec: its memory, its bookkeeping behind one lock, and a step's life in both.
//!
//! The lock is never held over a copy. What keeps frames apart without it: only the step whose turn has come writes, and
//! only its worlds' scratch, through its gate; a step's commit closes that gate before it copies scratch to slots; a world
//! that is emptied, saved or restored is marked busy, and admitted to nothing, until that is done.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mstar_kernels::mutant::planted;
use mstar_kernels::{Device, Stream, TensorRef};

use super::ledger::{Ledger, Open};
use super::memory::RingMemory;
use super::slots::StagedFrames;
use super::{RingConfig, RingGroups, RingKv, RingLayer, RingPlan, RingView, WorldSnapshot};
use crate::kv::gate::Extent;
use crate::kv::store::barred_from;
use crate::resource::{Fingerprint, Ingest, PaddedShape, Promotion, StepContext};
use crate::step::{Declaration, RingStep};
use crate::{Error, Label, Outcome, PlanId, RequestId, Resource, ResourceName, Result, Step, StepSerial};

/// A ring of frames in a spec.
#[derive(Debug)]
pub struct RingCache {
    name: ResourceName,
    config: Arc<RingConfig>,
    groups: RingGroups,
    memory: RingMemory,
    places: StagedFrames,
    ledger: Mutex<Ledger>,
}

/// What a step that does not name a ring does to it.
static NOTHING: RingStep = RingStep { segments: Vec::new() };

impl RingCache {
    /// A ring of this geometry on the CPU, all worlds free. It allocates exactly [`RingConfig::memory_bytes`].
    ///
    /// # Errors
    /// An impossible geometry, or memory that cannot be had.
    pub fn new(name: ResourceName, config: RingConfig) -> Result<RingCache> {
        RingCache::on(Stream::cpu(), name, config)
    }

    /// As [`RingCache::new`], with frames on `stream`'s device. The ring enqueues what it does to them there: give it the stream
    /// that layers run on.
    ///
    /// # Errors
    /// As [`RingCache::new`]; what the device says.
    pub fn on(stream: Stream, name: ResourceName, config: RingConfig) -> Result<RingCache> {
        let config = Arc::new(config);
        let memory = RingMemory::new(&config, stream)?;
        let places = StagedFrames::on(stream);
        let ledger = Mutex::new(Ledger::new(name.clone(), config.num_worlds));
        Ok(RingCache { name, groups: config.groups(), memory, places, ledger, config })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes allocated for keys and values.
    pub fn bytes(&self) -> usize {
        self.memory.allocated()
    }

    /// Worlds that no request holds.
    pub fn free_worlds(&self) -> usize {
        self.ledger().free_worlds()
    }

    /// Walks the bookkeeping.
    ///
    /// # Errors
    /// What does not fit: a world of two requests, or of none that knows it.
    pub fn check(&self) -> Result<(), String> {
        self.ledger().check()
    }

    fn declared<'a>(&self, step: &'a Step) -> Result<&'a RingStep> {
        match step.resources.get(&self.name) {
            None => Ok(&NOTHING),
            Some(Declaration::Ring(declared)) => Ok(declared),
            Some(_) => {
                let why = "the step declares something else than a ring step for a ring".to_owned();
                Err(Error::Step { resource: self.name.clone(), why })
            }
        }
    }

    /// Zeroes worlds that nobody owns any more, and frees them.
    fn hand_back(&self, worlds: impl IntoIterator<Item = usize>) -> Result<()> {
        for world in worlds {
            if !planted("ring-world-not-zeroed") {
                self.memory.zero(world)?;
            }
            self.ledger().free(world);
        }
        Ok(())
    }

    fn undo(&self, serial: StepSerial) -> Result<()> {
        let (writes, worlds) = self.ledger().rollback(serial);
        writes.iter().for_each(|writes| writes.gate.close());
        self.hand_back(worlds)
    }
}

impl Resource for RingCache {
    fn name(&self) -> &ResourceName {
        &self.name
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        Vec::new()
    }

    /// Nothing: beside a ring no prefix is shared, since it does not allow skipping.
    fn fingerprint(&self) -> Option<Fingerprint> {
        None
    }

    /// The frames of skipped tokens would never be in the ring.
    fn prefix_skip_safe(&self) -> bool {
        false
    }

    fn ingest_request(&self, ingest: &Ingest) -> Result<()> {
        self.ledger().ingest(&ingest.request);
        Ok(())
    }

    fn admit(&self, cx: &StepContext, step: &Step) -> Result<Outcome> {
        let declared = self.declared(step)?;
        let shape = (self.config.tokens_per_frame, self.config.layers.len());
        self.ledger().admit(cx.serial, cx.slot, cx.preplan, declared, shape)
    }

    fn rollback(&self, serial: StepSerial) {
        self.undo(serial).expect("every world lies in the ring's memory");
    }

    fn plan(&self, cx: &StepContext, _step: &Step) -> Result<()> {
        self.ledger().plan(cx.serial, (&self.config, &self.groups), cx.bucket)?;
        if self.memory.device() == Device::Cpu {
            return Ok(());
        }
        for label in self.plan_labels(cx.serial)? {
            let plan = self.ring_plan(&PlanId { slot: cx.slot, label, serial: cx.serial })?;
            self.places.stage(&plan, &self.config, &self.groups)?;
        }
        Ok(())
    }

    fn promote(&self, cx: &StepContext, _step: &Step) -> Result<Promotion> {
        Ok(if self.ledger().promote(cx.serial, cx.slot)? { Promotion::Valid } else { Promotion::Stale })
    }

    /// Copies each committed frame from the scratch to its slot, and advances the clocks. Waits for running writes. A step
    /// that would keep a frame which a layer never wrote is undone instead.
    fn commit(&self, serial: StepSerial, _step: &Step) -> Result<()> {
        let (passes, writes) = self.ledger().ending(serial)?;
        writes.gate.close();
        let unwritten = self.ledger().unwritten(serial);
        if let Some((label, layer)) = unwritten {
            self.undo(serial)?;
            let why = format!(
                "{}: step {serial} commits a frame of {label} that layer {layer} never wrote; upsert every layer, or \
                 say commit: false. The step is undone",
                self.name
            );
            return Err(Error::Order { call: "commit", why });
        }
        for pass in passes.iter().filter(|pass| pass.keeps()) {
            self.memory.keep(pass.world, pass.frame_pos)?;
        }
        let dummies = self.ledger().commit(serial)?;
        self.hand_back(dummies)
    }

    /// `free` hands the world back; else the request keeps it, empty.
    fn reset_request(&self, request: &RequestId, free: bool) -> Result<()> {
        let world = self.ledger().reset(request, free)?;
        if free {
            return self.hand_back(world);
        }
        let zeroed = world.map_or(Ok(()), |world| self.memory.zero(world));
        self.ledger().release(request);
        zeroed
    }

    fn remove_request(&self, request: &RequestId) -> Result<()> {
        let world = self.ledger().remove(request)?;
        self.hand_back(world)
    }

    /// Plans have room for the rows of `shape` from then on.
    fn build_accelerator_graph_buffers(&self, _slots: usize, shape: PaddedShape) -> Result<()> {
        let mut ledger = self.ledger();
        ledger.shelf.most_rows = ledger.shelf.most_rows.max(shape.rows);
        Ok(())
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        self.ledger().requests().cloned().collect()
    }
}

impl RingKv for RingCache {
    fn config(&self) -> &RingConfig {
        &self.config
    }

    fn groups(&self) -> &RingGroups {
        &self.groups
    }

    fn ring_plan(&self, id: &PlanId) -> Result<Arc<RingPlan>> {
        self.ledger().ring_plan(id)
    }

    fn plan_labels(&self, serial: StepSerial) -> Result<Vec<Label>> {
        self.ledger().plan_labels(serial)
    }

    fn layer(&self, layer: usize) -> Result<RingLayer<'_>> {
        self.memory.layer(layer)
    }

    fn upsert(
        &self,
        id: &PlanId,
        layer: usize,
        k: TensorRef<'_>,
        v: TensorRef<'_>,
        stream: &Stream,
    ) -> Result<RingView<'_>> {
        let Open { plan, label, writes } = self.ledger().open(id)?;
        self.memory.check_frames(layer, plan.rows.len(), &k, &v)?;
        let extent = Extent { plan: Arc::as_ptr(&plan).addr(), layer, plane: 0 };
        let write = || -> Result<()> {
            if self.memory.device() != Device::Cpu {
                let group = self.groups.of_layer[layer];
                self.places.of(&plan, group, |places| self.memory.write_at(layer, places, (k, v), stream))?;
                writes.note(label, layer);
                return Ok(());
            }
            for (row, world) in plan.rows.iter().enumerate().filter_map(|(row, r)| Some((row, r.world?))) {
                self.memory.write(layer, world, row, (k, v), stream)?;
            }
            writes.note(label, layer);
            Ok(())
        };
        writes.gate.enter(extent, write).map_err(|barred| barred_from(id.serial, barred))??;
        Ok(RingView { layer: self.memory.layer(layer)?, group: self.groups.of_layer[layer], plan })
    }

    fn clock(&self, request: &RequestId) -> Result<u64> {
        Ok(self.ledger().request(request)?.clock)
    }

    fn world(&self, request: &RequestId) -> Result<Option<usize>> {
        Ok(self.ledger().request(request)?.world)
    }

    fn snapshot(&self, request: &RequestId) -> Result<WorldSnapshot> {
        let (world, clock) = self.ledger().begin_save(request)?;
        let frames = self.memory.save(world);
        self.ledger().release(request);
        Ok(WorldSnapshot::new(Arc::clone(&self.config), clock, frames?))
    }

    fn restore(&self, request: &RequestId, snapshot: &WorldSnapshot) -> Result<Outcome> {
        if let Some(why) = snapshot.misfit(&self.config) {
            return Err(Error::Step { resource: self.name.clone(), why });
        }
        let world = match self.ledger().begin_load(request)? {
            Ok(world) => world,
            Err(outcome) => return Ok(outcome),
        };
        let loaded = self.memory.load(world, snapshot.frames());
        self.ledger().end_load(request, snapshot.clock());
        loaded.map(|()| Outcome::Admitted)
    }
}
