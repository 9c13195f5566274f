//! One step of the running softmax over a block of scores (Milakov and Gimelshein, 2018; FlashAttention).
//!
//! Scores leave `q k^T` raw. A plain scale is folded into the exponent, `2^(s * c - m)` with
//! `c = sm_scale * log2(e)`, one rounding; cap and bias are applied first, where there are any. Invisible
//! scores are replaced, never added to, so whatever they hold stays out.

use std::f32::consts::LOG2_E;

use super::body::{Block, KEY_TILE, Logits, MAX_ROWS};
use super::simd::{Product, Simd};

/// `2^x` for `x < 127`, within 1.5 units in the last place down to 2^-125, where it stays. NaN stays NaN.
///
/// `x = n + f`, a minimax polynomial for `2^f` whose constant term is exactly 1 (so that `2^0` is), and `n` into
/// the exponent.
#[inline(always)]
pub(super) fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    exp2_each(s, [x])[0]
}

/// [`exp2`] of several vectors, a step at a time: their chains of dependent operations overlap, however few
/// operations the processor looks ahead.
#[inline(always)]
fn exp2_each<S: Simd, const N: usize>(s: S, mut x: [S::F; N]) -> [S::F; N] {
    #[allow(clippy::approx_constant)] // Near ln 2, but the minimax fit's own.
    const TERMS: [f32; 5] = [0.693_147, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];
    let mut n = [s.split(s.splat(0.0)).0; N];
    for i in 0..N {
        (n[i], x[i]) = s.split(s.max(s.splat(-125.0), x[i]));
    }
    let mut p = [s.splat(TERMS[4]); N];
    for t in (0..4).rev() {
        for i in 0..N {
            p[i] = s.mul_add(p[i], x[i], s.splat(TERMS[t]));
        }
    }
    for i in 0..N {
        p[i] = s.scale2(s.mul_add(p[i], x[i], s.splat(1.0)), n[i]);
    }
    p
}

/// `tanh(x)`: an odd polynomial near 0, where `1 - 2 / (e^2x + 1)` would cancel, and that formula elsewhere.
#[inline(always)]
pub(super) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    // Cephes tanhf, |x| < 0.625.
    const TERMS: [f32; 5] = [-0.333_332_8, 0.133_314_73, -0.053_739_714, 0.020_639_087, -0.005_704_988_7];
    let square = s.mul(x, x);
    let mut p = s.splat(TERMS[4]);
    for &term in TERMS[..4].iter().rev() {
        p = s.mul_add(p, square, s.splat(term));
    }
    let near = s.mul_add(s.mul(p, square), x, x);
    let magnitude = s.max(s.sub(s.splat(0.0), x), x);
    let bounded = s.select(s.less(magnitude, s.splat(16.0)), magnitude, s.splat(16.0));
    let power = exp2(s, s.mul(bounded, s.splat(2.0 * LOG2_E)));
    let far = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(power, s.splat(1.0))));
    let far = s.select(s.less(x, s.splat(0.0)), s.sub(s.splat(0.0), far), far);
    // A NaN is less than nothing: it must come out of the branch that keeps it.
    let is_far = !s.less(magnitude, s.splat(0.625)) & s.less(magnitude, s.splat(f32::INFINITY));
    let infinite = s.less(s.splat(f32::MAX), magnitude);
    s.select(is_far | infinite, far, near)
}

/// Vectors of a row whose exponentials are taken together; a tile is a multiple of it on every machine.
const AT_ONCE: usize = 8;

/// Raw scores of row `r` are scaled, capped and biased into base-2 logits, or scaled and put through mods, natural. Returns
/// which of the `visible` keys are seen still.
///
/// # Safety
/// `block.scores` is readable and writable over row `r`.
#[inline(always)]
unsafe fn transform<S: Simd>(s: S, block: &Block<'_>, r: usize, visible: u128) -> u128 {
    let (from, to) = vectors::<S>(visible);
    let (sm_scale, cap, slope, distance) = match &block.logits {
        Logits::Scaled(_) => return visible,
        Logits::General { sm_scale, cap, slope, distance } => (sm_scale, cap, slope, distance),
        Logits::Modified { sm_scale, mods, places, first, group } => {
            let (t, lane) = ((first + r) / group, (first + r) % group);
            // SAFETY: the vectors lie in row `r` of the scores.
            return unsafe {
                let row = block.scores.add(r * KEY_TILE);
                mods.modify(s, t, lane, places, row, (from, to), *sm_scale, visible)
            };
        }
    };
    for j in from..to {
        // SAFETY: `j` is below KEY_TILE / LANES, so the vector lies in row `r` of the scores.
        unsafe {
            let at = block.scores.add(r * KEY_TILE + j * S::LANES);
            let mut x = s.mul(s.load(at), s.splat(*sm_scale));
            if *cap > 0.0 {
                x = s.mul(tanh(s, s.div(x, s.splat(*cap))), s.splat(*cap));
            }
            if slope[r] != 0.0 {
                let lane = s.load(LANE_INDEX.as_ptr().add(j * S::LANES));
                x = s.mul_add(s.splat(slope[r]), s.add(s.splat(distance[r]), lane), x);
            }
            s.store(at, s.mul(x, s.splat(LOG2_E)));
        }
    }
    visible
}

/// `0.0, 1.0, ..`: the keys of a tile, counted.
static LANE_INDEX: [f32; KEY_TILE] = {
    let mut index = [0.0; KEY_TILE];
    let mut i = 0;
    while i < KEY_TILE {
        index[i] = i as f32;
        i += 1;
    }
    index
};

/// The vectors that hold a visible key.
#[inline(always)]
fn vectors<S: Simd>(bits: u128) -> (usize, usize) {
    if bits == 0 {
        return (0, 0);
    }
    let (first, last) = (bits.trailing_zeros() as usize, 127 - bits.leading_zeros() as usize);
    (first / S::LANES, last / S::LANES + 1)
}

/// `x * scale + offset`, where `offset` is the negated largest product. Weights that are kept in f32 take the
/// product unrounded: what the largest one was rounded by is common to all and divides out. Weights that are
/// rounded to bf16 round the product first, so that the largest weight is 1 and stays it.
#[inline(always)]
fn exponent<S: Simd, P: Product<S>>(s: S, x: S::F, scale: S::F, offset: S::F) -> S::F {
    if P::PER_WORD == 1 { s.mul_add_once(x, scale, offset) } else { s.add(s.mul(x, scale), offset) }
}

/// Turns the block's scores into weights, brings `m` and `l` up to date, and returns by how much each row's
/// former values shrink. Weights are written at the vectors `union` reaches, 0 where a row does not see.
///
/// # Safety
/// The block's pointers hold as [`Block`] says, and the scores of the vectors in `union` are written.
#[inline(always)]
pub(super) unsafe fn weigh<S: Simd, P: Product<S>>(s: S, block: &Block<'_>, union: u128) -> [f32; 16] {
    let (scale, general) = match block.logits {
        Logits::Scaled(scale) => (scale, false),
        Logits::General { .. } => (1.0, true),
        Logits::Modified { .. } => (LOG2_E, true),
    };
    let lanes = (1u64 << S::LANES) as u32 - 1;
    let bits_of = |visible: u128, j: usize| (visible >> (j * S::LANES)) as u32 & lanes;
    let (union_from, union_to) = vectors::<S>(union);
    let hidden = s.splat(f32::NEG_INFINITY);
    let none = s.splat(0.0);
    let (mut shrink, mut offset) = ([0f32; 16], [0f32; 16]);
    // A row's reduction is a chain of short waits; taken together after the rows, they overlap.
    let mut partial = [[0f32; 16]; MAX_ROWS];
    let mut seen = block.visible;
    // SAFETY: rows are below `block.rows` and vectors below KEY_TILE / LANES throughout: inside the scores,
    // `m` and `l`, as the caller promises. A vector has at most 16 lanes.
    unsafe {
        for r in 0..block.rows {
            let row = block.scores.add(r * KEY_TILE);
            if general {
                seen[r] = transform(s, block, r, seen[r]);
            }
            let visible = seen[r];
            let (from, to) = vectors::<S>(visible);
            let mut most = hidden;
            if visible == u128::MAX {
                for j in 0..KEY_TILE / S::LANES {
                    most = s.max(most, s.load(row.add(j * S::LANES)));
                }
            } else {
                for j in from..to {
                    let x = s.load(row.add(j * S::LANES));
                    most = s.max(most, s.select(bits_of(visible, j), x, hidden));
                }
            }
            s.store(partial[r].as_mut_ptr(), most);
        }
        for r in 0..block.rows {
            let most = s.reduce_max(s.load(partial[r].as_ptr())) * scale;
            let before = *block.m.add(r);
            let after = if seen[r] == 0 { before } else { before.max(most) };
            *block.m.add(r) = after;
            if after != f32::NEG_INFINITY {
                shrink[r] = before - after;
                offset[r] = -after;
            } else if seen[r] != 0 {
                // Keys are seen, and every score is -inf or NaN: there is no softmax.
                offset[r] = f32::NAN;
            }
        }
        for i in (0..MAX_ROWS).step_by(S::LANES) {
            let at = shrink.as_mut_ptr().add(i);
            s.store(at, exp2(s, s.load(at)));
        }
        for r in 0..block.rows {
            let row = block.scores.add(r * KEY_TILE);
            let (scale, offset) = (s.splat(scale), s.splat(offset[r]));
            let mut sum = none;
            let visible = seen[r];
            if visible == u128::MAX {
                for j in (0..KEY_TILE / S::LANES).step_by(AT_ONCE) {
                    let mut x = [none; AT_ONCE];
                    for i in 0..AT_ONCE {
                        x[i] = exponent::<S, P>(s, s.load(row.add((j + i) * S::LANES)), scale, offset);
                    }
                    let p = exp2_each(s, x);
                    for i in 0..AT_ONCE {
                        sum = s.add(sum, p[i]);
                        P::store_weights(s, row, j + i, p[i]);
                    }
                }
            } else {
                for j in union_from..union_to {
                    let bits = bits_of(visible, j);
                    let mut p = none;
                    if bits != 0 {
                        let x = exponent::<S, P>(s, s.load(row.add(j * S::LANES)), scale, offset);
                        p = s.select(bits, exp2(s, x), none);
                        sum = s.add(sum, p);
                    }
                    P::store_weights(s, row, j, p);
                }
            }
            s.store(partial[r].as_mut_ptr(), sum);
        }
        for r in 0..block.rows {
            *block.l.add(r) = *block.l.add(r) * shrink[r] + s.reduce_add(s.load(partial[r].as_ptr()));
        }
    }
    shrink
}
