//! The caller's queue of work.
//!
//! Kernels never create a stream: they take the caller's. On the CPU a stream is the caller's rayon pool,
//! so a call returns when its work is done and ordering needs no event.

use std::ffi::c_void;

use crate::{Device, Result, cuda};

/// A queue of work on one device, owned by the caller.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    device: Device,
    raw: *mut c_void,
}

// SAFETY: the handle is an opaque value that this crate hands back to the driver unread; the driver's
// stream functions may be called from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; a shared reference gives no more than a copy does.
unsafe impl Sync for Stream {}

impl Stream {
    /// The CPU's stream: work runs at once, in the caller's rayon pool.
    pub const fn cpu() -> Stream {
        Stream { device: Device::Cpu, raw: std::ptr::null_mut() }
    }

    /// A stream that somebody else made, such as torch's current one.
    ///
    /// # Safety
    /// `raw` is a live `CUstream` of `device`'s primary context (null is its default stream), and outlives
    /// every call that is given this value.
    pub const unsafe fn from_raw(device: Device, raw: *mut c_void) -> Stream {
        Stream { device, raw }
    }

    /// The device whose queue this is.
    pub const fn device(&self) -> Device {
        self.device
    }

    /// The driver's handle; null on the CPU.
    pub const fn as_raw(&self) -> *mut c_void {
        self.raw
    }

    /// Waits on the host until all that was put in has run, and reports what went wrong. Returns at once on the CPU.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): the wait itself, or work before it.
    pub fn synchronize(&self) -> Result<()> {
        cuda::synchronize(self)
    }

    /// Whether all that was put in has run: always, on the CPU.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn is_idle(&self) -> Result<bool> {
        cuda::is_idle(self)
    }
}
