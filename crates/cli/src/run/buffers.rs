//! One forward's queries, cache entries and outputs, in memory that every layer and step reuses.
//!
//! An absorbed query is one draw of `C + E` lanes a head, `[q_nope | q_pe]`, and a latent one of `C + E`,
//! `[ckv | kpe]`: whoever rebuilds them splits them alike.

use mstar_core::attend::{AttnOut, Indexed, Query, StepShape};
use mstar_core::kv::{KvEntries, RingConfig, RingGeometry};
use mstar_core::spec::{DsaSpec, ResourceKind, Spec};
use mstar_kernels::synth::{self, Exact, Kind};
use mstar_kernels::{DType, Stream, TensorMut, TensorRef};
use rayon::prelude::*;

use super::entries::Entries;
use super::script;
use super::shapes::padded;
use super::twin::Twin;
use super::workload::{Generation, RequestPlan};

/// Tokens that one task generates.
const TOKENS_A_TASK: usize = 32;

/// Shapes of what one forward reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Widths {
    /// `T`: the most query tokens of one plan, those that pad it to a bucket among them.
    pub(crate) tokens: usize,
    /// `H`.
    pub(crate) num_qo_heads: usize,
    /// A token's cache entries.
    pub(crate) entries: Entries,
    /// The indexer's, where the model has one.
    pub(crate) index: Option<IndexWidths>,
    /// Element type.
    pub(crate) dtype: DType,
}

/// Shapes of what an indexer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndexWidths {
    /// `Hi`.
    pub(crate) heads: usize,
    /// `Di`.
    pub(crate) head_dim: usize,
}

impl IndexWidths {
    /// What a head weight is multiplied by, `Hi^-0.5 Di^-0.5`: folded into the weights, as layers hand them over.
    pub(crate) fn weight_scale(self) -> f32 {
        (1.0 / ((self.heads * self.head_dim) as f64).sqrt()) as f32
    }
}

impl Widths {
    /// The widths of a run; `None` where the spec has no cache of heads or latents and no ring, or no workload.
    pub(crate) fn of(spec: &Spec, requests: &[RequestPlan]) -> Option<Widths> {
        let entries = match (spec.caches().next(), spec.rings().next()) {
            (Some((_, kv)), _) => Entries::of(kv.config.layout)?,
            (None, ring) => Entries::of_ring(&ring?.1.config),
        };
        let heads = spec.model.rank_heads(spec.world_size).ok()?;
        let index = spec.resources.iter().find_map(|resource| match &resource.kind {
            ResourceKind::Dsa(DsaSpec { index, .. }) => {
                Some(IndexWidths { heads: index.index_n_heads, head_dim: index.index_head_dim })
            }
            _ => None,
        });
        Some(Widths {
            // All buckets are warmed up.
            tokens: padded(spec, largest_step(spec, requests)?).tokens,
            num_qo_heads: heads.num_qo_heads,
            entries,
            index,
            dtype: spec.dtype,
        })
    }

    /// Bytes of the attention's arrays: `q` `[T, H, D]` (or `[T, H, C + E]`), a token's entries, `o` `[T, H, Dv]` (or
    /// `[T, H, C]`), `lse` `[T, H]` f32.
    pub(crate) fn attended_bytes(&self) -> Option<usize> {
        let head = self.entries.query_width().checked_add(self.entries.out_width())?;
        let token = self.num_qo_heads.checked_mul(head)?.checked_add(self.entries.token_width())?;
        let token = token.checked_mul(self.dtype.size())?;
        self.tokens.checked_mul(token.checked_add(self.num_qo_heads.checked_mul(4)?)?)
    }

    /// Bytes of the indexer's arrays: queries `[T, Hi, Di]`, keys `[T, Di]`, weights `[T, Hi]` f32; 0 without one.
    pub(crate) fn index_bytes(&self) -> Option<usize> {
        let Some(IndexWidths { heads, head_dim }) = self.index else { return Some(0) };
        let token = heads.checked_add(1)?.checked_mul(head_dim)?.checked_mul(self.dtype.size())?;
        self.tokens.checked_mul(token.checked_add(heads.checked_mul(4)?)?)
    }
}

/// The largest step of a run of `requests`, without what pads it to a bucket: rows that see no key, and need no scratch.
/// `None` without a workload.
///
/// One step holds at most `chunked_prefill` prompt tokens (or one encoder's context), and beside them one turn of
/// every active request on each of its streams.
pub(crate) fn largest_step(spec: &Spec, requests: &[RequestPlan]) -> Option<StepShape> {
    let workload = spec.workload.as_ref()?;
    if let Some((_, ring)) = spec.rings().next() {
        return Some(largest_pass(&ring.config, workload.max_batch.min(requests.len().max(1))));
    }
    let most = |of: &dyn Fn(&RequestPlan) -> usize| requests.iter().map(of).max().unwrap_or(0);
    let longest = spec.caches().map(|(_, kv)| kv.config.max_seq_len).max()?;
    let active = workload.max_batch.max(1).min(requests.len().max(1));
    // Whole cuts and contexts share `chunked_prefill` tokens; one that is longer by itself goes alone.
    let shared = |len: usize| len.max(workload.chunked_prefill.min(len.saturating_mul(active)));
    let cut = workload.chunked_prefill.min(most(&|plan| plan.prompt_len())).min(longest);
    let whole = shared(cut).max(shared(most(&|plan| plan.context_len).min(longest)));
    let turn = most(&|plan| {
        let span = match &plan.generation {
            Generation::Decode => 1,
            Generation::Denoise { tokens, .. } => *tokens,
            Generation::Tree { branching } => script::nodes(branching),
        };
        span.saturating_mul(plan.generating())
    });
    let streams = most(&|plan| plan.generating()).max(1);
    let kv_len = most(&|plan| plan.final_len().max(plan.context_len)).saturating_add(turn).min(longest);
    Some(StepShape {
        rows: active.saturating_mul(streams),
        tokens: active.saturating_mul(turn).saturating_add(whole),
        kv_len,
    })
}

/// The largest step over a ring: a frame of every request that may hold a world. `kv_len` is what a frame sees in
/// the layer that shows it most.
fn largest_pass(ring: &RingConfig, active: usize) -> StepShape {
    let rows = active.clamp(1, ring.num_worlds);
    let frame = ring.tokens_per_frame;
    let seen = ring.layers.iter().map(RingGeometry::most_visible).max().unwrap_or(1);
    StepShape { rows, tokens: rows.saturating_mul(frame), kv_len: seen.saturating_mul(frame) }
}

/// The memory.
pub(crate) struct Buffers {
    widths: Widths,
    stream: Stream,
    q: Twin,
    fresh: Held,
    index: Option<IndexBuffers>,
    o: Twin,
    lse: Twin,
}

/// The step's own entries of one layer.
enum Held {
    Heads { k: Twin, v: Twin },
    Latents { latent: Twin },
}

/// What one full layer hands its indexer.
struct IndexBuffers {
    widths: IndexWidths,
    q: Twin,
    keys: Twin,
    weights: Twin,
}

/// Which arrays are generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fresh {
    /// The queries.
    Queries,
    /// The cache's entries.
    Entries,
    /// The indexer's queries, keys and weights.
    Index,
}

/// One layer's arrays: what it reads, and where it writes.
pub(crate) struct Views<'a> {
    /// `[T, H, D]`; or `[T, H, C]` and `[T, H, E]`, two parts of one array.
    pub(crate) q: Query<'a>,
    /// `[T, G, D]` and `[T, G, Dv]`; or `[T, C]` and `[T, E]`, two parts of one array.
    pub(crate) entries: KvEntries<'a>,
    /// The indexer's, where the model has one.
    pub(crate) indexed: Option<Indexed<'a>>,
    /// `o` and `lse`.
    pub(crate) out: AttnOut<'a>,
}

impl Buffers {
    /// Room for `widths`, where `stream` runs.
    pub(crate) fn new(widths: Widths, stream: Stream) -> mstar_kernels::Result<Buffers> {
        let Widths { tokens: t, num_qo_heads: h, entries, dtype, .. } = widths;
        let fresh = match entries {
            Entries::Heads { num_kv_heads, head_dim, head_dim_vo } => Held::Heads {
                k: Twin::new(&stream, dtype, &[t, num_kv_heads, head_dim])?,
                v: Twin::new(&stream, dtype, &[t, num_kv_heads, head_dim_vo])?,
            },
            Entries::Latents { .. } => {
                Held::Latents { latent: Twin::new(&stream, dtype, &[t, entries.token_width()])? }
            }
        };
        let index = |widths: IndexWidths| -> mstar_kernels::Result<IndexBuffers> {
            Ok(IndexBuffers {
                widths,
                q: Twin::new(&stream, dtype, &[t, widths.heads, widths.head_dim])?,
                keys: Twin::new(&stream, dtype, &[t, widths.head_dim])?,
                weights: Twin::new(&stream, DType::F32, &[t, widths.heads])?,
            })
        };
        Ok(Buffers {
            widths,
            stream,
            q: Twin::new(&stream, dtype, &[t, h, entries.query_width()])?,
            fresh,
            index: widths.index.map(index).transpose()?,
            o: Twin::new(&stream, dtype, &[t, h, entries.out_width()])?,
            lse: Twin::new(&stream, DType::F32, &[t, h])?,
        })
    }

    /// Query tokens that fit.
    pub(crate) fn tokens(&self) -> usize {
        self.widths.tokens
    }

    /// Generates arrays for the positions whose content keys are `keys` `[T]`, in the current rayon pool.
    pub(crate) fn generate(
        &mut self,
        which: Fresh,
        seed: u64,
        layer: usize,
        keys: &[u64],
    ) -> mstar_kernels::Result<()> {
        let Widths { num_qo_heads, entries, dtype, .. } = self.widths;
        let stream = self.stream;
        let draw = |twin: &mut Twin, kind: Kind, [heads, width]: [usize; 2]| {
            let view = twin.host_mut(&[keys.len(), heads, width])?;
            match dtype {
                DType::Bf16 => fill::<half::bf16>(seed, kind, layer, keys, [heads, width], view),
                DType::F16 => fill::<half::f16>(seed, kind, layer, keys, [heads, width], view),
                _ => fill::<f32>(seed, kind, layer, keys, [heads, width], view),
            }?;
            twin.send(&stream, keys.len() * heads * width)
        };
        match which {
            Fresh::Queries => draw(&mut self.q, Kind::Query, [num_qo_heads, entries.query_width()]),
            Fresh::Entries => match (&mut self.fresh, entries) {
                (Held::Heads { k, v }, Entries::Heads { num_kv_heads, head_dim, head_dim_vo }) => {
                    draw(k, Kind::Key, [num_kv_heads, head_dim])?;
                    draw(v, Kind::Value, [num_kv_heads, head_dim_vo])
                }
                (Held::Latents { latent }, _) => draw(latent, Kind::Latent, [1, entries.token_width()]),
                (Held::Heads { .. }, _) => unreachable!("made for these entries"),
            },
            Fresh::Index => {
                let Some(IndexBuffers { widths, q, keys: index_keys, weights }) = &mut self.index else {
                    return Ok(());
                };
                draw(q, Kind::IndexQuery, [widths.heads, widths.head_dim])?;
                draw(index_keys, Kind::IndexKey, [1, widths.head_dim])?;
                let shape = [keys.len(), widths.heads];
                let mut view = weights.host_mut(&shape)?;
                synth::fill(seed, Kind::IndexWeight, layer, keys, &mut view)?;
                let scale = widths.weight_scale();
                let all = view.as_mut_slice::<f32>().expect("a contiguous view of f32");
                all.iter_mut().for_each(|weight| *weight *= scale);
                weights.send(&stream, shape[0] * shape[1])
            }
        }
    }

    /// The arrays of a plan of `tokens`.
    pub(crate) fn views(&mut self, tokens: usize) -> mstar_kernels::Result<Views<'_>> {
        let Widths { num_qo_heads: h, entries, .. } = self.widths;
        let q = self.q.here(&[tokens, h, entries.query_width()])?;
        let (q, fresh) = match (&self.fresh, entries) {
            (Held::Heads { k, v }, Entries::Heads { num_kv_heads: g, head_dim: d, head_dim_vo: dv }) => {
                let (k, v) = (k.here(&[tokens, g, d])?, v.here(&[tokens, g, dv])?);
                (Query::Heads(q), KvEntries::Nhd { k, v })
            }
            (Held::Latents { latent }, Entries::Latents { kv_lora_rank: c, qk_rope_head_dim: e }) => {
                let latent = latent.here(&[tokens, c + e])?;
                let q = Query::Absorbed { nope: q.narrow(2, 0, c)?, pe: q.narrow(2, c, e)? };
                (q, KvEntries::Mla { ckv: latent.narrow(1, 0, c)?, kpe: latent.narrow(1, c, e)? })
            }
            _ => unreachable!("made for these entries"),
        };
        let indexed = match &self.index {
            None => None,
            Some(index) => {
                let IndexWidths { heads, head_dim } = index.widths;
                Some(Indexed {
                    keys: index.keys.here(&[tokens, head_dim])?,
                    q: index.q.here(&[tokens, heads, head_dim])?,
                    weights: index.weights.here(&[tokens, heads])?,
                })
            }
        };
        Ok(Views {
            q,
            entries: fresh,
            indexed,
            out: AttnOut {
                o: self.o.here_mut(&[tokens, h, entries.out_width()])?,
                lse: Some(self.lse.here_mut(&[tokens, h])?),
            },
        })
    }

    /// What the last layer wrote, brought to the host: `o` as bytes and as a view, `lse`.
    pub(crate) fn written(&mut self, tokens: usize) -> mstar_kernels::Result<Written<'_>> {
        let Widths { num_qo_heads, entries, dtype, .. } = self.widths;
        let vector = num_qo_heads * entries.out_width();
        let elements = tokens * vector;
        self.o.fetch(&self.stream, elements)?;
        self.lse.fetch(&self.stream, tokens * num_qo_heads)?;
        let bytes = self.o.host_bytes(elements * dtype.size())?;
        let lse = self.lse.host(&[tokens * num_qo_heads])?;
        Ok(Written {
            o: self.o.host(&[elements])?,
            bytes: bytes.as_slice().expect("a contiguous view of bytes"),
            lse: lse.as_slice().expect("a contiguous view of f32"),
            vector,
            heads: num_qo_heads,
        })
    }
}

/// One layer's output.
#[derive(Clone, Copy)]
pub(crate) struct Written<'a> {
    /// `[T * H * Dv]`.
    pub(crate) o: TensorRef<'a>,
    /// The same, as bytes.
    pub(crate) bytes: &'a [u8],
    /// `[T * H]`.
    pub(crate) lse: &'a [f32],
    /// `H * Dv`: elements of one token.
    pub(crate) vector: usize,
    /// `H`.
    pub(crate) heads: usize,
}

impl Written<'_> {
    /// Bytes of token `t`'s output.
    pub(crate) fn token_bytes(&self, t: usize) -> &[u8] {
        let width = self.vector * self.o.dtype().size();
        &self.bytes[t * width..][..width]
    }

    /// `lse` of token `t`.
    pub(crate) fn token_lse(&self, t: usize) -> &[f32] {
        &self.lse[t * self.heads..][..self.heads]
    }
}

fn fill<T: Exact>(
    seed: u64,
    kind: Kind,
    layer: usize,
    keys: &[u64],
    [heads, width]: [usize; 2],
    mut out: TensorMut<'_>,
) -> mstar_kernels::Result<()> {
    let all = out.as_mut_slice::<T>().expect("a contiguous view of this dtype");
    all.par_chunks_mut((TOKENS_A_TASK * heads * width).max(1))
        .zip(keys.par_chunks(TOKENS_A_TASK))
        .try_for_each(|(out, keys)| {
            let mut out = TensorMut::from_slice(out, &[keys.len(), heads, width])?;
            synth::fill(seed, kind, layer, keys, &mut out)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Entries = Entries::Heads { num_kv_heads: 2, head_dim: 16, head_dim_vo: 16 };
    const LATENTS: Entries = Entries::Latents { kv_lora_rank: 12, qk_rope_head_dim: 4 };

    fn generated(entries: Entries) -> (Buffers, Vec<u64>) {
        let index = Some(IndexWidths { heads: 3, head_dim: 16 });
        let widths = Widths { tokens: 100, num_qo_heads: 4, entries, index, dtype: DType::Bf16 };
        let mut buffers = Buffers::new(widths, Stream::cpu()).unwrap();
        let keys: Vec<u64> = (0..70).map(|t| synth::chain(synth::ROOT, t)).collect();
        for which in [Fresh::Queries, Fresh::Entries, Fresh::Index] {
            buffers.generate(which, 3, 1, &keys).unwrap();
        }
        (buffers, keys)
    }

    /// `view` `[T, heads, width]` or `[T, width]` holds lanes `first..` of what `kind` draws.
    #[track_caller]
    fn holds(view: TensorRef<'_>, kind: Kind, first: usize, keys: &[u64]) {
        for t in [0, 33, 69] {
            let token = view.select(0, t).unwrap();
            let heads = if token.rank() == 2 { token.shape()[0] } else { 1 };
            for head in 0..heads {
                let row = if token.rank() == 2 { token.select(0, head).unwrap() } else { token };
                let row = row.as_slice::<half::bf16>().expect("a head's lanes are contiguous");
                for (lane, got) in row.iter().enumerate() {
                    let want = synth::element(3, kind, 1, keys[t], head, first + lane);
                    assert_eq!(got.to_f32(), want, "{kind:?} token {t}, head {head}, lane {lane}");
                }
            }
        }
    }

    #[test]
    fn generated_arrays_are_what_the_oracle_reads() {
        let (mut buffers, keys) = generated(HEADS);
        let views = buffers.views(70).unwrap();
        let (Query::Heads(q), KvEntries::Nhd { k, v }) = (views.q, views.entries) else { panic!() };
        holds(q, Kind::Query, 0, &keys);
        holds(k, Kind::Key, 0, &keys);
        holds(v, Kind::Value, 0, &keys);
    }

    #[test]
    fn latents_and_absorbed_queries_are_two_parts_of_one_draw() {
        let (mut buffers, keys) = generated(LATENTS);
        let views = buffers.views(70).unwrap();
        let (Query::Absorbed { nope, pe }, KvEntries::Mla { ckv, kpe }) = (views.q, views.entries) else {
            panic!()
        };
        holds(nope, Kind::Query, 0, &keys);
        holds(pe, Kind::Query, 12, &keys);
        holds(ckv, Kind::Latent, 0, &keys);
        holds(kpe, Kind::Latent, 12, &keys);
        assert_eq!((views.out.o.shape(), nope.shape()), (&[70, 4, 12][..], &[70, 4, 12][..]));
    }

    #[test]
    fn index_weights_are_scaled_and_of_both_signs() {
        let (mut buffers, keys) = generated(LATENTS);
        let indexed = buffers.views(70).unwrap().indexed.expect("the widths have an indexer");
        holds(indexed.q, Kind::IndexQuery, 0, &keys);
        holds(indexed.keys, Kind::IndexKey, 0, &keys);
        let weights = indexed.weights.as_slice::<f32>().unwrap();
        let scale = (3.0f64 * 16.0).powf(-0.5) as f32;
        assert_eq!(weights[7], synth::element(3, Kind::IndexWeight, 1, keys[2], 0, 1) * scale);
        let negative = weights.iter().filter(|weight| **weight < 0.0).count();
        assert!(negative > 60 && negative < 150, "{negative} of 210");
    }

    #[test]
    fn bytes_are_what_is_allocated() {
        for entries in [HEADS, LATENTS, Entries::Latents { kv_lora_rank: 5, qk_rope_head_dim: 0 }] {
            for index in [None, Some(IndexWidths { heads: 3, head_dim: 8 })] {
                let widths = Widths { tokens: 7, num_qo_heads: 6, entries, index, dtype: DType::F32 };
                let buffers = Buffers::new(widths, Stream::cpu()).unwrap();
                let fresh = match &buffers.fresh {
                    Held::Heads { k, v } => k.len() + v.len(),
                    Held::Latents { latent } => latent.len(),
                };
                let held = buffers.q.len() + fresh + buffers.o.len() + buffers.lse.len();
                assert_eq!(widths.attended_bytes(), Some(held));
                let held = buffers.index.map_or(0, |i| i.q.len() + i.keys.len() + i.weights.len());
                assert_eq!(widths.index_bytes(), Some(held));
                let huge = Widths { tokens: usize::MAX / 2, ..widths };
                assert_eq!(huge.attended_bytes(), None);
                assert!(Buffers::new(huge, Stream::cpu()).is_err());
            }
        }
    }
}
