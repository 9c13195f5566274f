//! How much memory the largest step can need, known before the first.

use mstar_core::attend::{AttnGeometry, StepShape, pages};
use mstar_core::kv::KvLayout;

use super::planner::Split;
use crate::{DensePlan, Device, Geometry, PlanOptions, Prefix, Result, Table, Variant};

/// Bytes of one workspace (there is one for each plan label and slot) that steps up to `largest` need with `workers`
/// threads, 0 standing for the rayon pool of the caller; 0 for a cache of latents, which this backend refuses.
///
/// # Errors
/// A geometry that no kernel takes.
pub fn workspace_bound(
    geometry: &AttnGeometry,
    largest: StepShape,
    workers: usize,
    device: Device,
) -> Result<usize> {
    let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else { return Ok(0) };
    let layer = Geometry {
        num_qo_heads: geometry.num_qo_heads,
        num_kv_heads,
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        q_dtype: geometry.dtype,
        kv_dtype: geometry.kv_dtype,
    };
    let options = PlanOptions { workers, device, ..PlanOptions::default() };
    pages::workspace_bound(largest, |rows| bytes(&layer, rows, &options))
}

fn bytes(geometry: &Geometry, rows: &pages::RowTable<'_>, options: &PlanOptions) -> Result<usize> {
    let variant = Variant { causal: rows.causal, ..Variant::full(geometry.head_dim_qk) };
    let split = Split::of(rows)?;
    let prefix = Prefix::Packed { cu_p: &split.cu_p };
    let table = Table { cu_q: rows.qo_indptr, prefix, cu_k: &split.cu_k };
    Ok(DensePlan::new(geometry, &variant, &table, options)?.workspace_bytes())
}

/// Tokens of gathered prefixes that one plan label in one slot has room for from the first: every row of the largest step
/// over the longest stream.
pub(super) fn prefix_tokens(largest: StepShape) -> usize {
    largest.rows.saturating_mul(largest.kv_len)
}

/// Bytes of a gathered token, over all layers; 0 for a cache of latents.
pub(super) fn token_bytes(geometry: &AttnGeometry) -> usize {
    let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else { return 0 };
    [2, geometry.num_layers, num_kv_heads, head_dim, geometry.kv_dtype.size()]
        .iter()
        .fold(1usize, |product, &factor| product.saturating_mul(factor))
}

#[cfg(test)]
mod tests {
    use mstar_core::attend::Softmax;
    use mstar_core::kv::KvConfig;

    use super::*;
    use crate::DType;

    #[test]
    fn f18_no_step_between_the_extremes_outgrows_the_bound() {
        for (heads, g, d) in [(16, 4, 128), (8, 8, 64)] {
            let layout = KvLayout::Nhd { num_kv_heads: g, head_dim: d };
            let kv = KvConfig::new(layout, DType::Bf16, 64, 768);
            let attn = AttnGeometry::over(&kv, heads, DType::Bf16, Softmax::scaled(0.1));
            let largest = StepShape { rows: 8, tokens: 1056, kv_len: 9100 };
            for workers in [1, 2, 16] {
                let bound = workspace_bound(&attn, largest, workers, Device::Cpu).unwrap();
                let layer = Geometry {
                    num_qo_heads: heads,
                    num_kv_heads: g,
                    head_dim_qk: d,
                    head_dim_vo: d,
                    q_dtype: DType::Bf16,
                    kv_dtype: DType::Bf16,
                };
                for kv_len in [1056, 4097, 9100] {
                    for q_lens in [&[1][..], &[100], &[257, 300], &[512, 512], &[1000, 1, 1, 1], &[132; 8]] {
                        let rows = pages::Arrays::even(q_lens, kv_len);
                        for causal in [true, false] {
                            let needed = bytes(
                                &layer,
                                &rows.table(causal, 1),
                                &PlanOptions { workers, ..PlanOptions::default() },
                            )
                            .unwrap();
                            assert!(needed <= bound, "{workers} workers, {q_lens:?} over {kv_len}");
                        }
                    }
                }
            }
        }
    }
}
