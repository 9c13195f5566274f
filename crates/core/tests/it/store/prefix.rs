//! The prefix index through the store: hits, duplicates, eviction, namespaces.

use mstar_core::kv::{KvConfig, KvEvent, PagedStore};
use mstar_core::resource::{Ingest, KvOverrides, Override};
use mstar_core::{Label, Outcome, RefusalReason, ResourceName, Slot};

use super::harness::*;

fn cached(page_size: usize, pages: usize) -> PagedStore {
    let store = store(KvConfig { prefix_cache: true, ..config(page_size, pages) });
    store.record_events(true);
    store
}

fn keys(n: u64) -> Vec<u64> {
    (1..=n).collect()
}

/// What a prompt finds, without leaving anything behind.
fn look_up(store: &PagedStore, tokens: &[u64]) -> usize {
    let hit = ingest(store, "looking", tokens);
    store.remove(&request("looking")).unwrap();
    store.check().unwrap();
    hit
}

#[test]
fn f25_a_hit_needs_the_very_same_namespace() {
    let store = cached(4, 32);
    let hit = |id: &str, salt: Option<&[u8]>| {
        let prompts = vec![(Label::main(), keys(9).into())];
        let salt = salt.map(<[u8]>::to_vec);
        store.ingest(&Ingest { prompts, salt, ..Ingest::new(request(id)) }).unwrap();
        let hit = store.ingest_report(&request(id)).unwrap()[0].1;
        let rest = keys(9)[hit..].to_vec();
        assert_eq!(extend(&store, id, "main", &rest), Outcome::Admitted);
        hit
    };
    assert_eq!(hit("none", None), 0);
    assert_eq!(hit("empty", Some(b"")), 0);
    assert_eq!(hit("x", Some(b"X")), 0);
    assert_eq!(hit("x2", Some(b"X")), 8);
    assert_eq!(hit("none2", None), 8);
    assert_eq!(hit("empty2", Some(b"")), 8);
    let mut apart = Ingest::new(request("apart"));
    apart.prompts = vec![(Label::main(), keys(9).into())];
    let overrides = KvOverrides { prefix_cache: Some(false), max_seq_len: Some(9) };
    apart.overrides.insert(ResourceName::new("kv"), Override::Kv(overrides));
    store.ingest(&apart).unwrap();
    assert_eq!(store.ingest_report(&request("apart")).unwrap()[0].1, 0);
    let Outcome::Refused(refusal) = extend(&store, "apart", "main", &[0; 10]) else { panic!() };
    assert!(matches!(refusal.reason, RefusalReason::SequenceTooLong { max_seq_len: 9, .. }));
}

#[test]
fn f26_colliding_page_keys_share_nothing() {
    let hashes: [mstar_core::kv::PageHash; 2] = [
        |_, _| mstar_core::kv::PageKey([0; 32]),
        |_, tokens| mstar_core::kv::PageKey([(tokens[0] % 2) as u8; 32]),
    ];
    for hash in hashes {
        let config = KvConfig { prefix_cache: true, ..config(8, 32) };
        let store = PagedStore::with_hash(ResourceName::new("kv"), config, hash).unwrap();
        let (a, b): (Vec<u64>, Vec<u64>) = ((1..=17).collect(), (2..=18).collect());
        assert_eq!((prompt(&store, "a", &a), prompt(&store, "b", &b)), (0, 0));
        assert_eq!((look_up(&store, &a), look_up(&store, &b)), (16, 16));
        let mixed: Vec<u64> = b[..8].iter().chain(&a[8..]).copied().collect();
        assert_eq!(look_up(&store, &mixed), 8);
        assert_eq!(prompt(&store, "mixed", &mixed), 8);
        assert_eq!(content(&store, "mixed", "main"), mixed);
        assert_eq!(content(&store, "a", "main"), a);
    }
}

#[test]
fn f27_a_key_shorter_than_one_page() {
    for (page_size, n) in [(64u64, 65), (1, 2)] {
        let store = cached(page_size as usize, 16);
        prompt(&store, "a", &keys(n));
        let hit = |n| look_up(&store, &keys(n));
        if page_size == 64 {
            assert_eq!([0, 1, 63, 64, 65].map(hit), [0, 0, 0, 0, 64]);
            let mut long = keys(65);
            long.resize(128, 999);
            assert_eq!(look_up(&store, &long), 64);
            for n in [0, 1, 63] {
                let tokens: Vec<u64> = (5000..5000 + n).collect();
                ingest(&store, "short", &tokens);
                assert_eq!(extend(&store, "short", "main", &tokens), Outcome::Admitted);
                store.remove(&request("short")).unwrap();
            }
            assert_eq!(store.stats().indexed, 1);
        } else {
            assert_eq!([0, 1, 2, 3].map(hit), [0, 0, 1, 2]);
        }
        store.remove(&request("a")).unwrap();
        store.evict_cached().unwrap();
        assert_eq!((store.stats().pages_free, store.stats().indexed), (16, 0));
    }
}

#[test]
fn f28_one_token_is_left_to_compute() {
    let store = cached(16, 16);
    for (id, n, hit) in [("a", 32, 0), ("b", 32, 16), ("c", 33, 32), ("d", 31, 16)] {
        assert_eq!(prompt(&store, id, &keys(n)), hit, "{id}");
        assert_eq!(content(&store, id, "main"), keys(n));
    }
    // The chain is still there, and grows.
    assert_eq!(extend(&store, "b", "main", &(33..=48).collect::<Vec<_>>()), Outcome::Admitted);
    assert_eq!(look_up(&store, &keys(49)), 48);
    ["a", "b", "c", "d"].iter().for_each(|id| store.remove(&request(id)).unwrap());
    store.check().unwrap();
    let stats = store.stats();
    assert_eq!((stats.pages_held, stats.pages_cached, stats.pages_free), (0, 3, 13));
}

#[test]
fn f30_attaching_adds_an_owner() {
    let store = cached(4, 8);
    prompt(&store, "a", &keys(8));
    let pages = store.stream(&request("a"), &Label::main()).unwrap().pages;
    let owners = || pages.iter().map(|&p| store.owners(p).unwrap()).collect::<Vec<_>>();
    assert_eq!(owners(), [1, 1]);
    assert_eq!((ingest(&store, "b", &keys(9)), ingest(&store, "c", &keys(9))), (8, 8));
    assert_eq!(owners(), [3, 3]);
    store.remove(&request("a")).unwrap();
    assert_eq!(owners(), [2, 2]);
    store.remove(&request("b")).unwrap();
    assert_eq!(owners(), [1, 1]);
    ingest(&store, "filler", &[]);
    assert_eq!(extend(&store, "filler", "main", &[77; 24]), Outcome::Admitted);
    assert!(matches!(extend(&store, "filler", "main", &[77]), Outcome::Refused(_)));
    assert_eq!(content(&store, "c", "main"), keys(8));
}

#[test]
fn two_requests_that_fill_the_same_page_keep_one_copy() {
    let store = cached(4, 16);
    ingest(&store, "a", &keys(9));
    ingest(&store, "b", &keys(9)); // nothing to find yet
    for id in ["a", "b"] {
        assert_eq!(extend(&store, id, "main", &keys(9)), Outcome::Admitted);
    }
    let pages = |id| store.stream(&request(id), &Label::main()).unwrap().pages;
    assert_eq!(pages("a")[..2], pages("b")[..2]);
    assert_ne!(pages("a")[2], pages("b")[2]);
    assert_eq!((store.stats().pages_held, store.stats().repointed), (4, 2));
    assert_eq!((content(&store, "a", "main"), content(&store, "b", "main")), (keys(9), keys(9)));
}

#[test]
fn a_page_is_not_swapped_under_a_step_that_was_planned_ahead() {
    let store = cached(4, 16);
    prompt(&store, "a", &keys(4));
    ingest(&store, "b", &[]);
    let first = step(vec![segment("b", "main", &keys(4))]);
    let (n, ahead) = (serial(), serial());
    assert_eq!(store.admit(n, Slot(0), false, &first).unwrap(), Outcome::Admitted);
    store.plan(n, None).unwrap();
    let second = step(vec![segment("b", "main", &[5])]);
    assert_eq!(store.admit(ahead, Slot(1), true, &second).unwrap(), Outcome::Admitted);
    store.plan(ahead, None).unwrap();
    write(&store, n, Slot(0), &first);
    store.commit(n).unwrap();
    assert_eq!(store.stats().repointed, 0);
    assert_eq!(store.promote(ahead, Slot(1)).unwrap(), mstar_core::resource::Promotion::Valid);
    write(&store, ahead, Slot(1), &second);
    store.commit(ahead).unwrap();
    store.check().unwrap();
    assert_eq!(content(&store, "b", "main"), keys(5));
    // The chain went on behind the other's page, so that later pages are still indexed.
    assert_eq!(extend(&store, "b", "main", &[6, 7, 8]), Outcome::Admitted);
    assert_eq!(look_up(&store, &keys(9)), 8);
}

#[test]
fn admission_counts_what_can_be_evicted_and_evicts_only_to_succeed() {
    let store = cached(4, 6);
    prompt(&store, "a", &keys(16));
    store.remove(&request("a")).unwrap();
    prompt(&store, "b", &[900, 901, 902, 903, 904]); // takes the two free pages
    assert_eq!((store.stats().pages_cached, store.stats().pages_free), (4, 0));
    let before = snapshot(&store);
    let Outcome::Refused(refusal) = extend(&store, "b", "main", &[7; 20]) else { panic!() };
    assert!(matches!(
        refusal.reason,
        RefusalReason::AllocationFailed { pages_short: 1, pages_needed: 5, .. }
    ));
    assert_eq!((snapshot(&store), store.stats().evictions), (before, 0));
    assert_eq!(extend(&store, "b", "main", &[7; 8]), Outcome::Admitted);
    // The chain was cut from its end: its beginning is still found.
    assert_eq!((store.stats().evictions, look_up(&store, &keys(16))), (2, 8));
    let evicted = store.drain_events().into_iter().filter(|e| matches!(e, KvEvent::Evicted { .. })).count();
    assert_eq!(evicted, 2);
}

#[test]
fn the_least_recently_used_prefix_goes_first() {
    let store = cached(4, 6);
    for (id, from) in [("a", 100), ("b", 200), ("c", 300)] {
        prompt(&store, id, &[from, from + 1, from + 2, from + 3]);
        store.remove(&request(id)).unwrap();
    }
    assert_eq!(look_up(&store, &[100, 101, 102, 103, 0]), 4); // used again
    ingest(&store, "d", &[]);
    assert_eq!(extend(&store, "d", "main", &[7; 16]), Outcome::Admitted);
    let found = [100, 200, 300].map(|f| look_up(&store, &[f, f + 1, f + 2, f + 3, 0]));
    assert_eq!(found, [4, 0, 4]);
}

#[test]
fn pages_of_unknown_content_are_never_indexed() {
    let store = cached(4, 8);
    prompt(&store, "a", &keys(3));
    let mut unknown = step(vec![segment("a", "main", &[4, 5, 6, 7, 8])]);
    unknown.segments[0].tokens = [].into();
    let serial = serial();
    assert_eq!(store.admit(serial, Slot(0), false, &unknown).unwrap(), Outcome::Admitted);
    store.commit(serial).unwrap();
    assert_eq!(extend(&store, "a", "main", &keys(9)), Outcome::Admitted);
    assert_eq!(store.stats().indexed, 0);
    // Nor does a pass that keeps nothing offer any.
    ingest(&store, "b", &[]);
    let mut pass = step(vec![segment("b", "main", &keys(8))]);
    pass.commit = false;
    assert_eq!(run(&store, &pass), Outcome::Admitted);
    assert_eq!((store.stats().indexed, look_up(&store, &keys(9))), (0, 0));
}

#[test]
fn hits_can_be_replayed_from_the_log() {
    let store = cached(4, 10);
    let mut hits = Vec::new();
    for i in 0..40u64 {
        let prompt_tokens: Vec<u64> = (0..5 + i % 7).map(|t| t + 100 * (i % 5)).collect();
        let id = format!("r{i}");
        hits.push(prompt(&store, &id, &prompt_tokens));
        if i >= 2 {
            store.remove(&request(&format!("r{}", i - 2))).unwrap();
        }
    }
    assert!(store.stats().evictions > 0 && hits.iter().any(|&h| h > 0));
    // The model: which (request, page) each entry stands for, and what is in the index now.
    let tokens_of = |id: &str| -> Vec<u64> {
        let i: u64 = id[1..].parse().unwrap();
        (0..5 + i % 7).map(|t| t + 100 * (i % 5)).collect()
    };
    let mut live: std::collections::HashMap<u64, Vec<u64>> = Default::default();
    let mut replayed = Vec::new();
    for event in store.drain_events() {
        match event {
            KvEvent::Indexed { entry, request, ordinal, .. } => {
                live.insert(entry, tokens_of(request.as_str())[..(ordinal + 1) * 4].to_vec());
            }
            KvEvent::Evicted { entry } => assert!(live.remove(&entry).is_some()),
            KvEvent::Hit { request, tokens, .. } => {
                let prompt = tokens_of(request.as_str());
                let most = (prompt.len() - 1) / 4;
                let pages = (1..=most).take_while(|&p| live.values().any(|known| *known == prompt[..p * 4]));
                assert_eq!(pages.count() * 4, tokens);
                replayed.push(tokens);
            }
            _ => {}
        }
    }
    assert_eq!(replayed, hits);
}
