//! Scores, sixteen at a time, folded together; bf16 dot products where the machine has them.
//!
//! Sixteen accumulators hold `lanes x keys` scores (4 x 4, 2 x 8 or 1 x 16), each summed over the head width
//! in one register. They are then folded by one transposing tree of additions: each step adds, for two registers at
//! once, one half of each to its other half. Every score takes the same path through the tree, so its bits do not
//! depend on which of the sixteen it is.

use std::arch::x86_64::*;

use half::bf16;

use super::super::body::{Scores, TILE};
use super::fetch::Fetch;
use super::load::Load;

/// Adds `a`'s halves into the low half of the result and `b`'s into the high half, at each of four scales.
macro_rules! fold_pair {
    ($a:expr, $b:expr, 8) => {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b01_00_01_00>($a, $b),
            _mm512_shuffle_f32x4::<0b11_10_11_10>($a, $b),
        )
    };
    ($a:expr, $b:expr, 4) => {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>($a, $b),
            _mm512_shuffle_f32x4::<0b11_01_11_01>($a, $b),
        )
    };
    ($a:expr, $b:expr, 2) => {
        _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>($a, $b), _mm512_shuffle_ps::<0b11_10_11_10>($a, $b))
    };
    ($a:expr, $b:expr, 1) => {
        _mm512_add_ps(_mm512_shuffle_ps::<0b10_00_10_00>($a, $b), _mm512_shuffle_ps::<0b11_01_11_01>($a, $b))
    };
}

/// The sums of sixteen registers, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fold16(v: &[__m512; 16]) -> __m512 {
    // Registers four apart meet first, so that the last step leaves sum i in lane i.
    let mut a = [_mm512_setzero_ps(); 8];
    for i in 0..4 {
        a[i] = fold_pair!(v[i], v[i + 8], 8);
        a[i + 4] = fold_pair!(v[i + 4], v[i + 12], 8);
    }
    // a[i]: low half of v[i], high half of v[i + 8], eight partial sums each.
    let mut b = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        b[i] = fold_pair!(a[i], a[i + 4], 4);
    }
    // b[i]: quarters v[i], v[i + 8], v[i + 4], v[i + 12].
    let c = [fold_pair!(b[0], b[2], 2), fold_pair!(b[1], b[3], 2)];
    // Within each quarter: two partial sums of its i, two of i + 2.
    let d = fold_pair!(c[0], c[1], 1);
    // Within each quarter: i, i + 2, i + 1, i + 3.
    let order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    _mm512_permutexvar_ps(order, d)
}

/// `LANES x KEYS` scores, 16 in all. Keys past `count` repeat the last one and are not stored.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn score_block<K: Load, const LANES: usize, const KEYS: usize>(
    job: &Scores<'_>,
    head: usize,
    lane: usize,
    first: usize,
    fetch: &mut Fetch<'_>,
) {
    let count = KEYS.min(job.keys.len() - first);
    let mut keys = [std::ptr::null::<K>(); KEYS];
    for i in 0..KEYS {
        keys[i] = job.keys[first + i.min(count - 1)].wrapping_add(head * job.key_head).cast();
    }
    let q = job.q.wrapping_add(head * job.q_head).cast::<f32>();
    let mut sums = [_mm512_setzero_ps(); 16];
    let whole = job.head_dim / 16 * 16;
    // SAFETY: queries are packed `q_stride` floats apart and padded past `head_dim`; each key names
    // `head_dim` readable elements, the tail by mask; prefetching reads nothing.
    unsafe {
        let q = q.add(lane * job.q_stride);
        for at in (0..whole).step_by(16) {
            fetch.turn();
            let mut queries = [_mm512_setzero_ps(); LANES];
            for l in 0..LANES {
                queries[l] = _mm512_loadu_ps(q.add(l * job.q_stride + at));
            }
            for k in 0..KEYS {
                let key = K::load(keys[k].add(at));
                for l in 0..LANES {
                    sums[l * KEYS + k] = _mm512_fmadd_ps(queries[l], key, sums[l * KEYS + k]);
                }
            }
        }
        if whole < job.head_dim {
            let mask = (1u16 << (job.head_dim - whole)) - 1;
            for k in 0..KEYS {
                let key = K::load_some(keys[k].add(whole), mask);
                for l in 0..LANES {
                    let query = _mm512_loadu_ps(q.add(l * job.q_stride + whole));
                    sums[l * KEYS + k] = _mm512_fmadd_ps(query, key, sums[l * KEYS + k]);
                }
            }
        }
        store::<LANES, KEYS>(job, head * job.lanes + lane, first, count, fold16(&sums));
    }
}

/// As [`score_block`], with bf16 dot products of bf16 queries.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn score_block_bf16<const LANES: usize, const KEYS: usize>(
    job: &Scores<'_>,
    head: usize,
    lane: usize,
    first: usize,
    fetch: &mut Fetch<'_>,
) {
    let count = KEYS.min(job.keys.len() - first);
    let mut keys = [std::ptr::null::<bf16>(); KEYS];
    for i in 0..KEYS {
        keys[i] = job.keys[first + i.min(count - 1)].wrapping_add(head * job.key_head).cast();
    }
    let q = job.q.wrapping_add(head * job.q_head).cast::<bf16>();
    let mut sums = [_mm512_setzero_ps(); 16];
    let whole = job.head_dim / 32 * 32;
    // SAFETY: as in `score_block`; queries are bf16 here, padded to a multiple of 32.
    unsafe {
        let q = q.add(lane * job.q_stride);
        let pairs = |v: __m512i| std::mem::transmute::<__m512i, __m512bh>(v);
        for at in (0..whole).step_by(32) {
            fetch.turn();
            let mut queries = [_mm512_setzero_si512(); LANES];
            for l in 0..LANES {
                queries[l] = _mm512_loadu_si512(q.add(l * job.q_stride + at).cast());
            }
            for k in 0..KEYS {
                let key = pairs(_mm512_loadu_si512(keys[k].add(at).cast()));
                for l in 0..LANES {
                    sums[l * KEYS + k] = _mm512_dpbf16_ps(sums[l * KEYS + k], pairs(queries[l]), key);
                }
            }
        }
        if whole < job.head_dim {
            let mask = (1u32 << (job.head_dim - whole)) - 1;
            for k in 0..KEYS {
                let key = pairs(_mm512_maskz_loadu_epi16(mask, keys[k].add(whole).cast()));
                for l in 0..LANES {
                    let query = pairs(_mm512_loadu_si512(q.add(l * job.q_stride + whole).cast()));
                    sums[l * KEYS + k] = _mm512_dpbf16_ps(sums[l * KEYS + k], query, key);
                }
            }
        }
        store::<LANES, KEYS>(job, head * job.lanes + lane, first, count, fold16(&sums));
    }
}

/// Stores `KEYS` scores of each of `LANES` lanes, `count` of which are wanted; `lane` counts through all heads.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn store<const LANES: usize, const KEYS: usize>(
    job: &Scores<'_>,
    lane: usize,
    first: usize,
    count: usize,
    sums: __m512,
) {
    let wanted = (1u32 << count) - 1;
    // Lanes in order, each in the lowest `KEYS` places of a register.
    let turn = |by: usize| match by * KEYS {
        0 => sums,
        4 => _mm512_shuffle_f32x4::<1>(sums, sums),
        8 => _mm512_shuffle_f32x4::<0b1110>(sums, sums),
        _ => _mm512_shuffle_f32x4::<3>(sums, sums),
    };
    for l in 0..LANES {
        // SAFETY: scores have room for TILE keys a lane, of which the block's are `first..first + count`; others are
        // not written, by width or by mask.
        unsafe {
            let at = job.scores.add((lane + l) * TILE + first);
            match KEYS {
                // A whole block is stored plainly at its own width: 64 masked bytes would reach into the next cache line.
                4 if count == 4 => _mm_storeu_ps(at, _mm512_castps512_ps128(turn(l))),
                8 if count == 8 => _mm256_storeu_ps(at, _mm512_castps512_ps256(turn(l))),
                _ => _mm512_mask_storeu_ps(at, wanted as u16, turn(l)),
            }
        }
    }
}

macro_rules! scores {
    ($name:ident, $features:literal, $width:literal, $block:ident $(, $k:ident)?) => {
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name$(<$k: Load>)?(job: &Scores<'_>) {
            // The fewest tokens that fill every block: a row of all heads is then read from front to back.
            let step = 16 >> (job.lanes.trailing_zeros().min(2));
            let count = job.keys.len();
            let blocks = job.lanes / 4 * (step / 4) + job.lanes % 4 / 2 * (step / 8) + job.lanes % 2;
            // Lines are fetched one by one beside those that are read: a burst would keep the reads waiting.
            let turns = count.div_ceil(step) * job.heads * blocks * (job.head_dim / $width).max(1);
            let mut fetch = Fetch::new(&job.ahead, turns);
            for begin in (0..count).step_by(step) {
                let end = count.min(begin + step);
                for head in 0..job.heads {
                    let mut lane = 0;
                    // SAFETY: the caller's promise covers every block of `heads x lanes x keys`.
                    unsafe {
                        while lane + 4 <= job.lanes {
                            for first in (begin..end).step_by(4) {
                                $block::<$($k,)? 4, 4>(job, head, lane, first, &mut fetch);
                            }
                            lane += 4;
                        }
                        if lane + 2 <= job.lanes {
                            for first in (begin..end).step_by(8) {
                                $block::<$($k,)? 2, 8>(job, head, lane, first, &mut fetch);
                            }
                            lane += 2;
                        }
                        if lane < job.lanes {
                            $block::<$($k,)? 1, 16>(job, head, lane, begin, &mut fetch);
                        }
                    }
                }
            }
        }
    };
}
scores!(scores_f32, "avx512f,avx512bw,avx512dq,avx512vl", 16, score_block, K);
scores!(scores_bf16, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", 32, score_block_bf16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn folding_sixteen_registers_gives_each_its_own_sum_by_the_same_additions() {
        if !Isa::Avx512.is_supported() {
            return;
        }
        let row: [f32; 16] = std::array::from_fn(|i| (i as f32 * 1.7).sin() * 10f32.powi(i as i32 % 7));
        // SAFETY: the instruction set was probed.
        let folded = |at: usize| unsafe {
            let mut v = [_mm512_setzero_ps(); 16];
            v[at] = _mm512_loadu_ps(row.as_ptr());
            let mut out = [0f32; 16];
            _mm512_storeu_ps(out.as_mut_ptr(), fold16(&v));
            out
        };
        let first = folded(0)[0];
        assert!((first - row.iter().sum::<f32>()).abs() < 1.0);
        for at in 0..16 {
            for (i, &sum) in folded(at).iter().enumerate() {
                assert_eq!(sum, if i == at { first } else { 0.0 }, "register {at}, sum {i}");
            }
        }
    }
}
