//! The kernel's inner room: a block of query rows against one packed key tile.
//!
//! Scores `q k^T`, one softmax step, then `o = shrink * o + p v`. Both products are the same micro-kernel: a
//! block of accumulators (twelve rows by two vectors where there are 32 registers) over panels two vectors
//! wide, one operand streaming from a panel and the other broadcast. The sum of every accumulator runs over
//! ascending head elements, or ascending keys, whichever rows share the block.

use super::mods::{Places, TileMods};
use super::pack::{self, KeyRows};
use super::simd::{Portable, Product, Simd, Words};
use super::softmax;

/// Keys of a tile; tiles lie at multiples of it from absolute position 0.
pub(crate) const KEY_TILE: usize = 128;

/// Most query rows of a block.
pub(super) const MAX_ROWS: usize = 12;

/// A packed axis is padded to a multiple of this many words.
pub(super) const PAD: usize = 16;

/// How raw scores become base-2 logits.
pub(super) enum Logits<'a> {
    /// Times `sm_scale * log2(e)`, not negative.
    Scaled(f32),
    /// Scaled, then capped (0: not), then biased by `slope * (distance + key's index in the tile)`.
    General { sm_scale: f32, cap: f32, slope: [f32; MAX_ROWS], distance: [f32; MAX_ROWS] },
    /// Scaled, then put through mods; the block's first row is row `first` of the tile, whose rows are `group` a
    /// token.
    Modified { sm_scale: f32, mods: &'a TileMods<'a>, places: &'a Places, first: usize, group: usize },
}

/// One block of query rows, and the packed tile that it meets. `W` is the panel width, two vectors.
pub(super) struct Block<'a> {
    /// Rows that exist, at most the body's `ROWS`.
    pub(super) rows: usize,
    /// Which keys of the tile each row sees.
    pub(super) visible: [u128; MAX_ROWS],
    /// How scores become logits.
    pub(super) logits: Logits<'a>,
    /// Packed words of a key.
    pub(super) key_words: usize,
    /// Value width, in elements.
    pub(super) dv: usize,
    /// `[key_words padded, ROWS]`: the block's queries.
    pub(super) q: *const u32,
    /// `[KEY_TILE / W, key_words padded, W]`.
    pub(super) keys: *const u32,
    /// `[ceil(dv / W), KEY_TILE / PER_WORD, W]`.
    pub(super) values: *const u32,
    /// `[ROWS, KEY_TILE]`: scores, then weights.
    pub(super) scores: *mut f32,
    /// `[rows]`.
    pub(super) m: *mut f32,
    /// `[rows]`.
    pub(super) l: *mut f32,
    /// `[rows, dv]`.
    pub(super) o: *mut f32,
}

/// The kernel for one instruction set and one kind of operand. Its functions may only be called where the
/// set is there, which is what makes them unsafe, beside the pointers.
pub(super) trait Body {
    /// Query rows of a block.
    const ROWS: usize;
    /// Tensor elements in a packed word.
    const PER_WORD: usize;

    /// # Safety
    /// As [`pack::queries`].
    unsafe fn pack_queries(rows: &[*const u8], shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32);
    /// # Safety
    /// As [`pack::keys`].
    unsafe fn pack_keys(rows: &KeyRows, shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32);
    /// # Safety
    /// As [`pack::values`].
    unsafe fn pack_values(rows: &KeyRows, shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32);
    /// Asks for `bytes` from `at` on to be brought near.
    ///
    /// # Safety
    /// The instruction set is there; any address will do.
    unsafe fn prefetch(at: *const u8, bytes: usize);
    /// # Safety
    /// The pointers of `block` reach as far as [`Block`] says, and nobody else touches what is written.
    unsafe fn attend(block: &Block<'_>);
}

/// `acc[r][v] += sum over i of a(r, i) * b(i, v)`, with `a(r, i)` at `a + r * ROW + i * STEP` and `b(i, v)` the
/// `v`-th vector at `b + i * 2 * LANES`.
///
/// # Safety
/// Those words are readable for `i < steps`.
#[inline(always)]
unsafe fn multiply<
    S: Simd,
    P: Product<S>,
    const MR: usize,
    const NV: usize,
    const ROW: usize,
    const STEP: usize,
>(
    s: S,
    steps: usize,
    a: *const u32,
    b: *const u32,
    mut acc: [[S::F; NV]; MR],
) -> [[S::F; NV]; MR] {
    for i in 0..steps {
        // SAFETY: the caller's promise.
        unsafe {
            let b = b.add(i * 2 * S::LANES).cast::<f32>();
            // Loops rather than closures: a closure is a function of its own, without the target features.
            let mut vectors = [s.splat(0.0); NV];
            for v in 0..NV {
                vectors[v] = s.load(b.add(v * S::LANES));
            }
            for r in 0..MR {
                for v in 0..NV {
                    acc[r][v] = P::multiply_add(s, acc[r][v], a.add(r * ROW + i * STEP), vectors[v]);
                }
            }
        }
    }
    acc
}

/// Words of a head's width that are summed in one chain: all of them up to 128, else 64 at a time.
const fn span_words(key_words: usize) -> usize {
    if key_words <= 128 { key_words } else { 64 }
}

/// The scores of `MR` rows against `NV` vectors of keys of one panel.
///
/// # Safety
/// As [`Body::attend`]; `panel` is below `KEY_TILE / W`.
#[inline(always)]
unsafe fn scores<S: Simd, P: Product<S>, const MB: usize, const MR: usize, const NV: usize>(
    s: S,
    block: &Block<'_>,
    panel: usize,
) {
    let width = 2 * S::LANES;
    let panel_words = block.key_words.next_multiple_of(PAD) * width;
    // SAFETY: the caller's promise; panel `panel` begins `panel` whole panels in.
    unsafe {
        let keys = block.keys.add(panel * panel_words);
        let zero = [[s.splat(0.0); NV]; MR];
        // Wide heads are summed in spans, so that the error of a score does not grow with the width.
        let span = span_words(block.key_words);
        let mut acc = multiply::<S, P, MR, NV, 1, MB>(s, span, block.q, keys, zero);
        for at in (span..block.key_words).step_by(span.max(1)) {
            let (words, q) = ((block.key_words - at).min(span), block.q.add(at * MB));
            let more = multiply::<S, P, MR, NV, 1, MB>(s, words, q, keys.add(at * width), zero);
            for r in 0..MR {
                for v in 0..NV {
                    acc[r][v] = s.add(acc[r][v], more[r][v]);
                }
            }
        }
        for r in 0..MR {
            for v in 0..NV {
                s.store(block.scores.add(r * KEY_TILE + panel * width + v * S::LANES), acc[r][v]);
            }
        }
    }
}

/// `o = shrink * o + p v` for `MR` rows and `NV` vectors of values of one panel, over keys `from..to`.
///
/// # Safety
/// As [`Body::attend`]; `panel` is below `ceil(dv / W)`, and `to` at most `KEY_TILE`.
#[inline(always)]
unsafe fn weighted_values<S: Simd, P: Product<S>, const MR: usize, const NV: usize>(
    s: S,
    block: &Block<'_>,
    shrink: &[f32; 16],
    panel: usize,
    keys: (usize, usize),
) {
    let width = 2 * S::LANES;
    let first = panel * width;
    let present = (block.dv - first).min(NV * S::LANES);
    let whole = present == NV * S::LANES && block.rows >= MR;
    let (from, to) = (keys.0 / P::PER_WORD, keys.1.div_ceil(P::PER_WORD));
    // SAFETY: the caller's promise. Rows past `block.rows` and elements past `dv` are kept in `edge`.
    unsafe {
        // A panel's narrow end and a block's missing rows go through a copy: [MR, NV * LANES].
        let mut edge = [0f32; MAX_ROWS * 32];
        let (o, stride) = if whole {
            (block.o.add(first), block.dv)
        } else {
            for r in 0..block.rows.min(MR) {
                let row = block.o.add(r * block.dv + first);
                row.copy_to_nonoverlapping(edge.as_mut_ptr().add(r * NV * S::LANES), present);
            }
            (edge.as_mut_ptr(), NV * S::LANES)
        };
        let values = block.values.add((panel * (KEY_TILE / P::PER_WORD) + from) * width);
        let weights = block.scores.cast::<u32>().cast_const().add(from);
        let zero = [[s.splat(0.0); NV]; MR];
        let acc = multiply::<S, P, MR, NV, KEY_TILE, 1>(s, to - from, weights, values, zero);
        // A tile's sum joins the rest as one term: the error grows with the tiles, not with the keys.
        for r in 0..MR {
            for v in 0..NV {
                let at = o.add(r * stride + v * S::LANES);
                s.store(at, s.mul_add(s.load(at), s.splat(shrink[r]), acc[r][v]));
            }
        }
        if !whole {
            for r in 0..block.rows.min(MR) {
                let row = block.o.add(r * block.dv + first);
                row.copy_from_nonoverlapping(edge.as_ptr().add(r * NV * S::LANES), present);
            }
        }
    }
}

/// The block's step with its rows rounded up to `MR`.
///
/// # Safety
/// As [`Body::attend`].
#[inline(always)]
unsafe fn step<S: Simd, P: Product<S>, const MB: usize, const MR: usize>(s: S, block: &Block<'_>) {
    let union = block.visible[..block.rows].iter().fold(0, |all, bits| all | bits);
    if union == 0 {
        return;
    }
    let (from, to) = (union.trailing_zeros() as usize, 128 - union.leading_zeros() as usize);
    let width = 2 * S::LANES;
    // SAFETY: `to` is at most KEY_TILE, so the panels exist; the rest is the caller's promise.
    unsafe {
        for panel in from / width..to.div_ceil(width) {
            if to - panel * width > S::LANES {
                scores::<S, P, MB, MR, 2>(s, block, panel);
            } else {
                scores::<S, P, MB, MR, 1>(s, block, panel);
            }
        }
        let shrink = softmax::weigh::<S, P>(s, block, union);
        for panel in 0..block.dv.div_ceil(width) {
            if block.dv - panel * width > S::LANES {
                weighted_values::<S, P, MR, 2>(s, block, &shrink, panel, (from, to));
            } else {
                weighted_values::<S, P, MR, 1>(s, block, &shrink, panel, (from, to));
            }
        }
    }
}

/// # Safety
/// As [`Body::attend`].
#[inline(always)]
unsafe fn attend<S: Simd, P: Product<S>, const MB: usize>(s: S, block: &Block<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        if MB > 8 && block.rows > 8 {
            step::<S, P, MB, 12>(s, block);
        } else if MB > 4 && block.rows > 4 {
            step::<S, P, MB, 8>(s, block);
        } else {
            step::<S, P, MB, 4>(s, block);
        }
    }
}

/// # Safety
/// As [`Body::prefetch`].
#[inline(always)]
unsafe fn bring_near<S: Simd>(s: S, at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        s.prefetch(at.wrapping_add(line));
    }
}

macro_rules! body {
    ($(#[$doc:meta])* $name:ident, $token:expr, $simd:ty, $product:ty, $rows:literal $(, $features:literal)?) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Body for $name {
            const ROWS: usize = $rows;
            const PER_WORD: usize = <$product as Product<$simd>>::PER_WORD;

            unsafe fn pack_queries(rows: &[*const u8], shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32) {
                $(#[target_feature(enable = $features)])?
                unsafe fn inner(rows: &[*const u8], shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32) {
                    // SAFETY: the caller's promise.
                    unsafe { pack::queries::<$simd, $product, $rows>($token, rows, shape, to, stage) }
                }
                // SAFETY: the caller's promise.
                unsafe { inner(rows, shape, to, stage) }
            }

            unsafe fn pack_keys(rows: &KeyRows, shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32) {
                $(#[target_feature(enable = $features)])?
                unsafe fn inner(rows: &KeyRows, shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32) {
                    // SAFETY: the caller's promise.
                    unsafe { pack::keys::<$simd, $product>($token, rows, shape, to, stage) }
                }
                // SAFETY: the caller's promise.
                unsafe { inner(rows, shape, to, stage) }
            }

            unsafe fn pack_values(rows: &KeyRows, shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32) {
                $(#[target_feature(enable = $features)])?
                unsafe fn inner(rows: &KeyRows, shape: &pack::Packing<'_>, to: *mut u32, stage: *mut u32) {
                    // SAFETY: the caller's promise.
                    unsafe { pack::values::<$simd, $product>($token, rows, shape, to, stage) }
                }
                // SAFETY: the caller's promise.
                unsafe { inner(rows, shape, to, stage) }
            }

            unsafe fn prefetch(at: *const u8, bytes: usize) {
                $(#[target_feature(enable = $features)])?
                unsafe fn inner(at: *const u8, bytes: usize) {
                    // SAFETY: the caller's promise.
                    unsafe { bring_near($token, at, bytes) }
                }
                // SAFETY: the caller's promise.
                unsafe { inner(at, bytes) }
            }

            unsafe fn attend(block: &Block<'_>) {
                $(#[target_feature(enable = $features)])?
                unsafe fn inner(block: &Block<'_>) {
                    // SAFETY: the caller's promise.
                    unsafe { attend::<$simd, $product, $rows>($token, block) }
                }
                // SAFETY: the caller's promise.
                unsafe { inner(block) }
            }
        }
    };
}

body!(
    /// Plain Rust.
    PortableBody, Portable, Portable, Words, 4
);
#[cfg(target_arch = "x86_64")]
body!(
    /// AVX2 and FMA, f32 words.
    Avx2Body, super::simd::Avx2::new(), super::simd::Avx2, Words, 4, "avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
body!(
    /// AVX-512, f32 words.
    Avx512Body, super::simd::Avx512::new(), super::simd::Avx512, Words, 12,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
);
#[cfg(target_arch = "x86_64")]
body!(
    /// AVX-512 with BF16 dot products, words of two bf16.
    Bf16Body, super::simd::Avx512::new(), super::simd::Avx512, super::simd::Bf16Pairs, 12,
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
);
