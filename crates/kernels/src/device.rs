//! Where memory lives and work runs.

use std::fmt;

use crate::{Error, Result, Stream};

/// A device: the host's processors, or one CUDA card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Device {
    /// The host's processors and memory.
    Cpu,
    /// A CUDA device, by ordinal.
    Cuda(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Refuses a device that this build has no kernels for.
pub(crate) fn supported(operation: &'static str, stream: &Stream) -> Result<Device> {
    match stream.device() {
        Device::Cuda(_) if !cfg!(feature = "cuda") => {
            let why = "this build is without CUDA; build it with the feature `cuda`".into();
            Err(Error::Unsupported { operation, device: stream.device(), why })
        }
        device => Ok(device),
    }
}

/// Multiprocessors of a device, for plans that count on them; those of a large one where it cannot be asked.
#[cfg(any(feature = "paged", feature = "mla"))]
pub(crate) fn processors(device: Device) -> u32 {
    #[cfg(feature = "cuda")]
    if device != Device::Cpu
        && let Ok(context) = crate::cuda::Context::of(device)
    {
        return context.sm_count();
    }
    let _ = device;
    crate::paged::PROCESSORS
}
