//! The names of `compiler.rs` in a build without CUDA.

use std::path::PathBuf;

use mstar_kernels::Device;

/// Nothing to compile, and so nothing to compile it with.
pub(super) fn nvrtc() -> Result<(String, (i32, i32)), &'static str> {
    Err("not compiled in; build with --features cuda")
}

/// Nothing: there is no device.
///
/// # Errors
/// Never.
pub(crate) fn device_memory(_: Device) -> anyhow::Result<Option<(u64, u64)>> {
    Ok(None)
}

/// None.
pub(crate) fn loaded() -> usize {
    0
}

/// No folder.
pub(super) fn cache() -> Option<(PathBuf, usize, u64)> {
    None
}

/// Nothing runs there.
pub(super) fn ready(device: Device) -> Result<(), String> {
    Err(format!("{device} is not compiled in; build with --features cuda"))
}
