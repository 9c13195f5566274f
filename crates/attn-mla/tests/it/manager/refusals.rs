//! What is not served says why, when a resource is built or a step is admitted.

use mstar_core::step::{AttentionStep, Declaration, MaskKeys, RowMask};
use mstar_core::{Attention, Resource};

use super::*;

fn said(kv: KvConfig, change: impl FnOnce(&mut BuildContext)) -> String {
    let kv = Arc::new(PagedKvCache::new("kv".into(), kv).unwrap());
    let mut cx = build_context("attn", &kv, Softmax::scaled(SCALE));
    change(&mut cx);
    MlaAttention::new(&cx, MlaOptions::default()).unwrap_err().to_string()
}

#[test]
fn what_latents_do_not_have_is_refused_by_name() {
    let softmax = |change: fn(&mut Softmax)| said(config(4, 8), |cx| change(&mut cx.geometry.softmax));
    for (said, name) in [
        (softmax(|s| s.window_left = Some(3)), "window_left"),
        (softmax(|s| s.logits_soft_cap = Some(3.0)), "logits_soft_cap"),
        (softmax(|s| s.sinks = Some([0.0; 8].into())), "sinks"),
        (softmax(|s| s.alibi_slopes = Some([0.0; 4].into())), "alibi"),
        (softmax(|s| s.sm_scale = f32::NAN), "sm_scale"),
    ] {
        assert!(said.contains("attn") && said.contains(name), "{said}");
    }
}

#[test]
fn other_caches_and_devices_are_refused_with_what_would_help() {
    let heads = KvConfig::new(KvLayout::Nhd { num_kv_heads: 2, head_dim: 64 }, DType::F32, 4, 8);
    assert!(said(heads, |_| ()).contains("backend: paged"));
    assert!(said(config(4, 8), |cx| cx.kv_cache = None).contains("kv_cache"));
    let forgets = KvConfig { retention: Some(8), ..config(4, 8) };
    assert!(said(forgets, |_| ()).contains("retention"));
    assert!(said(config(4, 8), |cx| cx.geometry.num_qo_heads = 0).contains("num_qo_heads"));
}

#[test]
fn masks_and_foreign_queries_are_refused_when_the_step_is_admitted() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    let refused = |attention: AttentionStep| {
        let step = step(&[("a", 1)]).with("attn", Declaration::Attention(attention));
        rig.engine.admit(step).unwrap_err().to_string()
    };
    let mask = RowMask { request: "a".into(), label: Label::main(), visible: MaskKeys::Own([true].into()) };
    let masks = refused(AttentionStep { masks: vec![mask], ..AttentionStep::default() });
    assert!(masks.contains("attn") && masks.contains("no custom masks"), "{masks}");
    let queries = vec![segment("a", "main", 1)];
    let foreign = refused(AttentionStep { queries: Some(queries), ..AttentionStep::default() });
    assert!(foreign.contains("its cache's plan"), "{foreign}");
    assert_eq!(rig.engine.outstanding(), 0);
}

#[test]
fn a_run_takes_absorbed_queries_and_no_entries() {
    let rig = Rig::new(4, 64);
    rig.ingest(&["a"]);
    let planned = rig.planned(step(&[("a", 1)]), None);
    let stream = Stream::cpu();
    let (q, latent) = (vec![0f32; H * C], vec![0f32; C + E]);
    let (mut o, mut lse) = (vec![7f32; H * C], vec![7f32; H]);
    let mut attempt = |query: Query<'_>, fresh: Option<KvEntries<'_>>| {
        let out = AttnOut {
            o: TensorMut::from_slice(&mut o, &[1, H, C]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[1, H]).unwrap()),
        };
        rig.attn.run(&mut planned.forward("main", &stream), query, fresh, out).unwrap_err().to_string()
    };
    let view = |width| TensorRef::from_slice(&q[..H * width], &[1, H, width]).unwrap();
    let heads = attempt(Query::Heads(view(C)), None);
    assert!(heads.contains("absorbed") && heads.contains("W_UK"), "{heads}");
    let fresh = KvEntries::Mla {
        ckv: TensorRef::from_slice(&latent[..C], &[1, C]).unwrap(),
        kpe: TensorRef::from_slice(&latent[C..], &[1, E]).unwrap(),
    };
    let entries = attempt(Query::Absorbed { nope: view(C), pe: view(E) }, Some(fresh));
    assert!(entries.contains("write them there first"), "{entries}");
    let swapped = attempt(Query::Absorbed { nope: view(E), pe: view(C) }, None);
    assert!(swapped.contains("q_nope"), "{swapped}");
    assert!(o.iter().chain(&lse).all(|&x| x == 7.0), "a refused run writes nothing");
    rig.engine.abort(planned);
}

#[test]
fn what_changes_numbers_changes_the_fingerprint() {
    let print = |config: KvConfig, softmax: Softmax, causal| {
        let kv = Arc::new(PagedKvCache::new("kv".into(), config).unwrap());
        let options = MlaOptions { causal, ..MlaOptions::default() };
        MlaAttention::new(&build_context("attn", &kv, softmax), options).unwrap().fingerprint().unwrap().0
    };
    let other =
        KvConfig { layout: KvLayout::Mla { kv_lora_rank: C + E, qk_rope_head_dim: 0 }, ..config(4, 8) };
    let plain = Softmax::scaled(SCALE);
    let prints = [
        print(config(4, 8), plain.clone(), true),
        print(config(4, 8), plain.clone(), false),
        print(config(4, 8), Softmax::scaled(0.21), true),
        print(other, plain.clone(), true),
        print(KvConfig { dtype: DType::Bf16, ..config(4, 8) }, plain.clone(), true),
    ];
    for (index, one) in prints.iter().enumerate() {
        assert!(prints[..index].iter().all(|other| other != one), "{index}");
    }
    assert_eq!(prints[0], print(config(4, 8), plain, true));
}
