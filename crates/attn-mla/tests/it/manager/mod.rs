//! The manager level: a real cache, an engine and two attention resources over it, one of which may attend the stored
//! context alone. Inputs are a function of request and position, so that any row can be checked whatever batch it ran in.

mod context;
mod life;
mod refusals;

use std::sync::Arc;

use mstar_attn_mla::{DType, Device, MlaAttention, MlaOptions, Stream, TensorMut, TensorRef};
use mstar_core::attend::{AttnGeometry, BuildContext, Softmax};
use mstar_core::graph::Bucket;
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, KvPlan, PagedKv, PagedKvCache};
use mstar_core::resource::PaddedShape;
use mstar_core::spec::{Fallback, KernelFamily, Schedule};
use mstar_core::step::{Declaration, KvStep};
use mstar_core::{
    AttnOut, Engine, Ingest, Label, PlanId, PlannedStep, Query, RequestId, Resource, Segment, Step,
};
use mstar_kernels::reference::mla::{Mla, mla};

use crate::harness::noise;

/// Heads, latent widths and layers of every rig.
const H: usize = 4;
const C: usize = 32;
const E: usize = 8;
const L: usize = 2;
const SCALE: f32 = 0.2;

/// One row's results: for each layer `o` `[q, H, C]` and `lse` `[q, H]`.
#[derive(Clone, Debug, PartialEq)]
struct RowOut {
    request: RequestId,
    layers: Vec<(Vec<f32>, Vec<f32>)>,
}

impl RowOut {
    /// Equal to the bit, NaN and signs of zero included.
    fn same_bits(&self, other: &RowOut) -> bool {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        self.request == other.request
            && self.layers.len() == other.layers.len()
            && self
                .layers
                .iter()
                .zip(&other.layers)
                .all(|(a, b)| bits(&a.0) == bits(&b.0) && bits(&a.1) == bits(&b.1))
    }
}

/// A model: `attn` plans as the step says, and so does `context`, a second resource over the same cache.
struct Rig {
    engine: Engine,
    kv: Arc<PagedKvCache>,
    attn: Arc<MlaAttention>,
    context: Arc<MlaAttention>,
}

fn config(page_size: usize, pages: usize) -> KvConfig {
    let layout = KvLayout::Mla { kv_lora_rank: C, qk_rope_head_dim: E };
    KvConfig { num_layers: L, ..KvConfig::new(layout, DType::F32, page_size, pages) }
}

/// What a resource over `kv` is built with.
fn build_context(name: &str, kv: &Arc<PagedKvCache>, softmax: Softmax) -> BuildContext {
    BuildContext {
        name: name.into(),
        geometry: AttnGeometry::over(kv.config(), H, DType::F32, softmax),
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
    fn new(page_size: usize, pages: usize) -> Rig {
        Rig::with(config(page_size, pages), MlaOptions::default())
    }

    fn with(config: KvConfig, options: MlaOptions) -> Rig {
        let kv = Arc::new(PagedKvCache::new("kv".into(), config).unwrap());
        let build = |name| {
            Arc::new(MlaAttention::new(&build_context(name, &kv, Softmax::scaled(SCALE)), options).unwrap())
        };
        let (attn, context) = (build("attn"), build("context"));
        let resources: Vec<Arc<dyn Resource>> = vec![attn.clone(), context.clone(), kv.clone()];
        Rig { engine: Engine::new(resources).unwrap(), kv, attn, context }
    }

    fn ingest(&self, requests: &[&str]) {
        for request in requests {
            self.engine.ingest(&Ingest::new((*request).into())).unwrap();
        }
    }

    /// A planned step, eager or in a bucket.
    fn planned(&self, step: Step, bucket: Option<PaddedShape>) -> PlannedStep {
        let admission = match bucket {
            None => self.engine.admit(step),
            Some(shape) => self.engine.admit_in(step, &Bucket { walk: "decode".into(), shape }),
        };
        self.engine.plan(admission.unwrap().admitted().unwrap()).unwrap()
    }

    /// One whole step over `rows` of (request, tokens), kept.
    fn step(&self, rows: &[(&str, usize)], bucket: Option<PaddedShape>) -> Vec<RowOut> {
        let planned = self.planned(step(rows), bucket);
        let out = self.forward(&planned, &self.attn, "main");
        self.engine.commit(planned).unwrap();
        out
    }

    /// Every layer of one plan label through `attn`. Padding is fed NaN, and outputs start as NaN.
    fn forward(&self, planned: &PlannedStep, attn: &MlaAttention, label: &str) -> Vec<RowOut> {
        let stream = Stream::cpu();
        let mut forward = planned.forward(label, &stream);
        let plan = self.kv.kv_plan(forward.plan_id()).unwrap();
        let places = places(&plan);
        let tokens = places.len();
        let mut outs: Vec<RowOut> = plan.rows[..plan.real_rows]
            .iter()
            .map(|row| RowOut { request: row.request.clone(), layers: vec![] })
            .collect();
        for layer in 0..L {
            forward.set_layer(layer);
            // One row `[nope | pe]` a head, as a fused projection leaves it, and one `[ckv | kpe]` a token.
            let q = values(&places, layer, H, 0);
            let latent = values(&places, layer, 1, 1);
            let fused = |from: usize, width| {
                TensorRef::from_slice_strided(&q[from..], &[tokens, H, width], &[H * (C + E), C + E, 1])
                    .unwrap()
            };
            let part = |from: usize, width| {
                TensorRef::from_slice_strided(&latent[from..], &[tokens, width], &[C + E, 1]).unwrap()
            };
            let (mut o, mut lse) = (vec![f32::NAN; tokens * H * C], vec![f32::NAN; tokens * H]);
            let out = AttnOut {
                o: TensorMut::from_slice(&mut o, &[tokens, H, C]).unwrap(),
                lse: Some(TensorMut::from_slice(&mut lse, &[tokens, H]).unwrap()),
            };
            let query = Query::Absorbed { nope: fused(0, C), pe: fused(C, E) };
            let fresh = KvEntries::Mla { ckv: part(0, C), kpe: part(C, E) };
            mstar_core::attend::attend(attn, &mut forward, query, Some(fresh), out).unwrap();
            split(&plan, &o, &lse, &mut outs);
        }
        outs
    }

    /// The bytes of every layer's pages.
    fn pool(&self) -> Vec<u32> {
        let mut all = Vec::new();
        for layer in 0..L {
            let mstar_core::kv::LayerView::Mla { latent } = self.kv.layer(layer).unwrap() else {
                unreachable!()
            };
            all.extend(latent.as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()));
        }
        all
    }
}

/// Rows of (request, tokens) on `main`.
fn step(rows: &[(&str, usize)]) -> Step {
    let segments = rows.iter().map(|&(request, span)| segment(request, "main", span)).collect();
    Step::new("decode").with("kv", Declaration::Kv(KvStep { segments, ..KvStep::default() }))
}

fn segment(request: &str, label: &str, span: usize) -> Segment {
    Segment { request: request.into(), label: label.into(), span, tokens: [].into() }
}

/// What a token is: its stream and its position.
type Place = (RequestId, Label, usize);

/// `[T]`: `None` for padding.
fn places(plan: &KvPlan) -> Vec<Option<Place>> {
    let mut places = Vec::new();
    for (index, row) in plan.rows.iter().enumerate() {
        let first = row.kv_len - row.q_len.min(row.kv_len);
        places.extend((first..row.kv_len).map(|at| Some((row.request.clone(), row.label.clone(), at))));
        places.resize(plan.qo_indptr[index + 1] as usize, None);
    }
    places
}

/// `[T, heads, C + E]`; NaN for padding.
fn values(places: &[Option<Place>], layer: usize, heads: usize, kind: u64) -> Vec<f32> {
    let mut values = Vec::with_capacity(places.len() * heads * (C + E));
    for place in places {
        let stream = place.as_ref().map(|(request, label, at)| {
            let names = request.as_str().bytes().chain(*b"/").chain(label.as_str().bytes());
            (names.fold(0u64, |hash, byte| hash.wrapping_mul(257).wrapping_add(byte.into())), *at as u64)
        });
        for at in 0..heads * (C + E) {
            values.push(stream.map_or(f32::NAN, |(stream, position)| {
                1.5 * noise(&[stream, position, layer as u64, kind, at as u64])
            }));
        }
    }
    values
}

/// Gives each real row its part of a layer's outputs, and checks that padding is 0 and `-inf`.
fn split(plan: &KvPlan, o: &[f32], lse: &[f32], outs: &mut [RowOut]) {
    for index in 0..plan.rows.len() {
        let (begin, end) = (plan.qo_indptr[index] as usize, plan.qo_indptr[index + 1] as usize);
        let (o, lse) = (&o[begin * H * C..end * H * C], &lse[begin * H..end * H]);
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

/// The oracle: queries at positions `queries` over latents at positions `keys` of a stream.
fn oracle(
    (request, label): (&str, &str),
    queries: std::ops::Range<usize>,
    keys: std::ops::Range<usize>,
    layer: usize,
    causal: bool,
) -> (Vec<f64>, Vec<f64>) {
    let of = |positions: std::ops::Range<usize>| -> Vec<Option<Place>> {
        positions.map(|at| Some((request.into(), label.into(), at))).collect()
    };
    let (q_len, kv_len) = (queries.len(), keys.len());
    let q = values(&of(queries), layer, H, 0);
    let nope: Vec<f32> = q.chunks(C + E).flat_map(|q| q[..C].to_vec()).collect();
    let pe: Vec<f32> = q.chunks(C + E).flat_map(|q| q[C..].to_vec()).collect();
    let pages = i32::from(kv_len > 0);
    let attended = mla(&Mla {
        q_nope: &nope,
        q_pe: &pe,
        latent: &values(&of(keys), layer, 1, 1),
        qo_indptr: &[0, q_len as i32],
        kv_indptr: &[0, pages],
        kv_indices: &[0][..pages as usize],
        kv_len: &[kv_len as i32],
        num_qo_heads: H,
        kv_lora_rank: C,
        qk_rope_head_dim: E,
        page_size: kv_len.max(1),
        sm_scale: SCALE.into(),
        causal,
    })
    .unwrap();
    (attended.o, attended.lse)
}

/// Whether a row of `main` that ends at `kv_len` is what causal attention over its stream gives.
fn is_causal(row: &RowOut, q_len: usize, kv_len: usize) -> bool {
    row.layers.iter().enumerate().all(|(layer, (got_o, got_lse))| {
        let name = (row.request.as_str(), "main");
        let (o, lse) = oracle(name, kv_len - q_len..kv_len, 0..kv_len, layer, true);
        close(got_o, &o) && close(got_lse, &lse)
    })
}

/// Relative L2 error over finite entries of at most `1e-6`, infinities equal.
fn close(got: &[f32], want: &[f64]) -> bool {
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

fn shape(rows: usize, tokens: usize) -> Option<PaddedShape> {
    Some(PaddedShape { rows, tokens })
}

/// The plan of a label, from a step in hand.
fn plan_id(planned: &PlannedStep, label: &str) -> PlanId {
    PlanId { slot: planned.slot(), label: label.into(), serial: planned.serial() }
}
