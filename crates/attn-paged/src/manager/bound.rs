//! How much scratch the largest step can need, known before the first.

use mstar_core::attend::{AttnGeometry, StepShape, pages};
use mstar_core::kv::KvLayout;

use super::planner::page_table;
use crate::{Device, Geometry, Plan, PlanOptions, Result, Schedule, Variant};

/// Bytes of one workspace (there is one for each plan label and slot) that steps up to `largest` need with `workers`
/// threads planned by `schedule`, 0 standing for the rayon pool of the caller.
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
    let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else { return Ok(0) };
    let geometry = Geometry {
        num_qo_heads: geometry.num_qo_heads,
        num_kv_heads,
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        page_size: largest.kv_len.max(1),
        q_dtype: geometry.dtype,
        kv_dtype: geometry.kv_dtype,
    };
    pages::workspace_bound(largest, |rows| {
        let mut most = 0;
        for cascade in [false, true] {
            let options = PlanOptions { workers, cascade, device, schedule, ..PlanOptions::default() };
            most = most.max(bytes(&geometry, rows, &options)?);
        }
        Ok(most)
    })
}

fn bytes(geometry: &Geometry, rows: &pages::RowTable<'_>, options: &PlanOptions) -> Result<usize> {
    let variant = Variant { causal: rows.causal, ..Variant::causal(geometry.head_dim_qk) };
    Ok(Plan::new(geometry, &variant, &page_table(rows), options)?.workspace_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn f18_no_step_between_the_extremes_outgrows_the_bound() {
        let layout = KvLayout::Nhd { num_kv_heads: 8, head_dim: 128 };
        let kv = mstar_core::kv::KvConfig::new(layout, DType::Bf16, 16, 768);
        let softmax = mstar_core::attend::Softmax::scaled(0.1);
        let attn = AttnGeometry::over(&kv, 32, DType::Bf16, softmax);
        let largest = StepShape { rows: 8, tokens: 520, kv_len: 1088 };
        let bound = workspace_bound(&attn, largest, 2, Device::Cpu, Schedule::Invariant).unwrap();
        for kv_len in [512, 1024, 1088] {
            let geometry = Geometry {
                num_qo_heads: 32,
                num_kv_heads: 8,
                head_dim_qk: 128,
                head_dim_vo: 128,
                page_size: kv_len,
                q_dtype: DType::Bf16,
                kv_dtype: DType::Bf16,
            };
            for decoding in 0..8 {
                for prompt in [1, 128, 480, 505, 512] {
                    let mut q_lens = vec![1; decoding];
                    q_lens.push(prompt);
                    let options = PlanOptions { workers: 2, ..PlanOptions::default() };
                    let arrays = pages::Arrays::even(&q_lens, kv_len);
                    let needed = bytes(&geometry, &arrays.table(true, 1), &options).unwrap();
                    assert!(needed <= bound, "{q_lens:?} over {kv_len}: {needed} > {bound}");
                }
            }
        }
    }

    #[test]
    fn f18_a_row_of_a_few_tiles_over_a_long_context_fits_too() {
        let layout = KvLayout::Nhd { num_kv_heads: 2, head_dim: 64 };
        let kv = mstar_core::kv::KvConfig::new(layout, DType::Bf16, 16, 768);
        let softmax = mstar_core::attend::Softmax::scaled(0.1);
        let attn = AttnGeometry::over(&kv, 8, DType::Bf16, softmax);
        let largest = StepShape { rows: 16, tokens: 528, kv_len: 15100 };
        let bound = workspace_bound(&attn, largest, 2, Device::Cpu, Schedule::Invariant).unwrap();
        for kv_len in [1024, 4096, 8192, 12_000, 15_100] {
            let geometry = Geometry {
                num_qo_heads: 8,
                num_kv_heads: 2,
                head_dim_qk: 64,
                head_dim_vo: 64,
                page_size: kv_len,
                q_dtype: DType::Bf16,
                kv_dtype: DType::Bf16,
            };
            for decoding in [0, 1, 3, 8, 14] {
                for prompt in
                    [&[16][..], &[64], &[100], &[190], &[200], &[333], &[512], &[100, 100], &[200, 300]]
                {
                    let mut q_lens = vec![1; decoding];
                    q_lens.extend(prompt);
                    let options = PlanOptions { workers: 2, ..PlanOptions::default() };
                    let arrays = pages::Arrays::even(&q_lens, kv_len);
                    let needed = bytes(&geometry, &arrays.table(true, 1), &options).unwrap();
                    assert!(needed <= bound, "{q_lens:?} over {kv_len}: {needed} > {bound}");
                }
            }
        }
    }

    #[test]
    fn f18_the_workspace_of_many_short_rows_stays_small() {
        let geometry = Geometry {
            num_qo_heads: 32,
            num_kv_heads: 2,
            head_dim_qk: 256,
            head_dim_vo: 256,
            page_size: 64,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
        };
        let options = PlanOptions { workers: 2, cascade: false, ..PlanOptions::default() };
        let rows = pages::Arrays::even(&[1; 512], 64);
        assert!(bytes(&geometry, &rows.table(true, 1), &options).unwrap() < 64 << 20);
    }
}
