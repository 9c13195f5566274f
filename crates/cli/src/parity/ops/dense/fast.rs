//! A case through the wrapper level of the dense backend: the keys that a row's queries did not bring are its prefix, in
//! a segment of their own.

use half::{bf16, f16};
use mstar_attn_dense::{
    DensePlan, Geometry, Inputs as Tensors, Outputs as Into, PlanOptions, Prefix, Table, Variant, Workspace,
    run,
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
    let [t, h, g, d] = ["T", "H", "G", "D"].map(|letter| letters.get(letter));
    let rows = Segments::of(&inputs.cu_q, &inputs.cu_k);
    let geometry = Geometry {
        num_qo_heads: h,
        num_kv_heads: g,
        head_dim_qk: d,
        head_dim_vo: d,
        q_dtype: E::DTYPE,
        kv_dtype: E::DTYPE,
    };
    let variant = Variant { sm_scale: inputs.sm_scale as f32, causal: inputs.causal, ..Variant::causal(d) };
    let table =
        Table { cu_q: &inputs.cu_q, prefix: Prefix::Packed { cu_p: &rows.cu_p }, cu_k: &rows.cu_fresh };
    let options = PlanOptions { device: place.device(), ..PlanOptions::default() };
    let mut plan = DensePlan::new(&geometry, &variant, &table, &options)?;
    plan.stage(&place.stream())?;
    let mut workspace = Workspace::on(place.device(), plan.workspace_bytes())?;
    let q = place.put(&case.elements::<E>("in.q"), &[t, h, d])?;
    let [(k_prefix, k), (v_prefix, v)] =
        ["in.k", "in.v"].map(|name| rows.split(&case.elements::<E>(name), g * d));
    let [prefix, fresh] = [&rows.cu_p, &rows.cu_fresh].map(|cu| [cu[cu.len() - 1] as usize, g, d]);
    let [k_prefix, v_prefix] = [place.put(&k_prefix, &prefix)?, place.put(&v_prefix, &prefix)?];
    let [k, v] = [place.put(&k, &fresh)?, place.put(&v, &fresh)?];
    let (mut o, mut lse) = (place.filled(E::UNWRITTEN, &[t, h, d])?, place.filled(f32::NAN, &[t, h])?);
    let tensors = Tensors {
        q: q.view()?,
        k_prefix: Some(k_prefix.view()?),
        v_prefix: Some(v_prefix.view()?),
        k: k.view()?,
        v: v.view()?,
    };
    let into = Into { o: o.view_mut()?, lse: Some(lse.view_mut()?) };
    run(&plan, &place.stream(), &mut workspace, tensors, into)?;
    let o = place.take(&o, E::UNWRITTEN)?;
    Ok((o.iter().map(|x| x.to_f64() as f32).collect(), place.take(&lse, f32::NAN)?))
}

/// Where each row's prefix and fresh keys lie once they are apart.
struct Segments<'a> {
    cu_k: &'a [i32],
    cu_p: Vec<i32>,
    cu_fresh: Vec<i32>,
}

impl<'a> Segments<'a> {
    /// A row's last keys, one for each of its queries, are fresh; those before them its prefix.
    fn of(cu_q: &[i32], cu_k: &'a [i32]) -> Segments<'a> {
        let mut rows = Segments { cu_k, cu_p: vec![0], cu_fresh: vec![0] };
        for row in 0..cu_q.len() - 1 {
            let (queries, keys) = (cu_q[row + 1] - cu_q[row], cu_k[row + 1] - cu_k[row]);
            let prefix = (keys - queries).max(0);
            rows.cu_p.push(rows.cu_p[row] + prefix);
            rows.cu_fresh.push(rows.cu_fresh[row] + keys - prefix);
        }
        rows
    }

    /// Packed keys or values as prefixes and fresh ones, each packed.
    fn split<E: Copy>(&self, packed: &[E], width: usize) -> (Vec<E>, Vec<E>) {
        let (mut prefix, mut fresh) = (Vec::new(), Vec::new());
        for (row, prefixed) in self.cu_p.windows(2).enumerate() {
            let (begin, end) = (self.cu_k[row] as usize, self.cu_k[row + 1] as usize);
            let cut = begin + (prefixed[1] - prefixed[0]) as usize;
            prefix.extend_from_slice(&packed[begin * width..cut * width]);
            fresh.extend_from_slice(&packed[cut * width..end * width]);
        }
        (prefix, fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_cut_before_its_queries_own_keys() {
        let rows = Segments::of(&[0, 2, 5, 5], &[0, 4, 6, 8]);
        assert_eq!((&rows.cu_p[..], &rows.cu_fresh[..]), (&[0, 2, 2, 4][..], &[0, 2, 4, 4][..]));
        let packed: Vec<i32> = (0..8).collect();
        assert_eq!(rows.split(&packed, 1), (vec![0, 1, 6, 7], vec![2, 3, 4, 5]));
    }
}
