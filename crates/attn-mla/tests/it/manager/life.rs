//! Whole lives of requests: ragged steps, buckets, preplans, forks, offload, warm-up.

use mstar_attn_mla::{MlaFactory, OverPages, PlanCounts, workspace_bound};
use mstar_core::attend::{AttnBackend, Backends, StepShape, attend, resolve_attn_backend};
use mstar_core::graph::{Buckets, warm_up};
use mstar_core::spec::{Faults, Node, Place as SpecPlace};
use mstar_core::step::Fork;
use mstar_core::{Admission, Attention, Error, StepSerial};

use super::*;
use crate::alloc::allocations;

#[test]
fn ragged_steps_match_the_oracle_and_decode_prefill_and_append_share_a_plan() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b", "c"]);
    let mut stored = [("a", 0), ("b", 0), ("c", 0)];
    for spans in [[9, 1, 0], [1, 70, 3], [1, 1, 1], [2, 0, 4]] {
        let rows: Vec<(&str, usize)> =
            stored.iter().zip(spans).map(|(&(name, _), span)| (name, span)).collect();
        let out = rig.step(&rows, None);
        for ((_, len), (row, span)) in stored.iter_mut().zip(out.iter().zip(spans)) {
            *len += span;
            assert!(is_causal(row, span, *len), "{} {span} of {len}", row.request);
        }
    }
}

#[test]
fn a_query_sees_every_key_where_a_spec_says_so() {
    let rig = Rig::with(config(4, 64), MlaOptions { causal: false, ..MlaOptions::default() });
    rig.ingest(&["a"]);
    rig.step(&[("a", 5)], None);
    let out = rig.step(&[("a", 4)], None);
    let (o, lse) = oracle(("a", "main"), 5..9, 0..9, 0, false);
    assert!(close(&out[0].layers[0].0, &o) && close(&out[0].layers[0].1, &lse));
}

#[test]
fn f12_one_token_more_at_a_time_over_every_page_boundary() {
    let rig = Rig::new(4, 16);
    rig.ingest(&["a"]);
    for n in 1..=13 {
        assert!(is_causal(&rig.step(&[("a", 1)], None)[0], 1, n), "{n}");
    }
}

#[test]
fn f17_padded_rows_yield_zero_and_write_nothing_and_real_rows_equal_eager() {
    let (eager, padded) = (Rig::new(8, 64), Rig::new(8, 64));
    for rig in [&eager, &padded] {
        rig.ingest(&["a", "b", "c"]);
        for (name, length) in [("a", 5), ("b", 33), ("c", 17)] {
            rig.step(&[(name, length)], None);
        }
    }
    for bucket in [shape(8, 8), shape(4, 12), shape(3, 3)] {
        let rows = [("a", 1), ("b", 1), ("c", 1)];
        let (want, got) = (eager.step(&rows, None), padded.step(&rows, bucket));
        assert!(want.iter().zip(&got).all(|(a, b)| a.same_bits(b)), "{bucket:?}");
        assert!(eager.pool() == padded.pool(), "padding wrote to a page");
    }
    let rows = [("a", 5), ("b", 0), ("c", 7)];
    let (want, got) = (eager.step(&rows, None), padded.step(&rows, shape(8, 16)));
    assert!(want.iter().zip(&got).all(|(a, b)| a.same_bits(b)));
}

#[test]
fn f13_a_short_request_after_a_long_one_in_the_same_slot_reads_its_own_pages_alone() {
    let run = |with_long: bool| {
        let rig = Rig::new(4, 200);
        rig.ingest(&["short", "long"]);
        rig.step(&[("short", 10)], None);
        if with_long {
            rig.step(&[("long", 255)], None);
            rig.step(&[("long", 1)], shape(4, 4));
        }
        rig.step(&[("short", 1)], shape(4, 4)).remove(0)
    };
    assert!(run(false).same_bits(&run(true)));
}

#[test]
fn f19_preplanned_steps_equal_plain_ones_to_the_bit() {
    let rows = [("a", 1), ("b", 1)];
    let (plain, ahead) = (Rig::new(4, 64), Rig::new(4, 64));
    for rig in [&plain, &ahead] {
        rig.ingest(&["a", "b"]);
        rig.step(&[("a", 6), ("b", 3)], None);
    }
    let want: Vec<Vec<RowOut>> = (0..6).map(|_| plain.step(&rows, None)).collect();
    let mut now = ahead.planned(step(&rows), None);
    for (turn, want) in want.iter().enumerate() {
        let next = ahead.engine.preplan(&now, step(&rows)).unwrap().admitted().unwrap();
        let got = ahead.forward(&now, &ahead.attn, "main");
        assert!(got.iter().zip(want).all(|(a, b)| a.same_bits(b)), "turn {turn}");
        ahead.engine.commit(now).unwrap();
        now = match ahead.engine.promote(next).unwrap() {
            Admission::Admitted(now) => now,
            refused => panic!("{refused:?}"),
        };
    }
    ahead.engine.abort(now);
}

#[test]
fn f40_a_row_alone_equals_the_row_in_a_batch() {
    let names = ["a", "b", "c", "d", "e"];
    let lengths = [700, 3, 1, 513, 16];
    let alone: Vec<RowOut> = names
        .iter()
        .zip(lengths)
        .map(|(name, length)| {
            let rig = Rig::new(16, 128);
            rig.ingest(&[name]);
            rig.step(&[(name, length)], None);
            rig.step(&[(name, 1)], None).remove(0)
        })
        .collect();
    let rig = Rig::new(16, 128);
    rig.ingest(&names);
    // Prefilled one by one from the last, so that pages lie elsewhere.
    for (name, length) in names.iter().zip(lengths).rev() {
        rig.step(&[(name, length)], None);
    }
    let rows: Vec<(&str, usize)> = names.iter().map(|name| (*name, 1)).collect();
    let out = rig.step(&rows, None);
    assert!(out.iter().zip(&alone).all(|(a, b)| a.same_bits(b)));
}

#[test]
fn forks_and_an_offload_change_no_bit() {
    let (stayed, moved) = (Rig::new(4, 32), Rig::new(4, 32));
    for rig in [&stayed, &moved] {
        rig.ingest(&["a", "b"]);
        rig.step(&[("a", 21), ("b", 6)], None);
    }
    let fork = Fork { request: "b".into(), from: Label::main(), to: "draft".into() };
    let kv = KvStep { segments: vec![segment("b", "draft", 1)], pre_forks: vec![fork], ..KvStep::default() };
    let planned = moved.planned(Step::new("decode").with("kv", Declaration::Kv(kv)), None);
    moved.forward(&planned, &moved.attn, "draft");
    moved.engine.commit(planned).unwrap();
    moved.kv.store().offload(&"a".into()).unwrap();
    // Somebody else takes the pages that were given back.
    moved.ingest(&["c"]);
    moved.step(&[("c", 30)], None);
    moved.engine.remove(&"c".into()).unwrap();
    assert_eq!(moved.kv.store().reload(&"a".into()).unwrap(), mstar_core::Outcome::Admitted);
    let rows = [("a", 1), ("b", 1)];
    let (want, got) = (stayed.step(&rows, None), moved.step(&rows, None));
    assert!(want.iter().zip(&got).all(|(a, b)| a.same_bits(b)));
}

#[test]
fn f30_a_fork_and_its_origin_write_their_own_copies_of_the_last_page() {
    let run = |main_goes_on: bool| {
        let rig = Rig::new(4, 32);
        rig.ingest(&["a"]);
        rig.step(&[("a", 6)], None);
        let draft = |span, pre_forks| {
            let kv = KvStep { segments: vec![segment("a", "draft", span)], pre_forks, ..KvStep::default() };
            let planned = rig.planned(Step::new("decode").with("kv", Declaration::Kv(kv)), None);
            let out = rig.forward(&planned, &rig.attn, "draft").remove(0);
            rig.engine.commit(planned).unwrap();
            out
        };
        draft(1, vec![Fork { request: "a".into(), from: Label::main(), to: "draft".into() }]);
        if main_goes_on {
            assert!(is_causal(&rig.step(&[("a", 1)], None)[0], 1, 7));
        }
        draft(1, vec![])
    };
    assert!(run(true).same_bits(&run(false)));
}

#[test]
fn an_unchanged_plan_is_kept_and_a_changed_length_makes_another() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    rig.step(&[("a", 6)], None);
    let counts = || -> PlanCounts { rig.attn.plans().counts() };
    let start = counts();
    for _ in 0..3 {
        let planned = rig.planned(step(&[("a", 0)]), None);
        rig.engine.commit(planned).unwrap();
    }
    let read = counts();
    assert_eq!((read.made - start.made, read.unchanged - start.unchanged), (1, 2));
    for length in 7..10 {
        assert!(is_causal(&rig.step(&[("a", 1)], None)[0], 1, length));
    }
    assert_eq!(counts().made - read.made, 3);
}

#[test]
fn a_plan_ends_with_its_step_and_what_runs_is_said() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a", "b"]);
    let planned = rig.planned(step(&[("a", 3), ("b", 40)]), None);
    let id = plan_id(&planned, "main");
    let kernel = rig.attn.kernel(&id).unwrap();
    assert!(kernel.starts_with("cpu mla") && kernel.contains("any shape"), "{kernel}");
    assert!(kernel.contains("1 rows of few queries, 1 of many"), "{kernel}");
    assert!(!rig.attn.uses_kernel() && rig.attn.requires_kv_write());
    for other in
        [PlanId { label: "cond".into(), ..id.clone() }, PlanId { serial: StepSerial(u64::MAX), ..id.clone() }]
    {
        assert!(matches!(rig.attn.kv_len_buf(&other), Err(Error::UnknownPlan { .. })), "{other:?}");
    }
    rig.engine.commit(planned).unwrap();
    assert!(matches!(rig.attn.kv_len_buf(&id), Err(Error::UnknownPlan { .. })));
    assert_eq!(rig.attn.kernel(&id), None);
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
    let forward = planned.forward("main", &stream);
    let (hidden, to) =
        (TensorRef::from_slice(&hidden, &[5, 3]).unwrap(), TensorMut::from_slice(&mut out, &[3, 3]).unwrap());
    rig.attn.select_last_hidden(&forward, hidden, to).unwrap();
    assert_eq!(out, [6.0, 7.0, 8.0, 0.0, 0.0, 0.0, 12.0, 13.0, 14.0]);
    rig.engine.abort(planned);
}

#[test]
fn every_bucket_warms_up_and_the_buffers_of_a_slot_keep_their_addresses() {
    let rig = Rig::new(4, 40);
    rig.ingest(&["a", "b"]);
    let buckets = Buckets::decode("decode", &[1, 8]);
    let declare = |_: &Bucket, rows: &[(RequestId, usize)]| {
        step(&rows.iter().map(|(id, q_len)| (id.as_str(), *q_len)).collect::<Vec<_>>())
    };
    warm_up(&rig.engine, &buckets, declare, |planned| {
        rig.forward(planned, &rig.attn, "main");
        Ok(())
    })
    .unwrap();
    rig.engine.post_warmup_validate().unwrap();
    rig.step(&[("a", 6), ("b", 9)], None);
    let mut addresses = Vec::new();
    for turn in 0..2 {
        let planned = rig.planned(step(&[("a", 1), ("b", 1)]), shape(8, 8));
        let lens = rig.attn.kv_len_buf(&plan_id(&planned, "main")).unwrap();
        let want = [7 + turn, 10 + turn, 0, 0, 0, 0, 0, 0];
        assert_eq!(lens.view().unwrap().as_slice::<i32>().unwrap(), &want);
        addresses.push(lens.view().unwrap().as_ptr());
        drop(lens);
        rig.forward(&planned, &rig.attn, "main");
        rig.engine.commit(planned).unwrap();
    }
    assert_eq!(addresses[0], addresses[1]);
}

#[test]
fn f18_workspaces_foreseen_for_the_largest_step_never_grow() {
    let largest = StepShape { rows: 3, tokens: 100, kv_len: 700 };
    let kv = Arc::new(PagedKvCache::new("kv".into(), config(16, 150)).unwrap());
    let mut cx = build_context("attn", &kv, Softmax::scaled(SCALE));
    cx.largest = Some(largest);
    let bound =
        workspace_bound(&cx.geometry, largest, 0, Device::Cpu, mstar_attn_mla::Schedule::Invariant).unwrap();
    let attn = Arc::new(MlaAttention::new(&cx, MlaOptions::default()).unwrap());
    let resources: Vec<Arc<dyn Resource>> = vec![attn.clone(), kv.clone()];
    let rig = Rig { engine: Engine::new(resources).unwrap(), kv, context: attn.clone(), attn };
    rig.ingest(&["a", "b", "c"]);
    for _ in 0..6 {
        for name in ["a", "b", "c"] {
            rig.step(&[(name, 100)], None);
        }
    }
    for spans in [[1, 1, 1], [1, 1, 98], [33, 33, 33], [0, 70, 1]] {
        let planned = rig.planned(step(&[("a", spans[0]), ("b", spans[1]), ("c", spans[2])]), None);
        rig.forward(&planned, &rig.attn, "main");
        rig.engine.abort(planned);
        assert_eq!(rig.attn.plans().workspace_bytes(), bound, "{spans:?}");
    }
}

#[test]
fn a_layer_run_through_the_engine_allocates_nothing() {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    one.install(|| {
        // Built as a program does: chosen by the layout, from a spec's options.
        let kv = Arc::new(PagedKvCache::new("kv".into(), config(16, 100)).unwrap());
        let cx = build_context("attn", &kv, Softmax::scaled(SCALE));
        let mut backends = Backends::new();
        backends.register(Arc::new(MlaFactory));
        let factory = resolve_attn_backend(&AttnBackend::Auto, Device::Cpu, &cx.geometry, &backends).unwrap();
        let none = Node::empty_map("resources.attn", SpecPlace::default());
        let attention = factory.parse(&none, &Faults::new()).unwrap().build(&cx).unwrap();
        let resources: Vec<Arc<dyn Resource>> = vec![kv, attention.clone()];
        let engine = Engine::new(resources).unwrap();
        engine.ingest(&Ingest::new("a".into())).unwrap();
        engine.ingest(&Ingest::new("b".into())).unwrap();
        let ones = vec![0.25f32; 900 * H * C];
        let (mut o, mut lse) = (vec![0f32; 900 * H * C], vec![0f32; 900 * H]);
        let stream = Stream::cpu();
        for rows in [[("a", 600), ("b", 300)], [("a", 1), ("b", 1)]] {
            let tokens = rows[0].1 + rows[1].1;
            let planned = engine.plan(engine.admit(step(&rows)).unwrap().admitted().unwrap()).unwrap();
            let mut forward = planned.forward("main", &stream);
            let mut layer = || {
                let view = |shape: &[usize]| {
                    TensorRef::from_slice(&ones[..shape.iter().product::<usize>()], shape).unwrap()
                };
                let query = Query::Absorbed { nope: view(&[tokens, H, C]), pe: view(&[tokens, H, E]) };
                let fresh = Some(KvEntries::Mla { ckv: view(&[tokens, C]), kpe: view(&[tokens, E]) });
                let out = AttnOut {
                    o: TensorMut::from_slice(&mut o[..tokens * H * C], &[tokens, H, C]).unwrap(),
                    lse: Some(TensorMut::from_slice(&mut lse[..tokens * H], &[tokens, H]).unwrap()),
                };
                attend(&*attention, &mut forward, query, fresh, out).unwrap();
            };
            layer();
            assert_eq!(allocations(&mut layer), 0, "{rows:?}");
            assert!(o[..tokens * H * C].iter().all(|x| (x - 0.25).abs() < 1e-6));
            engine.commit(planned).unwrap();
        }
    });
}
