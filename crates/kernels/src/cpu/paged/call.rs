//! One call of attention over a work list, checked, as the executor sees it.

use crate::cpu::Isa;
use crate::paged::{Family, Geometry, Variant};
use crate::work::{Row, WorkList};
use crate::{DType, TensorMut, TensorRef};

/// A result tensor that threads write disjoint parts of.
#[derive(Clone, Copy)]
pub(crate) struct Out {
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: DType,
    /// Elements from one token to the next, and from one head to the next.
    pub(crate) strides: [usize; 2],
    pub(crate) planes: Planes,
}

/// How packed tokens fall into planes that lie apart: those of one batch, or of one head of it.
#[derive(Clone, Copy)]
pub(crate) struct Planes {
    /// Tokens of a plane.
    pub(crate) tokens: usize,
    /// Planes of a batch.
    pub(crate) heads: usize,
    /// Elements from one batch to the next, and from one plane of a batch to the next.
    pub(crate) strides: [usize; 2],
}

impl Out {
    /// A tensor of at least two axes, tokens and heads first.
    pub(crate) fn of(tensor: &mut TensorMut<'_>) -> Out {
        let strides = [tensor.strides()[0], tensor.strides()[1]];
        let planes = Planes { tokens: usize::MAX, heads: 1, strides: [0; 2] };
        Out { dtype: tensor.dtype(), strides, planes, ptr: tensor.as_mut_ptr() }
    }

    /// Where a token's part under a head begins, in elements.
    pub(crate) fn at(&self, token: usize, head: usize) -> usize {
        let Planes { tokens, heads, strides } = self.planes;
        let plane = token / tokens;
        (plane / heads) * strides[0]
            + (plane % heads) * strides[1]
            + (token % tokens) * self.strides[0]
            + head * self.strides[1]
    }
}

// SAFETY: the executor writes each element from one item or merge only (see `WorkList`).
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

/// Everything that an item may read, and where results go. Tensors were checked against the work list's
/// geometry; the work list's indices are in range by construction.
pub(crate) struct Call<'a> {
    pub(crate) work: &'a WorkList,
    pub(crate) geometry: Geometry,
    pub(crate) variant: Variant,
    pub(crate) isa: Isa,
    /// `[T, H, D]`; over latents, the first `C` lanes of each query; over blocks `[B, H, L, D]`.
    pub(crate) q: TensorRef<'a>,
    /// Over latents alone: `[T, H, E]`, the other lanes.
    #[cfg_attr(not(feature = "mla"), allow(dead_code))]
    pub(crate) q_pe: Option<TensorRef<'a>>,
    /// `[P, S, G, D]`; over latents, `[P, S, C + E]`; over segments, the fresh keys `[U, G, D]`; over blocks
    /// `[B, G, M, D]`.
    pub(crate) k: TensorRef<'a>,
    /// As `k`, `Dv` wide; over latents, the same tensor.
    #[cfg_attr(not(feature = "tiles"), allow(dead_code))]
    pub(crate) v: TensorRef<'a>,
    /// `[H]`.
    pub(crate) sinks: Option<&'a [f32]>,
    /// `[H]`.
    #[cfg_attr(not(feature = "tiles"), allow(dead_code))]
    pub(crate) alibi_slopes: Option<&'a [f32]>,
    /// `[T, H, Dv]`.
    pub(crate) o: Out,
    /// `[T, H]` f32.
    pub(crate) lse: Option<Out>,
    pub(crate) extra: Extra<'a>,
}

/// What only some kinds of lists have.
#[derive(Default)]
pub(crate) struct Extra<'a> {
    /// `[T, H]` f32: the largest score of each query.
    pub(crate) max_scores: Option<Out>,
    /// `[P, S, G]` f32: the scales of keys and of values that are e4m3.
    #[cfg_attr(not(feature = "paged"), allow(dead_code))]
    pub(crate) scales: Option<[TensorRef<'a>; 2]>,
    #[cfg(feature = "dense")]
    /// Keys and values of prefixes, packed `[U, G, D]` or in pages `[P, S, G, D]`.
    pub(crate) prefix: Option<[TensorRef<'a>; 2]>,
    #[cfg(feature = "flex")]
    /// What happens to scores over blocks.
    pub(crate) mods: Option<super::tile::Mods<'a>>,
    pub(crate) lifetime: std::marker::PhantomData<&'a ()>,
}

impl Call<'_> {
    /// Whether scores are kept as they leave the dot product: the scale then only enters the exponent, and
    /// differences of large scores stay exact.
    pub(crate) fn raw_scores(&self) -> bool {
        let v = &self.variant;
        v.sm_scale > 0.0 && v.logits_soft_cap.is_none() && !v.alibi
    }

    /// Natural-log units of a unit of a state's `m`, for a row's family.
    pub(crate) fn unit(&self, row: &Row) -> f64 {
        if row.family == Family::Tile as u32 {
            std::f64::consts::LN_2
        } else if self.raw_scores() {
            self.variant.sm_scale.into()
        } else {
            1.0
        }
    }

    /// Factor that turns a difference of a state's `m` into a base-2 exponent.
    pub(crate) fn exponent(&self, row: &Row) -> f32 {
        if row.family == Family::Tile as u32 {
            1.0
        } else {
            (self.unit(row) * std::f64::consts::LOG2_E) as f32
        }
    }
}
