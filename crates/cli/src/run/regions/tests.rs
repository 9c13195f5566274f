//! A whole forward as one region, on the emulated device.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use mstar_core::graph::{Captured, Ran, Region};
use mstar_core::step::{Declaration, KvStep};
use mstar_core::{Forward, Ingest, Label, PlannedStep, RequestId, Segment, Step};
use mstar_kernels::synth;

use crate::explain::{SpecArguments, prepare};
use crate::run::buffers::{Buffers, Fresh};
use crate::run::build;
use crate::run::model::Model;
use crate::run::phases::Phases;

/// Layers 0 and 2 pick 24 keys; 1 and 3 share their picks. One request crosses 24 keys while it decodes.
const SPARSE: &str = "
name: picks
seed: 3
dtype: bf16
model: { layers: 4, num_qo_heads: 4, kv_lora_rank: 64, qk_rope_head_dim: 16, sm_scale: 0.125 }
resources:
  kv: { kind: kv, layout: mla, page_size: 16, max_num_pages: 64, max_seq_len: 256 }
  attn: { kind: attention, backend: mla, kv_cache: kv }
  dsa: { kind: dsa, kv_cache: kv, index_n_heads: 2, index_head_dim: 32, index_topk: 24, full_layers: [0, 2] }
graph: { buckets: [4], slots: 1 }
workload: { kind: synthetic, requests: 2, prompt_len: 60, output_len: 10, max_batch: 4, chunked_prefill: 64 }
";

/// Every layer of a forward, one after the other, over what lies in the buffers.
fn layers(
    model: &Model,
    buffers: &mut Buffers,
    tokens: usize,
    forward: &mut Forward<'_>,
) -> mstar_core::Result<()> {
    for layer in 0..model.layers {
        forward.set_layer(layer);
        for (turn, room) in model.own.iter().enumerate() {
            room.attend(forward, buffers.views(tokens)?, turn == 0)?;
        }
    }
    Ok(())
}

/// As [`layers`], from one region.
#[allow(unsafe_code, reason = "a graph holds addresses, not borrows")]
fn region(
    model: &Model,
    buffers: &mut Buffers,
    graphs: &mut Captured,
    tokens: usize,
    planned: &PlannedStep,
    forward: &mut Forward<'_>,
) -> mstar_core::Result<Ran> {
    let mut key = DefaultHasher::new();
    for room in model.rooms() {
        room.capture_key(forward.plan_id()).expect("a device captures every room").hash(&mut key);
    }
    let lease = planned.lease().expect("the step is padded");
    let (stream, region) = (*forward.stream(), Region::new(lease, forward.label(), 0));
    let record =
        |forward: &mut Forward<'_>| forward.unobserved(|forward| layers(model, buffers, tokens, forward));
    let replaying = |forward: &mut Forward<'_>| {
        (0..model.layers).try_for_each(|layer| {
            forward.set_layer(layer);
            model.own.iter().try_for_each(|room| room.replaying(forward))
        })
    };
    // SAFETY: buffers, caches, plans and workspaces are the model's and outlive the graphs; the keys tell where they lie.
    unsafe { graphs.run(&stream, region, key.finish(), forward, record, replaying) }
}

/// Outputs and picks of every decode step of two requests, and what became of the regions.
fn decoded(whole: bool) -> anyhow::Result<(Vec<Vec<u8>>, Vec<Ran>)> {
    let folder = tempfile::tempdir()?;
    let spec = folder.path().join("spec.yaml");
    std::fs::write(&spec, SPARSE)?;
    let prepared = prepare(&SpecArguments { spec, set: vec![], device: Some("cuda:0".into()) })?;
    let (model, mut buffers) = build(&prepared, &Arc::new(Phases::default()))?;
    let requests = ["a", "b"].map(RequestId::from);
    for request in &requests {
        model.engine.ingest(&Ingest::new(request.clone()))?;
    }
    let (mut graphs, stream) = (Captured::new(), model.queue.stream());
    let (mut seen, mut ran) = (Vec::new(), Vec::new());
    for (step, spans) in std::iter::once([20, 40]).chain([[1, 1]; 8]).enumerate() {
        let segment = |(request, span): (&RequestId, usize)| Segment {
            request: request.clone(),
            label: Label::main(),
            span,
            tokens: vec![0; span].into(),
        };
        let segments = requests.iter().zip(spans).map(segment).collect();
        let kv = Declaration::Kv(KvStep { segments, ..KvStep::default() });
        let declared =
            Step::new(if step == 0 { "prefill" } else { "decode" }).with(model.parts.kv.clone(), kv);
        let admitted = match model.buckets.pick_for(&declared) {
            Ok(bucket) => model.engine.admit_in(declared, &bucket)?.admitted(),
            Err(_) => model.engine.admit(declared)?.admitted(),
        };
        let planned = model.engine.plan(admitted.map_err(|refusal| anyhow::anyhow!("{refusal}"))?)?;
        let tokens = if step == 0 { 60 } else { 4 };
        let keys: Vec<u64> =
            (0..tokens).map(|t| synth::chain(synth::ROOT, (100 * step + t) as u64)).collect();
        for which in [Fresh::Queries, Fresh::Entries, Fresh::Index] {
            buffers.generate(which, 3, step, &keys)?;
        }
        let mut forward = planned.forward("main", &stream);
        if whole && step > 0 {
            ran.push(region(&model, &mut buffers, &mut graphs, tokens, &planned, &mut forward)?);
        } else {
            layers(&model, &mut buffers, tokens, &mut forward)?;
        }
        stream.synchronize()?;
        if step > 0 {
            let written = buffers.written(tokens)?;
            seen.push((0..tokens).flat_map(|t| written.token_bytes(t).to_vec()).collect());
            assert_eq!(forward.last_selection().map(|selection| selection.layer()), Some(2));
        }
        model.engine.commit(planned)?;
    }
    assert_eq!(graphs.graphs(), usize::from(whole));
    Ok((seen, ran))
}

#[test]
fn a_whole_forward_is_one_region_over_every_plan_to_come() {
    assert!(mstar_kernels::cuda::emulate(), "the driver was chosen before");
    let (eager, none) = decoded(false).expect("an eager run");
    let (whole, ran) = decoded(true).expect("a captured run");
    assert!(none.is_empty());
    assert_eq!(ran, [&[Ran::Captured][..], &[Ran::Replayed; 7]].concat());
    assert_eq!(eager.len(), 8);
    for (step, (eager, whole)) in eager.iter().zip(&whole).enumerate() {
        assert!(eager.iter().any(|&byte| byte != 0) && eager == whole, "step {step}");
    }
    // Steps differ from each other: a region that was not staged anew would repeat itself.
    assert!(whole.windows(2).all(|pair| pair[0] != pair[1]));
}
