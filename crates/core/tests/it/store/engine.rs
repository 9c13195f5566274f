//! The store as a resource of an engine: the step's life by type, with real pages under it.

use std::sync::Arc;

use mstar_core::kv::{KvConfig, PagedKvCache};
use mstar_core::resource::{Fingerprint, Ingest};
use mstar_core::step::{Declaration, KvStep};
use mstar_core::{Engine, Resource, ResourceName, Step};

use super::harness::*;

fn cache(name: &str, config: KvConfig) -> Arc<PagedKvCache> {
    Arc::new(PagedKvCache::new(ResourceName::new(name), config).unwrap())
}

fn engine(caches: &[&Arc<PagedKvCache>]) -> Engine {
    Engine::new(caches.iter().map(|&c| c.clone() as Arc<dyn Resource>).collect()).unwrap()
}

fn declare(name: &str, kv: &KvStep) -> Step {
    Step::new("decode").with(name, Declaration::Kv(kv.clone()))
}

fn here(cache: &PagedKvCache, engine: &Engine, id: &str, tokens: &[u64]) {
    engine.ingest(&Ingest::new(request(id))).unwrap();
    let prompt = step(vec![segment(id, "main", tokens)]);
    let admitted = engine.admit(declare(cache.name().as_str(), &prompt)).unwrap().admitted().unwrap();
    let planned = engine.plan(admitted).unwrap();
    write(cache.store(), planned.serial(), planned.slot(), &prompt);
    engine.commit(planned).unwrap();
    cache.store().check().unwrap();
}

#[test]
fn a_refusal_by_the_second_cache_leaves_the_first_as_it_was() {
    let (a, b) = (cache("a", config(4, 16)), cache("b", config(4, 2)));
    let engine = engine(&[&a, &b]);
    here(&a, &engine, "r", &[1, 2, 3, 4, 5]);
    let (before_a, before_b) = (snapshot(a.store()), snapshot(b.store()));
    let mut wanted = step(vec![segment("r", "main", &[6; 9]), segment("r", "cond", &[7])]);
    wanted.pre_forks = vec![fork("r", "main", "cond")];
    let big = step(vec![segment("r", "main", &[1; 9])]);
    let both = declare("a", &wanted).with("b", Declaration::Kv(big));
    let refusal = engine.admit(both).unwrap().admitted().unwrap_err();
    assert_eq!(refusal.to_string(), "b: request r (main) is 1 pages short of the 3 it needs");
    a.store().check().unwrap();
    assert_eq!((snapshot(a.store()), snapshot(b.store())), (before_a, before_b));
}

#[test]
fn a_stale_step_is_admitted_anew_on_what_is_there_now() {
    let kv = cache("kv", config(4, 16));
    let engine = engine(&[&kv]);
    here(&kv, &engine, "r", &[1, 2, 3, 4, 5]);
    here(&kv, &engine, "s", &[9]);
    let (now, next) = (step(vec![segment("s", "main", &[10])]), step(vec![segment("r", "main", &[6])]));
    let admitted = engine.admit(declare("kv", &now)).unwrap().admitted().unwrap();
    let running = engine.plan(admitted).unwrap();
    let ahead = engine.preplan(&running, declare("kv", &next)).unwrap().admitted().unwrap();
    write(kv.store(), running.serial(), running.slot(), &now);
    engine.commit(running).unwrap();
    engine.reset(&request("r"), true).unwrap();
    let promoted = engine.promote(ahead).unwrap().admitted().unwrap();
    write(kv.store(), promoted.serial(), promoted.slot(), &next);
    engine.commit(promoted).unwrap();
    kv.store().check().unwrap();
    assert_eq!((content(kv.store(), "r", "main"), content(kv.store(), "s", "main")), (vec![6], vec![9, 10]));
}

#[test]
fn tokens_that_are_dropped_give_everything_back() {
    let kv = cache("kv", config(4, 16));
    let engine = engine(&[&kv]);
    here(&kv, &engine, "r", &[1, 2, 3, 4, 5]);
    let before = snapshot(kv.store());
    let mut next = step(vec![segment("r", "main", &[6; 5]), segment("r", "cond", &[7])]);
    next.pre_forks = vec![fork("r", "main", "cond")];
    let admitted = engine.admit(declare("kv", &next)).unwrap().admitted().unwrap();
    let running = engine.plan(admitted).unwrap();
    let ahead = engine.preplan(&running, declare("kv", &next)).unwrap().admitted().unwrap();
    engine.clear(ahead);
    let ahead = engine.preplan(&running, declare("kv", &next)).unwrap().admitted().unwrap();
    engine.abort(running);
    assert!(engine.promote(ahead).is_err());
    kv.store().check().unwrap();
    assert_eq!(snapshot(kv.store()), before);
    engine.remove(&request("r")).unwrap();
    assert_eq!(kv.store().stats().pages_free, 16);
}

#[test]
fn pages_are_found_only_among_the_same_resources_and_never_past_one_that_cannot_skip() {
    let cached = || cache("kv", KvConfig { prefix_cache: true, ..config(4, 16) });
    let hit = |prints: &[Option<&str>]| {
        let kv = cached();
        let others: Vec<_> = prints
            .iter()
            .map(|p| (ResourceName::new("attn"), p.map(|p| Fingerprint(p.as_bytes().to_vec()))))
            .collect();
        // The same store, filled under the first set of fingerprints, asked under the second.
        kv.bind(&others[..1], &[]).unwrap();
        prompt(kv.store(), "a", &[1, 2, 3, 4, 5]);
        let refused = kv.bind(&others[1..], &[]).is_err();
        assert_eq!(refused, others[0] != others[1]); // a request of the other namespace is here
        kv.store().remove(&request("a")).unwrap();
        kv.bind(&others[1..], &[]).unwrap();
        ingest(kv.store(), "b", &[1, 2, 3, 4, 5])
    };
    assert_eq!(hit(&[Some("x"), Some("x")]), 4);
    assert_eq!(hit(&[Some("x"), Some("y")]), 0);
    assert_eq!(hit(&[Some(""), None]), 0);
    let said = cached().bind(&[], &[ResourceName::new("cross")]).unwrap_err().to_string();
    assert!(said.contains("cross") && said.contains("prefix_cache"), "{said}");
    cache("kv", config(4, 16)).bind(&[], &[ResourceName::new("cross")]).unwrap();
}
