//! The one call that a layer makes, whichever backend the spec named.
//!
//! A layer projects its queries, keys and values and calls [`attend`]. Whether the keys and values go through
//! the cache first ([`Attention::requires_kv_write`]) or straight into the kernel is the backend's affair.

mod backend;
mod forward;
mod index_buf;
mod observe;
pub mod pages;
mod sparse;

use mstar_kernels::{TensorMut, TensorRef};

pub use self::backend::{
    AttnBackend, AttnGeometry, BackendFactory, BackendOptions, Backends, BuildContext, Rank, Reason,
    ResolveError, Softmax, StepShape, resolve_attn_backend,
};
pub use self::forward::Forward;
pub use self::index_buf::IndexBuf;
pub(crate) use self::observe::Timer;
pub use self::observe::{Event, Observer, Phase, Work};
pub use self::sparse::{
    IndexFormat, IndexGeometry, IndexStore, Indexed, Selection, SparseAttention, SparseFactory, SparseWork,
    attend_sparse, sparse_capture_key,
};

use crate::kv::{KvEntries, PagedKv};
use crate::{Error, PlanId, Resource, Result};

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

impl Query<'_> {
    /// `T`: query tokens, padding among them.
    pub fn tokens(&self) -> usize {
        let (Query::Heads(q) | Query::Absorbed { nope: q, .. }) = self;
        q.shape().first().copied().unwrap_or(0)
    }
}

/// The step's own keys and values. `None` when there are none, as in attention over a context written once, or
/// when the layer has written them through the KV resource itself.
pub type Fresh<'a> = Option<KvEntries<'a>>;

/// Where a layer's result goes.
#[derive(Debug)]
pub struct AttnOut<'a> {
    /// `[T, H, Dv]` (or `[T, H, C]`), in the query's dtype.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32, natural logarithm; `-inf` where a query sees nothing.
    pub lse: Option<TensorMut<'a>>,
}

/// An attention resource.
pub trait Attention: Resource {
    /// Whether this step's keys and values must be in the cache before [`Attention::run`]; [`attend`] sees to it.
    fn requires_kv_write(&self) -> bool;

    /// The cache whose pages it reads, when it reads pages.
    fn kv_cache(&self) -> Option<&dyn PagedKv>;

    /// Attends one layer into the caller's buffers. Neither allocates nor waits nor reads host state that changes.
    /// `fresh` is the step's own entries for a backend that takes them straight, and `None` for the others.
    ///
    /// # Errors
    /// A missing plan, or tensors of another shape, dtype or device than was planned.
    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, fresh: Fresh<'_>, out: AttnOut<'_>) -> Result<()>;

    /// The least work that one layer of this plan stands for, known since it was planned.
    fn work(&self, plan: &PlanId) -> Work {
        let _ = plan;
        Work::default()
    }

    /// What a capture of [`Attention::run`] over this plan takes for granted (kernels, grids, addresses), as a number: a graph that
    /// was captured under another is captured anew. `None` where runs cannot be captured: on the CPU, where they run again.
    fn capture_key(&self, plan: &PlanId) -> Option<u64> {
        let _ = plan;
        None
    }

    /// Writes one layer's fresh entries as [`Attention::run`] would, for whoever captures runs: what the host notes of a write is no
    /// part of a graph. Returns whether it did; the captured run is then given no fresh entries.
    ///
    /// # Errors
    /// As [`Attention::run`].
    fn write_fresh(&self, forward: &Forward<'_>, fresh: KvEntries<'_>) -> Result<bool> {
        let _ = (forward, fresh);
        Ok(false)
    }

    /// Which kernel runs this plan, for reports: what runs is said, never guessed.
    fn kernel(&self, plan: &PlanId) -> Option<String> {
        let _ = plan;
        None
    }

    /// Copies each row's last hidden state, `hidden` `[T, W]`, to `out` `[R, W]`: what a head projects to logits. A row
    /// without queries yields zeros.
    ///
    /// # Errors
    /// A missing plan; shapes or dtypes that do not fit each other or the plan.
    fn select_last_hidden(
        &self,
        forward: &Forward<'_>,
        hidden: TensorRef<'_>,
        out: TensorMut<'_>,
    ) -> Result<()>;

    /// `[R + 1]`: where each row's queries start, at a fixed address for the life of a lease.
    ///
    /// # Errors
    /// A missing plan.
    fn qo_indptr_buf(&self, plan: &PlanId) -> Result<IndexBuf>;

    /// `[R]`: the rows' planned key lengths, at a fixed address for the life of a lease. Of a `context_only` plan
    /// the stored context alone, which is where the step's own entries start.
    ///
    /// # Errors
    /// A missing plan.
    fn kv_len_buf(&self, plan: &PlanId) -> Result<IndexBuf>;
}

/// Attends one layer: writes `fresh` to the cache first when the backend wants it there, runs the backend, and
/// tells the forward's observer what both cost.
///
/// # Errors
/// [`Error::Step`] when the backend needs a cache write and has no cache; else what the cache or the backend says.
pub fn attend(
    attention: &dyn Attention,
    forward: &mut Forward<'_>,
    q: Query<'_>,
    fresh: Fresh<'_>,
    out: AttnOut<'_>,
) -> Result<()> {
    let straight = match fresh {
        Some(entries) if attention.requires_kv_write() => {
            let kv = attention.kv_cache().ok_or_else(|| Error::Step {
                resource: attention.name().clone(),
                why: "needs its keys and values written first, and names no cache; give no fresh entries"
                    .into(),
            })?;
            write_kv(kv, forward, entries)?;
            None
        }
        other => other,
    };
    let layer = forward.layer();
    let timer = Timer::start(forward.observer());
    attention.run(forward, q, straight, out)?;
    waited(forward)?;
    timer.stop(Phase::Attend, attention.name(), Some(layer), || attention.work(forward.plan_id()));
    Ok(())
}

/// Writes one layer's entries to the slots that the forward's plan gave them, and reports the time.
///
/// # Errors
/// As [`PagedKv::write_kv`].
pub fn write_kv(kv: &dyn PagedKv, forward: &Forward<'_>, entries: KvEntries<'_>) -> Result<()> {
    let timer = Timer::start(forward.observer());
    kv.write_kv(forward.plan_id(), forward.layer(), entries, forward.stream())?;
    waited(forward)?;
    timer.stop(Phase::KvWrite, kv.name(), Some(forward.layer()), || written(&entries));
    Ok(())
}

/// Waits for a layer's work where somebody wants to know what it costs: on a device a call returns before its work is done.
pub(crate) fn waited(forward: &Forward<'_>) -> Result<()> {
    match forward.observer() {
        Some(_) => Ok(forward.stream().synchronize()?),
        None => Ok(()),
    }
}

fn written(entries: &KvEntries<'_>) -> Work {
    let (KvEntries::Nhd { k: a, v: b } | KvEntries::Mla { ckv: a, kpe: b }) = entries;
    let bytes = |t: &TensorRef<'_>| (t.numel() * t.dtype().size()) as u64;
    let bytes = bytes(a) + bytes(b);
    let tokens = a.shape().first().copied().unwrap_or(0) as u64;
    Work { tokens, bytes_read: bytes, bytes_written: bytes, flops: 0 }
}
