//! The passes in plain Rust, which the compiler vectorises for what it may assume.

use super::{CLASSES, COPIES, Class, Counts, Cut, Passes, first, order};
use crate::mutant::planted;

/// Scores looked at together.
const LANES: usize = 16;

pub(super) const PASSES: Passes = Passes { count, range, write };

#[inline(always)]
fn count(scores: &[f32], class: Class, counts: &mut Counts, all: bool) {
    let digit = |x: f32| (order(x) >> class.shift & class.mask) as usize % CLASSES;
    if all {
        let some = scores.chunks_exact(COPIES);
        some.remainder().iter().for_each(|&x| counts[0][digit(x)] += 1);
        for scores in some {
            counts.iter_mut().zip(scores).for_each(|(copy, &x)| copy[digit(x)] += 1);
        }
        return;
    }
    for chunk in scores.chunks(LANES) {
        let mut inside = mask(chunk, |x| class.low <= x && x <= class.high);
        while inside != 0 {
            let lane = inside.trailing_zeros() as usize;
            counts[lane % COPIES][digit(chunk[lane])] += 1;
            inside &= inside - 1;
        }
    }
}

#[inline(always)]
fn mask(chunk: &[f32], test: impl Fn(f32) -> bool) -> u16 {
    chunk.iter().enumerate().fold(0, |mask, (i, &x)| mask | u16::from(test(x)) << i)
}

#[inline(always)]
fn range(scores: &[f32], low: f32, high: f32, kept: &mut [f32]) -> (f32, f32) {
    let (mut len, keep) = (0, !kept.is_empty());
    let mut least = [f32::INFINITY; LANES];
    let mut greatest = [f32::NEG_INFINITY; LANES];
    for chunk in scores.chunks(LANES) {
        for (i, &x) in chunk.iter().enumerate() {
            let inside = low <= x && x <= high;
            least[i] = if inside && x < least[i] { x } else { least[i] };
            greatest[i] = if inside && x > greatest[i] { x } else { greatest[i] };
            if keep {
                // Written again unless it is inside.
                kept[len] = x;
                len += usize::from(inside);
            }
        }
    }
    (least.into_iter().fold(f32::INFINITY, f32::min), greatest.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

#[inline(always)]
fn write(scores: &[f32], cut: Cut, out: &mut [i32]) -> usize {
    let nan = planted("topk-nan-picked");
    let (mut len, mut ties) = (0, cut.ties);
    for (at, chunk) in scores.chunks(LANES).enumerate() {
        let above = mask(chunk, |x| x > cut.threshold || nan && x.is_nan());
        let equal = mask(chunk, |x| x == cut.threshold);
        let equal = if equal != 0 { first(equal, ties) } else { 0 };
        ties -= equal.count_ones() as usize;
        let mut picked = first(above | equal, out.len() - len);
        while picked != 0 {
            out[len] = (at * LANES) as i32 + picked.trailing_zeros() as i32;
            len += 1;
            picked &= picked - 1;
        }
    }
    len
}

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::PASSES as AVX2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Class, Counts, Cut, Passes};

    pub(in super::super) const PASSES: Passes = Passes { count, range, write };

    #[target_feature(enable = "avx2,bmi1,popcnt")]
    fn count(scores: &[f32], class: Class, counts: &mut Counts, all: bool) {
        super::count(scores, class, counts, all);
    }

    #[target_feature(enable = "avx2,bmi1,popcnt")]
    fn range(scores: &[f32], low: f32, high: f32, kept: &mut [f32]) -> (f32, f32) {
        super::range(scores, low, high, kept)
    }

    #[target_feature(enable = "avx2,bmi1,popcnt")]
    fn write(scores: &[f32], cut: Cut, out: &mut [i32]) -> usize {
        super::write(scores, cut, out)
    }
}
