//! How much scratch the largest step can need, known before the first.

use mstar_core::attend::{AttnGeometry, StepShape};
use mstar_core::kv::{KvLayout, RING_BLOCK};
use mstar_kernels::paged::APPEND_LEAF;

use crate::{BlockMask, Device, Geometry, KernelOptions, KvBlocks, MaskRule, MaskShape, Plan, Result};

/// Bytes of one workspace (there is one for each plan label and slot) that steps up to `largest` need with `workers`
/// threads on `device`, 0 standing for the rayon pool of the caller; 0 for a cache of latents, which this backend refuses. Rows that pad
/// steps to a bucket are among those of `largest`, whose `kv_len` is what a row sees at most. `head_dim_vo` is
/// the ring's width of a value.
///
/// # Errors
/// A geometry that no kernel takes.
pub fn workspace_bound(
    geometry: &AttnGeometry,
    head_dim_vo: usize,
    largest: StepShape,
    workers: usize,
    device: Device,
) -> Result<usize> {
    let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else { return Ok(0) };
    let geometry = Geometry {
        batch: 1,
        num_qo_heads: geometry.num_qo_heads,
        num_kv_heads,
        head_dim_qk: head_dim,
        head_dim_vo,
        q_dtype: geometry.dtype,
        kv_dtype: geometry.kv_dtype,
    };
    let options = KernelOptions { workers, device };
    let frame = largest.tokens.checked_div(largest.rows).unwrap_or(0).max(1);
    let mut most = 0;
    let visible = largest.kv_len.div_ceil(RING_BLOCK);
    // Work is shared out by halves of rows and of leaves where there are few, so all small numbers of both count.
    let leaf = APPEND_LEAF as usize / RING_BLOCK;
    for rows in (1..8).chain(doubling(largest.rows)).filter(|&rows| rows <= largest.rows) {
        let over_a_leaf = (visible > leaf).then_some(leaf + 1);
        for blocks in doubling(visible).chain(over_a_leaf) {
            // Neighbours that see the same are cut into tiles together: the rows that pad a bucket, and under a mask mod
            // some of a frame's blocks of queries.
            for hidden in (0..16).chain(doubling(largest.rows)).filter(|hidden| rows + hidden <= largest.rows)
            {
                most = most.max(bytes(&geometry, [rows, hidden], frame, blocks, &options)?);
            }
            for queries in (RING_BLOCK..frame).step_by(RING_BLOCK) {
                most = most.max(bytes(&geometry, [rows, 0], queries, blocks, &options)?);
            }
        }
    }
    Ok(most)
}

/// 1, 2, 4, .. and `most`.
fn doubling(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |n| n.checked_mul(2)).take_while(move |&n| n < most).chain([most])
}

/// What rows of `frame` queries need that see `blocks` blocks each, their own, and after them rows that see none.
fn bytes(
    geometry: &Geometry,
    [rows, hidden]: [usize; 2],
    frame: usize,
    blocks: usize,
    options: &KernelOptions,
) -> Result<usize> {
    let all = rows + hidden;
    let shape = MaskShape { block_q: frame, ..MaskShape::new(all * frame, rows * blocks * RING_BLOCK) };
    let indptr: Vec<i32> = (0..=all).map(|row| (row.min(rows) * blocks) as i32).collect();
    let indices: Vec<i32> = (0..(rows * blocks) as i32).collect();
    let full = KvBlocks { indptr: &indptr, indices: &indices };
    let mask = BlockMask::from_kv_blocks(shape, full, KvBlocks::NONE, MaskRule::Whole)?;
    Ok(Plan::new(geometry, &mask, options)?.workspace_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    const CPU: Device = Device::Cpu;
    const CARD: Device = Device::Cuda(0);

    #[test]
    fn f18_no_padded_step_outgrows_the_bound() {
        let layout = KvLayout::Nhd { num_kv_heads: 2, head_dim: 32 };
        let kv = mstar_core::kv::KvConfig::new(layout, DType::Bf16, 1, 1);
        let attn = AttnGeometry::over(&kv, 4, DType::Bf16, mstar_core::attend::Softmax::scaled(0.1));
        let geometry = Geometry {
            batch: 1,
            num_qo_heads: 4,
            num_kv_heads: 2,
            head_dim_qk: 32,
            head_dim_vo: 32,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        for (frame, device) in [(128, CPU), (384, CPU), (512, CPU), (128, CARD), (384, CARD)] {
            let options = KernelOptions { workers: 2, device };
            // Some rows of more than a leaf's keys.
            let largest = StepShape { rows: 9, tokens: 9 * frame, kv_len: 40 * RING_BLOCK };
            let bound = workspace_bound(&attn, 32, largest, 2, device).unwrap();
            for rows in 1..=9 {
                for hidden in 0..=9 - rows {
                    for blocks in 1..=40 {
                        let needed = bytes(&geometry, [rows, hidden], frame, blocks, &options).unwrap();
                        assert!(
                            needed <= bound,
                            "{rows} + {hidden} of {frame}, {blocks}: {needed} > {bound}"
                        );
                    }
                }
            }
        }
    }
}
