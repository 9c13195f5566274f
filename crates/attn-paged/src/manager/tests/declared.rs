//! What a step or a spec declares reaches the kernel: softmax options, masks, forks, groups, context-only plans.

use super::*;

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
