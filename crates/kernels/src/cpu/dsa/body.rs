//! The multiplication: a block of keys under the heads of one row, relu and head weights applied in registers.
//!
//! Keys are packed so that each has a lane of its own: a product is summed over the head's width step by step, and then
//! over heads, without ever adding across lanes. A score therefore takes the same additions in the same order in any lane of
//! any block, beside whatever neighbours.

use crate::DType;
use crate::cpu::Isa;
use crate::dsa::KeyFormat;
use crate::mutant::planted;

/// Keys of a block.
pub(super) const BLOCK: usize = 64;

/// Which instructions multiply, and how operands are packed for them.
#[derive(Clone, Copy)]
pub(super) struct Body {
    pub(super) isa: Isa,
    /// Two bf16 a word and step, lower lane first, multiplied by dot products; else one f32.
    pub(super) pairs: bool,
}

impl Body {
    /// The body for queries of a type over keys of a format.
    pub(super) fn of(isa: Isa, _q: DType, _format: KeyFormat) -> Body {
        Body { isa, pairs: false }
    }

    /// Steps, and words a head or key, for width `width`.
    pub(super) fn depth(&self, width: usize) -> usize {
        if self.pairs { width.div_ceil(2) } else { width }
    }
}

/// One row over one block of keys.
pub(super) struct Block<'a> {
    /// `[depth, BLOCK]` words.
    pub(super) keys: &'a [u32],
    /// `[Hi, depth]` words.
    pub(super) q: &'a [u32],
    /// `[Hi]`.
    pub(super) weights: &'a [f32],
    pub(super) depth: usize,
    /// `[BLOCK]`: what each key's score is multiplied by.
    pub(super) scales: Option<&'a [f32]>,
}

/// Writes the block's scores.
pub(super) fn score(body: &Body, block: &Block<'_>, out: &mut [f32]) {
    let out: &mut [f32; BLOCK] = out.try_into().expect("a block");
    match body.isa {
        _ => portable(block, out),
    }
    if let Some(scales) = block.scales {
        out.iter_mut().zip(scales).for_each(|(score, scale)| *score *= scale);
    }
}

fn portable(block: &Block<'_>, out: &mut [f32; BLOCK]) {
    out.fill(0.0);
    let dropped = planted("index-relu-dropped");
    let sign = if planted("index-weight-sign") { -1.0 } else { 1.0 };
    for (head, &weight) in block.weights.iter().enumerate() {
        let q = &block.q[head * block.depth..][..block.depth];
        let mut sums = [0f32; BLOCK];
        for (&q, keys) in q.iter().zip(block.keys.chunks_exact(BLOCK)) {
            let q = f32::from_bits(q);
            for (sum, &key) in sums.iter_mut().zip(keys) {
                *sum += q * f32::from_bits(key);
            }
        }
        for (score, &sum) in out.iter_mut().zip(&sums) {
            // Not `max`, which would turn NaN into 0.
            let product = if sum <= 0.0 && !dropped { 0.0 } else { sum };
            *score += sign * weight * product;
        }
    }
}
