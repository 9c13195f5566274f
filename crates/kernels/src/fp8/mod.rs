//! Numbers in eight bits: e4m3 codes under f32 scales, as caches keep keys, values and latents.
//!
//! A stored lane is `scale * e4m3[lane]`, one multiplication in f32. Who quantises chooses the scale: the largest magnitude
//! that shares it over 448, so that nothing saturates.
//!
//! | what | codes | scales |
//! | --- | --- | --- |
//! | keys, values ([`store_heads`]) | `[P, S, G, D]` [`DType::E4m3`] | `[P, S, G]` f32: one a token and key head, a plane beside the pages |
//! | latents ([`store_latents`]) | `[P, S, B]` u8, a token being `[C e4m3 \| ceil(C / 128) f32 \| E bf16]` | one for each 128 lanes of a token, between its parts |
//!
//! The latent's layout is FlashMLA's: 512 + 64 lanes take 656 bytes. Its rotary lanes stay in bf16, since positions turn them
//! through all their digits. Scales are in the machine's byte order.

use half::{bf16, f16};

use crate::DType;

mod store;
#[cfg(test)]
pub(crate) mod tests;

pub use store::{
    HeadsInCodes, check_latent, dequantise_latent, prepare_store, store_both_heads, store_heads,
    store_latents,
};

/// The largest e4m3 number.
const E4M3_MAX: f32 = 448.0;

/// Lanes of a latent that share a scale.
pub const LATENT_GROUP: usize = 128;

/// The number that an e4m3 byte (OCP OFP8 "E4M3", which has no infinity) stands for; `0x7f` and `0xff` are NaN.
pub const fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Multiples of 2^-9.
        (0, mantissa) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// The nearest e4m3 number, ties to even; beyond +-448 (infinities too) it saturates; NaN stays NaN.
#[inline]
pub fn f32_to_e4m3(x: f32) -> u8 {
    let bits = x.to_bits();
    let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    // Selects rather than branches, so that rows are converted in vectors. Below 2^-6 numbers are multiples of 2^-9: adding
    // 2^23 rounds to an integer. Above, codes are the leading bits, rounded, less the difference of the exponents' biases.
    let small = (f32::from_bits(magnitude) * 512.0 + 8_388_608.0).to_bits() & 0xf;
    let large = ((magnitude + 0x7_ffff + (magnitude >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    let code = if magnitude < 0x3c80_0000 { small } else { large };
    let code = if magnitude >= 0x43e0_0000 { 0x7e } else { code };
    let code = if magnitude > 0x7f80_0000 { 0x7f } else { code };
    (sign | code) as u8
}

/// The scale of lanes whose largest magnitude, NaN aside, is `largest`: that over 448, so that nothing saturates; 1 for zeros,
/// and never below the smallest normal f32.
pub fn scale_of(largest: f32) -> f32 {
    if largest == 0.0 { 1.0 } else { (largest / E4M3_MAX).max(f32::MIN_POSITIVE) }
}

/// Scales of a latent whose value is `kv_lora_rank` lanes wide.
pub const fn latent_scales(kv_lora_rank: usize) -> usize {
    kv_lora_rank.div_ceil(LATENT_GROUP)
}

/// Bytes of a stored latent, `C + 4 * ceil(C / 128) + 2 * E`: 656 for 512 + 64 lanes.
pub const fn latent_bytes(kv_lora_rank: usize, qk_rope_head_dim: usize) -> usize {
    let rope = qk_rope_head_dim.saturating_mul(2);
    kv_lora_rank.saturating_add(4 * latent_scales(kv_lora_rank)).saturating_add(rope)
}

/// Number `index` of a run of floats of a type.
///
/// # Safety
/// The run starts at `from` and is longer than `index`.
#[inline(always)]
pub(crate) unsafe fn float(dtype: DType, from: *const u8, index: usize) -> f32 {
    // SAFETY: the caller's promise; any address will do for an unaligned read.
    unsafe {
        match dtype {
            DType::Bf16 => from.cast::<bf16>().add(index).read_unaligned().to_f32(),
            DType::F16 => from.cast::<f16>().add(index).read_unaligned().to_f32(),
            _ => from.cast::<f32>().add(index).read_unaligned(),
        }
    }
}
