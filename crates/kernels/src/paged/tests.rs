//! Attention over pages of codes.

#[cfg(feature = "paged")]
pub(crate) mod fp8;
