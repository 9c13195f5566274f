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
    let mut most = 0;
    for q_lens in [vec![1], vec![tokens], decode, mixed, even] {
        for (cascade, causal) in [(false, true), (false, false), (true, true)] {
            let options = PlanOptions { workers, cascade, ..PlanOptions::default() };
            most = most.max(bytes(&geometry, causal, &q_lens, kv_len, &options)?);
        }
    }
    Ok(most)
}

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
