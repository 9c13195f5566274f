//! One dense varlen pass: packed rows over packed keys, each row's keys being `[prefix | fresh]`.

use super::{Attended, Real, arrays, dot, softmax};
use crate::Result;

/// Everything that [`dense`] reads. `T` packed queries, `U` packed keys, `R` rows.
#[derive(Clone, Copy, Debug)]
pub struct Dense<'a, Q, E> {
    /// `[T, H, D]`.
    pub q: &'a [Q],
    /// `[U, G, D]`.
    pub k: &'a [E],
    /// `[U, G, Dv]`.
    pub v: &'a [E],
    /// `[R + 1]`: where each row's queries start.
    pub cu_q: &'a [i32],
    /// `[R + 1]`: where each row's keys start.
    pub cu_k: &'a [i32],
    /// `H`.
    pub num_qo_heads: usize,
    /// `G`, a divisor of `H`.
    pub num_kv_heads: usize,
    /// `D`.
    pub head_dim_qk: usize,
    /// `Dv`.
    pub head_dim_vo: usize,
    /// Factor on `q.k`.
    pub sm_scale: f64,
    /// Query `i` of a row sits at position `kv_len - q_len + i` and sees no later key.
    pub causal: bool,
}

/// `o` `[T, H, Dv]` and `lse` `[T, H]` of `softmax(sm_scale * q k^T) v`, row by row.
///
/// # Errors
/// An array of another length than the shapes say, an indptr out of order, heads that do not divide.
pub fn dense<Q: Real, E: Real>(p: &Dense<'_, Q, E>) -> Result<Attended> {
    let (h_q, g, d, dv) = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.head_dim_vo);
    let group = arrays::heads(h_q, g)?;
    let tokens = arrays::outer("q", p.q, &[h_q, d])?;
    let keys = arrays::outer("k", p.k, &[g, d])?;
    arrays::length("v", p.v, &[keys, g, dv])?;
    arrays::product("o", &[tokens, h_q, dv.max(1)])?;
    arrays::finite("sm_scale", p.sm_scale)?;
    let queries = arrays::ranges("cu_q", p.cu_q, tokens)?;
    let spans = arrays::ranges("cu_k", p.cu_k, keys)?;
    arrays::length("cu_k", &spans, &[queries.len()])?;

    let mut out = Attended { o: vec![0.0; tokens * h_q * dv], lse: vec![f64::NEG_INFINITY; tokens * h_q] };
    for (queries, span) in queries.into_iter().zip(spans) {
        for t in queries.clone() {
            // Keys up to the query's own position, counted from the row's last key back.
            let later = if p.causal { queries.end - 1 - t } else { 0 };
            let seen = span.start..span.end.saturating_sub(later).max(span.start);
            for h in 0..h_q {
                let query = &p.q[(t * h_q + h) * d..][..d];
                let at = |u: usize, width: usize| (u * g + h / group) * width;
                let scores: Vec<f64> =
                    seen.clone().map(|u| p.sm_scale * dot(query, &p.k[at(u, d)..][..d])).collect();
                let o = &mut out.o[(t * h_q + h) * dv..][..dv];
                out.lse[t * h_q + h] = softmax::attend(&scores, None, o, |key, lane| {
                    p.v[at(seen.start + key, dv) + lane].to_f64()
                });
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(cu_q: &[i32], cu_k: &[i32], causal: bool) -> Attended {
        let (t, u) = (*cu_q.last().unwrap() as usize, *cu_k.last().unwrap() as usize);
        let v: Vec<f32> = (0..u).map(|j| j as f32).collect();
        dense(&Dense {
            q: &vec![1f32; t],
            k: &vec![0f32; u],
            v: &v,
            cu_q,
            cu_k,
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 1,
            head_dim_vo: 1,
            sm_scale: 1.0,
            causal,
        })
        .unwrap()
    }

    #[test]
    fn f05_zero_length_rows_inside_a_batch() {
        let out = rows(&[0, 2, 2, 5], &[0, 3, 7, 7], false);
        assert!(out.o[..2].iter().all(|o| (o - 1.0).abs() < 1e-15));
        assert_eq!(out.o[2..], [0.0; 3]);
        assert_eq!(out.lse[2..], [f64::NEG_INFINITY; 3]);
        assert!(rows(&[0], &[0], true).o.is_empty());
        assert!(rows(&[0, 0], &[0, 4], true).o.is_empty());
    }

    #[test]
    fn f06_causal_is_aligned_to_the_newest_key() {
        let out = rows(&[0, 2], &[0, 5], true);
        assert!((out.o[0] - 1.5).abs() < 1e-15 && (out.o[1] - 2.0).abs() < 1e-15);
        assert!((out.lse[0] - 4f64.ln()).abs() < 1e-15 && (out.lse[1] - 5f64.ln()).abs() < 1e-15);
        assert_eq!(rows(&[0, 3], &[0, 3], true).o, [0.0, 0.5, 1.0]);
        assert_eq!(rows(&[0, 3], &[0, 1], true).lse, [f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0]);
    }

    #[test]
    fn hostile_indptrs_are_errors() {
        for cu_q in [&[][..], &[1, 2], &[0, 3, 2], &[0, 1], &[0, -1]] {
            let p = Dense {
                q: &[0f32; 2],
                k: &[0f32; 2],
                v: &[0f32; 2],
                cu_q,
                cu_k: &[0, 2],
                num_qo_heads: 1,
                num_kv_heads: 1,
                head_dim_qk: 1,
                head_dim_vo: 1,
                sm_scale: 1.0,
                causal: false,
            };
            assert!(dense(&p).is_err(), "{cu_q:?}");
        }
    }
}
