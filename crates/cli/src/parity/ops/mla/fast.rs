//! A case through the wrapper level of the mla backend: plan once, run once.

use half::{bf16, f16};
use mstar_attn_mla::{
    Geometry, Inputs as Tensors, Outputs as Into, PageTable, Plan, PlanOptions, Variant, Workspace, run,
};

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
    let options = PlanOptions { device: place.device(), ..PlanOptions::default() };
    let mut plan = Plan::new(&geometry, &variant, &table, &options)?;
    plan.stage(&place.stream())?;
    let mut workspace = Workspace::on(place.device(), plan.workspace_bytes())?;
    let q_nope = place.put(&case.elements::<E>("in.q_nope"), &[t, h, c])?;
    let q_pe = place.put(&case.elements::<E>("in.q_pe"), &[t, h, e])?;
    let latent = place.put(&case.elements::<E>("in.latent"), &[p, s, c + e])?;
    let (mut o, mut lse) = (place.filled(E::UNWRITTEN, &[t, h, c])?, place.filled(f32::NAN, &[t, h])?);
    let tensors = Tensors { q_nope: q_nope.view()?, q_pe: q_pe.view()?, latent: latent.view()? };
    let into = Into { o: o.view_mut()?, lse: Some(lse.view_mut()?) };
    run(&plan, &place.stream(), &mut workspace, tensors, into)?;
    let o = place.take(&o, E::UNWRITTEN)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), place.take(&lse, f32::NAN)?))
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
