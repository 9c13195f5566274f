//! The one call that a layer makes, whichever backend the spec named.

use mstar_kernels::{Stream, TensorMut, TensorRef};

use crate::kv::KvEntries;
use crate::{Label, PlanId, Resource, Result, Slot, StepSerial};

/// A layer's queries.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Query<'a> {
    /// `q` `[T, H, D]`.
    Heads(TensorRef<'a>),
    /// Absorbed MLA queries.
    Absorbed {
        /// `[T, H, C]`.
        nope: TensorRef<'a>,
        /// `[T, H, E]`.
        pe: TensorRef<'a>,
    },
}

/// The step's own keys and values, for backends that take them straight (`requires_kv_write` false).
pub type Fresh<'a> = Option<KvEntries<'a>>;

/// Where a layer's result goes.
#[derive(Debug)]
pub struct AttnOut<'a> {
    /// `[T, H, Dv]` (or `[T, H, C]`), in the query's dtype.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32, natural logarithm; `-inf` where a query sees nothing.
    pub lse: Option<TensorMut<'a>>,
}

/// One forward's cursor: which plan, which layer.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The step.
    pub serial: StepSerial,
    /// Its buffer set.
    pub slot: Slot,
    /// The plan label that runs.
    pub label: Label,
    /// The layer that runs.
    pub layer: usize,
    /// The caller's queue.
    pub stream: &'a Stream,
}

impl Forward<'_> {
    /// The plan that this forward reads.
    pub fn plan_id(&self) -> PlanId {
        PlanId { slot: self.slot, label: self.label.clone(), serial: self.serial }
    }
}

/// An attention resource.
pub trait Attention: Resource {
    /// Whether a layer must write this step's keys and values through the KV resource before `run`.
    fn requires_kv_write(&self) -> bool;

    /// Attends one layer into the caller's buffers. Neither allocates nor waits nor reads host state that changes.
    ///
    /// # Errors
    /// A missing plan, or tensors of another shape, dtype or device than was planned.
    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, fresh: Fresh<'_>, out: AttnOut<'_>) -> Result<()>;
}
