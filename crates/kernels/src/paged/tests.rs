//! Attention over pages of codes.

#[cfg(feature = "paged")]
mod fp8;
