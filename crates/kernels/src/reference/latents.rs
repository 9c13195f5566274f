//! What `mla` and `dsa_attend` share: absorbed queries against `[ckv | kpe]` latents.

use super::{Attended, Real, arrays, dot, softmax};
use crate::Result;

/// Absorbed queries, latents, whose pages are whose, and the widths that say how all of it lies.
pub(super) struct Latents<'a, Q, E> {
    pub(super) q_nope: &'a [Q],
    pub(super) q_pe: &'a [Q],
    pub(super) latent: &'a [E],
    pub(super) kv_indptr: &'a [i32],
    pub(super) kv_indices: &'a [i32],
    pub(super) num_qo_heads: usize,
    pub(super) kv_lora_rank: usize,
    pub(super) qk_rope_head_dim: usize,
    pub(super) page_size: usize,
    pub(super) sm_scale: f64,
}

impl<'a, Q: Real, E: Real> Latents<'a, Q, E> {
    /// Tokens, and the page ids of each row or request, once every length fits and every id is a page.
    pub(super) fn check(&self) -> Result<(usize, Vec<&'a [i32]>)> {
        let (h, c, e) = (self.num_qo_heads, self.kv_lora_rank, self.qk_rope_head_dim);
        arrays::heads(h, 1)?;
        let tokens = arrays::outer("q_nope", self.q_nope, &[h, c])?;
        arrays::length("q_pe", self.q_pe, &[tokens, h, e])?;
        let pages = arrays::outer("latent", self.latent, &[self.page_size, c.saturating_add(e)])?;
        arrays::finite("sm_scale", self.sm_scale)?;
        let tables = arrays::ranges("kv_indptr", self.kv_indptr, self.kv_indices.len())?;
        arrays::indices("kv_indices", self.kv_indices, pages)?;
        Ok((tokens, tables.into_iter().map(|table| &self.kv_indices[table]).collect()))
    }

    /// What `tokens` queries have that attend nothing: `o` `[T, H, C]` of 0 and `lse` `[T, H]` of `-inf`.
    pub(super) fn nothing(&self, tokens: usize) -> Attended {
        let heads = tokens * self.num_qo_heads;
        Attended { o: vec![0.0; heads * self.kv_lora_rank], lse: vec![f64::NEG_INFINITY; heads] }
    }

    /// Attends all heads of one token over the given slots, `(page, slot)` each.
    pub(super) fn attend_token(&self, token: usize, slots: &[(usize, usize)], out: &mut Attended) {
        let (h, c) = (self.num_qo_heads, self.kv_lora_rank);
        for head in 0..h {
            let at = token * h + head;
            out.lse[at] = self.attend(token, head, slots, &mut out.o[at * c..][..c]);
        }
    }

    /// Attends one query head; writes `[C]`, returns the lse.
    fn attend(&self, token: usize, head: usize, slots: &[(usize, usize)], o: &mut [f64]) -> f64 {
        let (c, e) = (self.kv_lora_rank, self.qk_rope_head_dim);
        let at = token * self.num_qo_heads + head;
        let (nope, pe) = (&self.q_nope[at * c..][..c], &self.q_pe[at * e..][..e]);
        let entry =
            |(page, slot): (usize, usize)| &self.latent[(page * self.page_size + slot) * (c + e)..][..c + e];
        let score = |&slot: &(usize, usize)| {
            let entry = entry(slot);
            self.sm_scale * (dot(nope, &entry[..c]) + dot(pe, &entry[c..]))
        };
        let scores: Vec<f64> = slots.iter().map(score).collect();
        softmax::attend(&scores, None, o, |key, lane| entry(slots[key])[lane].to_f64())
    }
}

#[cfg(test)]
mod tests {
    use crate::reference::dsa_attend::{DsaAttend, dsa_attend};
    use crate::reference::mla::{Mla, mla};

    #[test]
    fn mla_and_dsa_attend_refuse_the_same_arrays_in_the_same_words() {
        let check = |q_pe: &[f32], kv_indptr: &[i32], kv_indices: &[i32], sm_scale: f64, said: &str| {
            let (q_nope, latent) = (&[0f32; 2][..], &[0f32; 12][..]);
            let (num_qo_heads, kv_lora_rank, qk_rope_head_dim, page_size) = (1, 2, 1, 2);
            let rows = Mla {
                q_nope,
                q_pe,
                latent,
                qo_indptr: &[0, 1],
                kv_indptr,
                kv_indices,
                kv_len: &[3],
                num_qo_heads,
                kv_lora_rank,
                qk_rope_head_dim,
                page_size,
                sm_scale,
                causal: true,
            };
            let picks = DsaAttend {
                q_nope,
                q_pe,
                latent,
                selection: &[0, 1, 2],
                kv_indptr,
                kv_indices,
                row_request: &[0],
                page_start: &[0],
                num_qo_heads,
                kv_lora_rank,
                qk_rope_head_dim,
                page_size,
                sm_scale,
            };
            let answers = [mla(&rows), dsa_attend(&picks)];
            let answers =
                answers.map(|answer| answer.map_or_else(|error| error.to_string(), |_| "fine".into()));
            assert_eq!(answers[0], answers[1]);
            assert!(answers[0].contains(said), "{}", answers[0]);
        };
        check(&[0.0], &[0, 2], &[1, 0], 1.0, "fine");
        check(&[], &[0, 2], &[1, 0], 1.0, "q_pe");
        check(&[0.0], &[0, 1], &[1, 0], 1.0, "kv_indptr[1] = 1: must end at 2");
        check(&[0.0], &[0, 2], &[1, 2], 1.0, "kv_indices[1] = 2: must be in 0..2");
        check(&[0.0], &[0, 2], &[1, 0], f64::NAN, "sm_scale");
    }
}
