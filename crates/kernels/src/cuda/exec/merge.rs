//! The kernel that joins what items left, and how many blocks a merge is for.

use crate::cuda::jit::{Key, Unit};
use crate::paged::{DECODE_LEAF, LATENT_LEAF, LATENT_TREE_LEAF, Stored, blocks_leaf};
use crate::work::WorkList;

use super::Choice;
use super::params::number;

const WARPS: usize = 4;
/// Lanes of a value that a warp has at once.
const SLICE: usize = 128;
/// Most pieces that a merge is cut into.
const MOST_PIECES: usize = 32;

/// The variant for a list.
pub(super) fn choose(work: &WorkList) -> Choice {
    // A tree over n leaves has at most log2 n nodes that wait, and the newest one.
    let levels = match leaves(work) {
        0..=8 if work.stored == Stored::Blocks => 4,
        0..=1024 => 12,
        _ => 24,
    };
    let key =
        Key::new(Unit::MERGE, "merge").with("Q_TYPE", number(work.geometry.q_dtype)).with("LEVELS", levels);
    // `Waiting` in `cu/merge.cu`: a node of 6 floats, and which one it is, a thread.
    let shared = WARPS as u32 * levels as u32 * 32 * 32;
    Choice { key, threads: WARPS as u32 * 32, shared }
}

/// One past the last leaf that a row of the list has, or may have once the list is made again. Of blocks, as many as are stored
/// make: the kernel is not another one as soon as a mask shows more.
fn leaves(work: &WorkList) -> u64 {
    let least = u64::from(DECODE_LEAF.min(LATENT_LEAF).min(LATENT_TREE_LEAF));
    let keys = match work.stored {
        Stored::Blocks => {
            let most = blocks_leaf(work.blocks.num_qo_heads);
            return work.blocks.kv_len as u64 / u64::from(most) + 1;
        }
        Stored::Heads | Stored::Latents if work.fixed => {
            (work.pages.capacity() * work.geometry.page_size) as u64
        }
        _ if work.fixed => u64::from(u32::MAX),
        _ => work.rows.iter().map(|row| u64::from(row.kv_len)).max().unwrap_or(0),
    };
    keys / least + 1
}

/// Pieces that each merge is cut into, a block each, so that a warp has one or two query vectors' slices. Changes no bit.
pub(super) fn pieces(work: &WorkList) -> u32 {
    let units = work.max_lanes.max(1) * work.geometry.head_dim_vo.div_ceil(SLICE);
    units.div_ceil(WARPS).clamp(1, MOST_PIECES) as u32
}
