//! The least work that a layer's attention stands for: what a roofline is drawn from.

use mstar_core::attend::Work;

use super::table::RowTable;
use crate::{Geometry, Variant};

/// Of one layer over `table`: each row's visible keys and values read once, queries read once, outputs written once, and
/// a multiplication and an addition for every element of every visible pair, twice (scores and values). Masks are
/// not looked into, so a masked row counts as much as causality and window leave it.
pub(crate) fn of_layer(geometry: &Geometry, variant: &Variant, table: &RowTable<'_>) -> Work {
    let mut work = Work::default();
    let (mut keys, mut pairs) = (0u64, 0u64);
    for row in 0..table.kv_len.len() {
        let q_len = (table.qo_indptr[row + 1] - table.qo_indptr[row]) as i64;
        let kv_len = i64::from(table.kv_len[row]);
        let offset = table.kv_offset.get(row).copied().unwrap_or(0);
        let begin = (offset + table.page_start.get(row).map_or(0, |&start| i64::from(start))).min(kv_len);
        let window = variant.window_left.map_or(i64::MAX, |left| left as i64);
        work.tokens += q_len as u64;
        let mut first = kv_len;
        for query in 0..q_len {
            let position = kv_len - q_len + query;
            let end = if variant.causal { (position + 1).min(kv_len) } else { kv_len };
            let start = position.saturating_sub(window).max(begin);
            pairs += (end - start).max(0) as u64;
            first = first.min(start.max(0));
        }
        keys += (kv_len - first).max(0) as u64;
    }
    let (qo, kv) = (geometry.num_qo_heads as u64, geometry.num_kv_heads as u64);
    let widths = (geometry.head_dim_qk + geometry.head_dim_vo) as u64;
    let (q_size, kv_size) = (geometry.q_dtype.size() as u64, geometry.kv_dtype.size() as u64);
    work.bytes_read = keys * kv * widths * kv_size + work.tokens * qo * geometry.head_dim_qk as u64 * q_size;
    work.bytes_written = work.tokens * qo * geometry.head_dim_vo as u64 * q_size;
    work.flops = 2 * pairs * qo * widths;
    work
}
