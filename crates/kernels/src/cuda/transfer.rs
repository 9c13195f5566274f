//! Copies and fills in stream order, on addresses. [`copy`](mod@crate::copy) checks tensors and calls this.

use super::Context;
use super::api::{Handle, Way};
use crate::{Device, Error, Result, Stream};

/// Copies `bytes` bytes in stream order.
///
/// # Errors
/// [`Error::Cuda`].
///
/// # Safety
/// Both ranges are on the devices named, of which one is the stream's; they are there until the copy has run, and pinned host
/// memory is touched by nobody until then.
pub(crate) unsafe fn transfer(
    stream: &Stream,
    (from, src): (Device, *const u8),
    (to, dst): (Device, *mut u8),
    bytes: usize,
) -> Result<()> {
    let context = Context::of(stream.device())?;
    let raw = Handle(stream.as_raw());
    let way = match (from, to) {
        (Device::Cpu, _) => Way::HostToDevice,
        (_, Device::Cpu) => Way::DeviceToHost,
        (from, to) if from == to => Way::DeviceToDevice,
        (from, to) => {
            let (source, target) = (Context::of(from)?, Context::of(to)?);
            let (of_source, of_target) = (source.raw(), target.raw());
            // SAFETY: the caller's.
            context.ask(|api, _| unsafe { api.copy_peer(of_target, raw, of_source, src, dst, bytes) })?;
            // Memory of both is used, on a stream that one of them does not know.
            return [source, target].iter().try_for_each(|side| side.used_by(context, raw));
        }
    };
    // SAFETY: the caller's.
    context.put(raw, |api, own| unsafe { api.copy(own, raw, way, src, dst, bytes) })
}

/// Sets `bytes` bytes in stream order.
///
/// # Errors
/// [`Error::Cuda`].
///
/// # Safety
/// The range is memory of the stream's device, there until this has run.
pub(crate) unsafe fn fill(stream: &Stream, dst: *mut u8, value: u8, bytes: usize) -> Result<()> {
    let raw = Handle(stream.as_raw());
    // SAFETY: the caller's.
    Context::of(stream.device())?.put(raw, |api, own| unsafe { api.fill(own, raw, dst, value, bytes) })
}

/// Calls a function of the host once, in stream order; it may call nothing of a device. On the CPU it is called at once.
///
/// # Errors
/// [`Error::Unsupported`] in a capture, whose replays would call it again; [`Error::Cuda`].
pub fn call_host(stream: &Stream, call: impl FnOnce() + Send + 'static) -> Result<()> {
    unsafe extern "C" fn trampoline<F: FnOnce()>(data: *mut std::ffi::c_void) {
        // SAFETY: made below from a box of this type, and called once.
        let call = unsafe { Box::from_raw(data.cast::<F>()) };
        // A panic may not cross the driver.
        drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)));
    }
    fn entry<F: FnOnce()>(_: &F) -> unsafe extern "C" fn(*mut std::ffi::c_void) {
        trampoline::<F>
    }
    if stream.device() == Device::Cpu {
        call();
        return Ok(());
    }
    let context = Context::of(stream.device())?;
    let (entry, raw) = (entry(&call), Handle(stream.as_raw()));
    // SAFETY: the stream is live by its maker's promise.
    if context.ask(|api, own| unsafe { api.is_capturing(own, raw) })? {
        return Err(Error::Unsupported {
            operation: "calling a function of the host",
            device: stream.device(),
            why: "the stream is captured; call it before or after the capture".into(),
        });
    }
    let data = Box::into_raw(Box::new(call));
    // SAFETY: the stream is live by its maker's promise; the box belongs to the call from here on.
    let put = context.ask(|api, own| unsafe { api.call_host(own, raw, entry, data.cast()) });
    if put.is_err() {
        // SAFETY: it was not put in, so nobody else has the box.
        drop(unsafe { Box::from_raw(data) });
    }
    put
}
