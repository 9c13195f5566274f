//! Absorbed multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over paged latents.

use super::latents::Latents;
use super::{Attended, Real, arrays};
use crate::{Error, Result};

/// Everything that [`mla`] reads. `T` packed query tokens, `R` rows, `P` pages of `S` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Mla<'a, Q, E> {
    /// `[T, H, C]`: queries already multiplied into latent space.
    pub q_nope: &'a [Q],
    /// `[T, H, E]`: the rotary part; empty when `E` is 0.
    pub q_pe: &'a [Q],
    /// `[P, S, C + E]`: one latent a token, `[ckv | kpe]`.
    pub latent: &'a [E],
    /// `[R + 1]`: where each row's queries start.
    pub qo_indptr: &'a [i32],
    /// `[R + 1]`: where each row's pages start in `kv_indices`.
    pub kv_indptr: &'a [i32],
    /// Page ids, row after row.
    pub kv_indices: &'a [i32],
    /// `[R]`: tokens of each row; its pages must hold them.
    pub kv_len: &'a [i32],
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
    /// Query `i` of a row sits at position `kv_len - q_len + i` and sees no later key.
    pub causal: bool,
}

/// `o` `[T, H, C]` in latent space and `lse` `[T, H]`: scores are
/// `sm_scale * (q_nope . latent[..C] + q_pe . latent[C..])`, values `latent[..C]`.
///
/// # Errors
/// An array of another length than the shapes say, an index array out of order or range, a `kv_len` that
/// the row's pages do not hold.
pub fn mla<Q: Real, E: Real>(p: &Mla<'_, Q, E>) -> Result<Attended> {
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
    let queries = arrays::ranges("qo_indptr", p.qo_indptr, tokens)?;
    arrays::length("kv_indptr", &tables, &[queries.len()])?;
    arrays::length("kv_len", p.kv_len, &[queries.len()])?;

    let s = p.page_size;
    let mut out = latents.nothing(tokens);
    for (row, (queries, table)) in queries.into_iter().zip(tables).enumerate() {
        let kv_len = i64::from(p.kv_len[row]);
        let capacity = (table.len() * s) as i64;
        if !(0..=capacity).contains(&kv_len) {
            let why = format!("the row's {} pages of {s} hold 0..={capacity} tokens", table.len());
            return Err(Error::Index { array: "kv_len", index: row, got: kv_len, why });
        }
        let q_len = queries.len() as i64;
        for (i, t) in queries.enumerate() {
            let last = if p.causal { (kv_len - q_len + i as i64).min(kv_len - 1) } else { kv_len - 1 };
            let slots: Vec<(usize, usize)> =
                (0..(last + 1).max(0) as usize).map(|j| (table[j / s] as usize, j % s)).collect();
            latents.attend_token(t, &slots, &mut out);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_row(kv_len: i32, q_len: i32, latent: &[f32]) -> Result<Attended> {
        mla(&Mla {
            q_nope: &vec![0f32; q_len as usize * 2],
            q_pe: &vec![0f32; q_len as usize],
            latent,
            qo_indptr: &[0, q_len],
            kv_indptr: &[0, 2],
            kv_indices: &[2, 0],
            kv_len: &[kv_len],
            num_qo_heads: 1,
            kv_lora_rank: 2,
            qk_rope_head_dim: 1,
            page_size: 2,
            sm_scale: 1.0,
            causal: true,
        })
    }

    /// Pages 2 then 0 hold tokens 1..=4 in both value lanes; page 1 and every rotary part are NaN-free filler.
    const LATENT: [f32; 18] = [
        3.0,
        3.0,
        0.0,
        4.0,
        4.0,
        0.0, //
        f32::NAN,
        f32::NAN,
        f32::NAN,
        f32::NAN,
        f32::NAN,
        f32::NAN, //
        1.0,
        1.0,
        0.0,
        2.0,
        2.0,
        0.0,
    ];

    #[test]
    fn f01_a_fully_masked_query_is_zero_and_minus_infinity() {
        let out = one_row(2, 5, &LATENT).unwrap();
        assert_eq!(out.lse[..3], [f64::NEG_INFINITY; 3]);
        assert_eq!(out.o[..6], [0.0; 6]);
        assert_eq!((out.o[6], out.lse[3]), (1.0, 0.0));
        assert!((out.o[8] - 1.5).abs() < 1e-15 && (out.lse[4] - 2f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn f03_slots_past_the_end_are_never_read() {
        let mut dirty = LATENT;
        dirty[3..6].fill(f32::NAN);
        assert_eq!(one_row(3, 1, &dirty).unwrap(), one_row(3, 1, &LATENT).unwrap());
    }

    #[test]
    fn lengths_that_the_pages_do_not_hold_are_refused() {
        assert!(one_row(4, 1, &LATENT).is_ok());
        let said = one_row(5, 1, &LATENT).unwrap_err().to_string();
        assert_eq!(said, "kv_len[0] = 5: the row's 2 pages of 2 hold 0..=4 tokens");
        assert!(one_row(-1, 1, &LATENT).is_err());
        assert!(one_row(4, 1, &LATENT[..17]).is_err());
    }
}
