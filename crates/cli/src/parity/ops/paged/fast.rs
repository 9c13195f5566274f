//! A case through the wrapper level of the paged backend: plan once, run once.

use half::{bf16, f16};
use mstar_attn_paged::{
    Geometry, Inputs as Tensors, Mask, MaskEntries, Outputs as Into, PageTable, Plan, PlanOptions, Variant,
    Workspace, run,
};
use mstar_kernels::TensorRef;

use super::{Case, Inputs};
use crate::parity::ops::unwritten::{Attended, Unwritten, outputs};
use crate::parity::ops::{NotRun, Outputs};
use crate::parity::place::Place;

/// A batch on borrowed memory: tensors on the place, the rest on the host.
pub(super) struct Batch<'a> {
    pub(super) geometry: Geometry,
    pub(super) variant: Variant,
    pub(super) table: PageTable<'a>,
    pub(super) q: TensorRef<'a>,
    pub(super) k: TensorRef<'a>,
    pub(super) v: TensorRef<'a>,
    pub(super) sinks: Option<&'a [f32]>,
    pub(super) alibi_slopes: Option<&'a [f32]>,
}

/// Runs a case; its lse in the case's base.
pub(in crate::parity::ops) fn fast(case: &Case, place: &Place) -> Result<Outputs, NotRun> {
    outputs(case, place, run_case::<f32>, run_case::<bf16>, run_case::<f16>)
}

fn run_case<E: Unwritten>(case: &Case, place: &Place) -> Attended {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let [h, g, d, s] = ["H", "G", "D", "S"].map(|letter| letters.get(letter));
    let q = place.put(&case.elements::<E>("in.q"), &[letters.get("T"), h, d])?;
    let kv = place.put(&case.elements::<E>("in.kv"), &[letters.get("P"), 2, s, g, d])?;
    let kv = kv.view()?;
    let batch = Batch {
        geometry: Geometry {
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: d,
            page_size: s,
            q_dtype: E::DTYPE,
            kv_dtype: E::DTYPE,
        },
        variant: Variant {
            sm_scale: inputs.sm_scale as f32,
            causal: inputs.causal,
            window_left: usize::try_from(inputs.window_left).ok(),
            logits_soft_cap: (inputs.logits_soft_cap > 0.0).then_some(inputs.logits_soft_cap as f32),
            alibi: inputs.alibi_slopes.is_some(),
            sinks: inputs.sinks.is_some(),
        },
        table: PageTable {
            qo_indptr: &inputs.qo_indptr,
            kv_indptr: &inputs.kv_indptr,
            kv_indices: &inputs.kv_indices,
            kv_last_page_len: &inputs.kv_last_page_len,
            mask: inputs
                .mask
                .as_ref()
                .map(|mask| Mask { entries: MaskEntries::Bytes(&mask.entries), indptr: &mask.indptr }),
            num_pages: letters.get("P"),
            ..PageTable::default()
        },
        q: q.view()?,
        k: kv.select(1, 0)?,
        v: kv.select(1, 1)?,
        sinks: inputs.sinks.as_deref(),
        alibi_slopes: inputs.alibi_slopes.as_deref(),
    };
    attend::<E>(&batch, place)
}

/// Plans and runs a batch: `o` `[T, H, Dv]` as f32, `lse` `[T, H]`.
pub(super) fn attend<E: Unwritten>(batch: &Batch<'_>, place: &Place) -> Attended {
    let (tokens, heads) = (batch.q.shape()[0], batch.geometry.num_qo_heads);
    let width = batch.geometry.head_dim_vo;
    let options = PlanOptions { device: place.device(), ..PlanOptions::default() };
    let mut plan = Plan::new(&batch.geometry, &batch.variant, &batch.table, &options)?;
    plan.stage(&place.stream())?;
    let mut workspace = Workspace::on(place.device(), plan.workspace_bytes())?;
    let mut o = place.filled(E::UNWRITTEN, &[tokens, heads, width])?;
    let mut lse = place.filled(f32::NAN, &[tokens, heads])?;
    let per_head = |values: Option<&[f32]>| values.map(|values| place.put(values, &[heads])).transpose();
    let (sinks, slopes) = (per_head(batch.sinks)?, per_head(batch.alibi_slopes)?);
    let tensors = Tensors {
        q: batch.q,
        k: batch.k,
        v: batch.v,
        sinks: sinks.as_ref().map(|sinks| sinks.view()).transpose()?,
        alibi_slopes: slopes.as_ref().map(|slopes| slopes.view()).transpose()?,
    };
    let into = Into { o: o.view_mut()?, lse: Some(lse.view_mut()?) };
    run(&plan, &place.stream(), &mut workspace, tensors, into)?;
    let o = place.take(&o, E::UNWRITTEN)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), place.take(&lse, f32::NAN)?))
}

#[cfg(test)]
mod tests;
