//! Memory that the driver gives: a device's own, and the host's pinned for it. [`Buffer`](crate::Buffer) owns it.

use std::ptr::NonNull;

use super::Context;
use crate::{Device, Result};

/// Zeroed memory of the driver, given back when dropped.
#[derive(Debug)]
pub(crate) struct Memory {
    context: &'static Context,
    ptr: NonNull<u8>,
    /// Bytes of pinned memory; 0 for a device's own.
    pinned: usize,
}

impl Memory {
    /// `bytes` zero bytes of a device. It may be used on any stream at once.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::NoDevice`](crate::Error::NoDevice) or
    /// [`Error::Cuda`](crate::Error::Cuda); in a capture of this thread always.
    pub(crate) fn on_device(device: Device, bytes: usize) -> Result<Memory> {
        let context = Context::of(device)?;
        // A driver rounds up, and some answer a size beyond all memory with another code than that of no memory.
        if bytes > context.memory_bytes() {
            return Err(context.out_of_memory(bytes));
        }
        let bytes = bytes.max(1);
        let ptr = context.take_memory(bytes)?;
        let ptr = NonNull::new(ptr).ok_or_else(|| context.out_of_memory(bytes))?;
        Ok(Memory { context, ptr, pinned: 0 })
    }

    /// `bytes` zero bytes of the host, which `device` reads and writes by itself.
    ///
    /// # Errors
    /// As [`Memory::on_device`].
    pub(crate) fn pinned(device: Device, bytes: usize) -> Result<Memory> {
        let context = Context::of(device)?;
        let bytes = bytes.max(1);
        let refused =
            || crate::Error::OutOfMemory { bytes, what: String::new(), device: Device::Cpu, free: None };
        if bytes > isize::MAX as usize {
            return Err(refused());
        }
        let (ptr, taken) = context.take_pinned(bytes).map_err(|error| match error {
            // Pinned memory is the host's.
            crate::Error::OutOfMemory { .. } => refused(),
            other => other,
        })?;
        let ptr = NonNull::new(ptr).ok_or_else(refused)?;
        // SAFETY: the bytes were just taken, and no work uses them.
        unsafe { ptr.as_ptr().write_bytes(0, bytes) };
        Ok(Memory { context, ptr, pinned: taken })
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Where views of it are.
    pub(crate) fn device(&self) -> Device {
        if self.pinned > 0 { Device::Cpu } else { self.context.device() }
    }

    /// The device that it is pinned for.
    pub(crate) fn pinned_for(&self) -> Option<Device> {
        (self.pinned > 0).then(|| self.context.device())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let ptr = self.ptr.as_ptr();
        if self.pinned > 0 {
            // SAFETY: taken by this value, and given back once; whoever puts work in here has told the context.
            unsafe { self.context.give_pinned(ptr, self.pinned) };
        } else {
            // SAFETY: taken by this value, and given back once; whoever puts work in here has told the context.
            unsafe { self.context.give_memory(ptr) };
        }
    }
}

// SAFETY: plain bytes that this value owns, as those of a `Vec<u8>`.
unsafe impl Send for Memory {}
// SAFETY: a shared reference gives its address alone.
unsafe impl Sync for Memory {}
