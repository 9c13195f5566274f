//! The passes sixteen scores at a time.

use std::arch::x86_64::*;

use super::{CLASSES, COPIES, Class, Counts, Cut, Passes, first};
use crate::mutant::planted;

pub(super) const PASSES: Passes = Passes { count, range, write };

const LANES: usize = 16;

/// Sixteen scores from `at` on, and which of them are there; the others read as NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn load(scores: &[f32], at: usize) -> (__m512, __mmask16) {
    let left = scores.len() - at;
    let there: __mmask16 = if left >= LANES { u16::MAX } else { (1 << left) - 1 };
    // SAFETY: the lanes of the mask lie in the slice; the others are not read.
    let x =
        unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(f32::NAN), there, scores.as_ptr().wrapping_add(at)) };
    (x, there)
}

/// As the portable one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn order(x: __m512) -> __m512i {
    let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(x, x);
    let bits = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
    let flip = _mm512_or_si512(_mm512_srai_epi32::<31>(bits), _mm512_set1_epi32(i32::MIN));
    _mm512_maskz_xor_epi32(number, bits, flip)
}

/// Digits found before they are counted: a digit read as soon as it is written would wait for the whole register.
const BATCH: usize = 512;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,popcnt")]
fn count(scores: &[f32], class: Class, counts: &mut Counts, all: bool) {
    let (low, high) = (_mm512_set1_ps(class.low), _mm512_set1_ps(class.high));
    let (shift, mask) = (_mm_cvtsi32_si128(class.shift as i32), _mm512_set1_epi32(class.mask as i32));
    let mut digits = [0u16; BATCH + LANES];
    for batch in scores.chunks(BATCH) {
        let mut len = 0;
        for at in (0..batch.len()).step_by(LANES) {
            let (x, there) = load(batch, at);
            let inside = _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(there, x, low);
            let inside = if all { there } else { _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(inside, x, high) };
            let digit = _mm512_and_si512(_mm512_srl_epi32(order(x), shift), mask);
            let digit = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(inside, digit));
            // SAFETY: sixteen elements from `len` on, which is at most what the batch held before.
            unsafe { _mm256_storeu_si256(digits.as_mut_ptr().add(len).cast(), digit) };
            len += inside.count_ones() as usize;
        }
        let mut some = digits[..len].chunks_exact(COPIES);
        for digits in some.by_ref() {
            for (copy, &digit) in counts.iter_mut().zip(digits) {
                copy[digit as usize % CLASSES] += 1;
            }
        }
        some.remainder().iter().for_each(|&digit| counts[0][digit as usize % CLASSES] += 1);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,popcnt")]
fn range(scores: &[f32], low: f32, high: f32, kept: &mut [f32]) -> (f32, f32) {
    let mut len = 0;
    let (low, high) = (_mm512_set1_ps(low), _mm512_set1_ps(high));
    let mut least = _mm512_set1_ps(f32::INFINITY);
    let mut greatest = _mm512_set1_ps(f32::NEG_INFINITY);
    for at in (0..scores.len()).step_by(LANES) {
        let (x, there) = load(scores, at);
        let inside = _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(there, x, low);
        let inside = _mm512_mask_cmp_ps_mask::<_CMP_LE_OQ>(inside, x, high);
        least = _mm512_mask_min_ps(least, inside, least, x);
        greatest = _mm512_mask_max_ps(greatest, inside, greatest, x);
        if len + LANES <= kept.len() {
            // SAFETY: sixteen elements from `len` on; what is written too much is written again.
            unsafe { _mm512_storeu_ps(kept.as_mut_ptr().add(len), _mm512_maskz_compress_ps(inside, x)) };
            len += inside.count_ones() as usize;
        }
    }
    (_mm512_reduce_min_ps(least), _mm512_reduce_max_ps(greatest))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,popcnt")]
fn write(scores: &[f32], cut: Cut, out: &mut [i32]) -> usize {
    let nan = planted("topk-nan-picked");
    let threshold = _mm512_set1_ps(cut.threshold);
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let (mut len, mut ties) = (0, cut.ties);
    for at in (0..scores.len()).step_by(LANES) {
        let (x, there) = load(scores, at);
        let mut above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, threshold);
        if nan {
            above |= _mm512_mask_cmp_ps_mask::<_CMP_UNORD_Q>(there, x, x);
        }
        let mut equal = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(x, threshold);
        if equal.count_ones() as usize > ties {
            equal = first(equal, ties);
        }
        ties -= equal.count_ones() as usize;
        let mut picked = above | equal;
        let positions = _mm512_add_epi32(lanes, _mm512_set1_epi32(at as i32));
        // A compressing store is slow on some machines; a whole one is not, and what it writes too much is
        // written again, or filled with -1.
        if len + LANES <= out.len() {
            // SAFETY: sixteen elements from `len` on.
            unsafe {
                let to = out.as_mut_ptr().add(len).cast();
                _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(picked, positions));
            }
        } else if picked != 0 {
            picked = first(picked, out.len() - len);
            let kept = (1u32 << picked.count_ones()) - 1;
            // SAFETY: as many elements as are picked, of which there are no more than there is room.
            unsafe {
                let to = out.as_mut_ptr().add(len);
                _mm512_mask_storeu_epi32(to, kept as u16, _mm512_maskz_compress_epi32(picked, positions));
            }
        }
        len += picked.count_ones() as usize;
    }
    len
}
