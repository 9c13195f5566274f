//! One forward's queries, keys, values and outputs, in memory that every layer and step reuses.

use mstar_core::attend::StepShape;
use mstar_core::kv::KvLayout;
use mstar_core::spec::Spec;
use mstar_kernels::synth::{self, Exact, Kind};
use mstar_kernels::{Buffer, DType, TensorMut, TensorRef};
use rayon::prelude::*;

use super::script;
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
    /// `G`.
    pub(crate) num_kv_heads: usize,
    /// `D`, of keys and of values.
    pub(crate) head_dim: usize,
    /// Element type.
    pub(crate) dtype: DType,
}

impl Widths {
    /// The widths of a run; `None` where the spec has no cache of heads or no workload.
    pub(crate) fn of(spec: &Spec, requests: &[RequestPlan]) -> Option<Widths> {
        let (_, kv) = spec.caches().next()?;
        let KvLayout::Nhd { num_kv_heads, head_dim } = kv.config.layout else { return None };
        let heads = spec.model.rank_heads(spec.world_size).ok()?;
        // Buckets have one token a row, and all of them are warmed up.
        let padded = spec.graph.as_ref().and_then(|graph| graph.buckets.last().copied()).unwrap_or(0);
        Some(Widths {
            tokens: largest_step(spec, requests)?.tokens.max(padded),
            num_qo_heads: heads.num_qo_heads,
            num_kv_heads,
            head_dim,
            dtype: spec.dtype,
        })
    }

    /// Bytes that [`Buffers::new`] allocates: `q`, `o` `[T, H, D]`, `k`, `v` `[T, G, D]`, `lse` `[T, H]` f32.
    pub(crate) fn bytes(&self) -> Option<usize> {
        let heads = self.num_qo_heads.checked_add(self.num_kv_heads)?.checked_mul(2)?;
        let token = heads.checked_mul(self.head_dim)?.checked_mul(self.dtype.size())?;
        self.tokens.checked_mul(token.checked_add(self.num_qo_heads.checked_mul(4)?)?)
    }
}

/// The largest step of a run of `requests`, without what pads it to a bucket: rows that see no key, and need no scratch.
/// `None` without a workload.
///
/// One step holds at most `chunked_prefill` prompt tokens (or one encoder's context), and beside them one turn of
/// every active request on each of its streams.
pub(crate) fn largest_step(spec: &Spec, requests: &[RequestPlan]) -> Option<StepShape> {
    let workload = spec.workload.as_ref()?;
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

/// The memory.
pub(crate) struct Buffers {
    widths: Widths,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    o: Buffer,
    lse: Buffer,
}

/// Which array is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fresh {
    /// `q`.
    Query,
    /// `k`.
    Key,
    /// `v`.
    Value,
}

impl Buffers {
    /// Room for `widths`.
    pub(crate) fn new(widths: Widths) -> mstar_kernels::Result<Buffers> {
        let Widths { tokens, num_qo_heads, num_kv_heads, head_dim, dtype } = widths;
        let q = [tokens, num_qo_heads, head_dim];
        let k = [tokens, num_kv_heads, head_dim];
        Ok(Buffers {
            widths,
            q: Buffer::for_tensor(dtype, &q)?,
            k: Buffer::for_tensor(dtype, &k)?,
            v: Buffer::for_tensor(dtype, &k)?,
            o: Buffer::for_tensor(dtype, &q)?,
            lse: Buffer::for_tensor(DType::F32, &q[..2])?,
        })
    }

    /// Query tokens that fit.
    pub(crate) fn tokens(&self) -> usize {
        self.widths.tokens
    }

    /// Generates one array for the positions whose content keys are `keys` `[T]`, in the current rayon pool.
    pub(crate) fn generate(
        &mut self,
        which: Fresh,
        seed: u64,
        layer: usize,
        keys: &[u64],
    ) -> mstar_kernels::Result<()> {
        let Widths { num_qo_heads, num_kv_heads, head_dim, dtype, .. } = self.widths;
        let (buffer, kind, heads) = match which {
            Fresh::Query => (&mut self.q, Kind::Query, num_qo_heads),
            Fresh::Key => (&mut self.k, Kind::Key, num_kv_heads),
            Fresh::Value => (&mut self.v, Kind::Value, num_kv_heads),
        };
        let view = buffer.tensor_mut(0, dtype, &[keys.len(), heads, head_dim])?;
        let shape = [heads, head_dim];
        match dtype {
            DType::Bf16 => fill::<half::bf16>(seed, kind, layer, keys, shape, view),
            DType::F16 => fill::<half::f16>(seed, kind, layer, keys, shape, view),
            _ => fill::<f32>(seed, kind, layer, keys, shape, view),
        }
    }

    /// `q` `[T, H, D]`, `k` and `v` `[T, G, D]` to read, `o` `[T, H, D]` and `lse` `[T, H]` to write.
    #[allow(clippy::type_complexity, reason = "five views of one forward, named where they are taken")]
    pub(crate) fn views(
        &mut self,
        tokens: usize,
    ) -> mstar_kernels::Result<(TensorRef<'_>, TensorRef<'_>, TensorRef<'_>, TensorMut<'_>, TensorMut<'_>)>
    {
        let Widths { num_qo_heads, num_kv_heads, head_dim, dtype, .. } = self.widths;
        let (q, k) = ([tokens, num_qo_heads, head_dim], [tokens, num_kv_heads, head_dim]);
        Ok((
            self.q.tensor(0, dtype, &q)?,
            self.k.tensor(0, dtype, &k)?,
            self.v.tensor(0, dtype, &k)?,
            self.o.tensor_mut(0, dtype, &q)?,
            self.lse.tensor_mut(0, DType::F32, &q[..2])?,
        ))
    }

    /// What the last layer wrote: `o` as bytes and as a view, `lse`.
    pub(crate) fn written(&self, tokens: usize) -> mstar_kernels::Result<Written<'_>> {
        let Widths { num_qo_heads, head_dim, dtype, .. } = self.widths;
        let elements = tokens * num_qo_heads * head_dim;
        let bytes = self.o.tensor(0, DType::U8, &[elements * dtype.size()])?;
        let lse = self.lse.tensor(0, DType::F32, &[tokens * num_qo_heads])?;
        Ok(Written {
            o: self.o.tensor(0, dtype, &[elements])?,
            bytes: bytes.as_slice().expect("a contiguous view of bytes"),
            lse: lse.as_slice().expect("a contiguous view of f32"),
            vector: num_qo_heads * head_dim,
            heads: num_qo_heads,
        })
    }
}

/// One layer's output.
#[derive(Clone, Copy)]
pub(crate) struct Written<'a> {
    /// `[T * H * D]`.
    pub(crate) o: TensorRef<'a>,
    /// The same, as bytes.
    pub(crate) bytes: &'a [u8],
    /// `[T * H]`.
    pub(crate) lse: &'a [f32],
    /// `H * D`: elements of one token.
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

    #[test]
    fn generated_arrays_are_what_the_oracle_reads() {
        let widths =
            Widths { tokens: 100, num_qo_heads: 4, num_kv_heads: 2, head_dim: 16, dtype: DType::Bf16 };
        let mut buffers = Buffers::new(widths).unwrap();
        let keys: Vec<u64> = (0..70).map(|t| synth::chain(synth::ROOT, t)).collect();
        for which in [Fresh::Query, Fresh::Key, Fresh::Value] {
            buffers.generate(which, 3, 1, &keys).unwrap();
        }
        let (q, k, v, _, _) = buffers.views(70).unwrap();
        for (view, kind, heads) in [(q, Kind::Query, 4), (k, Kind::Key, 2), (v, Kind::Value, 2)] {
            let all = view.as_slice::<half::bf16>().unwrap();
            for (t, head, lane) in [(0, 0, 0), (33, heads - 1, 15), (69, 1, 7)] {
                let want = synth::element(3, kind, 1, keys[t], head, lane);
                assert_eq!(all[(t * heads + head) * 16 + lane].to_f32(), want);
            }
        }
    }

    #[test]
    fn bytes_are_what_is_allocated() {
        let widths = Widths { tokens: 7, num_qo_heads: 6, num_kv_heads: 3, head_dim: 5, dtype: DType::F32 };
        let buffers = Buffers::new(widths).unwrap();
        let held = [&buffers.q, &buffers.k, &buffers.v, &buffers.o, &buffers.lse].map(Buffer::len);
        assert_eq!(widths.bytes(), Some(held.iter().sum()));
        let huge = Widths { tokens: usize::MAX / 2, ..widths };
        assert_eq!(huge.bytes(), None);
        assert!(Buffers::new(huge).is_err());
    }
}
