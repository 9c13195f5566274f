//! The four primitives of the decode family, as each instruction set implements them.
//!
//! A primitive works on one key head, some query vectors (*lanes*) and a run of keys inside one tile of
//! [`TILE`] keys. Blocking over lanes and keys is free: each score has its own accumulator, summed over the head
//! width in one order, and a lane's values are added key after key. So neither the number of lanes nor where a run
//! begins changes a bit.

use half::{bf16, f16};

use crate::DType;
use crate::cpu::Isa;

use super::generic;

/// Keys a tile; tiles start at absolute positions that are multiples of it.
pub(crate) const TILE: usize = 64;

/// Scores of `lanes` query vectors against a run of keys.
pub(super) struct Scores<'a> {
    /// `[lanes, q_stride]`, packed and padded with zeros to a multiple of 32, in the body's query type.
    pub(super) q: *const u8,
    pub(super) q_stride: usize,
    pub(super) lanes: usize,
    /// The run's keys.
    pub(super) keys: &'a [*const u8],
    pub(super) head_dim: usize,
    /// `[lanes, TILE]`, at the run's first key.
    pub(super) scores: *mut f32,
    /// Memory that will be needed soon; fetched while the run is computed.
    pub(super) ahead: Ahead<'a>,
}

/// Weighted sums of a run of values.
pub(super) struct Values<'a> {
    /// `[lanes, TILE]`, at the run's first key.
    pub(super) weights: *const f32,
    pub(super) lanes: usize,
    /// The run's values.
    pub(super) values: &'a [*const u8],
    pub(super) head_dim: usize,
    /// `[lanes, acc_stride]`.
    pub(super) acc: *mut f32,
    pub(super) acc_stride: usize,
    /// Memory that will be needed soon.
    pub(super) ahead: Ahead<'a>,
}

/// Token rows, each of some cache lines, to be fetched into the second-level cache in the order in which they lie.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Plain bodies leave fetching to the processor.
pub(super) struct Ahead<'a> {
    pub(super) rows: &'a [*const u8],
    pub(super) lines: usize,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
impl Ahead<'_> {
    /// Cache lines in all.
    pub(super) fn total(&self) -> usize {
        self.rows.len() * self.lines
    }
}

/// What is done to raw scores before the softmax, for one lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transform {
    pub(super) sm_scale: f32,
    /// 0 for none.
    pub(super) cap: f32,
    pub(super) slope: f32,
    /// Position of the tile's first key less the query's.
    pub(super) distance: f32,
}

/// Computes a run's scores. Needs the body's instruction set and a job whose addresses are right.
pub(super) type ScoresFn = unsafe fn(&Scores<'_>);

/// Adds a run's weighted values. Needs the body's instruction set and a job whose addresses are right.
pub(super) type ValuesFn = unsafe fn(&Values<'_>);

/// One instruction set's primitives for one pair of element types.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body {
    /// Whether packed queries are bf16, for bf16 dot products; f32 otherwise.
    pub(super) q_bf16: bool,
    pub(super) scores: ScoresFn,
    pub(super) values: ValuesFn,
    /// Rewrites a tile's scores of one lane.
    pub(super) transform: unsafe fn(&mut [f32; TILE], &Transform),
    /// Turns one lane's scores into weights, given which keys it sees, the running maximum and sum, and the
    /// factor `c` of [`state`](super::super::state). Returns the factor for what was summed before.
    pub(super) softmax: unsafe fn(&mut [f32; TILE], u64, &mut f32, &mut f32, f32) -> f32,
    /// Multiplies an accumulator.
    pub(super) rescale: unsafe fn(&mut [f32], f32),
}

impl Body {
    /// The body for these types. `isa` must be supported on this machine.
    pub(super) fn select(isa: Isa, q_dtype: DType, kv_dtype: DType) -> Body {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => {
                super::avx512::body(kv_dtype, q_dtype == DType::Bf16 && kv_dtype == DType::Bf16)
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::avx512::body(kv_dtype, false),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Fma => match kv_dtype {
                DType::Bf16 => generic::avx2_body::<bf16>(),
                DType::F16 => generic::avx2_body::<f16>(),
                _ => generic::avx2_body::<f32>(),
            },
            _ => match kv_dtype {
                DType::Bf16 => generic::portable_body::<bf16>(),
                DType::F16 => generic::portable_body::<f16>(),
                _ => generic::portable_body::<f32>(),
            },
        }
    }
}
