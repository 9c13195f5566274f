//! The shapes and the arithmetic of a layer of latent attention.

use crate::{DType, Error, Result, fp8, paged};

/// The widest latent, `C + E`, that the kernels take.
pub const MAX_LATENT_DIM: usize = 16_384;

/// Head count, latent widths, page size and element types of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// `H`: query heads, 1..=65535. All read the same latents.
    pub num_qo_heads: usize,
    /// `C`: lanes of a latent that are the value, at least 1.
    pub kv_lora_rank: usize,
    /// `E`: the other lanes, rotary in every model that has them; may be 0. 512+64 and 512+0 are fast.
    pub qk_rope_head_dim: usize,
    /// `S`: token slots a page, at least 1.
    pub page_size: usize,
    /// Element type of queries and outputs: f32, bf16 or f16.
    pub q_dtype: DType,
    /// Element type of stored latents: f32, bf16, f16, or e4m3 under scales, with rotary lanes in bf16 (see
    /// [`store_latents`](crate::fp8::store_latents)); `C` is then a multiple of 4, and `E` of 2.
    pub kv_dtype: DType,
}

impl Geometry {
    /// `C + E`: lanes of a latent.
    pub fn latent_dim(&self) -> usize {
        self.kv_lora_rank.saturating_add(self.qk_rope_head_dim)
    }

    /// What a slot holds: elements, and their type. [`latent_dim`](Geometry::latent_dim) of `kv_dtype`, or of e4m3
    /// [`latent_bytes`](fp8::latent_bytes) bytes.
    pub fn slot(&self) -> (usize, DType) {
        slot(self.kv_dtype, self.kv_lora_rank, self.qk_rope_head_dim)
    }

    /// Refuses what no kernel takes.
    ///
    /// # Errors
    /// [`Error::Parameter`] naming the field, its value and what it may be.
    pub fn check(&self) -> Result<()> {
        let refuse = |name, why: String, got: String| Err(Error::Parameter { name, why, got });
        let (h, c) = (self.num_qo_heads, self.kv_lora_rank);
        if h == 0 || h > u16::MAX as usize {
            return refuse("num_qo_heads", "must be 1..=65535".into(), h.to_string());
        }
        if !(1..=MAX_LATENT_DIM).contains(&c) {
            return refuse("kv_lora_rank", format!("must be 1..={MAX_LATENT_DIM}"), c.to_string());
        }
        if self.latent_dim() > MAX_LATENT_DIM {
            let why = format!("must be 0..={} beside kv_lora_rank = {c}", MAX_LATENT_DIM - c);
            return refuse("qk_rope_head_dim", why, self.qk_rope_head_dim.to_string());
        }
        if self.page_size == 0 || self.page_size > i32::MAX as usize {
            return refuse("page_size", "must be 1..=2147483647".into(), self.page_size.to_string());
        }
        if !self.q_dtype.is_float() {
            return refuse("q_dtype", "must be f32, bf16 or f16".into(), self.q_dtype.to_string());
        }
        match self.kv_dtype {
            DType::E4m3 => fp8::check_latent(c, self.qk_rope_head_dim),
            dtype if dtype.is_float() => Ok(()),
            dtype => refuse("kv_dtype", "must be f32, bf16, f16 or fp8_e4m3".into(), dtype.to_string()),
        }
    }

    /// The same layer as one key head whose value is part of its key.
    pub(crate) fn one_head(&self) -> paged::Geometry {
        paged::Geometry {
            num_qo_heads: self.num_qo_heads,
            num_kv_heads: 1,
            head_dim_qk: self.latent_dim(),
            head_dim_vo: self.kv_lora_rank,
            page_size: self.page_size,
            q_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
        }
    }
}

/// [`Geometry::slot`] of a type and widths.
pub(crate) fn slot(kv_dtype: DType, c: usize, e: usize) -> (usize, DType) {
    match kv_dtype {
        DType::E4m3 => (fp8::latent_bytes(c, e), DType::U8),
        dtype => (c.saturating_add(e), dtype),
    }
}

/// The arithmetic of one layer's scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variant {
    /// Factor of the dot product; finite. It follows from the width before absorption (in DeepSeek-V2,
    /// `1 / sqrt(128 + 64)`, times what a longer context asks for), never from `C + E`: so there is no default.
    pub sm_scale: f32,
    /// Whether a query sees no key after its own position. Query `i` of a row is at `kv_len - q_len + i`.
    pub causal: bool,
}

impl Variant {
    pub(crate) fn of_heads(&self) -> paged::Variant {
        let plain = if self.causal { paged::Variant::causal(1) } else { paged::Variant::full(1) };
        paged::Variant { sm_scale: self.sm_scale, ..plain }
    }
}
