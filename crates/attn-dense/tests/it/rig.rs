//! A real cache, an engine and dense attention over it. What a layer brings is a function of request, label, step and
//! position; what a stream holds is what the last step that kept it brought, so that the oracle needs no page.

use std::collections::BTreeMap;
use std::sync::Arc;

use mstar_attn_dense::{DType, DenseAttention, DenseOptions, Stream, TensorMut, TensorRef};
use mstar_core::attend::{AttnGeometry, BuildContext, Softmax, StepShape};
use mstar_core::graph::Bucket;
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, KvPlan, LayerView, PagedKv, PagedKvCache};
use mstar_core::resource::{EngineOptions, PaddedShape};
use mstar_core::spec::{Fallback, KernelFamily, Schedule};
use mstar_core::step::{Declaration, Fork, KvStep};
use mstar_core::{
    AttnOut, Engine, Ingest, Label, PlanId, PlannedStep, Query, RequestId, Resource, Segment, Step,
};
use mstar_kernels::reference::dense::{Dense, dense};

pub(crate) const H: usize = 4;
pub(crate) const G: usize = 2;
pub(crate) const D: usize = 16;
pub(crate) const L: usize = 2;
pub(crate) const SCALE: f32 = 0.3;

/// A hash of integers as a number in -1..1.
pub(crate) fn noise(parts: &[u64]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for &part in parts {
        x = (x ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
    }
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// One token of `heads` heads, by its content, for a layer; `kind` is 0 for q, 1 for k, 2 for v.
pub(crate) fn token(content: u64, layer: usize, kind: u64, heads: usize) -> Vec<f32> {
    (0..heads * D).map(|lane| 1.5 * noise(&[content, layer as u64, kind, lane as u64])).collect()
}

/// One row's results: for each layer `o` `[q, H, D]` and `lse` `[q, H]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowOut {
    pub(crate) stream: (RequestId, Label),
    pub(crate) layers: Vec<(Vec<f32>, Vec<f32>)>,
}

impl RowOut {
    pub(crate) fn bits(&self) -> Vec<u32> {
        self.layers.iter().flat_map(|(o, lse)| o.iter().chain(lse)).map(|x| x.to_bits()).collect()
    }
}

pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) kv: Arc<PagedKvCache>,
    pub(crate) attn: Arc<DenseAttention>,
    causal: bool,
    /// Content of every stored token, by stream.
    pub(crate) stored: std::cell::RefCell<BTreeMap<(RequestId, Label), Vec<u64>>>,
}

pub(crate) fn config(page_size: usize, pages: usize) -> KvConfig {
    let layout = KvLayout::Nhd { num_kv_heads: G, head_dim: D };
    KvConfig { num_layers: L, ..KvConfig::new(layout, DType::F32, page_size, pages) }
}

pub(crate) fn build_context(kv: &Arc<PagedKvCache>, largest: Option<StepShape>) -> BuildContext {
    BuildContext {
        name: "attn".into(),
        geometry: AttnGeometry::over(kv.config(), H, DType::F32, Softmax::scaled(SCALE)),
        stream: Stream::cpu(),
        kv_cache: Some(Arc::clone(kv) as Arc<dyn PagedKv>),
        ring: None,
        query_from: None,
        slots: 2,
        largest,
        schedule: Schedule::Invariant,
        kernels: KernelFamily::Auto,
        fallback: Fallback::Refuse,
    }
}

impl Rig {
    pub(crate) fn new(options: DenseOptions) -> Rig {
        Rig::with(config(4, 64), options, None)
    }

    pub(crate) fn with(config: KvConfig, options: DenseOptions, largest: Option<StepShape>) -> Rig {
        let kv = Arc::new(PagedKvCache::new("kv".into(), config).unwrap());
        let attn = Arc::new(DenseAttention::new(&build_context(&kv, largest), options).unwrap());
        let resources: Vec<Arc<dyn Resource>> = vec![attn.clone(), kv.clone()];
        let engine_options = EngineOptions { slots: 2, preplan: true, ..EngineOptions::default() };
        let engine = Engine::with_options(resources, engine_options).unwrap();
        Rig { engine, kv, attn, causal: options.causal, stored: Default::default() }
    }

    pub(crate) fn ingest(&self, requests: &[&str]) {
        for request in requests {
            self.engine.ingest(&Ingest::new((*request).into())).unwrap();
        }
    }

    pub(crate) fn planned(&self, step: Step, bucket: Option<PaddedShape>) -> PlannedStep {
        let admission = match bucket {
            None => self.engine.admit(step),
            Some(shape) => self.engine.admit_in(step, &Bucket { walk: "denoise".into(), shape }),
        };
        self.engine.plan(admission.unwrap().admitted().unwrap()).unwrap()
    }

    /// A whole step with `seed` as the content of its tokens; held to the oracle, row by row.
    pub(crate) fn step(&self, step: Step, seed: u64) -> Vec<RowOut> {
        self.step_in(step, seed, None)
    }

    pub(crate) fn step_in(&self, step: Step, seed: u64, bucket: Option<PaddedShape>) -> Vec<RowOut> {
        let planned = self.planned(step.clone(), bucket);
        self.finish(planned, &step, seed)
    }

    /// Runs, checks and commits a planned step.
    pub(crate) fn finish(&self, planned: PlannedStep, step: &Step, seed: u64) -> Vec<RowOut> {
        self.note_forks(step);
        let outs = self.forward(&planned, seed);
        self.check(step, seed, &outs);
        self.note(step, seed);
        self.engine.commit(planned).unwrap();
        outs
    }

    /// What pre-forks leave in the model.
    pub(crate) fn note_forks(&self, step: &Step) {
        let mut stored = self.stored.borrow_mut();
        for Fork { request, from, to } in &step.kv(&"kv".into()).unwrap().pre_forks {
            let copied = stored.get(&(request.clone(), from.clone())).cloned().unwrap_or_default();
            stored.insert((request.clone(), to.clone()), copied);
        }
    }

    /// What a kept step leaves in the model.
    pub(crate) fn note(&self, step: &Step, seed: u64) {
        let declared = step.kv(&"kv".into()).unwrap();
        if !declared.commit {
            return;
        }
        let mut stored = self.stored.borrow_mut();
        for segment in &declared.segments {
            let stream = stored.entry((segment.request.clone(), segment.label.clone())).or_default();
            for _ in 0..segment.span {
                stream.push(content(&segment.request, &segment.label, stream.len(), seed));
            }
        }
    }

    /// Every layer of every plan label. Padding is fed NaN, and outputs start as NaN.
    pub(crate) fn forward(&self, planned: &PlannedStep, seed: u64) -> Vec<RowOut> {
        let mut outs = Vec::new();
        for label in self.kv.plan_labels(planned.serial()).unwrap() {
            outs.extend(self.forward_label(planned, label.as_str(), seed));
        }
        outs
    }

    fn forward_label(&self, planned: &PlannedStep, label: &str, seed: u64) -> Vec<RowOut> {
        let stream = Stream::cpu();
        let mut forward = planned.forward(label, &stream);
        let plan = self.kv.kv_plan(forward.plan_id()).unwrap();
        let contents = contents(&plan, seed);
        let tokens = contents.len();
        let mut outs: Vec<RowOut> = plan.rows[..plan.real_rows]
            .iter()
            .map(|row| RowOut { stream: (row.request.clone(), row.label.clone()), layers: vec![] })
            .collect();
        for layer in 0..L {
            forward.set_layer(layer);
            let packed = |kind: u64, heads: usize| -> Vec<f32> {
                let token = |content: &Option<u64>| match content {
                    Some(content) => token(*content, layer, kind, heads),
                    None => vec![f32::NAN; heads * D],
                };
                contents.iter().flat_map(token).collect()
            };
            let (q, k, v) = (packed(0, H), packed(1, G), packed(2, G));
            let (mut o, mut lse) = (vec![f32::NAN; tokens * H * D], vec![f32::NAN; tokens * H]);
            let out = AttnOut {
                o: TensorMut::from_slice(&mut o, &[tokens, H, D]).unwrap(),
                lse: Some(TensorMut::from_slice(&mut lse, &[tokens, H]).unwrap()),
            };
            let q = Query::Heads(TensorRef::from_slice(&q, &[tokens, H, D]).unwrap());
            let view = |x| TensorRef::from_slice(x, &[tokens, G, D]).unwrap();
            let fresh = KvEntries::Nhd { k: view(&k), v: view(&v) };
            mstar_core::attend::attend(&*self.attn, &mut forward, q, Some(fresh), out).unwrap();
            for index in 0..plan.rows.len() {
                let (begin, end) = (plan.qo_indptr[index] as usize, plan.qo_indptr[index + 1] as usize);
                let (o, lse) = (&o[begin * H * D..end * H * D], &lse[begin * H..end * H]);
                match outs.get_mut(index) {
                    Some(out) => out.layers.push((o.to_vec(), lse.to_vec())),
                    None => {
                        assert!(o.iter().all(|x| x.to_bits() == 0), "f17: a padded row is not zero");
                        assert!(lse.iter().all(|x| *x == f32::NEG_INFINITY), "f17: a padded row has an lse");
                    }
                }
            }
        }
        outs
    }

    /// Holds every row to the oracle over what the model says its stream holds.
    pub(crate) fn check(&self, step: &Step, seed: u64, outs: &[RowOut]) {
        let stored = self.stored.borrow();
        let segments = &step.kv(&"kv".into()).unwrap().segments;
        assert_eq!(outs.len(), segments.len());
        for out in outs {
            let segment = segments
                .iter()
                .find(|s| (&s.request, &s.label) == (&out.stream.0, &out.stream.1))
                .expect("every row is a segment");
            let mut keys = stored.get(&out.stream).cloned().unwrap_or_default();
            let before = keys.len();
            let own = |at| content(&segment.request, &segment.label, at, seed);
            keys.extend((before..before + segment.span).map(own));
            for (layer, (got_o, got_lse)) in out.layers.iter().enumerate() {
                let all = |keys: &[u64], kind, heads| -> Vec<f32> {
                    keys.iter().flat_map(|&content| token(content, layer, kind, heads)).collect()
                };
                let want = dense(&Dense {
                    q: &all(&keys[before..], 0, H),
                    k: &all(&keys, 1, G),
                    v: &all(&keys, 2, G),
                    cu_q: &[0, segment.span as i32],
                    cu_k: &[0, keys.len() as i32],
                    num_qo_heads: H,
                    num_kv_heads: G,
                    head_dim_qk: D,
                    head_dim_vo: D,
                    sm_scale: SCALE.into(),
                    causal: self.causal,
                })
                .unwrap();
                assert!(
                    close(got_o, &want.o) && close(got_lse, &want.lse),
                    "{} ({}) layer {layer} is not what {} keys and {} of its own give",
                    segment.request,
                    segment.label,
                    before,
                    segment.span
                );
            }
        }
    }

    /// The bytes of every layer's pages.
    pub(crate) fn pool(&self) -> Vec<u32> {
        let mut all = Vec::new();
        for layer in 0..L {
            let LayerView::Nhd { k, v } = self.kv.layer(layer).unwrap() else { unreachable!() };
            for pages in [k, v] {
                for page in 0..pages.shape()[0] {
                    let page = pages.select(0, page).unwrap();
                    all.extend(page.as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()));
                }
            }
        }
        all
    }
}

/// What a token is: an integer of its stream, its position and the step that brought it.
pub(crate) fn content(request: &RequestId, label: &Label, position: usize, seed: u64) -> u64 {
    let names = request.as_str().bytes().chain(*b"/").chain(label.as_str().bytes());
    let stream = names.fold(0u64, |hash, byte| hash.wrapping_mul(257).wrapping_add(byte.into()));
    stream ^ ((position as u64) << 40) ^ seed.wrapping_mul(0x1_0001)
}

/// `[T]`: `None` for padding.
fn contents(plan: &KvPlan, seed: u64) -> Vec<Option<u64>> {
    let mut contents = Vec::new();
    for (index, row) in plan.rows.iter().enumerate() {
        let first = row.kv_len - row.q_len.min(row.kv_len);
        contents.extend((first..row.kv_len).map(|at| Some(content(&row.request, &row.label, at, seed))));
        contents.resize(plan.qo_indptr[index + 1] as usize, None);
    }
    contents
}

/// Relative L2 error over finite entries of at most `1e-6`, infinities equal.
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

pub(crate) fn segment(request: &str, label: &str, span: usize) -> Segment {
    Segment { request: request.into(), label: label.into(), span, tokens: [].into() }
}

pub(crate) fn fork(request: &str, from: &str, to: &str) -> Fork {
    Fork { request: request.into(), from: from.into(), to: to.into() }
}

/// Rows of (request, label, tokens), kept or not.
pub(crate) fn step(rows: &[(&str, &str, usize)], commit: bool) -> Step {
    let segments = rows.iter().map(|&(request, label, span)| segment(request, label, span)).collect();
    declare(KvStep { segments, commit, ..KvStep::default() })
}

pub(crate) fn declare(declared: KvStep) -> Step {
    Step::new("denoise").with("kv", Declaration::Kv(declared))
}

/// Writes a prefix, kept.
pub(crate) fn written(request: &str, tokens: usize) -> Step {
    step(&[(request, "main", tokens)], true)
}

/// One pass of a denoise, not kept.
pub(crate) fn denoise(request: &str, tokens: usize) -> Step {
    step(&[(request, "main", tokens)], false)
}

pub(crate) fn plan_id(planned: &PlannedStep, label: &str) -> PlanId {
    PlanId { slot: planned.slot(), label: label.into(), serial: planned.serial() }
}
