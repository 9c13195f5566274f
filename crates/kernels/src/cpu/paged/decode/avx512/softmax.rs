//! What becomes of scores: cap and bias, one step of the running softmax, the factor on what came before.

use std::arch::x86_64::*;

use super::super::body::{TILE, Transform};
use super::super::generic::{EXP2, TANH_LIMIT, TANH_P, TANH_Q, undefined};

/// `2^x`; see the portable one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn exp2(x: __m512) -> __m512 {
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(EXP2[0]);
    for &coefficient in &EXP2[1..] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficient));
    }
    _mm512_scalef_ps(p, n)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn softmax(scores: &mut [f32; TILE], seen: u64, m: &mut f32, l: &mut f32, c: f32) -> f32 {
    let masks: [__mmask16; 4] = std::array::from_fn(|i| (seen >> (16 * i)) as u16);
    let at = scores.as_mut_ptr();
    let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut s = [lowest; 4];
    for i in 0..4 {
        // SAFETY: a tile has four times sixteen scores; hidden ones are not read.
        s[i] = unsafe { _mm512_mask_loadu_ps(lowest, masks[i], at.add(16 * i)) };
    }
    let top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3])));
    let before = *m;
    let now = if top > before { top } else { before };
    if (0..4).any(|i| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(s[i], s[i]) != 0) {
        return undefined(scores, m, l, now);
    }
    if now == f32::NEG_INFINITY {
        scores.fill(0.0);
        return 1.0;
    }
    let (mv, cv) = (_mm512_set1_ps(now), _mm512_set1_ps(c));
    let mut sum = _mm512_setzero_ps();
    for i in 0..4 {
        // A hidden score, or one of -inf, has no exponent to speak of: its weight is 0 by mask.
        let x = _mm512_mul_ps(_mm512_sub_ps(s[i], mv), cv);
        let real = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(s[i], lowest) & masks[i];
        let weight = _mm512_maskz_mov_ps(real, exp2(x));
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(at.add(16 * i), weight) };
        sum = _mm512_add_ps(sum, weight);
    }
    let alpha = if before == f32::NEG_INFINITY {
        1.0
    } else {
        _mm512_cvtss_f32(exp2(_mm512_set1_ps((before - now) * c)))
    };
    *m = now;
    *l = (*l).mul_add(alpha, _mm512_reduce_add_ps(sum));
    alpha
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn transform(scores: &mut [f32; TILE], by: &Transform) {
    let at = scores.as_mut_ptr();
    let ramp = _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
    for i in 0..4 {
        // SAFETY: a tile has four times sixteen scores.
        unsafe {
            let mut s = _mm512_mul_ps(_mm512_loadu_ps(at.add(16 * i)), _mm512_set1_ps(by.sm_scale));
            if by.cap > 0.0 {
                s = _mm512_mul_ps(s, _mm512_set1_ps(1.0 / by.cap));
                s = _mm512_mul_ps(tanh(s), _mm512_set1_ps(by.cap));
            }
            if by.slope != 0.0 {
                let distance = _mm512_add_ps(ramp, _mm512_set1_ps(by.distance + 16.0 * i as f32));
                s = _mm512_fmadd_ps(_mm512_set1_ps(by.slope), distance, s);
            }
            _mm512_storeu_ps(at.add(16 * i), s);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn tanh(x: __m512) -> __m512 {
    let limit = _mm512_set1_ps(TANH_LIMIT);
    let x = _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    let square = _mm512_mul_ps(x, x);
    let (mut p, mut q) = (_mm512_set1_ps(TANH_P[0]), _mm512_set1_ps(TANH_Q[0]));
    for &coefficient in &TANH_P[1..] {
        p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(coefficient));
    }
    for &coefficient in &TANH_Q[1..] {
        q = _mm512_fmadd_ps(q, square, _mm512_set1_ps(coefficient));
    }
    _mm512_div_ps(_mm512_mul_ps(x, p), q)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn rescale(acc: &mut [f32], alpha: f32) {
    for value in acc {
        *value *= alpha;
    }
}
