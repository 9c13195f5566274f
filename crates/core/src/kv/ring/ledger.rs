//! Who owns which world, how many frames each request has committed, and what the outstanding steps hold of it. All of it
//! is behind the cache's one lock, and none of it touches a frame.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mstar_kernels::mutant::planted;

use super::plan::{Pass, Shelf};
use crate::kv::gate::Gate;
use crate::step::{RingSegment, RingStep};
use crate::{
    Error, Label, Outcome, PlanId, Refusal, RefusalReason, RequestId, ResourceName, Result, Slot, StepSerial,
};

/// Steps that may be outstanding: the running one, and one planned ahead.
const MAX_OUTSTANDING: usize = 2;

/// Whose a world is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Owner {
    Free,
    Request(RequestId),
    /// Nobody's, and still being zeroed.
    Leaving,
}

/// What is known of a request.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) world: Option<usize>,
    /// Frames committed, which is the number of the next one.
    pub(super) clock: u64,
    /// Raised whenever the world becomes another: plans of an older one are stale.
    generation: u64,
    /// Its world is being emptied, saved or restored outside the lock.
    busy: bool,
}

/// Writes of one step: its gate, and which layers of which of its plans were written.
#[derive(Debug)]
pub(super) struct Writes {
    pub(super) gate: Gate,
    /// `[labels, L]`.
    upserted: Vec<AtomicBool>,
    layers: usize,
}

impl Writes {
    fn new(labels: usize, layers: usize) -> Writes {
        let gate = Gate::default();
        gate.record(Vec::new());
        let upserted = (0..labels * layers).map(|_| AtomicBool::new(false)).collect();
        Writes { gate, upserted, layers }
    }

    /// Notes that a layer of the `label`-th plan was written.
    pub(super) fn note(&self, label: usize, layer: usize) {
        self.upserted[label * self.layers + layer].store(true, Ordering::Release);
    }

    /// The first layer of the `label`-th plan that was not written.
    fn missing(&self, label: usize) -> Option<usize> {
        let layers = &self.upserted[label * self.layers..][..self.layers];
        layers.iter().position(|written| !written.load(Ordering::Acquire))
    }
}

/// An outstanding step.
#[derive(Debug)]
struct Reservation {
    serial: StepSerial,
    slot: Slot,
    /// Planned ahead, and not promoted yet: nothing may be written.
    ahead: bool,
    passes: Arc<[Pass]>,
    /// The generation of each pass's request when the step was admitted.
    generations: Vec<u64>,
    /// Passes whose world this step claimed.
    claims: Vec<usize>,
    labels: Vec<Label>,
    planned: bool,
    writes: Arc<Writes>,
}

impl Reservation {
    fn names(&self, request: &RequestId) -> bool {
        self.passes.iter().any(|pass| pass.request == *request)
    }
}

/// The bookkeeping of a ring.
#[derive(Debug)]
pub(super) struct Ledger {
    name: ResourceName,
    owners: Vec<Owner>,
    requests: HashMap<RequestId, Held>,
    steps: VecDeque<Reservation>,
    pub(super) shelf: Shelf,
    generations: u64,
}

/// A step to be written to: its plan's place among the labels, and its writes.
pub(super) struct Open {
    pub(super) plan: Arc<super::RingPlan>,
    pub(super) label: usize,
    pub(super) writes: Arc<Writes>,
}

fn order<T>(call: &'static str, why: String) -> Result<T> {
    Err(Error::Order { call, why })
}

impl Ledger {
    pub(super) fn new(name: ResourceName, num_worlds: usize) -> Ledger {
        Ledger {
            name,
            owners: vec![Owner::Free; num_worlds],
            requests: HashMap::new(),
            steps: VecDeque::with_capacity(MAX_OUTSTANDING),
            shelf: Shelf::default(),
            generations: 0,
        }
    }

    fn next_generation(&mut self) -> u64 {
        self.generations += 1;
        self.generations
    }

    fn misuse(&self, why: String) -> Error {
        Error::Step { resource: self.name.clone(), why }
    }

    fn position(&self, serial: StepSerial) -> Option<usize> {
        self.steps.iter().position(|step| step.serial == serial)
    }

    /// Requests that were ingested and not removed.
    pub(super) fn requests(&self) -> impl Iterator<Item = &RequestId> {
        self.requests.keys()
    }

    /// What is known of a request.
    pub(super) fn request(&self, request: &RequestId) -> Result<&Held> {
        self.requests.get(request).ok_or_else(|| self.unknown(request))
    }

    fn unknown(&self, request: &RequestId) -> Error {
        Error::UnknownRequest { resource: self.name.clone(), request: request.clone() }
    }

    /// Worlds that are nobody's.
    pub(super) fn free_worlds(&self) -> usize {
        self.owners.iter().filter(|owner| **owner == Owner::Free).count()
    }

    /// Takes a request in, without a world. Idempotent.
    pub(super) fn ingest(&mut self, request: &RequestId) {
        if !self.requests.contains_key(request) {
            let generation = self.next_generation();
            self.requests.insert(request.clone(), Held { world: None, clock: 0, generation, busy: false });
        }
    }

    /// The frame that a request passes next, once all outstanding steps have ended.
    fn expected(&self, request: &RequestId, held: &Held) -> u64 {
        let passes = self.steps.iter().flat_map(|step| step.passes.iter());
        held.clock + passes.filter(|pass| pass.commit && pass.request == *request).count() as u64
    }

    fn check_turn(&self, serial: StepSerial, slot: Slot, ahead: bool) -> Result<()> {
        let why = match self.steps.back() {
            Some(_) if self.position(serial).is_some() => format!("step {serial} is admitted already"),
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
        order("admit", why)
    }

    /// Admits a step: every request it names has a world and is at its frame, or nothing has changed.
    pub(super) fn admit(
        &mut self,
        serial: StepSerial,
        slot: Slot,
        ahead: bool,
        step: &RingStep,
        (tokens_per_frame, layers): (usize, usize),
    ) -> Result<Outcome> {
        self.check_turn(serial, slot, ahead)?;
        let refused = |reason| Refusal { resource: self.name.clone(), reason };
        let mut homeless = Vec::new();
        for (at, segment) in step.segments.iter().enumerate() {
            let RingSegment { request, span, frame_pos, .. } = segment;
            if *span != tokens_per_frame {
                return Err(self.misuse(format!(
                    "request {request}: a pass of {span} tokens; a pass is one frame, span {tokens_per_frame}"
                )));
            }
            if step.segments[..at].iter().any(|other| other.request == *request) {
                return Err(self.misuse(format!(
                    "request {request} passes two frames in one step; it has one world, so give each a step"
                )));
            }
            let held = self.request(request)?;
            if held.busy {
                let reason = RefusalReason::WorldBusy { request: request.clone() };
                return Ok(Outcome::NotReady(refused(reason)));
            }
            let expected = self.expected(request, held);
            let again =
                planted("ring-commit-twice") && segment.commit && frame_pos.checked_add(1) == Some(expected);
            if *frame_pos != expected && !again {
                let reason = RefusalReason::RingClock { request: request.clone(), expected, got: *frame_pos };
                return Ok(Outcome::Refused(refused(reason)));
            }
            if held.world.is_none() {
                homeless.push(at);
            }
        }
        let free = self.owners.iter().enumerate().filter(|(_, owner)| **owner == Owner::Free);
        let free: Vec<usize> = free.map(|(world, _)| world).take(homeless.len()).collect();
        if let Some(&first) = homeless.get(free.len()) {
            let reason = RefusalReason::NoWorldFree {
                request: step.segments[first].request.clone(),
                worlds_short: homeless.len() - free.len(),
                worlds_needed: homeless.len(),
                worlds_total: self.owners.len(),
            };
            return Ok(Outcome::Refused(refused(reason)));
        }
        // Nothing is refused from here on.
        for (&at, &world) in homeless.iter().zip(&free) {
            let request = &step.segments[at].request;
            self.owners[world] = Owner::Request(request.clone());
            self.requests.get_mut(request).expect("found above").world = Some(world);
        }
        self.reserve(serial, slot, ahead, step, homeless, layers);
        Ok(Outcome::Admitted)
    }

    fn reserve(
        &mut self,
        serial: StepSerial,
        slot: Slot,
        ahead: bool,
        step: &RingStep,
        claims: Vec<usize>,
        layers: usize,
    ) {
        let mut labels: Vec<Label> = Vec::new();
        let (mut passes, mut generations) = (Vec::new(), Vec::new());
        for RingSegment { request, label, frame_pos, commit, .. } in &step.segments {
            let held = &self.requests[request];
            let world = held.world.expect("claimed by now");
            let (request, frame_pos, commit) = (request.clone(), *frame_pos, *commit);
            passes.push(Pass { request, label: label.clone(), world, frame_pos, commit });
            generations.push(held.generation);
            if !labels.contains(label) {
                labels.push(label.clone());
            }
        }
        let writes = Arc::new(Writes::new(labels.len(), layers));
        let passes = passes.into();
        let planned = false;
        self.steps.push_back(Reservation {
            serial,
            slot,
            ahead,
            passes,
            generations,
            claims,
            labels,
            planned,
            writes,
        });
    }

    /// Packs an admitted step, label by label.
    pub(super) fn plan(
        &mut self,
        serial: StepSerial,
        layout: (&super::RingConfig, &super::RingGroups),
        bucket: Option<crate::resource::PaddedShape>,
    ) -> Result<()> {
        let Some(at) = self.position(serial) else {
            return order("plan", format!("step {serial} is not outstanding; admit it first"));
        };
        let step = &mut self.steps[at];
        for label in &step.labels {
            let id = PlanId { slot: step.slot, label: label.clone(), serial };
            let passes = step.passes.iter().filter(|pass| pass.label == *label);
            let packed = self.shelf.pack(id, passes, layout, bucket);
            packed.map_err(|why| Error::Step { resource: self.name.clone(), why })?;
        }
        step.planned = true;
        Ok(())
    }

    /// The labels that a step was planned under, in order.
    pub(super) fn plan_labels(&self, serial: StepSerial) -> Result<Vec<Label>> {
        match self.position(serial).map(|at| &self.steps[at]) {
            Some(step) if step.planned => Ok(step.labels.clone()),
            _ => order("plan_labels", format!("step {serial} was not planned")),
        }
    }

    /// A plan of an outstanding step.
    pub(super) fn ring_plan(&self, id: &PlanId) -> Result<Arc<super::RingPlan>> {
        self.shelf.get(id).cloned().ok_or_else(|| Error::UnknownPlan {
            resource: self.name.clone(),
            label: id.label.clone(),
            serial: id.serial,
        })
    }

    /// A plan that is to be written by, now that the step's turn has come.
    pub(super) fn open(&self, id: &PlanId) -> Result<Open> {
        let plan = self.ring_plan(id)?;
        let step = &self.steps[self.position(id.serial).expect("a plan is forgotten with its step")];
        if step.ahead {
            return order("upsert", format!("step {} was planned ahead; promote it first", id.serial));
        }
        let label = step.labels.iter().position(|label| *label == id.label).expect("it has this plan");
        Ok(Open { plan, label, writes: Arc::clone(&step.writes) })
    }

    /// Whether a step planned ahead still stands: each of its requests has the world and the clock that it was planned for.
    pub(super) fn promote(&mut self, serial: StepSerial, slot: Slot) -> Result<bool> {
        match self.position(serial) {
            None => return order("promote", format!("step {serial} is not outstanding; admit it first")),
            Some(0) => {}
            Some(_) => {
                let first = self.steps[0].serial;
                return order("promote", format!("step {first} still runs; commit it first"));
            }
        }
        let step = &self.steps[0];
        if step.slot != slot {
            let why = format!("step {serial} was planned into slot {}, not {}", step.slot.0, slot.0);
            return order("promote", why);
        }
        let stands = step.passes.iter().zip(&step.generations).all(|(pass, &generation)| {
            self.requests.get(&pass.request).is_some_and(|held| {
                (held.generation == generation || planted("ring-wrong-generation"))
                    && held.clock == pass.frame_pos
                    && held.world == Some(pass.world)
                    && !held.busy
            })
        });
        self.steps[0].ahead &= !stands;
        Ok(stands)
    }

    /// The passes and writes of a step that may be committed.
    pub(super) fn ending(&self, serial: StepSerial) -> Result<(Arc<[Pass]>, Arc<Writes>)> {
        match self.position(serial) {
            None => order("commit", format!("step {serial} is not outstanding; admit it first")),
            Some(0) if self.steps[0].ahead => {
                order("commit", format!("step {serial} was planned ahead; promote it first"))
            }
            Some(0) if !self.steps[0].planned => {
                order("commit", format!("step {serial} was not planned; plan it first"))
            }
            Some(0) => Ok((Arc::clone(&self.steps[0].passes), Arc::clone(&self.steps[0].writes))),
            Some(_) => {
                let first = self.steps[0].serial;
                order("commit", format!("step {first} comes before step {serial}; commit it first"))
            }
        }
    }

    /// The first label and layer that a step commits a frame of and never wrote.
    pub(super) fn unwritten(&self, serial: StepSerial) -> Option<(Label, usize)> {
        let step = &self.steps[self.position(serial)?];
        let kept = |label: &Label| step.passes.iter().any(|pass| pass.label == *label && pass.keeps());
        let mut labels = step.labels.iter().enumerate().filter(|(_, label)| kept(label));
        labels.find_map(|(at, label)| Some((label.clone(), step.writes.missing(at)?)))
    }

    /// Ends a step whose frames are in their slots: clocks advance. Worlds that only a warm-up's dummies claimed are
    /// returned, to be zeroed.
    pub(super) fn commit(&mut self, serial: StepSerial) -> Result<Vec<usize>> {
        self.ending(serial)?;
        let step = self.steps.pop_front().expect("it is the first");
        self.shelf.forget(serial);
        for pass in step.passes.iter().filter(|pass| pass.keeps()) {
            let held = self.requests.get_mut(&pass.request).expect("held by the step");
            held.clock = pass.frame_pos + 1;
        }
        let dummies = step.claims.iter().copied().filter(|&at| step.passes[at].request.is_dummy()).collect();
        Ok(self.unclaim(&step, dummies))
    }

    /// Undoes a step and whatever was planned on top of it, the last first. Their gates are to be closed, and then the
    /// worlds that they had claimed zeroed.
    pub(super) fn rollback(&mut self, serial: StepSerial) -> (Vec<Arc<Writes>>, Vec<usize>) {
        let (mut writes, mut worlds) = (Vec::new(), Vec::new());
        while self.position(serial).is_some() {
            let mut step = self.steps.pop_back().expect("the step is there");
            self.shelf.forget(step.serial);
            let claims = std::mem::take(&mut step.claims);
            if !planted("ring-abort-keeps-world") {
                worlds.extend(self.unclaim(&step, claims));
            }
            writes.push(step.writes);
        }
        (writes, worlds)
    }

    /// Takes back the worlds that a step claimed for some of its passes, unless they have become others meanwhile.
    fn unclaim(&mut self, step: &Reservation, claims: Vec<usize>) -> Vec<usize> {
        let mut worlds = Vec::new();
        for at in claims {
            let Pass { request, world, .. } = &step.passes[at];
            let Some(held) = self.requests.get_mut(request) else { continue };
            if held.generation == step.generations[at] && held.world == Some(*world) {
                held.world = None;
                self.owners[*world] = Owner::Leaving;
                worlds.push(*world);
            }
        }
        worlds
    }

    /// A world has been zeroed: it may be claimed.
    pub(super) fn free(&mut self, world: usize) {
        debug_assert_eq!(self.owners[world], Owner::Leaving);
        self.owners[world] = Owner::Free;
    }

    fn check_idle(&self, call: &'static str, request: &RequestId, ahead_too: bool) -> Result<()> {
        let mut steps = self.steps.iter().filter(|step| ahead_too || !step.ahead);
        if let Some(step) = steps.find(|step| step.names(request)) {
            return order(
                call,
                format!("step {} holds request {request}; commit or abort it first", step.serial),
            );
        }
        match self.requests.get(request) {
            Some(held) if held.busy => {
                order(call, format!("the world of request {request} is being emptied, saved or restored"))
            }
            _ => Ok(()),
        }
    }

    /// Empties a request: its clock is 0 again. `free` gives its world up, to be zeroed and freed; else it is to be zeroed
    /// and released ([`Ledger::release`]).
    pub(super) fn reset(&mut self, request: &RequestId, free: bool) -> Result<Option<usize>> {
        self.request(request)?;
        self.check_idle("reset", request, false)?;
        let generation = self.next_generation();
        let held = self.requests.get_mut(request).expect("found above");
        (held.clock, held.generation) = (0, generation);
        let Some(world) = held.world else { return Ok(None) };
        if free {
            held.world = None;
            self.owners[world] = Owner::Leaving;
        } else {
            held.busy = true;
        }
        Ok(Some(world))
    }

    /// Forgets a request; its world is to be zeroed and freed. Idempotent.
    pub(super) fn remove(&mut self, request: &RequestId) -> Result<Option<usize>> {
        self.check_idle("remove", request, true)?;
        let world = self.requests.remove(request).and_then(|held| held.world);
        if let Some(world) = world {
            self.owners[world] = Owner::Leaving;
        }
        Ok(world)
    }

    /// Begins to copy a request's world to the host: its world and clock. Ends with [`Ledger::release`].
    pub(super) fn begin_save(&mut self, request: &RequestId) -> Result<(usize, u64)> {
        self.request(request)?;
        self.check_idle("snapshot", request, true)?;
        let held = self.requests.get_mut(request).expect("found above");
        let Some(world) = held.world else {
            return order(
                "snapshot",
                format!("request {request} has no world yet; a step claims one for it"),
            );
        };
        held.busy = true;
        Ok((world, held.clock))
    }

    /// Begins to copy a world back: the world, or why there is none. Ends with [`Ledger::end_load`].
    pub(super) fn begin_load(&mut self, request: &RequestId) -> Result<std::result::Result<usize, Outcome>> {
        self.request(request)?;
        self.check_idle("restore", request, false)?;
        let world = self.request(request)?.world;
        let world = match world.or_else(|| self.owners.iter().position(|owner| *owner == Owner::Free)) {
            Some(world) => world,
            None => {
                let reason = RefusalReason::NoWorldFree {
                    request: request.clone(),
                    worlds_short: 1,
                    worlds_needed: 1,
                    worlds_total: self.owners.len(),
                };
                return Ok(Err(Outcome::Refused(Refusal { resource: self.name.clone(), reason })));
            }
        };
        let generation = self.next_generation();
        self.owners[world] = Owner::Request(request.clone());
        let held = self.requests.get_mut(request).expect("found above");
        (held.world, held.generation, held.busy) = (Some(world), generation, true);
        Ok(Ok(world))
    }

    /// The world holds what it should: the request goes on at `clock`.
    pub(super) fn end_load(&mut self, request: &RequestId, clock: u64) {
        if let Some(held) = self.requests.get_mut(request) {
            (held.clock, held.busy) = (clock, false);
        }
    }

    /// Nobody touches the request's world outside the lock any more.
    pub(super) fn release(&mut self, request: &RequestId) {
        if let Some(held) = self.requests.get_mut(request) {
            held.busy = false;
        }
    }

    /// Walks everything: each world has the owner that names it, and no other.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        for (request, held) in &self.requests {
            if let Some(world) = held.world
                && self.owners[world] != Owner::Request(request.clone())
            {
                return Err(format!(
                    "request {request} holds world {world}, which is {:?}",
                    self.owners[world]
                ));
            }
        }
        for (world, owner) in self.owners.iter().enumerate() {
            if let Owner::Request(request) = owner
                && self.requests.get(request).is_none_or(|held| held.world != Some(world))
            {
                return Err(format!("world {world} is owned by {request}, which does not hold it"));
            }
        }
        let steps = self.steps.iter().flat_map(|step| step.passes.iter().zip(&step.generations));
        for (pass, generation) in steps {
            let held =
                self.requests.get(&pass.request).ok_or(format!("{} is held and gone", pass.request))?;
            if held.generation == *generation && held.world != Some(pass.world) {
                return Err(format!(
                    "request {} passes world {}, it has {:?}",
                    pass.request, pass.world, held.world
                ));
            }
        }
        Ok(())
    }
}
