//! Absorbed multi-head latent attention over paged latents.
//!
//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) stores one latent a token instead of keys and
//! values a head: `ckv` `[C]`, from which every head's key and value are projected, and `kpe` `[E]`, a rotary key that
//! all heads share. With `W_UK` `[H, Dn, C]` and `W_UV` `[H, C, Dv]` the projections are absorbed into the query and the
//! output, so that decoding never expands the cache:
//!
//! ```text
//! qc[t, h]    = W_UK[h]^T q_nope[t, h]                                  [C]
//! s[t, h, j]  = sm_scale * (qc[t, h] . ckv[j] + q_pe[t, h] . kpe[j])
//! p[t, h, j]  = exp(s[t, h, j]) / sum_j' exp(s[t, h, j'])
//! oc[t, h]    = sum_j p[t, h, j] * ckv[j]                               [C]
//! lse[t, h]   = ln sum_j exp(s[t, h, j])
//! o[t, h]     = W_UV[h]^T oc[t, h]                                      by the layer
//! ```
//!
//! `sm_scale` belongs to the width of the query before it was absorbed (`Dn + E`), not to `C + E`. The value of a token
//! is the first `C` elements of its key, so a page `[S, C + E]` is read once for both. One plan serves prefill and
//! decode; the natural `lse` merges the result with another segment's (`kernels::lse`).
//!
//! A *context-only* plan attends what was stored before the step and none of the step's own entries; `kv_len_buf` then
//! says where those begin.
//!
//! This crate holds the options. Its kernels are not built: [`MLA`] refuses every geometry and says so.

#![forbid(unsafe_code)]

mod factory;

pub use factory::{MLA, MlaOptions, mla_supports};
