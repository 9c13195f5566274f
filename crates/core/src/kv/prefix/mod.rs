//! Which whole pages hold which tokens: page keys chained under a root, and the index over them.
//!
//! A *root* names a namespace: everything a stored page depends on beyond its tokens. A page's key chains its
//! parent's key and its own tokens. Roots are told apart by BLAKE3 over an injective encoding; below a root a hit
//! is never the hash's word alone: the index compares the tokens and the parent entry, so two runs of tokens
//! that hash alike share nothing.
#![forbid(unsafe_code)]

mod index;
mod key;
mod share;

pub(super) use index::{Chain, PrefixIndex};
pub(super) use key::blake3_page;
pub use key::{Namespace, PageHash, PageKey};
