//! A small model for tests: a real cache, an engine, a paged resource, and inputs that are a function of stream and
//! position alone, so that any row can be checked whatever batch it ran in.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BuildContext, Softmax};
use mstar_core::graph::Bucket;
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, KvPlan, PagedKv, PagedKvCache};
use mstar_core::resource::{EngineOptions, PaddedShape};
use mstar_core::spec::{Fallback, KernelFamily, Schedule};
use mstar_core::step::{AttentionStep, Declaration, KvStep};
use mstar_core::{
    AttnOut, Engine, Ingest, Label, PlanId, PlannedStep, Query, RequestId, Resource, Segment, Step,
};
use mstar_kernels::reference::paged::{Cache, Options, Paged, paged};
use mstar_kernels::synth::{Kind, ROOT, chain, fill};
use mstar_kernels::{DType, Stream, TensorMut, TensorRef};

use crate::{PagedAttention, PagedOptions};

/// Query heads of every rig.
pub(crate) const H: usize = 4;
/// Key heads.
pub(crate) const G: usize = 2;
/// Width.
pub(crate) const D: usize = 32;
/// Layers.
pub(crate) const L: usize = 2;

/// One row's results, layer after layer, as bits: `o` `[q, H, D]` then `lse` `[q, H]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowOut {
    pub(crate) request: RequestId,
    pub(crate) label: Label,
    pub(crate) layers: Vec<(Vec<f32>, Vec<f32>)>,
}

impl RowOut {
    /// Equal to the bit, NaN and signs of zero included.
    pub(crate) fn same_bits(&self, other: &RowOut) -> bool {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        self.layers.len() == other.layers.len()
            && self
                .layers
                .iter()
                .zip(&other.layers)
                .all(|(a, b)| bits(&a.0) == bits(&b.0) && bits(&a.1) == bits(&b.1))
    }
}

/// The model.
pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) kv: Arc<PagedKvCache>,
    pub(crate) attn: Arc<PagedAttention>,
    pub(crate) softmax: Softmax,
}

/// A cache of `pages` pages of `page_size` slots.
pub(crate) fn config(page_size: usize, pages: usize) -> KvConfig {
    let layout = KvLayout::Nhd { num_kv_heads: G, head_dim: D };
    KvConfig { num_layers: L, ..KvConfig::new(layout, DType::F32, page_size, pages) }
}

/// What a resource over `kv` is built with.
pub(crate) fn context(name: &str, kv: &Arc<PagedKvCache>, softmax: &Softmax) -> BuildContext {
    BuildContext {
        name: name.into(),
        geometry: AttnGeometry::over(kv.config(), H, DType::F32, softmax.clone()),
        stream: Stream::cpu(),
        kv_cache: Some(Arc::clone(kv) as Arc<dyn PagedKv>),
        ring: None,
        query_from: None,
        slots: 2,
        largest: None,
        schedule: Schedule::Invariant,
        kernels: KernelFamily::Auto,
        fallback: Fallback::Refuse,
    }
}

impl Rig {
    pub(crate) fn new(page_size: usize, pages: usize) -> Rig {
        Rig::with(config(page_size, pages), Softmax::scaled(0.25), PagedOptions::default(), true)
    }

    pub(crate) fn with(config: KvConfig, softmax: Softmax, options: PagedOptions, preplan: bool) -> Rig {
        let kv = Arc::new(PagedKvCache::new("kv".into(), config).unwrap());
        let attn = Arc::new(PagedAttention::new(&context("attn", &kv, &softmax), options).unwrap());
        let resources: Vec<Arc<dyn Resource>> = vec![Arc::clone(&attn) as _, Arc::clone(&kv) as _];
        let engine =
            Engine::with_options(resources, EngineOptions { preplan, ..Default::default() }).unwrap();
        Rig { engine, kv, attn, softmax }
    }

    pub(crate) fn ingest(&self, requests: &[&str]) {
        for request in requests {
            self.engine.ingest(&Ingest::new((*request).into())).unwrap();
        }
    }

    /// A planned step, eager or in a bucket.
    pub(crate) fn planned(&self, step: Step, bucket: Option<PaddedShape>) -> PlannedStep {
        let admission = match bucket {
            None => self.engine.admit(step),
            Some(shape) => self.engine.admit_in(step, &Bucket { walk: "decode".into(), shape }),
        };
        self.engine.plan(admission.unwrap().admitted().unwrap()).unwrap()
    }

    /// One whole step over `rows` of (request, tokens), kept.
    pub(crate) fn step(&self, rows: &[(&str, usize)], bucket: Option<PaddedShape>) -> Vec<RowOut> {
        let planned = self.planned(step(rows), bucket);
        let out = self.forward(&planned, "main");
        self.engine.commit(planned).unwrap();
        out
    }

    /// Every layer of one plan label. Padding is fed NaN, and outputs start as NaN.
    pub(crate) fn forward(&self, planned: &PlannedStep, label: &str) -> Vec<RowOut> {
        let stream = Stream::cpu();
        let mut forward = planned.forward(label, &stream);
        let plan = self.kv.kv_plan(forward.plan_id()).unwrap();
        let keys = token_keys(&plan);
        let mut outs: Vec<RowOut> = Vec::new();
        for row in &plan.rows[..plan.real_rows] {
            outs.push(RowOut { request: row.request.clone(), label: row.label.clone(), layers: vec![] });
        }
        for layer in 0..L {
            forward.set_layer(layer);
            let k = inputs(Kind::Key, layer, &keys, G);
            let v = inputs(Kind::Value, layer, &keys, G);
            let q = inputs(Kind::Query, layer, &keys, H);
            let tokens = keys.len();
            let (mut o, mut lse) = (vec![f32::NAN; tokens * H * D], vec![f32::NAN; tokens * H]);
            let kv_shape = [tokens, G, D];
            let fresh = KvEntries::Nhd {
                k: TensorRef::from_slice(&k, &kv_shape).unwrap(),
                v: TensorRef::from_slice(&v, &kv_shape).unwrap(),
            };
            let query = Query::Heads(TensorRef::from_slice(&q, &[tokens, H, D]).unwrap());
            let out = AttnOut {
                o: TensorMut::from_slice(&mut o, &[tokens, H, D]).unwrap(),
                lse: Some(TensorMut::from_slice(&mut lse, &[tokens, H]).unwrap()),
            };
            mstar_core::attend::attend(&*self.attn, &mut forward, query, Some(fresh), out).unwrap();
            split(&plan, &o, &lse, &mut outs);
        }
        outs
    }

    /// The bytes of every layer's pages.
    pub(crate) fn pool(&self) -> Vec<f32> {
        pool(&self.kv)
    }

    /// What the oracle says of a row that ends at `kv_len`: `o` and `lse` of layer `layer`.
    pub(crate) fn oracle(
        &self,
        request: &str,
        q_len: usize,
        kv_len: usize,
        layer: usize,
    ) -> (Vec<f64>, Vec<f64>) {
        let softmax = &self.softmax;
        let options = Options {
            window_left: softmax.window_left.map_or(-1, |left| left as i64),
            logits_soft_cap: softmax.logits_soft_cap.map_or(0.0, f64::from),
            sinks: softmax.sinks.as_ref().map(|sinks| &sinks[layer * H..(layer + 1) * H]),
            alibi_slopes: softmax.alibi_slopes.as_deref(),
            ..Options::default()
        };
        oracle(request, "main", q_len, kv_len, layer, true, f64::from(softmax.sm_scale), options)
    }
}

/// Rows of (request, tokens) on `main`.
pub(crate) fn step(rows: &[(&str, usize)]) -> Step {
    let segments = rows.iter().map(|&(request, span)| segment(request, "main", span)).collect();
    Step::new("decode").with("kv", Declaration::Kv(KvStep { segments, ..KvStep::default() }))
}

pub(crate) fn segment(request: &str, label: &str, span: usize) -> Segment {
    Segment { request: request.into(), label: label.into(), span, tokens: [].into() }
}

/// The step with something said to the attention resource `name`.
pub(crate) fn saying(step: Step, name: &str, attention: AttentionStep) -> Step {
    step.with(name, Declaration::Attention(attention))
}

/// The content key of a stream's position.
pub(crate) fn key(request: &str, label: &str, position: usize) -> u64 {
    let name = format!("{request}/{label}").bytes().fold(ROOT, |key, byte| chain(key, u64::from(byte)));
    chain(name, position as u64)
}

/// `[T]`: each token's key; `None` for padding.
pub(crate) fn token_keys(plan: &KvPlan) -> Vec<Option<u64>> {
    let mut keys = Vec::new();
    for (index, row) in plan.rows.iter().enumerate() {
        for position in (row.kv_len - row.q_len.min(row.kv_len))..row.kv_len {
            keys.push(Some(key(row.request.as_str(), row.label.as_str(), position)));
        }
        keys.resize(plan.qo_indptr[index + 1] as usize, None);
    }
    keys
}

/// `[T, heads, D]`; NaN for padding.
pub(crate) fn inputs(kind: Kind, layer: usize, keys: &[Option<u64>], heads: usize) -> Vec<f32> {
    let plain: Vec<u64> = keys.iter().map(|key| key.unwrap_or(0)).collect();
    let mut values = vec![0f32; keys.len() * heads * D];
    let mut view = TensorMut::from_slice(&mut values, &[keys.len(), heads, D]).unwrap();
    fill(7, kind, layer, &plain, &mut view).unwrap();
    for (token, key) in keys.iter().enumerate() {
        if key.is_none() {
            values[token * heads * D..(token + 1) * heads * D].fill(f32::NAN);
        }
    }
    values
}

/// Gives each real row its part of a layer's outputs, and checks that padding is 0 and `-inf`.
pub(crate) fn split(plan: &KvPlan, o: &[f32], lse: &[f32], outs: &mut [RowOut]) {
    for index in 0..plan.rows.len() {
        let (begin, end) = (plan.qo_indptr[index] as usize, plan.qo_indptr[index + 1] as usize);
        let (o, lse) = (&o[begin * H * D..end * H * D], &lse[begin * H..end * H]);
        match outs.get_mut(index) {
            Some(out) => out.layers.push((o.to_vec(), lse.to_vec())),
            None => {
                assert!(
                    o.iter().all(|x| x.to_bits() == 0),
                    "f17: a padded row leaves something in the output"
                );
                assert!(lse.iter().all(|x| *x == f32::NEG_INFINITY), "f17: a padded row has an lse");
            }
        }
    }
}

pub(crate) fn pool(kv: &PagedKvCache) -> Vec<f32> {
    let mut all = Vec::new();
    for layer in 0..kv.config().num_layers {
        let mstar_core::kv::LayerView::Nhd { k, v } = kv.layer(layer).unwrap() else { unreachable!() };
        for (view, page) in [k, v].iter().flat_map(|view| (0..view.shape()[0]).map(move |page| (*view, page)))
        {
            all.extend_from_slice(view.select(0, page).unwrap().as_slice::<f32>().unwrap());
        }
    }
    all
}

/// The oracle over a stream's own positions, laid side by side.
pub(crate) fn oracle(
    request: &str,
    label: &str,
    q_len: usize,
    kv_len: usize,
    layer: usize,
    causal: bool,
    sm_scale: f64,
    options: Options<'_>,
) -> (Vec<f64>, Vec<f64>) {
    let keys: Vec<Option<u64>> = (0..kv_len).map(|position| Some(key(request, label, position))).collect();
    let (k, v) = (inputs(Kind::Key, layer, &keys, G), inputs(Kind::Value, layer, &keys, G));
    let q = inputs(Kind::Query, layer, &keys[kv_len - q_len..], H);
    over(&q, &k, &v, q_len, kv_len, causal, sm_scale, options)
}

/// The oracle over keys and values laid side by side.
pub(crate) fn over(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    q_len: usize,
    kv_len: usize,
    causal: bool,
    sm_scale: f64,
    options: Options<'_>,
) -> (Vec<f64>, Vec<f64>) {
    let pages = usize::from(kv_len > 0) as i32;
    let attended = paged(&Paged {
        q,
        cache: Cache::Split { k, v },
        qo_indptr: &[0, q_len as i32],
        kv_indptr: &[0, pages],
        kv_indices: &[0][..pages as usize],
        kv_last_page_len: &[kv_len as i32],
        num_qo_heads: H,
        num_kv_heads: G,
        head_dim_qk: D,
        head_dim_vo: D,
        page_size: kv_len.max(1),
        sm_scale,
        causal,
        options,
    })
    .unwrap();
    (attended.o, attended.lse)
}

/// Relative L2 error over finite entries below `1e-6`, infinities equal.
pub(crate) fn close(got: &[f32], want: &[f64]) -> bool {
    let (mut difference, mut norm) = (0f64, 0f64);
    for (&got, &want) in got.iter().zip(want) {
        if !want.is_finite() || !got.is_finite() {
            if f64::from(got) != want {
                return false;
            }
            continue;
        }
        difference += (f64::from(got) - want).powi(2);
        norm += want * want;
    }
    got.len() == want.len() && difference.sqrt() <= 1e-6 * norm.sqrt()
}

/// The plan of a label, from a step in hand.
pub(crate) fn plan_id(planned: &PlannedStep, label: &str) -> PlanId {
    PlanId { slot: planned.slot(), label: label.into(), serial: planned.serial() }
}
