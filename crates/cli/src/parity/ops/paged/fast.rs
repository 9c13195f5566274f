//! A case through the wrapper level of the paged backend: plan once, run once.

use half::{bf16, f16};
use mstar_attn_paged::{
    Geometry, Inputs as Tensors, Mask, MaskEntries, Outputs as Into, PageTable, Plan, PlanOptions, Variant,
    Workspace, run,
};
use mstar_kernels::{Stream, TensorMut, TensorRef};

use super::{Case, Inputs};
use crate::parity::ops::unwritten::{Attended, Unwritten, outputs};
use crate::parity::ops::{NotRun, Outputs};

/// A batch on borrowed memory.
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
pub(in crate::parity::ops) fn fast(case: &Case) -> Result<Outputs, NotRun> {
    outputs(case, run_case::<f32>, run_case::<bf16>, run_case::<f16>)
}

fn run_case<E: Unwritten>(case: &Case) -> Attended {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let [h, g, d, s] = ["H", "G", "D", "S"].map(|letter| letters.get(letter));
    let (q, kv) = (case.elements::<E>("in.q"), case.elements::<E>("in.kv"));
    let kv = TensorRef::from_slice(&kv, &[letters.get("P"), 2, s, g, d])?;
    attend::<E>(&Batch {
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
        q: TensorRef::from_slice(&q, &[letters.get("T"), h, d])?,
        k: kv.select(1, 0)?,
        v: kv.select(1, 1)?,
        sinks: inputs.sinks.as_deref(),
        alibi_slopes: inputs.alibi_slopes.as_deref(),
    })
}

/// Plans and runs a batch: `o` `[T, H, Dv]` as f32, `lse` `[T, H]`.
pub(super) fn attend<E: Unwritten>(batch: &Batch<'_>) -> Attended {
    let (tokens, heads) = (batch.q.shape()[0], batch.geometry.num_qo_heads);
    let width = batch.geometry.head_dim_vo;
    let plan = Plan::new(&batch.geometry, &batch.variant, &batch.table, &PlanOptions::default())?;
    let mut workspace = Workspace::for_plan(&plan)?;
    let mut o = vec![E::UNWRITTEN; tokens * heads * width];
    let mut lse = vec![f32::NAN; tokens * heads];
    let tensors = Tensors {
        q: batch.q,
        k: batch.k,
        v: batch.v,
        sinks: batch.sinks.map(|sinks| TensorRef::from_slice(sinks, &[heads])).transpose()?,
        alibi_slopes: batch.alibi_slopes.map(|slopes| TensorRef::from_slice(slopes, &[heads])).transpose()?,
    };
    let into = Into {
        o: TensorMut::from_slice(&mut o, &[tokens, heads, width])?,
        lse: Some(TensorMut::from_slice(&mut lse, &[tokens, heads])?),
    };
    run(&plan, &Stream::cpu(), &mut workspace, tensors, into)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), lse))
}

#[cfg(test)]
mod tests;
