//! How much a bucket's buffers must hold, whatever steps come.

use crate::kv::KvConfig;
use crate::resource::PaddedShape;

/// Page ids that the index buffer of a plan of `shape` holds. Per row, not per pool: rows that matched one cached
/// prefix all name its pages, so a plan may name more page ids than the pool has. And at least the bucket's own
/// pages, whatever the pool's size: a warm-up's rows name the sink once for each page of their span.
pub fn captured_page_capacity(shape: PaddedShape, kv: &KvConfig) -> usize {
    let page_size = kv.page_size.max(1);
    // A row names a page of the pool once at most.
    let of_a_row = kv.max_seq_len.div_ceil(page_size).min(kv.max_num_pages.saturating_sub(1));
    // `sum ceil(span / S)` over rows whose spans sum to `tokens`.
    let own = shape.tokens.saturating_add(shape.rows.saturating_mul(page_size - 1)) / page_size;
    shape.rows.saturating_mul(of_a_row).max(own)
}

#[cfg(test)]
mod tests {
    use mstar_kernels::DType;

    use super::*;
    use crate::kv::KvLayout;

    fn kv(page_size: usize, max_num_pages: usize, max_seq_len: usize) -> KvConfig {
        KvConfig {
            layout: KvLayout::Nhd { num_kv_heads: 1, head_dim: 8 },
            dtype: DType::F32,
            page_size,
            max_num_pages,
            max_seq_len,
            num_layers: 1,
            planes: vec![],
            prefix_cache: true,
            retention: None,
            world_size: 1,
        }
    }

    #[test]
    fn captured_page_capacity_is_per_row_and_not_per_pool() {
        // Eight rows that share one prefix of 90 pages name 720 page ids from a pool of 100.
        let shape = PaddedShape { rows: 8, tokens: 8 };
        assert_eq!(captured_page_capacity(shape, &kv(16, 100, 1440)), 720);
        // A row cannot name more pages than the pool has beside the sink.
        assert_eq!(captured_page_capacity(shape, &kv(16, 100, 1 << 20)), 8 * 99);
    }

    #[test]
    fn captured_page_capacity_holds_the_buckets_own_pages_whatever_the_pool() {
        let shape = PaddedShape { rows: 2, tokens: 512 };
        let capacity = captured_page_capacity(shape, &kv(16, 3, 64));
        for first in 0..=512 {
            let first: usize = first;
            assert!(first.div_ceil(16) + (512 - first).div_ceil(16) <= capacity);
        }
        assert_eq!(captured_page_capacity(PaddedShape { rows: 0, tokens: 0 }, &kv(16, 3, 64)), 0);
        assert!(
            captured_page_capacity(PaddedShape { rows: 1 << 40, tokens: 0 }, &kv(1, 1 << 30, 1 << 30)) > 0
        );
    }
}
