//! Absorbed attention over the latents that each query picked.

use super::latents::Latents;
use super::{Attended, Real, arrays};
use crate::{Error, Result};

/// Everything that [`dsa_attend`] reads. `T` query rows, `R` requests, `P` pages of `S` tokens.
#[derive(Clone, Copy, Debug)]
pub struct DsaAttend<'a, Q, E> {
    /// `[T, H, C]`.
    pub q_nope: &'a [Q],
    /// `[T, H, E]`.
    pub q_pe: &'a [Q],
    /// `[P, S, C + E]`.
    pub latent: &'a [E],
    /// `[T, K]`: positions of the row's request, in any order; -1 anywhere picks nothing.
    pub selection: &'a [i32],
    /// `[R + 1]`: where each request's pages start in `kv_indices`.
    pub kv_indptr: &'a [i32],
    /// Page ids, request after request.
    pub kv_indices: &'a [i32],
    /// `[T]`: whose pages each row reads; in any order.
    pub row_request: &'a [i32],
    /// `[R]`: slot of position 0 in the request's first page.
    pub page_start: &'a [i32],
    /// `H`.
    pub num_qo_heads: usize,
    /// `C`.
    pub kv_lora_rank: usize,
    /// `E`; may be 0.
    pub qk_rope_head_dim: usize,
    /// `S`.
    pub page_size: usize,
    /// Factor on the score.
    pub sm_scale: f64,
}

/// `o` `[T, H, C]` and `lse` `[T, H]`, as [`mla`](super::mla()) over the picked positions alone. A position
/// named twice counts twice.
///
/// # Errors
/// An array of another length than the shapes say, a request, page or position that is not there.
pub fn dsa_attend<Q: Real, E: Real>(p: &DsaAttend<'_, Q, E>) -> Result<Attended> {
    let latents = Latents {
        q_nope: p.q_nope,
        q_pe: p.q_pe,
        latent: p.latent,
        kv_indptr: p.kv_indptr,
        kv_indices: p.kv_indices,
        num_qo_heads: p.num_qo_heads,
        kv_lora_rank: p.kv_lora_rank,
        qk_rope_head_dim: p.qk_rope_head_dim,
        page_size: p.page_size,
        sm_scale: p.sm_scale,
    };
    let (tokens, tables) = latents.check()?;
    let topk = p.selection.len().checked_div(tokens).unwrap_or(0);
    arrays::length("selection", p.selection, &[tokens, topk])?;
    arrays::length("row_request", p.row_request, &[tokens])?;
    arrays::indices("row_request", p.row_request, tables.len())?;
    arrays::length("page_start", p.page_start, &[tables.len()])?;
    arrays::indices("page_start", p.page_start, p.page_size)?;

    let s = p.page_size;
    let mut out = latents.nothing(tokens);
    for t in 0..tokens {
        let request = p.row_request[t] as usize;
        let table = tables[request];
        let start = p.page_start[request] as usize;
        let mut slots = Vec::new();
        for (n, &position) in p.selection[t * topk..][..topk].iter().enumerate() {
            if position == -1 {
                continue;
            }
            let offset = usize::try_from(position).ok().map(|position| start + position);
            let Some(offset) = offset.filter(|&offset| offset / s < table.len()) else {
                let why = format!("request {request} has {} pages of {s}; -1 picks nothing", table.len());
                let (index, got) = (t * topk + n, i64::from(position));
                return Err(Error::Index { array: "selection", index, got, why });
            };
            slots.push((table[offset / s] as usize, offset % s));
        }
        latents.attend_token(t, &slots, &mut out);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picked(selection: &[i32], page_start: i32) -> Result<Attended> {
        let mut latent = [f32::NAN; 6];
        latent[2..6].copy_from_slice(&[3.0, 4.0, 1.0, 2.0]);
        dsa_attend(&DsaAttend {
            q_nope: &[0f32],
            q_pe: &[],
            latent: &latent,
            selection,
            kv_indptr: &[0, 2],
            kv_indices: &[2, 1],
            row_request: &[0],
            page_start: &[page_start],
            num_qo_heads: 1,
            kv_lora_rank: 1,
            qk_rope_head_dim: 0,
            page_size: 2,
            sm_scale: 1.0,
        })
    }

    #[test]
    fn positions_count_from_the_first_kept_token() {
        assert_eq!(picked(&[-1, 0, -1], 0).unwrap().o, [1.0]);
        assert_eq!(picked(&[-1, 0, -1], 1).unwrap().o, [2.0]);
        assert_eq!(picked(&[2, 0], 1).unwrap().o, [3.0]);
    }

    #[test]
    fn f23_an_empty_pick_attends_to_nothing() {
        let out = picked(&[-1, -1], 0).unwrap();
        assert_eq!((out.o, out.lse), (vec![0.0], vec![f64::NEG_INFINITY]));
        assert!(picked(&[4], 0).is_err() && picked(&[3], 1).is_err() && picked(&[-2], 0).is_err());
    }
}
