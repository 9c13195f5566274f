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
/// Query vectors with [`SLICE`] lanes from which on there are enough of them for all warps of a device; `cu/tree.cuh` has the same.
const MANY_VECTORS: usize = 512;
/// Into how many more pieces a merge is cut where there are fewer.
const MORE_PIECES: usize = 4;

/// The variant for a list. Which one changes no bit.
pub(super) fn choose(work: &WorkList) -> Choice {
    Choice { key: key(work, across(work)), threads: WARPS as u32 * 32, shared: 0 }
}

/// The variants that a list may have at one time or another, so that no plan of another length waits for a compiler.
pub(super) fn either(work: &WorkList) -> [Key; 2] {
    [0, 2].map(|across| key(work, across))
}

/// Pieces that each merge is cut into, a block each, so that a warp has one or two query vectors' slices. Changes no bit.
pub(super) fn pieces(work: &WorkList) -> u32 {
    (whole_slices(work) * if across(work) == 0 { 1 } else { MORE_PIECES }) as u32
}

fn key(work: &WorkList, across: i64) -> Key {
    Key::new(Unit::MERGE, "merge").with("Q_TYPE", number(work.geometry.q_dtype)).with("RUNS", across)
}

/// `RUNS` of `cu/merge.cu`: nodes that a warp has at once, as a power of two. A captured run goes over lists to come, and is for as many rows as there can be.
fn across(work: &WorkList) -> i64 {
    let merges =
        if work.fixed { work.rows.capacity() * work.geometry.num_kv_heads } else { work.merges.len() };
    if merges.saturating_mul(whole_slices(work) * WARPS) < MANY_VECTORS { 2 } else { 0 }
}

fn whole_slices(work: &WorkList) -> usize {
    let units = work.max_lanes.max(1) * work.geometry.head_dim_vo.div_ceil(SLICE);
    units.div_ceil(WARPS).clamp(1, MOST_PIECES)
}
