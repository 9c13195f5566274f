//! DeepSeek sparse attention: index keys, top-k selection and attention over the pick.
//!
//! A light indexer scores every key that a query may see and keeps the best `topk`; absorbed MLA then attends those alone
//! (DeepSeek-V3.2-Exp technical report). With `Hi` index heads of width `Di`, index queries `qi` `[T, Hi, Di]`, head
//! weights `w` `[T, Hi]` and one index key `ki` `[Di]` a token:
//!
//! ```text
//! I[t, j]  = sum_h w[t, h] * relu(qi[t, h] . ki[j])        in f32, j <= position of t
//! pick[t]  = the topk positions of largest I[t, .]         ties to the earlier position, NaN never, -1 padded
//! o[t]     = absorbed MLA of t over ckv, kpe of pick[t]
//! ```
//!
//! Layers that select are *full*; a *shared* layer reuses the pick of the last full layer before it, which is resolved when
//! the spec loads.
//!
//! # Which queries are selected
//!
//! A query that sees no more than `topk` keys attends them all, and needs no selection. That is decided by its own key
//! count: a row of a prefill that crosses `topk` is attended densely up to there and over picks behind it, and a neighbour
//! that crosses `topk` changes none of a row's bits. So a decode row of at most `topk` keys has the very bits that dense
//! attention over the same cache gives.
//!
//! # Where index keys lie
//!
//! In a plane of the latent cache's pages, under the same table, forks, prefix hits, retention and offload; or in an
//! [`IndexKeyStore`], buffers of each request that grow with its context and know none of these. The picks are the same,
//! bit for bit.
//!
//! # Two levels
//!
//! | level | what is in it |
//! | --- | --- |
//! | wrapper: borrowed views, foreign page tables | [`Plan`] of a [`PageTable`], then [`select_picks`] and [`attend`] a layer |
//! | its parts | [`index_topk`], [`select_topk_causal`], [`topk`], [`select`], [`scores`], [`sparse_attend`], [`IndexKeyStore`] |
//! | manager: a resource of a spec | [`DsaManager`], [`DsaFactory`] |

//! ```
//! use mstar_dsa::{Buffer, DType, Geometry, IndexInputs, Indexer, Inputs, KeyFormat, Layer, Outputs, PageTable};
//! use mstar_dsa::{Plan, PlanOptions, Stream, TensorMut, TensorRef, attend, select_picks};
//!
//! // One decode row of five tokens in two pages of four slots; it attends the best two.
//! let geometry = Geometry {
//!     num_qo_heads: 1, kv_lora_rank: 2, qk_rope_head_dim: 0, page_size: 4,
//!     q_dtype: DType::F32, kv_dtype: DType::F32,
//! };
//! let indexer = Indexer { index_n_heads: 1, index_head_dim: 1, index_topk: 2, format: KeyFormat::F32 };
//! let layer = Layer { geometry, sm_scale: 1.0, indexer };
//! let table = PageTable {
//!     qo_indptr: &[0, 1], kv_indptr: &[0, 2], kv_indices: &[1, 0], kv_last_page_len: &[1], num_pages: 2,
//!     ..PageTable::default()
//! };
//! let plan = Plan::new(&layer, &table, &PlanOptions::default())?;
//! assert!(plan.needs_selection());
//! let mut workspace = Buffer::zeroed(plan.workspace_bytes())?;
//! let bytes = workspace.len();
//!
//! // Tokens 1 and 4 have the largest index keys: page 1, slot 1 and page 0, slot 0.
//! let keys = [9f32, 0.0, 0.0, 0.0, 1.0, 7.0, 2.0, 3.0];
//! let mut picks = [0i32; 2];
//! select_picks(&plan, &Stream::cpu(), workspace.tensor_mut(0, DType::U8, &[bytes])?,
//!     IndexInputs {
//!         q: TensorRef::from_slice(&[1f32], &[1, 1, 1])?,
//!         weights: TensorRef::from_slice(&[1f32], &[1, 1])?,
//!         keys: TensorRef::from_slice(&keys, &[2, 4, 1])?,
//!     },
//!     TensorMut::from_slice(&mut picks, &[1, 2])?,
//! )?;
//! assert_eq!(picks, [1, 4]);
//!
//! let (latent, mut o) = ((0..16).map(|x| x as f32).collect::<Vec<_>>(), [0f32; 2]);
//! attend(&plan, &Stream::cpu(), workspace.tensor_mut(0, DType::U8, &[bytes])?,
//!     Inputs {
//!         q_nope: TensorRef::from_slice(&[0f32, 0.0], &[1, 1, 2])?,
//!         q_pe: TensorRef::from_slice(&[0f32; 0], &[1, 1, 0])?,
//!         latent: TensorRef::from_slice(&latent, &[2, 4, 2])?,
//!     },
//!     Some(TensorRef::from_slice(&picks, &[1, 2])?),
//!     Outputs { o: TensorMut::from_slice(&mut o, &[1, 1, 2])?, lse: None },
//! )?;
//! assert_eq!(o, [5.0, 6.0]); // the mean of [10, 11] and [0, 1]
//! # Ok::<(), mstar_dsa::Error>(())
//! ```

#![forbid(unsafe_code)]

mod batch;
mod encode;
mod error;
mod key_store;
mod manager;
mod rows;
mod run;

pub use mstar_kernels::dsa::{
    DeviceTable, KeyFormat, ScoresParams, SelectParams, SparseParams, Table, TopkParams, dequantise_key,
    index_topk, quantise_keys, scores, scores_at, scores_workspace_bytes, select, select_at,
    select_topk_causal, select_workspace_bytes, select_workspace_bytes_on, sparse_attend, sparse_attend_at,
    sparse_workspace_bytes, sparse_workspace_bytes_on, topk,
};
pub use mstar_kernels::mla::Geometry;
pub use mstar_kernels::paged::PageTable;
pub use mstar_kernels::plan::{Capacity, PlanOptions};
pub use mstar_kernels::{Buffer, DType, Device, Stream, TensorMut, TensorRef};

pub use batch::{Indexer, Layer, Plan};
pub use error::{Error, Result};
pub use key_store::IndexKeyStore;
pub use manager::{DsaFactory, DsaManager};
pub use rows::{DsaPlan, DsaSpan};
pub use run::{IndexInputs, Inputs, Outputs, attend, select_picks};
