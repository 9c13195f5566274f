//! A plan's index array, shared with whoever reads it beside the attention itself.

use std::sync::Arc;

use mstar_kernels::{DType, Staged, Stream, TensorRef};

use crate::Result;

/// An `[N]` i32 array of a plan. It keeps its address while the slot is planned again, as long as nobody holds a
/// handle across the planning; a holder keeps the values it saw.
#[derive(Clone, Debug)]
pub struct IndexBuf {
    stream: Stream,
    entries: Arc<Staged>,
    len: usize,
}

impl IndexBuf {
    /// Room for `capacity` entries on `stream`'s device, of which none is used yet. What is set is enqueued on `stream`.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn with_capacity(stream: &Stream, capacity: usize) -> Result<IndexBuf> {
        let entries = Arc::new(Staged::with_capacity(stream, capacity * DType::I32.size())?);
        Ok(IndexBuf { stream: *stream, entries, len: 0 })
    }

    /// Entries that fit without another allocation.
    pub fn capacity(&self) -> usize {
        self.entries.capacity() / DType::I32.size()
    }

    /// Replaces the entries: in place when they fit and nobody else holds them, else in fresh memory. Never waits.
    ///
    /// # Errors
    /// When memory is needed and cannot be had; the old entries stay.
    pub fn set(&mut self, entries: &[i32]) -> Result<()> {
        if self.capacity() < entries.len() || Arc::get_mut(&mut self.entries).is_none() {
            *self = IndexBuf::with_capacity(&self.stream, self.capacity().max(entries.len()))?;
        }
        let staged = Arc::get_mut(&mut self.entries).expect("unshared, or made just now");
        staged.set(&self.stream, bytemuck::cast_slice(entries))?;
        self.len = entries.len();
        Ok(())
    }

    /// `[N]` i32, on the device.
    ///
    /// # Errors
    /// Never for a value in hand; the view is checked like any other.
    pub fn view(&self) -> Result<TensorRef<'_>> {
        Ok(self.entries.tensor(DType::I32, &[self.len])?)
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replanning_keeps_the_address_and_never_changes_what_a_holder_saw() {
        let mut buf = IndexBuf::with_capacity(&Stream::cpu(), 4).unwrap();
        buf.set(&[0, 3, 7]).unwrap();
        let address = buf.view().unwrap().as_ptr();
        buf.set(&[0, 1]).unwrap();
        assert_eq!(buf.view().unwrap().as_ptr(), address);
        let held = buf.clone();
        buf.set(&[9, 9, 9, 9]).unwrap();
        assert_eq!(held.view().unwrap().as_slice::<i32>().unwrap(), &[0, 1]);
        buf.set(&[1; 5]).unwrap();
        assert_eq!((buf.len(), buf.capacity()), (5, 5));
    }
}
