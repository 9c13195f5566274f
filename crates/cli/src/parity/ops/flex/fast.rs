//! A case through the wrapper level of the flex backend: plan the mask once, run once.

use half::{bf16, f16};
use mstar_attn_flex::{
    BlockMask, Geometry, Inputs as Tensors, KernelOptions, Outputs as Into, Plan, ScoreMod, Workspace, run,
};

use super::{Case, Inputs, Mod};
use crate::parity::ops::unwritten::{Attended, Unwritten, outputs};
use crate::parity::ops::{NotRun, Outputs};
use crate::parity::place::Place;

/// Runs a case; its lse in the case's base.
pub(in crate::parity::ops) fn fast(case: &Case, place: &Place) -> Result<Outputs, NotRun> {
    outputs(case, place, run_case::<f32>, run_case::<bf16>, run_case::<f16>)
}

fn run_case<E: Unwritten>(case: &Case, place: &Place) -> Attended {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let [b, h, g, l, m, d] = ["B", "H", "G", "L", "M", "D"].map(|letter| case.letters.get(letter));
    let geometry = Geometry {
        batch: b,
        num_qo_heads: h,
        num_kv_heads: g,
        head_dim_qk: d,
        head_dim_vo: d,
        q_dtype: E::DTYPE,
        kv_dtype: E::DTYPE,
    };
    let written: Vec<bool> = inputs.written.iter().map(|&written| written != 0).collect();
    let mask = BlockMask::written(l, inputs.block_size, &written)?.with_q_offset(inputs.q_offset);
    let options = KernelOptions { device: place.device(), ..KernelOptions::default() };
    let mut plan = Plan::new(&geometry, &mask, &options)?;
    let slopes: Vec<f32> = match &inputs.score_mod {
        Mod::Alibi(slopes) => slopes.iter().map(|&slope| slope as f32).collect(),
        _ => Vec::new(),
    };
    let score_mod = match &inputs.score_mod {
        Mod::None => ScoreMod::None,
        Mod::Causal => ScoreMod::Causal,
        Mod::Alibi(_) => ScoreMod::Alibi { slopes: &slopes },
        Mod::RelBias(table, window) => ScoreMod::RelBias { table, window: *window },
        Mod::SoftCap(cap) => ScoreMod::SoftCap(*cap as f32),
    };
    plan.stage(&place.stream(), &[score_mod])?;
    let q = place.put(&case.elements::<E>("in.q"), &[b, h, l, d])?;
    let [k, v] = ["in.k", "in.v"].map(|name| place.put(&case.elements::<E>(name), &[b, g, m, d]));
    let (k, v) = (k?, v?);
    let (mut o, mut lse) = (place.filled(E::UNWRITTEN, &[b, h, l, d])?, place.filled(f32::NAN, &[b, h, l])?);
    let mut workspace = Workspace::on(place.device(), plan.workspace_bytes())?;
    let tensors = Tensors {
        q: q.view()?,
        k: k.view()?,
        v: v.view()?,
        scale: Some(inputs.sm_scale as f32),
        score_mods: &[score_mod],
    };
    let into = Into { o: o.view_mut()?, lse: Some(lse.view_mut()?), max_scores: None };
    run(&plan, &place.stream(), &mut workspace, tensors, into)?;
    let o = place.take(&o, E::UNWRITTEN)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), place.take(&lse, f32::NAN)?))
}
