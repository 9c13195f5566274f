//! Appending, reading, refusing: one request after the other, no forks.

use mstar_core::kv::KvConfig;
use mstar_core::{Error, Label, Outcome, RefusalReason, Slot};

use super::harness::*;

#[test]
fn tokens_are_read_back_where_they_were_written() {
    let store = store(config(4, 16));
    for (id, n) in [("a", 9), ("b", 3), ("c", 4)] {
        assert_eq!(prompt(&store, id, &(0..n).collect::<Vec<_>>()), 0);
    }
    for round in 0..6 {
        let segments = ["c", "a", "b"].map(|id| segment(id, "main", &[100 + round]));
        assert_eq!(run(&store, &step(segments.to_vec())), Outcome::Admitted);
    }
    let mut expected: Vec<u64> = (0..9).collect();
    expected.extend(100..106);
    assert_eq!(content(&store, "a", "main"), expected);
    assert_eq!(content(&store, "b", "main").len(), 9);
    assert_eq!(store.stats().pages_held, 4 + 3 + 3);
    store.remove(&request("a")).unwrap();
    store.remove(&request("a")).unwrap();
    assert_eq!(store.stats().pages_held, 6);
}

#[test]
fn a_step_short_of_pages_is_refused_with_numbers_and_changes_nothing() {
    let store = store(config(4, 5));
    prompt(&store, "a", &[1; 8]);
    prompt(&store, "b", &[2; 7]);
    let before = snapshot(&store);
    let wanted = step(vec![segment("b", "main", &[3]), segment("a", "main", &[3; 9])]);
    let Outcome::Refused(refusal) = run(&store, &wanted) else { panic!() };
    let (request, label) = (request("a"), Label::main());
    let reason = RefusalReason::AllocationFailed { pages_short: 2, pages_needed: 3, request, label };
    assert_eq!(refusal.reason, reason);
    assert_eq!(snapshot(&store), before);
    let need = store.page_need(&wanted).unwrap();
    assert_eq!((need.needed, need.available, need.total), (3, 1, 5));
    assert_eq!(snapshot(&store), before);
}

#[test]
fn a_stream_longer_than_the_spec_allows_is_refused() {
    let store = store(KvConfig { max_seq_len: 6, ..config(4, 5) });
    prompt(&store, "a", &[1; 5]);
    assert_eq!(extend(&store, "a", "main", &[1]), Outcome::Admitted);
    let Outcome::Refused(refusal) = extend(&store, "a", "main", &[1]) else { panic!() };
    assert!(matches!(refusal.reason, RefusalReason::SequenceTooLong { tokens: 7, max_seq_len: 6, .. }));
}

#[test]
fn a_rolled_back_step_leaves_no_trace_and_one_that_does_not_commit_keeps_nothing() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1, 2, 3, 4, 5]);
    let before = snapshot(&store);
    let mut wanted = step(vec![segment("a", "main", &[6; 9]), segment("a", "new", &[7])]);
    for commit in [true, false] {
        wanted.commit = commit;
        let serial = serial();
        assert_eq!(store.admit(serial, Slot(0), false, &wanted).unwrap(), Outcome::Admitted);
        store.check().unwrap();
        store.plan(serial, None).unwrap();
        write(&store, serial, Slot(0), &wanted);
        if commit {
            store.rollback(serial)
        } else {
            store.commit(serial).unwrap()
        }
        store.rollback(serial);
        store.check().unwrap();
        assert_eq!(snapshot(&store), before);
        assert!(store.plan(serial, None).is_err() && store.commit(serial).is_err());
    }
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5]);
}

#[test]
fn a_step_that_cannot_be_names_what_is_wrong() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1, 2, 3]);
    let before = snapshot(&store);
    let refuse = |wanted, part: &str| {
        let said = store.admit(serial(), Slot(0), false, &wanted).unwrap_err().to_string();
        assert!(said.contains(part), "{said}");
        assert_eq!(snapshot(&store), before);
    };
    let one = || segment("a", "main", &[1]);
    refuse(step(vec![one(), one()]), "two segments");
    refuse(step(vec![segment("b", "main", &[1])]), "no request b");
    let mut short = one();
    short.span = 2;
    refuse(step(vec![short]), "1 content keys for a span of 2");
    let mut forked = step(vec![one()]);
    forked.pre_forks = vec![fork("a", "main", "x"), fork("a", "none", "y")];
    refuse(forked.clone(), "no stream none");
    forked.pre_forks = vec![fork("a", "main", "main")];
    refuse(forked, "onto itself");
    let mut grouped = step(vec![one()]);
    let group = |label: &str, parts: &[&str]| mstar_core::step::Combined {
        label: label.into(),
        parts: parts.iter().map(|&p| p.into()).collect(),
    };
    grouped.combined = vec![group("g", &["main", "cond"])];
    refuse(grouped.clone(), "label cond, which no segment has");
    grouped.combined = vec![group("g", &["main"]), group("h", &["main"])];
    refuse(grouped, "in two groups");
}

#[test]
fn a_reset_keeps_or_frees_pages_and_the_stream_starts_anew() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1; 9]);
    let generation = || store.stream(&request("a"), &Label::main()).unwrap().generation;
    let before = generation();
    store.reset(&request("a"), false).unwrap();
    assert!(generation() > before);
    assert_eq!((store.stats().pages_held, content(&store, "a", "main").len()), (3, 0));
    assert_eq!(extend(&store, "a", "main", &[5; 5]), Outcome::Admitted);
    assert_eq!((store.stats().pages_held, content(&store, "a", "main")), (3, vec![5; 5]));
    store.reset(&request("a"), true).unwrap();
    assert_eq!(store.stats().pages_held, 0);
    assert!(matches!(store.reset(&request("b"), true), Err(Error::UnknownRequest { .. })));
}

#[test]
fn a_store_allocates_what_its_geometry_says_to_the_byte() {
    let config = config(4, 16);
    let store = store(config.clone());
    assert_eq!(store.stats().bytes, config.memory_bytes().unwrap());
    let token = 2 * 2 * 4 + 3; // keys and values of width 2 in f32, and the plane
    assert_eq!(store.stats().bytes, 2 * 17 * 4 * token);
}
