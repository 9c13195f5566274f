//! The largest of a row in linear time: a radix selection of the smallest score picked, then one pass that picks.
//!
//! Scores are counted by the leading bits of integers that order as they do. The class in which the last pick falls is
//! counted again by its next bits, until all of it is picked, or all of it is one score; of equal scores the earlier are then
//! taken. What is compared at last are the scores themselves, so that NaN compares false and 0 equals -0.

mod portable;

#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::cpu::Isa;
use crate::mutant::planted;

/// The order of -inf, below which only NaN lies.
const LEAST: u32 = 0x007f_ffff;
/// The order of +inf.
const MOST: u32 = 0xff80_0000;

/// Bits of an order that each round counts by, from the top.
const DIGITS: [u32; 3] = [10, 11, 11];
/// Counters of a round.
const CLASSES: usize = 1 << 11;
/// Copies of the counters, so that equal neighbours do not wait for each other.
const COPIES: usize = 4;

/// Scores of a class that are kept, so that later rounds need not find them again.
const KEPT: usize = 4096;

/// Counts of a round: `[COPIES, CLASSES]`.
type Counts = [[u32; CLASSES]; COPIES];

/// What is picked: scores above `threshold`, and the first `ties` that equal it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    threshold: f32,
    ties: usize,
}

/// A class of neighbouring orders: those of scores in `low..=high`, counted by `mask` bits of the order from `shift` up.
#[derive(Clone, Copy, Debug)]
struct Class {
    low: f32,
    high: f32,
    shift: u32,
    mask: u32,
}

/// See [`Passes::range`].
type Range = unsafe fn(&[f32], f32, f32, &mut [f32]) -> (f32, f32);

/// The passes over a row of scores, for one instruction set.
struct Passes {
    /// Adds each score of a class to one of the copies of its digit's counter. The first class is everything, NaN too,
    /// which counts as 0.
    count: unsafe fn(&[f32], Class, &mut Counts, bool),
    /// The least and greatest score of `low..=high`, of which there is one. Unless it is empty, the scores of that range are
    /// written to the last slice, which has room for all of them and sixteen more.
    range: Range,
    /// Writes the picked positions, ascending, and returns how many; at most `out.len()`.
    write: unsafe fn(&[f32], Cut, &mut [i32]) -> usize,
}

/// An integer that orders as scores do: 0 and -0 alike, NaN below all.
#[inline(always)]
fn order(x: f32) -> u32 {
    if x.is_nan() {
        return 0;
    }
    let bits = (x + 0.0).to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 0x8000_0000)
}

/// The score of an order.
fn score(order: u32) -> f32 {
    f32::from_bits(if order >> 31 == 1 { order & 0x7fff_ffff } else { !order })
}

/// The first `count` bits that are set.
#[inline(always)]
fn first(mask: u16, count: usize) -> u16 {
    let mut left = mask;
    for _ in 0..(mask.count_ones() as usize).saturating_sub(count) {
        // Without its last bit, or its first.
        left &= if planted("topk-tie-later") { left - 1 } else { !(0x8000 >> left.leading_zeros()) };
    }
    left
}

/// Writes to `out` the positions of the `out.len()` largest scores, ascending, of equal ones the earlier, never NaN; -1
/// where there are no more.
pub(crate) fn pick(isa: Isa, scores: &[f32], out: &mut [i32]) {
    let passes = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => &avx512::PASSES,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2Fma => &portable::AVX2,
        _ => &portable::PASSES,
    };
    let everything = Cut { threshold: f32::NEG_INFINITY, ties: out.len() };
    let cut = if scores.len() <= out.len() { everything } else { cut(passes, scores, out.len()) };
    // SAFETY: the instruction set is one that this machine has.
    let count = unsafe { (passes.write)(scores, cut, out) };
    out[count..].fill(-1);
}

/// Where `topk` of more scores end.
fn cut(passes: &Passes, scores: &[f32], topk: usize) -> Cut {
    if topk == 0 {
        return Cut { threshold: f32::INFINITY, ties: 0 };
    }
    let mut counts = [[0; CLASSES]; COPIES];
    // Orders of the class from `base` on; those above it are picked, `left` of its own are still to be.
    let (mut base, mut left, mut shift) = (0u32, topk, 32);
    let mut kept = [0f32; KEPT + 16];
    let mut kept_len = None;
    let mut class = Class { low: f32::NEG_INFINITY, high: f32::INFINITY, shift, mask: 0 };
    for (round, digit) in DIGITS.into_iter().enumerate() {
        shift -= digit;
        class = Class { shift, mask: (1 << digit) - 1, ..class };
        let classes = 1 << digit;
        counts.iter_mut().for_each(|copy| copy[..classes].fill(0));
        let source = kept_len.map_or(scores, |len: usize| &kept[..len]);
        // SAFETY: the instruction set is one that this machine has.
        unsafe { (passes.count)(source, class, &mut counts, round == 0) };
        let (found, inside) = last(&mut counts, classes, &mut left, round == 0);
        let Some(found) = found else {
            // All that are not NaN.
            return Cut { threshold: f32::NEG_INFINITY, ties: topk };
        };
        base |= (found as u32) << shift;
        if inside == left {
            return Cut { threshold: score(base.max(LEAST)), ties: topk };
        }
        let high = (base | ((1 << shift) - 1)).min(MOST);
        // Just below 0 lies what -0 would be, which counts as 0.
        let high = if high == 0x7fff_ffff { high - 1 } else { high };
        (class.low, class.high) = (score(base.max(LEAST)), score(high));
        let (low, high) = (class.low, class.high);
        // SAFETY: the instruction set is one that this machine has; `kept` has room for the class, if it is given.
        let (least, greatest) = unsafe {
            if kept_len.is_none() && inside <= KEPT {
                kept_len = Some(inside);
                (passes.range)(scores, low, high, &mut kept)
            } else {
                (passes.range)(kept_len.map_or(scores, |len| &kept[..len]), low, high, &mut [])
            }
        };
        if least == greatest {
            return Cut { threshold: least, ties: left };
        }
    }
    unreachable!("a class of one order holds one score")
}

/// The class in which the `left`-th largest falls, and how many are in it; `left` is lowered by those above. With `nan`
/// class 0 is NaN alone and nobody falls in it.
fn last(counts: &mut Counts, classes: usize, left: &mut usize, nan: bool) -> (Option<usize>, usize) {
    let [counts, others @ ..] = counts;
    for other in others {
        counts[..classes].iter_mut().zip(&other[..classes]).for_each(|(count, other)| *count += other);
    }
    for class in (usize::from(nan)..classes).rev() {
        let inside = counts[class] as usize;
        if inside >= *left {
            return (Some(class), inside);
        }
        *left -= inside;
    }
    (None, 0)
}

#[cfg(test)]
mod tests;
