//! What may become of a request's pages while it runs: no bit of what follows knows of it.

use mstar_core::attend::{IndexFormat, IndexStore};
use mstar_core::resource::PaddedShape;
use mstar_core::step::{Fork, KvStep};
use mstar_core::{Outcome, Resource};

use crate::rig::{L, Rig, RowOut, Setup, kv_step, segment, step, tokens};

/// A request of 21 tokens and then eleven more, one by one, past `topk` from the first; what it yields alone.
fn plain(setup: &Setup, request: &str) -> Vec<RowOut> {
    let rig = Rig::new(setup.clone());
    rig.ingest(&[request]);
    let mut outs = rig.step(&[(request, 21)], None);
    outs.extend((0..11).flat_map(|_| rig.step(&[(request, 1)], None)));
    outs
}

fn setups() -> [Setup; 3] {
    [
        Setup::default(),
        Setup { page_size: 3, format: IndexFormat::Fp8, ..Setup::default() },
        Setup { page_size: 1, full_layers: vec![0], pages: 900, ..Setup::default() },
    ]
}

#[track_caller]
fn same(outs: &[RowOut], expected: &[RowOut]) {
    assert_eq!(outs.len(), expected.len());
    outs.iter().zip(expected).for_each(|(out, expected)| out.assert_same_bits(expected));
}

#[test]
fn forks_in_the_middle_change_no_bit_of_either_side() {
    for setup in setups() {
        let expected = plain(&setup, "a");
        let rig = Rig::new(setup);
        rig.ingest(&["a"]);
        let mut outs = rig.step(&[("a", 21)], None);
        // The fork shares full pages and copies the partial one, in the step and at its end.
        let fork = |to: &str| Fork { request: "a".into(), from: "main".into(), to: to.into() };
        for turn in 0..11 {
            let mut kv = KvStep { segments: vec![segment("a", "main", 1)], ..KvStep::default() };
            if turn == 2 {
                kv.pre_forks.push(fork("side"));
                rig.forked("a", "main", "side");
            }
            if turn >= 2 {
                kv.segments.push(segment("a", "side", 1));
            }
            if turn == 4 {
                kv.post_forks.push(fork("late"));
            }
            if turn >= 5 {
                kv.segments.push(segment("a", "late", 1));
            }
            let planned = rig.planned(kv_step(kv), None);
            let main = rig.forward(&planned, "main");
            // Either side writes the same tokens at the same positions, so it yields the same.
            for label in [(turn >= 2).then_some("side"), (turn >= 5).then_some("late")].into_iter().flatten()
            {
                same(&rig.forward(&planned, label), &main);
            }
            rig.engine.commit(planned).unwrap();
            if turn == 4 {
                rig.forked("a", "main", "late");
            }
            outs.extend(main);
        }
        same(&outs, &expected);
        rig.kv.store().check().unwrap();
    }
}

#[test]
fn a_fork_that_goes_its_own_way_leaves_the_other_its_bits() {
    let setup = Setup::default();
    let expected = plain(&setup, "a");
    let rig = Rig::new(setup);
    rig.ingest(&["a"]);
    let mut outs = rig.step(&[("a", 21)], None);
    for turn in 0..11 {
        let mut kv = KvStep { segments: vec![segment("a", "main", 1)], ..KvStep::default() };
        if turn == 3 {
            kv.pre_forks.push(Fork { request: "a".into(), from: "main".into(), to: "side".into() });
            rig.forked("a", "main", "side");
        }
        if turn >= 3 {
            let other = mstar_core::Segment { label: "side".into(), ..tokens("a", &[7, 8, 9]) };
            kv.segments.push(other);
        }
        let planned = rig.planned(kv_step(kv), None);
        outs.extend(rig.forward(&planned, "main"));
        if turn >= 3 {
            rig.forward(&planned, "side").iter().for_each(|row| rig.check(row));
        }
        rig.engine.commit(planned).unwrap();
    }
    same(&outs, &expected);
}

#[test]
fn f24_a_prefix_hit_skips_the_work_and_changes_no_bit() {
    for setup in setups() {
        let setup = Setup { prefix_cache: true, ..setup };
        let prompt: Vec<u64> = (100..133).collect();
        let rig = Rig::new(setup);
        assert_eq!(rig.ingest_prompt("cold", &prompt), 0);
        let run = |rig: &Rig, request: &str, found: usize| {
            let planned = rig.planned(
                kv_step(KvStep { segments: vec![tokens(request, &prompt[found..])], ..KvStep::default() }),
                None,
            );
            let mut outs = rig.forward(&planned, "main");
            rig.engine.commit(planned).unwrap();
            for token in 0..6u64 {
                let segments = vec![tokens(request, &[500 + token])];
                let planned = rig.planned(kv_step(KvStep { segments, ..KvStep::default() }), None);
                outs.extend(rig.forward(&planned, "main"));
                rig.engine.commit(planned).unwrap();
            }
            outs
        };
        let cold = run(&rig, "cold", 0);
        let found = rig.ingest_prompt("warm", &prompt);
        assert!(found >= 30, "{found}");
        let warm = run(&rig, "warm", found);
        warm.iter().for_each(|row| rig.check(row));
        // The last rows are the same step over the same keys.
        same(&warm[1..], &cold[1..]);
        for layer in 0..L {
            let last = |outs: &[RowOut]| outs[0].pick(layer, outs[0].q_len - 1);
            assert_eq!(last(&warm), last(&cold));
        }
    }
}

#[test]
fn f32_offload_and_reload_change_no_bit() {
    for setup in setups() {
        let expected = plain(&setup, "a");
        let rig = Rig::new(setup);
        rig.ingest(&["a", "b"]);
        let mut outs = rig.step(&[("a", 21)], None);
        for turn in 0..11 {
            if turn % 3 == 1 {
                assert!(rig.kv.store().offload(&"a".into()).unwrap() > 0);
                // Others write where its pages were.
                rig.step(&[("b", 40)], None);
                assert_eq!(rig.kv.store().reload(&"a".into()).unwrap(), Outcome::Admitted);
            }
            outs.extend(rig.step(&[("a", 1), ("b", 2)], None).into_iter().take(1));
        }
        same(&outs, &expected);
    }
}

#[test]
fn a_step_planned_ahead_changes_no_bit_whether_it_stands_or_not() {
    let setup = Setup::default();
    let expected = plain(&setup, "a");
    let rig = Rig::new(setup);
    rig.ingest(&["a"]);
    let mut outs = rig.step(&[("a", 21)], None);
    let mut running = rig.planned(step(&[("a", 1)]), None);
    for turn in 0..10 {
        let ahead = rig.engine.preplan(&running, step(&[("a", 1)])).unwrap().admitted().unwrap();
        outs.extend(rig.forward(&running, "main"));
        rig.engine.commit(running).unwrap();
        if turn == 5 {
            // Its pages come back elsewhere: the plan made ahead is of those that it had.
            rig.engine.clear(ahead);
            rig.kv.store().offload(&"a".into()).unwrap();
            assert_eq!(rig.kv.store().reload(&"a".into()).unwrap(), Outcome::Admitted);
            running = rig.planned(step(&[("a", 1)]), None);
            continue;
        }
        running = rig.engine.promote(ahead).unwrap().admitted().unwrap();
    }
    outs.extend(rig.forward(&running, "main"));
    rig.engine.commit(running).unwrap();
    same(&outs, &expected);
}

#[test]
fn steps_that_are_aborted_or_not_kept_leave_no_bit_behind() {
    for store in [IndexStore::Pages, IndexStore::Buffers] {
        let setup = Setup { store, ..Setup::default() };
        let expected = plain(&setup, "a");
        let rig = Rig::new(setup);
        rig.ingest(&["a"]);
        let mut outs = rig.step(&[("a", 21)], None);
        for turn in 0..11 {
            let other = || vec![tokens("a", &[9, 9, 9])];
            let kept = turn % 2 == 0;
            let planned =
                rig.planned(kv_step(KvStep { segments: other(), commit: kept, ..KvStep::default() }), None);
            rig.forward(&planned, "main");
            match kept {
                true => rig.engine.abort(planned),
                false => rig.engine.commit(planned).unwrap(),
            }
            outs.extend(rig.step(&[("a", 1)], None));
        }
        same(&outs, &expected);
    }
}

#[test]
fn f40_retention_changes_no_bit_while_nothing_that_is_picked_is_gone() {
    // Old keys score far below the last ones, so that a whole history and a kept end have the same picks.
    let late = |page_size, retention| {
        let mut rig = Rig::new(Setup { page_size, retention, ..Setup::default() });
        rig.index_inputs = Some(Box::new(|kind, position, lanes| match kind {
            mstar_kernels::synth::Kind::IndexKey => lanes.fill(position as f32),
            _ => lanes.iter_mut().for_each(|lane| *lane = lane.abs()),
        }));
        rig
    };
    for page_size in [1, 4, 5] {
        let (whole, kept) = (late(page_size, None), late(page_size, Some(12)));
        let mut dropped = false;
        for rig in [&whole, &kept] {
            rig.ingest(&["a"]);
            rig.step(&[("a", 14)], None);
        }
        for turn in 0..30 {
            let span = 1 + usize::from(turn % 7 == 3) * 2;
            let (whole, kept_rows) = (whole.step(&[("a", span)], None), kept.step(&[("a", span)], None));
            let (a, b) = (&whole[0], &kept_rows[0]);
            kept.check(b);
            dropped |= b.first_kept >= page_size && b.first_kept % page_size != 0;
            for layer in 0..L {
                for query in 0..span {
                    let absolute: Vec<i32> =
                        b.pick(layer, query).iter().map(|p| p + b.first_kept as i32).collect();
                    assert_eq!(absolute, a.pick(layer, query), "layer {layer} of {}", b.kv_len);
                }
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&a.layers[layer].o), bits(&b.layers[layer].o));
                assert_eq!(bits(&a.layers[layer].lse), bits(&b.layers[layer].lse));
            }
        }
        assert!(dropped || page_size == 1, "no row began inside a page");
    }
}

#[test]
fn retention_agrees_with_the_oracle_wherever_rows_begin() {
    for (page_size, retention) in [(4, 3), (4, 9), (5, 20), (1, 7), (16, 30)] {
        let rig = Rig::new(Setup { page_size, retention: Some(retention), ..Setup::default() });
        rig.ingest(&["a", "b"]);
        for (a, b) in [(19, 2), (1, 1), (3, 40), (1, 1), (9, 1), (1, 5), (1, 1)] {
            rig.step(&[("a", a), ("b", b)], None).iter().for_each(|row| rig.check(row));
        }
    }
}

#[test]
fn keys_in_buffers_give_the_picks_and_bits_of_keys_in_pages() {
    for format in [IndexFormat::F32, IndexFormat::Bf16, IndexFormat::Fp8] {
        for retention in [None, Some(11)] {
            let rigs = [IndexStore::Pages, IndexStore::Buffers].map(|store| {
                let rig = Rig::new(Setup { store, format, retention, ..Setup::default() });
                rig.ingest(&["a", "b", "c"]);
                rig
            });
            let bucket = PaddedShape { rows: 4, tokens: 8 };
            for (rows, bucket) in [
                (&[("a", 21), ("b", 5), ("c", 70)][..], None),
                (&[("a", 1), ("c", 1)], Some(bucket)),
                (&[("b", 9), ("a", 3)], None),
                (&[("c", 2), ("a", 1), ("b", 1)], Some(bucket)),
            ] {
                let [pages, buffers] = [0, 1].map(|of| rigs[of].step(rows, bucket));
                same(&buffers, &pages);
            }
        }
    }
}

#[test]
fn reset_and_removed_requests_leave_nothing_behind() {
    let setup = Setup { store: IndexStore::Buffers, ..Setup::default() };
    let rig = Rig::new(setup.clone());
    rig.ingest(&["a", "b"]);
    rig.step(&[("a", 21), ("b", 30)], None);
    assert_eq!(rig.dsa.tracked_requests(), ["a".into(), "b".into()]);
    // One that a step holds is not emptied under it.
    let planned = rig.planned(step(&[("b", 1)]), None);
    assert!(rig.engine.reset(&"b".into(), true).is_err());
    rig.forward(&planned, "main").iter().for_each(|row| rig.check(row));
    rig.engine.commit(planned).unwrap();
    let held = rig.dsa.bytes();
    rig.engine.reset(&"a".into(), true).unwrap();
    rig.emptied("a");
    assert!(rig.dsa.bytes() < held);
    assert_eq!(rig.dsa.tracked_requests(), ["b".into()]);
    let mut outs = rig.step(&[("a", 21)], None);
    outs.extend((0..11).flat_map(|_| rig.step(&[("a", 1)], None)));
    same(&outs, &plain(&setup, "a"));
    for request in ["a", "b", "a"] {
        rig.engine.remove(&request.into()).unwrap();
    }
    assert!(rig.dsa.tracked_requests().is_empty());
}

#[test]
fn a_warm_up_leaves_no_dummy_behind() {
    for store in [IndexStore::Pages, IndexStore::Buffers] {
        let rig = Rig::new(Setup { store, ..Setup::default() });
        let shape = PaddedShape { rows: 3, tokens: 3 };
        let bucket = mstar_core::graph::Bucket { walk: "decode".into(), shape };
        rig.engine.build_accelerator_graph_buffers([bucket]).unwrap();
        let ids = rig.engine.ingest_dummies(3).unwrap();
        let rows: Vec<(&str, usize)> = ids.iter().map(|id| (id.as_str(), 1)).collect();
        for slot in 0..2 {
            let outs = rig.step(&rows, Some(shape));
            assert_eq!(outs.len(), 3, "slot {slot}");
        }
        ids.iter().for_each(|id| rig.engine.remove(id).unwrap());
        rig.engine.post_warmup_validate().unwrap();
    }
}
