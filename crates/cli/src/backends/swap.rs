//! `dense` and `paged` under the same steps: whichever attends a step, and whichever attended those before it, the numbers are
//! the same within rounding.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BuildContext, Softmax, attend};
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, PagedKv, PagedKvCache};
use mstar_core::spec::{Fallback, Faults, KernelFamily, Node, Schedule};
use mstar_core::step::{Declaration, Fork, KvStep};
use mstar_core::{Attention, AttnOut, Engine, Ingest, Query, Resource, Segment, Step};
use mstar_kernels::{DType, Stream, TensorMut, TensorRef};

use super::registry;

const H: usize = 6;
const G: usize = 2;
const D: usize = 32;
const L: usize = 2;

/// The resource that a spec gets which names `backend`.
fn built(backend: &str, causal: &str, kv: &Arc<PagedKvCache>) -> Arc<dyn Attention> {
    let faults = Faults::new();
    let backends = registry();
    let factory = backends.get(backend).expect("compiled in");
    let options = factory.parse(&Node::flat("resources.attn", &[("causal", causal)]), &faults);
    faults.settle("spec.yaml").expect("a good spec");
    let cx = BuildContext {
        name: backend.into(),
        geometry: AttnGeometry::over(PagedKv::config(&**kv), H, DType::F32, Softmax::scaled(0.2)),
        stream: Stream::cpu(),
        kv_cache: Some(Arc::clone(kv) as Arc<dyn PagedKv>),
        ring: None,
        query_from: None,
        slots: 1,
        largest: None,
        schedule: Schedule::Invariant,
        kernels: KernelFamily::Auto,
        fallback: Fallback::Refuse,
    };
    options.expect("no fault was found").build(&cx).expect("served")
}

fn kept(rows: &[(&str, &str, usize)], commit: bool, forks: &[(&str, &str)]) -> KvStep {
    let segment = |&(request, label, span): &(&str, &str, usize)| Segment {
        request: request.into(),
        label: label.into(),
        span,
        tokens: [].into(),
    };
    let fork = |&(from, to): &(&str, &str)| Fork { request: "a".into(), from: from.into(), to: to.into() };
    KvStep {
        segments: rows.iter().map(segment).collect(),
        commit,
        pre_forks: forks.iter().map(fork).collect(),
        ..KvStep::default()
    }
}

/// A text written in two chunks, forked; passes over a block, the block kept, passes over the next.
fn steps() -> Vec<KvStep> {
    let block = [("a", "cond", 11), ("a", "main", 11), ("b", "main", 7)];
    vec![
        kept(&[("a", "main", 21), ("b", "main", 5)], true, &[]),
        kept(&[("a", "main", 4)], true, &[]),
        kept(&block, false, &[("main", "cond")]),
        kept(&[("a", "cond", 3)], true, &[("main", "cond")]),
        kept(&block, false, &[]),
        kept(&block, false, &[]),
        kept(&block, true, &[]),
        kept(&[("b", "main", 9), ("a", "main", 2)], false, &[]),
        kept(&[("a", "cond", 0), ("a", "main", 40)], false, &[]),
    ]
}

/// What every step gives when the `i`-th is attended by `backends[i % n]`.
fn ran(backends: &[&str], causal: &str) -> Vec<Vec<f32>> {
    let layout = KvLayout::Nhd { num_kv_heads: G, head_dim: D };
    let config = KvConfig { num_layers: L, ..KvConfig::new(layout, DType::F32, 8, 64) };
    let kv = Arc::new(PagedKvCache::new("kv".into(), config).expect("a small cache"));
    let [paged, dense] = ["paged", "dense"].map(|backend| built(backend, causal, &kv));
    assert!(paged.requires_kv_write() && !dense.requires_kv_write());
    let resources: Vec<Arc<dyn Resource>> = vec![kv.clone(), paged.clone(), dense.clone()];
    let engine = Engine::new(resources).expect("resources in order");
    for request in ["a", "b"] {
        engine.ingest(&Ingest::new(request.into())).expect("a new request");
    }
    let mut all = Vec::new();
    for (index, declared) in steps().into_iter().enumerate() {
        let step = Step::new("pass").with("kv", Declaration::Kv(declared));
        let admitted = engine.admit(step).unwrap().admitted().expect("pages enough");
        let planned = engine.plan(admitted).unwrap();
        let backend = if backends[index % backends.len()] == "dense" { &dense } else { &paged };
        for label in kv.plan_labels(planned.serial()).unwrap() {
            let stream = Stream::cpu();
            let mut forward = planned.forward(label.clone(), &stream);
            let tokens = kv.kv_plan(forward.plan_id()).unwrap().positions.len();
            for layer in 0..L {
                forward.set_layer(layer);
                let of = |kind: u64, heads: usize| -> Vec<f32> {
                    let name = label.as_str().len() as u64;
                    let at = |lane: usize| [index as u64, name, layer as u64, kind, lane as u64];
                    (0..tokens * heads * D).map(|lane| noise(&at(lane))).collect()
                };
                let (q, k, v) = (of(0, H), of(1, G), of(2, G));
                let (mut o, mut lse) = (vec![0f32; tokens * H * D], vec![0f32; tokens * H]);
                let view = |x, heads| TensorRef::from_slice(x, &[tokens, heads, D]).unwrap();
                let out = AttnOut {
                    o: TensorMut::from_slice(&mut o, &[tokens, H, D]).unwrap(),
                    lse: Some(TensorMut::from_slice(&mut lse, &[tokens, H]).unwrap()),
                };
                let entries = KvEntries::Nhd { k: view(&k, G), v: view(&v, G) };
                attend(&**backend, &mut forward, Query::Heads(view(&q, H)), Some(entries), out).unwrap();
                all.extend([o, lse]);
            }
        }
        engine.commit(planned).unwrap();
    }
    all
}

/// A hash of integers as a number in -1..1.
fn noise(parts: &[u64]) -> f32 {
    let hash = parts.iter().fold(0x9e37_79b9u64, |hash, part| {
        let mixed = (hash ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 29)
    });
    (hash >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

#[test]
fn dense_and_paged_stand_in_for_each_other_step_by_step() {
    for causal in ["true", "false"] {
        let paged = ran(&["paged"], causal);
        for backends in
            [&["dense"][..], &["dense", "paged"], &["paged", "dense"], &["paged", "paged", "dense"]]
        {
            let other = ran(backends, causal);
            assert_eq!(paged.len(), other.len());
            for (at, (want, got)) in paged.iter().zip(&other).enumerate() {
                let off: f64 = want.iter().zip(got).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                let all: f64 = want.iter().map(|a| f64::from(*a).powi(2)).sum();
                assert!(
                    off.sqrt() <= 2e-6 * all.sqrt(),
                    "{backends:?}, causal {causal}, output {at}: {off} of {all}"
                );
            }
        }
    }
}
