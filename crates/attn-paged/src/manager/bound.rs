//! How much scratch the largest step can need, known before the first.

use mstar_core::attend::{AttnGeometry, StepShape};
use mstar_core::kv::KvLayout;

use crate::{Geometry, PageTable, Plan, PlanOptions, Result, Variant};

/// Bytes of one workspace (there is one for each plan label and slot) that steps up to `largest` need with `workers`
/// threads, 0 standing for the rayon pool of the caller. Found by planning the shapes that need most: decode rows
/// alone, prefill alone, both, and rows that share their keys.
///
/// # Errors
/// A geometry that no kernel takes.
pub fn workspace_bound(geometry: &AttnGeometry, largest: StepShape, workers: usize) -> Result<usize> {
    let StepShape { rows, tokens, kv_len } = largest;
    let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else { return Ok(0) };
    // Scratch depends on lengths and not on pages, so each row gets one page.
    let geometry = Geometry {
        num_qo_heads: geometry.num_qo_heads,
        num_kv_heads,
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        page_size: kv_len.max(1),
        q_dtype: geometry.dtype,
        kv_dtype: geometry.kv_dtype,
    };
    let decode = vec![1; rows.min(tokens)];
    let mut mixed = decode.clone();
    if let Some(last) = mixed.last_mut() {
        *last = tokens - (decode.len() - 1);
    }
    let even = vec![tokens.div_ceil(rows.max(1)); rows];
    let mut shapes = vec![vec![1], vec![tokens], decode, mixed, even];
    // A row of a few tiles over a long context is cut finest of all, and more finely beside decode rows.
    for part in 1..=PARTS {
        let q_len = (tokens * part).div_ceil(PARTS);
        for beside in [0, 1, rows / 2, rows.saturating_sub(1)] {
            let mut q_lens = vec![1; beside.min(tokens - q_len)];
            q_lens.push(q_len);
            shapes.push(q_lens);
        }
    }
    let mut most = 0;
    for q_lens in shapes {
        for (cascade, causal) in [(false, true), (false, false), (true, true)] {
            let options = PlanOptions { workers, cascade, ..PlanOptions::default() };
            most = most.max(bytes(&geometry, causal, &q_lens, kv_len, &options)?);
        }
    }
    // Lengths between these are cut a little finer: up to a fifth more was seen over a grid of them.
    Ok(most + most / 4)
}

/// Lengths of a row between one token and all of a step's that are tried.
const PARTS: usize = 32;

fn bytes(
    geometry: &Geometry,
    causal: bool,
    q_lens: &[usize],
    kv_len: usize,
    options: &PlanOptions,
) -> Result<usize> {
    let mut qo_indptr = vec![0i32];
    for q_len in q_lens {
        qo_indptr
            .push(qo_indptr[qo_indptr.len() - 1].saturating_add(i32::try_from(*q_len).unwrap_or(i32::MAX)));
    }
    let pages = i32::from(kv_len > 0);
    let kv_indptr: Vec<i32> = (0..=q_lens.len() as i32).map(|row| row * pages).collect();
    let table = PageTable {
        qo_indptr: &qo_indptr,
        kv_indptr: &kv_indptr,
        kv_indices: &vec![0; kv_indptr[q_lens.len()] as usize],
        kv_last_page_len: &vec![i32::try_from(kv_len).unwrap_or(i32::MAX); q_lens.len()],
        num_pages: 1,
        ..PageTable::default()
    };
    let variant = Variant { causal, ..Variant::causal(geometry.head_dim_qk) };
    Ok(Plan::new(geometry, &variant, &table, options)?.workspace_bytes())
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
        let bound = workspace_bound(&attn, largest, 2).unwrap();
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
                    let needed = bytes(&geometry, true, &q_lens, kv_len, &options).unwrap();
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
        let bound = workspace_bound(&attn, largest, 2).unwrap();
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
                    let needed = bytes(&geometry, true, &q_lens, kv_len, &options).unwrap();
                    assert!(needed <= bound, "{q_lens:?} over {kv_len}: {needed} > {bound}");
                }
            }
        }
    }
}
