//! A case through the wrapper level of the flex backend: plan the mask once, run once.

use half::{bf16, f16};
use mstar_attn_flex::{BlockMask, Geometry, Inputs as Tensors, Outputs as Into, Plan, ScoreMod, run};
use mstar_kernels::{Stream, TensorMut, TensorRef};

use super::{Case, Inputs, Mod};
use crate::parity::ops::unwritten::{Attended, Unwritten, outputs};
use crate::parity::ops::{NotRun, Outputs};

/// Runs a case; its lse in the case's base.
pub(in crate::parity::ops) fn fast(case: &Case) -> Result<Outputs, NotRun> {
    outputs(case, run_case::<f32>, run_case::<bf16>, run_case::<f16>)
}

fn run_case<E: Unwritten>(case: &Case) -> Attended {
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
    let plan = Plan::new(&geometry, &mask, &Default::default())?;
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
    let (q, k, v) = (case.elements::<E>("in.q"), case.elements::<E>("in.k"), case.elements::<E>("in.v"));
    let (mut o, mut lse) = (vec![E::UNWRITTEN; b * h * l * d], vec![f32::NAN; b * h * l]);
    let tensors = Tensors {
        q: TensorRef::from_slice(&q, &[b, h, l, d])?,
        k: TensorRef::from_slice(&k, &[b, g, m, d])?,
        v: TensorRef::from_slice(&v, &[b, g, m, d])?,
        scale: Some(inputs.sm_scale as f32),
        score_mods: &[score_mod],
    };
    let into = Into {
        o: TensorMut::from_slice(&mut o, &[b, h, l, d])?,
        lse: Some(TensorMut::from_slice(&mut lse, &[b, h, l])?),
        max_scores: None,
    };
    run(&plan, &Stream::cpu(), &mut plan.workspace()?, tensors, into)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), lse))
}
