//! The names of `compiler.rs` in a build without CUDA.

use std::path::PathBuf;

/// Nothing to compile, and so nothing to compile it with.
pub(super) fn nvrtc() -> Result<(String, (i32, i32)), &'static str> {
    Err("not compiled in; build with --features cuda")
}

/// No folder.
pub(super) fn cache() -> Option<(PathBuf, usize, u64)> {
    None
}
