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
//! the spec loads. A row that sees no more than `topk` keys needs no selection; that is decided by its own key count,
//! so a neighbour that crosses `topk` changes none of its bits. Index keys lie in a plane of the latent cache's pages,
//! under the same table, forks, eviction and offload.
//!
//! This crate holds the options. Its kernels are not built: [`DSA`] refuses every geometry and says so.

#![forbid(unsafe_code)]

mod factory;

pub use factory::{DSA, DsaOptions};
