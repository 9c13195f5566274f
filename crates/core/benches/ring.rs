//! What a pass costs the host in a ring, in a model of 24 layers of which every fourth dilates, frames of 512 tokens:
//! staging its visible blocks in `plan`, writing one layer, and keeping a frame of all layers.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use mstar_core::kv::{RingCache, RingConfig, RingGeometry, RingKv};
use mstar_core::resource::{Ingest, StepContext};
use mstar_core::step::{Declaration, RingSegment, RingStep};
use mstar_core::{Label, Outcome, PlanId, RequestId, Resource, Slot, Step, StepSerial};
use mstar_kernels::{Buffer, DType, Stream};

const F: usize = 512;
const WORLDS: usize = 4;

fn ring() -> RingCache {
    let wide = RingGeometry { ring_frames: 16, ring_buckets: 16, pinned_dilation: 4 };
    let near = RingGeometry::last(8);
    let layers = (0..24).map(|layer| if layer % 4 == 3 { wide } else { near }).collect();
    let one = RingConfig::new(layers, F, 64, DType::Bf16);
    RingCache::new("ring".into(), RingConfig { num_worlds: WORLDS, num_kv_heads: 2, ..one }).expect("it fits")
}

fn step(rows: usize, frame_pos: u64, commit: bool) -> Step {
    let segment = |row| RingSegment {
        request: RequestId::new(format!("request-{row}")),
        label: Label::main(),
        span: F,
        frame_pos,
        commit,
    };
    let segments = (0..rows).map(segment).collect();
    Step::new("frame").with("ring", Declaration::Ring(RingStep { segments }))
}

fn context(serial: u64) -> StepContext {
    StepContext { serial: StepSerial(serial), slot: Slot(0), preplan: false, bucket: None }
}

fn passes(c: &mut Criterion) {
    let ring = ring();
    (0..WORLDS).for_each(|row| {
        ring.ingest_request(&Ingest::new(RequestId::new(format!("request-{row}")))).expect("new");
    });
    let (stream, mut serial) = (Stream::cpu(), 0);
    let frames = Buffer::for_tensor(DType::Bf16, &[WORLDS * F, 2, 64]).expect("it fits");
    let kv = |rows: usize| frames.tensor(0, DType::Bf16, &[rows * F, 2, 64]).expect("it fits");
    let mut admit = |step: &Step| {
        serial += 1;
        let cx = context(serial);
        assert_eq!(ring.admit(&cx, step).expect("a step that can be"), Outcome::Admitted);
        cx
    };
    let write = |cx: &StepContext, rows: usize| {
        let id = PlanId { slot: cx.slot, label: Label::main(), serial: cx.serial };
        for layer in 0..ring.config().layers.len() {
            ring.upsert(&id, layer, kv(rows), kv(rows), &stream).expect("planned");
        }
    };
    // Past the growing phase of every layer.
    for frame in 0..70 {
        let step = step(WORLDS, frame, true);
        let cx = admit(&step);
        ring.plan(&cx, &step).expect("admitted");
        write(&cx, WORLDS);
        ring.commit(cx.serial, &step).expect("written");
    }
    let mut group = c.benchmark_group("24 layers, frames of 512 tokens");
    for rows in [1, WORLDS] {
        let pass = step(rows, 70, false);
        group.bench_function(format!("plan, {rows} worlds"), |b| {
            b.iter_batched(
                || admit(&pass),
                |cx| {
                    ring.plan(black_box(&cx), &pass).expect("admitted");
                    ring.rollback(cx.serial);
                },
                BatchSize::PerIteration,
            );
        });
    }
    let pass = step(1, 70, false);
    group.bench_function("admit, plan, commit nothing, 1 world", |b| {
        b.iter(|| {
            let cx = admit(&pass);
            ring.plan(&cx, &pass).expect("admitted");
            ring.commit(black_box(cx.serial), &pass).expect("in order");
        });
    });
    let cx = admit(&pass);
    ring.plan(&cx, &pass).expect("admitted");
    let id = PlanId { slot: cx.slot, label: Label::main(), serial: cx.serial };
    group.bench_function("upsert of one layer, 1 world", |b| {
        b.iter(|| ring.upsert(black_box(&id), 3, kv(1), kv(1), &stream).expect("planned").visible(0).len());
    });
    ring.rollback(cx.serial);
    let mut frame = 70;
    group.bench_function("commit of a frame, 1 world", |b| {
        b.iter_batched(
            || {
                let step = step(1, frame, true);
                frame += 1;
                let cx = admit(&step);
                ring.plan(&cx, &step).expect("admitted");
                write(&cx, 1);
                (cx, step)
            },
            |(cx, step)| ring.commit(cx.serial, &step).expect("written"),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, passes);
criterion_main!(benches);
