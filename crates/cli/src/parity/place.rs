//! Where cases run: a device with a stream, and tensors that lie there.

use mstar_kernels::cuda::OwnedStream;
use mstar_kernels::{Buffer, Device, Element, Result, Stream, TensorMut, TensorRef, copy};

/// A device that cases run on.
pub(super) struct Place {
    stream: OwnedStream,
}

/// A contiguous tensor on a [`Place`].
#[cfg_attr(
    not(any(feature = "paged", feature = "mla", feature = "dense", feature = "flex", feature = "dsa")),
    allow(dead_code)
)]
pub(super) struct Held<E> {
    buffer: Buffer,
    shape: Vec<usize>,
    element: std::marker::PhantomData<E>,
}

#[cfg_attr(
    not(any(feature = "paged", feature = "mla", feature = "dense", feature = "flex", feature = "dsa")),
    allow(dead_code)
)]
impl Place {
    /// The device, with a stream of its own.
    pub(super) fn new(device: Device) -> Result<Place> {
        Ok(Place { stream: OwnedStream::new(device)? })
    }

    pub(super) fn stream(&self) -> Stream {
        self.stream.stream()
    }

    pub(super) fn device(&self) -> Device {
        self.stream().device()
    }

    /// A copy of `data` on the device.
    pub(super) fn put<E: Element>(&self, data: &[E], shape: &[usize]) -> Result<Held<E>> {
        let buffer = Buffer::for_tensor_on(self.device(), E::DTYPE, shape)?;
        let mut held = Held { buffer, shape: shape.to_vec(), element: std::marker::PhantomData };
        copy(&self.stream(), TensorRef::from_slice(data, shape)?, held.view_mut()?)?;
        Ok(held)
    }

    /// A tensor on the device that holds `value` everywhere.
    pub(super) fn filled<E: Element>(&self, value: E, shape: &[usize]) -> Result<Held<E>> {
        self.put(&vec![value; shape.iter().product()], shape)
    }

    /// What a tensor holds once the stream has come there.
    pub(super) fn take<E: Element>(&self, held: &Held<E>, unwritten: E) -> Result<Vec<E>> {
        let mut data = vec![unwritten; held.shape.iter().product()];
        copy(&self.stream(), held.view()?, TensorMut::from_slice(&mut data, &held.shape)?)?;
        Ok(data)
    }
}

#[cfg_attr(
    not(any(feature = "paged", feature = "mla", feature = "dense", feature = "flex", feature = "dsa")),
    allow(dead_code)
)]
impl<E: Element> Held<E> {
    pub(super) fn view(&self) -> Result<TensorRef<'_>> {
        self.buffer.tensor(0, E::DTYPE, &self.shape)
    }

    pub(super) fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        self.buffer.tensor_mut(0, E::DTYPE, &self.shape)
    }
}
