use mstar_core::attend::Softmax;
use mstar_core::graph::{Bucket, Buckets, warm_up};
use mstar_core::resource::PaddedShape;
use mstar_core::step::{AttentionStep, Combined, Declaration, Fork, KvStep, MaskKeys, RowMask};
use mstar_core::{Admission, Attention, Error, Label, Resource, Segment, Step, StepSerial};
use mstar_kernels::reference::paged::Options;
use mstar_kernels::{Stream, TensorMut, TensorRef};

use crate::rig::{self, D, G, H, L, Rig, RowOut, close, plan_id, saying, segment, step};
use crate::{PagedOptions, PlanCounts};

fn find<'a>(rows: &'a [RowOut], request: &str) -> &'a RowOut {
    rows.iter().find(|row| row.request.as_str() == request).unwrap()
}

fn shape(rows: usize, tokens: usize) -> Option<PaddedShape> {
    Some(PaddedShape { rows, tokens })
}

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
fn window_soft_cap_sinks_and_alibi_reach_the_kernel() {
    let plain = Softmax::scaled(0.3);
    let sinks: Vec<f32> = (0..L * H).map(|i| i as f32 * 0.3 - 1.0).collect();
    let slopes: Vec<f32> = (0..H).map(|h| 0.5f32.powi(h as i32 + 1)).collect();
    let variants = [
        Softmax { window_left: Some(3), ..plain.clone() },
        Softmax { logits_soft_cap: Some(0.7), ..plain.clone() },
        Softmax { sinks: Some(sinks.into()), ..plain.clone() },
        Softmax { alibi_slopes: Some(slopes.into()), ..plain.clone() },
        plain,
    ];
    let mut results = Vec::new();
    for softmax in variants {
        let rig = Rig::with(rig::config(4, 32), softmax.clone(), PagedOptions::default(), true);
        rig.ingest(&["a"]);
        rig.step(&[("a", 11)], None);
        let row = rig.step(&[("a", 2)], None).remove(0);
        for layer in 0..L {
            let (o, lse) = rig.oracle("a", 2, 13, layer);
            assert!(close(&row.layers[layer].0, &o) && close(&row.layers[layer].1, &lse), "{softmax:?}");
        }
        assert!(results.iter().all(|other: &RowOut| !other.same_bits(&row)), "{softmax:?} changes nothing");
        results.push(row);
    }
}

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
    let start = made(rig.attn.plan_counts());
    // Read-only passes over the same tokens.
    for _ in 0..3 {
        let planned = rig.planned(step(&[("a", 0)]), None);
        rig.engine.commit(planned).unwrap();
    }
    let read = made(rig.attn.plan_counts());
    assert_eq!((read.0 - start.0, read.1 - start.1), (1, 2));
    for length in 7..10 {
        let out = rig.step(&[("a", 1)], None);
        let (o, lse) = rig.oracle("a", 1, length, 0);
        assert!(close(&out[0].layers[0].0, &o) && close(&out[0].layers[0].1, &lse), "{length}");
    }
    assert_eq!(rig.attn.plan_counts().made - read.0, 3);
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
    let held = rig.attn.bytes();
    rig.forward(&planned, "main");
    assert_eq!(rig.attn.bytes(), held, "a run makes nothing grow");
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
fn select_last_hidden_gathers_each_rows_last_token() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b", "c"]);
    rig.step(&[("b", 1)], None);
    let planned = rig.planned(step(&[("a", 3), ("b", 0), ("c", 2)]), None);
    let stream = Stream::cpu();
    let hidden: Vec<f32> = (0..5 * 3).map(|i| i as f32).collect();
    let mut out = vec![f32::NAN; 9];
    rig.attn
        .select_last_hidden(
            &planned.forward("main", &stream),
            TensorRef::from_slice(&hidden, &[5, 3]).unwrap(),
            TensorMut::from_slice(&mut out, &[3, 3]).unwrap(),
        )
        .unwrap();
    assert_eq!(out, [6.0, 7.0, 8.0, 0.0, 0.0, 0.0, 12.0, 13.0, 14.0]);
    rig.engine.abort(planned);
}

#[test]
fn a_draft_tree_sees_its_ancestors_alone() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b"]);
    rig.step(&[("a", 5), ("b", 2)], None);
    // A root with two children; the second child has a child of its own.
    let parents = [None, Some(0), Some(0), Some(2)];
    let mut own = vec![false; 16];
    for node in 0..4 {
        let mut at = Some(node);
        while let Some(ancestor) = at {
            own[node * 4 + ancestor] = true;
            at = parents[ancestor];
        }
    }
    let mask = |visible| RowMask { request: "a".into(), label: Label::main(), visible };
    let masks = vec![mask(MaskKeys::Own(own.clone().into()))];
    let tree = saying(step(&[("b", 1), ("a", 4)]), "attn", AttentionStep { masks, ..Default::default() });
    let planned = rig.planned(tree, None);
    let out = rig.forward(&planned, "main");
    rig.engine.abort(planned);
    let all: Vec<bool> = (0..4 * 9).map(|i| i % 9 < 5 || own[i / 9 * 4 + (i % 9 - 5)]).collect();
    let masks = [Some(all.as_slice())];
    let options = Options { masks: &masks, ..Options::default() };
    let (o, lse) = rig::oracle("a", "main", 4, 9, 0, true, 0.25, options);
    let row = &find(&out, "a").layers[0];
    assert!(close(&row.0, &o) && close(&row.1, &lse));
    let (o, _) = rig.oracle("b", 1, 3, 0);
    assert!(close(&find(&out, "b").layers[0].0, &o), "the row beside it has no mask");
}

#[test]
fn masks_without_a_row_and_foreign_queries_are_refused() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    let mask = RowMask { request: "z".into(), label: Label::main(), visible: MaskKeys::Own([true].into()) };
    let said = saying(step(&[("a", 1)]), "attn", AttentionStep { masks: vec![mask], ..Default::default() });
    let admitted = rig.engine.admit(said).unwrap().admitted().unwrap();
    let failed = rig.engine.plan(admitted).unwrap_err();
    assert!(failed.to_string().contains("1 masks were declared, 0 rows have one"), "{failed}");
    let queries = AttentionStep { queries: Some(vec![segment("a", "main", 1)]), ..Default::default() };
    let said = rig.engine.admit(saying(step(&[("a", 1)]), "attn", queries)).unwrap_err();
    assert!(said.to_string().contains("backend: cross"), "{said}");
    assert_eq!(rig.engine.outstanding(), 0);
}

#[test]
fn context_only_attends_what_was_stored_before_the_step() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    rig.step(&[("a", 6)], None);
    let context = AttentionStep { context_only: true, ..Default::default() };
    let planned = rig.planned(saying(step(&[("a", 3)]), "attn", context), None);
    let lens = rig.attn.kv_len_buf(&plan_id(&planned, "main")).unwrap();
    assert_eq!(lens.view().unwrap().as_slice::<i32>().unwrap(), &[6], "where the step's entries start");
    let out = rig.forward(&planned, "main");
    rig.engine.abort(planned);
    let keys: Vec<Option<u64>> = (0..9).map(|p| Some(rig::key("a", "main", p))).collect();
    use mstar_kernels::synth::Kind;
    let q = rig::inputs(Kind::Query, 0, &keys[6..], H);
    let (k, v) = (rig::inputs(Kind::Key, 0, &keys[..6], G), rig::inputs(Kind::Value, 0, &keys[..6], G));
    let (o, lse) = rig::over(&q, &k, &v, 3, 6, false, 0.25, Options::default());
    assert!(close(&out[0].layers[0].0, &o) && close(&out[0].layers[0].1, &lse));
}

#[test]
fn a_group_of_labels_runs_as_one_plan_with_the_same_bits() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b"]);
    let kv = |segments: Vec<Segment>, combined, commit| {
        let kv = KvStep { segments, combined, commit, ..KvStep::default() };
        Step::new("denoise").with("kv", Declaration::Kv(kv))
    };
    let prompt = vec![segment("a", "cond", 5), segment("a", "uncond", 2), segment("b", "cond", 9)];
    let planned = rig.planned(kv(prompt, vec![], true), None);
    rig.forward(&planned, "cond");
    rig.forward(&planned, "uncond");
    rig.engine.commit(planned).unwrap();
    let latents = || vec![segment("a", "cond", 4), segment("b", "cond", 4), segment("a", "uncond", 4)];
    let planned = rig.planned(kv(latents(), vec![], false), None);
    let mut apart = rig.forward(&planned, "cond");
    apart.extend(rig.forward(&planned, "uncond"));
    rig.engine.commit(planned).unwrap();
    let group = Combined { label: "both".into(), parts: vec!["cond".into(), "uncond".into()] };
    let planned = rig.planned(kv(latents(), vec![group], false), None);
    let together = rig.forward(&planned, "both");
    rig.engine.commit(planned).unwrap();
    assert_eq!((apart.len(), together.len()), (3, 3));
    for (a, b) in apart.iter().zip(&together) {
        assert!(a.same_bits(b) && a.label == b.label && a.request == b.request, "{} {}", a.request, a.label);
    }
}

#[test]
fn a_fork_attends_its_own_tokens_and_leaves_the_other_alone() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    rig.step(&[("a", 6)], None);
    let fork = Fork { request: "a".into(), from: Label::main(), to: "draft".into() };
    let kv = KvStep { segments: vec![segment("a", "draft", 1)], pre_forks: vec![fork], ..KvStep::default() };
    let planned = rig.planned(Step::new("decode").with("kv", Declaration::Kv(kv)), None);
    rig.forward(&planned, "draft");
    rig.engine.commit(planned).unwrap();
    let out = rig.step(&[("a", 1)], None);
    let (o, lse) = rig.oracle("a", 1, 7, 0);
    assert!(
        close(&out[0].layers[0].0, &o) && close(&out[0].layers[0].1, &lse),
        "the fork's token is not main's"
    );
}

#[test]
fn what_changes_numbers_changes_the_fingerprint() {
    let print = |softmax: Softmax, causal| {
        let options = PagedOptions { causal, ..PagedOptions::default() };
        Rig::with(rig::config(4, 8), softmax, options, true).attn.fingerprint().unwrap().0
    };
    let plain = Softmax::scaled(0.25);
    let prints = [
        print(plain.clone(), true),
        print(plain.clone(), false),
        print(Softmax::scaled(0.26), true),
        print(Softmax { window_left: Some(3), ..plain.clone() }, true),
        print(Softmax { logits_soft_cap: Some(3.0), ..plain.clone() }, true),
        print(Softmax { sinks: Some(vec![0.0; L * H].into()), ..plain.clone() }, true),
        print(Softmax { alibi_slopes: Some(vec![0.0; H].into()), ..plain.clone() }, true),
    ];
    for (index, one) in prints.iter().enumerate() {
        assert!(prints[..index].iter().all(|other| other != one), "{index}");
    }
    assert_eq!(prints[0], print(plain, true));
}

#[test]
fn a_cache_that_forgets_what_the_window_sees_is_refused() {
    let mut config = rig::config(4, 8);
    config.retention = Some(8);
    let kv = std::sync::Arc::new(mstar_core::kv::PagedKvCache::new("kv".into(), config).unwrap());
    let build = |window_left| {
        let softmax = Softmax { window_left, ..Softmax::scaled(1.0) };
        crate::PagedAttention::new(&rig::context("attn", &kv, &softmax), PagedOptions::default())
    };
    assert!(build(Some(8)).is_ok());
    for window in [Some(9), None] {
        let said = build(window).unwrap_err().to_string();
        assert!(said.contains("window_left") && said.contains("last 8 tokens"), "{said}");
    }
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

#[test]
fn f18_workspaces_foreseen_for_the_largest_step_never_grow() {
    use mstar_core::attend::StepShape;
    let largest = StepShape { rows: 8, tokens: 200, kv_len: 1500 };
    let config = rig::config(16, 900);
    let softmax = Softmax::scaled(0.25);
    let kv = std::sync::Arc::new(mstar_core::kv::PagedKvCache::new("kv".into(), config).unwrap());
    let mut cx = rig::context("attn", &kv, &softmax);
    cx.largest = Some(largest);
    let bound = crate::workspace_bound(&cx.geometry, largest, 0).unwrap();
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
        assert_eq!(rig.attn.workspace_bytes(), bound, "{spans:?}");
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
