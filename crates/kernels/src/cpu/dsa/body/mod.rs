//! The multiplication: a block of keys under the heads of one row, relu and head weights applied in registers.
//!
//! Keys are packed so that each has a lane of its own: a product is summed over the head's width step by step, and then
//! over heads, without ever adding across lanes. A score therefore takes the same additions in the same order in any lane of
//! any block, beside whatever neighbours.

mod lanes;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

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
    multiply: unsafe fn(&Block<'_>, &mut [f32; BLOCK]),
}

impl Body {
    /// The body for queries of a type over keys of a format.
    pub(super) fn of(isa: Isa, q: DType, format: KeyFormat) -> Body {
        let exact = q == DType::Bf16 && matches!(format, KeyFormat::Bf16 | KeyFormat::Fp8);
        let pairs = exact && isa == Isa::Avx512Bf16;
        let multiply: unsafe fn(&Block<'_>, &mut [f32; BLOCK]) = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 if pairs => avx512::multiply_pairs,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 | Isa::Avx512 => avx512::multiply,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Fma => avx2::multiply,
            _ => portable::multiply,
        };
        Body { isa, pairs, multiply }
    }

    /// Steps, and words a head or key, for width `width`.
    pub(super) fn depth(&self, width: usize) -> usize {
        if self.pairs { width.div_ceil(2) } else { width }
    }

    /// Writes the block's scores.
    pub(super) fn score(&self, block: &Block<'_>, out: &mut [f32]) {
        let out: &mut [f32; BLOCK] = out.try_into().expect("a block");
        let depth = block.depth;
        assert!(
            block.keys.len() == depth * BLOCK && block.q.len() == block.weights.len() * depth,
            "packed for it"
        );
        // SAFETY: the lengths were just checked, and the machine has the body's instructions.
        unsafe { (self.multiply)(block, out) };
        if let Some(scales) = block.scales {
            out.iter_mut().zip(scales).for_each(|(score, scale)| *score *= scale);
        }
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
    /// Keys to bring near meanwhile.
    pub(super) ahead: Ahead<'a>,
}

/// Keys of a later block, which are brought near while this one is multiplied: pages are scattered, and a hardware
/// prefetcher stops at their edges.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    /// Where they start; null where there is none.
    pub(super) rows: &'a [*const u8],
    /// Cache lines of each.
    pub(super) lines: usize,
}

impl Ahead<'_> {
    pub(super) const NOTHING: Ahead<'static> = Ahead { rows: &[], lines: 0 };

    /// The `turn`-th of `turns` even shares.
    #[inline(always)]
    fn bring(&self, turn: usize, turns: usize, prefetch: impl Fn(*const u8)) {
        let count = self.rows.len();
        for &row in &self.rows[count * turn / turns..count * (turn + 1) / turns] {
            (0..self.lines).for_each(|line| prefetch(row.wrapping_add(64 * line)));
        }
    }
}

/// What the planted faults change, looked up once a block.
#[derive(Clone, Copy)]
struct Planted {
    relu_dropped: bool,
    sign: f32,
}

impl Planted {
    #[inline(always)]
    fn now() -> Planted {
        Planted {
            relu_dropped: planted("index-relu-dropped"),
            sign: if planted("index-weight-sign") { -1.0 } else { 1.0 },
        }
    }
}
