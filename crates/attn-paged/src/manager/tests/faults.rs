//! Faults that users of such software have met, at the level of an engine's steps.

use super::*;

#[test]
fn f40_a_row_alone_equals_the_row_in_a_batch_of_seven() {
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    let lengths = [700, 3, 1, 64, 513, 16, 1030];
    let alone: Vec<Vec<RowOut>> = names
        .iter()
        .zip(lengths)
        .map(|(name, length)| {
            let rig = Rig::new(16, 256);
            rig.ingest(&[name]);
            rig.step(&[(name, length)], None);
            (0..3).map(|_| rig.step(&[(name, 1)], None).remove(0)).collect()
        })
        .collect();
    let rig = Rig::new(16, 256);
    rig.ingest(&names);
    // Prefilled one by one and in pieces, so that pages interleave.
    for (name, length) in names.iter().zip(lengths).rev() {
        rig.step(&[(name, length)], None);
    }
    for turn in 0..3 {
        let mut rows: Vec<(&str, usize)> = names.iter().map(|name| (*name, 1)).collect();
        rows.rotate_left(turn);
        let out = rig.step(&rows, None);
        for (name, alone) in names.iter().zip(&alone) {
            assert!(find(&out, name).same_bits(&alone[turn]), "{name} in turn {turn}");
        }
    }
}

#[test]
fn f17_padded_slots_yield_zero_and_write_nothing_and_real_rows_equal_eager() {
    let prefill = [("a", 5), ("b", 33), ("c", 17)];
    let eager = Rig::new(8, 64);
    let padded = Rig::new(8, 64);
    for rig in [&eager, &padded] {
        rig.ingest(&["a", "b", "c"]);
        for (name, length) in prefill {
            rig.step(&[(name, length)], None);
        }
    }
    for bucket in [shape(8, 8), shape(4, 12), shape(3, 3)] {
        let rows = [("a", 1), ("b", 1), ("c", 1)];
        let before = padded.pool();
        let (want, got) = (eager.step(&rows, None), padded.step(&rows, bucket));
        for (want, got) in want.iter().zip(&got) {
            assert!(got.same_bits(want), "{} in {bucket:?}", got.request);
        }
        // Three tokens were appended in each layer, to keys and to values: nothing else changed.
        let changed = before.iter().zip(padded.pool()).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert!(changed <= 3 * 2 * L * G * D, "{changed}");
        assert_eq!(eager.pool(), padded.pool());
    }
    // Real rows without queries, between others.
    let rows = [("a", 5), ("b", 0), ("c", 7)];
    let (want, got) = (eager.step(&rows, None), padded.step(&rows, shape(8, 16)));
    assert!(want.iter().zip(&got).all(|(want, got)| got.same_bits(want)));
}

#[test]
fn f16_a_small_plan_after_a_large_one_in_the_same_bucket_equals_one_in_fresh_memory() {
    let large: Vec<String> = (0..16).map(|i| format!("r{i}")).collect();
    let run = |first: bool| {
        let rig = Rig::new(4, 16 * 16 + 8);
        rig.ingest(&large.iter().map(String::as_str).collect::<Vec<_>>());
        rig.ingest(&["x", "y"]);
        for name in &large {
            rig.step(&[(name, 60)], None);
        }
        rig.step(&[("x", 2)], None);
        rig.step(&[("y", 1)], None);
        if first {
            let rows: Vec<(&str, usize)> = large.iter().map(|name| (name.as_str(), 1)).collect();
            rig.step(&rows, shape(16, 16));
        }
        rig.step(&[("x", 1), ("y", 1)], shape(16, 16))
    };
    let (fresh, after) = (run(false), run(true));
    assert!(fresh.iter().zip(&after).all(|(a, b)| a.same_bits(b)));
}

#[test]
fn f20_several_query_tokens_in_a_decode_row_see_each_other_causally() {
    let rig = Rig::new(4, 128);
    let lengths = [("a", 7), ("b", 8), ("c", 9), ("d", 100)];
    rig.ingest(&["a", "b", "c", "d"]);
    for (name, length) in lengths {
        rig.step(&[(name, length - 3)], None);
    }
    for bucket in [None, shape(8, 32)] {
        let planned = rig.planned(step(&lengths.map(|(name, _)| (name, 3))), bucket);
        let out = rig.forward(&planned, "main");
        rig.engine.abort(planned);
        for (name, length) in lengths {
            let (o, lse) = rig.oracle(name, 3, length, 0);
            let row = &find(&out, name).layers[0];
            assert!(close(&row.0, &o) && close(&row.1, &lse), "{name}");
        }
    }
}

#[test]
fn f19_preplanned_steps_equal_plain_ones_to_the_bit() {
    let rows = [("a", 1), ("b", 1)];
    let plain = Rig::new(4, 64);
    let ahead = Rig::new(4, 64);
    for rig in [&plain, &ahead] {
        rig.ingest(&["a", "b"]);
        rig.step(&[("a", 6), ("b", 3)], None);
    }
    let want: Vec<Vec<RowOut>> = (0..6).map(|_| plain.step(&rows, None)).collect();
    let mut now = ahead.planned(step(&rows), None);
    for (turn, want) in want.iter().enumerate() {
        let next = ahead.engine.preplan(&now, step(&rows)).unwrap().admitted().unwrap();
        let got = ahead.forward(&now, "main");
        assert!(got.iter().zip(want).all(|(a, b)| a.same_bits(b)), "turn {turn}");
        ahead.engine.commit(now).unwrap();
        now = match ahead.engine.promote(next).unwrap() {
            Admission::Admitted(now) => now,
            refused => panic!("{refused:?}"),
        };
    }
    ahead.engine.abort(now);
    assert_eq!(plain.kv.store().stats().pages_held, ahead.kv.store().stats().pages_held);
}

#[test]
fn f18_workspaces_foreseen_for_the_largest_step_never_grow() {
    use mstar_core::attend::StepShape;
    let largest = StepShape { rows: 8, tokens: 200, kv_len: 1500 };
    let config = rig::config(16, 900);
    let softmax = Softmax::scaled(0.25);
    let kv = std::sync::Arc::new(mstar_core::kv::PagedKvCache::new("kv".into(), config).unwrap());
    let mut cx = rig::context("attn", &kv, &softmax);
    cx.largest = Some(largest);
    let bound =
        crate::workspace_bound(&cx.geometry, largest, 0, crate::Device::Cpu, crate::Schedule::Invariant)
            .unwrap();
    let attn = std::sync::Arc::new(crate::PagedAttention::new(&cx, PagedOptions::default()).unwrap());
    let resources: Vec<std::sync::Arc<dyn Resource>> = vec![attn.clone(), kv.clone()];
    let engine = mstar_core::Engine::new(resources).unwrap();
    let rig = Rig { engine, kv, attn, softmax };
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    rig.ingest(&names);
    for name in names {
        rig.step(&[(name, 200)], None);
        for _ in 0..6 {
            rig.step(&[(name, 200)], None);
        }
    }
    let all = |spans: [usize; 8]| names.iter().copied().zip(spans).collect::<Vec<_>>();
    for spans in [[1; 8], [1, 1, 1, 1, 1, 1, 1, 93], [25; 8], [0, 3, 0, 1, 12, 40, 1, 60]] {
        let planned = rig.planned(step(&all(spans)), None);
        rig.forward(&planned, "main");
        rig.engine.abort(planned);
        assert_eq!(rig.attn.plans().workspace_bytes(), bound, "{spans:?}");
    }
}

#[test]
fn f13_a_short_request_after_a_long_one_in_the_same_slot_reads_and_writes_its_own_pages_alone() {
    let bucket = shape(4, 4);
    let run = |with_long: bool| {
        let rig = Rig::new(4, 200);
        rig.ingest(&["short", "long", "live"]);
        rig.step(&[("short", 10)], None);
        rig.step(&[("long", 255)], None);
        rig.step(&[("live", 40)], None);
        if with_long {
            rig.step(&[("long", 1)], bucket);
            rig.engine.remove(&"long".into()).unwrap();
        }
        let before = rig.pool();
        let out = rig.step(&[("short", 1)], bucket).remove(0);
        let page = rig.kv.store().stream(&"short".into(), &Label::main()).unwrap().pages[2] as usize;
        let changed: std::collections::BTreeSet<usize> = before
            .iter()
            .zip(rig.pool())
            .enumerate()
            .filter(|(_, (a, b))| a.to_bits() != b.to_bits())
            // `pool` lists keys and values of each layer apart, page after page of 4 slots.
            .map(|(index, _)| index / (G * D) % (200 * 4))
            .collect();
        (out, changed == [page * 4 + 2].into())
    };
    let (fresh, after) = (run(false), run(true));
    assert!(fresh.0.same_bits(&after.0));
    assert!(fresh.1 && after.1, "nothing but the appended slot changed");
}
