//! A store whose tokens can be recognised: each is written as its own content key, in every layer and plane.

use std::sync::atomic::{AtomicU64, Ordering};

use mstar_core::kv::{KvConfig, KvEntries, KvLayout, LayerView, PagedStore, PlaneConfig};
use mstar_core::resource::Ingest;
use mstar_core::step::{Fork, KvStep};
use mstar_core::{Label, Outcome, PlanId, RequestId, ResourceName, Segment, Slot, StepSerial};
use mstar_kernels::{DType, Stream, TensorRef};

static SERIAL: AtomicU64 = AtomicU64::new(1);

pub(crate) fn serial() -> StepSerial {
    StepSerial(SERIAL.fetch_add(1, Ordering::Relaxed))
}

/// Two layers of one head of width 2 in f32, and a plane of three bytes.
pub(crate) fn config(page_size: usize, pages: usize) -> KvConfig {
    let layout = KvLayout::Nhd { num_kv_heads: 1, head_dim: 2 };
    let mut config = KvConfig::new(layout, DType::F32, page_size, pages + 1);
    config.max_seq_len = 4096;
    config.num_layers = 2;
    config.planes = vec![PlaneConfig { name: "scales".into(), dtype: DType::U8, width: 3, layers: None }];
    config
}

pub(crate) fn store(config: KvConfig) -> PagedStore {
    PagedStore::new(ResourceName::new("kv"), config).unwrap()
}

pub(crate) fn request(id: &str) -> RequestId {
    RequestId::new(id)
}

pub(crate) fn ingest(store: &PagedStore, id: &str, prompt: &[u64]) -> usize {
    let prompts = vec![(Label::main(), prompt.into())];
    store.ingest(&Ingest { prompts, ..Ingest::new(request(id)) }).unwrap();
    store.ingest_report(&request(id)).unwrap()[0].1
}

pub(crate) fn segment(id: &str, label: &str, tokens: &[u64]) -> Segment {
    Segment { request: id.into(), label: label.into(), span: tokens.len(), tokens: tokens.into() }
}

pub(crate) fn fork(id: &str, from: &str, to: &str) -> Fork {
    Fork { request: id.into(), from: from.into(), to: to.into() }
}

pub(crate) fn step(segments: Vec<Segment>) -> KvStep {
    KvStep { segments, commit: true, pre_forks: vec![], post_forks: vec![], combined: vec![] }
}

/// Writes each token's key through the step's plans. `keys` gives the content by row, in plan order.
pub(crate) fn write(store: &PagedStore, serial: StepSerial, slot: Slot, step: &KvStep) {
    for label in store.plan_labels(serial).unwrap() {
        let id = PlanId { slot, label, serial };
        let plan = store.kv_plan(&id).unwrap();
        let mut keys: Vec<u64> = Vec::new();
        for row in &plan.rows[..plan.real_rows] {
            let of = |s: &&Segment| s.request == row.request && s.label == row.label;
            keys.extend(step.segments.iter().find(of).unwrap().tokens.iter());
        }
        let t = plan.slots.len();
        keys.resize(t, 0xDEAD);
        for layer in 0..store.config().num_layers {
            let tag = |n: u64| (n * 4 + layer as u64) as f32;
            let k: Vec<f32> = keys.iter().flat_map(|&n| [tag(n), -tag(n)]).collect();
            let v: Vec<f32> = keys.iter().flat_map(|&n| [tag(n) + 0.5, -tag(n) - 0.5]).collect();
            let k = TensorRef::from_slice(&k, &[t, 1, 2]).unwrap();
            let v = TensorRef::from_slice(&v, &[t, 1, 2]).unwrap();
            store.write_kv(&id, layer, KvEntries::Nhd { k, v }, &Stream::cpu()).unwrap();
            let scales: Vec<u8> = keys.iter().flat_map(|&n| [n as u8, (n >> 8) as u8, layer as u8]).collect();
            let scales = TensorRef::from_slice(&scales, &[t, 3]).unwrap();
            store.write_plane(&id, "scales", layer, scales, &Stream::cpu()).unwrap();
        }
    }
}

/// Runs a whole step.
pub(crate) fn run(store: &PagedStore, step: &KvStep) -> Outcome {
    let serial = serial();
    let outcome = store.admit(serial, Slot(0), false, step).unwrap();
    if outcome == Outcome::Admitted {
        store.plan(serial, None).unwrap();
        write(store, serial, Slot(0), step);
        store.commit(serial).unwrap();
    }
    store.check().unwrap();
    outcome
}

pub(crate) fn extend(store: &PagedStore, id: &str, label: &str, tokens: &[u64]) -> Outcome {
    run(store, &step(vec![segment(id, label, tokens)]))
}

/// Runs a request's whole prompt, less what the index already had; returns how much that was.
pub(crate) fn prompt(store: &PagedStore, id: &str, tokens: &[u64]) -> usize {
    let hit = ingest(store, id, tokens);
    assert_eq!(extend(store, id, "main", &tokens[hit..]), Outcome::Admitted);
    hit
}

/// A slot's content key, which every layer and plane must agree on.
pub(crate) fn token_at(store: &PagedStore, page: i32, slot: usize) -> u64 {
    let mut keys = Vec::new();
    for layer in 0..store.config().num_layers {
        let LayerView::Nhd { k, v } = store.layer(layer).unwrap() else { panic!("the harness stores NHD") };
        let row = |t: TensorRef<'_>| {
            let row = t.select(0, page as usize).unwrap().select(0, slot).unwrap();
            row.as_slice::<f32>().unwrap().to_vec()
        };
        let (k, v) = (row(k), row(v));
        let key = (k[0] as u64 - layer as u64) / 4;
        assert_eq!([k[1], v[0], v[1]], [-k[0], k[0] + 0.5, -k[0] - 0.5], "page {page} slot {slot}");
        let scales = store.plane("scales", layer).unwrap();
        let scales = scales.select(0, page as usize).unwrap().select(0, slot).unwrap();
        let scales = scales.as_slice::<u8>().unwrap();
        assert_eq!(scales, [key as u8, (key >> 8) as u8, layer as u8], "page {page} slot {slot}");
        keys.push(key);
    }
    assert!(keys.windows(2).all(|w| w[0] == w[1]), "page {page} slot {slot}: {keys:?}");
    keys[0]
}

/// A stream's kept tokens, read back through its page table.
pub(crate) fn content(store: &PagedStore, id: &str, label: &str) -> Vec<u64> {
    let state = store.stream(&request(id), &label.into()).unwrap();
    let s = store.config().page_size;
    (state.first_kept..state.len)
        .map(|position| {
            let at = position - state.kv_offset;
            token_at(store, state.pages[at / s], at % s)
        })
        .collect()
}

/// All that can be seen of a store's bookkeeping, to compare before and after.
pub(crate) fn snapshot(store: &PagedStore) -> String {
    let mut out = String::new();
    for id in store.requests() {
        out += &format!("{id} {:?}\n", store.is_offloaded(&id));
        for label in store.labels(&id).unwrap() {
            out += &format!("  {label} {:?}\n", store.stream(&id, &label).unwrap());
        }
    }
    let stats = store.stats();
    let pages = (stats.pages_free, stats.pages_cached, stats.pages_held, stats.indexed);
    let owners: Vec<u32> = (1..=stats.pages_total as i32).map(|p| store.owners(p).unwrap()).collect();
    out + &format!("{pages:?} {owners:?}")
}
