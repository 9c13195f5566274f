//! `flex`: batches over blocks that are written or not, with a score mod.

use std::borrow::Cow;

use anyhow::{Result, bail};
use mstar_kernels::reference::flex::{Flex, ScoreMod};
use mstar_kernels::{Element, reference};

use super::{Case, Outputs, Params};
use crate::parity::shapes::{Letters, Tensor, Want, tensor};

pub(super) const TENSORS: &[Tensor] = &[
    tensor("in.q", Want::Case, "B H L D"),
    tensor("in.k", Want::Case, "B G M D"),
    tensor("in.v", Want::Case, "B G M D"),
    tensor("in.written", Want::U8, "M"),
    Tensor { name: "in.rel_bias", want: Want::F32, dims: "H 1+W+W", optional: true },
    tensor("out.o", Want::Case, "B H L D"),
    tensor("out.lse", Want::F32, "B H L"),
    tensor("ref.o", Want::F32, "B H L D"),
    tensor("ref.lse", Want::F32, "B H L"),
];

pub(super) fn letters(params: &Params) -> Result<Letters> {
    let mut letters = Letters::default();
    let window = params.integer_or_none("rel_bias_window", 0..=i64::from(i32::MAX))?;
    letters.set("W", window.unwrap_or(0) as usize);
    Ok(letters)
}

/// Everything but queries, keys and values, checked.
pub(super) struct Inputs<'a> {
    sm_scale: f64,
    block_size: usize,
    q_offset: i64,
    score_mod: Mod<'a>,
    written: Cow<'a, [u8]>,
}

enum Mod<'a> {
    None,
    Causal,
    Alibi(Vec<f64>),
    RelBias(Cow<'a, [f32]>, usize),
    SoftCap(f64),
}

impl<'a> Inputs<'a> {
    pub(super) fn new(case: &'a Case) -> Result<Inputs<'a>> {
        let (params, letters) = (&case.params, &case.letters);
        let block_size = params.extent("block_size", 1)?;
        let score_mod = match params.get("score_mod").map(|name| (name.as_str(), name)) {
            None | Some((Some("none"), _)) => Mod::None,
            Some((Some("causal"), _)) => Mod::Causal,
            Some((Some("alibi"), _)) => Mod::Alibi(slopes(params, letters.get("H"))?),
            Some((Some("rel_bias"), _)) => {
                let window = params.extent("rel_bias_window", 0)?;
                if !case.has("in.rel_bias") {
                    bail!("tensor in.rel_bias is missing: score_mod rel_bias reads it");
                }
                Mod::RelBias(case.elements("in.rel_bias"), window)
            }
            Some((Some("soft_cap"), _)) => match params.number("soft_cap")? {
                cap if cap > 0.0 => Mod::SoftCap(cap),
                cap => bail!("params.soft_cap = {cap}: must be above 0"),
            },
            Some((_, other)) => {
                bail!("params.score_mod = {other}: must be none, causal, alibi, rel_bias or soft_cap")
            }
        };
        let limit = i64::from(i32::MAX);
        let inputs = Inputs {
            sm_scale: params.number("sm_scale")?,
            block_size,
            q_offset: params.integer_or_none("q_offset", -limit..=limit)?.unwrap_or(0),
            score_mod,
            written: case.elements("in.written"),
        };
        super::positive(letters, &["D"])?;
        super::group(letters)?;
        for (block, keys) in inputs.written.chunks(block_size).enumerate() {
            if let Some(i) = keys.iter().position(|&w| (w != 0) != (keys[0] != 0)) {
                let at = block * block_size + i;
                bail!("in.written[{at}]: a block of {block_size} is written whole or not at all");
            }
        }
        Ok(inputs)
    }
}

fn slopes(params: &Params, heads: usize) -> Result<Vec<f64>> {
    let Some(serde_json::Value::Array(slopes)) = params.get("alibi_slopes") else {
        bail!("params.alibi_slopes: score_mod alibi needs a list of one slope a head");
    };
    let slopes: Vec<f64> =
        slopes.iter().filter_map(|slope| slope.as_f64().filter(|x| x.is_finite())).collect();
    if slopes.len() != heads {
        bail!("params.alibi_slopes: {} finite slopes for {heads} heads", slopes.len());
    }
    Ok(slopes)
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let attended = reference::flex(&Flex {
        q: &case.elements::<E>("in.q"),
        k: &case.elements::<E>("in.k"),
        v: &case.elements::<E>("in.v"),
        written: &inputs.written,
        batch: letters.get("B"),
        num_qo_heads: letters.get("H"),
        num_kv_heads: letters.get("G"),
        head_dim_qk: letters.get("D"),
        head_dim_vo: letters.get("D"),
        block_size: inputs.block_size,
        sm_scale: inputs.sm_scale,
        q_offset: inputs.q_offset,
        score_mod: match &inputs.score_mod {
            Mod::None => ScoreMod::None,
            Mod::Causal => ScoreMod::Causal,
            Mod::Alibi(slopes) => ScoreMod::Alibi { slopes },
            Mod::RelBias(table, window) => ScoreMod::RelBias { table, window: *window },
            Mod::SoftCap(cap) => ScoreMod::SoftCap(*cap),
        },
    })?;
    Ok(super::attended(case, &attended))
}

#[cfg(feature = "flex")]
mod fast;
#[cfg(feature = "flex")]
pub(super) use fast::fast;

/// Refuses: the backend was not compiled in.
#[cfg(not(feature = "flex"))]
pub(super) fn fast(case: &Case, _place: &super::Place) -> Result<Outputs, super::NotRun> {
    Err(super::NotRun::Unsupported(super::not_compiled(case.op)))
}
