//! Dense attention in an engine: what a step may say to it, what it writes, and what it refuses.

use std::sync::Arc;

use mstar_attn_dense::{DType, DenseAttention, DenseOptions, PrefixSource, Stream, TensorMut, TensorRef};
use mstar_core::attend::{AttnGeometry, BuildContext, Softmax};
use mstar_core::kv::{KvConfig, KvEntries, KvLayout, PagedKv, PagedKvCache};
use mstar_core::resource::PaddedShape;
use mstar_core::step::{AttentionStep, Declaration, MaskKeys, RowMask};
use mstar_core::{Attention, AttnOut, Query, Resource};

use crate::alloc::allocations;
use crate::rig::{D, G, H, L, Rig, build_context, config, denoise, plan_id, step, token, written};

#[test]
fn a_denoising_step_writes_nothing_and_one_that_commits_writes_its_own_entries() {
    let rig = Rig::new(DenseOptions::default());
    assert!(!rig.attn.requires_kv_write());
    rig.ingest(&["a"]);
    let empty = rig.pool();
    rig.step(written("a", 9), 1);
    let stored = rig.pool();
    assert_ne!(empty, stored);
    rig.step(denoise("a", 7), 2);
    assert!(rig.pool() == stored, "nothing would ever read it");
    // The pass that stays is read by whatever comes after: `finish` holds the next step to the oracle over it.
    rig.step(written("a", 7), 3);
    rig.step(denoise("a", 2), 4);
}

#[test]
fn bits_do_not_depend_on_company_slots_or_buckets() {
    let run = |others: &[&str], bucket: Option<PaddedShape>, prefix| {
        let rig = Rig::new(DenseOptions { prefix, ..DenseOptions::default() });
        rig.ingest(&["a", "b", "c"]);
        rig.step(step(&[("b", "main", 14), ("a", "main", 9), ("c", "main", 3)], true), 1);
        let mut rows: Vec<_> = others.iter().map(|&other| (other, "main", 4)).collect();
        rows.push(("a", "main", 6));
        let outs = rig.step_in(step(&rows, false), 2, bucket);
        outs.iter().find(|out| out.stream.0.as_str() == "a").unwrap().bits()
    };
    let alone = run(&[], None, PrefixSource::Gathered);
    for prefix in [PrefixSource::Gathered, PrefixSource::Pages] {
        for others in [&[][..], &["b"], &["c", "b"]] {
            for bucket in [None, Some(PaddedShape { rows: 8, tokens: 32 })] {
                assert!(run(others, bucket, prefix) == alone, "{others:?} {bucket:?} {prefix:?}");
            }
        }
    }
}

#[test]
fn a_layer_run_through_the_engine_allocates_nothing() {
    for (prefix, commit) in
        [(PrefixSource::Gathered, false), (PrefixSource::Pages, false), (PrefixSource::Gathered, true)]
    {
        let rig = Rig::new(DenseOptions { prefix, ..DenseOptions::default() });
        rig.ingest(&["a"]);
        rig.step(written("a", 9), 1);
        let planned = rig.planned(step(&[("a", "main", 4)], commit), None);
        let fresh = |kind, heads| -> Vec<f32> { (0..4).flat_map(|at| token(at, 0, kind, heads)).collect() };
        let (q, k, v) = (fresh(0, H), fresh(1, G), fresh(2, G));
        let (mut o, mut lse) = (vec![0f32; 4 * H * D], vec![0f32; 4 * H]);
        let stream = Stream::cpu();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        for layer in 0..L {
            let view = |x, heads| TensorRef::from_slice(x, &[4, heads, D]).unwrap();
            let q = Query::Heads(view(&q, H));
            let entries = KvEntries::Nhd { k: view(&k, G), v: view(&v, G) };
            let out = AttnOut {
                o: TensorMut::from_slice(&mut o, &[4, H, D]).unwrap(),
                lse: Some(TensorMut::from_slice(&mut lse, &[4, H]).unwrap()),
            };
            let mut forward = planned.forward("main", &stream);
            forward.set_layer(layer);
            let mut said = Ok(());
            let counted = pool.install(|| {
                allocations(|| {
                    said = mstar_core::attend::attend(&*rig.attn, &mut forward, q, Some(entries), out)
                })
            });
            said.unwrap();
            assert_eq!(counted, 0, "{prefix:?}, kept: {commit}");
        }
        rig.engine.commit(planned).unwrap();
    }
}

#[test]
fn keys_and_values_that_are_missing_are_asked_for() {
    let rig = Rig::new(DenseOptions::default());
    rig.ingest(&["a"]);
    let planned = rig.planned(denoise("a", 2), None);
    let (q, mut o) = (vec![0f32; 2 * H * D], vec![0f32; 2 * H * D]);
    let stream = Stream::cpu();
    let mut forward = planned.forward("main", &stream);
    let mut said = |layer| {
        forward.set_layer(layer);
        let q = Query::Heads(TensorRef::from_slice(&q, &[2, H, D]).unwrap());
        let out = AttnOut { o: TensorMut::from_slice(&mut o, &[2, H, D]).unwrap(), lse: None };
        rig.attn.run(&mut forward, q, None, out).unwrap_err().to_string()
    };
    assert!(said(0).contains("hand k and v"), "{}", said(0));
    assert!(said(L).contains("no layer 2"), "{}", said(L));
}

#[test]
fn a_stream_that_does_not_start_at_its_first_page_is_refused_by_name() {
    let kept = KvConfig { retention: Some(6), ..config(4, 64) };
    let rig = Rig::with(kept, DenseOptions::default(), None);
    rig.ingest(&["a"]);
    rig.step(written("a", 5), 1);
    rig.step(denoise("a", 3), 2);
    rig.step(written("a", 9), 3);
    let admitted = rig.engine.admit(denoise("a", 3)).unwrap().admitted().unwrap();
    let said = rig.engine.plan(admitted).unwrap_err().error.to_string();
    assert!(
        said.contains("stream a (main) starts at position 8") && said.contains("backend: paged"),
        "{said}"
    );
    assert_eq!(rig.engine.outstanding(), 0);
}

#[test]
fn declarations_that_it_does_not_serve_are_refused_with_what_to_do() {
    let rig = Rig::new(DenseOptions::default());
    rig.ingest(&["a"]);
    rig.step(written("a", 5), 1);
    let mask = RowMask { request: "a".into(), label: "main".into(), visible: MaskKeys::Own([true].into()) };
    for (declared, word) in [
        (AttentionStep { context_only: true, ..AttentionStep::default() }, "context_only"),
        (AttentionStep { masks: vec![mask], ..AttentionStep::default() }, "masks"),
        (AttentionStep { queries: Some(vec![]), ..AttentionStep::default() }, "another stream"),
    ] {
        let step = denoise("a", 1).with("attn", Declaration::Attention(declared));
        let said = rig.engine.admit(step).unwrap_err().to_string();
        assert!(said.contains(word) && said.contains("attn"), "{said}");
        assert_eq!(rig.engine.outstanding(), 0);
    }
}

#[test]
fn buffers_lengths_kernels_and_last_hidden_are_those_of_the_plan() {
    let rig = Rig::new(DenseOptions::default());
    rig.ingest(&["a", "b"]);
    rig.step(step(&[("a", "main", 9), ("b", "main", 2)], true), 1);
    let planned = rig.planned(step(&[("a", "main", 3), ("b", "main", 5)], false), None);
    let id = plan_id(&planned, "main");
    assert_eq!(rig.attn.qo_indptr_buf(&id).unwrap().view().unwrap().as_slice::<i32>().unwrap(), [0, 3, 8]);
    assert_eq!(rig.attn.kv_len_buf(&id).unwrap().view().unwrap().as_slice::<i32>().unwrap(), [12, 7]);
    let kernel = rig.attn.kernel(&id).unwrap();
    assert!(kernel.starts_with("cpu dense") && kernel.contains("prefix gathered: 2 rows"), "{kernel}");
    let work = rig.attn.work(&id);
    assert_eq!((work.tokens, work.flops), (8, 2 * (10 + 11 + 12 + 3 + 4 + 5 + 6 + 7) * (H * 2 * D) as u64));
    let hidden: Vec<f32> = (0..8).map(|at| at as f32).collect();
    let mut last = [0f32; 2];
    let stream = Stream::cpu();
    rig.attn
        .select_last_hidden(
            &planned.forward("main", &stream),
            TensorRef::from_slice(&hidden, &[8, 1]).unwrap(),
            TensorMut::from_slice(&mut last, &[2, 1]).unwrap(),
        )
        .unwrap();
    assert_eq!(last, [2.0, 7.0]);
    rig.engine.commit(planned).unwrap();
    assert!(rig.attn.work(&id).tokens == 0 && rig.attn.kv_len_buf(&id).is_err());
}

#[test]
fn what_it_cannot_be_built_over_is_named() {
    let latents = KvLayout::Mla { kv_lora_rank: 8, qk_rope_head_dim: 4 };
    let kv = Arc::new(PagedKvCache::new("kv".into(), KvConfig::new(latents, DType::F32, 4, 8)).unwrap());
    let said = |cx: &BuildContext| DenseAttention::new(cx, DenseOptions::default()).unwrap_err().to_string();
    let over = build_context(&kv, None);
    assert!(said(&over).contains("mla"));
    let rig = Rig::new(DenseOptions::default());
    let good = build_context(&rig.kv, None);
    assert!(said(&BuildContext { kv_cache: None, ..good.clone() }).contains("kv_cache"));
    let softmax = Softmax { sinks: Some([0.0; L * H].into()), ..Softmax::scaled(0.1) };
    let geometry = AttnGeometry::over(PagedKv::config(&*rig.kv), H, DType::F32, softmax);
    assert!(said(&BuildContext { geometry, ..good }).contains("sinks"));
    assert_eq!(rig.attn.depends_on(), ["kv".into()]);
}
