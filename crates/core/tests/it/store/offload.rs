//! Whole requests to the host and back.

use mstar_core::kv::KvConfig;
use mstar_core::resource::Promotion;
use mstar_core::{Error, Label, Outcome, RefusalReason, Slot};

use super::harness::*;

#[test]
fn a_request_comes_back_as_it_left_with_its_forks_still_sharing() {
    let store = store(config(4, 8));
    prompt(&store, "a", &[1, 2, 3, 4, 5, 6]);
    let mut forked = step(vec![segment("a", "cond", &[70])]);
    forked.pre_forks = vec![fork("a", "main", "cond"), fork("a", "main", "same")];
    assert_eq!(run(&store, &forked), Outcome::Admitted);
    let generation = store.stream(&request("a"), &Label::main()).unwrap().generation;
    assert_eq!(store.offload(&request("a")).unwrap(), 3);
    store.check().unwrap();
    assert_eq!((store.stats().pages_free, store.stats().offloaded), (8, 1));
    assert_eq!(store.offload(&request("a")).unwrap(), 0);
    let Outcome::Refused(refusal) = extend(&store, "a", "main", &[9]) else { panic!() };
    assert_eq!(refusal.reason, RefusalReason::RequestOffloading { request: request("a") });
    assert!(store.page_need(&step(vec![segment("a", "main", &[9])])).is_err());

    // Others use the pages meanwhile.
    prompt(&store, "b", &[9; 32]);
    let Outcome::Refused(refusal) = store.reload(&request("a")).unwrap() else { panic!() };
    let (pages_short, pages_needed, label) = (3, 3, "cond".into());
    let reason = RefusalReason::AllocationFailed { pages_short, pages_needed, request: request("a"), label };
    assert_eq!(refusal.reason, reason);
    store.remove(&request("b")).unwrap();
    assert_eq!(store.reload(&request("a")).unwrap(), Outcome::Admitted);
    assert_eq!(store.reload(&request("a")).unwrap(), Outcome::Admitted);
    store.check().unwrap();
    assert_eq!(store.stats().pages_held, 3);
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(content(&store, "a", "same"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(content(&store, "a", "cond"), [1, 2, 3, 4, 5, 6, 70]);
    assert!(store.stream(&request("a"), &Label::main()).unwrap().generation > generation);
    assert_eq!(extend(&store, "a", "main", &[7]), Outcome::Admitted);
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(content(&store, "a", "same"), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn f32_pages_that_are_written_offloaded_and_overwritten_come_back_as_written() {
    let store = store(config(4, 8));
    ingest(&store, "a", &[]);
    ingest(&store, "b", &[]);
    for n in 0..150u64 {
        let written: Vec<u64> = (0..20 + n % 9).map(|t| 1000 * (n % 50) + t).collect();
        assert_eq!(extend(&store, "a", "main", &written), Outcome::Admitted);
        store.offload(&request("a")).unwrap();
        assert_eq!(extend(&store, "b", "main", &[n; 32]), Outcome::Admitted);
        store.reset(&request("b"), true).unwrap();
        assert_eq!(store.reload(&request("a")).unwrap(), Outcome::Admitted);
        assert_eq!(content(&store, "a", "main"), written);
        store.reset(&request("a"), true).unwrap();
        store.check().unwrap();
    }
}

#[test]
fn f32_a_request_that_a_step_holds_stays() {
    let store = store(config(4, 8));
    prompt(&store, "a", &[1, 2, 3]);
    let one = step(vec![segment("a", "main", &[4])]);
    let (n, ahead) = (serial(), serial());
    let held = |store: &mstar_core::kv::PagedStore| {
        matches!(store.offload(&request("a")), Err(Error::Order { .. }))
            && matches!(store.remove(&request("a")), Err(Error::Order { .. }))
    };
    assert_eq!(store.admit(n, Slot(0), false, &one).unwrap(), Outcome::Admitted);
    assert!(held(&store) && matches!(store.reset(&request("a"), true), Err(Error::Order { .. })));
    store.plan(n, None).unwrap();
    write(&store, n, Slot(0), &one);
    let two = step(vec![segment("a", "main", &[5])]);
    assert_eq!(store.admit(ahead, Slot(1), true, &two).unwrap(), Outcome::Admitted);
    store.commit(n).unwrap();
    assert!(held(&store)); // by the step planned ahead
    assert_eq!(store.promote(ahead, Slot(1)).unwrap(), Promotion::Valid);
    assert!(held(&store));
    store.rollback(ahead);
    assert_eq!(store.offload(&request("a")).unwrap(), 1);
    assert_eq!(store.reload(&request("a")).unwrap(), Outcome::Admitted);
    assert_eq!(content(&store, "a", "main"), [1, 2, 3, 4]);
}

#[test]
fn a_request_on_the_host_can_be_reset_or_removed() {
    let store = store(config(4, 8));
    for id in ["a", "b"] {
        prompt(&store, id, &[1; 8]);
        store.offload(&request(id)).unwrap();
    }
    store.reset(&request("a"), false).unwrap();
    store.remove(&request("b")).unwrap();
    store.check().unwrap();
    assert!(!store.is_offloaded(&request("a")).unwrap());
    assert_eq!(
        (extend(&store, "a", "main", &[5]), content(&store, "a", "main")),
        (Outcome::Admitted, vec![5])
    );
    assert!(matches!(store.reload(&request("b")), Err(Error::UnknownRequest { .. })));
}

#[test]
fn pages_shared_through_the_index_stay_there_when_one_request_leaves() {
    let store = store(KvConfig { prefix_cache: true, ..config(4, 8) });
    let tokens: Vec<u64> = (1..=9).collect();
    assert_eq!((prompt(&store, "a", &tokens), prompt(&store, "b", &tokens)), (0, 8));
    assert_eq!(store.offload(&request("a")).unwrap(), 3);
    store.check().unwrap();
    assert_eq!(content(&store, "b", "main"), tokens);
    assert_eq!((ingest(&store, "c", &tokens), store.stats().pages_held), (8, 3));
    assert_eq!(store.reload(&request("a")).unwrap(), Outcome::Admitted);
    assert_eq!(content(&store, "a", "main"), tokens);
    assert_eq!(extend(&store, "a", "main", &[10, 11, 12]), Outcome::Admitted);
    store.check().unwrap();
    assert_eq!(ingest(&store, "d", &(1..=13).collect::<Vec<_>>()), 12); // its chain goes on
}
