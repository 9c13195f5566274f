//! A case through the wrapper level of sparse attention.

use half::{bf16, f16};
use mstar_dsa::{Buffer, DType, Geometry, SparseParams};
use mstar_kernels::dsa::{DeviceTable, Table, sparse_attend_at, sparse_workspace_bytes_on};

use super::{Case, Inputs};
use crate::parity::ops::unwritten::{Attended, Unwritten, outputs};
use crate::parity::ops::{NotRun, Outputs};
use crate::parity::place::Place;

/// Runs a case; its lse in the case's base.
pub(in crate::parity::ops) fn fast(case: &Case, place: &Place) -> Result<Outputs, NotRun> {
    outputs(case, place, run_case::<f32>, run_case::<bf16>, run_case::<f16>)
}

fn run_case<E: Unwritten>(case: &Case, place: &Place) -> Attended {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let [t, h, c, e, s, p, k] = ["T", "H", "C", "E", "S", "P", "K"].map(|letter| case.letters.get(letter));
    let q_nope = place.put(&case.elements::<E>("in.q_nope"), &[t, h, c])?;
    let q_pe = place.put(&case.elements::<E>("in.q_pe"), &[t, h, e])?;
    let latent = place.put(&case.elements::<E>("in.latent"), &[p, s, c + e])?;
    let selection = place.put(&inputs.selection, &[t, k])?;
    let geometry = Geometry {
        num_qo_heads: h,
        kv_lora_rank: c,
        qk_rope_head_dim: e,
        page_size: s,
        q_dtype: E::DTYPE,
        kv_dtype: E::DTYPE,
    };
    // The format does not say how many positions a request has: its pages hold them.
    let kv_lens: Vec<i32> = inputs
        .kv_indptr
        .windows(2)
        .zip(&*inputs.page_start)
        .map(|(pair, &start)| {
            let slots = i64::from(pair[1] - pair[0]).saturating_mul(s as i64) - i64::from(start);
            slots.clamp(0, i32::MAX.into()) as i32
        })
        .collect();
    let workers = rayon::current_num_threads();
    let (stream, device) = (place.stream(), place.device());
    let mut on = DeviceTable::with_capacity(&stream, t, kv_lens.len(), inputs.kv_indices.len(), 0)?;
    on.set(
        &stream,
        &Table {
            row_request: &inputs.row_request,
            positions: &vec![-1; t],
            kv_indptr: &inputs.kv_indptr,
            kv_indices: &inputs.kv_indices,
            page_start: &inputs.page_start,
            kv_lens: &kv_lens,
        },
    )?;
    let bytes = sparse_workspace_bytes_on(device, &geometry, t, k, workers);
    let mut workspace = Buffer::zeroed_on(device, bytes)?;
    let (mut o, mut lse) = (place.filled(E::UNWRITTEN, &[t, h, c])?, place.filled(f32::NAN, &[t, h])?);
    let params = SparseParams {
        geometry,
        sm_scale: inputs.sm_scale as f32,
        q_nope: q_nope.view()?,
        q_pe: q_pe.view()?,
        latent: latent.view()?,
        selection: selection.view()?,
        row_request: &inputs.row_request,
        kv_indptr: &inputs.kv_indptr,
        kv_indices: &inputs.kv_indices,
        page_start: &inputs.page_start,
        kv_lens: &kv_lens,
        o: o.view_mut()?,
        lse: Some(lse.view_mut()?),
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
        workers,
    };
    sparse_attend_at(&stream, &on, params)?;
    let o = place.take(&o, E::UNWRITTEN)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), place.take(&lse, f32::NAN)?))
}
