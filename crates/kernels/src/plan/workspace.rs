//! Scratch memory for runs, sized by what a plan needs.

use crate::{Buffer, DType, Result, TensorMut};

/// Scratch for one run at a time. Its content means nothing between runs, so one serves many plans in turn.
#[derive(Debug)]
pub struct Workspace {
    buffer: Buffer,
}

impl Workspace {
    /// A workspace of `bytes` bytes.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn with_bytes(bytes: usize) -> Result<Workspace> {
        Ok(Workspace { buffer: Buffer::zeroed(bytes)? })
    }

    /// Grows to `needed` bytes; a workspace that is large enough stays where it is. Belongs to planning, never to a run.
    /// Returns whether it moved.
    ///
    /// # Errors
    /// When the memory cannot be had; the workspace is then as it was.
    pub fn reserve_bytes(&mut self, needed: usize) -> Result<bool> {
        if needed <= self.buffer.len() {
            return Ok(false);
        }
        self.buffer = Buffer::zeroed(needed)?;
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
