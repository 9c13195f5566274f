//! Gathering rows out of strided tensors and pages into the panels that the micro-kernel streams.
//!
//! A packed word holds one f32, or two neighbouring bf16: along the head for queries and keys, along the
//! keys for values. Rows that nobody sees are written as zeros and never read, so whatever their slots hold
//! stays there. Everything is packed once a tile and used by every query row of it.

use half::slice::HalfFloatSliceExt;

use super::body::{KEY_TILE, PAD};
use super::simd::{Product, Simd};
use crate::DType;
use crate::cpu::e4m3::Widen;
use crate::mutant::planted;

/// Where each key of a tile begins, from key 0 of the tile on; null where nobody sees it.
pub(super) type KeyRows = [*const u8; KEY_TILE];

/// Scales of a tile of e4m3 codes, and what widens them.
#[derive(Clone, Copy)]
pub(super) struct Codes<'a> {
    /// Where each key's scale lies, null as the keys are.
    pub(super) scales: &'a KeyRows,
    pub(super) widen: Widen,
}

/// What is packed.
pub(super) struct Packing<'a> {
    /// Element type of the rows.
    pub(super) dtype: DType,
    /// Elements of a row.
    pub(super) width: usize,
    /// Keys `from..to` of the tile are packed (values), or the panels that hold them (keys).
    pub(super) span: (usize, usize),
    /// Given where the dtype is e4m3.
    pub(super) codes: Option<Codes<'a>>,
}

/// Copies row `index` into `to` as packed words along the row, zeros up to `padded` words; a null row is all zeros.
///
/// # Safety
/// `row` is null or has `shape.width` readable elements, aligned to their type; `padded` words are writable
/// at `to`. With two elements a word the row is bf16. A row of codes has a readable scale.
#[inline(always)]
unsafe fn stage_row(
    row: *const u8,
    index: usize,
    shape: &Packing<'_>,
    per_word: usize,
    to: *mut u32,
    padded: usize,
) {
    // SAFETY: the caller's promise. bf16 pairs are copied as they lie, into `padded * 2` halves.
    unsafe {
        if row.is_null() {
            to.write_bytes(0, padded);
            return;
        }
        let elements = padded * per_word;
        match (shape.dtype, per_word) {
            (DType::Bf16, 2) => {
                let to = to.cast::<u16>();
                row.cast::<u16>().copy_to_nonoverlapping(to, shape.width);
                to.add(shape.width).write_bytes(0, elements - shape.width);
            }
            _ => {
                let to = to.cast::<f32>();
                match shape.dtype {
                    DType::E4m3 => {
                        let codes = shape.codes.expect("codes come with scales");
                        let at = if planted("fp8-neighbours-scale") { index & !1 } else { index };
                        let at = if codes.scales[at].is_null() { index } else { at };
                        let scale = codes.scales[at].cast::<f32>().read_unaligned();
                        let scale = if planted("fp8-scale-ignored") { 1.0 } else { scale };
                        (codes.widen)(row, scale, std::slice::from_raw_parts_mut(to, shape.width));
                    }
                    DType::Bf16 => {
                        let row = row.cast::<u16>();
                        for i in 0..shape.width {
                            to.add(i).write(f32::from_bits(u32::from(*row.add(i)) << 16));
                        }
                    }
                    DType::F16 => {
                        let row = std::slice::from_raw_parts(row.cast::<half::f16>(), shape.width);
                        to.write_bytes(0, shape.width);
                        row.convert_to_f32_slice(std::slice::from_raw_parts_mut(to, shape.width));
                    }
                    _ => row.cast::<f32>().copy_to_nonoverlapping(to, shape.width),
                }
                to.add(shape.width).write_bytes(0, elements - shape.width);
            }
        }
    }
}

/// Whether rows can be read as packed words where they lie, a whole vector at a time.
#[inline(always)]
fn is_direct<S: Simd, P: Product<S>>(shape: &Packing<'_>) -> bool {
    let as_packed = if P::PER_WORD == 2 { DType::Bf16 } else { DType::F32 };
    shape.dtype == as_packed && shape.width.is_multiple_of(P::PER_WORD * S::LANES)
}

/// Packs up to `MB` query rows as `[words padded, MB]`; missing rows are zeros.
///
/// # Safety
/// At most `MB <= LANES` rows, each null or with `shape.width` readable elements; `to` has room for the result and
/// `LANES` words more; `stage` for `LANES * words padded`.
#[inline(always)]
pub(super) unsafe fn queries<S: Simd, P: Product<S>, const MB: usize>(
    s: S,
    rows: &[*const u8],
    shape: &Packing<'_>,
    to: *mut u32,
    stage: *mut u32,
) {
    let words = shape.width.div_ceil(P::PER_WORD);
    let padded = words.next_multiple_of(PAD);
    // SAFETY: the caller's promise. Columns go out in ascending order, so that what a column writes past its
    // `MB` words is overwritten by the next, and the last one ends in the spare words.
    unsafe {
        let mut from = [std::ptr::null::<u32>(); 16];
        for r in 0..S::LANES {
            let row = rows.get(r).copied().unwrap_or(std::ptr::null());
            from[r] = if !row.is_null() && is_direct::<S, P>(shape) {
                row.cast()
            } else {
                stage_row(row, r, shape, P::PER_WORD, stage.add(r * padded), padded);
                stage.add(r * padded)
            };
        }
        for c in (0..words).step_by(S::LANES) {
            let columns: [*const u32; 16] =
                std::array::from_fn(|r| if r < S::LANES { from[r].wrapping_add(c) } else { from[0] });
            s.transpose(&columns[..S::LANES], to.add(c * MB), MB);
        }
    }
}

/// Packs the keys of every panel in reach of `shape.span` as `[KEY_TILE / W, words padded, W]`.
///
/// # Safety
/// Each row is null or has `shape.width` readable elements; `to` has room for the whole tile, and `stage` for
/// `LANES * words padded`.
#[inline(always)]
pub(super) unsafe fn keys<S: Simd, P: Product<S>>(
    s: S,
    rows: &KeyRows,
    shape: &Packing<'_>,
    to: *mut u32,
    stage: *mut u32,
) {
    let words = shape.width.div_ceil(P::PER_WORD);
    let padded = words.next_multiple_of(PAD);
    let panel_width = 2 * S::LANES;
    let (first, last) = (shape.span.0 / S::LANES, shape.span.1.div_ceil(S::LANES));
    // SAFETY: the caller's promise; vector `chunk` of keys fills `LANES` columns of its panel.
    unsafe {
        for chunk in first..last {
            let mut from = [std::ptr::null::<u32>(); 16];
            for r in 0..S::LANES {
                let row = rows[chunk * S::LANES + r];
                from[r] = if !row.is_null() && is_direct::<S, P>(shape) {
                    row.cast()
                } else {
                    stage_row(row, chunk * S::LANES + r, shape, P::PER_WORD, stage.add(r * padded), padded);
                    stage.add(r * padded)
                };
            }
            let key = chunk * S::LANES;
            let panel = to.add((key / panel_width) * padded * panel_width + key % panel_width);
            for c in (0..words).step_by(S::LANES) {
                let columns: [*const u32; 16] =
                    std::array::from_fn(|r| if r < S::LANES { from[r].wrapping_add(c) } else { from[0] });
                s.transpose(&columns[..S::LANES], panel.add(c * panel_width), panel_width);
            }
        }
    }
}

/// Packs values `shape.span` as `[ceil(width / W), KEY_TILE / PER_WORD, W]`, pairs of keys interleaved where a word
/// holds two.
///
/// # Safety
/// As [`keys`], with `stage` for two rows of `width` padded to `W`.
#[inline(always)]
pub(super) unsafe fn values<S: Simd, P: Product<S>>(
    s: S,
    rows: &KeyRows,
    shape: &Packing<'_>,
    to: *mut u32,
    stage: *mut u32,
) {
    let panel_width = 2 * S::LANES;
    let panels = shape.width.div_ceil(panel_width);
    let direct = shape.width.is_multiple_of(panel_width)
        && shape.dtype == if P::PER_WORD == 2 { DType::Bf16 } else { DType::F32 };
    let steps = KEY_TILE / P::PER_WORD;
    let padded = panels * panel_width / P::PER_WORD;
    // SAFETY: the caller's promise; step `i` of panel `p` is row `p * steps + i` of the result.
    unsafe {
        let lay = |index: usize, stage: *mut u32| -> *const u32 {
            let row = rows[index];
            if !row.is_null() && direct {
                return row.cast();
            }
            stage_row(row, index, shape, P::PER_WORD, stage, padded);
            stage
        };
        for step in shape.span.0 / P::PER_WORD..shape.span.1.div_ceil(P::PER_WORD) {
            if P::PER_WORD == 2 {
                let even = lay(2 * step, stage).cast::<u16>();
                let odd = lay(2 * step + 1, stage.add(padded)).cast::<u16>();
                for p in 0..panels {
                    let (even, odd) = (even.add(p * panel_width), odd.add(p * panel_width));
                    P::interleave(s, even, odd, to.add((p * steps + step) * panel_width));
                }
            } else {
                let row = lay(step, stage).cast::<f32>();
                for p in 0..panels {
                    let to = to.add((p * steps + step) * panel_width).cast::<f32>();
                    for v in 0..2 {
                        s.store(to.add(v * S::LANES), s.load(row.add(p * panel_width + v * S::LANES)));
                    }
                }
            }
        }
    }
}
