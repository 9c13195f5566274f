//! The three primitives of a tile of latents, as each instruction set implements them.
//!
//! Lanes stand in groups of [`GROUP`]. Every score has one accumulator that runs over the depth in one order, every
//! accumulator of a lane takes the keys in order: neither the number of lanes nor that of keys changes a bit.

use crate::DType;
use crate::cpu::Isa;

use super::generic;

/// Latents a tile at most.
pub(super) const TILE: usize = 128;

/// Latents of the next tile that are worth fetching while the last of this one are multiplied.
pub(super) const AHEAD: usize = 16;

/// Widths from which bf16 values are multiplied as such.
const NARROW: usize = 64;

/// Lanes a group: those of a register of sixteen floats.
pub(super) const GROUP: usize = 16;

/// Lanes of the depth that are summed apart, then added to the score: a shorter chain of roundings.
pub(super) const CHUNK: usize = 64;

/// Scores of all lanes against some latents.
pub(super) struct Scores<'a> {
    /// `[groups, depth, GROUP]` f32; or, as bf16 pairs, `[groups, depth / 2, GROUP, 2]`.
    pub(super) queries: &'a [f32],
    pub(super) groups: usize,
    pub(super) depth: usize,
    /// The latents, each of `depth` elements of the body's key type.
    pub(super) keys: &'a [*const u8],
    /// Latents that will be needed next; fetched while these are multiplied.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) ahead: &'a [*const u8],
    /// `[groups, TILE, GROUP]`.
    pub(super) scores: &'a mut [f32],
}

/// Turns scores into weights.
pub(super) struct Softmax<'a> {
    pub(super) groups: usize,
    /// Keys of the tile.
    pub(super) keys: usize,
    /// Position of the tile's first key.
    pub(super) first: u32,
    /// Whether some lane does not see some key, so that `from` and `to` matter.
    pub(super) hidden: bool,
    /// `[groups * GROUP]`: keys `from..to` are seen.
    pub(super) from: &'a [u32],
    pub(super) to: &'a [u32],
    /// Factor of the scores.
    pub(super) scale: f32,
    /// Factor that turns a difference of scores into a base-2 exponent.
    pub(super) c: f32,
    /// `[groups, TILE, GROUP]`.
    pub(super) scores: &'a mut [f32],
    /// `[groups, TILE, GROUP]` f32; or, as bf16 pairs of neighbouring keys, `[groups, TILE / 2, GROUP, 2]`.
    pub(super) weights: &'a mut [f32],
    /// `[groups * GROUP]`: the running maximum, the running sum, and the factor for what was summed before.
    pub(super) m: &'a mut [f32],
    pub(super) l: &'a mut [f32],
    pub(super) alpha: &'a mut [f32],
}

/// Multiplies accumulators by `alpha` and adds weighted values.
pub(super) struct Values<'a> {
    pub(super) weights: &'a [f32],
    pub(super) alpha: &'a [f32],
    pub(super) lanes: usize,
    /// The latents, whose first `width` elements are the value; an even number for bf16 pairs.
    pub(super) values: &'a [*const u8],
    pub(super) width: usize,
    /// `[lanes, acc_stride]`.
    pub(super) acc: &'a mut [f32],
    pub(super) acc_stride: usize,
}

/// One instruction set's primitives for one pair of element types.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body {
    /// Whether operands are bf16 pairs for bf16 dot products; f32 otherwise.
    pub(super) pairs: bool,
    /// Needs the instruction set, and keys of `depth` readable elements.
    pub(super) scores: unsafe fn(&mut Scores<'_>),
    /// Needs the instruction set.
    pub(super) softmax: unsafe fn(&mut Softmax<'_>),
    /// Needs the instruction set, and values of `width` readable elements.
    pub(super) values: unsafe fn(&mut Values<'_>),
    /// Widens e4m3 codes under a scale.
    pub(super) widen_codes: crate::cpu::e4m3::Widen,
    /// Widens elements to f32. Needs the instruction set, and as many readable elements of that type.
    pub(super) widen: unsafe fn(*const u8, DType, &mut [f32]),
}

impl Body {
    /// The body for these types and a value `width` wide. `isa` must be supported on this machine.
    ///
    /// Narrow values are cheap, and few: their weights are not rounded to bf16, whose error no average would hide.
    pub(super) fn select(isa: Isa, q_dtype: DType, kv_dtype: DType, width: usize) -> Body {
        #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
        let dot = width >= NARROW && q_dtype == DType::Bf16 && kv_dtype == DType::Bf16;
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => super::avx512::body(dot),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::avx512::body(false),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Fma => generic::avx2_body(),
            _ => generic::portable_body(),
        }
    }
}
