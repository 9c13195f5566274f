//! The manager level through its public names alone: built by the factory, run by an engine.

use std::sync::Arc;

use mstar_attn_paged::{DType, Device, PagedFactory, Stream, TensorMut, TensorRef};
use mstar_core::attend::{
    AttnBackend, AttnGeometry, BackendFactory, Backends, BuildContext, Softmax, attend, resolve_attn_backend,
};
use mstar_core::graph::Bucket;
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, PagedKv, PagedKvCache};
use mstar_core::resource::PaddedShape;
use mstar_core::spec::{Fallback, Faults, KernelFamily, Node, Place, Schedule};
use mstar_core::step::{Declaration, KvStep};
use mstar_core::{Attention, AttnOut, Engine, Ingest, Query, Resource, Segment, Step};

use crate::alloc::allocations;

const H: usize = 4;
const G: usize = 2;
const D: usize = 64;

fn model(pages: usize) -> (Engine, Arc<dyn Attention>) {
    let layout = KvLayout::Nhd { num_kv_heads: G, head_dim: D };
    let kv = Arc::new(PagedKvCache::new("kv".into(), KvConfig::new(layout, DType::F32, 16, pages)).unwrap());
    let mut backends = Backends::new();
    backends.register(Arc::new(PagedFactory));
    let geometry = AttnGeometry::over(kv.config(), H, DType::F32, Softmax::scaled(0.125));
    let factory = resolve_attn_backend(&AttnBackend::Auto, Device::Cpu, &geometry, &backends).unwrap();
    let faults = Faults::new();
    let options = factory.parse(&Node::empty_map("resources.attn", Place::default()), &faults).unwrap();
    let attention = options
        .build(&BuildContext {
            name: "attn".into(),
            geometry,
            stream: Stream::cpu(),
            kv_cache: Some(kv.clone() as Arc<dyn PagedKv>),
            ring: None,
            query_from: None,
            slots: 2,
            largest: None,
            schedule: Schedule::Invariant,
            kernels: KernelFamily::Auto,
            fallback: Fallback::Refuse,
        })
        .unwrap();
    let resources: Vec<Arc<dyn Resource>> = vec![kv, attention.clone()];
    (Engine::new(resources).unwrap(), attention)
}

fn step(rows: &[(&str, usize)]) -> Step {
    let segment = |&(request, span): &(&str, usize)| Segment {
        request: request.into(),
        label: "main".into(),
        span,
        tokens: [].into(),
    };
    let segments = rows.iter().map(segment).collect();
    Step::new("decode").with("kv", Declaration::Kv(KvStep { segments, ..KvStep::default() }))
}

#[test]
fn a_layer_run_through_the_engine_allocates_nothing() {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(|| {
        let (engine, attention) = model(300);
        for request in ["a", "b", "c"] {
            engine.ingest(&Ingest::new(request.into())).unwrap();
        }
        let bucket = Bucket { walk: "decode".into(), shape: PaddedShape { rows: 4, tokens: 4 } };
        engine.build_accelerator_graph_buffers([bucket.clone()]).unwrap();
        let long = vec![0.25f32; 3000 * H * D];
        let (mut o, mut lse) = (vec![0f32; 3000 * H * D], vec![0f32; 3000 * H]);
        let stream = Stream::cpu();
        for (turn, rows) in
            [[("a", 2000), ("b", 600), ("c", 1)], [("a", 1), ("b", 1), ("c", 1)]].iter().enumerate()
        {
            let decode = turn == 1;
            let admission =
                if decode { engine.admit_in(step(rows), &bucket) } else { engine.admit(step(rows)) };
            let planned = engine.plan(admission.unwrap().admitted().unwrap()).unwrap();
            let tokens = if decode { 4 } else { 2601 };
            let mut forward = planned.forward("main", &stream);
            let mut layer = || {
                let kv = TensorRef::from_slice(&long[..tokens * G * D], &[tokens, G, D]).unwrap();
                let q = TensorRef::from_slice(&long[..tokens * H * D], &[tokens, H, D]).unwrap();
                let out = AttnOut {
                    o: TensorMut::from_slice(&mut o[..tokens * H * D], &[tokens, H, D]).unwrap(),
                    lse: Some(TensorMut::from_slice(&mut lse[..tokens * H], &[tokens, H]).unwrap()),
                };
                let fresh = Some(KvEntries::Nhd { k: kv, v: kv });
                attend(&*attention, &mut forward, Query::Heads(q), fresh, out).unwrap();
            };
            layer();
            assert_eq!(allocations(&mut layer), 0, "turn {turn}");
            assert!(o[..(tokens - 1) * H * D].iter().all(|x| (x - 0.25).abs() < 1e-6));
            engine.commit(planned).unwrap();
        }
    });
}

#[test]
fn options_of_a_spec_are_refused_by_name() {
    use mstar_core::spec::{Entry, Scalar, Value};
    let entry = |key: &str, text: &str| Entry {
        key: key.into(),
        place: Place::default(),
        value: Node::new(Place::default(), Value::Scalar(Scalar { text: text.into(), quoted: false })),
    };
    let said = |key: &str, text: &str| {
        let node = Node::new(Place::default(), Value::Map(vec![entry(key, text)])).rooted("resources.attn");
        let faults = Faults::new();
        PagedFactory.parse(&node, &faults);
        faults.settle("x.yaml").map_err(|errors| errors.to_string())
    };
    assert!(said("causal", "false").is_ok() && said("cascade", "false").is_ok());
    assert!(said("casual", "true").unwrap_err().contains("causal"));
    assert!(said("causal", "yes please").is_err());
}
