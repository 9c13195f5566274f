//! The fast CPU kernels, behind one run-time probe of the instruction set.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`isa`] | which instructions this machine has, and which the kernels shall use |
//! | `paged` | paged attention |

pub mod isa;
#[cfg(feature = "paged")]
pub(crate) mod paged;

pub use isa::Isa;
