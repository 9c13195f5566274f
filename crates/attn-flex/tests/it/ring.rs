//! Attention over rings: against plain loops over the frames that a pass sees, and to the bit against the same keys moved
//! together.

use mstar_attn_flex::{
    BlockMask, DType, FlexOptions, Geometry, Inputs, KernelOptions, MaskChoice, MaskShape, Outputs, Plan,
    ScoreChoice, ScoreMod, Stream, TensorMut, TensorRef, UserMask, UserMod, run,
};
use mstar_core::attend::Softmax;
use mstar_core::kv::{RingGeometry, RingKv};

use crate::rig::*;

/// What a change makes of a score at a head and a distance in tokens; `None` hides the key.
type Change<'a> = &'a dyn Fn(f64, usize, i64) -> Option<f64>;

/// The frames that a pass sees, in the order of their slots, with its own last: the rule, replayed.
#[derive(Clone, Default)]
struct World {
    slots: Vec<Option<Pass>>,
}

impl World {
    fn sees(&self, g: &RingGeometry, pass: &Pass) -> Vec<Pass> {
        let own = pass.frame.is_multiple_of(g.pinned_dilation as u64);
        let own = own.then(|| (pass.frame / g.pinned_dilation as u64) as usize % g.ring_buckets);
        let slots = self.slots.iter().enumerate().filter(|(slot, _)| Some(*slot) != own);
        slots.filter_map(|(_, frame)| *frame).chain([*pass]).collect()
    }

    fn commit(&mut self, g: &RingGeometry, pass: &Pass) {
        self.slots.resize(g.ring_frames, None);
        if pass.commit && pass.frame.is_multiple_of(g.pinned_dilation as u64) {
            let slot = (pass.frame / g.pinned_dilation as u64) as usize % g.ring_buckets;
            self.slots[slot] = Some(*pass);
        }
    }
}

/// One pass in one layer, in f64: `o` and `lse`.
fn loops(pass: &Pass, frames: &[Pass], layer: usize, scale: f64, change: Change<'_>) -> (Vec<f64>, Vec<f64>) {
    let q = content(pass, layer, 0, H, D);
    let kv: Vec<_> = frames
        .iter()
        .map(|frame| (content(frame, layer, 1, G, D), content(frame, layer, 2, G, DV)))
        .collect();
    let (mut o, mut lses) = (vec![0.0; F * H * DV], vec![f64::NEG_INFINITY; F * H]);
    for i in (0..F).step_by(19).chain([F - 1]) {
        for h in 0..H {
            let g = h / (H / G);
            let mut seen = Vec::new();
            for (frame, (k, _)) in kv.iter().enumerate() {
                for j in 0..F {
                    let dot: f64 = (0..D)
                        .map(|c| f64::from(q[(i * H + h) * D + c]) * f64::from(k[(j * G + g) * D + c]))
                        .sum();
                    let frames_apart = frames[frame].frame as i64 - pass.frame as i64;
                    let d = frames_apart * F as i64 + j as i64 - i as i64;
                    seen.extend(change(dot * scale, h, d).map(|score| (score, frame, j)));
                }
            }
            let top = seen.iter().fold(f64::NEG_INFINITY, |top, s| top.max(s.0));
            let total: f64 = seen.iter().map(|s| (s.0 - top).exp()).sum();
            lses[i * H + h] = top + total.ln();
            for (score, frame, j) in seen {
                for c in 0..DV {
                    let value = f64::from(kv[frame].1[(j * G + g) * DV + c]);
                    o[(i * H + h) * DV + c] += (score - top).exp() / total * value;
                }
            }
        }
    }
    (o, lses)
}

fn layers() -> Vec<RingGeometry> {
    let dilated = RingGeometry { ring_frames: 3, ring_buckets: 2, pinned_dilation: 2 };
    vec![RingGeometry::last(2), dilated, RingGeometry::last(2)]
}

/// Three requests that take turns: denoise passes and commits, together and alone, through two wraps and more.
fn script() -> Vec<Vec<Pass>> {
    let pass = |world: usize, frame: u64, commit, n: u64| {
        let content = (world as u64 + 1) * 1000 + frame * 10 + n;
        Pass { world, frame, commit, content }
    };
    let mut steps = vec![(0..3).map(|world| pass(world, 0, false, 0)).collect::<Vec<_>>()];
    for frame in 0..6 {
        steps.push(vec![pass(0, frame, true, 1), pass(2, frame, false, 1)]);
        steps.push(vec![pass(2, frame, true, 2), pass(1, frame, true, 2)]);
    }
    steps
}

/// Mods of the caller's.
#[derive(Default)]
struct Own {
    score: Option<UserMod>,
    mask: Option<UserMask>,
}

fn hold(softmax: Softmax, options: FlexOptions, own: Own, change: Change<'_>, what: &str) {
    let scale = f64::from(softmax.sm_scale);
    let document = options.document_frames.map_or(u64::MAX, |frames| frames as u64);
    let rig = Rig::with(config(layers(), 3), softmax, options, |attn| {
        let attn = match own.score {
            Some(user) => attn.with_score_mod(user).unwrap(),
            None => attn,
        };
        match own.mask {
            Some(user) => attn.with_mask_mod(user).unwrap(),
            None => attn,
        }
    });
    let mut worlds = vec![vec![World::default(); 3]; 3];
    for passes in script() {
        let got = rig.run(&passes);
        for (layer, geometry) in layers().iter().enumerate() {
            for (row, pass) in passes.iter().enumerate() {
                let mut frames = worlds[layer][pass.world].sees(geometry, pass);
                frames.retain(|frame| frame.frame / document == pass.frame / document);
                let (o, lse) = loops(pass, &frames, layer, scale, change);
                for i in (0..F).step_by(19).chain([F - 1]) {
                    for at in (row * F + i) * H..(row * F + i + 1) * H {
                        let want = lse[at - row * F * H];
                        let gap = (f64::from(got[layer].1[at]) - want).abs();
                        assert!(
                            gap < 2e-5,
                            "{what}: lse of {pass:?} in layer {layer}, query {i}: off by {gap}"
                        );
                        for c in at * DV..(at + 1) * DV {
                            let gap = (f64::from(got[layer].0[c]) - o[c - row * F * H * DV]).abs();
                            assert!(gap < 2e-5, "{what}: {pass:?} in layer {layer}, query {i}: off by {gap}");
                        }
                    }
                }
                worlds[layer][pass.world].commit(geometry, pass);
            }
        }
    }
}

#[test]
fn passes_of_several_worlds_agree_with_plain_loops() {
    hold(Softmax::scaled(0.6), FlexOptions::default(), Own::default(), &|s, _, _| Some(s), "plain");
}

#[test]
fn causal_and_windowed_rings_count_in_frames() {
    let masked =
        |mask_mods: &[MaskChoice]| FlexOptions { mask_mods: mask_mods.into(), ..FlexOptions::default() };
    let causal = masked(&[MaskChoice::Causal]);
    hold(Softmax::scaled(0.6), causal, Own::default(), &|s, _, d| (d <= 0).then_some(s), "causal");
    let softmax = Softmax { window_left: Some(300), ..Softmax::scaled(0.6) };
    let change = |s: f64, _: usize, d: i64| (-300..=0).contains(&d).then_some(s);
    hold(softmax.clone(), masked(&[MaskChoice::Window]), Own::default(), &change, "window");
    let both = masked(&[MaskChoice::Causal, MaskChoice::None, MaskChoice::Window]);
    hold(softmax, both, Own::default(), &change, "causal and window");
}

#[test]
fn documents_are_runs_of_a_worlds_frames() {
    for frames in [1, 2, 3, 50] {
        for mask_mods in [vec![MaskChoice::Document], vec![MaskChoice::Causal, MaskChoice::Document]] {
            let causal = mask_mods.len() == 2;
            let options = FlexOptions { mask_mods, document_frames: Some(frames), ..FlexOptions::default() };
            let change = |s: f64, _: usize, d: i64| (!causal || d <= 0).then_some(s);
            let what = format!("documents of {frames}, causal {causal}");
            hold(Softmax::scaled(0.6), options, Own::default(), &change, &what);
        }
    }
}

#[test]
fn score_mods_of_a_spec_count_in_frames_and_are_applied_in_order() {
    let scored = |score_mods: &[ScoreChoice], mask_mods: &[MaskChoice]| FlexOptions {
        score_mods: score_mods.into(),
        mask_mods: mask_mods.into(),
        ..FlexOptions::default()
    };
    let softmax = Softmax { logits_soft_cap: Some(0.7), ..Softmax::scaled(0.6) };
    let cap = |s: f64| f64::from(0.7f32) * (s / f64::from(0.7f32)).tanh();
    let capped = scored(&[ScoreChoice::SoftCap], &[]);
    hold(softmax.clone(), capped, Own::default(), &|s, _, _| Some(cap(s)), "cap");
    let slopes = [0.01f32, 0.005, 0.002, 0.001];
    let slope = |s: f64, h: usize, d: i64| s + f64::from(slopes[h]) * d as f64;
    let alibi = scored(&[ScoreChoice::Alibi], &[MaskChoice::Causal]);
    let sloped = Softmax { alibi_slopes: Some(slopes.into()), ..Softmax::scaled(0.6) };
    hold(sloped, alibi, Own::default(), &|s, h, d| (d <= 0).then(|| slope(s, h, d)), "alibi");

    let softmax = Softmax { alibi_slopes: Some(slopes.into()), ..softmax };
    let first = scored(&[ScoreChoice::Alibi, ScoreChoice::SoftCap, ScoreChoice::Causal], &[]);
    let change = |s: f64, h: usize, d: i64| (d <= 0).then(|| cap(slope(s, h, d)));
    hold(softmax.clone(), first, Own::default(), &change, "alibi, then cap");
    let last = scored(&[ScoreChoice::SoftCap, ScoreChoice::Alibi], &[MaskChoice::Causal]);
    let change = |s: f64, h: usize, d: i64| (d <= 0).then(|| slope(cap(s), h, d));
    hold(softmax, last, Own::default(), &change, "cap, then alibi");

    let bias: Vec<f32> = (0..401).map(|at| noise(&[77, at])).collect();
    let biased =
        FlexOptions { rel_bias: Some(bias.as_slice().into()), ..scored(&[ScoreChoice::RelBias], &[]) };
    let change = |s: f64, _: usize, d: i64| Some(s + f64::from(bias[(d.clamp(-200, 200) + 200) as usize]));
    hold(Softmax::scaled(0.6), biased, Own::default(), &change, "bias");
}

#[test]
fn mods_of_users_join_those_of_the_spec() {
    let fade = UserMod::new("fade", |scores, row| {
        for (score, &k) in scores.iter_mut().zip(row.k_idx) {
            *score -= 0.003 * (i64::from(k) - row.q_idx as i64 - row.q_offset).abs() as f32;
        }
    });
    let faded = |s: f64, d: i64| s - f64::from(0.003f32) * d.abs() as f64;
    let own = || Own { score: Some(fade.clone()), ..Own::default() };
    hold(Softmax::scaled(0.6), FlexOptions::default(), own(), &|s, _, d| Some(faded(s, d)), "fade");
    let capped = FlexOptions { score_mods: vec![ScoreChoice::SoftCap], ..FlexOptions::default() };
    let softmax = Softmax { logits_soft_cap: Some(0.7), ..Softmax::scaled(0.6) };
    let cap = |s: f64| f64::from(0.7f32) * (s / f64::from(0.7f32)).tanh();
    hold(softmax, capped, own(), &|s, _, d| Some(faded(cap(s), d)), "cap, then fade");

    let thirds = UserMask::new("thirds", |seen, row| {
        for (seen, &k) in seen.iter_mut().zip(row.k_idx) {
            let d = i64::from(k) - row.q_idx as i64 - row.q_offset;
            *seen = d == 0 || d.rem_euclid(3) == 1;
        }
    });
    let own = || Own { mask: Some(thirds.clone()), ..Own::default() };
    let third = |d: i64| d == 0 || d.rem_euclid(3) == 1;
    hold(
        Softmax::scaled(0.6),
        FlexOptions::default(),
        own(),
        &|s, _, d| third(d).then_some(s),
        "a mask alone",
    );
    let options = FlexOptions {
        mask_mods: vec![MaskChoice::Document, MaskChoice::Causal],
        document_frames: Some(2),
        ..FlexOptions::default()
    };
    let change = |s: f64, _: usize, d: i64| (d <= 0 && third(d)).then_some(s);
    hold(Softmax::scaled(0.6), options, own(), &change, "a mask beside the spec's");
}

/// The keys of `frames`, side by side, through the wrapper level.
fn compacted(pass: &Pass, frames: &[Pass], layer: usize, cap: Option<f32>, workers: usize) -> Vec<u32> {
    let m = frames.len() * F;
    let gather = |which, width| -> Vec<f32> {
        frames.iter().flat_map(|frame| content(frame, layer, which, G, width)).collect()
    };
    let (q, k, v) = (content(pass, layer, 0, H, D), gather(1, D), gather(2, DV));
    let geometry = Geometry {
        batch: 1,
        num_qo_heads: H,
        num_kv_heads: G,
        head_dim_qk: D,
        head_dim_vo: DV,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let mask = BlockMask::full(MaskShape { block_q: F, ..MaskShape::new(F, m) }).unwrap();
    let plan = Plan::new(&geometry, &mask, &KernelOptions { workers, ..KernelOptions::default() }).unwrap();
    let (mut o, mut lse) = (vec![7f32; F * H * DV], vec![7f32; F * H]);
    let mods: Vec<ScoreMod> = cap.map(ScoreMod::SoftCap).into_iter().collect();
    let inputs = Inputs {
        q: TensorRef::from_slice(&q, &[F, H, D]).unwrap().transpose(0, 1).insert_axis(0),
        k: TensorRef::from_slice(&k, &[m, G, D]).unwrap().transpose(0, 1).insert_axis(0),
        v: TensorRef::from_slice(&v, &[m, G, DV]).unwrap().transpose(0, 1).insert_axis(0),
        scale: Some(0.6),
        score_mods: &mods,
    };
    let outputs = Outputs {
        o: TensorMut::from_slice(&mut o, &[F, H, DV]).unwrap().transpose(0, 1).insert_axis(0),
        lse: Some(TensorMut::from_slice(&mut lse, &[F, H]).unwrap().transpose(0, 1).insert_axis(0)),
        max_scores: None,
    };
    run(&plan, &Stream::cpu(), &mut plan.workspace().unwrap(), inputs, outputs).unwrap();
    o.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

#[test]
fn f34_a_ring_has_the_bits_of_its_compacted_keys() {
    for (trial, cap) in [(0u64, None), (1, Some(0.9)), (2, None)] {
        for workers in [1, 2, 5] {
            // Random rings: what they keep, how long they ran.
            let pick = |n: u64, of: u64| ((noise(&[trial, n]).abs() * 1e6) as u64 % of) as usize;
            let ring_frames = 2 + pick(1, 4);
            let g = RingGeometry {
                ring_frames,
                ring_buckets: 1 + pick(2, ring_frames as u64),
                pinned_dilation: 1 + pick(3, 3),
            };
            let softmax = Softmax { logits_soft_cap: cap, ..Softmax::scaled(0.6) };
            let score_mods = vec![if cap.is_some() { ScoreChoice::SoftCap } else { ScoreChoice::None }];
            let kernel_options = KernelOptions { workers, ..KernelOptions::default() };
            let options = FlexOptions { score_mods, kernel_options, ..FlexOptions::default() };
            let rig = Rig::new(config(vec![g], 2), softmax, options);
            let mut worlds = [World::default(), World::default()];
            for frame in 0..(2 * g.ring_buckets * g.pinned_dilation + 2) as u64 {
                let passes = [0usize, 1].map(|world| {
                    let content = trial * 7000 + frame * 2 + world as u64;
                    Pass { world, frame, commit: true, content }
                });
                let (o, lse) = rig.run(&passes).remove(0);
                for (row, pass) in passes.iter().enumerate() {
                    let frames = worlds[pass.world].sees(&g, pass);
                    let rows = (row * F * H, (row + 1) * F * H);
                    let got = o[rows.0 * DV..rows.1 * DV].iter().chain(&lse[rows.0..rows.1]);
                    let got: Vec<u32> = got.map(|x| x.to_bits()).collect();
                    let want = compacted(pass, &frames, 0, cap, 1 + row);
                    assert!(got == want, "{g:?}, frame {frame}, world {row}, {workers} threads");
                    worlds[pass.world].commit(&g, pass);
                }
            }
        }
    }
}

#[test]
fn f34_after_each_frame_the_mean_of_what_is_seen_is_that_of_the_last_four() {
    // Queries of zeros see every key alike: the output is the mean of the frames' values.
    let rig = Rig::new(config(vec![RingGeometry::last(4)], 1), Softmax::scaled(0.0), FlexOptions::default());
    for frame in 0..10u64 {
        let pass = Pass { world: 0, frame, commit: true, content: frame };
        let (_, lse) = rig.run(&[pass]).remove(0);
        let seen = (frame.min(3) + 1) * F as u64;
        assert!((lse[0] - (seen as f32).ln()).abs() < 1e-6, "frame {frame}");
        assert_eq!(rig.ring.clock(&request(0)).unwrap(), frame + 1);
    }
}
