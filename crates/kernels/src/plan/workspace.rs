//! Scratch memory for runs, sized by what a plan needs.

use crate::{Buffer, DType, Device, Result, TensorMut};

/// Scratch for one run at a time. Its content means nothing between runs, so one serves many plans in turn.
#[derive(Debug)]
pub struct Workspace {
    buffer: Buffer,
}

impl Workspace {
    /// A workspace of `bytes` bytes on the host.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn with_bytes(bytes: usize) -> Result<Workspace> {
        Workspace::on(Device::Cpu, bytes)
    }

    /// A workspace of `bytes` bytes on a device.
    ///
    /// # Errors
    /// When there is no such device, or the memory cannot be had.
    pub fn on(device: Device, bytes: usize) -> Result<Workspace> {
        let buffer = Buffer::zeroed_on(device, bytes).map_err(|why| why.wanted_for("a workspace"))?;
        Ok(Workspace { buffer })
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.buffer.device()
    }

    /// Grows to `needed` bytes, where it is; a workspace that is large enough does not move. Belongs to planning, never to a
    /// run. Waits for nobody: runs that are under way keep the old memory until they have run. Returns whether it moved.
    ///
    /// # Errors
    /// When the memory cannot be had; the workspace is then as it was.
    pub fn reserve_bytes(&mut self, needed: usize) -> Result<bool> {
        if needed <= self.buffer.len() {
            return Ok(false);
        }
        *self = Workspace::on(self.buffer.device(), needed)?;
        Ok(true)
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.buffer.len()
    }

    /// `[n]` u8: all of it.
    ///
    /// # Errors
    /// Never for a value in hand; the view is checked like any other.
    pub fn view(&mut self) -> Result<TensorMut<'_>> {
        let bytes = self.buffer.len();
        self.buffer.tensor_mut(0, DType::U8, &[bytes])
    }
}
