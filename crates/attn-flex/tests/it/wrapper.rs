//! The wrapper level: one call, plans made again, and what they refuse.

use half::bf16;
use mstar_attn_flex::{
    AuxRequest, BlockMask, DType, FlexArgs, Geometry, KernelOptions, MaskShape, Plan, Planned, ScoreMod,
    Stream, TensorMut, TensorRef, UserMod, flex_attention_masked,
};
use mstar_kernels::reference::flex::{Flex, ScoreMod as Said, flex};

use crate::rig::noise;

const GEOMETRY: Geometry = Geometry {
    batch: 2,
    num_qo_heads: 4,
    num_kv_heads: 2,
    head_dim_qk: 16,
    head_dim_vo: 24,
    q_dtype: DType::Bf16,
    kv_dtype: DType::Bf16,
};

struct Case {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    l: usize,
    m: usize,
}

impl Case {
    fn new(l: usize, m: usize) -> Case {
        let Geometry { batch: b, num_qo_heads: h, num_kv_heads: g, head_dim_qk: d, head_dim_vo: dv, .. } =
            GEOMETRY;
        let fill = |which: u64, n: usize| -> Vec<bf16> {
            (0..n).map(|at| bf16::from_f32(noise(&[which, at as u64]) * 2.0)).collect()
        };
        Case { q: fill(0, b * h * l * d), k: fill(1, b * g * m * d), v: fill(2, b * g * m * dv), l, m }
    }

    fn call(&self, args: &FlexArgs<'_>) -> Result<(Vec<bf16>, mstar_attn_flex::AuxOutput), String> {
        let Geometry { batch: b, num_qo_heads: h, num_kv_heads: g, head_dim_qk: d, head_dim_vo: dv, .. } =
            GEOMETRY;
        let mut o = vec![bf16::from_f32(7.0); b * h * self.l * dv];
        let aux = flex_attention_masked(
            &Stream::cpu(),
            TensorRef::from_slice(&self.q, &[b, h, self.l, d]).unwrap(),
            TensorRef::from_slice(&self.k, &[b, g, self.m, d]).unwrap(),
            TensorRef::from_slice(&self.v, &[b, g, self.m, dv]).unwrap(),
            args,
            TensorMut::from_slice(&mut o, &[b, h, self.l, dv]).unwrap(),
        );
        assert!(aux.is_ok() || o.iter().all(|x| x.to_f32() == 7.0), "a refused call wrote");
        Ok((o, aux.map_err(|error| error.to_string())?))
    }
}

#[test]
fn one_call_agrees_with_the_oracle() {
    let case = Case::new(70, 300);
    let written: Vec<bool> = (0..300).map(|key| key / 64 != 1).collect();
    let mask = BlockMask::written(70, 64, &written).unwrap().with_q_offset(40);
    let slopes = [0.02f32, 0.01, 0.005, 0.002];
    let bytes: Vec<u8> = written.iter().map(|&w| u8::from(w)).collect();
    let double: Vec<f64> = slopes.iter().map(|&s| f64::from(s)).collect();
    for (mods, said) in [
        (ScoreMod::None, Said::None),
        (ScoreMod::Causal, Said::Causal),
        (ScoreMod::Alibi { slopes: &slopes }, Said::Alibi { slopes: &double }),
        (ScoreMod::SoftCap(3.0), Said::SoftCap(3.0)),
    ] {
        let args = FlexArgs {
            score_mods: &[mods],
            block_mask: Some(&mask),
            enable_gqa: true,
            return_aux: AuxRequest { lse: true, max_scores: true },
            ..FlexArgs::default()
        };
        let (o, aux) = case.call(&args).unwrap();
        let want = flex(&Flex {
            q: &case.q,
            k: &case.k,
            v: &case.v,
            written: &bytes,
            batch: 2,
            num_qo_heads: 4,
            num_kv_heads: 2,
            head_dim_qk: 16,
            head_dim_vo: 24,
            block_size: 64,
            sm_scale: 0.25,
            q_offset: 40,
            score_mod: said,
        })
        .unwrap();
        let gap = o.iter().zip(&want.o).map(|(x, y)| (x.to_f64() - y).abs()).fold(0.0, f64::max);
        assert!(gap < 0.02, "{said:?}: {gap}");
        let lse = aux.lse.unwrap();
        let gap = lse.iter().zip(&want.lse).map(|(&x, y)| (f64::from(x) - y).abs()).fold(0.0, f64::max);
        assert!(gap < 1e-4, "{said:?}: {gap}");
        assert!(aux.max_scores.unwrap().iter().zip(&lse).all(|(top, lse)| top <= lse));
    }
}

#[test]
fn what_was_not_asked_for_is_not_returned_and_changes_nothing() {
    let case = Case::new(9, 40);
    let args = FlexArgs { enable_gqa: true, ..FlexArgs::default() };
    let (plain, none) = case.call(&args).unwrap();
    let asked = AuxRequest { lse: true, max_scores: false };
    let workers = KernelOptions { workers: 3, ..KernelOptions::default() };
    let (with, some) = case.call(&FlexArgs { return_aux: asked, kernel_options: workers, ..args }).unwrap();
    assert!(plain == with && none.lse.is_none() && none.max_scores.is_none());
    assert!(some.lse.is_some() && some.max_scores.is_none());
}

#[test]
fn shared_key_heads_must_be_asked_for() {
    let case = Case::new(9, 40);
    let said = case.call(&FlexArgs::default()).unwrap_err();
    assert!(said.starts_with("enable_gqa: 4 query heads"), "{said}");
    let odd = Geometry { num_qo_heads: 5, ..GEOMETRY };
    let mask = BlockMask::full(MaskShape::new(9, 40)).unwrap();
    assert!(Plan::new(&odd, &mask, &KernelOptions::default()).is_err());
}

#[test]
fn a_mask_of_another_shape_or_a_mod_without_a_cpu_half_is_refused() {
    let case = Case::new(9, 40);
    let args = FlexArgs { enable_gqa: true, ..FlexArgs::default() };
    for shape in
        [MaskShape::new(10, 40), MaskShape::new(9, 41), MaskShape { heads: 3, ..MaskShape::new(9, 40) }]
    {
        let mask = BlockMask::full(shape).unwrap();
        assert!(case.call(&FlexArgs { block_mask: Some(&mask), ..args }).is_err(), "{shape:?}");
    }
    let elsewhere = UserMod { name: "elsewhere".into(), cpu: None, cuda: Some(Default::default()) };
    let said = case.call(&FlexArgs { score_mods: &[ScoreMod::User(&elsewhere)], ..args }).unwrap_err();
    assert!(said.contains("no CPU half") && said.contains("elsewhere"), "{said}");
    let said = case.call(&FlexArgs { scale: Some(f32::NAN), ..args }).unwrap_err();
    assert!(said.contains("sm_scale"), "{said}");
}

/// A mask of pairs, in whatever blocks, shows what the same pairs show as a score mod.
#[test]
fn a_mask_holds_however_it_is_made() {
    let case = Case::new(50, 90);
    let sees =
        |batch: usize, head: usize, q: usize, k: usize| !(q * 3 + k * 7 + head + batch).is_multiple_of(4);
    let shape = MaskShape { block_q: 16, block_kv: 32, batch: 2, heads: 4, ..MaskShape::new(50, 90) };
    let mask = BlockMask::from_predicate(shape, sees).unwrap();
    let hide = UserMod::new("hide", move |scores, row| {
        for (score, &k) in scores.iter_mut().zip(row.k_idx) {
            if !sees(row.batch, row.head, row.q_idx, k as usize) {
                *score = f32::NEG_INFINITY;
            }
        }
    });
    let args = FlexArgs { enable_gqa: true, ..FlexArgs::default() };
    let (masked, _) = case.call(&FlexArgs { block_mask: Some(&mask), ..args }).unwrap();
    let (hidden, _) = case.call(&FlexArgs { score_mods: &[ScoreMod::User(&hide)], ..args }).unwrap();
    let gap = masked.iter().zip(&hidden).map(|(a, b)| (a.to_f32() - b.to_f32()).abs()).fold(0.0, f32::max);
    assert!(gap < 0.02, "{gap}");
}

#[test]
fn a_plan_stands_while_its_blocks_do() {
    let shape = MaskShape::new(300, 900);
    let mut mask = BlockMask::causal(shape, 600).unwrap();
    let options = KernelOptions { workers: 2, ..KernelOptions::default() };
    let mut plan = Plan::new(&GEOMETRY, &mask, &options).unwrap();
    assert_eq!(plan.replan(&GEOMETRY, &mask, &options).unwrap(), Planned::Unchanged);
    mask.update([0, 0, 1], 2..3, 0..0).unwrap();
    assert_eq!(plan.replan(&GEOMETRY, &mask, &options).unwrap(), Planned::Changed);
    assert_eq!(
        plan.replan(&GEOMETRY, &mask, &KernelOptions { workers: 1, ..KernelOptions::default() }).unwrap(),
        Planned::Changed
    );
    let other = BlockMask::full(MaskShape { batch: 3, ..shape }).unwrap();
    assert!(plan.replan(&GEOMETRY, &other, &options).is_err());
    assert_eq!(
        plan.replan(&GEOMETRY, &mask, &KernelOptions { workers: 1, ..KernelOptions::default() }).unwrap(),
        Planned::Unchanged
    );
    assert!(plan.plan_bytes() > 0 && plan.workers() == 1);
}
