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
//! The two segments are attended apart and merged by their natural `lse`, which needs no concatenation. The prefix is
//! gathered from the pages once per (stream, layer) and kept for as long as the stream's generation stands: a fork, a
//! reset or a moved page invalidates it, a commit that only lengthens the stream does not. A step declares ordinary
//! spans with `commit: false`, so a spec may name `paged` here and nothing else changes.
//!
//! This crate holds the options. Its kernels are not built: [`DENSE`] refuses every geometry and says so.

#![forbid(unsafe_code)]

mod factory;

pub use factory::{DENSE, DenseOptions, PrefixSource};
