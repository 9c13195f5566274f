//! The names of [`cuda`](crate::cuda) in a build without the feature: there is no device, and it says why. Streams and events of
//! the CPU are here, so that a caller is written once.

use std::convert::Infallible;
use std::ptr::NonNull;

use crate::cards::{Driver, NoCuda};
use crate::{Device, Error, Result, Stream};

/// The driver and its cards: none in this build.
///
/// # Errors
/// Always [`NoCuda::NotCompiled`].
pub fn driver() -> std::result::Result<Driver, NoCuda> {
    Err(NoCuda::NotCompiled)
}

fn none<T>(device: Device) -> Result<T> {
    Err(Error::NoDevice { device, why: NoCuda::NotCompiled.to_string() })
}

/// The stream of the CPU, which is there already.
#[derive(Debug)]
pub struct OwnedStream(());

impl OwnedStream {
    /// The stream of the CPU.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for every other device.
    pub fn new(device: Device) -> Result<OwnedStream> {
        if device == Device::Cpu { Ok(OwnedStream(())) } else { none(device) }
    }

    /// The stream, to be given to calls.
    pub fn stream(&self) -> Stream {
        Stream::cpu()
    }
}

/// A place in the CPU's stream, where work is done when a call returns: it has always passed.
#[derive(Debug)]
pub struct Event(());

impl Event {
    /// An event of the CPU.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for every other device.
    pub fn new(device: Device) -> Result<Event> {
        if device == Device::Cpu { Ok(Event(())) } else { none(device) }
    }

    /// As [`Event::new`].
    ///
    /// # Errors
    /// As [`Event::new`].
    pub fn timed(device: Device) -> Result<Event> {
        Event::new(device)
    }

    /// Its device.
    pub fn device(&self) -> Device {
        Device::Cpu
    }

    /// Marks a place that has passed.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for a stream of another device.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        synchronize(stream)
    }

    /// Always.
    ///
    /// # Errors
    /// Never.
    pub fn query(&self) -> Result<bool> {
        Ok(true)
    }

    /// Returns at once.
    ///
    /// # Errors
    /// Never.
    pub fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    /// Holds nothing back.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for a stream of another device.
    pub fn hold(&self, stream: &Stream) -> Result<()> {
        synchronize(stream)
    }

    /// 0.
    ///
    /// # Errors
    /// Never.
    pub fn elapsed_ms(&self, _later: &Event) -> Result<f32> {
        Ok(0.0)
    }
}

/// Work taken down once: there is none on the CPU.
#[derive(Debug)]
pub struct Graph(Infallible);

/// Refused: the CPU runs work again instead.
///
/// # Errors
/// [`Error::Unsupported`] on the CPU, [`Error::NoDevice`] elsewhere.
pub fn capture<E: From<Error>>(
    stream: &Stream,
    _record: impl FnOnce() -> std::result::Result<(), E>,
) -> std::result::Result<Graph, E> {
    if stream.device() != Device::Cpu {
        return Ok(none(stream.device())?);
    }
    Err(E::from(Error::Unsupported {
        operation: "capturing a graph",
        device: Device::Cpu,
        why: "work on the CPU is done when a call returns; run it again".into(),
    }))
}

impl Graph {
    /// Pieces of work in it.
    pub fn nodes(&self) -> usize {
        match self.0 {}
    }

    /// Its device.
    pub fn device(&self) -> Device {
        match self.0 {}
    }

    /// Puts it into a stream.
    ///
    /// # Errors
    /// None: there is no such value.
    ///
    /// # Safety
    /// None: there is no such value.
    pub unsafe fn launch(&self, _stream: &Stream) -> Result<()> {
        match self.0 {}
    }
}

/// Calls a function of the host, at once.
///
/// # Errors
/// [`Error::NoDevice`] for a stream of another device.
pub fn call_host(stream: &Stream, call: impl FnOnce() + Send + 'static) -> Result<()> {
    synchronize(stream)?;
    call();
    Ok(())
}

/// What a cache's entries will go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moving {
    /// Tokens into slots, by an array on the device.
    Scatter,
    /// Two sides of tokens into slots, by an array on the device.
    ScatterBoth,
    /// Tokens into slots, by a slice of the host's.
    ScatterListed,
    /// Pages to pages.
    Copy,
    /// Pages into tokens, by a slice of the host's.
    Unpage,
}

/// Nothing, on the CPU.
///
/// # Errors
/// [`Error::NoDevice`] for every other device.
pub fn prepare_moves(device: Device, _moving: &[Moving], _bytes: &[usize]) -> Result<()> {
    if device == Device::Cpu { Ok(()) } else { none(device) }
}

/// Memory of a driver: there is none in this build.
#[derive(Debug)]
pub(crate) struct Memory(Infallible);

impl Memory {
    pub(crate) fn on_device(device: Device, _bytes: usize) -> Result<Memory> {
        none(device)
    }

    pub(crate) fn pinned(device: Device, _bytes: usize) -> Result<Memory> {
        none(device)
    }

    pub(crate) fn ptr(&self) -> NonNull<u8> {
        match self.0 {}
    }

    pub(crate) fn device(&self) -> Device {
        match self.0 {}
    }

    pub(crate) fn pinned_for(&self) -> Option<Device> {
        match self.0 {}
    }
}

pub(crate) fn synchronize(stream: &Stream) -> Result<()> {
    if stream.device() == Device::Cpu { Ok(()) } else { none(stream.device()) }
}

pub(crate) fn is_idle(stream: &Stream) -> Result<bool> {
    synchronize(stream).map(|()| true)
}

/// # Safety
/// None: it only refuses.
pub(crate) unsafe fn transfer(
    stream: &Stream,
    _from: (Device, *const u8),
    _to: (Device, *mut u8),
    _bytes: usize,
) -> Result<()> {
    none(stream.device())
}

/// # Safety
/// None: it only refuses.
pub(crate) unsafe fn fill(stream: &Stream, _dst: *mut u8, _value: u8, _bytes: usize) -> Result<()> {
    none(stream.device())
}

/// What a device has of a work list: nothing, in a build without CUDA.
#[cfg(feature = "lists")]
#[derive(Clone, Debug, Default)]
pub(crate) struct StagedList;

#[cfg(feature = "lists")]
impl StagedList {
    pub(crate) fn forget(&mut self) {}
    #[cfg(any(feature = "paged", feature = "mla"))]
    pub(crate) fn renewed(&mut self, _pages: bool) {}
}
