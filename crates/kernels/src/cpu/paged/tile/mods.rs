//! Mods of block-mask attention: which keys of a tile a query sees, and what becomes of its scores.
//!
//! A row's positions count its visible keys; a mod is asked about key *indices*. [`Places`] says once a tile which
//! those are. Named mods run a vector at a time, compiled with the body that calls them; a mod of the user's is
//! called once a row of the tile.

use super::body::KEY_TILE;
use super::simd::Simd;
use super::softmax;
use crate::flex::{MaskMod, ScoreMod, TileRow};
use crate::mutant::planted;

/// The mods of a call.
#[derive(Clone, Copy)]
pub(crate) struct Mods<'a> {
    /// Applied in order.
    pub(crate) score: &'a [ScoreMod<'a>],
    /// Joined, on blocks that are visible in part.
    pub(crate) mask: &'a [MaskMod<'a>],
    /// Position of query 0 among the keys.
    pub(crate) q_offset: i64,
}

/// The mods of a call, for one tile of queries.
#[derive(Clone, Copy)]
pub(crate) struct TileMods<'a> {
    pub(crate) mods: Mods<'a>,
    /// The batch.
    pub(crate) batch: usize,
    /// The query head of lane 0.
    pub(crate) head: usize,
    /// Index of the tile's first query in its batch.
    pub(crate) q_idx: usize,
    /// A block's keys.
    pub(crate) block: usize,
    /// Which block of the sequence each of the row's blocks is.
    pub(crate) positions: &'a [i32],
    /// Not 0 where masks decide.
    pub(crate) partial: &'a [u8],
}

/// Keys of a tile that follow each other.
#[derive(Clone, Copy, Default)]
struct Stretch {
    from: u8,
    to: u8,
    k_idx: i32,
}

/// Which keys the positions of a tile are.
pub(super) struct Places {
    k_idx: [i32; KEY_TILE],
    /// Key indices from the tile's first, for vectors.
    relative: [f32; KEY_TILE],
    stretches: [Stretch; KEY_TILE],
    count: usize,
    /// One past the last position.
    end: usize,
    /// Positions in blocks that are visible in part.
    partial: u128,
}

/// Positions `from..to` of a tile.
fn bits(from: usize, to: usize) -> u128 {
    if from >= to { 0 } else { (u128::MAX >> (KEY_TILE - (to - from))) << from }
}

impl Places {
    /// The positions whose key index is in `lo..=hi`.
    fn within(&self, lo: i64, hi: i64) -> u128 {
        let mut seen = 0;
        for stretch in &self.stretches[..self.count] {
            let (k, len) = (i64::from(stretch.k_idx), i64::from(stretch.to - stretch.from));
            let from = lo.saturating_sub(k).clamp(0, len);
            let to = hi.saturating_sub(k).saturating_add(1).clamp(0, len);
            let first = i64::from(stretch.from);
            seen |= bits((first + from) as usize, (first + to) as usize);
        }
        seen
    }

    fn first(&self) -> i64 {
        i64::from(self.k_idx[0])
    }
}

impl<'a> TileMods<'a> {
    /// The keys of the tile of positions at `base`, which is below `kv_len`.
    pub(super) fn places(&self, base: usize, kv_len: usize) -> Places {
        let end = KEY_TILE.min(kv_len - base);
        let mut places = Places {
            k_idx: [0; KEY_TILE],
            relative: [0.0; KEY_TILE],
            stretches: [Stretch::default(); KEY_TILE],
            count: 0,
            end,
            partial: 0,
        };
        let mut i = 0;
        while i < end {
            let (block, slot) = ((base + i) / self.block, (base + i) % self.block);
            let to = end.min(i + self.block - slot);
            let first = self.positions[block] as usize * self.block + slot;
            for (k, place) in places.k_idx[i..to].iter_mut().enumerate() {
                *place = (first + k) as i32;
            }
            if self.partial.get(block).is_some_and(|&partial| partial != 0)
                && !planted("flex-partial-as-full")
            {
                places.partial |= bits(i, to);
            }
            let before = places.count.checked_sub(1).map(|last| &mut places.stretches[last]);
            match before {
                Some(last) if last.k_idx as usize + usize::from(last.to - last.from) == first => {
                    last.to = to as u8;
                }
                _ => {
                    places.stretches[places.count] =
                        Stretch { from: i as u8, to: to as u8, k_idx: first as i32 };
                    places.count += 1;
                }
            }
            i = to;
        }
        let first = places.k_idx[0];
        for (relative, &k) in places.relative[..end].iter_mut().zip(&places.k_idx[..end]) {
            *relative = (i64::from(k) - i64::from(first)) as f32;
        }
        places
    }

    /// Where query `t` of the tile sits among the keys.
    fn position(&self, t: usize) -> i64 {
        let offset = if planted("flex-qoffset-dropped") { 0 } else { self.mods.q_offset };
        offset.saturating_add((self.q_idx + t) as i64)
    }

    fn is_causal(&self) -> bool {
        self.mods.score.iter().any(|score| matches!(score, ScoreMod::Causal))
    }

    /// Whether no mod hides any key of the tile from any of its `tokens` queries.
    pub(super) fn see_whole(&self, tokens: usize, places: &Places) -> bool {
        if places.partial != 0 {
            return false;
        }
        // Positions rise with the queries: what the first one sees, all see.
        tokens == 0 || !self.is_causal() || places.within(i64::MIN, self.position(0)) == bits(0, places.end)
    }

    /// Whether heads of a group may see different keys.
    pub(super) fn mask_by_head(&self) -> bool {
        self.mods.mask.iter().any(|mask| matches!(mask, MaskMod::User(_)))
    }

    /// What query `t` under lane `lane` sees of `visible`.
    pub(super) fn visible(&self, t: usize, lane: usize, places: &Places, visible: u128) -> u128 {
        let position = self.position(t);
        let mut visible = visible;
        if self.is_causal() {
            visible &= places.within(i64::MIN, position);
        }
        let mut seen = visible & places.partial;
        if seen == 0 {
            return visible;
        }
        for mask in self.mods.mask {
            seen &= match mask {
                MaskMod::None => u128::MAX,
                MaskMod::Causal => places.within(i64::MIN, position),
                MaskMod::SlidingWindow { left, right } => {
                    let reach = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
                    places
                        .within(position.saturating_sub(reach(*left)), position.saturating_add(reach(*right)))
                }
                MaskMod::Document { q_ids, kv_ids } => {
                    let own = q_ids[self.q_idx + t];
                    let keys = places.k_idx[..places.end].iter().enumerate();
                    keys.fold(0, |bits, (i, &k)| bits | u128::from(kv_ids[k as usize] == own) << i)
                }
                MaskMod::User(user) => self.ask(user, t, lane, places),
            };
        }
        visible & !places.partial | seen
    }

    fn row<'p>(&self, t: usize, lane: usize, k_idx: &'p [i32]) -> TileRow<'p> {
        TileRow {
            batch: self.batch,
            head: self.head + lane,
            q_idx: self.q_idx + t,
            q_offset: self.mods.q_offset,
            k_idx,
        }
    }

    fn ask(&self, user: &crate::flex::UserMask, t: usize, lane: usize, places: &Places) -> u128 {
        let mut seen = [true; KEY_TILE];
        if let Some(cpu) = &user.cpu {
            cpu(&mut seen[..places.end], &self.row(t, lane, &places.k_idx[..places.end]));
        }
        seen[..places.end].iter().enumerate().fold(0, |bits, (i, &seen)| bits | u128::from(seen) << i)
    }

    /// Whether any mod does more than hide keys.
    pub(super) fn change_scores(&self) -> bool {
        self.mods.score.iter().any(|score| !matches!(score, ScoreMod::None | ScoreMod::Causal))
    }

    /// Scales the raw scores of query `t` under lane `lane` and puts them through the mods, at vectors `from..to` of `row`. Returns which
    /// of the `visible` keys are seen still: a mod of the user's hides one by a score of `-inf`.
    ///
    /// # Safety
    /// `row` has [`KEY_TILE`] readable and writable scores, written at those vectors.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // All of one row of a tile.
    pub(super) unsafe fn modify<S: Simd>(
        &self,
        s: S,
        t: usize,
        lane: usize,
        places: &Places,
        row: *mut f32,
        (from, to): (usize, usize),
        sm_scale: f32,
        visible: u128,
    ) -> u128 {
        let position = self.position(t);
        let head = self.head + lane;
        let mut visible = visible;
        // Taken along by the first mod that reads the scores; a product with 1 changes no bit.
        let mut scale = s.splat(sm_scale);
        let mut scaled = false;
        for score in self.mods.score {
            // SAFETY: vectors below `to` lie in the row, as the caller promises, and in `relative` and `bias`.
            unsafe {
                match score {
                    ScoreMod::None | ScoreMod::Causal => {}
                    ScoreMod::SoftCap(cap) => {
                        for j in from..to {
                            let at = row.add(j * S::LANES);
                            let x = softmax::tanh(s, s.div(s.mul(s.load(at), scale), s.splat(*cap)));
                            s.store(at, s.mul(x, s.splat(*cap)));
                        }
                    }
                    ScoreMod::Alibi { slopes } => {
                        let slope = s.splat(slopes[head]);
                        let distance = s.splat(places.first().saturating_sub(position) as f32);
                        for j in from..to {
                            let at = row.add(j * S::LANES);
                            let relative = s.load(places.relative.as_ptr().add(j * S::LANES));
                            s.store(
                                at,
                                s.mul_add(slope, s.add(distance, relative), s.mul(s.load(at), scale)),
                            );
                        }
                    }
                    ScoreMod::RelBias { table, window } => {
                        let width = 2 * window + 1;
                        let bias = biases(&table[head * width..][..width], places, position);
                        for j in from..to {
                            let at = row.add(j * S::LANES);
                            let bias = s.load(bias.as_ptr().add(j * S::LANES));
                            s.store(at, s.add(s.mul(s.load(at), scale), bias));
                        }
                    }
                    ScoreMod::User(user) => {
                        if !scaled {
                            multiply(s, row, (from, to), scale);
                        }
                        let (first, last) = (from * S::LANES, (to * S::LANES).min(places.end));
                        if let (Some(cpu), true) = (&user.cpu, first < last) {
                            let scores = std::slice::from_raw_parts_mut(row.add(first), last - first);
                            cpu(scores, &self.row(t, lane, &places.k_idx[first..last]));
                            visible &= finite_or_nan(scores) << first;
                        }
                    }
                }
            }
            if !matches!(score, ScoreMod::None | ScoreMod::Causal) {
                (scale, scaled) = (s.splat(1.0), true);
            }
        }
        if !scaled {
            // SAFETY: the caller's promise.
            unsafe { multiply(s, row, (from, to), scale) };
        }
        visible
    }
}

/// Vectors `from..to` of a row times `scale`.
///
/// # Safety
/// They are readable and writable.
#[inline(always)]
unsafe fn multiply<S: Simd>(s: S, row: *mut f32, (from, to): (usize, usize), scale: S::F) {
    for j in from..to {
        // SAFETY: the caller's promise.
        unsafe {
            let at = row.add(j * S::LANES);
            s.store(at, s.mul(s.load(at), scale));
        }
    }
}

/// Which scores are not `-inf`.
fn finite_or_nan(scores: &[f32]) -> u128 {
    scores.iter().enumerate().fold(0, |bits, (i, &x)| bits | u128::from(x != f32::NEG_INFINITY) << i)
}

/// `table[clamp(k_idx - position, -W, W) + W]` at each of the tile's positions, `table` having `2 W + 1` entries.
fn biases(table: &[f32], places: &Places, position: i64) -> [f32; KEY_TILE] {
    let mut bias = [0.0; KEY_TILE];
    let window = (table.len() / 2) as i64;
    for stretch in &places.stretches[..places.count] {
        let bias = &mut bias[usize::from(stretch.from)..usize::from(stretch.to)];
        let len = bias.len() as i64;
        // The first key's entry; those below 0 and past 2 W are the table's ends.
        let first = i64::from(stretch.k_idx).saturating_sub(position).saturating_add(window);
        let left = first.saturating_neg().clamp(0, len) as usize;
        let right = (2 * window + 1).saturating_sub(first).clamp(left as i64, len) as usize;
        bias[..left].fill(table[0]);
        if left < right {
            let at = (first + left as i64) as usize;
            bias[left..right].copy_from_slice(&table[at..at + right - left]);
        }
        bias[right..].fill(table[table.len() - 1]);
    }
    bias
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile<'a>(mods: Mods<'a>, positions: &'a [i32], partial: &'a [u8], block: usize) -> TileMods<'a> {
        TileMods { mods, batch: 0, head: 0, q_idx: 0, block, positions, partial }
    }

    #[test]
    fn places_name_each_key_once_and_join_what_follows() {
        let mods = Mods { score: &[], mask: &[], q_offset: 0 };
        let places = tile(mods, &[3, 4, 9, 1], &[0, 1, 0, 0], 50).places(128, 190);
        assert_eq!(places.end, 62);
        assert_eq!(
            (places.k_idx[0], places.k_idx[21], places.k_idx[22], places.k_idx[61]),
            (478, 499, 50, 89)
        );
        assert_eq!((places.count, places.partial), (2, 0));
        let places = tile(mods, &[3, 4, 9, 1], &[0, 1, 0, 0], 50).places(0, 190);
        assert_eq!((places.count, places.k_idx[99], places.k_idx[100]), (2, 249, 450));
        assert_eq!(places.partial, bits(50, 100));
    }

    #[test]
    fn ranges_of_key_indices_are_what_loops_find() {
        let mods = Mods { score: &[], mask: &[], q_offset: 0 };
        let places = tile(mods, &[2, 0, 7], &[], 30).places(0, 85);
        for (lo, hi) in [(i64::MIN, 10), (5, 65), (60, i64::MAX), (215, 216), (9, 3), (i64::MIN, i64::MAX)] {
            let slow = (0..85).fold(0u128, |bits, i| {
                bits | u128::from((lo..=hi).contains(&i64::from(places.k_idx[i]))) << i
            });
            assert_eq!(places.within(lo, hi), slow, "{lo}..={hi}");
        }
    }

    #[test]
    fn biases_follow_the_formula_on_either_side_of_the_window() {
        let table: Vec<f32> = (0..9).map(|i| i as f32).collect();
        let mods = Mods { score: &[], mask: &[], q_offset: 0 };
        let places = tile(mods, &[2, 0, 7], &[], 30).places(0, 85);
        for position in [-100, -3, 0, 17, 62, 220, 1 << 40, i64::MIN, i64::MAX] {
            let bias = biases(&table, &places, position);
            for i in 0..85 {
                let d = i64::from(places.k_idx[i]).saturating_sub(position).clamp(-4, 4) + 4;
                assert_eq!(bias[i], d as f32, "key {} from {position}", places.k_idx[i]);
            }
        }
    }
}
