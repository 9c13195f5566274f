//! Rows over keys and values: the oracle's answer for the sampled queries and heads.

use mstar_kernels::reference::paged::{Cache, Options, Paged};
use mstar_kernels::reference::{Attended, Real, fp8, paged};
use mstar_kernels::synth::{self, Kind};

use super::{Judged, Layers, Row, Sample};

/// Adds every sampled (query, head) of the row to `judged`; `o` is `[q_len, H, D]`, `lse` `[q_len, H]`.
///
/// # Errors
/// What the oracle refuses.
pub(super) fn judge<T: Real>(
    row: &Row<'_>,
    [num_kv_heads, head_dim]: [usize; 2],
    sample: &Sample,
    seed: u64,
    layers: Layers,
    o: &[T],
    lse: &[f32],
    judged: &mut Judged,
) -> Result<(), String> {
    let group = row.shape.num_qo_heads / num_kv_heads.max(1);
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for kv_head in 0..num_kv_heads {
        let heads: Vec<usize> = sample.heads.iter().copied().filter(|h| h / group == kv_head).collect();
        if heads.is_empty() {
            continue;
        }
        entries(seed, Kind::Key, layers.own, row.keys, kv_head, head_dim, &mut k);
        entries(seed, Kind::Value, layers.own, row.keys, kv_head, head_dim, &mut v);
        if row.shape.fp8 {
            k.chunks_mut(head_dim).chain(v.chunks_mut(head_dim)).for_each(fp8::kept);
        }
        for &query in &sample.queries {
            let expected = oracle(row, head_dim, seed, layers, &heads, query, &k, &v);
            let expected = expected.map_err(|error| format!("the oracle: {error}"))?;
            judged.add(row, query, &heads, &expected, o, lse);
        }
    }
    Ok(())
}

/// Lanes of `head` at every position of `keys`, `[keys, width]`.
pub(super) fn entries(
    seed: u64,
    kind: Kind,
    layer: usize,
    keys: &[u64],
    head: usize,
    width: usize,
    out: &mut Vec<f32>,
) {
    out.clear();
    out.resize(keys.len() * width, 0.0);
    for (lanes, &key) in out.chunks_exact_mut(width.max(1)).zip(keys) {
        synth::fill_lanes(seed, kind, layer, key, head, lanes);
    }
}

/// One query's `heads` over a row's keys and values, in f64.
fn oracle(
    row: &Row<'_>,
    d: usize,
    seed: u64,
    layers: Layers,
    heads: &[usize],
    query: usize,
    k: &[f32],
    v: &[f32],
) -> mstar_kernels::Result<Attended> {
    let shape = row.shape;
    let (q_len, kv_len) = (row.queries.len(), row.keys.len());
    // Causal: the query is the last of its own prefix. Else it sees all, and its position matters to a window alone.
    let (seen, rows) = if shape.causal {
        (row.seen(query), 1)
    } else if shape.window_left >= 0 {
        (kv_len, q_len - query)
    } else {
        (kv_len, 1)
    };
    let mut q = vec![0f32; rows * heads.len() * d];
    for (index, lanes) in q.chunks_exact_mut(d.max(1)).enumerate() {
        let (row_query, head) = (query + index / heads.len(), heads[index % heads.len()]);
        synth::fill_lanes(seed, Kind::Query, layers.query, row.queries[row_query], head, lanes);
    }
    let of_heads = |all: &Option<Vec<f32>>, first: usize| -> Option<Vec<f32>> {
        all.as_ref().map(|all| heads.iter().map(|&head| all[first + head]).collect())
    };
    let sinks = of_heads(&shape.sinks, layers.own * shape.num_qo_heads);
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
        cache: Cache::Split { k: &k[..seen * d], v: &v[..seen * d] },
        qo_indptr: &[0, tokens],
        kv_indptr,
        kv_indices: indices,
        kv_last_page_len: &[last],
        num_qo_heads: heads.len(),
        num_kv_heads: 1,
        head_dim_qk: d,
        head_dim_vo: d,
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
