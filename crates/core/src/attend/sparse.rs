//! Sparse attention: a light indexer picks which keys a layer attends, and what a backend of it must offer.
//!
//! A layer is *full* when it selects: it stores the step's index keys, scores every key that a query may see and keeps
//! the best `index_topk`. Any other layer is *shared* and attends the pick of the last full layer before it; which
//! one that is follows from the layer alone ([`IndexGeometry::full_layer_of`]), and [`Forward`] remembers that it has
//! selected. Whether a query attends a pick or every key is decided by its own number of visible keys, so that a
//! neighbour which crosses `index_topk` changes none of its bits.

use std::fmt;

use mstar_kernels::mutant::planted;
use mstar_kernels::{DType, Device, TensorMut, TensorRef};

use super::{
    Attention, AttnGeometry, AttnOut, BuildContext, Forward, Fresh, Phase, Query, Rank, Reason, StepShape,
    Timer, Work, pages::key_of, waited, write_kv,
};
use crate::kv::{PagedKv, PlaneConfig};
use crate::{Error, PlanId, Resource, ResourceName, Result};
use std::sync::Arc;

/// How an index key is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IndexFormat {
    /// `Di` elements of f32.
    F32,
    /// `Di` elements of bf16.
    Bf16,
    /// `Di` elements of f16.
    F16,
    /// `Di` bytes of e4m3 and an f32 scale: `[Di e4m3 | f32]`, as DeepSeek stores them.
    Fp8,
}

impl IndexFormat {
    /// The format that keeps keys of `dtype` as they are; `None` when there is none.
    pub const fn of(dtype: DType) -> Option<IndexFormat> {
        match dtype {
            DType::F32 => Some(IndexFormat::F32),
            DType::Bf16 => Some(IndexFormat::Bf16),
            DType::F16 => Some(IndexFormat::F16),
            _ => None,
        }
    }

    /// The stored element type.
    pub const fn dtype(self) -> DType {
        match self {
            IndexFormat::F32 => DType::F32,
            IndexFormat::Bf16 => DType::Bf16,
            IndexFormat::F16 => DType::F16,
            IndexFormat::Fp8 => DType::U8,
        }
    }

    /// Stored elements of a key of `index_head_dim` lanes.
    pub const fn width(self, index_head_dim: usize) -> usize {
        match self {
            IndexFormat::Fp8 => index_head_dim + 4,
            _ => index_head_dim,
        }
    }

    /// The format as a spec writes it.
    pub const fn name(self) -> &'static str {
        match self {
            IndexFormat::F32 => "f32",
            IndexFormat::Bf16 => "bf16",
            IndexFormat::F16 => "f16",
            IndexFormat::Fp8 => "fp8",
        }
    }
}

impl fmt::Display for IndexFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where index keys are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum IndexStore {
    /// A plane of the latent cache's pages: one table, forks, prefix hits, retention and offload for both.
    #[default]
    Pages,
    /// Buffers of each request, which grow; no forks, no prefix hits, no offload.
    Buffers,
}

/// The indexer of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexGeometry {
    /// `Hi`.
    pub index_n_heads: usize,
    /// `Di`.
    pub index_head_dim: usize,
    /// `K`: keys that a query attends at the most.
    pub index_topk: usize,
    /// How a key is stored.
    pub format: IndexFormat,
    /// Where keys are kept.
    pub store: IndexStore,
    /// Layers that select, rising; the first is 0.
    pub full_layers: Vec<usize>,
}

impl IndexGeometry {
    /// Whether `layer` selects.
    pub fn is_full(&self, layer: usize) -> bool {
        self.full_layers.binary_search(&layer).is_ok()
    }

    /// The layer whose pick `layer` attends: itself when it is full, else the last full one before it.
    pub fn full_layer_of(&self, layer: usize) -> Option<usize> {
        let last = if planted("dsa-wrong-full-layer") { 0 } else { layer };
        let upto = self.full_layers.partition_point(|&full| full <= last);
        upto.checked_sub(1).map(|at| self.full_layers[at])
    }

    /// The plane that holds the keys of the resource `name`; `None` when buffers do.
    pub fn plane(&self, name: &ResourceName) -> Option<PlaneConfig> {
        (self.store == IndexStore::Pages).then(|| PlaneConfig {
            name: IndexGeometry::plane_name(name),
            dtype: self.format.dtype(),
            width: self.format.width(self.index_head_dim),
            layers: Some(self.full_layers.clone()),
        })
    }

    /// What the plane of the resource `name` is called.
    pub fn plane_name(name: &ResourceName) -> String {
        format!("{name}.index_keys")
    }
}

/// A pick that a layer of a forward made: what `select` and `shared_selection` hand to `attend`. It names buffers of
/// the plan, which hold it until the next full layer of that plan selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    plan: PlanId,
    layer: usize,
    turn: u64,
}

impl Selection {
    /// The pick that the full layer `layer` made under `plan`, the `turn`-th of the buffers that hold it: a number that they
    /// never give again, so that a pick which another forward overwrote is known for it.
    pub fn new(plan: PlanId, layer: usize, turn: u64) -> Selection {
        Selection { plan, layer, turn }
    }

    /// Whose rows it is for.
    pub fn plan(&self) -> &PlanId {
        &self.plan
    }

    /// The full layer that picked.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Which of the picks that its buffers have held it is.
    pub fn turn(&self) -> u64 {
        self.turn
    }
}

/// Pairs of a query and a key in one layer of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SparseWork {
    /// Scored by the indexer, in a full layer.
    pub scored: u64,
    /// Attended.
    pub attended: u64,
    /// That attention to every visible key would attend.
    pub dense: u64,
}

impl std::ops::AddAssign for SparseWork {
    fn add_assign(&mut self, other: SparseWork) {
        self.scored += other.scored;
        self.attended += other.attended;
        self.dense += other.dense;
    }
}

/// An indexer and the attention over its picks, as a resource over a latent cache.
///
/// Calls of a layer come in the order: latents written, [`store_keys`](SparseAttention::store_keys) (full layers),
/// [`select`](SparseAttention::select) (full layers, when the plan [needs it](SparseAttention::needs_selection)),
/// [`attend`](SparseAttention::attend). [`attend_sparse`] makes them all.
pub trait SparseAttention: Resource {
    /// The cache whose latents are attended.
    fn kv_cache(&self) -> &dyn PagedKv;

    /// The indexer.
    fn index(&self) -> &IndexGeometry;

    /// Whether some query of the plan sees more than `index_topk` keys.
    ///
    /// # Errors
    /// A missing plan.
    fn needs_selection(&self, plan: &PlanId) -> Result<bool>;

    /// Keeps the step's index keys `[T, Di]` of the forward's layer, each at its request's position.
    ///
    /// # Errors
    /// A missing plan, a layer that is not full, keys of another shape or dtype.
    fn store_keys(&self, forward: &Forward<'_>, keys: TensorRef<'_>) -> Result<()>;

    /// Picks, for each query that sees more than `index_topk` keys, its best by `sum_h w[h] * relu(q[h] . k)`, and notes
    /// in the cursor that this layer has selected. `q` `[T, Hi, Di]`, `weights` `[T, Hi]` f32, scales folded in.
    ///
    /// # Errors
    /// As [`SparseAttention::store_keys`]; keys that were not stored.
    fn select(
        &self,
        forward: &mut Forward<'_>,
        q: TensorRef<'_>,
        weights: TensorRef<'_>,
    ) -> Result<Selection>;

    /// The pick that the forward's layer attends, made by the full layer that it shares.
    ///
    /// # Errors
    /// [`Error::Order`] when that layer has not selected in this forward.
    fn shared_selection(&self, forward: &Forward<'_>) -> Result<Selection>;

    /// Absorbed attention of one layer: queries with a pick attend it, the others every key that they see. `selection`
    /// is `None` for a plan that needs none.
    ///
    /// # Errors
    /// A missing plan; a plan that needs a selection and is given none, or one of another plan; tensors that do not fit.
    fn attend(
        &self,
        forward: &Forward<'_>,
        selection: Option<&Selection>,
        q: Query<'_>,
        out: AttnOut<'_>,
    ) -> Result<()>;

    /// Copies a pick to `out` `[T, K]` i32: request-local positions, rising, -1 padded; rows without a pick are all -1.
    ///
    /// # Errors
    /// A pick that was overwritten, or an `out` that does not fit.
    fn copy_selection(&self, selection: &Selection, out: TensorMut<'_>) -> Result<()>;

    /// What a capture of the calls of a layer of this plan takes for granted, as [`Attention::capture_key`]; the cache's own writes
    /// and a dense resource beside it are the caller's to add ([`sparse_capture_key`] does). `None` where they cannot be captured.
    fn capture_key(&self, plan: &PlanId) -> Option<u64> {
        let _ = plan;
        None
    }

    /// Brings about on the host what the calls of the forward's layer do there, for a captured region of them that is about to run
    /// again: a full layer has stored its keys and selected, and the cursor knows. What has no [`SparseAttention::capture_key`] is
    /// never asked.
    ///
    /// # Errors
    /// A missing plan; a shared layer whose full layer has not selected in this forward, as [`SparseAttention::attend`] says it.
    fn replaying(&self, forward: &mut Forward<'_>) -> Result<()> {
        let _ = forward;
        Ok(())
    }

    /// Pairs scored and attended in a layer of the plan.
    fn sparse_work(&self, plan: &PlanId) -> SparseWork;

    /// The least work of selecting and of attending one layer of the plan.
    fn work(&self, plan: &PlanId) -> (Work, Work);

    /// Which kernels run this plan, for reports.
    fn kernel(&self, plan: &PlanId) -> Option<String>;
}

/// What a full layer hands its indexer.
#[derive(Clone, Copy, Debug)]
pub struct Indexed<'a> {
    /// `[T, Di]`: the step's index keys.
    pub keys: TensorRef<'a>,
    /// `[T, Hi, Di]`: index queries.
    pub q: TensorRef<'a>,
    /// `[T, Hi]` f32: head weights, scales folded in.
    pub weights: TensorRef<'a>,
}

/// What a capture of [`attend_sparse`] over this plan takes for granted, as [`Attention::capture_key`]: where the cache finds the slots
/// that it writes, what the indexer and the attention over its picks do, and what `attention` does where it runs the plan. Which
/// queries are selected is no part of it, but the plan's staged rows. `None` where it cannot be captured.
pub fn sparse_capture_key(
    sparse: &dyn SparseAttention,
    attention: Option<&dyn Attention>,
    plan: &PlanId,
) -> Option<u64> {
    let of_dense = match attention {
        Some(attention) if !sparse.needs_selection(plan).ok()? => attention.capture_key(plan)?,
        _ => 0,
    };
    Some(key_of(&[sparse.kv_cache().capture_key(plan)?, sparse.capture_key(plan)?, of_dense]))
}

/// Attends one layer of a model with an indexer: writes `fresh` latents and index keys, selects where the layer is full
/// and the plan needs it, and attends. `attention` is the dense resource over the same cache; it runs plans in which
/// no query sees more than `index_topk` keys, with the same bits.
///
/// # Errors
/// [`Error::Step`] when a full layer brings no `indexed`, or a shared one does; else what the resources say.
pub fn attend_sparse(
    sparse: &dyn SparseAttention,
    attention: Option<&dyn Attention>,
    forward: &mut Forward<'_>,
    q: Query<'_>,
    fresh: Fresh<'_>,
    indexed: Option<Indexed<'_>>,
    out: AttnOut<'_>,
) -> Result<()> {
    let layer = forward.layer();
    let full = sparse.index().is_full(layer);
    if full != indexed.is_some() {
        let why = if full {
            format!("layer {layer} selects; give its index keys, queries and weights")
        } else {
            format!("layer {layer} shares a selection; give no index keys, queries or weights")
        };
        return Err(Error::Step { resource: sparse.name().clone(), why });
    }
    if let Some(entries) = fresh {
        write_kv(sparse.kv_cache(), forward, entries)?;
    }
    if let Some(indexed) = indexed {
        let timer = Timer::start(forward.observer());
        sparse.store_keys(forward, indexed.keys)?;
        waited(forward)?;
        timer.stop(Phase::KvWrite, sparse.name(), Some(layer), || stored(&indexed.keys));
    }
    if !sparse.needs_selection(forward.plan_id())? {
        let timer = Timer::start(forward.observer());
        match attention {
            Some(attention) => attention.run(forward, q, None, out)?,
            None => sparse.attend(forward, None, q, out)?,
        }
        let name = attention.map_or(sparse.name(), |attention| attention.name());
        waited(forward)?;
        let least =
            || attention.map_or_else(|| sparse.work(forward.plan_id()).1, |a| a.work(forward.plan_id()));
        timer.stop(Phase::Attend, name, Some(layer), least);
        return Ok(());
    }
    let selection = match indexed {
        Some(indexed) => {
            let timer = Timer::start(forward.observer());
            let selection = sparse.select(forward, indexed.q, indexed.weights)?;
            waited(forward)?;
            timer.stop(Phase::Select, sparse.name(), Some(layer), || sparse.work(forward.plan_id()).0);
            selection
        }
        None => sparse.shared_selection(forward)?,
    };
    let timer = Timer::start(forward.observer());
    sparse.attend(forward, Some(&selection), q, out)?;
    waited(forward)?;
    timer.stop(Phase::Attend, sparse.name(), Some(layer), || sparse.work(forward.plan_id()).1);
    Ok(())
}

fn stored(keys: &TensorRef<'_>) -> Work {
    let bytes = (keys.numel() * keys.dtype().size()) as u64;
    let tokens = keys.shape().first().copied().unwrap_or(0) as u64;
    Work { tokens, bytes_read: bytes, bytes_written: bytes, flops: 0 }
}

/// A backend of sparse attention that was compiled in: what a resource of kind `dsa` is built by.
pub trait SparseFactory: Send + Sync {
    /// Its name, which is the kind in specs.
    fn name(&self) -> &'static str;

    /// One line on what it is, for `mstar backends`.
    fn about(&self) -> &'static str;

    /// How well it serves `geometry` and `index` on `device`.
    ///
    /// # Errors
    /// Why not, and what would help.
    fn supports(
        &self,
        device: Device,
        geometry: &AttnGeometry,
        index: &IndexGeometry,
    ) -> Result<Rank, Reason>;

    /// Bytes of what the resource allocates on `device` for each plan label and slot, for steps of up to `largest`.
    ///
    /// # Errors
    /// A geometry that it does not serve.
    fn bytes(
        &self,
        device: Device,
        geometry: &AttnGeometry,
        index: &IndexGeometry,
        largest: StepShape,
    ) -> Result<usize>;

    /// The resource.
    ///
    /// # Errors
    /// A cache without the plane that `index` asks for; a geometry or device that is not served; memory that cannot be had.
    fn build(&self, cx: &BuildContext, index: &IndexGeometry) -> Result<Arc<dyn SparseAttention>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(full_layers: &[usize]) -> IndexGeometry {
        IndexGeometry {
            index_n_heads: 4,
            index_head_dim: 32,
            index_topk: 16,
            format: IndexFormat::Bf16,
            store: IndexStore::Pages,
            full_layers: full_layers.to_vec(),
        }
    }

    #[test]
    fn a_shared_layer_takes_the_last_full_one_before_it() {
        let index = index(&[0, 2, 5]);
        let of: Vec<_> = (0..8).map(|layer| index.full_layer_of(layer)).collect();
        assert_eq!(of, [0, 0, 2, 2, 2, 5, 5, 5].map(Some));
        assert!(index.is_full(2) && !index.is_full(3));
    }

    #[test]
    fn quantised_keys_carry_their_scale() {
        assert_eq!((IndexFormat::Fp8.width(128), IndexFormat::Fp8.dtype()), (132, DType::U8));
        let plane = index(&[0, 2]).plane(&"dsa".into()).unwrap();
        assert_eq!(
            (plane.name.as_str(), plane.width, plane.layers),
            ("dsa.index_keys", 32, Some(vec![0, 2]))
        );
    }
}
