//! Whole lives of requests: ragged steps, preplans, offload, retention, warm-up, and random ones against a model.

use super::*;

#[test]
fn ragged_steps_match_the_oracle() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b", "c"]);
    let mut stored = [("a", 0), ("b", 0), ("c", 0)];
    for spans in [[9, 1, 0], [1, 7, 3], [1, 1, 1], [2, 0, 4]] {
        let rows: Vec<(&str, usize)> =
            stored.iter().zip(spans).map(|(&(name, _), span)| (name, span)).collect();
        let out = rig.step(&rows, None);
        for ((name, len), (row, span)) in stored.iter_mut().zip(out.iter().zip(spans)) {
            *len += span;
            for layer in 0..L {
                let (o, lse) = rig.oracle(name, span, *len, layer);
                assert!(close(&row.layers[layer].0, &o) && close(&row.layers[layer].1, &lse), "{name} {len}");
            }
        }
    }
}

#[test]
fn a_preplan_over_a_step_that_is_aborted_is_cleared_without_a_trace() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    rig.step(&[("a", 6)], None);
    let before =
        (rig.kv.store().stats().pages_free, rig.kv.store().stream(&"a".into(), &Label::main()).unwrap());
    let now = rig.planned(step(&[("a", 1)]), None);
    let next = rig.engine.preplan(&now, step(&[("a", 1)])).unwrap().admitted().unwrap();
    rig.engine.abort(now);
    assert!(rig.engine.promote(next).is_err());
    let after =
        (rig.kv.store().stats().pages_free, rig.kv.store().stream(&"a".into(), &Label::main()).unwrap());
    assert_eq!(before.0, after.0);
    assert_eq!(before.1.len, after.1.len);
    let out = rig.step(&[("a", 1)], None);
    let (o, _) = rig.oracle("a", 1, 7, 1);
    assert!(close(&out[0].layers[1].0, &o));
}

#[test]
fn an_unchanged_plan_is_kept_and_a_changed_length_makes_another() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    rig.step(&[("a", 6)], None);
    let made = |counts: PlanCounts| (counts.made, counts.unchanged);
    let start = made(rig.attn.plans().counts());
    // Read-only passes over the same tokens.
    for _ in 0..3 {
        let planned = rig.planned(step(&[("a", 0)]), None);
        rig.engine.commit(planned).unwrap();
    }
    let read = made(rig.attn.plans().counts());
    assert_eq!((read.0 - start.0, read.1 - start.1), (1, 2));
    for length in 7..10 {
        let out = rig.step(&[("a", 1)], None);
        let (o, lse) = rig.oracle("a", 1, length, 0);
        assert!(close(&out[0].layers[0].0, &o) && close(&out[0].layers[0].1, &lse), "{length}");
    }
    assert_eq!(rig.attn.plans().counts().made - read.0, 3);
}

#[test]
fn the_buffers_of_a_slot_keep_their_addresses() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b"]);
    rig.engine
        .build_accelerator_graph_buffers([Bucket {
            walk: "decode".into(),
            shape: PaddedShape { rows: 8, tokens: 8 },
        }])
        .unwrap();
    rig.step(&[("a", 6), ("b", 9)], shape(8, 16));
    let planned = rig.planned(step(&[("a", 1), ("b", 1)]), shape(8, 8));
    let id = plan_id(&planned, "main");
    let address = rig.attn.kv_len_buf(&id).unwrap().view().unwrap().as_ptr();
    rig.engine.commit(planned).unwrap();
    let planned = rig.planned(step(&[("a", 1), ("b", 1)]), shape(8, 8));
    let id = plan_id(&planned, "main");
    let lens = rig.attn.kv_len_buf(&id).unwrap();
    assert_eq!(lens.view().unwrap().as_ptr(), address, "the buffers of a slot never move");
    assert_eq!(lens.view().unwrap().as_slice::<i32>().unwrap(), &[8, 11, 0, 0, 0, 0, 0, 0]);
    let starts = rig.attn.qo_indptr_buf(&id).unwrap();
    assert_eq!(starts.view().unwrap().as_slice::<i32>().unwrap(), &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
    let held = rig.attn.plans().bytes();
    rig.forward(&planned, "main");
    assert_eq!(rig.attn.plans().bytes(), held, "a run makes nothing grow");
    assert!(rig.attn.kernel(&id).unwrap().contains("decode rows"));
    rig.engine.commit(planned).unwrap();
}

#[test]
fn a_plan_of_another_step_slot_or_label_is_refused() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    let planned = rig.planned(step(&[("a", 3)]), None);
    let id = plan_id(&planned, "main");
    assert!(rig.attn.kv_len_buf(&id).is_ok());
    for other in [
        mstar_core::PlanId { label: "cond".into(), ..id.clone() },
        mstar_core::PlanId { slot: mstar_core::Slot(1), ..id.clone() },
        mstar_core::PlanId { serial: StepSerial(u64::MAX), ..id.clone() },
    ] {
        assert!(matches!(rig.attn.kv_len_buf(&other), Err(Error::UnknownPlan { .. })), "{other:?}");
    }
    rig.engine.commit(planned).unwrap();
    assert!(matches!(rig.attn.kv_len_buf(&id), Err(Error::UnknownPlan { .. })), "a plan ends with its step");
}

#[test]
fn one_thread_and_two_give_the_same_bits() {
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let rig = Rig::new(16, 400);
            rig.ingest(&["a", "b", "c"]);
            let mut out = rig.step(&[("a", 3000), ("b", 40), ("c", 1)], None);
            for _ in 0..2 {
                out.extend(rig.step(&[("a", 1), ("b", 3), ("c", 1)], None));
            }
            out
        })
    };
    let (one, two) = (run(1), run(2));
    assert!(one.len() == 9 && one.iter().zip(&two).all(|(a, b)| a.same_bits(b)));
}

#[test]
fn retention_changes_no_bit_of_a_windowed_row() {
    let softmax = Softmax { window_left: Some(37), ..Softmax::scaled(0.25) };
    let build = |retention| {
        let config = mstar_core::kv::KvConfig { retention, ..rig::config(4, 64) };
        let rig = Rig::with(config, softmax.clone(), PagedOptions::default(), true);
        rig.ingest(&["a", "b"]);
        rig
    };
    let (all, some) = (build(None), build(Some(37)));
    for rows in [[("a", 60), ("b", 5)], [("a", 1), ("b", 40)], [("a", 5), ("b", 1)], [("a", 1), ("b", 1)]] {
        let (want, got) = (all.step(&rows, None), some.step(&rows, None));
        assert!(want.iter().zip(&got).all(|(a, b)| a.same_bits(b)), "{rows:?}");
    }
    let (all, some) = (all.kv.store().stats().pages_held, some.kv.store().stats().pages_held);
    assert!(some < all, "pages were given back: {some} of {all}");
}

#[test]
fn a_request_that_was_offloaded_comes_back_with_the_same_bits() {
    let (stayed, moved) = (Rig::new(4, 32), Rig::new(4, 32));
    for rig in [&stayed, &moved] {
        rig.ingest(&["a", "b"]);
        rig.step(&[("a", 21), ("b", 6)], None);
    }
    moved.kv.store().offload(&"a".into()).unwrap();
    let refused = moved.engine.admit(step(&[("a", 1)])).unwrap().admitted().unwrap_err();
    assert_eq!(refused.resource.as_str(), "kv");
    // Somebody else takes the pages that were given back.
    moved.ingest(&["c"]);
    moved.step(&[("c", 30)], None);
    moved.engine.remove(&"c".into()).unwrap();
    let reloaded = moved.kv.store().reload(&"a".into()).unwrap();
    assert_eq!(reloaded, mstar_core::Outcome::Admitted);
    let rows = [("a", 1), ("b", 1)];
    let (want, got) = (stayed.step(&rows, None), moved.step(&rows, None));
    assert!(want.iter().zip(&got).all(|(a, b)| a.same_bits(b)));
}

#[test]
fn every_bucket_warms_up_on_a_pool_smaller_than_its_rows_and_leaves_nothing() {
    for preplan in [true, false] {
        let rig = Rig::with(rig::config(4, 10), Softmax::scaled(0.25), PagedOptions::default(), preplan);
        rig.ingest(&["a"]);
        rig.step(&[("a", 6)], None);
        let before = rig.kv.store().stats().pages_free;
        let buckets = Buckets::decode("decode", &[1, 8, 64]);
        let declare = |_: &Bucket, rows: &[(mstar_core::RequestId, usize)]| {
            step(&rows.iter().map(|(id, q_len)| (id.as_str(), *q_len)).collect::<Vec<_>>())
        };
        let mut ran = 0;
        warm_up(&rig.engine, &buckets, declare, |planned| {
            rig.forward(planned, "main");
            ran += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(ran, 6);
        rig.engine.post_warmup_validate().unwrap();
        assert_eq!(rig.kv.store().stats().pages_free, before);
        let out = rig.step(&[("a", 1)], Some(PaddedShape { rows: 8, tokens: 8 }));
        let (o, _) = rig.oracle("a", 1, 7, 0);
        assert!(close(&out[0].layers[0].0, &o));
    }
}

/// A small generator of test decisions; the same for a seed everywhere.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// What the cache should hold, and nothing else: lengths.
#[derive(Clone, Default)]
struct Model(std::collections::BTreeMap<&'static str, usize>);

impl Model {
    fn check(&self, rig: &Rig, rows: &[(&str, usize)], out: &[RowOut], said: &str) {
        for (&(name, span), row) in rows.iter().zip(out) {
            let end = self.0[name] + span;
            for layer in 0..L {
                let (o, lse) = rig.oracle(name, span, end, layer);
                let got = &row.layers[layer];
                assert!(close(&got.0, &o) && close(&got.1, &lse), "{said}: {name} {span} of {end}");
            }
        }
    }

    fn grow(&mut self, rows: &[(&'static str, usize)]) {
        for (name, span) in rows {
            *self.0.get_mut(name).unwrap() += span;
        }
    }
}

#[test]
fn random_lives_of_steps_always_attend_what_was_kept() {
    const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
    for seed in 0..6 {
        let mut dice = Dice(seed);
        let page_size = [1, 3, 4, 16][dice.below(4)];
        let pages = 3000 / page_size + 60;
        let rig = Rig::new(page_size, pages);
        let mut model = Model::default();
        rig.ingest(&NAMES);
        for name in NAMES {
            model.0.insert(name, 0);
        }
        for turn in 0..60 {
            let draw = |dice: &mut Dice| -> Vec<(&'static str, usize)> {
                let first = dice.below(5);
                let mut rows = vec![];
                for (index, name) in NAMES.into_iter().enumerate() {
                    if index == first || dice.below(2) == 0 {
                        rows.push((name, [1, 1, 1, 0, 2, 7, 19][dice.below(7)]));
                    }
                }
                rows
            };
            let rows = draw(&mut dice);
            let tokens: usize = rows.iter().map(|row| row.1).sum();
            let bucket =
                (dice.below(2) == 0).then(|| PaddedShape { rows: 8, tokens: tokens + dice.below(9) });
            let said = format!("seed {seed} turn {turn} {rows:?} {bucket:?}");
            let before = rig.kv.store().stats().pages_free;
            let running = rig.planned(step(&rows), bucket);
            match dice.below(6) {
                0 => {
                    rig.engine.abort(running);
                    assert_eq!(rig.kv.store().stats().pages_free, before, "{said}: abort");
                }
                1 | 2 => {
                    let next = draw(&mut dice);
                    let shape =
                        PaddedShape { rows: 6, tokens: next.iter().map(|row| row.1).sum::<usize>() + 3 };
                    let in_bucket = Bucket { walk: "decode".into(), shape };
                    let ahead = match dice.below(2) {
                        0 => rig.engine.preplan(&running, step(&next)),
                        _ => rig.engine.preplan_in(&running, step(&next), &in_bucket),
                    };
                    let ahead = ahead.unwrap().admitted().unwrap();
                    let out = rig.forward(&running, "main");
                    model.check(&rig, &rows, &out, &said);
                    rig.engine.commit(running).unwrap();
                    model.grow(&rows);
                    if dice.below(3) == 0 {
                        rig.engine.clear(ahead);
                    } else {
                        let now = rig.engine.promote(ahead).unwrap().admitted().unwrap();
                        let out = rig.forward(&now, "main");
                        model.check(&rig, &next, &out, &format!("{said} then {next:?}"));
                        rig.engine.commit(now).unwrap();
                        model.grow(&next);
                    }
                }
                _ => {
                    let out = rig.forward(&running, "main");
                    model.check(&rig, &rows, &out, &said);
                    rig.engine.commit(running).unwrap();
                    model.grow(&rows);
                }
            }
            if dice.below(12) == 0 {
                let name = NAMES[dice.below(5)];
                if dice.below(2) == 0 {
                    rig.engine.reset(&name.into(), true).unwrap();
                } else {
                    rig.engine.remove(&name.into()).unwrap();
                    rig.ingest(&[name]);
                }
                model.0.insert(name, 0);
            }
        }
        NAMES.iter().for_each(|name| rig.engine.remove(&(*name).into()).unwrap());
        let stats = rig.kv.store().stats();
        assert_eq!(stats.pages_free, pages - 1, "seed {seed}: every page but the sink is free at the end");
        rig.kv.store().check().unwrap();
    }
}
