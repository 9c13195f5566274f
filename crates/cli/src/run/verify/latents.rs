//! Rows over latents: the oracle's answer over every key that a query sees, or over the pick that was used.

use half::bf16;
use mstar_kernels::reference::mla::Mla;
use mstar_kernels::reference::{Attended, Real, fp8, mla};
use mstar_kernels::synth::{self, Kind};

use super::heads::entries;
use super::{Judged, Layers, Row, Sample, picks};

/// Adds every sampled (query, head) of the row to `judged`, and judges the sampled picks; `o` is `[q_len, H, C]`, `lse`
/// `[q_len, H]`.
///
/// # Errors
/// A pick that is wrong; what the oracle refuses.
pub(super) fn judge<T: Real>(
    row: &Row<'_>,
    [c, e]: [usize; 2],
    sample: &Sample,
    seed: u64,
    layers: Layers,
    o: &[T],
    lse: &[f32],
    judged: &mut Judged,
) -> Result<(), String> {
    let mut latents = Vec::new();
    entries(seed, Kind::Latent, layers.own, row.keys, 0, c + e, &mut latents);
    if row.shape.fp8 {
        for token in latents.chunks_mut(c + e) {
            let (value, rope) = token.split_at_mut(c);
            value.chunks_mut(128).for_each(fp8::kept);
            rope.iter_mut().for_each(|lane| *lane = bf16::from_f32(*lane).to_f32());
        }
    }
    for &query in &sample.queries {
        let seen = if row.shape.causal { row.seen(query) } else { row.keys.len() };
        let picked = match &row.pick {
            Some(pick) => {
                let picked = pick.of(query, seen).map_err(|why| row.about(query, &why))?;
                if let Some(picked) = &picked
                    && sample.picks.contains(&query)
                {
                    picks::judge(row, pick, seed, query, seen, picked)
                        .map_err(|why| row.about(query, &why))?;
                    judged.picks += 1;
                }
                picked
            }
            None => None,
        };
        let before = row.keys.len() - row.queries.len();
        let sees = |j: usize| {
            row.own_mask.is_none_or(|own| j < before || own[query * row.queries.len() + j - before])
        };
        let positions = match picked {
            Some(picked) => picked,
            None => (0..seen).filter(|&j| sees(j)).collect(),
        };
        let expected = oracle(row, [c, e], seed, layers, &sample.heads, query, &positions, &latents);
        let expected = expected.map_err(|error| format!("the oracle: {error}"))?;
        judged.add(row, query, &sample.heads, &expected, o, lse);
    }
    Ok(())
}

/// One query's `heads` over the latents at `positions`, in f64.
fn oracle(
    row: &Row<'_>,
    [c, e]: [usize; 2],
    seed: u64,
    layers: Layers,
    heads: &[usize],
    query: usize,
    positions: &[usize],
    latents: &[f32],
) -> mstar_kernels::Result<Attended> {
    let (mut q_nope, mut q_pe) = (Vec::new(), Vec::new());
    let mut q = vec![0f32; c + e];
    for &head in heads {
        synth::fill_lanes(seed, Kind::Query, layers.query, row.queries[query], head, &mut q);
        q_nope.extend_from_slice(&q[..c]);
        q_pe.extend_from_slice(&q[c..]);
    }
    let seen: Vec<f32> =
        positions.iter().flat_map(|&at| &latents[at * (c + e)..][..c + e]).copied().collect();
    let (kv_indptr, kv_indices): (&[i32], &[i32]) =
        if positions.is_empty() { (&[0, 0], &[]) } else { (&[0, 1], &[0]) };
    mla(&Mla {
        q_nope: &q_nope,
        q_pe: &q_pe,
        latent: &seen,
        qo_indptr: &[0, 1],
        kv_indptr,
        kv_indices,
        kv_len: &[positions.len() as i32],
        num_qo_heads: heads.len(),
        kv_lora_rank: c,
        qk_rope_head_dim: e,
        page_size: positions.len().max(1),
        sm_scale: row.shape.sm_scale,
        causal: false,
    })
}
