//! `--verify RATE`: that share of the rows of every step, recomputed in f64 from the request log.
//!
//! A checked row's whole K and V are generated anew from the content keys of its stream, which the request's plan
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

use mstar_core::{Label, RequestId, ResourceName};
use mstar_kernels::DType;
use mstar_kernels::reference::paged::{Cache, Options, Paged};
use mstar_kernels::reference::{Attended, Real, paged};
use mstar_kernels::synth::{self, Kind};

use super::content::{mix, unit};

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
    /// `G`.
    pub(crate) num_kv_heads: usize,
    /// `D`.
    pub(crate) head_dim_qk: usize,
    /// `Dv`.
    pub(crate) head_dim_vo: usize,
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
}

/// Whether a row of a step is checked, by hash.
pub(crate) fn chosen(rate: f64, seed: u64, step: u64, request: u64, stream: usize) -> bool {
    let hash = mix(mix(mix(mix(seed, 0x7e57), step), request), stream as u64);
    rate > 0.0 && unit(hash) < rate
}

impl Sample {
    /// The sample of a row of `q_len` queries over `kv_len` keys. `salt` varies it from row to row.
    pub(crate) fn of(shape: &Shape, layers: usize, q_len: usize, kv_len: usize, salt: u64) -> Sample {
        let per_query = kv_len.max(1).saturating_mul(shape.head_dim_qk + shape.head_dim_vo);
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
        Sample {
            layers: pick(layers, some_layers, mix(salt, 1), false),
            heads: pick(shape.num_qo_heads, heads, mix(salt, 2), false),
            queries: pick(q_len, queries, mix(salt, 3), true),
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

/// Recomputes `sample` of `row` in `layer` and judges `o` `[q_len, H, Dv]` and `lse` `[q_len, H]`. `seed` is the
/// run's; `query_layer` is the layer that the queries were drawn for.
pub(crate) fn check<T: Real>(
    row: &Row<'_>,
    sample: &Sample,
    seed: u64,
    layer: usize,
    query_layer: usize,
    dtype: DType,
    o: &[T],
    lse: &[f32],
) -> Verdict {
    let shape = row.shape;
    let group = shape.num_qo_heads / shape.num_kv_heads.max(1);
    let mut norms = Norms::default();
    let mut vectors = 0;
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for kv_head in 0..shape.num_kv_heads {
        let heads: Vec<usize> = sample.heads.iter().copied().filter(|h| h / group == kv_head).collect();
        if heads.is_empty() {
            continue;
        }
        entries(seed, Kind::Key, layer, row.keys, kv_head, shape.head_dim_qk, &mut k);
        entries(seed, Kind::Value, layer, row.keys, kv_head, shape.head_dim_vo, &mut v);
        for &query in &sample.queries {
            let expected = match oracle(row, seed, (layer, query_layer), &heads, query, &k, &v) {
                Ok(expected) => expected,
                Err(error) => {
                    return Verdict { failure: Some(format!("the oracle: {error}")), ..Verdict::default() };
                }
            };
            for (at, &head) in heads.iter().enumerate() {
                let place = query * shape.num_qo_heads + head;
                norms.add(
                    &expected.o[at * shape.head_dim_vo..][..shape.head_dim_vo],
                    &o[place * shape.head_dim_vo..][..shape.head_dim_vo],
                    (expected.lse[at], f64::from(lse[place])),
                    dtype,
                    || format!("query {query} (position {}), head {head}", row.first_position + query),
                );
                vectors += 1;
            }
        }
    }
    norms.verdict(row, layer, dtype, vectors)
}

/// Lanes of `head` at every position of `keys`, `[keys, width]`.
fn entries(seed: u64, kind: Kind, layer: usize, keys: &[u64], head: usize, width: usize, out: &mut Vec<f32>) {
    out.clear();
    out.resize(keys.len() * width, 0.0);
    for (lanes, &key) in out.chunks_exact_mut(width.max(1)).zip(keys) {
        synth::fill_lanes(seed, kind, layer, key, head, lanes);
    }
}

/// One query's `heads` over a row's keys and values, in f64.
fn oracle(
    row: &Row<'_>,
    seed: u64,
    (layer, query_layer): (usize, usize),
    heads: &[usize],
    query: usize,
    k: &[f32],
    v: &[f32],
) -> mstar_kernels::Result<Attended> {
    let shape = row.shape;
    let (d, dv) = (shape.head_dim_qk, shape.head_dim_vo);
    let (q_len, kv_len) = (row.queries.len(), row.keys.len());
    // Causal: the query is the last of its own prefix. Else it sees all, and its position matters to a window alone.
    let (seen, rows) = if shape.causal {
        ((kv_len + query + 1).saturating_sub(q_len), 1)
    } else if shape.window_left >= 0 {
        (kv_len, q_len - query)
    } else {
        (kv_len, 1)
    };
    let mut q = vec![0f32; rows * heads.len() * d];
    for (index, lanes) in q.chunks_exact_mut(d.max(1)).enumerate() {
        let (row_query, head) = (query + index / heads.len(), heads[index % heads.len()]);
        synth::fill_lanes(seed, Kind::Query, query_layer, row.queries[row_query], head, lanes);
    }
    let of_heads = |all: &Option<Vec<f32>>, first: usize| -> Option<Vec<f32>> {
        all.as_ref().map(|all| heads.iter().map(|&head| all[first + head]).collect())
    };
    let sinks = of_heads(&shape.sinks, layer * shape.num_qo_heads);
    let slopes = of_heads(&shape.alibi_slopes, 0);
    let before = kv_len.saturating_sub(q_len);
    let mask: Option<Vec<bool>> = row.own_mask.map(|own| {
        let rows = query..query + rows;
        rows.flat_map(|i| (0..seen).map(move |j| j < before || own[i * q_len + j - before])).collect()
    });
    let masks = mask.as_ref().map(|mask| [Some(&mask[..])]);
    let tokens = rows as i32;
    let (kv_indptr, indices, last): (&[i32], &[i32], i32) =
        if seen == 0 { (&[0, 0], &[], 0) } else { (&[0, 1], &[0], seen as i32) };
    paged(&Paged {
        q: &q,
        cache: Cache::Split { k: &k[..seen * d], v: &v[..seen * dv] },
        qo_indptr: &[0, tokens],
        kv_indptr,
        kv_indices: indices,
        kv_last_page_len: &[last],
        num_qo_heads: heads.len(),
        num_kv_heads: 1,
        head_dim_qk: d,
        head_dim_vo: dv,
        page_size: seen.max(1),
        sm_scale: shape.sm_scale,
        causal: shape.causal,
        options: Options {
            window_left: shape.window_left,
            logits_soft_cap: shape.logits_soft_cap,
            sinks: sinks.as_deref(),
            alibi_slopes: slopes.as_deref(),
            masks: masks.as_ref().map_or(&[], |masks| &masks[..]),
            ..Options::default()
        },
    })
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

    fn verdict(self, row: &Row<'_>, layer: usize, dtype: DType, vectors: u64) -> Verdict {
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
                "step {}, {} row {}: request {} ({}), layer {layer}, q_len {}, kv_len {}: relative error of o {error:.3e} \
                 (allowed {allowed:.3e}), of lse {lse_error:.3e} (allowed 1e-6); worst is {}",
                row.step,
                row.attention,
                row.index,
                row.request,
                row.label,
                row.queries.len(),
                row.keys.len(),
                self.worst.map_or_else(|| "nowhere".into(), |(_, place)| place),
            )
        });
        Verdict { vectors, error, allowed, failure }
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
