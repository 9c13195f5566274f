//! Faults of FAULTS.md that concern the page store, by number.

use mstar_core::step::KvStep;
use mstar_core::{Label, Outcome, PlanId, Slot};

use super::harness::*;

#[test]
fn f12_no_extra_page_at_a_boundary() {
    let store = store(config(4, 8));
    ingest(&store, "a", &[]);
    for n in 1..=13 {
        let one = step(vec![segment("a", "main", &[n])]);
        let serial = serial();
        assert_eq!(store.admit(serial, Slot(0), false, &one).unwrap(), Outcome::Admitted);
        store.plan(serial, None).unwrap();
        let plan = store.kv_plan(&PlanId { slot: Slot(0), label: Label::main(), serial }).unwrap();
        write(&store, serial, Slot(0), &one);
        let n = n as usize;
        assert_eq!(plan.kv_indices.len(), n.div_ceil(4));
        assert_eq!((plan.kv_last_page_len[0] as usize, plan.rows[0].kv_len), ((n - 1) % 4 + 1, n));
        store.commit(serial).unwrap();
        assert_eq!(store.stats().pages_held, n.div_ceil(4));
        // A read that adds nothing lists the same pages.
        let read: KvStep = step(vec![segment("a", "main", &[])]);
        let serial = super::harness::serial();
        assert_eq!(store.admit(serial, Slot(0), false, &read).unwrap(), Outcome::Admitted);
        store.plan(serial, None).unwrap();
        let plan = store.kv_plan(&PlanId { slot: Slot(0), label: Label::main(), serial }).unwrap();
        assert_eq!((plan.kv_indices.len(), plan.slots.len(), plan.rows[0].kv_len), (n.div_ceil(4), 0, n));
        store.commit(serial).unwrap();
    }
    assert_eq!(content(&store, "a", "main"), (1..=13).collect::<Vec<_>>());
}
