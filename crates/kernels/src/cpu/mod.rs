//! The fast CPU kernels, behind one run-time probe of the instruction set.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`address`] | where a token lies in a paged cache |
//! | [`isa`] | which instructions this machine has, and which the kernels shall use |
//! | `paged` | paged attention |
//! | [`peak`] | how fast a thread multiplies and adds |
//! | [`scatter`], [`gather`], [`copy`] | appending to pages, reading them back, copying them |

pub mod address;
pub mod copy;
pub mod gather;
pub mod isa;
#[cfg(feature = "paged")]
pub(crate) mod paged;
pub mod peak;
pub mod scatter;
pub(crate) mod tokens;

pub use isa::Isa;
