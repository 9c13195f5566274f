//! `mla`: absorbed queries over paged latents.

use std::borrow::Cow;

use anyhow::{Result, bail};
use mstar_kernels::reference::mla::Mla;
use mstar_kernels::{Element, reference};

use super::{Case, Outputs, Params, indices};
use crate::parity::shapes::{Letters, Tensor, Want, tensor};

pub(super) const TENSORS: &[Tensor] = &[
    tensor("in.q_nope", Want::Case, "T H C"),
    tensor("in.q_pe", Want::Case, "T H E"),
    tensor("in.latent", Want::Case, "P S C+E"),
    tensor("in.qo_indptr", Want::I32, "R+1"),
    tensor("in.kv_indptr", Want::I32, "R+1"),
    tensor("in.kv_indices", Want::I32, "N"),
    tensor("in.kv_len", Want::I32, "R"),
    tensor("out.o", Want::Case, "T H C"),
    tensor("out.lse", Want::F32, "T H"),
    tensor("ref.o", Want::F32, "T H C"),
    tensor("ref.lse", Want::F32, "T H"),
];

pub(super) fn letters(params: &Params) -> Result<Letters> {
    let mut letters = Letters::default();
    letters.set("S", params.extent("page_size", 1)?);
    letters.set("C", params.extent("kv_lora_rank", 1)?);
    letters.set("E", params.extent("qk_rope_head_dim", 0)?);
    Ok(letters)
}

/// Everything but the queries and the latents, checked.
pub(super) struct Inputs<'a> {
    sm_scale: f64,
    causal: bool,
    qo_indptr: Cow<'a, [i32]>,
    kv_indptr: Cow<'a, [i32]>,
    kv_indices: Cow<'a, [i32]>,
    kv_len: Cow<'a, [i32]>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(case: &'a Case) -> Result<Inputs<'a>> {
        let (params, letters) = (&case.params, &case.letters);
        let inputs = Inputs {
            sm_scale: params.number("sm_scale")?,
            causal: params.flag("causal")?,
            qo_indptr: case.elements("in.qo_indptr"),
            kv_indptr: case.elements("in.kv_indptr"),
            kv_indices: case.elements("in.kv_indices"),
            kv_len: case.elements("in.kv_len"),
        };
        super::positive(letters, &["H"])?;
        indices::indptr("in.qo_indptr", &inputs.qo_indptr, letters.get("T"), "the queries")?;
        indices::indptr("in.kv_indptr", &inputs.kv_indptr, letters.get("N"), "the entries of in.kv_indices")?;
        indices::within("in.kv_indices", &inputs.kv_indices, 0, letters.get("P") as i64)?;
        for (row, &len) in inputs.kv_len.iter().enumerate() {
            let pages = i64::from(inputs.kv_indptr[row + 1] - inputs.kv_indptr[row]);
            let holds = pages * letters.get("S") as i64;
            if !(0..=holds).contains(&i64::from(len)) {
                bail!("in.kv_len[{row}] = {len}: the row's {pages} pages hold 0..={holds} tokens");
            }
        }
        Ok(inputs)
    }
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let attended = reference::mla(&Mla {
        q_nope: &case.elements::<E>("in.q_nope"),
        q_pe: &case.elements::<E>("in.q_pe"),
        latent: &case.elements::<E>("in.latent"),
        qo_indptr: &inputs.qo_indptr,
        kv_indptr: &inputs.kv_indptr,
        kv_indices: &inputs.kv_indices,
        kv_len: &inputs.kv_len,
        num_qo_heads: letters.get("H"),
        kv_lora_rank: letters.get("C"),
        qk_rope_head_dim: letters.get("E"),
        page_size: letters.get("S"),
        sm_scale: inputs.sm_scale,
        causal: inputs.causal,
    })?;
    Ok(super::attended(case, &attended))
}

#[cfg(feature = "mla")]
mod fast;
#[cfg(feature = "mla")]
pub(super) use fast::fast;

/// Refuses: the backend was not compiled in.
#[cfg(not(feature = "mla"))]
pub(super) fn fast(case: &Case, _place: &super::Place) -> Result<Outputs, super::NotRun> {
    Err(super::NotRun::Unsupported(super::not_compiled(case.op)))
}
