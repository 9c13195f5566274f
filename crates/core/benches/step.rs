//! What a step costs the host in a KV cache: admit, plan and commit of 64 decode rows of 8192 tokens.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use mstar_core::kv::{KvConfig, KvLayout, PagedStore};
use mstar_core::resource::Ingest;
use mstar_core::step::KvStep;
use mstar_core::{Label, Outcome, RequestId, ResourceName, Segment, Slot, StepSerial};
use mstar_kernels::DType;

const ROWS: usize = 64;
const TOKENS: usize = 8192;

fn step(span: usize) -> KvStep {
    let segments = (0..ROWS).map(|r| Segment {
        request: RequestId::new(format!("request-{r}")),
        label: Label::main(),
        span,
        tokens: (0..span as u64).map(|t| t + r as u64 * 1_000_000).collect(),
    });
    KvStep {
        segments: segments.collect(),
        commit: true,
        pre_forks: vec![],
        post_forks: vec![],
        combined: vec![],
    }
}

fn admit(store: &PagedStore, serial: u64, step: &KvStep) -> StepSerial {
    let serial = StepSerial(serial);
    assert_eq!(store.admit(serial, Slot(0), false, step).expect("a step that can be"), Outcome::Admitted);
    serial
}

fn steps(c: &mut Criterion) {
    let layout = KvLayout::Nhd { num_kv_heads: 1, head_dim: 1 };
    let mut config = KvConfig::new(layout, DType::U8, 16, ROWS * (TOKENS / 16 + 2) + 1);
    config.max_seq_len = 2 * TOKENS;
    config.prefix_cache = true;
    let store = PagedStore::new(ResourceName::new("kv"), config).expect("it fits");
    for segment in step(0).segments {
        store.ingest(&Ingest::new(segment.request)).expect("new");
    }
    let prefill = admit(&store, 0, &step(TOKENS));
    store.commit(prefill).expect("in order");
    let one = step(1);
    let mut next = 1;
    let mut serial = || {
        next += 1;
        next
    };
    let mut group = c.benchmark_group("64 decode rows of 8192 tokens, pages of 16");
    group.bench_function("admit and roll back", |b| {
        b.iter(|| store.rollback(black_box(admit(&store, serial(), &one))));
    });
    group.bench_function("plan", |b| {
        b.iter_batched(
            || admit(&store, serial(), &one),
            |serial| {
                store.plan(black_box(serial), None).expect("admitted");
                store.rollback(serial);
            },
            BatchSize::PerIteration,
        );
    });
    group.bench_function("admit, plan, commit nothing", |b| {
        let pass = KvStep { commit: false, ..one.clone() };
        b.iter(|| {
            let serial = admit(&store, serial(), &pass);
            store.plan(serial, None).expect("admitted");
            store.commit(black_box(serial)).expect("in order");
        });
    });
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
