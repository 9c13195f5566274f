//! Absorbed multi-head latent attention over paged latents: plan once, run once a layer.
//!
//! # The mathematics
//!
//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) stores one latent a token instead of keys and
//! values a head: `ckv` `[C]`, from which every head's key and value are projected, and `kpe` `[E]`, a rotary key that
//! all heads share. Head `h` of token `t` has a query `q_nope` `[Dn]` and `q_pe` `[E]`; with `W_UK` `[H, Dn, C]` and `W_UV`
//! `[H, C, Dv]` its key of token `j` is `[W_UK[h] ckv[j] | kpe[j]]` and its value `W_UV[h]^T ckv[j]`. Both projections are
//! linear, so that one moves into the query and the other out of the sum, and the cache is never expanded (appendix C
//! there):
//!
//! ```text
//! q_nope[t, h] . (W_UK[h] ckv[j])   =  (W_UK[h]^T q_nope[t, h]) . ckv[j]
//! sum_j p[j] (W_UV[h]^T ckv[j])     =  W_UV[h]^T (sum_j p[j] ckv[j])
//!
//! qc[t, h]    = W_UK[h]^T q_nope[t, h]                                  [C]   by the layer: `Inputs::q_nope`
//! s[t, h, j]  = sm_scale * (qc[t, h] . ckv[j] + q_pe[t, h] . kpe[j])
//! p[t, h, j]  = exp(s[t, h, j]) / sum_j' exp(s[t, h, j'])
//! oc[t, h]    = sum_j p[t, h, j] * ckv[j]                               [C]   `Outputs::o`
//! lse[t, h]   = ln sum_j exp(s[t, h, j])                                      `Outputs::lse`
//! o[t, h]     = W_UV[h]^T oc[t, h]                                      [Dv]  by the layer
//! ```
//!
//! Undoing the absorption, `o = W_UV^T oc`, is the layer's: it may fold `W_UV` into its output projection. The value of a
//! token is the first `C` lanes of its key, so a page `[S, C + E]` is read once for both, for all heads. A query that
//! sees no key has `o` 0 and `lse` `-inf`.
//!
//! **`sm_scale` has no default.** It belongs to the width of the query before it was absorbed, `(Dn + E)^-0.5` (for
//! DeepSeek-V2 and V3 `192^-0.5`, times the factor of a stretched context), which neither `C` nor `E` nor the cache
//! says; `(C + E)^-0.5` would be plausible and wrong. Leaving it out does not compile:
//!
//! ```compile_fail,E0063
//! let variant = mstar_attn_mla::Variant { causal: true };
//! ```
//!
//! # Plan and run
//!
//! A batch of rows, each some query tokens over some pages, is described by a [`PageTable`]; the layer by a [`Geometry`]
//! and a [`Variant`]. [`Plan::new`] checks them and cuts the work; [`Plan::replan`] makes it again in the same memory, and
//! does nothing when nothing changed. One plan serves prefill, append and decode rows side by side. Queries and outputs
//! (`q_dtype`) may be of another type than the stored latents (`kv_dtype`); [`Capacity`] fixes rows, tokens and pages for
//! captured use. Everything is borrowed: no request, no store, no step is needed.
//!
//! ```
//! use mstar_attn_mla::{DType, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream};
//! use mstar_attn_mla::{TensorMut, TensorRef, Variant, Workspace, run};
//!
//! // One decode row of five latents in two pages of four slots; 4 heads, C = 8, E = 2.
//! let geometry = Geometry {
//!     num_qo_heads: 4, kv_lora_rank: 8, qk_rope_head_dim: 2, page_size: 4,
//!     q_dtype: DType::F32, kv_dtype: DType::F32,
//! };
//! let variant = Variant { sm_scale: 1.0 / 192f32.sqrt(), causal: true };
//! let table = PageTable {
//!     qo_indptr: &[0, 1], kv_indptr: &[0, 2], kv_indices: &[2, 0], kv_last_page_len: &[1], num_pages: 3,
//!     ..PageTable::default()
//! };
//! let plan = Plan::new(&geometry, &variant, &table, &PlanOptions::default())?;
//! let mut workspace = Workspace::for_plan(&plan)?;
//! let (q_nope, q_pe, latent) = (vec![0f32; 4 * 8], vec![0f32; 4 * 2], vec![1f32; 3 * 4 * 10]);
//! let (mut o, mut lse) = (vec![0f32; 4 * 8], vec![0f32; 4]);
//! run(&plan, &Stream::cpu(), &mut workspace,
//!     Inputs {
//!         q_nope: TensorRef::from_slice(&q_nope, &[1, 4, 8])?,
//!         q_pe: TensorRef::from_slice(&q_pe, &[1, 4, 2])?,
//!         latent: TensorRef::from_slice(&latent, &[3, 4, 10])?,
//!     },
//!     Outputs {
//!         o: TensorMut::from_slice(&mut o, &[1, 4, 8])?,
//!         lse: Some(TensorMut::from_slice(&mut lse, &[1, 4])?),
//!     },
//! )?;
//! assert_eq!((o[0], lse[0]), (1.0, 5f32.ln()));
//! # Ok::<(), mstar_attn_mla::Error>(())
//! ```
//!
//! # Context and own tokens apart
//!
//! A *context-only* plan attends what was stored before the step and none of the step's own entries; `kv_len_buf` then
//! says where those begin. [`merge`] joins its result with attention over the step's own tokens by their `lse`, and gives
//! what one causal plan over both gives, but for rounding.
//!
//! ```
//! use mstar_attn_mla::{Merged, Partial, TensorMut, TensorRef, merge};
//!
//! // Partition sums 2 and 8, outputs 0 and 10: (2 * 0 + 8 * 10) / 10, and ln 10.
//! let view = |values| TensorRef::from_slice(values, &[1, 1, 1]);
//! let lse = |values| TensorRef::from_slice(values, &[1, 1]);
//! let (stored, own) = ([2f32.ln()], [8f32.ln()]);
//! let (mut o, mut joined) = ([0f32], [0f32]);
//! merge(
//!     &Partial { o: view(&[0f32])?, lse: lse(&stored)? },
//!     &Partial { o: view(&[10f32])?, lse: lse(&own)? },
//!     &mut Merged {
//!         o: TensorMut::from_slice(&mut o, &[1, 1, 1])?,
//!         lse: TensorMut::from_slice(&mut joined, &[1, 1])?,
//!     },
//! )?;
//! assert!((o[0] - 8.0).abs() < 1e-6 && (joined[0] - 2.302585).abs() < 1e-6);
//! # Ok::<(), mstar_attn_mla::Error>(())
//! ```
//!
//! # Which bits
//!
//! Latents are cut into leaves at absolute positions and joined along a fixed tree, so that a row's bits depend on
//! nothing but the row: not on its neighbours, page placement, padding, retention, threads, or a cascade.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `run` | [`run`]: one layer; [`run_in`]: the same in a foreign workspace |
//! | `manager` | [`MlaAttention`]: the same as a resource of a spec |
//!
//! [`Plan`], its options, [`Workspace`] and [`select_last_hidden`] are those of `mstar_kernels::plan`; [`merge`] is that of
//! `mstar_kernels::lse`.

#![forbid(unsafe_code)]

mod manager;
mod run;

pub use manager::{MlaAttention, MlaFactory, MlaOptions, MlaPlanner, mla_supports, workspace_bound};
pub use mstar_core::attend::pages::{EagerSlotKey, OverPages, PlanCounts, WorkspacePool};
pub use mstar_kernels::lse::{
    Merged, Partial, merge_all_natural as merge_all, merge_natural as merge,
    merge_natural_in_place as merge_in_place,
};
pub use mstar_kernels::mla::{Geometry, MAX_LATENT_DIM, Variant};
pub use mstar_kernels::paged::{Family, PageTable};
pub use mstar_kernels::plan::{
    Capacity, Latents, PlanOptions, Planned, Schedule, Workspace, select_last_hidden,
};
pub use mstar_kernels::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};
pub use run::{Inputs, Outputs, run, run_in};

/// A checked batch over latents, cut into work.
pub type Plan = mstar_kernels::plan::Plan<Latents>;

/// Everything that a [`Plan`] is made of.
pub type PlanCacheKey<'a> = mstar_kernels::plan::PlanCacheKey<'a, Latents>;
