//! `--verify RATE`: that share of the rows of every step, recomputed in f64 from the request log.
//!
//! A checked row's whole K and V (or latents) are generated anew from the content keys of its stream, which the request's plan
//! gives ([`Content`](super::script::Content)): not from a page table, nor from anything the caches hold. So a
//! wrong page, a stale fork, a lost reload or a mask off by one shows as a wrong output.
//!
//! **What is checked of a row.** All layers, heads and queries where that is cheap; of a long row a sample within
//! [`BUDGET`], chosen by hash: the first and the last query and others between, some heads, at least one layer. The
//! counts are reported.
//!
//! **The gate** is DESIGN's accuracy gate, over everything checked of one (row, layer): the relative L2 error against
//! the oracle is at most 1.4 times the error of the oracle itself rounded to the output's dtype, where probabilities
//! may be rounded to a 16-bit input type too ([`PROBABILITY_ROUNDING`]); f32 passes below 1e-6. `lse` passes below
//! 1e-6. A NaN fails.

mod frames;
mod heads;
mod latents;
mod picks;

use mstar_core::attend::IndexGeometry;
use mstar_core::{Label, RequestId, ResourceName};
use mstar_kernels::DType;
use mstar_kernels::reference::{Attended, Real};

pub(crate) use self::frames::Frames;
pub(crate) use self::picks::Pick;

use super::content::{mix, unit};
use super::entries::Entries;

/// Multiplications and additions of the oracle that one row of one step may cost.
pub(crate) const BUDGET: usize = 4 << 20;

/// A kernel may round probabilities to a 16-bit input type before the value product (DESIGN 6). There is no other
/// source to compare with here, so the gate is widened by what that adds: two independent roundings, `sqrt(2)`.
pub(crate) const PROBABILITY_ROUNDING: f64 = std::f64::consts::SQRT_2;

/// The mathematics of one attention resource, as the oracle needs it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shape {
    /// `H`.
    pub(crate) num_qo_heads: usize,
    /// A token's entries in the cache.
    pub(crate) entries: Entries,
    /// Whether the cache keeps its entries in e4m3.
    pub(crate) fp8: bool,
    /// Factor on `q.k`.
    pub(crate) sm_scale: f64,
    /// Whether a query sees no later key.
    pub(crate) causal: bool,
    /// Keys seen to the left of the query's own, -1 for all.
    pub(crate) window_left: i64,
    /// The cap of scores, 0 for none.
    pub(crate) logits_soft_cap: f64,
    /// `[L, H]` sink logits.
    pub(crate) sinks: Option<Vec<f32>>,
    /// `[H]` slopes.
    pub(crate) alibi_slopes: Option<Vec<f32>>,
    /// Which frames of a ring are seen; `None` over pages, where all that is stored is.
    pub(crate) frames: Option<Frames>,
}

/// One row of one step, and where its result lies.
#[derive(Clone, Debug)]
pub(crate) struct Row<'a> {
    /// The attention resource.
    pub(crate) attention: &'a ResourceName,
    /// Its mathematics.
    pub(crate) shape: &'a Shape,
    /// Whose row.
    pub(crate) request: &'a RequestId,
    /// Which stream.
    pub(crate) label: &'a Label,
    /// The step.
    pub(crate) step: u64,
    /// The row's place in its plan.
    pub(crate) index: usize,
    /// `[kv_len]` content keys of every position that the row may see, its own included.
    pub(crate) keys: &'a [u64],
    /// `[q_len]` content keys of its queries.
    pub(crate) queries: &'a [u64],
    /// `[q_len, q_len]`: which of the step's own tokens each query may see, where a mask says.
    pub(crate) own_mask: Option<&'a [bool]>,
    /// Absolute position of the first query.
    pub(crate) first_position: usize,
    /// What an indexer picked, where there is one.
    pub(crate) pick: Option<Pick<'a>>,
}

impl Row<'_> {
    /// Keys that a causal `query` sees.
    fn seen(&self, query: usize) -> usize {
        (self.keys.len() + query + 1).saturating_sub(self.queries.len())
    }

    /// `why`, of one query.
    fn about(&self, query: usize, why: &str) -> String {
        format!("query {query} (position {}): {why}", self.first_position + query)
    }
}

/// The layers that a row's parts were drawn for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layers {
    /// Of the keys and values, and of the sinks.
    pub(crate) own: usize,
    /// Of the queries.
    pub(crate) query: usize,
}

/// Which parts of a row are recomputed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Layers, rising.
    pub(crate) layers: Vec<usize>,
    /// Query heads, rising.
    pub(crate) heads: Vec<usize>,
    /// Queries of the row, rising.
    pub(crate) queries: Vec<usize>,
    /// Of those, the ones whose pick is judged.
    pub(crate) picks: Vec<usize>,
}

/// Whether a row of a step is checked, by hash.
pub(crate) fn chosen(rate: f64, seed: u64, step: u64, request: u64, stream: usize) -> bool {
    let hash = mix(mix(mix(mix(seed, 0x7e57), step), request), stream as u64);
    rate > 0.0 && unit(hash) < rate
}

impl Sample {
    /// The sample of a row of `q_len` queries over `kv_len` keys, of which a query attends `index_topk` where there is
    /// an indexer. `salt` varies it from row to row.
    pub(crate) fn of(
        shape: &Shape,
        index: Option<&IndexGeometry>,
        layers: usize,
        q_len: usize,
        kv_len: usize,
        salt: u64,
    ) -> Sample {
        let seen = shape.frames.as_ref().map_or(kv_len, |frames| frames.most_seen(kv_len));
        let attended = index.map_or(seen, |index| seen.min(index.index_topk)).max(1);
        let lanes = shape.entries.query_width() + shape.entries.out_width();
        let per_query = attended.saturating_mul(lanes);
        let fits = |layers: usize, heads: usize, queries: usize| {
            per_query.saturating_mul(layers).saturating_mul(heads).saturating_mul(queries) <= BUDGET
        };
        let (mut some_layers, mut heads, mut queries) = (layers, shape.num_qo_heads, q_len);
        // Queries go first (masks show at the ends), then layers (each is as good as another), then heads.
        while queries > 4 && !fits(some_layers, heads, queries) {
            queries = (queries / 2).max(4);
        }
        while some_layers > 1 && !fits(some_layers, heads, queries) {
            some_layers /= 2;
        }
        while heads > 1 && !fits(some_layers, heads, queries) {
            heads /= 2;
        }
        let queries = pick(q_len, queries, mix(salt, 3), true);
        let picks = index.map_or(Vec::new(), |index| {
            // Scoring costs the same whatever is attended, and at least one pick a layer is judged.
            let each = picks::cost(index, kv_len).saturating_mul(some_layers).max(1);
            let count = (BUDGET / each).max(1);
            let chosen = pick(queries.len(), count, mix(salt, 4), false);
            chosen.into_iter().map(|at| queries[at]).collect()
        });
        Sample {
            layers: pick(layers, some_layers, mix(salt, 1), false),
            heads: pick(shape.num_qo_heads, heads, mix(salt, 2), false),
            queries,
            picks,
        }
    }
}

/// `count` of `0..all`, rising: evenly spread from a hashed start, with both ends if asked.
fn pick(all: usize, count: usize, hash: u64, ends: bool) -> Vec<usize> {
    if count >= all {
        return (0..all).collect();
    }
    let start = (unit(hash) * all as f64) as usize;
    let mut picked: Vec<usize> = (0..count).map(|i| (start + i * all / count) % all).collect();
    if ends && count >= 2 {
        (picked[0], picked[1]) = (0, all - 1);
    }
    picked.sort_unstable();
    picked.dedup();
    picked
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Verdict {
    /// (query, head, layer) triples recomputed.
    pub(crate) vectors: u64,
    /// (query, layer) pairs whose pick was judged.
    pub(crate) picks: u64,
    /// Relative L2 error of `o`.
    pub(crate) error: f64,
    /// What the gate allows.
    pub(crate) allowed: f64,
    /// Why the row fails, with everything needed to find it again.
    pub(crate) failure: Option<String>,
}

/// Sums of squares of one output against the oracle.
#[derive(Default)]
struct Norms {
    difference: f64,
    reference: f64,
    rounding: f64,
    lse_difference: f64,
    lse_reference: f64,
    worst: Option<(f64, String)>,
}

/// What was compared of a row so far.
struct Judged {
    dtype: DType,
    norms: Norms,
    vectors: u64,
    picks: u64,
}

impl Judged {
    /// Compares one query's `heads` with what the oracle expects of them.
    fn add<T: Real>(
        &mut self,
        row: &Row<'_>,
        query: usize,
        heads: &[usize],
        expected: &Attended,
        o: &[T],
        lse: &[f32],
    ) {
        let width = row.shape.entries.out_width();
        for (at, &head) in heads.iter().enumerate() {
            let place = query * row.shape.num_qo_heads + head;
            self.norms.add(
                &expected.o[at * width..][..width],
                &o[place * width..][..width],
                (expected.lse[at], f64::from(lse[place])),
                self.dtype,
                || format!("query {query} (position {}), head {head}", row.first_position + query),
            );
            self.vectors += 1;
        }
    }
}

/// Recomputes `sample` of `row` in a layer and judges `o` `[q_len, H, Dv]` and `lse` `[q_len, H]`. `seed` is the
/// run's.
pub(crate) fn check<T: Real>(
    row: &Row<'_>,
    sample: &Sample,
    seed: u64,
    layers: Layers,
    dtype: DType,
    o: &[T],
    lse: &[f32],
) -> Verdict {
    let mut judged = Judged { dtype, norms: Norms::default(), vectors: 0, picks: 0 };
    let done = match (row.shape.entries, &row.shape.frames) {
        (Entries::Heads { num_kv_heads, head_dim, head_dim_vo }, Some(frames)) => {
            let widths = [num_kv_heads, head_dim, head_dim_vo];
            frames::judge(row, frames, widths, sample, seed, layers, o, lse, &mut judged)
        }
        (Entries::Heads { num_kv_heads, head_dim, .. }, None) => {
            heads::judge(row, [num_kv_heads, head_dim], sample, seed, layers, o, lse, &mut judged)
        }
        (Entries::Latents { kv_lora_rank, qk_rope_head_dim }, _) => {
            let widths = [kv_lora_rank, qk_rope_head_dim];
            latents::judge(row, widths, sample, seed, layers, o, lse, &mut judged)
        }
    };
    let place = format!(
        "step {}, {} row {}: request {} ({}), layer {}, q_len {}, kv_len {}",
        row.step,
        row.attention,
        row.index,
        row.request,
        row.label,
        layers.own,
        row.queries.len(),
        row.keys.len(),
    );
    let Judged { norms, vectors, picks, .. } = judged;
    match done {
        Ok(()) => Verdict { vectors, picks, ..norms.verdict(&place, dtype) },
        Err(why) => {
            Verdict { vectors, picks, failure: Some(format!("{place}: {why}")), ..Verdict::default() }
        }
    }
}

impl Norms {
    fn add<T: Real>(
        &mut self,
        expected: &[f64],
        got: &[T],
        (lse_expected, lse_got): (f64, f64),
        dtype: DType,
        place: impl Fn() -> String,
    ) {
        for (lane, (&want, got)) in expected.iter().zip(got).enumerate() {
            let got = got.to_f64();
            let difference = got - want;
            self.difference += difference * difference;
            self.reference += want * want;
            self.rounding += (rounded(want, dtype) - want).powi(2);
            self.note(difference, || {
                format!("o of {}, lane {lane}: expected {want:.7e}, got {got:.7e}", place())
            });
        }
        // Equal infinities agree; anything else with one in it is a NaN or an infinity here, and fails.
        if lse_expected != lse_got {
            let difference = lse_got - lse_expected;
            self.lse_difference += difference * difference;
            self.note(difference, || {
                format!("lse of {}: expected {lse_expected:.9}, got {lse_got:.9}", place())
            });
        }
        // An lse near 0 is judged by its absolute error.
        self.lse_reference += if lse_expected.is_finite() { lse_expected.powi(2).max(1.0) } else { 1.0 };
    }

    fn note(&mut self, difference: f64, what: impl Fn() -> String) {
        let size = if difference.is_nan() { f64::INFINITY } else { difference.abs() };
        if self.worst.as_ref().is_none_or(|(worst, _)| size > *worst) {
            self.worst = Some((size, what()));
        }
    }

    fn verdict(self, place: &str, dtype: DType) -> Verdict {
        let relative = |part: f64, whole: f64| if part == 0.0 { 0.0 } else { (part / whole).sqrt() };
        let error = relative(self.difference, self.reference);
        let lse_error = relative(self.lse_difference, self.lse_reference);
        let rounding = relative(self.rounding, self.reference);
        let allowed = match dtype {
            DType::F32 => (1.4 * rounding).max(1e-6),
            _ => 1.4 * PROBABILITY_ROUNDING * rounding,
        };
        // Written so that a NaN fails.
        let right = error <= allowed && lse_error <= 1e-6;
        let failure = (!right).then(|| {
            format!(
                "{place}: relative error of o {error:.3e} (allowed {allowed:.3e}), of lse {lse_error:.3e} (allowed \
                 1e-6); worst is {}",
                self.worst.map_or_else(|| "nowhere".into(), |(_, place)| place),
            )
        });
        Verdict { error, allowed, failure, ..Verdict::default() }
    }
}

/// `x` in the output's dtype.
fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => half::bf16::from_f64(x).to_f64(),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

#[cfg(test)]
mod tests;
