//! The least work that a plan stands for: what a roofline is drawn from.

use mstar_core::attend::{IndexGeometry, Work};
use mstar_kernels::mla::Geometry;

use crate::DsaPlan;

/// Of selecting in one full layer: each row's index keys read once where one of its queries is selected, index queries and
/// weights read, picks written; a multiplication and an addition for every lane of every scored pair and head.
pub(crate) fn of_selecting(plan: &DsaPlan, geometry: &Geometry, index: &IndexGeometry) -> Work {
    let (heads, width, topk) =
        (index.index_n_heads as u64, index.index_head_dim as u64, index.index_topk as u64);
    let (mut tokens, mut keys) = (0u64, 0u64);
    for (row, span) in plan.spans.iter().enumerate() {
        let queries = &plan.row_request[span.q_start..span.q_start + span.q_len];
        let selected = queries.iter().filter(|&&of| of >= 0).count() as u64;
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
    let (q_size, kv_size) = (geometry.q_dtype.size() as u64, geometry.kv_dtype.size() as u64);
    let (mut tokens, mut picked, mut latents) = (0u64, 0u64, 0u64);
    for (row, span) in plan.spans.iter().enumerate() {
        let queries = &plan.row_request[span.q_start..span.q_start + span.q_len];
        let selected = queries.iter().filter(|&&of| of >= 0).count() as u64;
        let dense = span.q_len as u64 - selected;
        let seen_densely = if dense > 0 { span.ctx_start as u64 + dense } else { 0 };
        latents += (seen_densely + selected * topk).min(plan.row_keys[row] as u64);
        tokens += span.q_len as u64;
        picked += selected * topk;
    }
    Work {
        tokens,
        bytes_read: latents * width * kv_size + tokens * heads * width * q_size + picked * 4,
        bytes_written: tokens * heads * c * q_size,
        flops: 2 * plan.work.attended * heads * (width + c),
    }
}
