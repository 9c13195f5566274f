//! The store against a model that knows no pages: each stream is a plain vector of content keys.
//!
//! Random operations run on both. After each: the store's own walk passes, the pool's states add up, every
//! resident stream reads back through its page table exactly what the model has, and whatever was refused or
//! undone has left no trace.

use std::collections::{BTreeMap, BTreeSet};

use mstar_core::kv::{KvConfig, PagedStore};
use mstar_core::resource::{Ingest, Promotion};
use mstar_core::step::{Fork, KvStep};
use mstar_core::{Error, Label, Outcome, PlanId, RefusalReason, Slot, StepSerial};
use proptest::prelude::*;

use super::harness::*;

const REQUESTS: [&str; 3] = ["a", "b", "c"];
const LABELS: [&str; 3] = ["main", "cond", "x"];

#[derive(Clone, Debug)]
enum Op {
    /// A request comes in with a prompt of `len` tokens of a family.
    Ingest {
        request: usize,
        family: u64,
        len: usize,
    },
    /// A step is admitted and planned: ahead, when one is outstanding.
    Admit(Declared),
    /// The oldest step is promoted if need be, written and committed; or found stale and cleared.
    Commit,
    /// An outstanding step is rolled back: the newest, or the oldest and with it all.
    Rollback {
        newest: bool,
    },
    Reset {
        request: usize,
        free: bool,
    },
    Remove {
        request: usize,
    },
    Offload {
        request: usize,
    },
    Reload {
        request: usize,
    },
    EvictCached,
}

#[derive(Clone, Debug)]
struct Declared {
    /// Request, label, family of the content, span.
    segments: Vec<(usize, usize, u64, usize)>,
    /// Request, from, to.
    pre_forks: Vec<(usize, usize, usize)>,
    post_forks: Vec<(usize, usize, usize)>,
    commit: bool,
    /// Whether the content is told to the store.
    known: bool,
    /// Parts that cannot be are left out; else the store has to refuse them.
    sound: bool,
}

fn declared() -> impl Strategy<Value = Declared> {
    let segment = (0..REQUESTS.len(), 0..LABELS.len(), 0..2u64, 0..7usize);
    let fork = || prop::collection::vec((0..REQUESTS.len(), 0..LABELS.len(), 0..LABELS.len()), 0..3);
    let flags = (prop::bool::weighted(0.8), prop::bool::weighted(0.95), prop::bool::weighted(0.95));
    (prop::collection::vec(segment, 0..4), fork(), fork(), flags).prop_map(
        |(segments, pre_forks, post_forks, (commit, known, sound))| Declared {
            segments,
            pre_forks,
            post_forks,
            commit,
            known,
            sound,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let request = || 0..REQUESTS.len();
    prop_oneof![
        4 => (request(), 0..2u64, 0..20usize).prop_map(|(request, family, len)| Op::Ingest { request, family, len }),
        8 => declared().prop_map(Op::Admit),
        8 => Just(Op::Commit),
        2 => any::<bool>().prop_map(|newest| Op::Rollback { newest }),
        1 => (request(), any::<bool>()).prop_map(|(request, free)| Op::Reset { request, free }),
        1 => request().prop_map(|request| Op::Remove { request }),
        1 => request().prop_map(|request| Op::Offload { request }),
        3 => request().prop_map(|request| Op::Reload { request }),
        1 => Just(Op::EvictCached),
    ]
}

fn geometry() -> impl Strategy<Value = KvConfig> {
    let retention = prop_oneof![2 => Just(None), 1 => (1..12usize).prop_map(Some)];
    (prop::sample::select(vec![1usize, 3, 4]), 6..20usize, any::<bool>(), retention).prop_map(
        |(page_size, pages, prefix_cache, retention)| KvConfig {
            prefix_cache,
            retention,
            max_seq_len: 40,
            ..config(page_size, pages)
        },
    )
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Tokens {
    all: Vec<u64>,
    first_kept: usize,
}

impl Tokens {
    fn retire(&mut self, config: &KvConfig) {
        if let Some(kept) = config.retention {
            self.first_kept = self.first_kept.max(self.all.len().saturating_sub(kept));
        }
    }
}

#[derive(Default)]
struct Request {
    streams: BTreeMap<&'static str, Tokens>,
    on_host: bool,
}

type Key = (&'static str, &'static str);

struct Pending {
    serial: StepSerial,
    slot: usize,
    step: KvStep,
    ahead: bool,
    stale: bool,
    after: BTreeMap<Key, Tokens>,
    slots: BTreeSet<i64>,
    /// The store before, while nothing but steps has touched it since.
    before: Option<String>,
    evictions: u64,
}

struct Model {
    store: PagedStore,
    requests: BTreeMap<&'static str, Request>,
    pending: Vec<Pending>,
}

/// What the model says of a step.
enum Expected {
    Error,
    Offloaded,
    TooLong,
    After(BTreeMap<Key, Tokens>, Vec<(Key, usize, Vec<u64>)>),
}

impl Model {
    fn new(config: KvConfig) -> Model {
        Model { store: store(config), requests: BTreeMap::new(), pending: Vec::new() }
    }

    fn projected(&self, key: Key) -> Option<Tokens> {
        let ahead = self.pending.iter().rev().filter(|p| p.step.commit).find_map(|p| p.after.get(&key));
        ahead.or_else(|| self.requests.get(key.0)?.streams.get(key.1)).cloned()
    }

    /// The step without what could not be: requests that are not here, streams twice, forks of nothing.
    fn sound(&self, declared: &Declared) -> Declared {
        let here = |r: usize| self.requests.get(REQUESTS[r]).is_some_and(|q| !q.on_host);
        let mut labels: BTreeSet<(usize, usize)> = BTreeSet::new();
        for (r, id) in REQUESTS.iter().enumerate().filter(|(r, _)| here(*r)) {
            labels.extend(
                (0..LABELS.len()).filter(|&l| self.projected((id, LABELS[l])).is_some()).map(|l| (r, l)),
            );
        }
        fn forks(
            labels: &mut BTreeSet<(usize, usize)>,
            all: &[(usize, usize, usize)],
        ) -> Vec<(usize, usize, usize)> {
            let mut sound = Vec::new();
            for &(r, from, to) in all {
                if from != to && labels.contains(&(r, from)) {
                    labels.insert((r, to));
                    sound.push((r, from, to));
                }
            }
            sound
        }
        let pre_forks = forks(&mut labels, &declared.pre_forks);
        let mut seen = BTreeSet::new();
        let mut segments = declared.segments.clone();
        segments.retain(|s| here(s.0) && seen.insert((s.0, s.1)));
        labels.extend(&seen);
        let post_forks = forks(&mut labels, &declared.post_forks);
        Declared { segments, pre_forks, post_forks, ..declared.clone() }
    }

    /// The step, with content that continues each stream, and what it should do.
    fn expect(&self, declared: &Declared) -> (KvStep, Expected) {
        let key = |request: usize, label: usize| (REQUESTS[request], LABELS[label]);
        let forks = |forks: &[(usize, usize, usize)]| -> Vec<Fork> {
            forks.iter().map(|&(r, from, to)| fork(REQUESTS[r], LABELS[from], LABELS[to])).collect()
        };
        let mut wanted = KvStep {
            segments: vec![],
            commit: declared.commit,
            pre_forks: forks(&declared.pre_forks),
            post_forks: forks(&declared.post_forks),
            combined: vec![],
        };
        let (mut work, mut rows, mut seen) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        let (mut error, mut too_long) = (false, false);
        let get = |work: &BTreeMap<Key, Tokens>, key| work.get(&key).cloned().or_else(|| self.projected(key));
        let fork_all = |work: &mut BTreeMap<Key, Tokens>, all: &[(usize, usize, usize)]| {
            all.iter().all(|&(r, from, to)| {
                let Some(source) = get(work, key(r, from)).filter(|_| from != to) else { return false };
                work.insert(key(r, from), source.clone());
                work.insert(key(r, to), source);
                true
            })
        };
        let mut named: Vec<usize> = declared.segments.iter().map(|s| s.0).collect();
        named.extend(declared.pre_forks.iter().chain(&declared.post_forks).map(|f| f.0));
        error |= named.iter().any(|&r| !self.requests.contains_key(REQUESTS[r]));
        let on_host = named.iter().any(|&r| self.requests.get(REQUESTS[r]).is_some_and(|q| q.on_host));
        error |= !on_host && !fork_all(&mut work, &declared.pre_forks);
        for &(request, label, family, span) in &declared.segments {
            let key = key(request, label);
            error |= !seen.insert(key);
            let mut tokens = get(&work, key).unwrap_or_default();
            let from = tokens.all.len() as u64;
            let added: Vec<u64> = (from..from + span as u64).map(|t| family * 1000 + t).collect();
            wanted.segments.push(segment(key.0, key.1, &added));
            tokens.all.extend(&added);
            too_long |= tokens.all.len() > self.store.config().max_seq_len;
            rows.push((key, tokens.first_kept, tokens.all.clone()));
            tokens.retire(self.store.config());
            work.insert(key, tokens);
        }
        error |= !error && !on_host && !fork_all(&mut work, &declared.post_forks);
        error |= declared.pre_forks.iter().chain(&declared.post_forks).any(|&(_, from, to)| from == to);
        let expected = match (error, on_host, too_long) {
            (true, ..) => Expected::Error,
            (_, true, _) => Expected::Offloaded,
            (_, _, true) => Expected::TooLong,
            _ => Expected::After(work, rows),
        };
        (wanted, expected)
    }

    fn admit(&mut self, declared: &Declared) {
        let ahead = !self.pending.is_empty();
        if self.pending.len() == 2 || self.pending.first().is_some_and(|p| p.ahead) {
            let refused = self.store.admit(serial(), Slot(7), true, &step(vec![]));
            assert!(matches!(refused, Err(Error::Order { .. })));
            return;
        }
        let sound = self.sound(declared);
        let (written, expected) = self.expect(if declared.sound { &sound } else { declared });
        let mut told = written.clone();
        if !declared.known {
            told.segments.iter_mut().for_each(|s| s.tokens = [].into());
        }
        let slot = self.pending.first().map_or(0, |p| 1 - p.slot);
        let (serial, before) = (serial(), snapshot(&self.store));
        let need = self.store.page_need(&told);
        assert_eq!(snapshot(&self.store), before, "counting changes nothing");
        let evictions = self.store.stats().evictions;
        let outcome = self.store.admit(serial, Slot(slot), ahead, &told);
        let refusal = match (&outcome, &expected) {
            (Err(_), Expected::Error) => None,
            (Ok(Outcome::Refused(refusal)), _) => Some(refusal.reason.clone()),
            (Ok(Outcome::Admitted), Expected::After(after, rows)) => {
                let need = need.expect("an admitted step can be counted");
                assert!(need.needed <= need.available, "{need:?}");
                self.store.plan(serial, None).unwrap();
                let slots = self.check_plans(serial, slot, rows);
                let step = written;
                let before = Some(before);
                let after = after.clone();
                self.pending.push(Pending {
                    serial,
                    slot,
                    step,
                    ahead,
                    stale: false,
                    after,
                    slots,
                    before,
                    evictions,
                });
                return;
            }
            (other, _) => panic!("{other:?}"),
        };
        assert_eq!(snapshot(&self.store), before, "a refusal changes nothing");
        match (refusal, expected) {
            (Some(RefusalReason::AllocationFailed { pages_short, pages_needed, .. }), _) => {
                let need = need.expect("a refused step can be counted");
                assert_eq!((pages_needed, pages_short), (need.needed, need.needed - need.available));
            }
            (Some(RefusalReason::RequestOffloading { .. }), Expected::Offloaded)
            | (Some(RefusalReason::SequenceTooLong { .. }), Expected::TooLong)
            | (None, Expected::Error) => {}
            (other, _) => panic!("{other:?}"),
        }
    }

    /// Rows and positions are the model's; slots hold no stored token and are nobody else's.
    fn check_plans(&self, serial: StepSerial, slot: usize, rows: &[(Key, usize, Vec<u64>)]) -> BTreeSet<i64> {
        let s = self.store.config().page_size;
        let mut taken: BTreeSet<i64> = BTreeSet::new();
        for (id, request) in self.requests.iter().filter(|(_, r)| !r.on_host) {
            for label in request.streams.keys() {
                let state = self.store.stream(&(*id).into(), &(*label).into()).unwrap();
                taken.extend((state.first_kept..state.len).map(|position| {
                    let at = position - state.kv_offset;
                    i64::from(state.pages[at / s]) * s as i64 + (at % s) as i64
                }));
            }
        }
        if let Some(running) = self.pending.first().filter(|p| p.step.commit) {
            taken.extend(&running.slots);
        }
        let mut slots = BTreeSet::new();
        let mut planned = 0;
        for label in self.store.plan_labels(serial).unwrap() {
            let plan = self.store.kv_plan(&PlanId { slot: Slot(slot), label, serial }).unwrap();
            for (r, row) in plan.rows.iter().enumerate() {
                let find = |(key, ..): &&(Key, usize, Vec<u64>)| {
                    key.0 == row.request.as_str() && key.1 == row.label.as_str()
                };
                let (_, first_kept, tokens) = rows.iter().find(find).unwrap();
                assert_eq!((row.kv_len, row.kv_offset + row.page_start), (tokens.len(), *first_kept));
                assert!(row.page_start < s && row.kv_offset.is_multiple_of(s));
                assert_eq!(plan.pages(r).len(), tokens.len().div_ceil(s) - row.kv_offset / s);
                let (from, to) = (plan.qo_indptr[r] as usize, plan.qo_indptr[r + 1] as usize);
                let positions: Vec<i32> =
                    (tokens.len() - row.q_len..tokens.len()).map(|p| p as i32).collect();
                assert_eq!(plan.positions[from..to], positions);
                for (&slot, &position) in plan.slots[from..to].iter().zip(&positions) {
                    let at = position as usize - row.kv_offset;
                    assert_eq!(slot, i64::from(plan.pages(r)[at / s]) * s as i64 + (at % s) as i64);
                    assert!(slot >= s as i64, "the sink is written");
                    assert!(!taken.contains(&slot), "slot {slot} holds a stored token");
                    assert!(slots.insert(slot), "slot {slot} is written twice");
                }
                planned += 1;
            }
        }
        assert_eq!(planned, rows.len());
        slots
    }

    fn commit(&mut self) {
        let Some(p) = self.pending.first_mut() else { return };
        if p.ahead {
            let promotion = self.store.promote(p.serial, Slot(p.slot)).unwrap();
            assert_eq!(promotion == Promotion::Stale, p.stale);
            if p.stale {
                // Whatever was planned on top goes with it.
                self.store.rollback(p.serial);
                self.pending.clear();
                return;
            }
            p.ahead = false;
        }
        let p = self.pending.remove(0);
        write(&self.store, p.serial, Slot(p.slot), &p.step);
        self.store.commit(p.serial).unwrap();
        if p.step.commit {
            for ((request, label), tokens) in p.after {
                self.requests.get_mut(request).unwrap().streams.insert(label, tokens);
            }
        }
        self.touched();
    }

    /// Something other than a step's reservation has changed the store.
    fn touched(&mut self) {
        self.pending.iter_mut().for_each(|p| p.before = None);
    }

    fn rollback(&mut self, newest: bool) {
        let from = if newest { self.pending.len().saturating_sub(1) } else { 0 };
        let Some(p) = self.pending.get(from) else { return };
        self.store.rollback(p.serial);
        if let Some(before) = p.before.as_ref().filter(|_| p.evictions == self.store.stats().evictions) {
            assert_eq!(snapshot(&self.store), *before, "a rollback leaves no trace");
        }
        self.pending.truncate(from);
    }

    fn named(&self, request: &str) -> bool {
        self.pending.iter().any(|p| p.after.keys().any(|(r, _)| *r == request))
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Ingest { request: r, family, len } => {
                let id = REQUESTS[r];
                let prompt: Vec<u64> = (0..len as u64).map(|t| family * 1000 + t).collect();
                let prompts = vec![(Label::main(), prompt.as_slice().into())];
                self.store.ingest(&Ingest { prompts, ..Ingest::new(request(id)) }).unwrap();
                if self.requests.contains_key(id) {
                    return; // it stays as it was
                }
                let hit = self.store.ingest_report(&request(id)).unwrap()[0].1;
                let s = self.store.config().page_size;
                assert!(hit.is_multiple_of(s) && hit < len.max(1), "{hit} tokens of {len}");
                assert!(self.store.config().prefix_cache || hit == 0);
                let mut tokens = Tokens { all: prompt[..hit].to_vec(), first_kept: 0 };
                tokens.retire(self.store.config());
                self.requests.entry(id).or_default().streams.insert("main", tokens);
                self.touched();
            }
            Op::Admit(ref declared) => self.admit(declared),
            Op::Commit => self.commit(),
            Op::Rollback { newest } => self.rollback(newest),
            Op::Reset { request: r, free } => {
                let id = REQUESTS[r];
                let running = self.pending.iter().any(|p| !p.ahead && p.after.keys().any(|(r, _)| *r == id));
                let result = self.store.reset(&request(id), free);
                assert_eq!(result.is_ok(), self.requests.contains_key(id) && !running);
                if result.is_ok() {
                    let q = self.requests.get_mut(id).unwrap();
                    q.streams.values_mut().for_each(|tokens| *tokens = Tokens::default());
                    q.on_host = false;
                    // A stream that the step itself would make is as absent as before.
                    for p in &mut self.pending {
                        p.stale |= p.after.keys().any(|(r, label)| *r == id && q.streams.contains_key(label));
                    }
                    self.touched();
                }
            }
            Op::Remove { request: r } => {
                let id = REQUESTS[r];
                let result = self.store.remove(&request(id));
                assert_eq!(result.is_ok(), !self.named(id));
                if result.is_ok() {
                    self.requests.remove(id);
                    self.touched();
                }
            }
            Op::Offload { request: r } => {
                let id = REQUESTS[r];
                let result = self.store.offload(&request(id));
                assert_eq!(result.is_ok(), self.requests.contains_key(id) && !self.named(id));
                if result.is_ok() {
                    self.requests.get_mut(id).unwrap().on_host = true;
                    self.touched();
                }
            }
            Op::Reload { request: r } => {
                let id = REQUESTS[r];
                let before = snapshot(&self.store);
                match self.store.reload(&request(id)) {
                    Ok(Outcome::Admitted) => {
                        self.requests.get_mut(id).unwrap().on_host = false;
                        self.touched();
                    }
                    Ok(Outcome::Refused(refusal)) => {
                        assert!(matches!(refusal.reason, RefusalReason::AllocationFailed { .. }));
                        assert_eq!(snapshot(&self.store), before);
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => assert!(!self.requests.contains_key(id)),
                }
            }
            Op::EvictCached => {
                self.store.evict_cached().unwrap();
                self.touched();
            }
        }
    }

    fn check(&self) {
        self.store.check().unwrap();
        let stats = self.store.stats();
        assert_eq!(stats.pages_free + stats.pages_cached + stats.pages_held, stats.pages_total);
        assert!(stats.pages_evictable <= stats.pages_cached);
        let here: Vec<_> = self.requests.keys().map(|&id| request(id)).collect();
        assert_eq!(self.store.requests(), here);
        for (&id, q) in &self.requests {
            assert_eq!(self.store.is_offloaded(&request(id)).unwrap(), q.on_host);
            let labels: Vec<Label> = q.streams.keys().map(|&label| label.into()).collect();
            assert_eq!(self.store.labels(&request(id)).unwrap(), labels);
            for (&label, tokens) in &q.streams {
                let state = self.store.stream(&request(id), &label.into()).unwrap();
                assert_eq!(
                    (state.len, state.first_kept),
                    (tokens.all.len(), tokens.first_kept),
                    "{id} {label}"
                );
                if !q.on_host {
                    assert_eq!(
                        content(&self.store, id, label),
                        tokens.all[tokens.first_kept..],
                        "{id} {label}"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn the_store_behaves_as_plain_vectors_do(config in geometry(), ops in prop::collection::vec(op(), 1..80)) {
        let mut model = Model::new(config);
        for op in &ops {
            model.apply(op);
            model.check();
        }
        // At the end everything comes back.
        model.rollback(false);
        for id in REQUESTS {
            model.apply(&Op::Remove { request: REQUESTS.iter().position(|r| *r == id).unwrap() });
        }
        model.apply(&Op::EvictCached);
        model.check();
        prop_assert_eq!(model.store.stats().pages_free, model.store.config().usable_pages());
    }
}
