//! How much scratch the largest step can need, known before the first.

use mstar_core::attend::{AttnGeometry, StepShape};
use mstar_core::kv::{KvLayout, RING_BLOCK};

use crate::{BlockMask, Geometry, KernelOptions, KvBlocks, MaskRule, MaskShape, Plan, Result};

/// Bytes of one workspace (there is one for each plan label and slot) that steps up to `largest` need with `workers`
/// threads, 0 standing for the rayon pool of the caller; 0 for a cache of latents, which this backend refuses. `kv_len` is
/// what a row sees at most.
///
/// # Errors
/// A geometry that no kernel takes.
pub fn workspace_bound(geometry: &AttnGeometry, largest: StepShape, workers: usize) -> Result<usize> {
    let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else { return Ok(0) };
    let geometry = Geometry {
        batch: 1,
        num_qo_heads: geometry.num_qo_heads,
        num_kv_heads,
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        q_dtype: geometry.dtype,
        kv_dtype: geometry.kv_dtype,
    };
    let frame = largest.tokens.checked_div(largest.rows).unwrap_or(0).max(1);
    let mut most = 0;
    for rows in doubling(largest.rows) {
        for kv_len in doubling(largest.kv_len.div_ceil(RING_BLOCK)) {
            most = most.max(bytes(&geometry, rows, frame, kv_len, workers)?);
        }
    }
    Ok(most)
}

/// 1, 2, 4, .. and `most`.
fn doubling(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |n| n.checked_mul(2)).take_while(move |&n| n < most).chain([most])
}

/// What rows of `frame` queries need that see `blocks` blocks each, their own.
fn bytes(geometry: &Geometry, rows: usize, frame: usize, blocks: usize, workers: usize) -> Result<usize> {
    let shape = MaskShape { block_q: frame, ..MaskShape::new(rows * frame, rows * blocks * RING_BLOCK) };
    let indptr: Vec<i32> = (0..=rows).map(|row| (row * blocks) as i32).collect();
    let indices: Vec<i32> = (0..(rows * blocks) as i32).collect();
    let full = KvBlocks { indptr: &indptr, indices: &indices };
    let mask = BlockMask::from_kv_blocks(shape, full, KvBlocks::NONE, MaskRule::Whole)?;
    Ok(Plan::new(geometry, &mask, &KernelOptions { workers })?.workspace_bytes())
}
