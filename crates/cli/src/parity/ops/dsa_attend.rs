//! `dsa_attend`: absorbed attention over the latents that each query picked.

use std::borrow::Cow;

use anyhow::{Result, bail};
use mstar_kernels::reference::dsa_attend::DsaAttend;
use mstar_kernels::{Element, reference};

use super::{Case, Outputs, Params, indices};
use crate::parity::shapes::{Letters, Tensor, Want, tensor};

pub(super) const TENSORS: &[Tensor] = &[
    tensor("in.q_nope", Want::Case, "T H C"),
    tensor("in.q_pe", Want::Case, "T H E"),
    tensor("in.latent", Want::Case, "P S C+E"),
    tensor("in.selection", Want::I32, "T K"),
    tensor("in.kv_indptr", Want::I32, "R+1"),
    tensor("in.kv_indices", Want::I32, "N"),
    tensor("in.row_request", Want::I32, "T"),
    tensor("in.page_start", Want::I32, "R"),
    tensor("out.o", Want::Case, "T H C"),
    tensor("out.lse", Want::F32, "T H"),
    tensor("ref.o", Want::F32, "T H C"),
    tensor("ref.lse", Want::F32, "T H"),
];

pub(super) fn letters(params: &Params) -> Result<Letters> {
    super::mla::letters(params)
}

/// Everything but the queries and the latents, checked.
pub(super) struct Inputs<'a> {
    sm_scale: f64,
    selection: Cow<'a, [i32]>,
    kv_indptr: Cow<'a, [i32]>,
    kv_indices: Cow<'a, [i32]>,
    row_request: Cow<'a, [i32]>,
    page_start: Cow<'a, [i32]>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(case: &'a Case) -> Result<Inputs<'a>> {
        let letters = &case.letters;
        let inputs = Inputs {
            sm_scale: case.params.number("sm_scale")?,
            selection: case.elements("in.selection"),
            kv_indptr: case.elements("in.kv_indptr"),
            kv_indices: case.elements("in.kv_indices"),
            row_request: case.elements("in.row_request"),
            page_start: case.elements("in.page_start"),
        };
        super::positive(letters, &["H"])?;
        indices::indptr("in.kv_indptr", &inputs.kv_indptr, letters.get("N"), "the entries of in.kv_indices")?;
        indices::within("in.kv_indices", &inputs.kv_indices, 0, letters.get("P") as i64)?;
        indices::within("in.row_request", &inputs.row_request, 0, letters.get("R") as i64)?;
        indices::within("in.page_start", &inputs.page_start, 0, letters.get("S") as i64)?;
        let topk = letters.get("K");
        for (i, &position) in inputs.selection.iter().enumerate() {
            let request = inputs.row_request[i / topk] as usize;
            let pages = i64::from(inputs.kv_indptr[request + 1] - inputs.kv_indptr[request]);
            let holds = pages * letters.get("S") as i64 - i64::from(inputs.page_start[request]);
            if i64::from(position) < -1 || i64::from(position) >= holds.max(0) {
                let (row, column) = (i / topk, i % topk);
                bail!(
                    "in.selection[{row}, {column}] = {position}: request {request} has room for {holds} \
                     positions; -1 picks nothing"
                );
            }
        }
        Ok(inputs)
    }
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let attended = reference::dsa_attend(&DsaAttend {
        q_nope: &case.elements::<E>("in.q_nope"),
        q_pe: &case.elements::<E>("in.q_pe"),
        latent: &case.elements::<E>("in.latent"),
        selection: &inputs.selection,
        kv_indptr: &inputs.kv_indptr,
        kv_indices: &inputs.kv_indices,
        row_request: &inputs.row_request,
        page_start: &inputs.page_start,
        num_qo_heads: letters.get("H"),
        kv_lora_rank: letters.get("C"),
        qk_rope_head_dim: letters.get("E"),
        page_size: letters.get("S"),
        sm_scale: inputs.sm_scale,
    })?;
    Ok(super::attended(case, &attended))
}

#[cfg(feature = "dsa")]
mod fast;
#[cfg(feature = "dsa")]
pub(super) use fast::fast;

/// Refuses: the backend was not compiled in.
#[cfg(not(feature = "dsa"))]
pub(super) fn fast(case: &Case, _place: &super::Place) -> Result<Outputs, super::NotRun> {
    Err(super::NotRun::Unsupported(super::not_compiled(case.op)))
}
