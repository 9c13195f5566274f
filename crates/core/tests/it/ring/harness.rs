//! A ring whose frames can be recognised: each is written as its own content, in every layer, keys and values apart.

use std::sync::Arc;

use mstar_core::kv::{RingCache, RingConfig, RingGeometry, RingKv};
use mstar_core::resource::Ingest;
use mstar_core::step::{Declaration, RingSegment, RingStep};
use mstar_core::{AdmittedStep, Engine, Label, PlanId, PlannedStep, Refusal, RequestId, Resource, Step};
use mstar_kernels::{DType, Stream, TensorRef};

/// Tokens of a frame: one block.
pub(crate) const F: usize = 128;

/// A pass: of whom, which frame, kept or not, and what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass<'a> {
    pub(crate) request: &'a str,
    pub(crate) frame: u64,
    pub(crate) commit: bool,
    pub(crate) content: u64,
}

/// A pass whose content is told by request and frame.
pub(crate) fn pass(request: &str, frame: u64, commit: bool) -> Pass<'_> {
    let content = request.bytes().fold(frame, |n, byte| n.wrapping_mul(257).wrapping_add(u64::from(byte)));
    Pass { request, frame, commit, content }
}

/// Three layers: one that keeps the last frames, one that dilates, and the first again.
pub(crate) fn config(num_worlds: usize) -> RingConfig {
    let dilated = RingGeometry { ring_frames: 3, ring_buckets: 2, pinned_dilation: 2 };
    let layers = vec![RingGeometry::last(4), dilated, RingGeometry::last(4)];
    let one = RingConfig::new(layers, F, 2, DType::F32);
    RingConfig { num_worlds, head_dim_vo: 3, ..one }
}

/// An element of a frame: exact in f32, and another for every argument.
pub(crate) fn element(content: u64, layer: usize, values: bool, at: usize) -> f32 {
    let seed = content ^ (layer as u64) << 40 ^ u64::from(values) << 48 ^ (at as u64) << 20;
    let mixed = (seed ^ seed >> 31).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 41) as f32
}

fn elements(content: u64, layer: usize, values: bool, width: usize) -> impl Iterator<Item = f32> {
    (0..F * width).map(move |at| element(content, layer, values, at))
}

/// One plan's keys and values of one layer, for the contents of its rows.
pub(crate) fn rows(config: &RingConfig, contents: &[u64], layer: usize) -> (Vec<f32>, Vec<f32>) {
    let of = |values, width| contents.iter().flat_map(move |&c| elements(c, layer, values, width)).collect();
    (of(false, config.num_kv_heads * config.head_dim), of(true, config.num_kv_heads * config.head_dim_vo))
}

pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) ring: Arc<RingCache>,
}

impl Rig {
    pub(crate) fn new(config: RingConfig, requests: &[&str]) -> Rig {
        let ring = Arc::new(RingCache::new("ring".into(), config).unwrap());
        let engine = Engine::new(vec![ring.clone() as Arc<dyn Resource>]).unwrap();
        let rig = Rig { engine, ring };
        requests.iter().for_each(|request| rig.ingest(request));
        rig
    }

    pub(crate) fn ingest(&self, request: &str) {
        self.engine.ingest(&Ingest::new(request.into())).unwrap();
    }

    pub(crate) fn admit(&self, passes: &[Pass<'_>]) -> Result<AdmittedStep, Refusal> {
        self.engine.admit(step(passes)).unwrap().admitted()
    }

    pub(crate) fn plan(&self, passes: &[Pass<'_>]) -> PlannedStep {
        self.engine.plan(self.admit(passes).unwrap()).unwrap()
    }

    /// Writes every layer of a planned step.
    pub(crate) fn write(&self, planned: &PlannedStep, passes: &[Pass<'_>]) {
        let contents: Vec<u64> = passes.iter().map(|pass| pass.content).collect();
        if contents.is_empty() {
            return; // a step without passes has no plan
        }
        for layer in 0..self.ring.config().layers.len() {
            let (k, v) = rows(self.ring.config(), &contents, layer);
            self.upsert(planned, layer, &k, &v).unwrap();
        }
    }

    /// Writes one layer; the blocks that the first row sees.
    pub(crate) fn upsert(
        &self,
        planned: &PlannedStep,
        layer: usize,
        k: &[f32],
        v: &[f32],
    ) -> mstar_core::Result<Vec<i32>> {
        let config = self.ring.config();
        let (g, d, dv) = (config.num_kv_heads, config.head_dim, config.head_dim_vo);
        let k = TensorRef::from_slice(k, &[k.len() / (g * d), g, d]).unwrap();
        let v = TensorRef::from_slice(v, &[v.len() / (g * dv), g, dv]).unwrap();
        let view = self.ring.upsert(&main(planned), layer, k, v, &Stream::cpu())?;
        Ok(view.visible(0).to_vec())
    }

    /// A whole step, committed; what each group of layers saw in its first row.
    pub(crate) fn run(&self, passes: &[Pass<'_>]) -> Vec<Vec<i32>> {
        let planned = self.plan(passes);
        let plan = self.ring.ring_plan(&main(&planned)).unwrap();
        let seen = (0..plan.groups.len()).map(|group| plan.visible(group, 0).to_vec()).collect();
        self.write(&planned, passes);
        self.engine.commit(planned).unwrap();
        seen
    }

    /// The bits of one frame of one layer: keys, then values.
    pub(crate) fn frame(&self, layer: usize, world: usize, frame: usize) -> Vec<u32> {
        let config = self.ring.config();
        let view = self.ring.layer(layer).unwrap();
        let first = (world * config.layers[layer].frames() + frame) * F;
        let bits = |part: TensorRef<'_>| {
            let width = part.shape()[1] * part.shape()[2];
            let all = part.as_slice::<f32>().unwrap();
            all[first * width..][..F * width].iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        };
        [bits(view.k), bits(view.v)].concat()
    }

    /// Every frame of a world.
    pub(crate) fn world(&self, world: usize) -> Vec<Vec<u32>> {
        let layers = self.ring.config().layers.iter().enumerate();
        layers.flat_map(|(layer, g)| (0..g.frames()).map(move |f| self.frame(layer, world, f))).collect()
    }
}

/// What a frame's bits should be: of a content, or zeros.
pub(crate) fn bits(config: &RingConfig, content: Option<u64>, layer: usize) -> Vec<u32> {
    match content {
        Some(content) => {
            let (k, v) = rows(config, &[content], layer);
            k.iter().chain(&v).map(|x| x.to_bits()).collect()
        }
        None => vec![0; F * config.num_kv_heads * (config.head_dim + config.head_dim_vo)],
    }
}

pub(crate) fn main(planned: &PlannedStep) -> PlanId {
    PlanId { slot: planned.slot(), label: Label::main(), serial: planned.serial() }
}

pub(crate) fn step(passes: &[Pass<'_>]) -> Step {
    let segment = |pass: &Pass<'_>| RingSegment {
        request: RequestId::new(pass.request),
        label: Label::main(),
        span: F,
        frame_pos: pass.frame,
        commit: pass.commit,
    };
    let segments = passes.iter().map(segment).collect();
    Step::new("frame").with("ring", Declaration::Ring(RingStep { segments }))
}
