//! The shapes that paged attention is compiled, or chosen, for.

use crate::{DType, Error, Result};

/// The widest head that the kernels take.
pub const MAX_HEAD_DIM: usize = 512;

/// Head counts, head widths, page size and element types of one attention layer.
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
    /// `S`: token slots a page, at least 1.
    pub page_size: usize,
    /// Element type of queries and outputs: f32, bf16 or f16.
    pub q_dtype: DType,
    /// Element type of stored keys and values: f32, bf16, f16, or e4m3 with scales beside.
    pub kv_dtype: DType,
}

impl Geometry {
    /// Query heads that share one key head, `H / G`.
    pub fn group(&self) -> usize {
        self.num_qo_heads / self.num_kv_heads.max(1)
    }

    /// Whether keys and values are codes under scales.
    pub(crate) fn is_fp8(&self) -> bool {
        self.kv_dtype == DType::E4m3
    }

    /// Refuses e4m3, where `what` does not take it.
    #[cfg(any(feature = "dense", feature = "flex"))]
    pub(crate) fn check_unscaled(&self, what: &str) -> Result<()> {
        if !self.is_fp8() {
            return Ok(());
        }
        let why = format!("{what} takes f32, bf16 or f16: it has no scales");
        Err(Error::Parameter { name: "kv_dtype", why, got: self.kv_dtype.to_string() })
    }

    /// Refuses what no kernel takes.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming the field, its value and what it may be.
    pub fn check(&self) -> Result<()> {
        let refuse = |name, why: String, got: String| Err(Error::Parameter { name, why, got });
        let (h, g) = (self.num_qo_heads, self.num_kv_heads);
        if h == 0 || h > u16::MAX as usize {
            return refuse("num_qo_heads", "must be 1..=65535".into(), h.to_string());
        }
        if g == 0 || h % g != 0 {
            return refuse("num_kv_heads", format!("must divide num_qo_heads = {h}"), g.to_string());
        }
        for (name, width) in [("head_dim_qk", self.head_dim_qk), ("head_dim_vo", self.head_dim_vo)] {
            if !(1..=MAX_HEAD_DIM).contains(&width) {
                return refuse(name, format!("must be 1..={MAX_HEAD_DIM}"), width.to_string());
            }
        }
        if self.page_size == 0 || self.page_size > i32::MAX as usize {
            return refuse("page_size", "must be 1..=2147483647".into(), self.page_size.to_string());
        }
        if !self.q_dtype.is_float() {
            return refuse("q_dtype", "must be f32, bf16 or f16".into(), self.q_dtype.to_string());
        }
        if !self.kv_dtype.is_float() && !self.is_fp8() {
            return refuse(
                "kv_dtype",
                "must be f32, bf16, f16 or fp8_e4m3".into(),
                self.kv_dtype.to_string(),
            );
        }
        Ok(())
    }
}
