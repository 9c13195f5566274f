//! A ring as attention resources see it.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use mstar_kernels::{Stream, TensorRef};

use super::{RingConfig, RingGroups, RingPlan, WorldSnapshot};
use crate::{Label, Outcome, PlanId, RequestId, Resource, Result, StepSerial};

/// One layer of a ring, all worlds: `M` tokens, of which each world has `ring_frames + 1` frames, the scratch last.
#[derive(Clone, Copy, Debug)]
pub struct RingLayer<'a> {
    /// `[M, G, D]`, contiguous.
    pub k: TensorRef<'a>,
    /// `[M, G, Dv]`, contiguous.
    pub v: TensorRef<'a>,
}

/// What [`RingKv::upsert`] returns: a layer, and which of its blocks each row of the plan attends.
#[derive(Clone, Debug)]
pub struct RingView<'a> {
    /// The layer's memory. Blocks that the plan does not list may hold anything.
    pub layer: RingLayer<'a>,
    /// The plan.
    pub plan: Arc<RingPlan>,
    /// The layer's group, which [`RingPlan::visible`] is asked with.
    pub group: usize,
}

impl RingView<'_> {
    /// The blocks that row `row` attends, ascending.
    ///
    /// # Panics
    /// When the plan has no such row.
    #[track_caller]
    pub fn visible(&self, row: usize) -> &[i32] {
        self.plan.visible(self.group, row)
    }
}

/// A ring of frames, as attention resources see it.
///
/// A layer calls [`upsert`](RingKv::upsert), which writes the pass's frame and says what to attend, in one: there is no
/// other write, and a second one would put the frame where it is already. [`Attention::requires_kv_write`] is therefore
/// `false` for a backend over a ring.
///
/// [`Attention::requires_kv_write`]: crate::Attention::requires_kv_write
pub trait RingKv: Resource {
    /// Its geometry.
    fn config(&self) -> &RingConfig;

    /// Its layers by geometry.
    fn groups(&self) -> &RingGroups;

    /// A plan made by [`Resource::plan`].
    ///
    /// # Errors
    /// When there is none, or it belongs to another step.
    fn ring_plan(&self, id: &PlanId) -> Result<Arc<RingPlan>>;

    /// The labels that a step was planned under.
    ///
    /// # Errors
    /// When the step was not planned.
    fn plan_labels(&self, serial: StepSerial) -> Result<Vec<Label>>;

    /// One layer, all worlds. Only what an outstanding step's plan lists may be read, and only while it is outstanding.
    ///
    /// # Errors
    /// A layer that the ring does not have.
    fn layer(&self, layer: usize) -> Result<RingLayer<'_>>;

    /// Writes one frame for every row of the plan to the scratch of its world, `k` `[R * F, G, D]` and `v`
    /// `[R * F, G, Dv]` in packed order, and returns the layer with what each row sees of it. Padded rows write nothing.
    /// May be repeated: a frame written again replaces the one before. Allocates nothing.
    ///
    /// # Errors
    /// A stale plan, a step that is not promoted, a layer that the ring does not have, tensors that are not the ring's;
    /// nothing is written.
    fn upsert(
        &self,
        id: &PlanId,
        layer: usize,
        k: TensorRef<'_>,
        v: TensorRef<'_>,
        stream: &Stream,
    ) -> Result<RingView<'_>>;

    /// The frame that a request may pass next: how many it has committed.
    ///
    /// # Errors
    /// An unknown request.
    fn clock(&self, request: &RequestId) -> Result<u64>;

    /// The world that a request holds; `None` before its first admission.
    ///
    /// # Errors
    /// An unknown request.
    fn world(&self, request: &RequestId) -> Result<Option<usize>>;

    /// Copies a request's world to the host: every layer, and the clock.
    ///
    /// # Errors
    /// An unknown request, one without a world, one that an outstanding step names, host memory that cannot be had.
    fn snapshot(&self, request: &RequestId) -> Result<WorldSnapshot>;

    /// Makes a request's world what it was when the snapshot was taken, be it of this request or another, of this ring or
    /// one of the same geometry. A request without a world claims one, or is refused when none is free.
    ///
    /// # Errors
    /// An unknown request, one that a running step names, a snapshot of another geometry; the world is as it was.
    fn restore(&self, request: &RequestId, snapshot: &WorldSnapshot) -> Result<Outcome>;
}

/// By name: a ring's bookkeeping is long, and behind a lock.
impl fmt::Debug for dyn RingKv + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RingKv({})", self.name())
    }
}
