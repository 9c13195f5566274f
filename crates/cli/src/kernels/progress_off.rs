//! The name of `progress.rs` in a build without CUDA.

/// Nothing is compiled.
pub(crate) fn tell(quiet: bool) {
    let _ = quiet;
}
