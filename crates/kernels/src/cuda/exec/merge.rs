//! The kernel that joins what items left, and how many blocks a merge is for.

use crate::cuda::jit::{Key, Unit};
use crate::work::WorkList;

use super::Choice;
use super::params::number;

const WARPS: usize = 4;
/// Lanes of a value that a warp has at once, where there are many query vectors.
const SLICE: usize = 128;
/// Most pieces that a merge is cut into.
const MOST_PIECES: usize = 64;

/// The variant for a list.
pub(super) fn choose(work: &WorkList) -> Choice {
    let key = Key::new(Unit::MERGE, "merge").with("Q_TYPE", number(work.geometry.q_dtype));
    Choice { key, threads: WARPS as u32 * 32, shared: 0 }
}

/// Into how many more pieces the kernel cuts where there are few query vectors; blocks for them change no bit.
pub(super) const MORE_PIECES: usize = 4;

/// Pieces that each merge is cut into, a block each, so that a warp has one or two query vectors' slices. Changes no bit.
pub(super) fn pieces(work: &WorkList) -> u32 {
    let units = work.max_lanes.max(1) * work.geometry.head_dim_vo.div_ceil(SLICE);
    units.div_ceil(WARPS).clamp(1, MOST_PIECES) as u32
}
