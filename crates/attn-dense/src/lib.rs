//! One dense varlen pass over `[frozen prefix | fresh]`.
//!
//! A denoiser recomputes all of its keys and values every step and reuses only a small prefix that no longer changes, such
//! as a text condition. Writing the fresh entries to pages only to read them back once is waste; this backend takes
//! them straight into the kernel. For row `r` with a stored prefix of `P_r` tokens and `F_r` fresh ones:
//!
//! ```text
//! s[i, j] = sm_scale * q[i] . k_prefix[j]          j in 0..P_r
//! s[i, j] = sm_scale * q[i] . k_fresh[j - P_r]     j in P_r..P_r + F_r
//! o[i]    = sum_j softmax_j(s[i, j]) * v[j]
//! ```
//!
//! The two segments are never joined: one pass walks the keys of the first and then those of the second. The prefix is
//! gathered from the pages once per (stream, layer) and kept for as long as the stream's generation stands: a fork, a
//! reset or a moved page invalidates it, a commit that only lengthens the stream does not. A step declares ordinary
//! spans with `commit: false`, so a spec may name `paged` here and nothing else changes.
//!
//! # Plan and run
//!
//! A batch of rows is described by a [`Table`]; the layer by a [`Geometry`] and a [`Variant`]. [`DensePlan::new`] checks
//! them and cuts the work; [`run`] attends a layer. Everything is borrowed: no request, no store, no step is needed.
//!
//! ```
//! use mstar_attn_dense::{DType, DensePlan, Geometry, Inputs, Outputs, PlanOptions, Prefix, Stream};
//! use mstar_attn_dense::{Table, TensorMut, TensorRef, Variant, Workspace, run};
//!
//! // One row: a packed prefix of three keys, two fresh tokens that see it and each other. One head, D = Dv = 4.
//! let geometry = Geometry {
//!     num_qo_heads: 1, num_kv_heads: 1, head_dim_qk: 4, head_dim_vo: 4, q_dtype: DType::F32, kv_dtype: DType::F32,
//! };
//! let table = Table { cu_q: &[0, 2], prefix: Prefix::Packed { cu_p: &[0, 3] }, cu_k: &[0, 2] };
//! let plan = DensePlan::new(&geometry, &Variant::full(4), &table, &PlanOptions::default())?;
//! assert_eq!((plan.cu_k(), plan.max_k()), (&[0, 5][..], 5));
//! let mut workspace = Workspace::with_bytes(plan.workspace_bytes())?;
//! let (zeros, ones, sixes) = ([0f32; 12], [1f32; 12], [6f32; 8]);
//! let (mut o, mut lse) = ([0f32; 8], [0f32; 2]);
//! run(&plan, &Stream::cpu(), &mut workspace,
//!     Inputs {
//!         q: TensorRef::from_slice(&sixes, &[2, 1, 4])?,
//!         k_prefix: Some(TensorRef::from_slice(&zeros, &[3, 1, 4])?),
//!         v_prefix: Some(TensorRef::from_slice(&ones, &[3, 1, 4])?),
//!         k: TensorRef::from_slice(&zeros[..8], &[2, 1, 4])?,
//!         v: TensorRef::from_slice(&sixes, &[2, 1, 4])?,
//!     },
//!     Outputs {
//!         o: TensorMut::from_slice(&mut o, &[2, 1, 4])?,
//!         lse: Some(TensorMut::from_slice(&mut lse, &[2, 1])?),
//!     },
//! )?;
//! assert!((o[0] - 3.0).abs() < 1e-6 && (lse[0] - 5f32.ln()).abs() < 1e-6); // (3 x 1 + 2 x 6) / 5
//! # Ok::<(), mstar_attn_dense::Error>(())
//! ```
//!
//! # In an engine
//!
//! [`DenseAttention`] is the same as a resource of a spec (`backend: dense`). `requires_kv_write` is false: a layer hands its keys
//! and values to the call. A pass of `commit: false` leaves the cache as it was; one that commits is read by later
//! steps, so the resource writes its entries itself. Prefixes are gathered when a step is planned, into a buffer of its
//! label and slot that stays where it is, or read from their pages (`prefix: pages`), which changes no bit. For one token
//! a step, name `paged`: a row that grows moves all behind it, and they are gathered anew.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `plan` | [`DensePlan`] and its rows, [`DenseSegment`] |
//! | `run` | [`run`]: one layer; [`run_in`]: the same in a foreign workspace |
//! | `manager` | [`DenseAttention`], and the prefixes that it keeps |

#![forbid(unsafe_code)]

mod manager;
mod plan;
mod run;

pub use manager::{
    DenseAttention, DenseFactory, DenseOptions, DensePlanner, GatherCounts, PrefixSource, workspace_bound,
};
pub use mstar_core::attend::pages::{EagerSlotKey, PlanCounts, WorkspacePool};
pub use mstar_kernels::dense::{Geometry, Prefix, Table, Variant};
pub use mstar_kernels::plan::{Capacity, PlanOptions, Planned, Schedule, Workspace};
pub use mstar_kernels::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};
pub use plan::{DensePlan, DenseSegment};
pub use run::{Inputs, Outputs, run, run_in};
