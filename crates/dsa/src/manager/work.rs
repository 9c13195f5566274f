//! The least work that a plan stands for: what a roofline is drawn from.

use mstar_core::attend::{IndexGeometry, Work};
use mstar_kernels::mla::Geometry;

use crate::DsaPlan;

/// Queries of a row that are selected, and that are not; padding is neither.
fn counted(plan: &DsaPlan, row: usize) -> (u64, u64) {
    let queries = plan.qo_indptr[row] as usize..plan.qo_indptr[row + 1] as usize;
    let selected = plan.row_request[queries.clone()].iter().filter(|&&of| of >= 0).count() as u64;
    let real = plan.positions[queries].iter().filter(|&&position| position >= 0).count() as u64;
    (selected, real - selected)
}

/// Of selecting in one full layer: each row's index keys read once where one of its queries is selected, index queries and
/// weights read, picks written; a multiplication and an addition for every lane of every scored pair and head.
pub(crate) fn of_selecting(plan: &DsaPlan, geometry: &Geometry, index: &IndexGeometry) -> Work {
    let (heads, width, topk) =
        (index.index_n_heads as u64, index.index_head_dim as u64, index.index_topk as u64);
    let (mut tokens, mut keys) = (0u64, 0u64);
    for row in 0..plan.num_rows() {
        let selected = counted(plan, row).0;
        tokens += selected;
        keys += if selected > 0 { plan.row_keys[row] as u64 } else { 0 };
    }
    let key = (index.format.width(index.index_head_dim) * index.format.dtype().size()) as u64;
    Work {
        tokens,
        bytes_read: keys * key + tokens * heads * (width * geometry.q_dtype.size() as u64 + 4),
        bytes_written: tokens * topk * 4,
        flops: 2 * plan.work.scored * heads * width,
    }
}

/// Of attending one layer: the latents of each row read once, no more of them than its queries attend together; queries and
/// picks read, outputs written; a multiplication and an addition for every lane of scores and values of every attended pair.
pub(crate) fn of_attending(plan: &DsaPlan, geometry: &Geometry, index: &IndexGeometry) -> Work {
    let (heads, c) = (geometry.num_qo_heads as u64, geometry.kv_lora_rank as u64);
    let (width, topk) = (geometry.latent_dim() as u64, index.index_topk as u64);
    let q_size = geometry.q_dtype.size() as u64;
    let (slot, dtype) = geometry.slot();
    let (mut tokens, mut picked, mut latents) = (0u64, 0u64, 0u64);
    for row in 0..plan.num_rows() {
        let ((selected, dense), keys) = (counted(plan, row), plan.row_keys[row] as u64);
        let seen_densely = if dense > 0 { keys.saturating_sub(selected) } else { 0 };
        latents += (seen_densely + selected * topk).min(keys);
        tokens += selected + dense;
        picked += selected * topk;
    }
    Work {
        tokens,
        bytes_read: latents * (slot * dtype.size()) as u64 + tokens * heads * width * q_size + picked * 4,
        bytes_written: tokens * heads * c * q_size,
        flops: 2 * plan.work.attended * heads * (width + c),
    }
}
