//! How much scratch the largest step can need, known before the first.

use mstar_core::attend::{AttnGeometry, StepShape, pages};
use mstar_core::kv::KvLayout;

use super::planner::page_table;
use crate::{Device, Geometry, Plan, PlanOptions, Result, Schedule, Variant};

/// Bytes of one workspace (there is one for each plan label and slot) that steps up to `largest` need with `workers`
/// threads planned by `schedule`, 0 standing for the rayon pool of the caller; 0 for a cache of heads, which this backend refuses.
///
/// # Errors
/// A geometry that no kernel takes.
pub fn workspace_bound(
    geometry: &AttnGeometry,
    largest: StepShape,
    workers: usize,
    device: Device,
    schedule: Schedule,
) -> Result<usize> {
    let KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } = geometry.layout else { return Ok(0) };
    let geometry = Geometry {
        num_qo_heads: geometry.num_qo_heads,
        kv_lora_rank,
        qk_rope_head_dim,
        page_size: largest.kv_len.max(1),
        q_dtype: geometry.dtype,
        kv_dtype: geometry.kv_dtype,
    };
    // On a device a shorter row may have more leaves: most where its length is a power of two.
    let shorter =
        StepShape { kv_len: (largest.kv_len / 2 + 1).next_power_of_two().min(largest.kv_len), ..largest };
    let bytes_of = |shape: StepShape| {
        pages::workspace_bound(shape, |rows| {
            let mut most = 0;
            for cascade in [false, true] {
                let options = PlanOptions { workers, cascade, device, schedule, ..PlanOptions::default() };
                most = most.max(bytes(&geometry, rows, &options)?);
            }
            Ok(most)
        })
    };
    Ok(bytes_of(largest)?.max(bytes_of(shorter)?))
}

fn bytes(geometry: &Geometry, rows: &pages::RowTable<'_>, options: &PlanOptions) -> Result<usize> {
    let variant = Variant { sm_scale: 1.0, causal: rows.causal };
    Ok(Plan::new(geometry, &variant, &page_table(rows), options)?.workspace_bytes())
}

#[cfg(test)]
mod tests {
    use mstar_core::attend::Softmax;
    use mstar_core::kv::KvConfig;

    use super::*;
    use crate::DType;

    fn plain(workers: usize) -> PlanOptions {
        PlanOptions { workers, cascade: false, ..PlanOptions::default() }
    }

    #[test]
    fn f18_no_step_between_the_extremes_outgrows_the_bound() {
        for (heads, c, e) in [(16, 512, 64), (128, 512, 0), (4, 64, 16)] {
            let layout = KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e };
            let kv = KvConfig::new(layout, DType::Bf16, 64, 768);
            let attn = AttnGeometry::over(&kv, heads, DType::Bf16, Softmax::scaled(0.1));
            let largest = StepShape { rows: 16, tokens: 528, kv_len: 15_100 };
            for workers in [1, 2, 16] {
                let bound =
                    workspace_bound(&attn, largest, workers, Device::Cpu, Schedule::Invariant).unwrap();
                for kv_len in [1, 1024, 4097, 15_100] {
                    let geometry = Geometry {
                        num_qo_heads: heads,
                        kv_lora_rank: c,
                        qk_rope_head_dim: e,
                        page_size: kv_len,
                        q_dtype: DType::Bf16,
                        kv_dtype: DType::Bf16,
                    };
                    for decoding in [0, 1, 3, 8, 14] {
                        for prompt in
                            [&[1][..], &[5], &[100], &[190], &[257], &[512], &[100, 100], &[200, 300]]
                        {
                            let mut q_lens = vec![1; decoding];
                            q_lens.extend(prompt);
                            let rows = pages::Arrays::even(&q_lens, kv_len);
                            for causal in [true, false] {
                                let needed =
                                    bytes(&geometry, &rows.table(causal, 1), &plain(workers)).unwrap();
                                assert!(
                                    needed <= bound,
                                    "{heads} heads, {workers} workers, {q_lens:?} over {kv_len}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn f18_many_short_rows_need_little() {
        let geometry = Geometry {
            num_qo_heads: 128,
            kv_lora_rank: 512,
            qk_rope_head_dim: 64,
            page_size: 64,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        let rows = pages::Arrays::even(&[1; 512], 64);
        let needed = bytes(&geometry, &rows.table(true, 1), &plain(2)).unwrap();
        assert!(needed < 64 << 20, "{needed}");
    }
}
