//! F34: writing more than a ring holds, and everything near it.

use mstar_core::kv::{RingCache, RingConfig, RingGeometry, RingKv};
use mstar_core::step::{Declaration, RingStep};
use mstar_core::{Error, RefusalReason, RequestId};
use mstar_kernels::DType;

use super::harness::*;

/// One layer that keeps the last four frames of 128 tokens.
fn four(num_worlds: usize) -> RingConfig {
    RingConfig { num_worlds, ..RingConfig::new(vec![RingGeometry::last(4)], F, 1, DType::F32) }
}

#[test]
fn f34_each_pass_sees_the_last_frames_once() {
    let rig = Rig::new(four(1), &["a"]);
    for frame in 0..10u64 {
        // Slot `frame % 4` is about to be overwritten; the scratch, frame 4, holds the pass's own.
        let own = (frame % 4) as i32;
        let mut expected: Vec<i32> = (0..4).filter(|&s| s != own && (s as u64) < frame).collect();
        expected.push(4);
        assert_eq!(rig.run(&[pass("a", frame, false)]), [expected.clone()], "frame {frame}");
        assert_eq!(rig.run(&[pass("a", frame, true)]), [expected], "frame {frame}");
        // After it: the last four frames, each once, in their slots.
        for back in 0..4.min(frame + 1) {
            let kept = frame - back;
            let content = pass("a", kept, true).content;
            let slot = (kept % 4) as usize;
            assert_eq!(rig.frame(0, 0, slot), bits(rig.ring.config(), Some(content), 0), "{frame} - {back}");
        }
    }
}

#[test]
fn f34_a_dilated_layer_keeps_one_frame_in_so_many() {
    let geometry = RingGeometry { ring_frames: 3, ring_buckets: 2, pinned_dilation: 4 };
    let rig = Rig::new(RingConfig::new(vec![geometry], F, 1, DType::F32), &["a"]);
    for frame in 0..17 {
        rig.run(&[pass("a", frame, true)]);
        let holds = |slot: usize, of: u64| {
            assert_eq!(
                rig.frame(0, 0, slot),
                bits(rig.ring.config(), Some(pass("a", of, true).content), 0),
                "slot {slot} after frame {frame}"
            );
        };
        let kept = frame / 4;
        holds((kept % 2) as usize, kept * 4);
        if kept > 0 {
            holds(((kept - 1) % 2) as usize, (kept - 1) * 4);
        }
    }
    assert_eq!(rig.run(&[pass("a", 17, false)]), [[0, 1, 3]]);
}

#[test]
fn f34_an_uncommitted_pass_replaces_the_scratch() {
    let rig = Rig::new(config(1), &["a"]);
    (0..3).for_each(|frame| drop(rig.run(&[pass("a", frame, true)])));
    let slots = |rig: &Rig| -> Vec<_> { (0..4).map(|slot| rig.frame(0, 0, slot)).collect() };
    let before = slots(&rig);
    for content in [900, 901, 902] {
        let seen = rig.run(&[Pass { content, ..pass("a", 3, false) }]);
        assert_eq!(seen, [vec![0, 1, 2, 4], vec![0, 1, 3]]);
        assert_eq!(rig.frame(0, 0, 4), bits(rig.ring.config(), Some(content), 0));
        assert_eq!(slots(&rig), before);
        assert_eq!(rig.ring.clock(&"a".into()).unwrap(), 3);
    }
}

#[test]
fn f34_a_second_commit_of_a_frame_is_refused_and_changes_nothing() {
    let rig = Rig::new(config(2), &["a", "b"]);
    (0..6).for_each(|frame| drop(rig.run(&[pass("a", frame, true)])));
    let before = rig.world(0);
    for (frame, commit) in [(5, true), (5, false), (0, true), (7, true), (7, false), (u64::MAX, true)] {
        // A request without a world comes first: the refusal of the second gives back what the first would get.
        let refusal = rig.admit(&[pass("b", 0, true), pass("a", frame, commit)]).unwrap_err();
        let expected = RefusalReason::RingClock { request: "a".into(), expected: 6, got: frame };
        assert_eq!(refusal.reason, expected);
        assert_eq!((rig.ring.free_worlds(), rig.ring.world(&"b".into()).unwrap()), (1, None));
        assert_eq!(rig.ring.clock(&"a".into()).unwrap(), 6);
        assert_eq!(rig.world(0), before);
        rig.ring.check().unwrap();
    }
    rig.run(&[pass("b", 0, true), pass("a", 6, true)]);
    assert_eq!(rig.ring.world(&"b".into()).unwrap(), Some(1));
}

#[test]
fn f34_a_second_commit_is_refused_while_the_first_still_runs() {
    let rig = Rig::new(config(1), &["a"]);
    let first = rig.plan(&[pass("a", 0, true)]);
    let refusal = rig.engine.preplan(&first, step(&[pass("a", 0, true)])).unwrap().admitted().unwrap_err();
    assert_eq!(refusal.reason, RefusalReason::RingClock { request: "a".into(), expected: 1, got: 0 });
    rig.write(&first, &[pass("a", 0, true)]);
    rig.engine.commit(first).unwrap();
    assert_eq!(rig.ring.clock(&"a".into()).unwrap(), 1);
}

#[test]
fn f34_five_frames_at_once_are_a_typed_error() {
    let rig = Rig::new(four(2), &["a", "b"]);
    // As one pass of five frames,
    let mut long = step(&[pass("a", 0, true)]);
    let Some(Declaration::Ring(RingStep { segments })) = long.resources.get_mut(&"ring".into()) else {
        panic!()
    };
    segments[0].span = 5 * F;
    let said = rig.engine.admit(long).unwrap_err().to_string();
    assert_eq!(said, "ring: request a: a pass of 640 tokens; a pass is one frame, span 128");
    // as five passes of one step,
    let five: Vec<_> = (0..5).map(|frame| pass("a", frame, true)).collect();
    assert!(matches!(rig.engine.admit(step(&five)), Err(Error::Step { .. })));
    // and as five frames' keys of one pass.
    let one = rig.plan(&[pass("a", 0, true)]);
    let said = rig.upsert(&one, 0, &[0.0; 5 * F], &[0.0; 5 * F]).unwrap_err().to_string();
    assert_eq!(said, "k: expected shape [R * F, G, D] = [128, 1, 1], got [640, 1, 1]");
    rig.engine.abort(one);
    assert_eq!((rig.ring.free_worlds(), rig.ring.clock(&"a".into()).unwrap()), (2, 0));
}

#[test]
fn f34_worlds_do_not_mix() {
    let rig = Rig::new(config(3), &["a", "b", "c"]);
    for frame in 0..9 {
        rig.run(&[pass("b", frame, true), pass("a", frame, true)]);
        rig.run(&[pass("c", frame, frame % 2 == 0)]);
        if frame % 2 == 1 {
            rig.run(&[pass("c", frame, true)]);
        }
    }
    let plan = rig.plan(&[pass("a", 9, false), pass("c", 9, false), pass("b", 9, false)]);
    let ids = rig.ring.ring_plan(&main(&plan)).unwrap();
    // `b` came first, so it has world 0.
    assert_eq!(ids.rows.iter().map(|row| row.world.unwrap()).collect::<Vec<_>>(), [1, 2, 0]);
    for row in 0..3 {
        let world = ids.rows[row].world.unwrap() as i32;
        assert_eq!(ids.visible(0, row), [0, 2, 3, 4].map(|block| world * 5 + block));
        assert_eq!(ids.visible(1, row), [0, 1, 3].map(|block| world * 4 + block));
    }
    assert_eq!(ids.indptr(0), [0, 4, 8, 12]);
    for (request, world) in [("b", 0), ("a", 1), ("c", 2)] {
        for frame in 5..9u64 {
            let content = Some(pass(request, frame, true).content);
            let slot = (frame % 4) as usize;
            assert_eq!(rig.frame(2, world, slot), bits(rig.ring.config(), content, 2), "{request} {frame}");
        }
    }
}

#[test]
fn f34_a_frame_that_is_not_whole_blocks_is_refused_by_name() {
    for tokens in [0, 1, 127, 129, 640 - 1] {
        let config = RingConfig { tokens_per_frame: tokens, ..four(1) };
        let said = RingCache::new("ring".into(), config).unwrap_err().to_string();
        assert!(said.starts_with("tokens_per_frame: a frame is whole blocks"), "{said}");
    }
}

#[test]
fn no_free_world_is_an_outcome_with_its_numbers_and_takes_nothing() {
    let rig = Rig::new(config(2), &["a", "b", "c", "d"]);
    rig.run(&[pass("a", 0, true)]);
    let all = [pass("b", 0, true), pass("a", 1, true), pass("c", 0, true), pass("d", 0, true)];
    let refusal = rig.admit(&all).unwrap_err();
    let expected = RefusalReason::NoWorldFree {
        request: "c".into(),
        worlds_short: 2,
        worlds_needed: 3,
        worlds_total: 2,
    };
    assert_eq!(refusal.reason, expected);
    assert_eq!(
        refusal.to_string(),
        "ring: request c is 2 worlds short of the 3 that the step needs; the ring has 2"
    );
    assert_eq!((rig.ring.free_worlds(), rig.ring.clock(&"a".into()).unwrap()), (1, 1));
    assert!(["b", "c", "d"].iter().all(|id| rig.ring.world(&RequestId::new(*id)).unwrap().is_none()));
    rig.ring.check().unwrap();
    rig.engine.remove(&"a".into()).unwrap();
    rig.run(&[pass("c", 0, true), pass("d", 0, true)]);
}

#[test]
fn a_frame_that_a_layer_never_wrote_is_not_kept() {
    let rig = Rig::new(config(1), &["a"]);
    rig.run(&[pass("a", 0, true)]);
    let before = rig.world(0);
    let planned = rig.plan(&[pass("a", 1, true)]);
    let (k, v) = rows(rig.ring.config(), &[77], 0);
    rig.upsert(&planned, 0, &k, &v).unwrap();
    let said = rig.engine.commit(planned).unwrap_err().to_string();
    assert!(said.contains("commits a frame of main that layer 1 never wrote"), "{said}");
    assert_eq!(rig.ring.clock(&"a".into()).unwrap(), 1);
    assert_eq!(rig.world(0)[..4], before[..4], "the first layer's slots");
    rig.run(&[pass("a", 1, true)]);
}

#[test]
fn an_unknown_request_or_another_declaration_is_an_error() {
    let rig = Rig::new(config(1), &[]);
    assert!(matches!(rig.engine.admit(step(&[pass("x", 0, true)])), Err(Error::UnknownRequest { .. })));
    let kv = mstar_core::Step::new("frame").with("ring", Declaration::Kv(Default::default()));
    let said = rig.engine.admit(kv).unwrap_err().to_string();
    assert_eq!(said, "ring: the step declares something else than a ring step for a ring");
}
