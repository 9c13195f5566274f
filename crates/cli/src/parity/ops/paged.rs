//! `paged` and `cross`: rows over pages of keys and values.

use std::borrow::Cow;

use anyhow::{Result, bail};
use mstar_kernels::reference::paged::{Cache, Options, Paged};
use mstar_kernels::{Element, reference};

use super::{Case, Op, Outputs, Params, indices};
use crate::parity::shapes::{Letters, Tensor, Want, tensor};

pub(super) const TENSORS: &[Tensor] = &[
    tensor("in.q", Want::Case, "T H D"),
    tensor("in.kv", Want::Case, "P 2 S G D"),
    tensor("in.qo_indptr", Want::I32, "R+1"),
    tensor("in.kv_indptr", Want::I32, "R+1"),
    tensor("in.kv_indices", Want::I32, "N"),
    tensor("in.kv_last_page_len", Want::I32, "R"),
    Tensor { name: "in.sinks", want: Want::F32, dims: "H", optional: true },
    tensor("out.o", Want::Case, "T H D"),
    tensor("out.lse", Want::F32, "T H"),
    tensor("ref.o", Want::F32, "T H D"),
    tensor("ref.lse", Want::F32, "T H"),
];

pub(super) fn letters(params: &Params) -> Result<Letters> {
    let mut letters = Letters::default();
    letters.set("S", params.extent("page_size", 1)?);
    Ok(letters)
}

/// Everything but the queries and the cache, checked.
pub(super) struct Inputs<'a> {
    pub(super) sm_scale: f64,
    pub(super) causal: bool,
    /// -1: none.
    pub(super) window_left: i64,
    /// 0: none.
    pub(super) logits_soft_cap: f64,
    pub(super) sinks: Option<Cow<'a, [f32]>>,
    pub(super) qo_indptr: Cow<'a, [i32]>,
    pub(super) kv_indptr: Cow<'a, [i32]>,
    pub(super) kv_indices: Cow<'a, [i32]>,
    pub(super) kv_last_page_len: Cow<'a, [i32]>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(case: &'a Case) -> Result<Inputs<'a>> {
        let (params, letters) = (&case.params, &case.letters);
        let causal = match (case.op, params.flag_or_none("causal")?) {
            (Op::Cross, Some(true)) => bail!("params.causal: cross-attention has no causal mask"),
            (Op::Cross, _) => false,
            (_, Some(causal)) => causal,
            (_, None) => params.flag("causal")?,
        };
        let window_left = params.integer_or_none("window_left", -1..=i64::MAX)?.unwrap_or(-1);
        let logits_soft_cap = params.number_or_none("logits_soft_cap")?.unwrap_or(0.0);
        if logits_soft_cap < 0.0 {
            bail!("params.logits_soft_cap = {logits_soft_cap}: must be 0 (none) or above");
        }
        let inputs = Inputs {
            sm_scale: params.number("sm_scale")?,
            causal,
            window_left,
            logits_soft_cap,
            sinks: case.has("in.sinks").then(|| case.elements("in.sinks")),
            qo_indptr: case.elements("in.qo_indptr"),
            kv_indptr: case.elements("in.kv_indptr"),
            kv_indices: case.elements("in.kv_indices"),
            kv_last_page_len: case.elements("in.kv_last_page_len"),
        };
        super::positive(letters, &["D"])?;
        super::group(letters)?;
        indices::indptr("in.qo_indptr", &inputs.qo_indptr, letters.get("T"), "the queries")?;
        indices::indptr("in.kv_indptr", &inputs.kv_indptr, letters.get("N"), "the entries of in.kv_indices")?;
        indices::within("in.kv_indices", &inputs.kv_indices, 0, letters.get("P") as i64)?;
        for (row, &len) in inputs.kv_last_page_len.iter().enumerate() {
            let pages = inputs.kv_indptr[row + 1] - inputs.kv_indptr[row];
            let allowed = if pages == 0 { 0..=0 } else { 1..=letters.get("S") as i64 };
            if !allowed.contains(&i64::from(len)) {
                bail!(
                    "in.kv_last_page_len[{row}] = {len}: must be in {allowed:?} for a row of {pages} pages"
                );
            }
        }
        Ok(inputs)
    }
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let (letters, q, kv) = (&case.letters, case.elements::<E>("in.q"), case.elements::<E>("in.kv"));
    let attended = reference::paged(&Paged {
        q: &q,
        cache: Cache::Combined(&kv),
        qo_indptr: &inputs.qo_indptr,
        kv_indptr: &inputs.kv_indptr,
        kv_indices: &inputs.kv_indices,
        kv_last_page_len: &inputs.kv_last_page_len,
        num_qo_heads: letters.get("H"),
        num_kv_heads: letters.get("G"),
        head_dim_qk: letters.get("D"),
        head_dim_vo: letters.get("D"),
        page_size: letters.get("S"),
        sm_scale: inputs.sm_scale,
        causal: inputs.causal,
        options: Options {
            window_left: inputs.window_left,
            logits_soft_cap: inputs.logits_soft_cap,
            sinks: inputs.sinks.as_deref(),
            ..Options::default()
        },
    })?;
    Ok(super::attended(case, &attended))
}

#[cfg(feature = "paged")]
mod fast;
#[cfg(feature = "paged")]
pub(super) use fast::fast;

/// Refuses: the backend was not compiled in.
#[cfg(not(feature = "paged"))]
pub(super) fn fast(case: &Case) -> Result<Outputs, super::NotRun> {
    Err(super::NotRun::Unsupported(super::not_compiled(case.op)))
}
