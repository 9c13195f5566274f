//! What one call of the tile kernel is given: a tile of queries, the row's pages, and who sees whom.

use std::ops::Range;

use super::body::KEY_TILE;
use super::keys::KeyRun;
use super::mods::{Places, TileMods};
use crate::TensorRef;
use crate::mutant::planted;

/// Some query tokens of one row, with all query heads of one KV head. Row `t * group + h` of the tile is
/// token `t0 + t` under head `kv_head * group + h`.
#[derive(Clone, Copy)]
pub(crate) struct TileJob<'a> {
    /// `[T, H, D]`, f32, bf16 or f16, any outer strides.
    pub(crate) q: TensorRef<'a>,
    /// Where the row's keys and values under the KV head lie; the second run may be empty.
    pub(crate) keys: [KeyRun<'a>; 2],
    /// First position that the row may see.
    pub(crate) kv_begin: usize,
    /// One past the row's last position.
    pub(crate) kv_len: usize,
    /// Packed index of the tile's first token.
    pub(crate) t0: usize,
    /// Tokens of the tile.
    pub(crate) tokens: usize,
    /// Index of token `t0` among the row's own queries: the mask's row.
    pub(crate) query0: usize,
    /// Absolute position of token `t0`: `kv_len - q_len + query0`, negative where queries outnumber keys.
    pub(crate) q_pos0: i64,
    /// The KV head.
    pub(crate) kv_head: usize,
    /// Query heads of a KV head.
    pub(crate) group: usize,
    /// Scale of `q k^T`.
    pub(crate) sm_scale: f32,
    /// Whether a query sees nothing past its own position.
    pub(crate) causal: bool,
    /// How many positions before its own a query sees; `None` for all.
    pub(crate) window_left: Option<usize>,
    /// `cap * tanh(s / cap)` on the scaled score; 0 for none.
    pub(crate) logits_soft_cap: f32,
    /// `[H]`: `slope * (key position - query position)` joins the capped score.
    pub(crate) alibi_slopes: Option<&'a [f32]>,
    /// A mask of the row's own, which narrows `causal` and `window_left`.
    pub(crate) mask: Option<RowMask<'a>>,
    /// What else happens to scores, over blocks.
    pub(crate) mods: Option<TileMods<'a>>,
}

/// A boolean mask of one row: bit `j % 64` of word `j / 64` of query `i` is set where `i` may see position `j`.
#[derive(Clone, Copy)]
pub(crate) struct RowMask<'a> {
    /// `[q_len, words_per_query]`; positions past the last word are not seen.
    pub(crate) words: &'a [u64],
    /// Words of one query.
    pub(crate) words_per_query: usize,
}

/// The running softmax of every row of the tile; an empty one has `m = -inf`, `l = 0`, `o = 0`.
pub(crate) struct TileState<'a> {
    /// `[tokens * group]`: the largest score so far, times log2(e).
    pub(crate) m: &'a mut [f32],
    /// `[tokens * group]`: the sum of `2^(score * log2(e) - m)`.
    pub(crate) l: &'a mut [f32],
    /// `[tokens * group, Dv]`: the weighted values, not yet divided by `l`.
    pub(crate) o: &'a mut [f32],
}

impl TileJob<'_> {
    /// Query rows of the tile.
    pub(super) fn rows(&self) -> usize {
        self.tokens * self.group
    }

    /// The positions that token `t` of the tile sees, as far as the mask leaves them.
    pub(super) fn span(&self, t: usize) -> Range<usize> {
        let position = self.q_pos0 + t as i64;
        let end = if self.causal {
            let past = position + if planted("causal-off-by-one") { 2 } else { 1 };
            self.kv_len.min(usize::try_from(past).unwrap_or(0))
        } else {
            self.kv_len
        };
        let begin = match self.window_left {
            Some(left) => {
                let left = if planted("window-off-by-one") { left + 1 } else { left };
                let first = position.saturating_sub(i64::try_from(left).unwrap_or(i64::MAX));
                self.kv_begin.max(usize::try_from(first).unwrap_or(0))
            }
            None => self.kv_begin,
        };
        begin..end
    }

    /// The positions within `keys` that some token may see: spans begin and end in the order of their tokens.
    pub(super) fn reach(&self, keys: &Range<usize>) -> Range<usize> {
        let (first, last) = (self.span(0), self.span(self.tokens - 1));
        first.start.max(keys.start)..last.end.min(keys.end)
    }

    /// Whether every query sees the whole key tile at `base`.
    pub(super) fn sees_whole(&self, base: usize, keys: &Range<usize>, places: Option<&Places>) -> bool {
        let (begin, end) = (self.span(self.tokens - 1).start, self.span(0).end);
        let modded = match (&self.mods, places) {
            (Some(mods), Some(places)) => mods.see_whole(self.tokens, places),
            _ => true,
        };
        self.mask.is_none() && modded && begin.max(keys.start) <= base && base + KEY_TILE <= end.min(keys.end)
    }

    /// Which positions of the key tile at `base` some query sees.
    pub(super) fn seen(&self, base: usize, keys: &Range<usize>, places: Option<&Places>) -> u128 {
        let by_head = self.mods.as_ref().is_some_and(|mods| mods.mask_by_head());
        let step = if by_head { 1 } else { self.group };
        let rows = (0..self.rows()).step_by(step);
        rows.fold(0, |seen, r| seen | self.visible(r, base, keys, places))
    }

    /// Which positions of the key tile at `base` row `r` sees within `keys`: bit `i` is position `base + i`.
    pub(super) fn visible(
        &self,
        r: usize,
        base: usize,
        keys: &Range<usize>,
        places: Option<&Places>,
    ) -> u128 {
        let t = r / self.group;
        let span = self.span(t);
        let begin = span.start.max(keys.start).clamp(base, base + KEY_TILE) - base;
        let end = span.end.min(keys.end).clamp(base, base + KEY_TILE) - base;
        if begin >= end {
            return 0;
        }
        let bits = (u128::MAX >> (KEY_TILE - (end - begin))) << begin;
        let bits = match &self.mask {
            None => bits,
            Some(mask) => bits & mask.tile(self.query0 + t, base),
        };
        match (&self.mods, places) {
            (Some(mods), Some(places)) => mods.visible(t, r % self.group, places, bits),
            _ => bits,
        }
    }
}

impl RowMask<'_> {
    fn tile(&self, query: usize, base: usize) -> u128 {
        let row = query * self.words_per_query;
        let word = |w: usize| if w < self.words_per_query { u128::from(self.words[row + w]) } else { 0 };
        word(base / 64) | word(base / 64 + 1) << 64
    }
}

const _: () = assert!(KEY_TILE == 128, "visibility is kept in a u128, and masks in two u64");
