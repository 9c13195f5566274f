//! One forward's cursor through its layers.

use std::fmt;
use std::marker::PhantomData;

use mstar_kernels::Stream;

use super::{Observer, Selection};
use crate::{Label, PlanId, PlannedStep, Slot, StepSerial};

/// One forward's cursor: which plan, which layer, which layer selected last. It borrows the planned step, so
/// that a plan cannot be committed or dropped while a layer reads it.
pub struct Forward<'a> {
    plan: PlanId,
    layer: usize,
    stream: &'a Stream,
    last_selection: Option<Selection>,
    observer: Option<&'a dyn Observer>,
    step: PhantomData<&'a PlannedStep>,
}

impl<'a> Forward<'a> {
    pub(crate) fn new(plan: PlanId, stream: &'a Stream, observer: Option<&'a dyn Observer>) -> Forward<'a> {
        Forward { plan, layer: 0, stream, last_selection: None, observer, step: PhantomData }
    }

    /// A cursor over a plan that no engine keeps, for a resource used by itself. The resource still checks the id.
    pub fn detached(plan: PlanId, layer: usize, stream: &'a Stream) -> Forward<'a> {
        Forward { layer, ..Forward::new(plan, stream, None) }
    }

    /// Calls `record` with nobody told what it costs: while work is captured no clock is read and nothing is waited for.
    pub fn unobserved<T>(&mut self, record: impl FnOnce(&mut Forward<'a>) -> T) -> T {
        let observer = self.observer.take();
        let result = record(self);
        self.observer = observer;
        result
    }

    /// The plan that this forward reads.
    pub fn plan_id(&self) -> &PlanId {
        &self.plan
    }

    /// The step.
    pub fn serial(&self) -> StepSerial {
        self.plan.serial
    }

    /// Its buffer set.
    pub fn slot(&self) -> Slot {
        self.plan.slot
    }

    /// The plan label that runs.
    pub fn label(&self) -> &Label {
        &self.plan.label
    }

    /// The layer that runs, from 0.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Moves on to `layer`.
    pub fn set_layer(&mut self, layer: usize) -> &mut Self {
        self.layer = layer;
        self
    }

    /// The caller's queue.
    pub fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// The selection that a sharing layer reuses: the last one made in this forward.
    pub fn last_selection(&self) -> Option<&Selection> {
        self.last_selection.as_ref()
    }

    /// Notes what was selected last.
    pub fn note_selection(&mut self, selection: Selection) {
        self.last_selection = Some(selection);
    }

    /// Who wants to know what the forward costs.
    pub fn observer(&self) -> Option<&'a dyn Observer> {
        self.observer
    }
}

impl fmt::Debug for Forward<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forward")
            .field("plan", &self.plan)
            .field("layer", &self.layer)
            .field("last_selection", &self.last_selection)
            .finish_non_exhaustive()
    }
}
