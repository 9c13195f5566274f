//! Steps planned while another runs.

use mstar_core::kv::{KvConfig, PagedStore};
use mstar_core::resource::Promotion;
use mstar_core::step::KvStep;
use mstar_core::{Error, Label, Outcome, PlanId, Slot, StepSerial};

use super::harness::*;

fn admit(store: &PagedStore, slot: usize, ahead: bool, step: &KvStep) -> StepSerial {
    let serial = serial();
    assert_eq!(store.admit(serial, Slot(slot), ahead, step).unwrap(), Outcome::Admitted);
    store.plan(serial, None).unwrap();
    store.check().unwrap();
    serial
}

fn row(store: &PagedStore, serial: StepSerial, slot: usize) -> (usize, usize, Vec<i32>) {
    let plan = store.kv_plan(&PlanId { slot: Slot(slot), label: Label::main(), serial }).unwrap();
    (plan.rows[0].kv_len, plan.rows[0].q_len, plan.positions.clone())
}

#[test]
fn a_step_is_planned_on_the_lengths_that_the_one_before_will_leave() {
    for commit in [true, false] {
        let store = store(config(4, 16));
        prompt(&store, "a", &[1, 2, 3]);
        let n = KvStep { commit, ..step(vec![segment("a", "main", &[4, 5, 6])]) };
        let next = step(vec![segment("a", "main", &[7, 8])]);
        let first = admit(&store, 0, false, &n);
        let ahead = admit(&store, 1, true, &next);
        let stored = if commit { 6 } else { 3 };
        assert_eq!(row(&store, ahead, 1), (stored + 2, 2, vec![stored as i32, stored as i32 + 1]));
        assert!(matches!(store.promote(ahead, Slot(1)), Err(Error::Order { .. })));
        assert!(matches!(store.commit(ahead), Err(Error::Order { .. })));
        assert!(matches!(store.prepare(ahead), Err(Error::Order { .. })));
        write(&store, first, Slot(0), &n);
        store.commit(first).unwrap();
        assert!(matches!(store.commit(ahead), Err(Error::Order { .. }))); // not promoted
        assert!(matches!(store.promote(ahead, Slot(0)), Err(Error::Order { .. })));
        assert_eq!(store.promote(ahead, Slot(1)).unwrap(), Promotion::Valid);
        write(&store, ahead, Slot(1), &next);
        store.commit(ahead).unwrap();
        store.check().unwrap();
        let expected: &[u64] = if commit { &[1, 2, 3, 4, 5, 6, 7, 8] } else { &[1, 2, 3, 7, 8] };
        assert_eq!(content(&store, "a", "main"), expected);
    }
}

#[test]
fn at_most_two_steps_are_outstanding_each_in_its_slot() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1]);
    let one = step(vec![segment("a", "main", &[2])]);
    let first = admit(&store, 0, false, &one);
    let refused =
        |slot, ahead| matches!(store.admit(serial(), Slot(slot), ahead, &one), Err(Error::Order { .. }));
    assert!(refused(1, false) && refused(0, true));
    assert!(store.admit(first, Slot(1), true, &one).is_err());
    let ahead = admit(&store, 1, true, &one);
    assert!(refused(2, true));
    store.rollback(ahead);
    store.rollback(first);
    store.check().unwrap();
    assert_eq!(content(&store, "a", "main"), [1]);
}

#[test]
fn clearing_undoes_every_effect_and_the_running_step_goes_on() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1, 2, 3, 4, 5]);
    let n = step(vec![segment("a", "main", &[6])]);
    let first = admit(&store, 0, false, &n);
    let before = snapshot(&store);
    let mut next =
        step(vec![segment("a", "main", &[7; 6]), segment("a", "cond", &[8]), segment("a", "x", &[9])]);
    next.pre_forks = vec![fork("a", "main", "cond")];
    next.post_forks = vec![fork("a", "cond", "y")];
    let ahead = admit(&store, 1, true, &next);
    assert_ne!(snapshot(&store), before);
    store.rollback(ahead);
    store.check().unwrap();
    assert_eq!(snapshot(&store), before);
    assert!(store.kv_plan(&PlanId { slot: Slot(1), label: Label::main(), serial: ahead }).is_err());
    write(&store, first, Slot(0), &n);
    store.commit(first).unwrap();
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(store.labels(&request("a")).unwrap(), [Label::main()]);
}

#[test]
fn a_rollback_takes_what_was_planned_on_top_with_it() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1, 2, 3]);
    let before = snapshot(&store);
    let first = admit(&store, 0, false, &step(vec![segment("a", "main", &[4, 5])]));
    let ahead = admit(&store, 1, true, &step(vec![segment("a", "main", &[6])]));
    store.rollback(first);
    store.rollback(ahead);
    store.check().unwrap();
    assert_eq!(snapshot(&store), before);
    assert!(store.promote(ahead, Slot(1)).is_err());
}

#[test]
fn a_stream_emptied_meanwhile_makes_the_plan_stale_even_at_the_same_length() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1, 2, 3]);
    prompt(&store, "b", &[1]);
    let first = admit(&store, 0, false, &step(vec![segment("b", "main", &[2])]));
    let next = step(vec![segment("a", "main", &[4])]);
    let ahead = admit(&store, 1, true, &next);
    store.commit(first).unwrap();
    store.reset(&request("a"), true).unwrap();
    assert_eq!(store.promote(ahead, Slot(1)).unwrap(), Promotion::Stale);
    // An empty stream planned ahead and emptied again: the lengths agree, the generations do not.
    store.rollback(ahead);
    let first = admit(&store, 0, false, &step(vec![segment("b", "main", &[3])]));
    let ahead = admit(&store, 1, true, &next);
    store.commit(first).unwrap();
    store.reset(&request("a"), true).unwrap();
    assert_eq!(store.promote(ahead, Slot(1)).unwrap(), Promotion::Stale);
    assert!(store.commit(ahead).is_err() && store.prepare(ahead).is_err());
    store.rollback(ahead);
    store.check().unwrap();
    let again = admit(&store, 1, false, &next);
    write(&store, again, Slot(1), &next);
    store.commit(again).unwrap();
    assert_eq!(content(&store, "a", "main"), [4]);
}

#[test]
fn a_fork_planned_ahead_copies_what_the_running_step_is_still_writing() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1, 2, 3, 4, 5]);
    let n = step(vec![segment("a", "main", &[6])]);
    let first = admit(&store, 0, false, &n);
    let mut next = step(vec![segment("a", "main", &[7]), segment("a", "cond", &[70])]);
    next.pre_forks = vec![fork("a", "main", "cond")];
    let ahead = admit(&store, 1, true, &next);
    write(&store, first, Slot(0), &n); // after the copy was planned
    store.commit(first).unwrap();
    assert_eq!(store.promote(ahead, Slot(1)).unwrap(), Promotion::Valid);
    write(&store, ahead, Slot(1), &next);
    store.commit(ahead).unwrap();
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(content(&store, "a", "cond"), [1, 2, 3, 4, 5, 6, 70]);
}

#[test]
fn forks_made_at_commit_are_there_for_the_step_planned_ahead() {
    let store = store(config(4, 16));
    prompt(&store, "a", &[1, 2]);
    let mut n = step(vec![segment("a", "main", &[3])]);
    n.post_forks = vec![fork("a", "main", "cond")];
    let first = admit(&store, 0, false, &n);
    let next = step(vec![segment("a", "main", &[4]), segment("a", "cond", &[40])]);
    let ahead = admit(&store, 1, true, &next);
    write(&store, first, Slot(0), &n);
    store.commit(first).unwrap();
    assert_eq!(store.promote(ahead, Slot(1)).unwrap(), Promotion::Valid);
    write(&store, ahead, Slot(1), &next);
    store.commit(ahead).unwrap();
    store.check().unwrap();
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4]);
    assert_eq!(content(&store, "a", "cond"), [1, 2, 3, 40]);
}

#[test]
fn retention_gives_back_whole_pages_and_keeps_every_position() {
    let store = store(KvConfig { retention: Some(6), ..config(4, 8) });
    ingest(&store, "a", &[]);
    let mut all: Vec<u64> = Vec::new();
    for n in 0..60u64 {
        let tokens: Vec<u64> = (0..1 + n % 3).map(|t| 10 * n + t).collect();
        let stored = all.len();
        let one = step(vec![segment("a", "main", &tokens)]);
        let serial = admit(&store, 0, false, &one);
        let plan = store.kv_plan(&PlanId { slot: Slot(0), label: Label::main(), serial }).unwrap();
        let first_kept = plan.rows[0].kv_offset + plan.rows[0].page_start;
        assert_eq!(first_kept, stored.saturating_sub(6));
        assert!(plan.rows[0].page_start < 4 && plan.rows[0].kv_offset.is_multiple_of(4));
        write(&store, serial, Slot(0), &one);
        // Planned ahead, the window has moved already.
        let read = step(vec![segment("a", "main", &[])]);
        let ahead = admit(&store, 1, true, &read);
        let plan = store.kv_plan(&PlanId { slot: Slot(1), label: Label::main(), serial: ahead }).unwrap();
        store.commit(serial).unwrap();
        assert_eq!(store.promote(ahead, Slot(1)).unwrap(), Promotion::Valid);
        all.extend(&tokens);
        let state = store.stream(&request("a"), &Label::main()).unwrap();
        assert_eq!((plan.pages(0), plan.rows[0].kv_offset), (&state.pages[..], state.kv_offset));
        store.commit(ahead).unwrap();
        store.check().unwrap();
        assert_eq!(content(&store, "a", "main"), all[all.len().saturating_sub(6)..]);
        assert!(store.stats().pages_held <= 3);
    }
}
