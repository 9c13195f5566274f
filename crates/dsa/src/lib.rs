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
//! | wrapper: borrowed views, foreign page tables | [`index_topk`], [`select_topk_causal`], [`topk`], [`select`], [`scores`], [`sparse_attend`], [`IndexKeyStore`], [`DsaPlan`] |
//! | manager: a resource of a spec | [`DsaManager`], [`DsaFactory`] |

#![forbid(unsafe_code)]

mod encode;
mod error;
mod key_store;
mod manager;
mod plan;

pub use mstar_kernels::dsa::{
    KeyFormat, ScoresParams, SelectParams, SparseParams, TopkParams, dequantise_key, index_topk,
    quantise_keys, scores, scores_workspace_bytes, select, select_topk_causal, select_workspace_bytes,
    sparse_attend, sparse_workspace_bytes, topk,
};
pub use mstar_kernels::mla::Geometry;
pub use mstar_kernels::{Buffer, DType, Device, Stream, TensorMut, TensorRef};

pub use error::{Error, Result};
pub use key_store::IndexKeyStore;
pub use manager::{DsaFactory, DsaManager};
pub use plan::{DsaPlan, DsaSpan};
