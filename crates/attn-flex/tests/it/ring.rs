//! Attention over rings: against plain loops over the frames that a pass sees, and to the bit against the same keys moved
//! together.

use mstar_attn_flex::{
    BlockMask, DType, FlexOptions, Geometry, Inputs, KernelOptions, MaskChoice, MaskShape, Outputs, Plan,
    ScoreChoice, ScoreMod, Stream, TensorMut, TensorRef, UserMod, run,
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

fn hold(softmax: Softmax, options: FlexOptions, user: Option<UserMod>, change: Change<'_>, what: &str) {
    let scale = f64::from(softmax.sm_scale);
    let rig = Rig::with(config(layers(), 3), softmax, options, |attn| match user {
        Some(user) => attn.with_score_mod(user),
        None => attn,
    });
    let mut worlds = vec![vec![World::default(); 3]; 3];
    for passes in script() {
        let got = rig.run(&passes);
        for (layer, geometry) in layers().iter().enumerate() {
            for (row, pass) in passes.iter().enumerate() {
                let frames = worlds[layer][pass.world].sees(geometry, pass);
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
    hold(Softmax::scaled(0.6), FlexOptions::default(), None, &|s, _, _| Some(s), "plain");
}

#[test]
fn causal_and_windowed_rings_count_in_frames() {
    let causal = FlexOptions { mask_mod: MaskChoice::Causal, ..FlexOptions::default() };
    hold(Softmax::scaled(0.6), causal, None, &|s, _, d| (d <= 0).then_some(s), "causal");
    let window = FlexOptions { mask_mod: MaskChoice::Window, ..FlexOptions::default() };
    let softmax = Softmax { window_left: Some(300), ..Softmax::scaled(0.6) };
    hold(softmax, window, None, &|s, _, d| (-300..=0).contains(&d).then_some(s), "window");
}

#[test]
fn score_mods_of_a_spec_and_of_users_count_in_frames() {
    let capped = FlexOptions { score_mod: ScoreChoice::SoftCap, ..FlexOptions::default() };
    let softmax = Softmax { logits_soft_cap: Some(0.7), ..Softmax::scaled(0.6) };
    hold(softmax, capped, None, &|s, _, _| Some(0.7f32 as f64 * (s / 0.7f32 as f64).tanh()), "cap");
    let slopes = [0.01f32, 0.005, 0.002, 0.001];
    let alibi =
        FlexOptions { score_mod: ScoreChoice::Alibi, mask_mod: MaskChoice::Causal, ..FlexOptions::default() };
    let softmax = Softmax { alibi_slopes: Some(slopes.into()), ..Softmax::scaled(0.6) };
    let change = |s: f64, h: usize, d: i64| (d <= 0).then(|| s + f64::from(slopes[h]) * d as f64);
    hold(softmax, alibi, None, &change, "alibi");
    let user = UserMod::new("fade", |scores, row| {
        for (score, &k) in scores.iter_mut().zip(row.k_idx) {
            *score -= 0.003 * (i64::from(k) - row.q_idx as i64 - row.q_offset).abs() as f32;
        }
    });
    let change = |s: f64, _: usize, d: i64| Some(s - f64::from(0.003f32) * d.abs() as f64);
    hold(Softmax::scaled(0.6), FlexOptions::default(), Some(user), &change, "fade");
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
    let plan = Plan::new(&geometry, &mask, &KernelOptions { workers }).unwrap();
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
            let score_mod = if cap.is_some() { ScoreChoice::SoftCap } else { ScoreChoice::None };
            let kernel_options = KernelOptions { workers };
            let options = FlexOptions { score_mod, kernel_options, ..FlexOptions::default() };
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
