//! Worlds on the host: saved, gone on with, and come back to.

use mstar_core::kv::{RingConfig, RingKv};
use mstar_core::{Error, Outcome, RefusalReason};

use super::harness::*;

/// Twenty frames of `request` from `from` on, two denoise passes before each commit, one drawn from `seed`.
fn twenty(rig: &Rig, request: &str, from: u64, seed: u64) -> Vec<Vec<Vec<i32>>> {
    let mut seen = Vec::new();
    for frame in from..from + 20 {
        for (pass_of_frame, commit) in [(0, false), (1, false), (2, true)] {
            let content = seed * 1_000_003 + frame * 7 + pass_of_frame;
            seen.push(rig.run(&[Pass { request, frame, commit, content }]));
        }
    }
    seen
}

#[test]
fn a_snapshot_and_the_same_twenty_frames_give_the_same_bits() {
    let rig = Rig::new(config(2), &["other", "a"]);
    rig.run(&[pass("other", 0, true)]);
    twenty(&rig, "a", 0, 1);
    let saved = rig.ring.snapshot(&"a".into()).unwrap();
    assert_eq!((saved.clock(), saved.bytes()), (20, rig.ring.config().world_bytes().unwrap()));
    let at_first = rig.world(1);
    let seen = twenty(&rig, "a", 20, 2);
    let first = rig.world(1);
    // Another history, so that nothing is right by having been left there.
    twenty(&rig, "a", 40, 3);
    let other = rig.world(0);
    assert_eq!(rig.ring.restore(&"a".into(), &saved).unwrap(), Outcome::Admitted);
    assert_eq!((rig.world(1), rig.ring.clock(&"a".into()).unwrap()), (at_first, 20));
    assert_eq!(twenty(&rig, "a", 20, 2), seen);
    assert_eq!(rig.world(1), first);
    assert_eq!(rig.world(0), other, "the other world");
}

#[test]
fn a_snapshot_outlives_its_request_and_its_ring() {
    let rig = Rig::new(config(1), &["a"]);
    (0..7).for_each(|frame| drop(rig.run(&[pass("a", frame, true)])));
    let (saved, world) = (rig.ring.snapshot(&"a".into()).unwrap(), rig.world(0));
    drop(rig);
    let rig = Rig::new(config(3), &["x", "y"]);
    rig.run(&[pass("x", 0, true)]);
    assert_eq!(rig.ring.restore(&"y".into(), &saved).unwrap(), Outcome::Admitted);
    assert_eq!((rig.ring.world(&"y".into()).unwrap(), rig.world(1)), (Some(1), world));
    assert_eq!(rig.run(&[pass("y", 7, true)])[0], [5, 6, 7, 9]);
}

#[test]
fn what_cannot_be_saved_or_restored_is_refused_and_nothing_changes() {
    let rig = Rig::new(config(1), &["a", "b"]);
    assert!(matches!(rig.ring.snapshot(&"a".into()), Err(Error::Order { .. })), "no world yet");
    assert!(matches!(rig.ring.snapshot(&"z".into()), Err(Error::UnknownRequest { .. })));
    rig.run(&[pass("a", 0, true)]);
    let saved = rig.ring.snapshot(&"a".into()).unwrap();
    let full = rig.ring.restore(&"b".into(), &saved).unwrap();
    let Outcome::Refused(refusal) = full else { panic!("{full:?}") };
    assert!(matches!(refusal.reason, RefusalReason::NoWorldFree { worlds_short: 1, worlds_total: 1, .. }));
    let held = rig.plan(&[pass("a", 1, true)]);
    assert!(matches!(rig.ring.snapshot(&"a".into()), Err(Error::Order { .. })));
    assert!(matches!(rig.ring.restore(&"a".into(), &saved), Err(Error::Order { .. })));
    rig.engine.abort(held);
    let wider = Rig::new(RingConfig { head_dim: 4, ..config(1) }, &["a"]);
    let said = wider.ring.restore(&"a".into(), &saved).unwrap_err().to_string();
    assert!(said.starts_with("ring: the snapshot is of another ring"), "{said}");
    assert_eq!(wider.ring.free_worlds(), 1);
    rig.ring.check().unwrap();
}

#[test]
fn a_plan_made_ahead_of_a_restore_is_stale() {
    let rig = Rig::new(config(2), &["a", "b"]);
    rig.run(&[pass("a", 0, true)]);
    let saved = rig.ring.snapshot(&"a".into()).unwrap();
    let running = rig.plan(&[pass("b", 0, true)]);
    let ahead = rig.engine.preplan(&running, step(&[pass("a", 1, true)])).unwrap().admitted().unwrap();
    rig.write(&running, &[pass("b", 0, true)]);
    rig.engine.commit(running).unwrap();
    // The same clock, and other frames: only the generation tells.
    assert_eq!(rig.ring.restore(&"a".into(), &saved).unwrap(), Outcome::Admitted);
    let serial = ahead.serial();
    let promoted = rig.engine.promote(ahead).unwrap().admitted().unwrap();
    assert_ne!(promoted.serial(), serial, "planned afresh");
    rig.write(&promoted, &[pass("a", 1, true)]);
    rig.engine.commit(promoted).unwrap();
    assert_eq!(rig.ring.clock(&"a".into()).unwrap(), 2);
}
