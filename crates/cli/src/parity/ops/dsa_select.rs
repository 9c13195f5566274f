//! `dsa_select`: the top keys of each query by index score.

use anyhow::{Result, bail};
use mstar_kernels::reference::dsa_select::DsaSelect;
use mstar_kernels::{Element, reference};

use super::{Case, Computed, Outputs, Params, indices};
use crate::parity::shapes::{Letters, Tensor, Want, tensor};

pub(super) const TENSORS: &[Tensor] = &[
    tensor("in.q", Want::Case, "T Hi Di"),
    tensor("in.weights", Want::F32, "T Hi"),
    tensor("in.keys", Want::Case, "U Di"),
    tensor("in.key_indptr", Want::I32, "R+1"),
    tensor("in.row_request", Want::I32, "T"),
    tensor("in.positions", Want::I32, "T"),
    tensor("out.selection", Want::I32, "T K"),
    tensor("ref.scores", Want::F32, "X"),
];

pub(super) fn letters(params: &Params) -> Result<Letters> {
    let mut letters = Letters::default();
    letters.set("K", params.extent("topk", 1)?);
    Ok(letters)
}

/// Holds the index arrays, and the recorded selection itself, against the op's rules.
pub(super) fn check(case: &Case) -> Result<()> {
    let letters = &case.letters;
    super::positive(letters, &["Hi", "Di"])?;
    let key_indptr = case.elements::<i32>("in.key_indptr");
    let row_request = case.elements::<i32>("in.row_request");
    let positions = case.elements::<i32>("in.positions");
    indices::indptr("in.key_indptr", &key_indptr, letters.get("U"), "the keys")?;
    indices::within("in.row_request", &row_request, 0, letters.get("R") as i64)?;
    let mut scores = 0usize;
    for (t, &position) in positions.iter().enumerate() {
        let request = row_request[t] as usize;
        let keys = key_indptr[request + 1] - key_indptr[request];
        if !(0..keys).contains(&position) {
            bail!("in.positions[{t}] = {position}: request {request} has {keys} keys");
        }
        scores += position as usize + 1;
    }
    if scores != letters.get("X") {
        bail!("tensor ref.scores: the rows see {scores} keys together, got {}", letters.get("X"));
    }
    Ok(())
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let letters = &case.letters;
    let out = reference::dsa_select(&DsaSelect {
        q: &case.elements::<E>("in.q"),
        weights: &case.elements("in.weights"),
        keys: &case.elements::<E>("in.keys"),
        key_indptr: &case.elements("in.key_indptr"),
        row_request: &case.elements("in.row_request"),
        positions: &case.elements("in.positions"),
        index_n_heads: letters.get("Hi"),
        index_head_dim: letters.get("Di"),
        topk: letters.get("K"),
    })?;
    Ok(Outputs::from([("out.selection", Computed::Integers(out.selection))]))
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
