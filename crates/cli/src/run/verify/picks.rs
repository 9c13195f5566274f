//! Whether an indexer picked the keys that it should have, from the content of the row alone.
//!
//! Every visible key is scored anew in f64, `s = sum_h w[h] * relu(q[h] . k)`, from the content keys. A kernel sums the
//! same products in f32: each of them goes through at most `Di + Hi` roundings of at most `u = 2^-24` each (its product,
//! the sum over lanes, the head's weight, the sum over heads; relu adds none, and moves no two numbers further apart),
//! so by Higham's bound (Accuracy and Stability of Numerical Algorithms, 3.1) and Cauchy and Schwarz's inequality
//!
//! ```text
//! |computed - s|  <=  (Di + Hi) u (1 + 0.01) |k| sum_h |w[h]| |q[h]|  =:  b
//! ```
//!
//! A key may be picked in another's place only where the two intervals `s +- b` meet. That is FORMAT's rule with `b` as
//! the score bound. Ties go to the earlier position: the one score that two keys certainly share is 0, where every
//! head's product is below 0 by more than its own bound, and of those keys the earlier ones must be picked.
//!
//! Keys stored in fp8 are judged as they are stored: quantised here by the format's rule.

use mstar_core::attend::{IndexFormat, IndexGeometry};
use mstar_kernels::synth::{self, Kind};

use super::{BUDGET, Row};
use crate::run::buffers::IndexWidths;

/// What an indexer did for a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pick<'a> {
    /// The indexer.
    pub(crate) index: &'a IndexGeometry,
    /// The full layer that picks for the layer that is checked.
    pub(crate) layer: usize,
    /// `[q_len, K]`: what was picked, -1 padded; `None` when the plan needed no pick.
    pub(crate) selection: Option<&'a [i32]>,
}

impl Pick<'_> {
    /// The positions that `query` attends, rising; `None` when it attends all `seen` keys.
    ///
    /// # Errors
    /// A pick where there should be none, or none where there should be one; one of another size, out of range, out
    /// of order.
    pub(super) fn of(&self, query: usize, seen: usize) -> Result<Option<Vec<usize>>, String> {
        let topk = self.index.index_topk;
        let row = match self.selection {
            Some(selection) => &selection[query * topk..][..topk],
            None if seen > topk => {
                return Err(format!("sees {seen} keys, more than {topk}, and nothing was picked"));
            }
            None => return Ok(None),
        };
        let picked = row.iter().filter(|&&position| position != -1).count();
        if seen <= topk {
            let why = || format!("sees {seen} keys, no more than {topk}, and {picked} were picked");
            return if picked == 0 { Ok(None) } else { Err(why()) };
        }
        if picked != topk {
            return Err(format!("{picked} of {seen} keys were picked, {topk} are due"));
        }
        if let Some(pair) = row.windows(2).find(|pair| pair[0] >= pair[1]) {
            return Err(format!("the pick is not in rising order: {} before {}", pair[0], pair[1]));
        }
        if let Some(wrong) = row.iter().find(|&&position| position < 0 || position as usize >= seen) {
            return Err(format!("position {wrong} was picked, {seen} keys are seen"));
        }
        Ok(Some(row.iter().map(|&position| position as usize).collect()))
    }
}

/// Products of scoring `seen` keys for one query.
pub(super) fn cost(index: &IndexGeometry, seen: usize) -> usize {
    seen.saturating_mul(index.index_n_heads).saturating_mul(index.index_head_dim)
}

/// Judges `picked`, rising, by the scores of the `seen` keys that `query` sees; of very many keys by an even share.
///
/// # Errors
/// A key that was left out although another with a lower score was picked, or an equal one later.
pub(super) fn judge(
    row: &Row<'_>,
    pick: &Pick<'_>,
    seed: u64,
    query: usize,
    seen: usize,
    picked: &[usize],
) -> Result<(), String> {
    let stride = cost(pick.index, seen).div_ceil(8 * BUDGET).max(1);
    let scorer = Scorer::new(pick, seed, row.queries[query]);
    let mut chosen = vec![false; seen];
    picked.iter().for_each(|&at| chosen[at] = true);
    let (mut worst_in, mut best_out): (Option<Scored>, Option<Scored>) = (None, None);
    let (mut last_zero_in, mut first_zero_out) = (None, None);
    let first = if stride == 1 { 0 } else { row.keys[seen - 1] as usize % stride };
    for at in (first..seen).step_by(stride) {
        let scored = scorer.score(seed, at, row.keys[at]);
        if chosen[at] {
            if worst_in.is_none_or(|worst| scored.most() < worst.most()) {
                worst_in = Some(scored);
            }
            last_zero_in = if scored.zero { Some(at) } else { last_zero_in };
        } else {
            if best_out.is_none_or(|best| scored.least() > best.least()) {
                best_out = Some(scored);
            }
            first_zero_out = first_zero_out.or(scored.zero.then_some(at));
        }
    }
    if let (Some(low), Some(high)) = (worst_in, best_out)
        && low.most() < high.least()
    {
        return Err(format!("picked {low} and left out {high}"));
    }
    if let (Some(late), Some(early)) = (last_zero_in, first_zero_out)
        && late > early
    {
        return Err(format!("picked position {late} and left out {early}: both score 0, the earlier is due"));
    }
    Ok(())
}

/// A key's score, and how far a computed one may lie from it.
#[derive(Clone, Copy, Debug)]
struct Scored {
    position: usize,
    score: f64,
    bound: f64,
    /// Whether any sum of it comes to exactly 0.
    zero: bool,
}

impl Scored {
    /// The most that a computed score may be.
    fn most(&self) -> f64 {
        self.score + self.bound
    }

    /// The least that a computed score may be.
    fn least(&self) -> f64 {
        self.score - self.bound
    }
}

impl std::fmt::Display for Scored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "position {} (score {:.7e} +- {:.1e})", self.position, self.score, self.bound)
    }
}

/// One query of an indexer.
struct Scorer<'a> {
    index: &'a IndexGeometry,
    layer: usize,
    /// `[Hi, Di]`.
    q: Vec<f64>,
    /// `[Hi]`: Euclidean lengths of the queries.
    lengths: Vec<f64>,
    /// `[Hi]`.
    weights: Vec<f64>,
}

impl Scorer<'_> {
    fn new<'a>(pick: &Pick<'a>, seed: u64, key: u64) -> Scorer<'a> {
        let IndexGeometry { index_n_heads: heads, index_head_dim: head_dim, .. } = *pick.index;
        let mut lanes = vec![0f32; head_dim];
        let mut q = Vec::with_capacity(heads * head_dim);
        for head in 0..heads {
            synth::fill_lanes(seed, Kind::IndexQuery, pick.layer, key, head, &mut lanes);
            q.extend(lanes.iter().map(|&lane| f64::from(lane)));
        }
        let mut weights = vec![0f32; heads];
        synth::fill_lanes(seed, Kind::IndexWeight, pick.layer, key, 0, &mut weights);
        let scale = IndexWidths { heads, head_dim }.weight_scale();
        let lengths = q.chunks_exact(head_dim).map(|q| q.iter().map(|x| x * x).sum::<f64>().sqrt());
        Scorer {
            index: pick.index,
            layer: pick.layer,
            lengths: lengths.collect(),
            q,
            weights: weights.iter().map(|&weight| f64::from(weight * scale)).collect(),
        }
    }

    fn score(&self, seed: u64, position: usize, key: u64) -> Scored {
        let (heads, head_dim) = (self.index.index_n_heads, self.index.index_head_dim);
        let mut lanes = vec![0f32; head_dim];
        synth::fill_lanes(seed, Kind::IndexKey, self.layer, key, 0, &mut lanes);
        if self.index.format == IndexFormat::Fp8 {
            quantise(&mut lanes);
        }
        let k: Vec<f64> = lanes.iter().map(|&lane| f64::from(lane)).collect();
        let length = k.iter().map(|x| x * x).sum::<f64>().sqrt();
        let unit = 1.01 * 2f64.powi(-24);
        // A scale times an e4m3 number may be rounded once more before the product.
        let roundings = (head_dim + heads + 2 * usize::from(self.index.format == IndexFormat::Fp8)) as f64;
        let mut scored = Scored { position, score: 0.0, bound: 0.0, zero: true };
        for ((q, &q_length), &weight) in self.q.chunks_exact(head_dim).zip(&self.lengths).zip(&self.weights) {
            let product = dot(q, &k);
            scored.score += weight * product.max(0.0);
            let bound = roundings * unit * q_length * length;
            scored.bound += weight.abs() * bound;
            scored.zero &= product < -bound;
        }
        scored
    }
}

/// `a . b` in eight running sums, so that it vectorises.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0f64; 8];
    let (mut a_chunks, mut b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    for (a, b) in (&mut a_chunks).zip(&mut b_chunks) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f64 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// A key as fp8 stores it: e4m3 lanes of one scale, the largest lane at 448.
fn quantise(lanes: &mut [f32]) {
    let largest = lanes.iter().fold(0f32, |most, lane| most.max(lane.abs()));
    let scale = largest / E4M3_MAX;
    if scale > 0.0 {
        lanes.iter_mut().for_each(|lane| *lane = e4m3(*lane / scale) * scale);
    }
}

/// The largest finite e4m3 number.
const E4M3_MAX: f32 = 448.0;

/// The nearest e4m3 number, of two the even one.
fn e4m3(x: f32) -> f32 {
    let size = x.abs().min(E4M3_MAX);
    // Three bits of mantissa above 2^-6, steps of 2^-9 below it.
    let exponent = size.max(f32::MIN_POSITIVE).log2().floor().max(-6.0);
    let step = (exponent - 3.0).exp2();
    ((size / step).round_ties_even() * step).min(E4M3_MAX).copysign(x)
}

#[cfg(test)]
mod tests {
    use mstar_core::attend::IndexStore;
    use mstar_core::{Label, RequestId, ResourceName};

    use super::*;
    use crate::run::content::{Run, Source, StreamContent};
    use crate::run::entries::Entries;
    use crate::run::verify::Shape;

    fn geometry(heads: usize, head_dim: usize, topk: usize) -> IndexGeometry {
        IndexGeometry {
            index_n_heads: heads,
            index_head_dim: head_dim,
            index_topk: topk,
            format: IndexFormat::Bf16,
            store: IndexStore::Pages,
            full_layers: vec![0],
        }
    }

    /// Scores as a kernel sums them, in f32, lanes and heads from the last to the first.
    fn in_f32(scorer: &Scorer<'_>, key: u64, seed: u64) -> f32 {
        let head_dim = scorer.index.index_head_dim;
        let mut k = vec![0f32; head_dim];
        synth::fill_lanes(seed, Kind::IndexKey, scorer.layer, key, 0, &mut k);
        let heads = scorer.q.chunks_exact(head_dim).zip(&scorer.weights).rev();
        heads.fold(0f32, |sum, (q, &weight)| {
            let product = q.iter().zip(&k).rev().fold(0f32, |sum, (&q, &k)| sum + q as f32 * k);
            sum + weight as f32 * product.max(0.0)
        })
    }

    fn keys(len: usize) -> Vec<u64> {
        StreamContent::of(&[Run { source: Source::Prompt(3), len }]).keys
    }

    /// The verdict on `picked` by the last of `keys`.
    fn verdict(index: &IndexGeometry, keys: &[u64], picked: &[i32]) -> Result<(), String> {
        let shape = Shape {
            num_qo_heads: 1,
            entries: Entries::Latents { kv_lora_rank: 1, qk_rope_head_dim: 0 },
            sm_scale: 1.0,
            causal: true,
            window_left: -1,
            fp8: false,
            logits_soft_cap: 0.0,
            sinks: None,
            alibi_slopes: None,
            frames: None,
        };
        let pick = Pick { index, layer: 0, selection: Some(picked) };
        let row = Row {
            attention: &ResourceName::new("dsa"),
            shape: &shape,
            request: &RequestId::new("r0"),
            label: &Label::main(),
            step: 0,
            index: 0,
            keys,
            queries: &keys[keys.len() - 1..],
            own_mask: None,
            first_position: keys.len() - 1,
            pick: Some(pick),
        };
        let picked = pick.of(0, keys.len())?.ok_or("no pick")?;
        judge(&row, &pick, 5, 0, keys.len(), &picked)
    }

    /// What a kernel in f32 picks of `keys` by the last of them.
    fn picked(index: &IndexGeometry, keys: &[u64]) -> Vec<i32> {
        let pick = Pick { index, layer: 0, selection: None };
        let scorer = Scorer::new(&pick, 5, *keys.last().unwrap());
        let scores: Vec<f32> = keys.iter().map(|&key| in_f32(&scorer, key, 5)).collect();
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let mut picked: Vec<i32> = order[..index.index_topk].iter().map(|&at| at as i32).collect();
        picked.sort_unstable();
        picked
    }

    #[test]
    fn sums_in_f32_stay_within_the_bound_and_the_bound_is_tight_enough_to_judge() {
        let index = geometry(32, 64, 8);
        let keys = keys(2000);
        let pick = Pick { index: &index, layer: 0, selection: None };
        let scorer = Scorer::new(&pick, 5, keys[1999]);
        let (mut worst, mut spread) = (0f64, Vec::new());
        for (at, &key) in keys.iter().enumerate() {
            let scored = scorer.score(5, at, key);
            let off = (f64::from(in_f32(&scorer, key, 5)) - scored.score).abs();
            assert!(off <= scored.bound, "position {at}: {off:.2e} off, {:.2e} allowed", scored.bound);
            worst = worst.max(off);
            spread.push((scored.score, scored.bound));
        }
        assert!(worst > 0.0, "the products are inexact in f32");
        let deviation = (spread.iter().map(|(score, _)| score * score).sum::<f64>() / 2000.0).sqrt();
        let bound = spread.iter().map(|(_, bound)| bound).sum::<f64>() / 2000.0;
        // 2000 keys over a few deviations: gaps of a thousandth, of which a bound may hide some and not many.
        assert!(bound < deviation / 1000.0, "bound {bound:.2e}, deviation {deviation:.2e}");
    }

    #[test]
    fn a_right_pick_passes_and_one_changed_key_fails() {
        let (index, keys) = (geometry(8, 64, 100), keys(1000));
        let right = picked(&index, &keys);
        assert_eq!(verdict(&index, &keys, &right), Ok(()));
        let left = (0..1000).filter(|at| !right.contains(at)).step_by(90);
        for (place, other) in (0..100).step_by(11).zip(left) {
            let mut wrong = right.clone();
            wrong[place] = other;
            wrong.sort_unstable();
            assert!(verdict(&index, &keys, &wrong).unwrap_err().contains("and left out position"));
        }
    }

    #[test]
    fn a_pick_of_another_form_fails() {
        let (index, keys) = (geometry(8, 64, 4), keys(10));
        for (wrong, said) in [
            ([0, 1, 2, -1], "3 of 10 keys were picked, 4 are due"),
            ([0, 1, 1, 2], "not in rising order: 1 before 1"),
            ([0, 1, 2, 10], "position 10 was picked, 10 keys are seen"),
            ([-2, 1, 2, 3], "position -2 was picked"),
            ([-1, -1, -1, -1], "0 of 10 keys were picked"),
        ] {
            let got = verdict(&index, &keys, &wrong).unwrap_err();
            assert!(got.contains(said), "{got}");
        }
        let none = Pick { index: &index, layer: 0, selection: None };
        assert!(none.of(0, 5).unwrap_err().contains("nothing was picked"));
        assert_eq!(none.of(0, 4), Ok(None));
    }

    #[test]
    fn very_many_keys_are_judged_by_an_even_share() {
        let (index, keys) = (geometry(64, 512, 64), keys(2100));
        assert!(cost(&index, keys.len()) > 8 * BUDGET);
        let right = picked(&index, &keys);
        assert_eq!(verdict(&index, &keys, &right), Ok(()));
        let first: Vec<i32> = (0..64).collect();
        assert!(verdict(&index, &keys, &first).is_err());
    }

    #[test]
    fn e4m3_rounds_to_the_nearest_of_its_numbers() {
        for (x, want) in [
            (448.0, 448.0),
            (500.0, 448.0),
            (-1.0, -1.0),
            (1.0625, 1.0),
            (1.1875, 1.25),
            (17.0, 16.0),
            (19.0, 20.0),
            (0.0, 0.0),
            (0.001, 2f32.powi(-9) * 1.0),
            (0.0009, 0.0),
            (0.015, 2f32.powi(-9) * 8.0),
        ] {
            assert_eq!(e4m3(x), want, "{x}");
        }
        let mut lanes = [1.75f32, -0.875, 0.1, 0.0];
        quantise(&mut lanes);
        assert_eq!(lanes[..2], [1.75, -0.875]);
        assert!((lanes[2] - 0.1).abs() < 0.1 / 16.0 && lanes[3] == 0.0);
    }
}
