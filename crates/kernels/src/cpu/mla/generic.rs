//! Plain Rust bodies in f32: once for any machine, once compiled for AVX2 with FMA.

use half::{bf16, f16};

use crate::DType;
#[cfg(target_arch = "x86_64")]
use crate::cpu::Isa::Avx2Fma;
use crate::cpu::Isa::Portable;
use crate::cpu::e4m3::widen_on;

use super::body::{Body, CHUNK, GROUP, Scores, Softmax, TILE, Values};

type Lanes = [f32; GROUP];

#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Coefficients of `2^f` for `|f| <= 1/2`, highest power first: Cephes `exp2f`.
pub(super) const EXP2: [f32; 7] = [
    1.535_336_2e-4,
    1.339_887_4e-3,
    9.618_437e-3,
    5.550_332_6e-2,
    2.402_264_8e-1,
    std::f32::consts::LN_2,
    1.0,
];

/// `2^x` for `x <= 0`; 0 below the smallest normal number, NaN for NaN.
#[inline(always)]
fn exp2<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    let clamped = if x < -126.0 { -126.0 } else { x };
    let shifted = clamped + ROUND;
    let f = clamped - (shifted - ROUND);
    let mut p = EXP2[0];
    for &coefficient in &EXP2[1..] {
        p = mul_add::<FMA>(p, f, coefficient);
    }
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -126.0 { 0.0 } else { p * power }
}

#[inline(always)]
fn group(of: &[f32], index: usize) -> &Lanes {
    (&of[index * GROUP..][..GROUP]).try_into().expect("a group has GROUP lanes")
}

#[inline(always)]
fn group_mut(of: &mut [f32], index: usize) -> &mut Lanes {
    (&mut of[index * GROUP..][..GROUP]).try_into().expect("a group has GROUP lanes")
}

#[inline(always)]
unsafe fn scores<const FMA: bool>(job: &mut Scores<'_>) {
    for g in 0..job.groups {
        let queries = &job.queries[g * job.depth * GROUP..][..job.depth * GROUP];
        for first in (0..job.keys.len()).step_by(4) {
            // Keys past the end repeat the last one and are not stored.
            let count = 4.min(job.keys.len() - first);
            let keys: [*const f32; 4] = std::array::from_fn(|k| job.keys[first + k.min(count - 1)].cast());
            let mut totals = [[0f32; GROUP]; 4];
            for begin in (0..job.depth).step_by(CHUNK) {
                let mut sums = [[0f32; GROUP]; 4];
                for at in begin..(begin + CHUNK).min(job.depth) {
                    let query = group(queries, at);
                    for k in 0..4 {
                        // SAFETY: each key names `depth` readable elements.
                        let key = unsafe { keys[k].add(at).read_unaligned() };
                        for i in 0..GROUP {
                            sums[k][i] = mul_add::<FMA>(query[i], key, sums[k][i]);
                        }
                    }
                }
                for k in 0..4 {
                    for i in 0..GROUP {
                        totals[k][i] += sums[k][i];
                    }
                }
            }
            for k in 0..count {
                *group_mut(job.scores, g * TILE + first + k) = totals[k];
            }
        }
    }
}

#[inline(always)]
fn softmax<const FMA: bool>(job: &mut Softmax<'_>) {
    for g in 0..job.groups {
        let before = *group(job.m, g);
        let mut top = before;
        for key in 0..job.keys {
            let position = job.first + key as u32;
            let scores = group_mut(job.scores, g * TILE + key);
            for i in 0..GROUP {
                let (from, to) = (job.from[g * GROUP + i], job.to[g * GROUP + i]);
                let seen = !job.hidden || from <= position && position < to;
                let score = if seen { scores[i] * job.scale } else { f32::NEG_INFINITY };
                scores[i] = score;
                top[i] = if score > top[i] { score } else { top[i] };
            }
        }
        let mut sums = [0f32; GROUP];
        for key in 0..job.keys {
            let scores = group(job.scores, g * TILE + key);
            let weights = group_mut(job.weights, g * TILE + key);
            for i in 0..GROUP {
                // A hidden score, or one of -inf, weighs nothing; a NaN makes its lane NaN.
                let weight = exp2::<FMA>((scores[i] - top[i]) * job.c);
                weights[i] = if scores[i] == f32::NEG_INFINITY { 0.0 } else { weight };
                sums[i] += weights[i];
            }
        }
        for i in 0..GROUP {
            let factor = exp2::<FMA>((before[i] - top[i]) * job.c);
            let alpha = if before[i] == f32::NEG_INFINITY { 1.0 } else { factor };
            job.alpha[g * GROUP + i] = alpha;
            job.l[g * GROUP + i] = mul_add::<FMA>(job.l[g * GROUP + i], alpha, sums[i]);
        }
        *group_mut(job.m, g) = top;
    }
}

#[inline(always)]
unsafe fn values<const FMA: bool>(job: &mut Values<'_>) {
    for lane in 0..job.lanes {
        let weights = &job.weights[lane / GROUP * TILE * GROUP + lane % GROUP..];
        let alpha = job.alpha[lane];
        let acc = &mut job.acc[lane * job.acc_stride..][..job.width];
        let (blocks, rest) = acc.as_chunks_mut::<GROUP>();
        let mut column = 0;
        for block in blocks {
            let mut sums = [0f32; GROUP];
            for (key, value) in job.values.iter().enumerate() {
                let weight = weights[key * GROUP];
                // SAFETY: each value names `width` readable elements.
                let value = unsafe { value.cast::<f32>().add(column).cast::<Lanes>().read_unaligned() };
                for i in 0..GROUP {
                    sums[i] = mul_add::<FMA>(weight, value[i], sums[i]);
                }
            }
            for i in 0..GROUP {
                block[i] = mul_add::<FMA>(block[i], alpha, sums[i]);
            }
            column += GROUP;
        }
        for sum in rest {
            let mut total = 0f32;
            for (key, value) in job.values.iter().enumerate() {
                // SAFETY: as above.
                let value = unsafe { value.cast::<f32>().add(column).read_unaligned() };
                total = mul_add::<FMA>(weights[key * GROUP], value, total);
            }
            *sum = mul_add::<FMA>(*sum, alpha, total);
            column += 1;
        }
    }
}

#[inline(always)]
unsafe fn widen(from: *const u8, dtype: DType, to: &mut [f32]) {
    // SAFETY: the caller promises as many elements of that type.
    unsafe {
        match dtype {
            DType::Bf16 => {
                let from = from.cast::<bf16>();
                to.iter_mut().enumerate().for_each(|(i, to)| *to = from.add(i).read_unaligned().to_f32());
            }
            DType::F16 => {
                let from = from.cast::<f16>();
                to.iter_mut().enumerate().for_each(|(i, to)| *to = from.add(i).read_unaligned().to_f32());
            }
            _ => std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), size_of_val(to)),
        }
    }
}

unsafe fn widen_portable(from: *const u8, dtype: DType, to: &mut [f32]) {
    // SAFETY: the caller's promise is passed on.
    unsafe { widen(from, dtype, to) }
}

unsafe fn scores_portable(job: &mut Scores<'_>) {
    // SAFETY: the caller's promise is passed on.
    unsafe { scores::<false>(job) }
}

unsafe fn values_portable(job: &mut Values<'_>) {
    // SAFETY: the caller's promise is passed on.
    unsafe { values::<false>(job) }
}

/// The body for any machine.
pub(super) fn portable_body() -> Body {
    Body {
        pairs: false,
        scores: scores_portable,
        softmax: softmax::<false>,
        values: values_portable,
        widen_codes: widen_on(Portable),
        widen: widen_portable,
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn scores_avx2(job: &mut Scores<'_>) {
        // SAFETY: the caller's promise is passed on.
        unsafe { scores::<true>(job) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn softmax_avx2(job: &mut Softmax<'_>) {
        softmax::<true>(job)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn values_avx2(job: &mut Values<'_>) {
        // SAFETY: the caller's promise is passed on.
        unsafe { values::<true>(job) }
    }
}

/// As [`widen`], eight halves at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen_avx2(from: *const u8, dtype: DType, to: &mut [f32]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    let whole = if dtype == DType::F16 { to.len() / 8 * 8 } else { 0 };
    // SAFETY: the caller promises as many elements of that type; `whole` is at most that.
    unsafe {
        for at in (0..whole).step_by(8) {
            let halves = _mm_loadu_si128(from.add(2 * at).cast());
            _mm256_storeu_ps(to.as_mut_ptr().add(at), _mm256_cvtph_ps(halves));
        }
        widen(from.add(whole * dtype.size()), dtype, &mut to[whole..]);
    }
}

/// The body for AVX2 with FMA.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx2_body() -> Body {
    Body {
        pairs: false,
        scores: avx2::scores_avx2,
        softmax: avx2::softmax_avx2,
        values: avx2::values_avx2,
        widen_codes: widen_on(Avx2Fma),
        widen: widen_avx2,
    }
}
