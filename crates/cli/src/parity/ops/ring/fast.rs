//! A case through a ring of `core` and the wrapper level of the flex backend: a step a pass.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use half::{bf16, f16};
use mstar_attn_flex::{
    BlockMask, Geometry, Inputs as Tensors, KernelOptions, KvBlocks, MaskRule, MaskShape, Plan, run,
};
use mstar_attn_flex::{Outputs as Into, Workspace};
use mstar_core::kv::{RING_BLOCK, RingCache, RingConfig, RingGeometry, RingKv};
use mstar_core::resource::Ingest;
use mstar_core::step::{Declaration, RingSegment, RingStep};
use mstar_core::{Engine, Label, PlanId, RequestId, Resource, Step};
use mstar_kernels::reference::ring::Pass;
use mstar_kernels::{DType, Stream};

use super::{Case, Inputs};
use crate::parity::ops::unwritten::Unwritten;
use crate::parity::ops::{Computed, NotRun, Outputs};
use crate::parity::place::Place;

/// Runs a case.
pub(in crate::parity::ops) fn fast(case: &Case, place: &Place) -> Result<Outputs, NotRun> {
    let computed = match case.dtype {
        DType::Bf16 => run_case::<bf16>(case, place),
        DType::F16 => run_case::<f16>(case, place),
        _ => run_case::<f32>(case, place),
    };
    computed.map_err(|error| NotRun::Failed(format!("{error:#}")))
}

/// A ring of one layer, and the engine that steps it.
struct Rig {
    engine: Engine,
    ring: Arc<RingCache>,
}

fn request(world: usize) -> RequestId {
    RequestId::new(format!("world {world}"))
}

fn step(world: usize, frame_pos: u64, commit: bool, span: usize) -> Step {
    let segment = RingSegment { request: request(world), label: Label::main(), span, frame_pos, commit };
    Step::new("frame").with("ring", Declaration::Ring(RingStep { segments: vec![segment] }))
}

impl Rig {
    /// Every world claimed, in order, and empty.
    fn new(config: RingConfig, stream: Stream) -> Result<Rig> {
        let (worlds, span) = (config.num_worlds, config.tokens_per_frame);
        let ring = Arc::new(RingCache::on(stream, "ring".into(), config)?);
        let engine = Engine::new(vec![ring.clone() as Arc<dyn Resource>])?;
        let rig = Rig { engine, ring };
        for world in 0..worlds {
            rig.engine.ingest(&Ingest::new(request(world)))?;
            let planned = rig.plan(step(world, 0, false, span))?;
            rig.engine.commit(planned)?;
        }
        Ok(rig)
    }

    fn plan(&self, step: Step) -> Result<mstar_core::PlannedStep> {
        let admitted = self.engine.admit(step)?.admitted().map_err(|refusal| anyhow!("{refusal}"))?;
        Ok(self.engine.plan(admitted)?)
    }
}

fn run_case<E: Unwritten>(case: &Case, place: &Place) -> Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let [n, h, g, f, d] = ["N", "H", "G", "F", "D"].map(|letter| case.letters.get(letter));
    let layer = RingGeometry {
        ring_frames: inputs.ring_frames,
        ring_buckets: inputs.ring_buckets,
        pinned_dilation: inputs.pinned_dilation,
    };
    let config = RingConfig {
        num_worlds: inputs.num_worlds,
        num_kv_heads: g,
        ..RingConfig::new(vec![layer], f, d, E::DTYPE)
    };
    let shape = MaskShape { block_q: f, ..MaskShape::new(f, config.layer_tokens(&layer)) };
    let geometry = Geometry {
        batch: 1,
        num_qo_heads: h,
        num_kv_heads: g,
        head_dim_qk: d,
        head_dim_vo: d,
        q_dtype: E::DTYPE,
        kv_dtype: E::DTYPE,
    };
    debug_assert_eq!(shape.block_kv, RING_BLOCK);
    let (q, k, v) = (case.elements::<E>("in.q"), case.elements::<E>("in.k"), case.elements::<E>("in.v"));
    let mut o: Vec<E> = Vec::with_capacity(n * h * f * d);
    let (mut visible_blocks, mut visible_indptr) = (Vec::new(), vec![0i32]);
    let stream = place.stream();
    let rig = Rig::new(config, stream)?;
    let mut workspace = Workspace::on(place.device(), 0)?;
    let options = KernelOptions { device: place.device(), ..KernelOptions::default() };
    for (pass, &Pass { world, frame_pos, commit }) in inputs.passes.iter().enumerate() {
        let said = || format!("pass {pass}");
        let planned = rig.plan(step(world, frame_pos, commit, f)).with_context(said)?;
        let id = PlanId { slot: planned.slot(), label: Label::main(), serial: planned.serial() };
        let keys = pass * g * f * d..(pass + 1) * g * f * d;
        let [frame_k, frame_v] = [&k[keys.clone()], &v[keys]].map(|frame| place.put(frame, &[g, f, d]));
        let (frame_k, frame_v) = (frame_k?, frame_v?);
        let frames = [frame_k.view()?.transpose(0, 1), frame_v.view()?.transpose(0, 1)];
        let view = rig.ring.upsert(&id, 0, frames[0], frames[1], &stream)?;
        let blocks = view.visible(0);
        visible_blocks.extend_from_slice(blocks);
        visible_indptr.push(visible_blocks.len() as i32);
        let full = KvBlocks { indptr: &[0, blocks.len() as i32], indices: blocks };
        let mask = BlockMask::from_kv_blocks(shape, full, KvBlocks::NONE, MaskRule::Whole)?;
        let mut plan = Plan::new(&geometry, &mask, &options)?;
        plan.stage(&stream, &[])?;
        workspace.reserve_bytes(plan.workspace_bytes())?;
        let at = pass * h * f * d;
        let pass_q = place.put(&q[at..at + h * f * d], &[1, h, f, d])?;
        let mut pass_o = place.filled(E::UNWRITTEN, &[1, h, f, d])?;
        let tensors = Tensors {
            q: pass_q.view()?,
            k: view.layer.k.transpose(0, 1).insert_axis(0),
            v: view.layer.v.transpose(0, 1).insert_axis(0),
            scale: Some(inputs.sm_scale as f32),
            score_mods: &[],
        };
        let into = Into { o: pass_o.view_mut()?, lse: None, max_scores: None };
        run(&plan, &stream, &mut workspace, tensors, into)?;
        o.extend(place.take(&pass_o, E::UNWRITTEN)?);
        rig.engine.commit(planned).with_context(said)?;
    }
    Ok(Outputs::from([
        ("out.o", Computed::Floats(o.iter().map(|x| x.to_f64() as f32).collect())),
        ("out.visible_blocks", Computed::Integers(visible_blocks)),
        ("out.visible_indptr", Computed::Integers(visible_indptr)),
    ]))
}
