//! Forks and copy on write, groups of labels, segments that only read.

use mstar_core::step::Combined;
use mstar_core::{Label, Outcome, PlanId, Slot};

use super::harness::*;

#[test]
fn f30_forks_share_full_pages_and_copy_only_the_partial_one() {
    let store = store(config(4, 32));
    prompt(&store, "c", &[1, 2, 3, 4, 5, 6]);
    let pages = |label: &str| store.stream(&request("c"), &label.into()).unwrap().pages;
    let mut forked = step(vec![]);
    forked.pre_forks = vec![fork("c", "main", "d"), fork("c", "main", "e")];
    assert_eq!(run(&store, &forked), Outcome::Admitted);
    assert_eq!((pages("d"), store.stats().pages_held), (pages("main"), 2));
    assert_eq!(pages("main").iter().map(|&p| store.owners(p).unwrap()).collect::<Vec<_>>(), [3, 3]);

    let both = step(vec![segment("c", "d", &[70]), segment("c", "e", &[80])]);
    assert_eq!(store.page_need(&both).unwrap().needed, 2);
    assert_eq!(run(&store, &both), Outcome::Admitted);
    assert_eq!(content(&store, "c", "main"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(content(&store, "c", "d"), [1, 2, 3, 4, 5, 6, 70]);
    assert_eq!(content(&store, "c", "e"), [1, 2, 3, 4, 5, 6, 80]);
    assert_eq!((store.stats().copies, store.stats().pages_held), (2, 4));
    assert!([pages("d"), pages("e")].iter().all(|p| p[0] == pages("main")[0] && p[1] != pages("main")[1]));
    assert_eq!(pages("main").iter().map(|&p| store.owners(p).unwrap()).collect::<Vec<_>>(), [3, 1]);

    // The last owner of a partial page writes in place.
    assert_eq!(extend(&store, "c", "main", &[90]), Outcome::Admitted);
    assert_eq!((store.stats().copies, content(&store, "c", "main")[6]), (2, 90));
}

#[test]
fn a_step_may_fork_and_extend_both_sides_at_once() {
    let store = store(config(4, 32));
    prompt(&store, "a", &[1, 2, 3, 4, 5]);
    let mut wanted = step(vec![segment("a", "main", &[6, 7, 8, 9]), segment("a", "uncond", &[60])]);
    wanted.pre_forks = vec![fork("a", "main", "uncond")];
    wanted.post_forks = vec![fork("a", "main", "later"), fork("a", "uncond", "other")];
    let before = snapshot(&store);
    let serial = serial();
    assert_eq!(store.admit(serial, Slot(0), false, &wanted).unwrap(), Outcome::Admitted);
    store.plan(serial, None).unwrap();
    write(&store, serial, Slot(0), &wanted);
    store.rollback(serial);
    store.check().unwrap();
    assert_eq!(snapshot(&store), before);
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5]);

    assert_eq!(run(&store, &wanted), Outcome::Admitted);
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(content(&store, "a", "uncond"), [1, 2, 3, 4, 5, 60]);
    assert_eq!(content(&store, "a", "later"), content(&store, "a", "main"));
    assert_eq!(content(&store, "a", "other"), content(&store, "a", "uncond"));
    // A replaced stream's pages go back when nobody else has them.
    let mut replace = step(vec![segment("a", "later", &[])]);
    replace.pre_forks = vec![fork("a", "uncond", "main"), fork("a", "uncond", "later")];
    assert_eq!(run(&store, &replace), Outcome::Admitted);
    assert_eq!(content(&store, "a", "main"), content(&store, "a", "other"));
    assert_eq!(store.stats().pages_held, 2);
    store.remove(&request("a")).unwrap();
    store.check().unwrap();
    assert_eq!(store.stats().pages_free, 32);
}

#[test]
fn a_pass_that_keeps_nothing_undoes_its_forks_and_leaves_the_shared_page_alone() {
    let store = store(config(4, 32));
    prompt(&store, "a", &[1, 2, 3, 4, 5]);
    let mut denoise = step(vec![segment("a", "cond", &[61, 62]), segment("a", "main", &[71])]);
    denoise.pre_forks = vec![fork("a", "main", "cond")];
    denoise.post_forks = vec![fork("a", "main", "kept")];
    denoise.commit = false;
    let before = snapshot(&store);
    for _ in 0..3 {
        assert_eq!(run(&store, &denoise), Outcome::Admitted);
        assert_eq!(snapshot(&store), before);
        assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5]);
    }
}

#[test]
fn grouped_labels_are_one_plan_all_rows_of_the_first_then_of_the_second() {
    let store = store(config(4, 32));
    for id in ["a", "b"] {
        prompt(&store, id, &[1, 2]);
    }
    let mut wanted = step(vec![
        segment("a", "main", &[3]),
        segment("a", "cond", &[10, 11]),
        segment("b", "uncond", &[20]),
        segment("b", "cond", &[12]),
        segment("a", "uncond", &[21]),
    ]);
    let parts = vec!["uncond".into(), "cond".into()];
    wanted.combined = vec![Combined { label: "cfg".into(), parts }];
    let serial = serial();
    assert_eq!(store.admit(serial, Slot(1), false, &wanted).unwrap(), Outcome::Admitted);
    store.plan(serial, None).unwrap();
    assert_eq!(store.plan_labels(serial).unwrap(), [Label::main(), Label::new("cfg")]);
    let plan = store.kv_plan(&PlanId { slot: Slot(1), label: "cfg".into(), serial }).unwrap();
    let rows: Vec<_> = plan.rows.iter().map(|r| format!("{}/{} {}", r.request, r.label, r.q_len)).collect();
    assert_eq!(rows, ["b/uncond 1", "a/uncond 1", "a/cond 2", "b/cond 1"]);
    assert_eq!(plan.qo_indptr, [0, 1, 2, 4, 5]);
    write(&store, serial, Slot(1), &wanted);
    store.commit(serial).unwrap();
    assert_eq!(content(&store, "a", "cond"), [10, 11]);
    assert_eq!(content(&store, "b", "uncond"), [20]);
    assert!(store.kv_plan(&PlanId { slot: Slot(1), label: "cfg".into(), serial }).is_err());
}

#[test]
fn spare_pages_of_a_reset_stream_are_its_alone() {
    let store = store(config(4, 32));
    prompt(&store, "a", &[1; 10]);
    let mut forked = step(vec![]);
    forked.pre_forks = vec![fork("a", "main", "b")];
    assert_eq!(run(&store, &forked), Outcome::Admitted);
    store.reset(&request("a"), false).unwrap(); // both labels shared every page: nothing is anybody's alone
    store.check().unwrap();
    assert!(store.stats().pages_held <= 3);
    assert_eq!(extend(&store, "a", "main", &[2; 10]), Outcome::Admitted);
    store.reset(&request("a"), false).unwrap();
    assert_eq!(run(&store, &forked), Outcome::Admitted); // a fork of nothing shares no spare page
    let both = step(vec![segment("a", "main", &[3; 5]), segment("a", "b", &[4; 5])]);
    assert_eq!(run(&store, &both), Outcome::Admitted);
    assert_eq!((content(&store, "a", "main"), content(&store, "a", "b")), (vec![3; 5], vec![4; 5]));
}
