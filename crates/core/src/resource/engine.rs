//! The engine: every resource of a model, in the order of their dependencies, taken through steps.

mod requests;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mstar_kernels::mutant::planted;

use super::token::Held;
use super::{
    Admission, AdmittedStep, Outcome, PlannedStep, PreplannedStep, Promotion, StepContext, dependency_order,
};
use crate::attend::{Observer, Phase, Timer, Work};
use crate::graph::{Bucket, Fence, Lease, NoFence};
use crate::{Error, Resource, ResourceName, Result, Slot, Step, StepSerial};

/// Serials are unique in the process, so that a plan of one engine is never taken for another's.
static NEXT_SERIAL: AtomicU64 = AtomicU64::new(1);

/// How an engine runs its steps.
pub struct EngineOptions {
    /// Buffer sets, at least 1; preplanning needs 2.
    pub slots: usize,
    /// Whether steps are planned ahead. Where they are, slots alternate and need no fence.
    pub preplan: bool,
    /// Told what each phase cost.
    pub observer: Option<Arc<dyn Observer>>,
    /// Waits before a slot is planned again, where a resource needs that.
    pub fence: Arc<dyn Fence>,
}

impl Default for EngineOptions {
    /// Two slots, preplanning, nobody listening, the CPU's fence.
    fn default() -> EngineOptions {
        EngineOptions { slots: 2, preplan: true, observer: None, fence: Arc::new(NoFence) }
    }
}

impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EngineOptions { slots, preplan, observer, fence: _ } = self;
        f.debug_struct("EngineOptions")
            .field("slots", slots)
            .field("preplan", preplan)
            .field("observed", &observer.is_some())
            .finish_non_exhaustive()
    }
}

/// Every resource of a model, in dependency order, taken through steps.
///
/// The order of a step's life is the order of its types:
///
/// ```
/// # use mstar_core::{Admission, Engine, Step};
/// # fn demo() -> mstar_core::Result<()> {
/// let engine = Engine::new(vec![])?;
/// if let Admission::Admitted(admitted) = engine.admit(Step::new("decode"))? {
///     let planned = engine.plan(admitted)?;
///     // ... a forward over its layers ...
///     engine.commit(planned)?;
/// }
/// # Ok(()) }
/// # demo().unwrap();
/// ```
///
/// What is out of order does not compile. A step that was not planned cannot be committed:
///
/// ```compile_fail,E0308
/// # use mstar_core::{AdmittedStep, Engine};
/// fn wrong(engine: &Engine, admitted: AdmittedStep) {
///     engine.commit(admitted);
/// }
/// ```
///
/// nor run:
///
/// ```compile_fail,E0599
/// # use mstar_core::AdmittedStep;
/// fn wrong(admitted: &AdmittedStep) {
///     admitted.forward("main", &mstar_kernels::Stream::cpu());
/// }
/// ```
///
/// nor planned or committed twice:
///
/// ```compile_fail,E0382
/// # use mstar_core::{Engine, PlannedStep};
/// fn wrong(engine: &Engine, planned: PlannedStep) {
///     engine.commit(planned).unwrap();
///     engine.commit(planned).unwrap();
/// }
/// ```
///
/// A forward cannot outlive its plan:
///
/// ```compile_fail,E0505
/// # use mstar_core::{Engine, PlannedStep};
/// fn wrong(engine: &Engine, planned: PlannedStep) {
///     let stream = mstar_kernels::Stream::cpu();
///     let forward = planned.forward("main", &stream);
///     engine.commit(planned).unwrap();
///     println!("{}", forward.layer());
/// }
/// ```
///
/// and a plan made ahead runs no layer before it is promoted:
///
/// ```compile_fail,E0599
/// # use mstar_core::PreplannedStep;
/// fn wrong(ahead: &PreplannedStep) {
///     ahead.forward("main", &mstar_kernels::Stream::cpu());
/// }
/// ```
pub struct Engine {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    resources: Vec<Arc<dyn Resource>>,
    options: EngineOptions,
    /// Steps between admission and their end, oldest first; at most two.
    outstanding: Mutex<Vec<Outstanding>>,
    used: Mutex<Vec<bool>>,
}

/// A step that resources hold something for.
struct Outstanding {
    serial: StepSerial,
    step: Arc<Step>,
    slot: Slot,
    /// How many resources, in order, have reserved.
    reserved: usize,
}

/// A step that could not be planned. Everything it had reserved is rolled back.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct PlanFailed {
    /// What went wrong.
    #[source]
    pub error: Error,
    /// The step, as it was declared.
    pub step: Arc<Step>,
}

/// A preplanned step that is still that: the one before it has not ended.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct PromoteFailed {
    /// What went wrong.
    #[source]
    pub error: Error,
    /// The step, to promote later or to clear; `None` when it is gone and everything of it is undone.
    pub step: Option<PreplannedStep>,
}

impl From<PlanFailed> for Error {
    fn from(failed: PlanFailed) -> Error {
        failed.error
    }
}

impl From<PromoteFailed> for Error {
    /// The error alone; a step still in hand is cleared.
    fn from(failed: PromoteFailed) -> Error {
        failed.error
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Outstanding>> {
        self.outstanding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn observer(&self) -> Option<&dyn Observer> {
        self.options.observer.as_deref()
    }

    /// Ends a step as if it had not been, and first the one planned on top of it. Nothing happens when it has ended.
    pub(super) fn roll_back(&self, serial: StepSerial) {
        let undone = {
            let mut outstanding = self.lock();
            let Some(at) = outstanding.iter().position(|step| step.serial == serial) else { return };
            outstanding.split_off(at)
        };
        for mut step in undone.into_iter().rev() {
            if planted("refusal-keeps-a-reservation") {
                step.reserved = step.reserved.saturating_sub(1);
            }
            for resource in self.resources[..step.reserved].iter().rev() {
                resource.rollback(step.serial);
            }
        }
    }

    fn timed<T>(&self, phase: Phase, resource: &dyn Resource, f: impl FnOnce() -> T) -> T {
        let timer = Timer::start(self.observer());
        let value = f();
        timer.stop(phase, resource.name(), None, Work::default);
        value
    }

    fn known(&self) -> Vec<ResourceName> {
        self.resources.iter().map(|r| r.name().clone()).collect()
    }
}

impl Engine {
    /// The engine over `resources`, given in any order, with the default options.
    ///
    /// # Errors
    /// As [`dependency_order`].
    pub fn new(resources: Vec<Arc<dyn Resource>>) -> Result<Engine> {
        Engine::with_options(resources, EngineOptions::default())
    }

    /// The engine over `resources`.
    ///
    /// # Errors
    /// As [`dependency_order`]; [`Error::Order`] for options that cannot be; a resource that cannot be among the others.
    pub fn with_options(resources: Vec<Arc<dyn Resource>>, options: EngineOptions) -> Result<Engine> {
        if options.slots == 0 || (options.preplan && options.slots < 2) {
            let why = format!("{} slots; 1 is the least, and 2 with preplanning", options.slots);
            return Err(Error::Order { call: "Engine::with_options", why });
        }
        let named: Vec<_> = resources.iter().map(|r| (r.name().clone(), r.depends_on())).collect();
        let order = dependency_order(&named)?;
        let resources: Vec<_> = order.into_iter().map(|i| Arc::clone(&resources[i])).collect();
        for resource in &resources {
            let others = || resources.iter().filter(|other| other.name() != resource.name());
            let prints: Vec<_> = others().map(|other| (other.name().clone(), other.fingerprint())).collect();
            let unskippable: Vec<_> = others()
                .filter(|other| !other.prefix_skip_safe())
                .map(|other| other.name().clone())
                .collect();
            resource.bind(&prints, &unskippable)?;
        }
        let used = Mutex::new(vec![false; options.slots]);
        Ok(Engine { shared: Arc::new(Shared { resources, options, outstanding: Mutex::default(), used }) })
    }

    /// The resources, dependencies first.
    pub fn resources(&self) -> &[Arc<dyn Resource>] {
        &self.shared.resources
    }

    /// Whether every resource allows a step to be planned while the one before it runs, and the options ask for it.
    pub fn supports_preplan(&self) -> bool {
        self.shared.options.preplan && self.shared.resources.iter().all(|r| r.supports_preplan())
    }

    /// Buffer sets that plans live in.
    pub fn slots(&self) -> usize {
        self.shared.options.slots
    }

    /// Steps between admission and their end: 0, 1 or 2.
    pub fn outstanding(&self) -> usize {
        self.shared.lock().len()
    }

    /// Reserves what `step` needs of every resource, to run eagerly.
    ///
    /// # Errors
    /// [`Error::Order`] while another step is outstanding (see [`Engine::preplan`]); a step that could never be
    /// admitted. Nothing is reserved then.
    pub fn admit(&self, step: impl Into<Arc<Step>>) -> Result<Admission<AdmittedStep>> {
        Ok(self.reserve(step.into(), None, None, None)?.map(AdmittedStep))
    }

    /// Reserves what `step` needs, padded to `bucket`, and leases one of the bucket's buffer sets for it.
    ///
    /// # Errors
    /// As [`Engine::admit`].
    pub fn admit_in(&self, step: impl Into<Arc<Step>>, bucket: &Bucket) -> Result<Admission<AdmittedStep>> {
        Ok(self.reserve(step.into(), Some(bucket), None, None)?.map(AdmittedStep))
    }

    /// As [`Engine::admit_in`], in the slot that a warm-up has come to.
    pub(crate) fn admit_in_slot(
        &self,
        step: Step,
        bucket: &Bucket,
        slot: Slot,
    ) -> Result<Admission<AdmittedStep>> {
        Ok(self.reserve(Arc::new(step), Some(bucket), None, Some(slot))?.map(AdmittedStep))
    }

    /// Turns an admitted step into device work, resource after resource.
    ///
    /// # Errors
    /// What a resource says; the step is rolled back, and comes back as it was declared.
    pub fn plan(&self, admitted: AdmittedStep) -> Result<PlannedStep, PlanFailed> {
        let held = admitted.0;
        match self.own(&held, "Engine::plan").and_then(|()| self.plan_held(&held)) {
            Ok(()) => Ok(PlannedStep(held)),
            Err(error) => Err(PlanFailed { error, step: Arc::clone(&held.step) }),
        }
    }

    /// Keeps what the step did, and clears its marks.
    ///
    /// # Errors
    /// A broken invariant only. Every resource has been told all the same, and the step has ended.
    pub fn commit(&self, planned: PlannedStep) -> Result<()> {
        let held = planned.0;
        self.own(&held, "Engine::commit")?;
        let mut first = Ok(());
        for resource in &self.shared.resources {
            let said =
                self.shared.timed(Phase::Commit, &**resource, || resource.commit(held.cx.serial, &held.step));
            first = first.and(said);
        }
        // The token's drop finds nothing to roll back any more.
        self.shared.lock().retain(|step| step.serial != held.cx.serial);
        first
    }

    /// Undoes a step: lengths, pages, forks and labels are exactly as they were. A step that was planned ahead on top
    /// of it is cleared too, and cannot be promoted any more.
    pub fn abort(&self, step: impl Into<Abandoned>) {
        drop(step.into());
    }

    /// Plans `step` into another slot while `running` is outstanding, on the lengths that its commit will leave.
    ///
    /// # Errors
    /// [`Error::Order`] when a second step is outstanding already, a resource does not support it, or `running` is not
    /// this engine's; else as [`Engine::admit`] and [`Engine::plan`]. Nothing is reserved then.
    pub fn preplan(
        &self,
        running: &PlannedStep,
        step: impl Into<Arc<Step>>,
    ) -> Result<Admission<PreplannedStep>> {
        self.preplan_padded(running, step.into(), None)
    }

    /// As [`Engine::preplan`], padded to `bucket`.
    ///
    /// # Errors
    /// As [`Engine::preplan`].
    pub fn preplan_in(
        &self,
        running: &PlannedStep,
        step: impl Into<Arc<Step>>,
        bucket: &Bucket,
    ) -> Result<Admission<PreplannedStep>> {
        self.preplan_padded(running, step.into(), Some(bucket))
    }

    fn preplan_padded(
        &self,
        running: &PlannedStep,
        step: Arc<Step>,
        bucket: Option<&Bucket>,
    ) -> Result<Admission<PreplannedStep>> {
        let call = "Engine::preplan";
        self.own(&running.0, call)?;
        let unwilling = self.shared.resources.iter().find(|r| !r.supports_preplan());
        if let Some(resource) = unwilling {
            let why =
                format!("{} does not support it; admit the step when its turn has come", resource.name());
            return Err(Error::Order { call, why });
        }
        if !self.shared.options.preplan {
            return Err(Error::Order { call, why: "switched off in the engine's options".into() });
        }
        let held = match self.reserve(step, bucket, Some(running.serial()), None)? {
            Admission::Admitted(held) => held,
            Admission::NotReady(refusal) => return Ok(Admission::NotReady(refusal)),
            Admission::Refused(refusal) => return Ok(Admission::Refused(refusal)),
        };
        self.plan_held(&held)?;
        Ok(Admission::Admitted(PreplannedStep(held)))
    }

    /// Makes a step that was planned ahead the current one, now that the one before it has ended. If generations and
    /// lengths are those it was planned for, its plans stand. If anything moved, all of it is undone and the step
    /// admitted and planned afresh, which may be refused like any other.
    ///
    /// # Errors
    /// [`Error::Order`] while the step before is outstanding (the token comes back), or when the step before was aborted
    /// and this one cleared with it; else what a resource says, with everything undone.
    pub fn promote(&self, ahead: PreplannedStep) -> Result<Admission<PlannedStep>, PromoteFailed> {
        let call = "Engine::promote";
        let mut held = ahead.0;
        let fail = |error| PromoteFailed { error, step: None };
        self.own(&held, call).map_err(fail)?;
        let position = self.shared.lock().iter().position(|step| step.serial == held.cx.serial);
        match position {
            Some(0) => {}
            Some(_) => {
                let why = "the step before it is outstanding; commit that first".into();
                let error = Error::Order { call, why };
                return Err(PromoteFailed { error, step: Some(PreplannedStep(held)) });
            }
            None => {
                let why =
                    "the step before it was aborted, and this one cleared with it; admit it again".into();
                return Err(fail(Error::Order { call, why }));
            }
        }
        held.cx.preplan = false;
        let mut stale = false;
        for resource in &self.shared.resources {
            let moved = resource.promote(&held.cx, &held.step).map_err(fail)? == Promotion::Stale;
            stale |= moved && !planted("promote-ignores-stale");
        }
        if !stale {
            return Ok(Admission::Admitted(PlannedStep(held)));
        }
        let (step, bucket) =
            (Arc::clone(&held.step), held.lease.as_ref().map(|lease| lease.bucket().clone()));
        drop(held);
        match self.reserve(step, bucket.as_ref(), None, None).map_err(fail)? {
            Admission::Admitted(held) => {
                let planned = self.plan(AdmittedStep(held)).map_err(|failed| fail(failed.error))?;
                Ok(Admission::Admitted(planned))
            }
            Admission::NotReady(refusal) => Ok(Admission::NotReady(refusal)),
            Admission::Refused(refusal) => Ok(Admission::Refused(refusal)),
        }
    }

    /// Undoes a step that was planned ahead: forks are rewound, invented labels removed, marks dropped.
    pub fn clear(&self, ahead: PreplannedStep) {
        drop(ahead);
    }

    fn own(&self, held: &Held, call: &'static str) -> Result<()> {
        if Arc::ptr_eq(&held.shared, &self.shared) {
            return Ok(());
        }
        Err(Error::Order { call, why: format!("step {} belongs to another engine", held.cx.serial) })
    }

    fn plan_held(&self, held: &Held) -> Result<()> {
        mstar_kernels::cpu::probe();
        for resource in &self.shared.resources {
            self.shared.timed(Phase::Plan, &**resource, || resource.plan(&held.cx, &held.step))?;
        }
        Ok(())
    }

    /// Takes a slot (`wanted`, or the first free) and asks every resource in turn. `after` is the step that this one is
    /// planned on top of.
    fn reserve(
        &self,
        step: Arc<Step>,
        bucket: Option<&Bucket>,
        after: Option<StepSerial>,
        wanted: Option<Slot>,
    ) -> Result<Admission<Box<Held>>> {
        self.check_names(&step)?;
        let serial = StepSerial(NEXT_SERIAL.fetch_add(1, Ordering::Relaxed));
        let slot = self.take_slot(serial, &step, after, wanted)?;
        let lease = bucket.map(|bucket| Lease::new(bucket.clone(), slot));
        let cx =
            StepContext { serial, slot, preplan: after.is_some(), bucket: lease.as_ref().map(Lease::shape) };
        // The token exists before the first reservation, so whatever happens below is undone by its drop.
        let held = Box::new(Held { shared: Arc::clone(&self.shared), step, cx, lease });
        self.fence(slot)?;
        for (i, resource) in self.shared.resources.iter().enumerate() {
            let outcome =
                self.shared.timed(Phase::Admit, &**resource, || resource.admit(&held.cx, &held.step))?;
            match outcome {
                Outcome::Admitted => {}
                Outcome::NotReady(refusal) => return Ok(Admission::NotReady(refusal)),
                Outcome::Refused(refusal) => return Ok(Admission::Refused(refusal)),
            }
            if let Some(step) = self.shared.lock().iter_mut().find(|step| step.serial == serial) {
                step.reserved = i + 1;
            }
        }
        Ok(Admission::Admitted(held))
    }

    fn check_names(&self, step: &Step) -> Result<()> {
        match step.resources.keys().find(|name| self.find(name).is_none()) {
            Some(unknown) => {
                Err(Error::UnknownResource { resource: unknown.clone(), known: self.shared.known() })
            }
            None => Ok(()),
        }
    }

    fn find(&self, name: &ResourceName) -> Option<&Arc<dyn Resource>> {
        self.shared.resources.iter().find(|r| r.name() == name)
    }

    fn take_slot(
        &self,
        serial: StepSerial,
        step: &Arc<Step>,
        after: Option<StepSerial>,
        wanted: Option<Slot>,
    ) -> Result<Slot> {
        let mut outstanding = self.shared.lock();
        let refuse = |call, why: &str| Err(Error::Order { call, why: why.into() });
        match (after, outstanding.as_slice()) {
            (None, []) => {}
            (Some(before), [only]) if only.serial == before => {}
            (None, _) => {
                let why = "a step is outstanding; commit, abort, promote or clear it, or preplan this one";
                return refuse("Engine::admit", why);
            }
            (Some(_), [_, _, ..]) => {
                return refuse("Engine::preplan", "two steps are outstanding; promote or clear one first");
            }
            (Some(_), _) => {
                return refuse("Engine::preplan", "the step given is not the one that is outstanding");
            }
        }
        let mut slots = (0..self.slots()).map(Slot);
        let free = slots.find(|s| wanted.is_none_or(|w| w == *s) && outstanding.iter().all(|o| o.slot != *s));
        let slot = free.ok_or_else(|| Error::Invariant("no slot is free with so few steps".into()))?;
        outstanding.push(Outstanding { serial, step: Arc::clone(step), slot, reserved: 0 });
        Ok(slot)
    }

    /// Waits for a slot that was planned before, when its staging memory may still be read.
    fn fence(&self, slot: Slot) -> Result<()> {
        let again = {
            let mut used = self.shared.used.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut used[slot.0], true)
        };
        let hazard = || self.shared.resources.iter().any(|r| r.force_double_buffer());
        if again && !self.supports_preplan() && hazard() {
            self.shared.options.fence.wait(slot)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("resources", &self.shared.known())
            .field("options", &self.shared.options)
            .field("outstanding", &self.outstanding())
            .finish()
    }
}

/// A step that is given up: admitted, or planned.
pub struct Abandoned(#[allow(dead_code, reason = "dropping it is what rolls the step back")] Box<Held>);

impl fmt::Debug for Abandoned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Abandoned({})", self.0.cx.serial)
    }
}

impl From<AdmittedStep> for Abandoned {
    fn from(step: AdmittedStep) -> Abandoned {
        Abandoned(step.0)
    }
}

impl From<PlannedStep> for Abandoned {
    fn from(step: PlannedStep) -> Abandoned {
        Abandoned(step.0)
    }
}

#[cfg(test)]
mod tests;
