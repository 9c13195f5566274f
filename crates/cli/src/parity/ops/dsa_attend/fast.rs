//! A case through the wrapper level of sparse attention.

use half::{bf16, f16};
use mstar_dsa::{
    Buffer, DType, Geometry, SparseParams, Stream, TensorMut, TensorRef, sparse_attend,
    sparse_workspace_bytes,
};
use mstar_kernels::Element;
use mstar_kernels::reference::Real;

use super::{Case, Inputs};
use crate::parity::ops::{Computed, NotRun, Outputs, lse_in_base_2};

/// Runs a case; its lse in the case's base.
pub(in crate::parity::ops) fn fast(case: &Case) -> Result<Outputs, NotRun> {
    let result = match case.dtype {
        DType::Bf16 => run_case::<bf16>(case),
        DType::F16 => run_case::<f16>(case),
        _ => run_case::<f32>(case),
    };
    let (o, mut lse) = result.map_err(|error| NotRun::Failed(error.to_string()))?;
    if lse_in_base_2(&case.params).expect("checked when the case was read") {
        lse.iter_mut().for_each(|lse| *lse = mstar_kernels::lse::base2_from_natural(*lse));
    }
    Ok(Outputs::from([("out.o", Computed::Floats(o)), ("out.lse", Computed::Floats(lse))]))
}

fn run_case<E: Element + Real>(case: &Case) -> mstar_dsa::Result<(Vec<f32>, Vec<f32>)> {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let [t, h, c, e, s, p, k] = ["T", "H", "C", "E", "S", "P", "K"].map(|letter| case.letters.get(letter));
    let (q_nope, q_pe) = (case.elements::<E>("in.q_nope"), case.elements::<E>("in.q_pe"));
    let latent = case.elements::<E>("in.latent");
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
        .map(|(pair, &start)| ((pair[1] - pair[0]) * s as i32 - start).max(0))
        .collect();
    let workers = rayon::current_num_threads();
    let bytes = sparse_workspace_bytes(&geometry, k, workers);
    let mut workspace = Buffer::zeroed(bytes)?;
    let mut o = Buffer::for_tensor(E::DTYPE, &[t, h, c])?;
    let written = o.len();
    // All bits set is a NaN of each float type, so that an entry left unwritten fails the gate.
    o.tensor_mut(0, DType::U8, &[written])?.as_mut_slice::<u8>().expect("bytes on the CPU").fill(0xff);
    let mut lse = vec![f32::NAN; t * h];
    let params = SparseParams {
        geometry,
        sm_scale: inputs.sm_scale as f32,
        q_nope: TensorRef::from_slice(&q_nope, &[t, h, c])?,
        q_pe: TensorRef::from_slice(&q_pe, &[t, h, e])?,
        latent: TensorRef::from_slice(&latent, &[p, s, c + e])?,
        selection: TensorRef::from_slice(&inputs.selection, &[t, k])?,
        row_request: &inputs.row_request,
        kv_indptr: &inputs.kv_indptr,
        kv_indices: &inputs.kv_indices,
        page_start: &inputs.page_start,
        kv_lens: &kv_lens,
        o: o.tensor_mut(0, E::DTYPE, &[t, h, c])?,
        lse: Some(TensorMut::from_slice(&mut lse, &[t, h])?),
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
        workers,
    };
    sparse_attend(&Stream::cpu(), params)?;
    let o = o.tensor(0, E::DTYPE, &[t * h * c])?;
    let o = o.as_slice::<E>().expect("contiguous on the CPU");
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), lse))
}
