//! What staging a ring's masks costs the host in `plan`: a world model's pass, its local and its dilated layers.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use mstar_attn_flex::{DType, FlexAttention, FlexOptions};
use mstar_core::attend::{AttnGeometry, BuildContext, Softmax};
use mstar_core::kv::{KvConfig, KvLayout, RingCache, RingConfig, RingGeometry, RingKv};
use mstar_core::resource::{Ingest, StepContext};
use mstar_core::spec::{Fallback, KernelFamily, Schedule};
use mstar_core::step::{Declaration, RingSegment, RingStep};
use mstar_core::{Label, Outcome, PlanId, RequestId, Resource, Slot, Step, StepSerial};
use mstar_kernels::{Buffer, Stream};

/// Tokens of a frame.
const F: usize = 512;

fn step(frame_pos: u64, commit: bool) -> Step {
    let segment =
        RingSegment { request: RequestId::new("player"), label: Label::main(), span: F, frame_pos, commit };
    Step::new("frame").with("ring", Declaration::Ring(RingStep { segments: vec![segment] }))
}

fn stage(c: &mut Criterion) {
    let local = RingGeometry::last(16);
    let global = RingGeometry { ring_frames: 16, ring_buckets: 16, pinned_dilation: 8 };
    let config = RingConfig::new(vec![local, global], F, 8, DType::F32);
    let ring = Arc::new(RingCache::new("ring".into(), config).expect("it fits"));
    let kv = KvConfig::new(KvLayout::Nhd { num_kv_heads: 1, head_dim: 8 }, DType::F32, 1, 1);
    let attn = FlexAttention::new(
        &BuildContext {
            name: "attn".into(),
            geometry: AttnGeometry::over(&kv, 1, DType::F32, Softmax::scaled(1.0)),
            stream: Stream::cpu(),
            kv_cache: None,
            ring: Some(ring.clone()),
            query_from: None,
            slots: 1,
            largest: None,
            schedule: Schedule::Invariant,
            kernels: KernelFamily::Auto,
            fallback: Fallback::Refuse,
        },
        FlexOptions::default(),
    )
    .expect("a ring that is served");
    ring.ingest_request(&Ingest::new("player".into())).expect("new");

    let frame = Buffer::for_tensor(DType::F32, &[F, 1, 8]).expect("it fits");
    let frame = || frame.tensor(0, DType::F32, &[F, 1, 8]).expect("in range");
    let stream = Stream::cpu();
    let player = RequestId::new("player");
    let mut serial = 0;
    // One whole pass; how long the staging of its masks took.
    let mut pass = |commit: bool| {
        serial += 1;
        let cx = StepContext { serial: StepSerial(serial), slot: Slot(0), preplan: false, bucket: None };
        let declared = step(ring.clock(&player).expect("known"), commit);
        assert_eq!(ring.admit(&cx, &declared).expect("a step that can be"), Outcome::Admitted);
        ring.plan(&cx, &declared).expect("admitted");
        let start = Instant::now();
        attn.plan(&cx, black_box(&declared)).expect("planned by the ring");
        let took = start.elapsed();
        let id = PlanId { slot: cx.slot, label: Label::main(), serial: cx.serial };
        for layer in 0..2 {
            ring.upsert(&id, layer, frame(), frame(), &stream).expect("a layer of the ring");
        }
        attn.commit(cx.serial, &declared).expect("in order");
        ring.commit(cx.serial, &declared).expect("in order");
        took
    };
    let mut group = c.benchmark_group("stage two geometries of 16 frames of 512 tokens");
    group.bench_function("a new frame, growing", |b| {
        b.iter_custom(|rounds| {
            let mut took = Duration::ZERO;
            for round in 0..rounds {
                if round % 12 == 0 {
                    ring.reset_request(&player, false).expect("known");
                }
                took += pass(true);
            }
            took
        });
    });
    for _ in 0..140 {
        pass(true);
    }
    group.bench_function("a new frame, periodic", |b| {
        b.iter_custom(|rounds| (0..rounds).map(|_| pass(true)).sum());
    });
    group.bench_function("a denoise pass of the same frame", |b| {
        b.iter_custom(|rounds| (0..rounds).map(|_| pass(false)).sum());
    });
    group.finish();
}

criterion_group!(benches, stage);
criterion_main!(benches);
