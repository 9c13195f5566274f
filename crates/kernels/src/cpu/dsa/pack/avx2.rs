//! Keys eight at a time: eight lanes of each are loaded, converted to f32 and transposed in registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::super::body::BLOCK;
use super::number;
use crate::dsa::KeyFormat;

/// Keys, and lanes of a key, that are transposed at once.
const TILE: usize = 8;

/// Lanes `lane..lane + 8` of the key at `from` as f32; zeros past `width`.
///
/// # Safety
/// AVX2, FMA and F16C; `width` lanes of the format are readable at `from`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn lanes(format: KeyFormat, from: *const u8, lane: usize, width: usize) -> __m256 {
    // SAFETY: the caller's promise; whole registers are only read where they lie below `width`.
    unsafe {
        if lane + TILE > width {
            let mut tail = [0f32; TILE];
            tail.iter_mut()
                .enumerate()
                .take(width - lane)
                .for_each(|(i, x)| *x = number(format, from, lane + i));
            return _mm256_loadu_ps(tail.as_ptr());
        }
        match format {
            KeyFormat::F32 => _mm256_loadu_ps(from.cast::<f32>().add(lane)),
            KeyFormat::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast::<f16>().add(lane).cast())),
            KeyFormat::Bf16 => {
                let bits = _mm_loadu_si128(from.cast::<bf16>().add(lane).cast());
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
            }
            KeyFormat::Fp8 => e4m3(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(lane).cast()))),
        }
    }
}

/// Eight e4m3 codes as f32.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn e4m3(codes: __m256i) -> __m256 {
    let magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
    // Exponent and mantissa in the places of an f32's: 2^120 too small, subnormals as well.
    let small = _mm256_castsi256_ps(_mm256_slli_epi32::<20>(magnitude));
    let number = _mm256_mul_ps(small, _mm256_set1_ps(f32::from_bits((127 + 120) << 23)));
    let nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    let sign = _mm256_slli_epi32::<24>(_mm256_xor_si256(codes, magnitude));
    let extra = _mm256_or_si256(_mm256_and_si256(nan, _mm256_set1_epi32(0x7fc0_0000)), sign);
    _mm256_or_ps(number, _mm256_castsi256_ps(extra))
}

/// Row `i` of the result is column `i`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transpose(r: &[__m256; TILE]) -> [__m256; TILE] {
    let mut a = *r;
    for i in 0..4 {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // b[4 * i + j]: in each half, column j of it for rows 4 * i..4 * i + 4.
    let mut b = a;
    for i in 0..2 {
        b[4 * i] = _mm256_shuffle_ps::<0b01_00_01_00>(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(a[4 * i + 1], a[4 * i + 3]);
    }
    let mut out = b;
    for j in 0..4 {
        out[j] = _mm256_permute2f128_ps::<0x20>(b[j], b[4 + j]);
        out[4 + j] = _mm256_permute2f128_ps::<0x31>(b[j], b[4 + j]);
    }
    out
}

/// Packs keys as `[width, BLOCK]` words; zeros where there is no key.
///
/// # Safety
/// The machine has AVX2, FMA and F16C; each row that is not null has `width` readable lanes of the format.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn keys(format: KeyFormat, rows: &[*const u8; BLOCK], width: usize, out: &mut [u32]) {
    for (group, rows) in rows.chunks_exact(TILE).enumerate() {
        for (tile, out) in out.chunks_mut(TILE * BLOCK).enumerate() {
            let mut numbers = [_mm256_setzero_ps(); TILE];
            for (numbers, &row) in numbers.iter_mut().zip(rows) {
                if !row.is_null() {
                    // SAFETY: the caller's promise; a tile starts below `width`.
                    *numbers = unsafe { lanes(format, row, tile * TILE, width) };
                }
            }
            for (step, column) in out.chunks_exact_mut(BLOCK).zip(transpose(&numbers)) {
                // SAFETY: eight words of a step's sixty-four.
                unsafe { _mm256_storeu_ps(step.as_mut_ptr().add(TILE * group).cast(), column) };
            }
        }
    }
}
