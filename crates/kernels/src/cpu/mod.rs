//! The fast CPU kernels, behind one run-time probe of the instruction set.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`isa`] | which instructions this machine has, and which the kernels shall use |

pub mod isa;

pub use isa::Isa;
