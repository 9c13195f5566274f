//! What a layer is fed: a function of a stream's content, in the rig's dtype.

use half::{bf16, f16};
use mstar_core::attend::{IndexFormat, Indexed, SparseAttention, attend_sparse};
use mstar_core::kv::{KvEntries, KvPlan};
use mstar_core::{AttnOut, Forward, Query};
use mstar_kernels::synth::{Kind, ROOT, chain, fill};
use mstar_kernels::{Buffer, DType, TensorMut, TensorRef};

use super::{C, DI, E, H, HI, Rig};

impl Rig {
    /// What the indexer is fed, as f32; NaN for padding.
    pub(super) fn index_raw(&self, layer: usize, keys: &[Option<u64>], first: usize) -> IndexValues {
        let mut values = IndexValues {
            q: synthetic(Kind::IndexQuery, layer, keys, HI, DI),
            keys: synthetic(Kind::IndexKey, layer, keys, 1, DI),
            weights: synthetic(Kind::IndexWeight, layer, keys, HI, 1),
        };
        if let Some(own) = &self.index_inputs {
            for (token, _) in keys.iter().enumerate().filter(|(_, key)| key.is_some()) {
                own(Kind::IndexQuery, first + token, &mut values.q[token * HI * DI..][..HI * DI]);
                own(Kind::IndexKey, first + token, &mut values.keys[token * DI..][..DI]);
                own(Kind::IndexWeight, first + token, &mut values.weights[token * HI..][..HI]);
            }
        }
        values
    }

    /// The same, with keys as they come back from their format.
    pub(super) fn index_values(&self, layer: usize, keys: &[Option<u64>], first: usize) -> IndexValues {
        self.index_raw(layer, keys, first).read_back(self.setup.format)
    }
}

/// Values of some tokens, `[T, Hi, Di]`, `[T, Di]` and `[T, Hi]`.
pub(super) struct IndexValues {
    pub(super) q: Vec<f32>,
    pub(super) keys: Vec<f32>,
    pub(super) weights: Vec<f32>,
}

impl IndexValues {
    fn read_back(mut self, format: IndexFormat) -> IndexValues {
        if format == IndexFormat::Fp8 {
            let tokens = self.keys.len() / DI;
            let mut stored = vec![0u8; tokens * (DI + 4)];
            let view = TensorRef::from_slice(&self.keys, &[tokens, DI]).unwrap();
            let to = TensorMut::from_slice(&mut stored, &[tokens, DI + 4]).unwrap();
            mstar_dsa::quantise_keys(view, to).unwrap();
            for (at, value) in self.keys.iter_mut().enumerate() {
                *value = mstar_dsa::dequantise_key(&stored[at / DI * (DI + 4)..], DI, at % DI);
            }
        }
        self
    }
}

/// One layer's tensors, in memory that stays.
pub(crate) struct Inputs {
    tokens: usize,
    latent: Buffer,
    pub(super) q: Buffer,
    index_q: Buffer,
    index_keys: Buffer,
    weights: Buffer,
}

impl Inputs {
    pub(crate) fn new(rig: &Rig, tokens: usize) -> Inputs {
        let dtype = rig.setup.dtype;
        let buffer = |dtype, width: usize| Buffer::for_tensor(dtype, &[tokens, width]).unwrap();
        Inputs {
            tokens,
            latent: buffer(dtype, C + E),
            q: buffer(dtype, H * (C + E)),
            index_q: buffer(dtype, HI * DI),
            index_keys: buffer(dtype, DI),
            weights: buffer(DType::F32, HI),
        }
    }

    pub(super) fn fill(&mut self, rig: &Rig, layer: usize, keys: &[Option<u64>], plan: &KvPlan) {
        let dtype = rig.setup.dtype;
        store(&mut self.latent, dtype, &synthetic(Kind::Latent, layer, keys, 1, C + E));
        store(&mut self.q, dtype, &synthetic(Kind::Query, layer, keys, H, C + E));
        // Rows lie at positions of their own; the custom inputs go by position.
        let mut values = IndexValues { q: vec![], keys: vec![], weights: vec![] };
        for (index, row) in plan.rows.iter().enumerate() {
            let span = plan.qo_indptr[index] as usize..plan.qo_indptr[index + 1] as usize;
            let first = row.kv_len - row.q_len.min(row.kv_len);
            let of = rig.index_raw(layer, &keys[span], first);
            values.q.extend(of.q);
            values.keys.extend(of.keys);
            values.weights.extend(of.weights);
        }
        let rest = self.tokens - values.keys.len() / DI;
        values.q.resize(values.q.len() + rest * HI * DI, f32::NAN);
        values.keys.resize(values.keys.len() + rest * DI, f32::NAN);
        values.weights.resize(values.weights.len() + rest * HI, f32::NAN);
        store(&mut self.index_q, dtype, &values.q);
        store(&mut self.index_keys, dtype, &values.keys);
        store(&mut self.weights, DType::F32, &values.weights);
    }

    /// The layer, as a model calls it. Allocates nothing but what the resources do.
    pub(crate) fn attend(&self, rig: &Rig, forward: &mut Forward<'_>, o: &mut Buffer, lse: &mut [f32]) {
        let (t, dtype) = (self.tokens, rig.setup.dtype);
        let latent = self.latent.tensor(0, dtype, &[t, C + E]).unwrap();
        let fresh =
            KvEntries::Mla { ckv: latent.narrow(1, 0, C).unwrap(), kpe: latent.narrow(1, C, E).unwrap() };
        let q = self.q.tensor(0, dtype, &[t, H, C + E]).unwrap();
        let query = Query::Absorbed { nope: q.narrow(2, 0, C).unwrap(), pe: q.narrow(2, C, E).unwrap() };
        let indexed = rig.dsa.index().is_full(forward.layer()).then(|| self.indexed(rig));
        let out = AttnOut {
            o: o.tensor_mut(0, dtype, &[t, H, C]).unwrap(),
            lse: Some(TensorMut::from_slice(lse, &[t, H]).unwrap()),
        };
        attend_sparse(&*rig.dsa, None, forward, query, Some(fresh), indexed, out).unwrap();
    }

    pub(crate) fn indexed(&self, rig: &Rig) -> Indexed<'_> {
        let (t, dtype) = (self.tokens, rig.setup.dtype);
        Indexed {
            keys: self.index_keys.tensor(0, dtype, &[t, DI]).unwrap(),
            q: self.index_q.tensor(0, dtype, &[t, HI, DI]).unwrap(),
            weights: self.weights.tensor(0, DType::F32, &[t, HI]).unwrap(),
        }
    }
}

/// The content key of each position.
pub(super) fn chained(tokens: &[u64]) -> Vec<u64> {
    let mut key = ROOT;
    tokens
        .iter()
        .map(|&token| {
            key = chain(key, token);
            key
        })
        .collect()
}

/// `[T, heads, width]` f32; NaN where there is no key.
pub(super) fn synthetic(
    kind: Kind,
    layer: usize,
    keys: &[Option<u64>],
    heads: usize,
    width: usize,
) -> Vec<f32> {
    let plain: Vec<u64> = keys.iter().map(|key| key.unwrap_or(0)).collect();
    let mut values = vec![0f32; keys.len() * heads * width];
    let mut view = TensorMut::from_slice(&mut values, &[keys.len(), heads, width]).unwrap();
    fill(7, kind, layer, &plain, &mut view).unwrap();
    for (token, _) in keys.iter().enumerate().filter(|(_, key)| key.is_none()) {
        values[token * heads * width..(token + 1) * heads * width].fill(f32::NAN);
    }
    values
}

/// Rounds values into a buffer.
fn store(buffer: &mut Buffer, dtype: DType, values: &[f32]) {
    let mut view = buffer.tensor_mut(0, dtype, &[values.len()]).unwrap();
    match dtype {
        DType::F32 => view.as_mut_slice::<f32>().unwrap().copy_from_slice(values),
        DType::Bf16 => {
            let to = view.as_mut_slice::<bf16>().unwrap();
            to.iter_mut().zip(values).for_each(|(to, &x)| *to = bf16::from_f32(x));
        }
        _ => {
            let to = view.as_mut_slice::<f16>().unwrap();
            to.iter_mut().zip(values).for_each(|(to, &x)| *to = f16::from_f32(x));
        }
    }
}

pub(super) fn floats(buffer: &Buffer, dtype: DType) -> Vec<f32> {
    let view = buffer.tensor(0, dtype, &[buffer.len() / dtype.size()]).unwrap();
    match dtype {
        DType::F32 => view.as_slice::<f32>().unwrap().to_vec(),
        DType::Bf16 => view.as_slice::<bf16>().unwrap().iter().map(|x| x.to_f32()).collect(),
        _ => view.as_slice::<f16>().unwrap().iter().map(|x| x.to_f32()).collect(),
    }
}

pub(super) fn bytes(view: TensorRef<'_>) -> Vec<u8> {
    let mut all = Vec::new();
    for page in 0..view.shape()[0] {
        let page = view.select(0, page).unwrap();
        match page.dtype() {
            DType::F32 => page.as_slice::<f32>().unwrap().iter().for_each(|x| all.extend(x.to_ne_bytes())),
            DType::Bf16 => page.as_slice::<bf16>().unwrap().iter().for_each(|x| all.extend(x.to_ne_bytes())),
            DType::F16 => page.as_slice::<f16>().unwrap().iter().for_each(|x| all.extend(x.to_ne_bytes())),
            _ => all.extend_from_slice(page.as_slice::<u8>().unwrap()),
        }
    }
    all
}
