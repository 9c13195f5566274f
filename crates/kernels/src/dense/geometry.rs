//! The shapes and the arithmetic of one layer's dense attention.

use crate::{DType, Result, paged};

/// Head counts, head widths and element types of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
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
    /// Element type of keys and values, prefix and fresh alike: f32, bf16 or f16.
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
        let geometry = self.with_pages(1);
        geometry.check_unscaled("dense attention")?;
        geometry.check()
    }

    /// The same layer over pages of `page_size` slots.
    pub(super) fn with_pages(&self, page_size: usize) -> paged::Geometry {
        paged::Geometry {
            num_qo_heads: self.num_qo_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim_qk: self.head_dim_qk,
            head_dim_vo: self.head_dim_vo,
            page_size,
            q_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
        }
    }
}

/// The arithmetic of one layer's scores, fixed when a list is made.
///
/// In order: `s = sm_scale * (q . k)`; with a soft cap `c`, `s = c * tanh(s / c)`; then the mask. A query that sees no key
/// yields 0 and `-inf`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variant {
    /// Factor of the dot product; finite.
    pub sm_scale: f32,
    /// Whether a query sees no key after its own position, which is aligned to the end of the row's keys: query `i` is at
    /// `kv_len - q_len + i`, `kv_len` counting prefix and fresh keys.
    pub causal: bool,
    /// A query at position `p` sees no key before `p - window_left`; with `causal`, `window_left + 1` keys at most, its own
    /// included. `None` is no window.
    pub window_left: Option<usize>,
    /// Soft cap of the scores; finite and above 0.
    pub logits_soft_cap: Option<f32>,
}

impl Variant {
    /// Causal attention scaled by `1 / sqrt(head_dim_qk)` and nothing else.
    pub fn causal(head_dim_qk: usize) -> Variant {
        let sm_scale = 1.0 / (head_dim_qk as f32).sqrt();
        Variant { sm_scale, causal: true, window_left: None, logits_soft_cap: None }
    }

    /// As [`Variant::causal`], but every query sees every key of its row.
    pub fn full(head_dim_qk: usize) -> Variant {
        Variant { causal: false, ..Variant::causal(head_dim_qk) }
    }

    /// Refuses what has no meaning.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) for a scale that is not finite, or a cap that is not finite and above 0.
    pub fn check(&self) -> Result<()> {
        self.of_pages().check()
    }

    pub(super) fn of_pages(&self) -> paged::Variant {
        paged::Variant {
            sm_scale: self.sm_scale,
            causal: self.causal,
            window_left: self.window_left,
            logits_soft_cap: self.logits_soft_cap,
            alibi: false,
            sinks: false,
        }
    }
}
