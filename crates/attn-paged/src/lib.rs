//! Attention over paged keys and values, and over a fixed context: plan once, run once a layer.
//!
//! A batch of rows, each some query tokens over some pages, is described by a [`PageTable`]; the layer by a
//! [`Geometry`] and a [`Variant`]. [`Plan::new`] checks them and cuts the work; [`run`] attends one layer into the
//! caller's buffers and neither allocates nor looks at the table again. Everything is borrowed: no request, no
//! store, no step is needed.
//!
//! For query `i` of a row at position `p = kv_len - q_len + i` and key `j`:
//!
//! ```text
//! s_ij = sm_scale * q_i . k_j;  soft cap: s = c tanh(s / c);  ALiBi: s += slope_h (j - p)
//! o_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink_h)),  lse_i = ln(sum_j exp(s_ij) + exp(sink_h))
//! ```
//!
//! over the keys that causality, window and custom mask leave; with none left, `o` is 0 and `lse` is `-inf`. The
//! sums are those of FlashAttention (arXiv 2205.14135, 2307.08691) and, over long keys, FlashDecoding: keys are
//! cut into leaves at absolute positions and joined along a fixed tree, so that a row's bits depend on nothing but
//! the row: not on its neighbours, page placement, padding, retention, threads, or a cascade.
//!
//! ```
//! use mstar_attn_paged::{DType, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream};
//! use mstar_attn_paged::{TensorMut, TensorRef, Variant, Workspace, run};
//!
//! // One decode row of five keys in two pages of four slots; 4 query heads over 2 key heads of width 8.
//! let geometry = Geometry {
//!     num_qo_heads: 4, num_kv_heads: 2, head_dim_qk: 8, head_dim_vo: 8, page_size: 4,
//!     q_dtype: DType::F32, kv_dtype: DType::F32,
//! };
//! let table = PageTable {
//!     qo_indptr: &[0, 1], kv_indptr: &[0, 2], kv_indices: &[2, 0], kv_last_page_len: &[1], num_pages: 3,
//!     ..PageTable::default()
//! };
//! let plan = Plan::new(&geometry, &Variant::causal(8), &table, &PlanOptions::default())?;
//! let mut workspace = Workspace::for_plan(&plan)?;
//! let (q, k, v) = (vec![0.0f32; 32], vec![0.0f32; 3 * 64], vec![1.0f32; 3 * 64]);
//! let (mut o, mut lse) = (vec![0.0f32; 32], vec![0.0f32; 4]);
//! run(&plan, &Stream::cpu(), &mut workspace,
//!     Inputs {
//!         q: TensorRef::from_slice(&q, &[1, 4, 8])?,
//!         k: TensorRef::from_slice(&k, &[3, 4, 2, 8])?,
//!         v: TensorRef::from_slice(&v, &[3, 4, 2, 8])?,
//!         sinks: None, alibi_slopes: None,
//!     },
//!     Outputs {
//!         o: TensorMut::from_slice(&mut o, &[1, 4, 8])?,
//!         lse: Some(TensorMut::from_slice(&mut lse, &[1, 4])?),
//!     },
//! )?;
//! assert_eq!((o[0], lse[0]), (1.0, 5f32.ln()));
//! # Ok::<(), mstar_attn_paged::Error>(())
//! ```
//!
//! | room | what is in it |
//! | --- | --- |
//! | `run` | [`run`]: one layer; [`run_in`]: the same in a foreign workspace |
//! | `manager` | [`PagedAttention`]: the same as a resource of a spec |
//! | `cross` | [`CrossAttention`]: queries of one sequence over a context written once |
//!
//! [`Plan`], its options, [`Workspace`] and [`select_last_hidden`] are those of `mstar_kernels::plan`.

#![forbid(unsafe_code)]

mod cross;
mod manager;
#[cfg(test)]
mod rig;
mod run;

pub use cross::{CrossAttention, CrossFactory, CrossOptions};
pub use manager::{PagedAttention, PagedFactory, PagedOptions, PagedPlanner, workspace_bound};
pub use mstar_core::attend::pages::{EagerSlotKey, OverPages, PlanCounts, WorkspacePool};
pub use mstar_kernels::paged::{Family, Geometry, MAX_HEAD_DIM, Mask, MaskEntries, PageTable, Variant};
pub use mstar_kernels::plan::{
    Capacity, Heads, PlanOptions, Planned, Schedule, Workspace, select_last_hidden,
};
pub use mstar_kernels::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};
pub use run::{Inputs, Outputs, run, run_in, run_scaled_in};

/// A checked batch over keys and values a head, cut into work.
pub type Plan = mstar_kernels::plan::Plan<Heads>;

/// Everything that a [`Plan`] is made of.
pub type PlanCacheKey<'a> = mstar_kernels::plan::PlanCacheKey<'a, Heads>;
