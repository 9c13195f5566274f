//! Keys sixteen at a time: sixteen words of each are loaded, converted and transposed in registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::super::body::BLOCK;
use crate::dsa::{KeyFormat, e4m3_to_f32};

/// How sixteen words of a key are read.
trait Words {
    /// Lanes of a word.
    const LANES: usize;

    /// Words from the key at `from`, lanes `lane..width`; zeros past `width`.
    ///
    /// # Safety
    /// AVX-512 F, BW, DQ and VL; `width` lanes are readable at `from`; `lane` is below `width`.
    unsafe fn words(from: *const u8, lane: usize, width: usize) -> __m512i;
}

/// The lowest bits of a mask, one for each of `count` lanes.
#[inline(always)]
fn low(count: usize) -> u32 {
    if count >= 32 { u32::MAX } else { (1 << count) - 1 }
}

struct F32;
struct Bf16;
struct F16;
struct Fp8;
/// Pairs of stored bf16.
struct Bf16Pairs;
/// Pairs of bf16 made of e4m3, which are exact.
struct Fp8Pairs;

macro_rules! words {
    ($format:ty, $lanes:literal, |$from:ident, $lane:ident, $left:ident| $read:block) => {
        impl Words for $format {
            const LANES: usize = $lanes;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn words($from: *const u8, $lane: usize, width: usize) -> __m512i {
                let $left = low(width - $lane);
                // SAFETY: the caller's promise: lanes of the mask are readable, the others are not read.
                unsafe { $read }
            }
        }
    };
}

words!(F32, 1, |from, lane, left| { _mm512_maskz_loadu_epi32(left as u16, from.cast::<i32>().add(lane)) });
words!(Bf16, 1, |from, lane, left| {
    let bits = _mm256_maskz_loadu_epi16(left as u16, from.cast::<bf16>().add(lane).cast());
    _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))
});
words!(F16, 1, |from, lane, left| {
    let bits = _mm256_maskz_loadu_epi16(left as u16, from.cast::<f16>().add(lane).cast());
    _mm512_castps_si512(_mm512_cvtph_ps(bits))
});
words!(Fp8, 1, |from, lane, left| {
    let codes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(left as u16, from.add(lane).cast()));
    let pairs = e4m3(codes);
    _mm512_slli_epi32::<16>(pairs)
});
words!(Bf16Pairs, 2, |from, lane, left| {
    _mm512_maskz_loadu_epi16(left, from.cast::<bf16>().add(lane).cast())
});
words!(Fp8Pairs, 2, |from, lane, left| {
    e4m3(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(left, from.add(lane).cast())))
});

/// The bf16 of every magnitude of e4m3.
static MAGNITUDES: [u16; 128] = {
    let mut table = [0; 128];
    let mut code = 0;
    while code < 128 {
        table[code] = (e4m3_to_f32(code as u8).to_bits() >> 16) as u16;
        code += 1;
    }
    table
};

/// 32 codes, each in 16 bits, as bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn e4m3(codes: __m512i) -> __m512i {
    // SAFETY: the table has four registers.
    let table = |i: usize| unsafe { _mm512_loadu_si512(MAGNITUDES.as_ptr().add(32 * i).cast()) };
    let small = _mm512_permutex2var_epi16(table(0), codes, table(1));
    let large = _mm512_permutex2var_epi16(table(2), codes, table(3));
    let magnitude =
        _mm512_mask_blend_epi16(_mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), small, large);
    let sign = _mm512_slli_epi16::<8>(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)));
    _mm512_or_si512(magnitude, sign)
}

/// Row `i` of the result is column `i`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn transpose(r: &[__m512i; 16]) -> [__m512i; 16] {
    let mut a = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // b[4 * i + j]: in each quarter, column j of it for rows 4 * i..4 * i + 4.
    let mut b = a;
    for i in 0..4 {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    let mut out = b;
    for j in 0..4 {
        // Quarters 0 and 2, or 1 and 3, of rows 0..8 and of rows 8..16.
        let low = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[j], b[4 + j]);
        let low_odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[j], b[4 + j]);
        let high = _mm512_shuffle_i32x4::<0b10_00_10_00>(b[8 + j], b[12 + j]);
        let high_odd = _mm512_shuffle_i32x4::<0b11_01_11_01>(b[8 + j], b[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high);
        out[8 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high);
        out[4 + j] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low_odd, high_odd);
        out[12 + j] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low_odd, high_odd);
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack<W: Words>(rows: &[*const u8; BLOCK], width: usize, out: &mut [u32]) {
    for (group, rows) in rows.chunks_exact(16).enumerate() {
        for (tile, out) in out.chunks_mut(16 * BLOCK).enumerate() {
            let mut words = [_mm512_setzero_si512(); 16];
            for (words, &row) in words.iter_mut().zip(rows) {
                if !row.is_null() {
                    // SAFETY: the caller's promise; a tile starts below the key's last word.
                    *words = unsafe { W::words(row, tile * 16 * W::LANES, width) };
                }
            }
            let columns = transpose(&words);
            for (step, column) in out.chunks_exact_mut(BLOCK).zip(columns) {
                // SAFETY: sixteen words of a step's sixty-four.
                unsafe { _mm512_storeu_si512(step.as_mut_ptr().add(16 * group).cast(), column) };
            }
        }
    }
}

/// Packs keys as `[depth, BLOCK]` words; zeros where there is no key.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; each row that is not null has `width` readable lanes of the format; `out` has
/// `depth * BLOCK` words, where `pairs` halves the depth and is only asked of bf16 and fp8.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn keys(
    format: KeyFormat,
    pairs: bool,
    rows: &[*const u8; BLOCK],
    width: usize,
    out: &mut [u32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match (format, pairs) {
            (KeyFormat::F32, _) => pack::<F32>(rows, width, out),
            (KeyFormat::F16, _) => pack::<F16>(rows, width, out),
            (KeyFormat::Bf16, false) => pack::<Bf16>(rows, width, out),
            (KeyFormat::Bf16, true) => pack::<Bf16Pairs>(rows, width, out),
            (KeyFormat::Fp8, false) => pack::<Fp8>(rows, width, out),
            (KeyFormat::Fp8, true) => pack::<Fp8Pairs>(rows, width, out),
        }
    }
}
