//! Streams and events of our own. A stream runs its work in order; an event marks a place in it.

use super::Context;
use super::api::Handle;
use crate::{Device, Result, Stream};

/// A stream that waits for no other but where it is told to. On the CPU it is the CPU's one stream.
///
/// The driver's stream outlives this value: dropped, it is kept for whoever asks next, so that no [`Stream`] ever dangles.
/// Work that is under way runs on.
#[derive(Debug)]
pub struct OwnedStream {
    stream: Stream,
    context: Option<&'static Context>,
}

impl OwnedStream {
    /// A stream of a device.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) or [`Error::Cuda`](crate::Error::Cuda).
    pub fn new(device: Device) -> Result<OwnedStream> {
        if device == Device::Cpu {
            return Ok(OwnedStream { stream: Stream::cpu(), context: None });
        }
        let context = Context::of(device)?;
        let raw = context.take_stream()?;
        // SAFETY: a stream of the device's primary context, which is never destroyed.
        let stream = unsafe { Stream::from_raw(device, raw.0) };
        Ok(OwnedStream { stream, context: Some(context) })
    }

    /// The stream, to be given to calls.
    pub fn stream(&self) -> Stream {
        self.stream
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if let Some(context) = self.context {
            context.give_back_stream(Handle(self.stream.as_raw()));
        }
    }
}

/// Waits on the host until all that was put into a stream has run, and reports what went wrong. Nothing on the CPU.
///
/// # Errors
/// [`Error::Cuda`](crate::Error::Cuda): the wait itself, or work before it.
pub(crate) fn synchronize(stream: &Stream) -> Result<()> {
    if stream.device() == Device::Cpu {
        return Ok(());
    }
    let raw = Handle(stream.as_raw());
    // SAFETY: whoever made the stream promised that it is live.
    Context::of(stream.device())?.ask(|api, context| unsafe { api.synchronize_stream(context, raw) })
}

/// Whether all that was put into a stream has run. Always, on the CPU.
///
/// # Errors
/// As [`synchronize`].
pub(crate) fn is_idle(stream: &Stream) -> Result<bool> {
    if stream.device() == Device::Cpu {
        return Ok(true);
    }
    let raw = Handle(stream.as_raw());
    // SAFETY: whoever made the stream promised that it is live.
    Context::of(stream.device())?.ask(|api, context| unsafe { api.query_stream(context, raw) })
}

/// A place in a stream, for others to wait for. On the CPU, where work is done when a call returns, it has always passed.
#[derive(Debug)]
pub struct Event {
    device: Device,
    /// Absent on the CPU.
    raw: Option<(&'static Context, Handle)>,
}

impl Event {
    /// An event that marks no place yet: it has passed.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) or [`Error::Cuda`](crate::Error::Cuda).
    pub fn new(device: Device) -> Result<Event> {
        Event::make(device, false)
    }

    /// An event that knows when it passed, for measuring; dearer than others.
    ///
    /// # Errors
    /// As [`Event::new`].
    pub fn timed(device: Device) -> Result<Event> {
        Event::make(device, true)
    }

    fn make(device: Device, timed: bool) -> Result<Event> {
        if device == Device::Cpu {
            return Ok(Event { device, raw: None });
        }
        let context = Context::of(device)?;
        let raw = context.ask(|api, raw| api.create_event(raw, timed))?;
        Ok(Event { device, raw: Some((context, raw)) })
    }

    /// Its device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Marks the place in `stream` up to which work has been put in.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch), or [`Error::Cuda`](crate::Error::Cuda).
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if stream.device() != self.device {
            return Err(crate::Error::DeviceMismatch {
                tensor: "stream",
                expected: self.device,
                got: stream.device(),
            });
        }
        let Some((context, event)) = self.raw else { return Ok(()) };
        let stream = Handle(stream.as_raw());
        // SAFETY: the event is this value's; whoever made the stream promised that it is live.
        context.ask(|api, raw| unsafe { api.record_event(raw, event, stream) })
    }

    /// Whether the marked place has passed.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): work before it went wrong.
    pub fn query(&self) -> Result<bool> {
        let Some((context, event)) = self.raw else { return Ok(true) };
        // SAFETY: the event is this value's.
        context.ask(|api, raw| unsafe { api.query_event(raw, event) })
    }

    /// Waits on the host until the marked place has passed.
    ///
    /// # Errors
    /// As [`Event::query`].
    pub fn synchronize(&self) -> Result<()> {
        let Some((context, event)) = self.raw else { return Ok(()) };
        // SAFETY: the event is this value's.
        context.ask(|api, raw| unsafe { api.synchronize_event(raw, event) })
    }

    /// Holds back what is put into `stream` from here on until the marked place has passed. The host does not wait. The
    /// stream may be another device's, or the CPU's, where the host waits after all.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn hold(&self, stream: &Stream) -> Result<()> {
        let Some((_, event)) = self.raw else { return Ok(()) };
        if stream.device() == Device::Cpu {
            return self.synchronize();
        }
        let held = Handle(stream.as_raw());
        // SAFETY: the event is this value's; whoever made the stream promised that it is live.
        Context::of(stream.device())?.ask(|api, raw| unsafe { api.wait_event(raw, held, event) })
    }

    /// Milliseconds from this event to a later one; both are timed and have passed. 0 on the CPU.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda): one is not timed, or has not passed.
    pub fn elapsed_ms(&self, later: &Event) -> Result<f32> {
        let (Some((context, start)), Some((_, end))) = (self.raw, later.raw) else { return Ok(0.0) };
        // SAFETY: both are live.
        context.ask(|api, raw| unsafe { api.elapsed(raw, start, end) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some((context, event)) = self.raw {
            // SAFETY: made by this value, and destroyed once; a driver keeps what a stream still waits for.
            context.ask_or_note(|api, raw| unsafe { api.destroy_event(raw, event) });
        }
    }
}
