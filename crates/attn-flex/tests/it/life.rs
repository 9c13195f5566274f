//! A step's life: stale plans, padded rows, plans made ahead, calls outside a plan, and what is refused when it is built.

use mstar_attn_flex::{
    FlexAttention, FlexFactory, FlexOptions, MaskChoice, ScoreChoice, Stream, TensorMut, TensorRef,
};
use mstar_core::attend::{BackendFactory, Softmax};
use mstar_core::kv::{RingGeometry, RingKv};
use mstar_core::resource::PaddedShape;
use mstar_core::spec::{Faults, Node};
use mstar_core::step::{AttentionStep, Declaration};
use mstar_core::{Attention, AttnOut, Forward, PlanId, Query, Resource};

use crate::rig::*;

fn rig(worlds: usize) -> Rig {
    Rig::new(config(vec![RingGeometry::last(2)], worlds), Softmax::scaled(0.6), FlexOptions::default())
}

fn pass(world: usize, frame: u64) -> Pass {
    Pass { world, frame, commit: true, content: 10 * frame + world as u64 }
}

#[test]
fn a_plan_of_another_step_is_refused_and_asks_for_visibility() {
    let rig = rig(1);
    let planned = rig.plan(&[pass(0, 0)]);
    let id = main_plan(&planned);
    assert!(!rig.attn.needs_token_visibility(&id));
    let count = rig.attn.qo_indptr_buf(&id).unwrap();
    assert_eq!(count.view().unwrap().as_slice::<i32>().unwrap(), &[0, F as i32]);
    let keys = rig.attn.kv_len_buf(&id).unwrap();
    assert_eq!(keys.view().unwrap().as_slice::<i32>().unwrap(), &[F as i32]);
    assert!(rig.attn.kernel(&id).unwrap().starts_with("cpu flex"));
    assert_eq!(rig.attn.work(&id).tokens, F as u64);
    rig.layer(&planned, &[pass(0, 0)], 0, 0);
    rig.engine.commit(planned).unwrap();
    assert!(rig.attn.needs_token_visibility(&id) && rig.attn.qo_indptr_buf(&id).is_err());
    let (q, mut o) = (vec![0f32; F * H * D], vec![7f32; F * H * DV]);
    let stream = Stream::cpu();
    let mut stale = Forward::detached(id, 0, &stream);
    let out = AttnOut { o: TensorMut::from_slice(&mut o, &[F, H, DV]).unwrap(), lse: None };
    let q = Query::Heads(TensorRef::from_slice(&q, &[F, H, D]).unwrap());
    assert!(rig.attn.run(&mut stale, q, None, out).is_err());
    assert!(o.iter().all(|&o| o == 7.0));
}

#[test]
fn a_call_outside_any_plan_has_the_bits_of_a_planned_one() {
    let rig = rig(1);
    (0..3).for_each(|frame| drop(rig.run(&[pass(0, frame)])));
    let planned = rig.plan(&[pass(0, 3)]);
    let plan = rig.ring.ring_plan(&main_plan(&planned)).unwrap();
    let visible = plan.visible(0, 0).to_vec();
    drop(plan);
    let (want, _) = rig.layer(&planned, &[pass(0, 3)], 0, 0);
    let view = rig.ring.layer(0).unwrap();
    let m = view.k.shape()[0];
    let seen: Vec<bool> = (0..m).map(|key| visible.contains(&((key / 128) as i32))).collect();
    let q = content(&pass(0, 3), 0, 0, H, D);
    let mut o = vec![7f32; F * H * DV];
    let attend = |gqa, o: &mut [f32]| {
        rig.attn.attend(
            &Stream::cpu(),
            TensorRef::from_slice(&q, &[F, H, D]).unwrap().transpose(0, 1).insert_axis(0),
            view.k.transpose(0, 1).insert_axis(0),
            view.v.transpose(0, 1).insert_axis(0),
            &seen,
            gqa,
            TensorMut::from_slice(o, &[F, H, DV]).unwrap().transpose(0, 1).insert_axis(0),
        )
    };
    assert!(attend(false, &mut o).unwrap_err().to_string().contains("enable_gqa"));
    attend(true, &mut o).unwrap();
    assert!(o == want);
    rig.engine.commit(planned).unwrap();
}

#[test]
fn f17_padded_rows_yield_nothing_and_change_no_bit() {
    let (plain, padded) = (rig(2), rig(2));
    for shape in [PaddedShape { rows: 3, tokens: 3 * F }, PaddedShape { rows: 1, tokens: F }] {
        padded.attn.build_accelerator_graph_buffers(2, shape).unwrap();
    }
    for frame in 0..4 {
        let passes = [pass(0, frame), pass(1, frame)];
        let (want, want_lse) = plain.run(&passes).remove(0);
        let bucket =
            mstar_core::graph::Bucket { walk: "frame".into(), shape: PaddedShape { rows: 3, tokens: 3 * F } };
        let admitted = padded.engine.admit_in(step(&passes), &bucket).unwrap().admitted().unwrap();
        let planned = padded.engine.plan(admitted).unwrap();
        let (o, lse) = padded.layer(&planned, &passes, 1, 0);
        let real = 2 * F * H;
        assert!(o[..real * DV] == want && lse[..real] == want_lse, "frame {frame}");
        assert!(
            o[real * DV..].iter().all(|&o| o == 0.0) && lse[real..].iter().all(|&x| x == f32::NEG_INFINITY)
        );
        padded.engine.commit(planned).unwrap();
    }
    assert!(padded.attn.bytes() > 0);
}

#[test]
fn a_plan_made_ahead_in_another_slot_leaves_the_running_one_alone() {
    let rig = rig(1);
    let again = self::rig(1);
    rig.run(&[pass(0, 0)]);
    again.run(&[pass(0, 0)]);
    let planned = rig.plan(&[pass(0, 1)]);
    let ahead = rig.engine.preplan(&planned, step(&[pass(0, 2)])).unwrap().admitted().unwrap();
    assert!(rig.layer(&planned, &[pass(0, 1)], 0, 0) == again.run(&[pass(0, 1)]).remove(0));
    rig.engine.commit(planned).unwrap();
    let now = rig.engine.promote(ahead).unwrap().admitted().unwrap();
    assert!(rig.layer(&now, &[pass(0, 2)], 0, 0) == again.run(&[pass(0, 2)]).remove(0));
    rig.engine.commit(now).unwrap();
}

#[test]
fn the_last_hidden_state_of_each_row_is_its_frames_last_token() {
    let rig = rig(2);
    let planned = rig.plan(&[pass(0, 0), pass(1, 0)]);
    let hidden: Vec<f32> = (0..2 * F).map(|token| token as f32).collect();
    let mut out = [7f32; 2];
    let stream = Stream::cpu();
    let forward = planned.forward("main", &stream);
    let view = TensorRef::from_slice(&hidden, &[2 * F, 1]).unwrap();
    rig.attn.select_last_hidden(&forward, view, TensorMut::from_slice(&mut out, &[2, 1]).unwrap()).unwrap();
    assert_eq!(out, [F as f32 - 1.0, 2.0 * F as f32 - 1.0]);
    drop(forward);
    rig.engine.abort(planned);
}

#[test]
fn what_does_not_fit_is_refused_when_it_is_built_or_declared() {
    let rig = rig(1);
    let ring = || Some(rig.ring.clone() as std::sync::Arc<dyn RingKv>);
    let plain = Softmax::scaled(0.6);
    let said = |softmax: Softmax, options: FlexOptions| {
        FlexAttention::new(&context(ring(), softmax), options).map(drop).unwrap_err().to_string()
    };
    let options = |score, mask| FlexOptions {
        score_mods: vec![score],
        mask_mods: vec![mask],
        ..FlexOptions::default()
    };
    let (none, every) = (ScoreChoice::None, MaskChoice::None);
    for (softmax, score, mask, with) in [
        (Softmax { logits_soft_cap: Some(3.0), ..plain.clone() }, none, every, "soft_cap"),
        (Softmax { alibi_slopes: Some([0.1; 4].into()), ..plain.clone() }, none, every, "alibi"),
        (Softmax { window_left: Some(9), ..plain.clone() }, none, every, "window"),
        (Softmax { sinks: Some([0.0; 4].into()), ..plain.clone() }, none, every, "sinks"),
        (plain.clone(), ScoreChoice::SoftCap, every, "logits_soft_cap"),
        (plain.clone(), ScoreChoice::Alibi, every, "slopes"),
        (
            Softmax { alibi_slopes: Some([0.1; 3].into()), ..plain.clone() },
            ScoreChoice::Alibi,
            every,
            "slopes",
        ),
        (plain.clone(), ScoreChoice::RelBias, every, "odd number"),
        (plain.clone(), none, MaskChoice::Window, "window_left"),
        (plain.clone(), none, MaskChoice::Document, "document_frames"),
        (Softmax::scaled(f32::NAN), none, every, "sm_scale"),
    ] {
        let said = said(softmax, options(score, mask));
        assert!(said.contains(with), "{said}");
    }
    let many = FlexOptions { score_mods: vec![ScoreChoice::Causal; 9], ..FlexOptions::default() };
    assert!(said(plain.clone(), many).contains("at most 8 score mods"));
    let many = FlexOptions { mask_mods: vec![MaskChoice::Causal; 9], ..FlexOptions::default() };
    assert!(said(plain.clone(), many).contains("at most 8 hold together"));
    let nothing = FlexAttention::new(&context(None, plain.clone()), FlexOptions::default()).map(drop);
    assert!(nothing.unwrap_err().to_string().contains("kind ring"));
    let mut odd = context(ring(), plain);
    odd.geometry.num_qo_heads = 5;
    assert!(FlexAttention::new(&odd, FlexOptions::default()).is_err());

    let declared = AttentionStep { context_only: true, ..AttentionStep::default() };
    let step = step(&[pass(0, 0)]).with("attn", Declaration::Attention(declared));
    assert!(rig.engine.admit(step).is_err());
    assert_eq!(rig.engine.outstanding(), 0);
    rig.run(&[pass(0, 0)]);

    assert!(!rig.attn.requires_kv_write() && rig.attn.kv_cache().is_none());
    assert_eq!(rig.attn.depends_on(), vec!["ring".into()]);
    let faults = Faults::new();
    let parsed = FlexFactory.parse(&Node::flat("resources.attn", &[("workers", "1")]), &faults).unwrap();
    let built = parsed.build(&context(ring(), Softmax::scaled(0.6))).unwrap();
    assert!(
        built
            .qo_indptr_buf(&PlanId {
                slot: Default::default(),
                label: "main".into(),
                serial: mstar_core::StepSerial(1)
            })
            .is_err()
    );
}
