//! What this machine has to compile kernels with, and where it keeps them.

use std::path::PathBuf;

use mstar_kernels::cuda::jit::{Nvrtc, cached};

/// Where NVRTC was found, and its version; or where it was looked for, and how to get it.
pub(super) fn nvrtc() -> Result<(String, (i32, i32)), &'static str> {
    Nvrtc::here().map(|nvrtc| (nvrtc.path().display().to_string(), nvrtc.version()))
}

/// The folder of compiled kernels, how many it holds, and their bytes.
pub(super) fn cache() -> Option<(PathBuf, usize, u64)> {
    cached()
}
