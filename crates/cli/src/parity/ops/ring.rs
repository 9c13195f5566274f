//! `ring`: passes over a cache that is overwritten in place.

use anyhow::{Result, bail};
use mstar_kernels::reference::ring::{BLOCK, Pass, Ring};
use mstar_kernels::{Element, reference};
use serde_json::Value;

use super::{Case, Computed, Outputs, Params, indices};
use crate::parity::params::whole;
use crate::parity::shapes::{Letters, Tensor, Want, tensor};

pub(super) const TENSORS: &[Tensor] = &[
    tensor("in.q", Want::Case, "N H F D"),
    tensor("in.k", Want::Case, "N G F D"),
    tensor("in.v", Want::Case, "N G F D"),
    tensor("out.o", Want::Case, "N H F D"),
    tensor("out.visible_blocks", Want::I32, "V"),
    tensor("out.visible_indptr", Want::I32, "N+1"),
    tensor("ref.o", Want::F32, "N H F D"),
];

pub(super) fn letters(params: &Params) -> Result<Letters> {
    let mut letters = Letters::default();
    letters.set("F", params.extent("tokens_per_frame", 1)?);
    Ok(letters)
}

/// The geometry and the passes, checked.
pub(super) struct Inputs {
    sm_scale: f64,
    ring_frames: usize,
    ring_buckets: usize,
    pinned_dilation: usize,
    num_worlds: usize,
    passes: Vec<Pass>,
}

impl Inputs {
    pub(super) fn new(case: &Case) -> Result<Inputs> {
        let (params, letters) = (&case.params, &case.letters);
        let inputs = Inputs {
            sm_scale: params.number("sm_scale")?,
            ring_frames: params.extent("ring_frames", 1)?,
            ring_buckets: params.extent("ring_buckets", 1)?,
            pinned_dilation: params.extent("pinned_dilation", 1)?,
            num_worlds: params.extent("num_worlds", 1)?,
            passes: passes(params)?,
        };
        super::positive(letters, &["D"])?;
        super::group(letters)?;
        if !letters.get("F").is_multiple_of(BLOCK) {
            bail!("params.tokens_per_frame = {}: must be a multiple of {BLOCK}", letters.get("F"));
        }
        if inputs.ring_buckets > inputs.ring_frames {
            bail!(
                "params.ring_buckets = {}: the ring has {} frames",
                inputs.ring_buckets,
                inputs.ring_frames
            );
        }
        if inputs.passes.len() != letters.get("N") {
            bail!("params.passes: {} passes for {} entries of in.q", inputs.passes.len(), letters.get("N"));
        }
        if let Some(pass) = inputs.passes.iter().find(|pass| pass.world >= inputs.num_worlds) {
            bail!("params.passes: world {} of {}", pass.world, inputs.num_worlds);
        }
        let indptr = case.elements::<i32>("out.visible_indptr");
        indices::indptr(
            "out.visible_indptr",
            &indptr,
            letters.get("V"),
            "the entries of out.visible_blocks",
        )?;
        Ok(inputs)
    }
}

/// `[[world, frame_pos, commit], ...]`.
fn passes(params: &Params) -> Result<Vec<Pass>> {
    let Some(Value::Array(list)) = params.get("passes") else {
        bail!("params.passes: must be a list of [world, frame_pos, commit]");
    };
    let pass = |(i, value): (usize, &Value)| {
        let name = format!("params.passes[{i}]");
        let Some([world, frame_pos, commit]) = value.as_array().map(Vec::as_slice) else {
            bail!("{name} = {value}: must be [world, frame_pos, commit]");
        };
        let commit = match (commit.as_bool(), commit.as_i64()) {
            (Some(commit), _) => commit,
            (None, Some(commit @ (0 | 1))) => commit == 1,
            _ => bail!("{name} = {value}: commit must be true or false"),
        };
        Ok(Pass {
            world: whole(&name, world, 0..=i64::from(i32::MAX))? as usize,
            frame_pos: whole(&name, frame_pos, 0..=i64::MAX)? as u64,
            commit,
        })
    };
    list.iter().enumerate().map(pass).collect()
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let out = reference::ring(&Ring {
        q: &case.elements::<E>("in.q"),
        k: &case.elements::<E>("in.k"),
        v: &case.elements::<E>("in.v"),
        passes: &inputs.passes,
        num_qo_heads: letters.get("H"),
        num_kv_heads: letters.get("G"),
        head_dim_qk: letters.get("D"),
        head_dim_vo: letters.get("D"),
        tokens_per_frame: letters.get("F"),
        ring_frames: inputs.ring_frames,
        ring_buckets: inputs.ring_buckets,
        pinned_dilation: inputs.pinned_dilation as u64,
        num_worlds: inputs.num_worlds,
        sm_scale: inputs.sm_scale,
    })?;
    let integers = |values: &[i64]| Computed::Integers(values.iter().map(|&v| v as i32).collect());
    Ok(Outputs::from([
        ("out.o", Computed::Floats(super::rounded(case.dtype, &out.attended.o))),
        ("out.visible_blocks", integers(&out.visible_blocks)),
        ("out.visible_indptr", integers(&out.visible_indptr)),
    ]))
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
