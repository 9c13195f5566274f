//! An array of a forward: where the layers run, and on the host where it is drawn or looked at.

use mstar_kernels::{Buffer, DType, Device, Result, Stream, TensorMut, TensorRef, copy};

/// An array on the layers' device, with a twin on the host where that is another place.
pub(super) struct Twin {
    dtype: DType,
    host: Buffer,
    device: Option<Buffer>,
}

impl Twin {
    /// A row-major array of `shape`, zeroed.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub(super) fn new(stream: &Stream, dtype: DType, shape: &[usize]) -> Result<Twin> {
        let device = match stream.device() {
            Device::Cpu => None,
            device => {
                let made = Buffer::for_tensor_on(device, dtype, shape);
                Some(made.map_err(|why| why.wanted_for("an array of a forward"))?)
            }
        };
        let host = match &device {
            None => Buffer::for_tensor(dtype, shape)?,
            // Page-locked, so that copies run at the link's speed.
            Some(twin) => Buffer::pinned(stream.device(), twin.len())?,
        };
        Ok(Twin { dtype, host, device })
    }

    /// Bytes of it, without the twin's.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.host.len()
    }

    /// The first elements on the host, in another shape.
    pub(super) fn host(&self, shape: &[usize]) -> Result<TensorRef<'_>> {
        self.host.tensor(0, self.dtype, shape)
    }

    /// As [`Twin::host`], as bytes.
    pub(super) fn host_bytes(&self, bytes: usize) -> Result<TensorRef<'_>> {
        self.host.tensor(0, DType::U8, &[bytes])
    }

    /// As [`Twin::host`], to write to.
    pub(super) fn host_mut(&mut self, shape: &[usize]) -> Result<TensorMut<'_>> {
        self.host.tensor_mut(0, self.dtype, shape)
    }

    /// The first elements where the layers run.
    pub(super) fn here(&self, shape: &[usize]) -> Result<TensorRef<'_>> {
        self.device.as_ref().unwrap_or(&self.host).tensor(0, self.dtype, shape)
    }

    /// As [`Twin::here`], to write to.
    pub(super) fn here_mut(&mut self, shape: &[usize]) -> Result<TensorMut<'_>> {
        self.device.as_mut().unwrap_or(&mut self.host).tensor_mut(0, self.dtype, shape)
    }

    /// Brings the first `elements` from the host to where the layers run, and waits.
    ///
    /// # Errors
    /// What the device says.
    pub(super) fn send(&mut self, stream: &Stream, elements: usize) -> Result<()> {
        let Some(device) = &mut self.device else { return Ok(()) };
        let shape = [elements];
        copy(stream, self.host.tensor(0, self.dtype, &shape)?, device.tensor_mut(0, self.dtype, &shape)?)
    }

    /// Brings the first `elements` from where the layers run to the host, and waits.
    ///
    /// # Errors
    /// What the device says.
    pub(super) fn fetch(&mut self, stream: &Stream, elements: usize) -> Result<()> {
        let Some(device) = &self.device else { return Ok(()) };
        let shape = [elements];
        copy(stream, device.tensor(0, self.dtype, &shape)?, self.host.tensor_mut(0, self.dtype, &shape)?)
    }
}
