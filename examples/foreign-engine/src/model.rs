//! The layer's shapes, and numbers that stand for its activations.

use mstar_attn_mla::{DType, Geometry, Variant};

/// Query heads.
pub const HEADS: usize = 8;
/// `kv_lora_rank`: lanes of a latent that are the value.
pub const C: usize = 64;
/// `qk_rope_head_dim`: the rotary lanes.
pub const E: usize = 16;
/// `qk_nope_head_dim`: width of a query's other part before it was absorbed. Only the scale knows it.
const NOPE: usize = 48;
/// Token slots a page.
pub const PAGE_SIZE: usize = 16;

pub fn geometry() -> Geometry {
    Geometry {
        num_qo_heads: HEADS,
        kv_lora_rank: C,
        qk_rope_head_dim: E,
        page_size: PAGE_SIZE,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    }
}

pub fn variant() -> Variant {
    Variant { sm_scale: 1.0 / ((NOPE + E) as f32).sqrt(), causal: true }
}

/// A number in -1..1 that depends on its arguments alone.
pub fn noise(what: u64, request: usize, position: usize, lane: usize) -> f32 {
    let mut x = what;
    for part in [request, position, lane] {
        x = (x ^ (part as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        x ^= x >> 29;
    }
    (x >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// One token's latent, `[ckv | kpe]`.
pub fn latent(request: usize, position: usize) -> [f32; C + E] {
    std::array::from_fn(|lane| noise(1, request, position, lane))
}

/// One token's absorbed query of a head: `[nope | pe]`.
pub fn query(request: usize, position: usize, head: usize) -> [f32; C + E] {
    std::array::from_fn(|lane| noise(2, request, position, head * (C + E) + lane))
}
