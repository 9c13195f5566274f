//! A step's life in a ring: what an abort undoes, what a removal hands back, plans made ahead, buckets and warm-ups.

use std::sync::Arc;

use mstar_core::graph::{Bucket, Buckets, warm_up};
use mstar_core::kv::{RingCache, RingKv};
use mstar_core::resource::PaddedShape;
use mstar_core::step::{Declaration, RingSegment, RingStep};
use mstar_core::{Error, Label, RefusalReason, RequestId, Resource, Step};
use mstar_kernels::{Stream, TensorRef};

use super::harness::*;
use crate::alloc::allocations;

#[test]
fn an_aborted_step_leaves_frames_clock_and_worlds_as_they_were() {
    let rig = Rig::new(config(2), &["a", "b"]);
    (0..5).for_each(|frame| drop(rig.run(&[pass("a", frame, true)])));
    let slots = |rig: &Rig| -> Vec<_> { (0..4).map(|slot| rig.frame(2, 0, slot)).collect() };
    let before = slots(&rig);
    for written in [false, true] {
        let passes = [pass("a", 5, true), pass("b", 0, true)];
        let planned = rig.plan(&passes);
        assert_eq!(rig.ring.free_worlds(), 0);
        if written {
            rig.write(&planned, &passes);
        }
        rig.engine.abort(planned);
        assert_eq!(slots(&rig), before);
        assert_eq!((rig.ring.clock(&"a".into()).unwrap(), rig.ring.free_worlds()), (5, 1));
        assert_eq!(rig.ring.world(&"b".into()).unwrap(), None);
        assert!(rig.world(1).iter().flatten().all(|&bits| bits == 0), "what was claimed goes back zeroed");
        rig.ring.check().unwrap();
    }
    rig.run(&[pass("a", 5, true), pass("b", 0, true)]);
}

#[test]
fn worlds_go_back_zeroed() {
    let rig = Rig::new(config(2), &["a", "b"]);
    let zeroed = |world: usize| rig.world(world).iter().flatten().all(|&bits| bits == 0);
    (0..6).for_each(|frame| drop(rig.run(&[pass("a", frame, true), pass("b", frame, true)])));
    assert!(!zeroed(0) && !zeroed(1));
    rig.engine.remove(&"a".into()).unwrap();
    assert!(zeroed(0) && rig.ring.free_worlds() == 1);
    rig.engine.remove(&"a".into()).unwrap(); // idempotent
    rig.engine.reset(&"b".into(), false).unwrap();
    assert!(zeroed(1) && rig.ring.free_worlds() == 1);
    assert_eq!((rig.ring.clock(&"b".into()).unwrap(), rig.ring.world(&"b".into()).unwrap()), (0, Some(1)));
    assert_eq!(rig.run(&[pass("b", 0, true)]), [vec![9], vec![7]], "its world, and nothing but the scratch");
    rig.engine.reset(&"b".into(), true).unwrap();
    assert!(zeroed(1) && rig.ring.free_worlds() == 2);
    assert_eq!(rig.ring.world(&"b".into()).unwrap(), None);
    assert!(matches!(rig.engine.reset(&"a".into(), true), Err(Error::UnknownRequest { .. })));
    assert_eq!(rig.ring.tracked_requests(), [RequestId::new("b")]);
}

#[test]
fn a_request_in_a_running_step_is_not_emptied_or_removed() {
    let rig = Rig::new(config(1), &["a"]);
    let planned = rig.plan(&[pass("a", 0, true)]);
    assert!(matches!(rig.ring.reset_request(&"a".into(), true), Err(Error::Order { .. })));
    assert!(matches!(rig.ring.remove_request(&"a".into()), Err(Error::Order { .. })));
    rig.write(&planned, &[pass("a", 0, true)]);
    rig.engine.commit(planned).unwrap();
    assert_eq!(rig.ring.clock(&"a".into()).unwrap(), 1);
}

#[test]
fn a_plan_made_ahead_sees_what_the_running_step_will_leave() {
    let rig = Rig::new(config(2), &["a", "b"]);
    for frame in 0..9 {
        // `b` gets its world in the step that runs, and passes in the one after, too.
        let (now, next) = ([pass("a", frame, true), pass("b", frame, false)], [pass("b", frame, true)]);
        let running = rig.plan(&now);
        let ahead = rig.engine.preplan(&running, step(&next)).unwrap().admitted().unwrap();
        let id = mstar_core::PlanId { slot: ahead.slot(), label: Label::main(), serial: ahead.serial() };
        let (k, v) = rows(rig.ring.config(), &[1], 0);
        let (k, v) =
            (TensorRef::from_slice(&k, &[F, 1, 2]).unwrap(), TensorRef::from_slice(&v, &[F, 1, 3]).unwrap());
        let early = rig.ring.upsert(&id, 0, k, v, &Stream::cpu()).unwrap_err();
        assert!(matches!(early, Error::Order { call: "upsert", .. }), "{early}");
        rig.write(&running, &now);
        rig.engine.commit(running).unwrap();
        let serial = ahead.serial();
        let promoted = rig.engine.promote(ahead).unwrap().admitted().unwrap();
        assert_eq!(promoted.serial(), serial, "it stands");
        rig.write(&promoted, &next);
        rig.engine.commit(promoted).unwrap();
    }
    // The same request in both steps: the second sees the frame that the first commits.
    let running = rig.plan(&[pass("a", 9, true)]);
    let ahead = rig.engine.preplan(&running, step(&[pass("a", 10, true)])).unwrap().admitted().unwrap();
    let id = mstar_core::PlanId { slot: ahead.slot(), label: Label::main(), serial: ahead.serial() };
    assert_eq!(
        rig.ring.ring_plan(&id).unwrap().visible(0, 0),
        [0, 1, 3, 4],
        "slot 1 holds frame 9, slot 2 is its own"
    );
    // Aborting the first clears both.
    rig.engine.abort(running);
    assert!(rig.engine.promote(ahead).is_err());
    assert_eq!(rig.ring.clock(&"a".into()).unwrap(), 9);
    rig.ring.check().unwrap();
}

#[test]
fn a_world_that_became_another_makes_a_plan_stale() {
    for free in [true, false] {
        let rig = Rig::new(config(2), &["a", "b"]);
        rig.run(&[pass("b", 0, true)]);
        let running = rig.plan(&[pass("b", 1, true)]);
        // The plan made ahead has claimed `a`'s world; emptying `a` takes that away, or the frames it counts on.
        let ahead = rig.engine.preplan(&running, step(&[pass("a", 0, true)])).unwrap().admitted().unwrap();
        rig.write(&running, &[pass("b", 1, true)]);
        rig.engine.commit(running).unwrap();
        rig.ring.reset_request(&"a".into(), free).unwrap();
        let serial = ahead.serial();
        let promoted = rig.engine.promote(ahead).unwrap().admitted().unwrap();
        assert_ne!(promoted.serial(), serial, "planned afresh");
        rig.ring.check().unwrap();
        rig.write(&promoted, &[pass("a", 0, true)]);
        rig.engine.commit(promoted).unwrap();
        assert_eq!((rig.ring.world(&"a".into()).unwrap(), rig.ring.free_worlds()), (Some(1), 0));
    }
    // Emptied under a plan for its next frame: that frame is out of order now.
    let rig = Rig::new(config(2), &["a", "b"]);
    rig.run(&[pass("a", 0, true)]);
    let running = rig.plan(&[pass("b", 0, false)]);
    let ahead = rig.engine.preplan(&running, step(&[pass("a", 1, true)])).unwrap().admitted().unwrap();
    rig.engine.commit(running).unwrap();
    rig.engine.reset(&"a".into(), false).unwrap();
    let refusal = rig.engine.promote(ahead).unwrap().admitted().unwrap_err();
    assert_eq!(refusal.reason, RefusalReason::RingClock { request: "a".into(), expected: 0, got: 1 });
    rig.ring.check().unwrap();
}

/// The first two of four rows are real.
fn bucket() -> Bucket {
    Bucket { walk: "frame".into(), shape: PaddedShape { rows: 4, tokens: 4 * F } }
}

#[test]
fn f17_padded_rows_write_nothing_and_see_nothing() {
    let rig = Rig::new(config(3), &["a", "b", "c"]);
    rig.run(&[pass("c", 0, true)]);
    let passes = [pass("a", 0, true), pass("b", 0, true)];
    let admitted = rig.engine.admit_in(step(&passes), &bucket()).unwrap().admitted().unwrap();
    let planned = rig.engine.plan(admitted).unwrap();
    let plan = rig.ring.ring_plan(&main(&planned)).unwrap();
    assert_eq!((plan.rows.len(), plan.real_rows), (4, 2));
    assert_eq!(plan.qo_indptr, [0, 128, 256, 384, 512]);
    assert_eq!((plan.indptr(0), plan.blocks(0)), (&[0, 1, 2, 2, 2][..], &[9, 14][..]));
    assert!(plan.rows[2..].iter().all(|row| row.world.is_none() && row.request.is_dummy()));
    let before = rig.world(0);
    for layer in 0..3 {
        let contents = [passes[0].content, passes[1].content, 5, 6];
        let (k, v) = rows(rig.ring.config(), &contents, layer);
        rig.upsert(&planned, layer, &k, &v).unwrap();
    }
    rig.engine.commit(planned).unwrap();
    assert_eq!(rig.world(0), before);
    for (pass, world) in passes.iter().zip([1, 2]) {
        assert_eq!(rig.frame(0, world, 0), bits(rig.ring.config(), Some(pass.content), 0));
        assert_eq!(rig.frame(0, world, 1), bits(rig.ring.config(), None, 0));
    }
    // A bucket whose rows are no frames is refused, and so is one that is too small.
    for shape in [PaddedShape { rows: 4, tokens: 4 }, PaddedShape { rows: 1, tokens: F }] {
        let bucket = Bucket { walk: "frame".into(), shape };
        let passes = [pass("a", 1, true), pass("b", 1, true)];
        let admitted = rig.engine.admit_in(step(&passes), &bucket).unwrap().admitted().unwrap();
        let said = rig.engine.plan(admitted).unwrap_err().to_string();
        assert!(said.starts_with("ring: 2 frames of 128 tokens do not fit a bucket"), "{said}");
    }
    assert_eq!(rig.engine.outstanding(), 0);
}

#[test]
fn a_step_picks_a_bucket_by_its_frames() {
    let shape = |rows| Bucket { walk: "frame".into(), shape: PaddedShape { rows, tokens: rows * F } };
    let buckets = Buckets::new([shape(1), shape(4)]);
    let picked = buckets.pick_for(&step(&[pass("a", 0, true), pass("b", 0, true)])).unwrap();
    assert_eq!(picked.shape, PaddedShape { rows: 4, tokens: 4 * F });
}

fn frame_of(_: &Bucket, rows: &[(RequestId, usize)]) -> Step {
    let segment = |(request, _): &(RequestId, usize)| RingSegment {
        request: request.clone(),
        label: Label::main(),
        span: F,
        frame_pos: 0,
        commit: false,
    };
    Step::new("frame")
        .with("ring", Declaration::Ring(RingStep { segments: rows.iter().map(segment).collect() }))
}

#[test]
fn a_warm_up_leaves_no_dummy_and_every_world_free() {
    let rig = Rig::new(config(2), &[]);
    let shape = |rows| Bucket { walk: "frame".into(), shape: PaddedShape { rows, tokens: rows * F } };
    let buckets = Buckets::new([shape(1), shape(3)]);
    let mut ran = 0;
    warm_up(&rig.engine, &buckets, frame_of, |planned| {
        ran += 1;
        let rows_of = rig.ring.ring_plan(&main(planned))?.rows.len();
        for layer in 0..3 {
            let (k, v) = rows(rig.ring.config(), &vec![7; rows_of], layer);
            rig.upsert(planned, layer, &k, &v)?;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!((ran, rig.ring.free_worlds(), rig.ring.tracked_requests().len()), (4, 2, 0));
    assert!(rig.world(0).iter().chain(&rig.world(1)).flatten().all(|&bits| bits == 0));
}

#[test]
fn a_dummy_keeps_no_world_even_when_its_step_is_committed() {
    let rig = Rig::new(config(1), &[]);
    let dummies = rig.engine.ingest_dummies(1).unwrap();
    let declared = frame_of(&bucket(), &[(dummies[0].clone(), F)]);
    let planned = rig.engine.plan(rig.engine.admit(declared).unwrap().admitted().unwrap()).unwrap();
    rig.engine.commit(planned).unwrap();
    assert_eq!((rig.ring.free_worlds(), rig.ring.clock(&dummies[0]).unwrap()), (1, 0));
    assert!(matches!(rig.engine.post_warmup_validate(), Err(Error::DummyRequestsLeft { .. })));
    rig.engine.remove(&dummies[0]).unwrap();
    rig.engine.post_warmup_validate().unwrap();
}

#[test]
fn arrays_keep_their_addresses_and_an_upsert_allocates_nothing() {
    let rig = Rig::new(config(2), &["a", "b"]);
    rig.engine.build_accelerator_graph_buffers([bucket()]).unwrap();
    let mut addresses = Vec::new();
    for frame in 0..12 {
        let both = frame % 3 != 1;
        let mut passes = vec![pass("a", frame, true)];
        passes.extend(both.then(|| pass("b", frame, true)));
        let admitted = rig.engine.admit_in(step(&passes), &bucket()).unwrap().admitted().unwrap();
        let planned = rig.engine.plan(admitted).unwrap();
        let id = main(&planned);
        let contents = [1, 2, 3, 4];
        for layer in 0..3 {
            let (k, v) = rows(rig.ring.config(), &contents, layer);
            let k = TensorRef::from_slice(&k, &[4 * F, 1, 2]).unwrap();
            let v = TensorRef::from_slice(&v, &[4 * F, 1, 3]).unwrap();
            let count = allocations(|| {
                let view = rig.ring.upsert(&id, layer, k, v, &Stream::cpu()).unwrap();
                assert!(!view.visible(0).is_empty());
            });
            assert_eq!(count, 0, "layer {layer} of frame {frame}");
        }
        let plan = rig.ring.ring_plan(&id).unwrap();
        let layer = rig.ring.layer(1).unwrap();
        addresses.push([
            plan.qo_indptr.as_ptr().addr(),
            plan.indptr(0).as_ptr().addr(),
            plan.blocks(0).as_ptr().addr(),
            plan.blocks(1).as_ptr().addr(),
            layer.k.as_ptr().addr(),
            layer.v.as_ptr().addr(),
        ]);
        drop(plan);
        rig.engine.commit(planned).unwrap();
        if !both {
            rig.run(&[pass("b", frame, true)]);
        }
    }
    addresses.dedup();
    assert_eq!(addresses.len(), 1, "{addresses:?}");
}

#[test]
fn a_plan_that_is_held_keeps_what_it_said() {
    let rig = Rig::new(config(1), &["a"]);
    let planned = rig.plan(&[pass("a", 0, false)]);
    let (id, held) = (main(&planned), rig.ring.ring_plan(&main(&planned)).unwrap());
    rig.engine.commit(planned).unwrap();
    (0..3).for_each(|frame| drop(rig.run(&[pass("a", frame, true)])));
    assert_eq!((held.visible(0, 0), held.rows[0].frame_pos), (&[4][..], 0));
    assert!(matches!(rig.ring.ring_plan(&id), Err(Error::UnknownPlan { .. })));
    let (k, v) = ([0f32; F * 2], [0f32; F * 3]);
    let (k, v) =
        (TensorRef::from_slice(&k, &[F, 1, 2]).unwrap(), TensorRef::from_slice(&v, &[F, 1, 3]).unwrap());
    assert!(matches!(rig.ring.upsert(&id, 0, k, v, &Stream::cpu()), Err(Error::UnknownPlan { .. })));
}

#[test]
fn keys_and_values_may_be_strided_and_others_are_refused_whole() {
    let rig = Rig::new(config(1), &["a"]);
    let planned = rig.plan(&[pass("a", 0, false)]);
    let id = main(&planned);
    // Keys and values fused, [F, 1, 2 + 3].
    let (k, v) = rows(rig.ring.config(), &[42], 1);
    let fused: Vec<f32> = (0..F).flat_map(|t| [&k[t * 2..][..2], &v[t * 3..][..3]].concat()).collect();
    let fused = TensorRef::from_slice(&fused, &[F, 1, 5]).unwrap();
    let (k, v) = (fused.narrow(2, 0, 2).unwrap(), fused.narrow(2, 2, 3).unwrap());
    rig.ring.upsert(&id, 1, k, v, &Stream::cpu()).unwrap();
    assert_eq!(rig.frame(1, 0, 3), bits(rig.ring.config(), Some(42), 1));
    // Right keys beside wrong values: neither is written.
    let before = rig.world(0);
    let said = rig.ring.upsert(&id, 1, fused.narrow(2, 1, 2).unwrap(), k, &Stream::cpu()).unwrap_err();
    assert_eq!(said.to_string(), "v: expected shape [R * F, G, Dv] = [128, 1, 3], got [128, 1, 2]");
    let said = rig.ring.upsert(&id, 3, k, v, &Stream::cpu()).unwrap_err().to_string();
    assert_eq!(said, "layer: the ring has 3 layers, got 3");
    assert_eq!(rig.world(0), before);
    rig.engine.abort(planned);
}

#[test]
fn memory_is_known_before_it_is_taken() {
    let config = config(3);
    let bytes = config.memory_bytes().unwrap();
    assert_eq!(RingCache::new("ring".into(), config).unwrap().bytes(), bytes);
    assert_eq!(bytes, 3 * (5 + 4 + 5) * F * (2 + 3) * 4);
}

#[test]
fn passes_of_several_labels_are_plans_of_their_own() {
    let rig = Rig::new(config(2), &["a", "b"]);
    let mut declared = step(&[pass("a", 0, true), pass("b", 0, true)]);
    let Some(Declaration::Ring(ring)) = declared.resources.get_mut(&"ring".into()) else { panic!() };
    ring.segments[1].label = "other".into();
    let planned = rig.engine.plan(rig.engine.admit(declared).unwrap().admitted().unwrap()).unwrap();
    assert_eq!(rig.ring.plan_labels(planned.serial()).unwrap(), [Label::main(), Label::new("other")]);
    let forward = planned.forward("other", &Stream::cpu()).plan_id().clone();
    let plan = rig.ring.ring_plan(&forward).unwrap();
    assert_eq!((plan.rows.len(), plan.rows[0].world), (1, Some(1)));
    // Only one of them is written: the other's frame must not be kept.
    rig.write(&planned, &[pass("a", 0, true)]);
    let said = rig.engine.commit(planned).unwrap_err().to_string();
    assert!(said.contains("a frame of other that layer 0 never wrote"), "{said}");
    assert_eq!((rig.ring.clock(&"a".into()).unwrap(), rig.ring.free_worlds()), (0, 2));
}

#[test]
fn a_layer_written_by_two_threads_is_written_whole() {
    let rig = Arc::new(Rig::new(config(1), &["a"]));
    for frame in 0..20 {
        let passes = [pass("a", frame, true)];
        let planned = rig.plan(&passes);
        std::thread::scope(|scope| {
            for content in [1000, 2000] {
                let (rig, planned) = (&rig, &planned);
                scope.spawn(move || {
                    for layer in 0..3 {
                        let (k, v) = rows(rig.ring.config(), &[content], layer);
                        // One at a time: the other is told so, or comes after.
                        let said = rig.upsert(planned, layer, &k, &v);
                        assert!(matches!(said, Ok(_) | Err(Error::Order { .. })), "{said:?}");
                    }
                });
            }
        });
        rig.engine.commit(planned).unwrap();
        let slot = (frame % 4) as usize;
        let whole = [1000, 2000].map(|content| bits(rig.ring.config(), Some(content), 0));
        assert!(whole.contains(&rig.frame(0, 0, slot)), "frame {frame}");
    }
}
