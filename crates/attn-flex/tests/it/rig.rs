//! A ring under block-mask attention, whose passes carry content that is told by request, frame and layer.

use std::sync::Arc;

use mstar_attn_flex::{DType, FlexAttention, FlexOptions, Stream, TensorMut, TensorRef};
use mstar_core::attend::{AttnGeometry, BuildContext, Softmax};
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, RingCache, RingConfig, RingGeometry, RingKv};
use mstar_core::resource::Ingest;
use mstar_core::spec::{Fallback, KernelFamily, Schedule};
use mstar_core::step::{Declaration, RingSegment, RingStep};
use mstar_core::{AttnOut, Engine, Label, PlanId, PlannedStep, Query, RequestId, Resource, Step, attend};

/// Tokens of a frame: two blocks.
pub(crate) const F: usize = 256;
pub(crate) const H: usize = 4;
pub(crate) const G: usize = 2;
pub(crate) const D: usize = 8;
pub(crate) const DV: usize = 4;

/// One pass: whose, which frame, kept or not, and what it brings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    pub(crate) world: usize,
    pub(crate) frame: u64,
    pub(crate) commit: bool,
    pub(crate) content: u64,
}

pub(crate) fn noise(parts: &[u64]) -> f32 {
    let mut n = 0x9E37_79B9_7F4A_7C15u64;
    for part in parts {
        n = (n ^ part).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        n ^= n >> 29;
    }
    (n >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// `[F, heads, width]` of one pass in one layer; `which` tells queries, keys and values apart.
pub(crate) fn content(pass: &Pass, layer: usize, which: u64, heads: usize, width: usize) -> Vec<f32> {
    (0..F * heads * width)
        .map(|at| noise(&[pass.content, layer as u64, which, at as u64]) * if which == 0 { 2.0 } else { 1.0 })
        .collect()
}

pub(crate) fn config(layers: Vec<RingGeometry>, num_worlds: usize) -> RingConfig {
    let one = RingConfig::new(layers, F, D, DType::F32);
    RingConfig { num_worlds, num_kv_heads: G, head_dim_vo: DV, ..one }
}

pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) ring: Arc<RingCache>,
    pub(crate) attn: Arc<FlexAttention>,
}

pub(crate) fn context(ring: Option<Arc<dyn RingKv>>, softmax: Softmax) -> BuildContext {
    let kv = KvConfig::new(KvLayout::Nhd { num_kv_heads: G, head_dim: D }, DType::F32, 1, 1);
    BuildContext {
        name: "attn".into(),
        geometry: AttnGeometry::over(&kv, H, DType::F32, softmax),
        stream: Stream::cpu(),
        kv_cache: None,
        ring,
        query_from: None,
        slots: 2,
        largest: None,
        schedule: Schedule::Invariant,
        kernels: KernelFamily::Auto,
        fallback: Fallback::Refuse,
    }
}

pub(crate) fn request(world: usize) -> RequestId {
    RequestId::new(format!("w{world}"))
}

pub(crate) fn step(passes: &[Pass]) -> Step {
    let segment = |pass: &Pass| RingSegment {
        request: request(pass.world),
        label: Label::main(),
        span: F,
        frame_pos: pass.frame,
        commit: pass.commit,
    };
    let segments = passes.iter().map(segment).collect();
    Step::new("frame").with("ring", Declaration::Ring(RingStep { segments }))
}

pub(crate) fn main_plan(planned: &PlannedStep) -> PlanId {
    PlanId { slot: planned.slot(), label: Label::main(), serial: planned.serial() }
}

impl Rig {
    pub(crate) fn new(config: RingConfig, softmax: Softmax, options: FlexOptions) -> Rig {
        Rig::with(config, softmax, options, |attn| attn)
    }

    pub(crate) fn with(
        config: RingConfig,
        softmax: Softmax,
        options: FlexOptions,
        change: impl FnOnce(FlexAttention) -> FlexAttention,
    ) -> Rig {
        let worlds = config.num_worlds;
        let ring = Arc::new(RingCache::new("ring".into(), config).unwrap());
        let cx = context(Some(ring.clone()), softmax);
        let attn = Arc::new(change(FlexAttention::new(&cx, options).unwrap()));
        let resources = vec![ring.clone() as Arc<dyn Resource>, attn.clone() as Arc<dyn Resource>];
        let engine = Engine::new(resources).unwrap();
        for world in 0..worlds {
            engine.ingest(&Ingest::new(request(world))).unwrap();
        }
        Rig { engine, ring, attn }
    }

    pub(crate) fn plan(&self, passes: &[Pass]) -> PlannedStep {
        let admitted = self.engine.admit(step(passes)).unwrap().admitted().unwrap();
        self.engine.plan(admitted).unwrap()
    }

    /// One layer of a planned step over the rows of `passes` and `padded` rows more: `o` `[T, H, Dv]` and `lse` `[T, H]`.
    pub(crate) fn layer(
        &self,
        planned: &PlannedStep,
        passes: &[Pass],
        padded: usize,
        layer: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let rows = |which, heads, width| -> Vec<f32> {
            let mut all: Vec<f32> =
                passes.iter().flat_map(|pass| content(pass, layer, which, heads, width)).collect();
            all.resize((passes.len() + padded) * F * heads * width, 0.5);
            all
        };
        let t = (passes.len() + padded) * F;
        let (q, k, v) = (rows(0, H, D), rows(1, G, D), rows(2, G, DV));
        let (mut o, mut lse) = (vec![7.0; t * H * DV], vec![7.0; t * H]);
        let stream = Stream::cpu();
        let mut forward = planned.forward("main", &stream);
        forward.set_layer(layer);
        let fresh = KvEntries::Nhd {
            k: TensorRef::from_slice(&k, &[t, G, D]).unwrap(),
            v: TensorRef::from_slice(&v, &[t, G, DV]).unwrap(),
        };
        let out = AttnOut {
            o: TensorMut::from_slice(&mut o, &[t, H, DV]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[t, H]).unwrap()),
        };
        let q = Query::Heads(TensorRef::from_slice(&q, &[t, H, D]).unwrap());
        attend(&*self.attn, &mut forward, q, Some(fresh), out).unwrap();
        (o, lse)
    }

    /// A whole step, committed: each layer's results.
    pub(crate) fn run(&self, passes: &[Pass]) -> Vec<(Vec<f32>, Vec<f32>)> {
        let planned = self.plan(passes);
        let layers = 0..self.ring.config().layers.len();
        let out = layers.map(|layer| self.layer(&planned, passes, 0, layer)).collect();
        self.engine.commit(planned).unwrap();
        out
    }
}
