//! What this machine has to compile kernels with, and where it keeps them.

use std::path::PathBuf;

use mstar_kernels::Device;
use mstar_kernels::cuda::Context;
use mstar_kernels::cuda::jit::{Nvrtc, cached, count};

/// Where NVRTC was found, and its version; or where it was looked for, and how to get it.
pub(super) fn nvrtc() -> Result<(String, (i32, i32)), &'static str> {
    Nvrtc::here().map(|nvrtc| (nvrtc.path().display().to_string(), nvrtc.version()))
}

/// Bytes of a device that are free, and of how many; `None` for the CPU.
///
/// # Errors
/// A device that cannot be used.
pub(crate) fn device_memory(device: Device) -> anyhow::Result<Option<(u64, u64)>> {
    if device == Device::Cpu {
        return Ok(None);
    }
    let context = Context::of(device)?;
    Ok(Some((context.free_memory()? as u64, context.memory_bytes() as u64)))
}

/// Kernels that this process has loaded.
pub(crate) fn loaded() -> usize {
    count()
}

/// The folder of compiled kernels, how many it holds, and their bytes.
pub(super) fn cache() -> Option<(PathBuf, usize, u64)> {
    cached()
}

/// Whether `device` can be used, and kernels compiled for it, without being named.
pub(super) fn ready(device: Device) -> Result<(), String> {
    let context = Context::of(device).map_err(|why| why.to_string())?;
    if context.is_emulated() {
        return Err("it is emulated, for tests; say --device cuda:0".into());
    }
    Nvrtc::here().map(|_| ()).map_err(str::to_owned)
}
