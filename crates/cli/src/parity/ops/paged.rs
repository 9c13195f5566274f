//! `paged` and `cross`: rows over pages of keys and values.
//!
//! Beside what recorded cases hold, two inputs are read where a case has them (`tools/make_cases.py` writes such):
//! `in.alibi_slopes` `[H]`, by which `slope * (key position - query position)` is added to the capped score, and `in.mask`,
//! row after row `[q_len, kv_len]` of bytes, where 0 hides a key that causality and the window leave.

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
    Tensor { name: "in.alibi_slopes", want: Want::F32, dims: "H", optional: true },
    Tensor { name: "in.mask", want: Want::U8, dims: "M", optional: true },
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
    pub(super) alibi_slopes: Option<Cow<'a, [f32]>>,
    pub(super) mask: Option<RowMasks<'a>>,
    pub(super) qo_indptr: Cow<'a, [i32]>,
    pub(super) kv_indptr: Cow<'a, [i32]>,
    pub(super) kv_indices: Cow<'a, [i32]>,
    pub(super) kv_last_page_len: Cow<'a, [i32]>,
}

/// `in.mask`, and where each row's entries start.
pub(super) struct RowMasks<'a> {
    pub(super) entries: Cow<'a, [u8]>,
    pub(super) indptr: Vec<i64>,
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
        let mut inputs = Inputs {
            sm_scale: params.number("sm_scale")?,
            causal,
            window_left,
            logits_soft_cap,
            sinks: case.has("in.sinks").then(|| case.elements("in.sinks")),
            alibi_slopes: case.has("in.alibi_slopes").then(|| case.elements("in.alibi_slopes")),
            mask: None,
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
        if case.has("in.mask") {
            inputs.mask = Some(inputs.row_masks(case.elements("in.mask"), letters.get("S"))?);
        }
        Ok(inputs)
    }

    /// Holds the mask's entries against the rows, which were checked.
    fn row_masks(&self, entries: Cow<'a, [u8]>, page_size: usize) -> Result<RowMasks<'a>> {
        let mut indptr = vec![0i64];
        for row in 0..self.kv_last_page_len.len() {
            let q_len = i64::from(self.qo_indptr[row + 1] - self.qo_indptr[row]);
            let pages = i64::from(self.kv_indptr[row + 1] - self.kv_indptr[row]);
            let kv_len = (pages - 1).max(0) * page_size as i64 + i64::from(self.kv_last_page_len[row]);
            indptr.push(q_len.saturating_mul(kv_len).saturating_add(indptr[row]));
        }
        let expected = indptr.last().copied().unwrap_or(0);
        if entries.len() as i64 != expected {
            bail!("in.mask has {} entries, the rows' q_len x kv_len are {expected}", entries.len());
        }
        Ok(RowMasks { entries, indptr })
    }
}

pub(super) fn reference<E: Element + reference::Real>(case: &Case) -> mstar_kernels::Result<Outputs> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let (letters, q, kv) = (&case.letters, case.elements::<E>("in.q"), case.elements::<E>("in.kv"));
    let seen: Option<Vec<bool>> =
        inputs.mask.as_ref().map(|mask| mask.entries.iter().map(|&entry| entry != 0).collect());
    let of_row = |run: &[i64]| seen.as_ref().map(|seen| &seen[run[0] as usize..run[1] as usize]);
    let masks: Vec<Option<&[bool]>> =
        inputs.mask.as_ref().map_or(Vec::new(), |mask| mask.indptr.windows(2).map(of_row).collect());
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
            alibi_slopes: inputs.alibi_slopes.as_deref(),
            masks: &masks,
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
pub(super) fn fast(case: &Case, _place: &super::Place) -> Result<Outputs, super::NotRun> {
    Err(super::NotRun::Unsupported(super::not_compiled(case.op)))
}
