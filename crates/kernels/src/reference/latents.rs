//! What `mla` and `dsa_attend` share: absorbed queries against `[ckv | kpe]` latents.

use super::{Real, arrays, dot, softmax};
use crate::Result;

/// Absorbed queries, latents and the widths that say how both lie.
pub(super) struct Latents<'a, Q, E> {
    pub(super) q_nope: &'a [Q],
    pub(super) q_pe: &'a [Q],
    pub(super) latent: &'a [E],
    pub(super) num_qo_heads: usize,
    pub(super) kv_lora_rank: usize,
    pub(super) qk_rope_head_dim: usize,
    pub(super) page_size: usize,
    pub(super) sm_scale: f64,
}

impl<Q: Real, E: Real> Latents<'_, Q, E> {
    /// Tokens and pages, once every length fits.
    pub(super) fn check(&self) -> Result<(usize, usize)> {
        let (h, c, e) = (self.num_qo_heads, self.kv_lora_rank, self.qk_rope_head_dim);
        arrays::heads(h, 1)?;
        let tokens = arrays::outer("q_nope", self.q_nope, &[h, c])?;
        arrays::length("q_pe", self.q_pe, &[tokens, h, e])?;
        let pages = arrays::outer("latent", self.latent, &[self.page_size, c.saturating_add(e)])?;
        arrays::finite("sm_scale", self.sm_scale)?;
        Ok((tokens, pages))
    }

    /// Attends one query head over the given slots, `(page, slot)` each; writes `[C]`, returns the lse.
    pub(super) fn attend(&self, token: usize, head: usize, slots: &[(usize, usize)], o: &mut [f64]) -> f64 {
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
