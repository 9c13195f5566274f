//! `dense`: packed rows over packed keys, `[prefix | fresh]`.

use std::borrow::Cow;

use anyhow::Result;
use mstar_kernels::reference::dense::Dense;
use mstar_kernels::{Element, reference};

use super::{Case, Outputs, Params, indices};
use crate::parity::shapes::{Letters, Tensor, Want, tensor};

pub(super) const TENSORS: &[Tensor] = &[
    tensor("in.q", Want::Case, "T H D"),
    tensor("in.k", Want::Case, "U G D"),
    tensor("in.v", Want::Case, "U G D"),
    tensor("in.cu_q", Want::I32, "R+1"),
    tensor("in.cu_k", Want::I32, "R+1"),
    tensor("out.o", Want::Case, "T H D"),
    tensor("out.lse", Want::F32, "T H"),
    tensor("ref.o", Want::F32, "T H D"),
    tensor("ref.lse", Want::F32, "T H"),
];

pub(super) fn letters(_params: &Params) -> Result<Letters> {
    Ok(Letters::default())
}

/// Everything but queries, keys and values, checked.
pub(super) struct Inputs<'a> {
    sm_scale: f64,
    causal: bool,
    cu_q: Cow<'a, [i32]>,
    cu_k: Cow<'a, [i32]>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(case: &'a Case) -> Result<Inputs<'a>> {
        let letters = &case.letters;
        let inputs = Inputs {
            sm_scale: case.params.number("sm_scale")?,
            causal: case.params.flag("causal")?,
            cu_q: case.elements("in.cu_q"),
            cu_k: case.elements("in.cu_k"),
        };
        super::positive(letters, &["D"])?;
        super::group(letters)?;
        indices::indptr("in.cu_q", &inputs.cu_q, letters.get("T"), "the queries")?;
        indices::indptr("in.cu_k", &inputs.cu_k, letters.get("U"), "the keys")?;
        Ok(inputs)
    }
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let attended = reference::dense(&Dense {
        q: &case.elements::<E>("in.q"),
        k: &case.elements::<E>("in.k"),
        v: &case.elements::<E>("in.v"),
        cu_q: &inputs.cu_q,
        cu_k: &inputs.cu_k,
        num_qo_heads: letters.get("H"),
        num_kv_heads: letters.get("G"),
        head_dim_qk: letters.get("D"),
        head_dim_vo: letters.get("D"),
        sm_scale: inputs.sm_scale,
        causal: inputs.causal,
    })?;
    Ok(super::attended(case, &attended))
}

#[cfg(feature = "dense")]
mod fast;
#[cfg(feature = "dense")]
pub(super) use fast::fast;

/// Refuses: the backend was not compiled in.
#[cfg(not(feature = "dense"))]
pub(super) fn fast(case: &Case, _place: &super::Place) -> Result<Outputs, super::NotRun> {
    Err(super::NotRun::Unsupported(super::not_compiled(case.op)))
}
