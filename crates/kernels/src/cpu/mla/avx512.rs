//! AVX-512 bodies: sixteen lanes a register, latents as broadcast operands.
//!
//! Scores: sixteen keys have an accumulator each, over the sixteen lanes of a group. For each lane of the depth (pair of
//! lanes, with bf16 dot products) one register of queries is loaded and multiplied with that element of every key,
//! broadcast from where it lies: latents are neither packed nor transposed, and no sum runs across a register.
//!
//! Values: sixteen lanes have an accumulator each, over sixteen columns. For each key (pair of keys) one register of values
//! is loaded and multiplied with the weight of every lane, broadcast. A strip of columns stays in the first-level cache
//! while all lanes pass over it.

use std::arch::x86_64::*;

use crate::cpu::Isa;
use crate::cpu::e4m3::widen_on;

use super::body::{Body, CHUNK, GROUP, Scores, Softmax, TILE, Values};
use super::generic::{self, EXP2};

/// Keys, or lanes, that have an accumulator at once.
const BLOCK: usize = 16;

/// [`CHUNK`] with bf16 products, which are exact: three such chunks make 576.
const PAIRS: usize = 96;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Latents to bring into the second-level cache while a block is multiplied: line by line under all of them, as the next
/// block will ask for them.
struct Fetch {
    rows: [*const u8; BLOCK],
}

impl Fetch {
    /// The first of `rows`, of which there is one at least.
    fn new(rows: &[*const u8]) -> Fetch {
        Fetch { rows: std::array::from_fn(|i| rows[i.min(rows.len() - 1)]) }
    }

    /// Fetches one line. A latent has a sixteenth as many lines as a block has steps.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn turn(&self, step: usize) {
        let line = self.rows[step % BLOCK].wrapping_add(step / BLOCK * LINE_BYTES);
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
}

macro_rules! bodies {
    (
        $scores:ident, $score_block:ident, $values:ident, $value_block:ident, $features:literal,
        steps: $steps:expr, chunk: $chunk:expr, keys: $keys:literal,
        query: $query:ident, key: $key:expr, mul: $mul:expr, weight: $weight:expr, value: $value:ident
    ) => {
        /// Scores of `N` keys from `first` on under one group.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn $score_block<const N: usize, const FETCH: bool>(
            job: &mut Scores<'_>,
            group: usize,
            first: usize,
            fetch: &Fetch,
        ) {
            let keys: [*const u8; N] = std::array::from_fn(|k| job.keys[first + k]);
            let steps = $steps(job.depth);
            let queries = &job.queries[group * steps * GROUP..][..steps * GROUP];
            let scores = &mut job.scores[(group * TILE + first) * GROUP..][..N * GROUP];
            let mut begin = 0;
            // SAFETY: `queries` has a register a step and `scores` one a key; a key has `depth` readable elements;
            // fetching reads nothing.
            unsafe {
                loop {
                    let end = steps.min(begin + $chunk);
                    let mut sums = [_mm512_setzero_ps(); N];
                    for step in begin..end {
                        let query = $query(queries.as_ptr().add(step * GROUP));
                        for k in 0..N {
                            sums[k] = $mul(sums[k], query, $key(keys[k], step));
                        }
                        if FETCH {
                            fetch.turn(step);
                        }
                    }
                    for k in 0..N {
                        let at = scores.as_mut_ptr().add(k * GROUP);
                        if begin > 0 {
                            sums[k] = _mm512_add_ps(_mm512_loadu_ps(at), sums[k]);
                        }
                        _mm512_storeu_ps(at, sums[k]);
                    }
                    begin = end;
                    if begin >= steps {
                        break;
                    }
                }
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn $scores(job: &mut Scores<'_>) {
            let (keys, ahead, count) = (job.keys, job.ahead, job.keys.len());
            let none = Fetch { rows: [std::ptr::null(); BLOCK] };
            // SAFETY: the caller's promise covers every block of keys.
            unsafe {
                for group in 0..job.groups {
                    let mut first = 0;
                    while first + BLOCK <= count {
                        // The first group's turn brings in the next block, which the others then find.
                        let next = if first + BLOCK < count { &keys[first + BLOCK..] } else { ahead };
                        if group == 0 && !next.is_empty() {
                            $score_block::<BLOCK, true>(job, group, first, &Fetch::new(next));
                        } else {
                            $score_block::<BLOCK, false>(job, group, first, &none);
                        }
                        first += BLOCK;
                    }
                    if first + 8 <= count {
                        $score_block::<8, false>(job, group, first, &none);
                        first += 8;
                    }
                    while first + 2 <= count {
                        $score_block::<2, false>(job, group, first, &none);
                        first += 2;
                    }
                }
            }
        }

        /// Sixteen columns of `N` lanes of one group.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn $value_block<const N: usize>(
            job: &mut Values<'_>,
            lane: usize,
            column: usize,
            mask: __mmask16,
        ) {
            let (group, first) = (lane / GROUP, lane % GROUP);
            let weights = &job.weights[group * TILE / $keys * GROUP..][..job.values.len() / $keys * GROUP];
            let end = (lane + N - 1) * job.acc_stride + column + GROUP;
            let acc = job.acc[lane * job.acc_stride + column..end].as_mut_ptr();
            let alpha = job.alpha[lane..lane + N].as_ptr();
            // SAFETY: accumulators have a register at these lanes and columns, a multiple of sixteen apart; weights
            // one a step; values are read where `mask` is set, within their `width`.
            unsafe {
                let mut sums = [_mm512_setzero_ps(); N];
                let weights = weights.as_ptr().add(first);
                for (step, keys) in job.values.chunks_exact($keys).enumerate() {
                    let value = $value(keys, column, mask);
                    for l in 0..N {
                        sums[l] = $mul(sums[l], value, $weight(weights.add(step * GROUP + l)));
                    }
                }
                for l in 0..N {
                    // The tile is summed by itself: a shorter chain of roundings than onto what is there.
                    let acc = acc.add(l * job.acc_stride);
                    let before = _mm512_loadu_ps(acc);
                    _mm512_storeu_ps(acc, _mm512_fmadd_ps(before, _mm512_set1_ps(*alpha.add(l)), sums[l]));
                }
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn $values(job: &mut Values<'_>) {
            for column in (0..job.width).step_by(GROUP) {
                let left = job.width - column;
                let mask = if left >= GROUP { u16::MAX } else { (1u16 << left) - 1 };
                let mut lane = 0;
                // SAFETY: the caller's promise covers every block of lanes.
                unsafe {
                    while lane + BLOCK <= job.lanes {
                        $value_block::<BLOCK>(job, lane, column, mask);
                        lane += BLOCK;
                    }
                    if lane + 8 <= job.lanes {
                        $value_block::<8>(job, lane, column, mask);
                        lane += 8;
                    }
                    if lane + 4 <= job.lanes {
                        $value_block::<4>(job, lane, column, mask);
                        lane += 4;
                    }
                    while lane < job.lanes {
                        $value_block::<1>(job, lane, column, mask);
                        lane += 1;
                    }
                }
            }
        }
    };
}

#[inline(always)]
fn pairs(v: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of any bits.
    unsafe { std::mem::transmute(v) }
}

/// # Safety
/// AVX-512 F; sixteen readable floats.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn query_f32(at: *const f32) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_loadu_ps(at) }
}

/// # Safety
/// AVX-512 F; sixteen readable pairs.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn query_pairs(at: *const f32) -> __m512bh {
    // SAFETY: the caller's promise.
    pairs(unsafe { _mm512_loadu_si512(at.cast()) })
}

/// # Safety
/// AVX-512 F and VL; one key, whose elements at the columns of `mask` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
unsafe fn value_f32(keys: &[*const u8], column: usize, mask: __mmask16) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_maskz_loadu_ps(mask, keys[0].cast::<f32>().add(column)) }
}

/// Sixteen columns of two keys, as pairs.
///
/// # Safety
/// AVX-512 F, BW and VL; two keys, whose elements at the columns of `mask` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn value_pairs(keys: &[*const u8], column: usize, mask: __mmask16) -> __m512bh {
    // SAFETY: the caller's promise.
    let load = |key: *const u8| unsafe {
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, key.cast::<i16>().add(column)))
    };
    let (even, odd) = (load(keys[0]), load(keys[1]));
    pairs(_mm512_or_si512(even, _mm512_slli_epi32::<16>(odd)))
}

/// Element `step` of a key in every lane.
///
/// # Safety
/// AVX-512 F; the element is readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn key_f32(key: *const u8, step: usize) -> __m512 {
    // SAFETY: the caller's promise.
    _mm512_set1_ps(unsafe { key.cast::<f32>().add(step).read_unaligned() })
}

/// Pair `step` of a key in every lane.
///
/// # Safety
/// AVX-512 F; the pair is readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn key_pairs(key: *const u8, step: usize) -> __m512bh {
    // SAFETY: the caller's promise.
    pairs(_mm512_set1_epi32(unsafe { key.cast::<i32>().add(step).read_unaligned() }))
}

/// # Safety
/// AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn mul_f32(sum: __m512, a: __m512, b: __m512) -> __m512 {
    _mm512_fmadd_ps(a, b, sum)
}

/// # Safety
/// AVX-512 F and BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn mul_pairs(sum: __m512, a: __m512bh, b: __m512bh) -> __m512 {
    _mm512_dpbf16_ps(sum, a, b)
}

/// A weight in every lane.
///
/// # Safety
/// AVX-512 F; a readable float.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn weight_f32(at: *const f32) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { key_f32(at.cast(), 0) }
}

/// A pair of weights in every lane.
///
/// # Safety
/// AVX-512 F; a readable pair.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn weight_pairs(at: *const f32) -> __m512bh {
    // SAFETY: the caller's promise.
    unsafe { key_pairs(at.cast(), 0) }
}

bodies! {
    scores_f32, score_block_f32, values_f32, value_block_f32, "avx512f,avx512bw,avx512dq,avx512vl",
    steps: |depth: usize| depth, chunk: CHUNK, keys: 1,
    query: query_f32, key: key_f32, mul: mul_f32, weight: weight_f32, value: value_f32
}
bodies! {
    scores_pairs, score_block_pairs, values_pairs, value_block_pairs,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16",
    steps: |depth: usize| depth / 2, chunk: PAIRS, keys: 2,
    query: query_pairs, key: key_pairs, mul: mul_pairs, weight: weight_pairs, value: value_pairs
}

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

/// The weight of a score: 0 for one of -inf, hidden or not; NaN for NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn weight(score: __m512, top: __m512, c: __m512) -> __m512 {
    let real = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(score, _mm512_set1_ps(f32::NEG_INFINITY));
    _mm512_maskz_mov_ps(real, exp2(_mm512_mul_ps(_mm512_sub_ps(score, top), c)))
}

/// Rewrites a group's scores, scaled, hidden ones as -inf; returns their maximum and that of before.
///
/// # Safety
/// The instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn top(job: &mut Softmax<'_>, group: usize, before: __m512) -> __m512 {
    let scale = _mm512_set1_ps(job.scale);
    let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
    let scores = &mut job.scores[group * TILE * GROUP..][..job.keys * GROUP];
    let (from, to) = (&job.from[group * GROUP..][..GROUP], &job.to[group * GROUP..][..GROUP]);
    // SAFETY: sixteen bounds each.
    let (from, to) =
        unsafe { (_mm512_loadu_si512(from.as_ptr().cast()), _mm512_loadu_si512(to.as_ptr().cast())) };
    let mut top = before;
    for (key, scores) in scores.chunks_exact_mut(GROUP).enumerate() {
        // SAFETY: sixteen scores.
        let mut score = _mm512_mul_ps(unsafe { _mm512_loadu_ps(scores.as_ptr()) }, scale);
        if job.hidden {
            let position = _mm512_set1_epi32((job.first + key as u32) as i32);
            let seen = _mm512_cmple_epu32_mask(from, position) & _mm512_cmplt_epu32_mask(position, to);
            score = _mm512_mask_mov_ps(lowest, seen, score);
        }
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(scores.as_mut_ptr(), score) };
        // The second operand is kept where the first is NaN.
        top = _mm512_max_ps(score, top);
    }
    top
}

/// The running sum and the factor for what was summed before, once a group's weights sum to `sum`.
///
/// # Safety
/// The instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn finish(job: &mut Softmax<'_>, group: usize, before: __m512, top: __m512, sum: __m512) {
    let any = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(before, _mm512_set1_ps(f32::NEG_INFINITY));
    let factor = exp2(_mm512_mul_ps(_mm512_sub_ps(before, top), _mm512_set1_ps(job.c)));
    let alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), any, factor);
    let lanes = group * GROUP..(group + 1) * GROUP;
    // SAFETY: sixteen floats each.
    unsafe {
        let l = _mm512_loadu_ps(job.l[lanes.clone()].as_ptr());
        _mm512_storeu_ps(job.l[lanes.clone()].as_mut_ptr(), _mm512_fmadd_ps(l, alpha, sum));
        _mm512_storeu_ps(job.m[lanes.clone()].as_mut_ptr(), top);
        _mm512_storeu_ps(job.alpha[lanes].as_mut_ptr(), alpha);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn softmax_f32(job: &mut Softmax<'_>) {
    let c = _mm512_set1_ps(job.c);
    for group in 0..job.groups {
        // SAFETY: sixteen floats a lane group and key; the instruction set.
        unsafe {
            let before = _mm512_loadu_ps(job.m[group * GROUP..][..GROUP].as_ptr());
            let top = top(job, group, before);
            let scores = job.scores[group * TILE * GROUP..][..job.keys * GROUP].chunks_exact(GROUP);
            let weights = job.weights[group * TILE * GROUP..][..job.keys * GROUP].chunks_exact_mut(GROUP);
            let mut sum = _mm512_setzero_ps();
            for (scores, weights) in scores.zip(weights) {
                let weight = weight(_mm512_loadu_ps(scores.as_ptr()), top, c);
                _mm512_storeu_ps(weights.as_mut_ptr(), weight);
                sum = _mm512_add_ps(sum, weight);
            }
            finish(job, group, before, top, sum);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn softmax_pairs(job: &mut Softmax<'_>) {
    let c = _mm512_set1_ps(job.c);
    // Word 2i from weight i of the even key, word 2i + 1 from weight i of the odd one.
    let order: [i16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * GROUP) as i16);
    for group in 0..job.groups {
        // SAFETY: sixteen floats a lane group and key, keys in pairs; the instruction set.
        unsafe {
            let order = _mm512_loadu_si512(order.as_ptr().cast());
            let before = _mm512_loadu_ps(job.m[group * GROUP..][..GROUP].as_ptr());
            let top = top(job, group, before);
            let scores = job.scores[group * TILE * GROUP..][..job.keys * GROUP].chunks_exact(2 * GROUP);
            let weights = job.weights[group * TILE / 2 * GROUP..].chunks_exact_mut(GROUP);
            let mut sum = _mm512_setzero_ps();
            for (scores, weights) in scores.zip(weights) {
                let even = weight(_mm512_loadu_ps(scores.as_ptr()), top, c);
                let odd = weight(_mm512_loadu_ps(scores.as_ptr().add(GROUP)), top, c);
                sum = _mm512_add_ps(_mm512_add_ps(sum, even), odd);
                let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(odd, even));
                _mm512_storeu_si512(weights.as_mut_ptr().cast(), _mm512_permutexvar_epi16(order, both));
            }
            finish(job, group, before, top, sum);
        }
    }
}

/// The body; with `dot`, operands are bf16 and multiplied as such.
pub(super) fn body(dot: bool) -> Body {
    let (widen, widen_codes) = (generic::avx2_body().widen, widen_on(Isa::Avx512));
    if dot {
        Body {
            pairs: true,
            scores: scores_pairs,
            softmax: softmax_pairs,
            values: values_pairs,
            widen_codes,
            widen,
        }
    } else {
        Body {
            pairs: false,
            scores: scores_f32,
            softmax: softmax_f32,
            values: values_f32,
            widen_codes,
            widen,
        }
    }
}
