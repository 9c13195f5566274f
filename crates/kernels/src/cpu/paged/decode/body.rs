//! The four primitives of the decode family, as each instruction set implements them.
//!
//! Scores and values work on all key heads of an item, some query vectors (*lanes*) a head and a run of keys inside one
//! tile of [`TILE`] keys; they take a few tokens at a time under all heads, as memory lies. Blocking over heads, lanes and
//! keys is free: each score has its own accumulator, summed over the head width in one order, and a lane's values are
//! added key after key. So neither the number of lanes nor where a run begins changes a bit.

use half::{bf16, f16};

use crate::DType;
use crate::cpu::Isa;

use super::generic;

/// Keys a tile; tiles start at absolute positions that are multiples of it.
pub(crate) const TILE: usize = 64;

/// Values added to one head's accumulators before the next head's turn: few, so that the rows are read as they lie; enough
/// that accumulators are not loaded and stored too often.
pub(super) const VALUE_KEYS: usize = 16;

/// Scores of every head's `lanes` query vectors against a run of keys.
pub(super) struct Scores<'a> {
    /// `[heads, lanes, q_stride]`, packed and padded with zeros to a multiple of 32, in the body's query type.
    pub(super) q: *const u8,
    pub(super) q_stride: usize,
    /// Bytes from one head's queries to the next head's.
    pub(super) q_head: usize,
    pub(super) heads: usize,
    pub(super) lanes: usize,
    /// The run's keys under the first head.
    pub(super) keys: &'a [*const u8],
    /// Bytes from a key under one head to the same key under the next.
    pub(super) key_head: usize,
    pub(super) head_dim: usize,
    /// `[heads, lanes, TILE]`, at the run's first key.
    pub(super) scores: *mut f32,
    /// Memory that will be needed soon; fetched while the run is computed.
    pub(super) ahead: Ahead<'a>,
}

/// Weighted sums of a run of values, for every head.
pub(super) struct Values<'a> {
    /// `[heads, lanes, TILE]`, at the run's first key.
    pub(super) weights: *const f32,
    pub(super) heads: usize,
    pub(super) lanes: usize,
    /// The run's values under the first head.
    pub(super) values: &'a [*const u8],
    /// Bytes from a value under one head to the same value under the next.
    pub(super) value_head: usize,
    pub(super) head_dim: usize,
    /// `[lanes, acc_stride]` of the first head.
    pub(super) acc: *mut f32,
    pub(super) acc_stride: usize,
    /// Floats from one head's accumulators to the next head's.
    pub(super) acc_head: usize,
    /// Memory that will be needed soon.
    pub(super) ahead: Ahead<'a>,
}

/// Token rows to be fetched into the second-level cache in the order in which they lie.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // Plain bodies leave fetching to the processor.
pub(super) struct Ahead<'a> {
    pub(super) rows: &'a [*const u8],
    /// Token rows that will be fetched next: their pages' addresses are looked up by then.
    pub(super) then: &'a [*const u8],
    /// Stretches of a row, `stride` bytes from one to the next, each of some cache lines.
    pub(super) stretches: usize,
    pub(super) stride: usize,
    pub(super) lines: usize,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
impl Ahead<'_> {
    pub(super) const NOTHING: Ahead<'static> =
        Ahead { rows: &[], then: &[], stretches: 0, stride: 0, lines: 0 };

    /// Cache lines in all.
    pub(super) fn total(&self) -> usize {
        self.rows.len() * self.stretches * self.lines
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
