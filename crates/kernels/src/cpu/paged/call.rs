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
}

impl Out {
    /// A tensor of at least two axes, tokens and heads first.
    pub(crate) fn of(tensor: &mut TensorMut<'_>) -> Out {
        let strides = [tensor.strides()[0], tensor.strides()[1]];
        Out { dtype: tensor.dtype(), strides, ptr: tensor.as_mut_ptr() }
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
    /// `[T, H, D]`; over latents, the first `C` lanes of each query.
    pub(crate) q: TensorRef<'a>,
    /// Over latents alone: `[T, H, E]`, the other lanes.
    #[cfg_attr(not(feature = "mla"), allow(dead_code))]
    pub(crate) q_pe: Option<TensorRef<'a>>,
    /// `[P, S, G, D]`; over latents, `[P, S, C + E]`.
    pub(crate) k: TensorRef<'a>,
    /// `[P, S, G, Dv]`; over latents, the same tensor as `k`.
    #[cfg_attr(not(feature = "paged"), allow(dead_code))]
    pub(crate) v: TensorRef<'a>,
    /// `[H]`.
    pub(crate) sinks: Option<&'a [f32]>,
    /// `[H]`.
    #[cfg_attr(not(feature = "paged"), allow(dead_code))]
    pub(crate) alibi_slopes: Option<&'a [f32]>,
    /// `[T, H, Dv]`.
    pub(crate) o: Out,
    /// `[T, H]` f32.
    pub(crate) lse: Option<Out>,
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
