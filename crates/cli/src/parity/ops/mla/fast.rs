//! A case through the wrapper level of the mla backend: plan once, run once.

use half::{bf16, f16};
use mstar_attn_mla::{
    Geometry, Inputs as Tensors, Outputs as Into, PageTable, Plan, PlanOptions, Variant, Workspace, run,
};
use mstar_kernels::{Stream, TensorMut, TensorRef};

use super::{Case, Inputs};
use crate::parity::ops::unwritten::{Attended, Unwritten, outputs};
use crate::parity::ops::{NotRun, Outputs};

/// Runs a case; its lse in the case's base.
pub(in crate::parity::ops) fn fast(case: &Case) -> Result<Outputs, NotRun> {
    outputs(case, run_case::<f32>, run_case::<bf16>, run_case::<f16>)
}

fn run_case<E: Unwritten>(case: &Case) -> Attended {
    let inputs = Inputs::new(case).expect("checked when the case was read");
    let letters = &case.letters;
    let [t, h, c, e, p, s] = ["T", "H", "C", "E", "P", "S"].map(|letter| letters.get(letter));
    let pages = Pages::of(&inputs, s);
    let geometry = Geometry {
        num_qo_heads: h,
        kv_lora_rank: c,
        qk_rope_head_dim: e,
        page_size: s,
        q_dtype: E::DTYPE,
        kv_dtype: E::DTYPE,
    };
    let variant = Variant { sm_scale: inputs.sm_scale as f32, causal: inputs.causal };
    let table = PageTable {
        qo_indptr: &inputs.qo_indptr,
        kv_indptr: &pages.kv_indptr,
        kv_indices: &pages.kv_indices,
        kv_last_page_len: &pages.kv_last_page_len,
        num_pages: p,
        ..PageTable::default()
    };
    let plan = Plan::new(&geometry, &variant, &table, &PlanOptions::default())?;
    let mut workspace = Workspace::for_plan(&plan)?;
    let (q_nope, q_pe) = (case.elements::<E>("in.q_nope"), case.elements::<E>("in.q_pe"));
    let latent = case.elements::<E>("in.latent");
    let (mut o, mut lse) = (vec![E::UNWRITTEN; t * h * c], vec![f32::NAN; t * h]);
    let tensors = Tensors {
        q_nope: TensorRef::from_slice(&q_nope, &[t, h, c])?,
        q_pe: TensorRef::from_slice(&q_pe, &[t, h, e])?,
        latent: TensorRef::from_slice(&latent, &[p, s, c + e])?,
    };
    let into = Into {
        o: TensorMut::from_slice(&mut o, &[t, h, c])?,
        lse: Some(TensorMut::from_slice(&mut lse, &[t, h])?),
    };
    run(&plan, &Stream::cpu(), &mut workspace, tensors, into)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), lse))
}

/// The pages that each row's `kv_len` fills; a case may list more.
struct Pages {
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
}

impl Pages {
    fn of(inputs: &Inputs<'_>, page_size: usize) -> Pages {
        let mut pages = Pages { kv_indptr: vec![0], kv_indices: Vec::new(), kv_last_page_len: Vec::new() };
        for (&len, &begin) in inputs.kv_len.iter().zip(inputs.kv_indptr.iter()) {
            let (len, begin) = (len as usize, begin as usize);
            let used = len.div_ceil(page_size);
            pages.kv_indices.extend_from_slice(&inputs.kv_indices[begin..begin + used]);
            pages.kv_indptr.push(pages.kv_indices.len() as i32);
            pages.kv_last_page_len.push((len - used.saturating_sub(1) * page_size) as i32);
        }
        pages
    }
}
