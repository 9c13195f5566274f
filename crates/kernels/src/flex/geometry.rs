//! The shapes of one layer's block-mask attention.

use crate::{DType, Result, paged};

/// Batches, head counts, head widths and element types of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// `B`: batches.
    pub batch: usize,
    /// `H`: query heads.
    pub num_qo_heads: usize,
    /// `G`: key and value heads. Query head `h` reads key head `h / (H / G)`.
    pub num_kv_heads: usize,
    /// `D`: width of a query and of a key, 1..=512; multiples of 16 from 32 are fast.
    pub head_dim_qk: usize,
    /// `Dv`: width of a value and of an output, 1..=512.
    pub head_dim_vo: usize,
    /// Element type of queries and outputs: f32, bf16 or f16.
    pub q_dtype: DType,
    /// Element type of keys and values: f32, bf16 or f16.
    pub kv_dtype: DType,
}

impl Geometry {
    /// Query heads that share one key head, `H / G`.
    pub fn group(&self) -> usize {
        self.num_qo_heads / self.num_kv_heads.max(1)
    }

    /// Refuses what no kernel takes.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) naming the field, its value and what it may be.
    pub fn check(&self) -> Result<()> {
        let geometry = self.with_blocks(1, false);
        geometry.check_unscaled("block-mask attention")?;
        geometry.check()
    }

    /// The shapes that a work list is made for: pages are blocks, and where rows have one query head each there is one.
    pub(super) fn with_blocks(&self, block: usize, per_head: bool) -> paged::Geometry {
        paged::Geometry {
            num_qo_heads: if per_head { 1 } else { self.num_qo_heads },
            num_kv_heads: if per_head { 1 } else { self.num_kv_heads },
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: self.head_dim_vo,
            page_size: block,
            q_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
        }
    }
}
