//! Bytes that the host writes and a device reads, at an address that stays.
//!
//! Plans live here: an index array, a work list. A write goes into page-locked host memory and from there on the stream, so
//! that it waits for nobody; a block of host memory is written again only when its copy has run, which is asked and never waited
//! for. On the CPU it is plain memory, written at once.

use std::fmt;

use crate::cuda::Event;
use crate::{Buffer, DType, Device, Error, Result, Stream, TensorRef};

/// Bytes on a device that are written over and over in stream order, where readers find them.
pub struct Staged {
    device: Device,
    /// What is read.
    bytes: Buffer,
    /// Of which so many mean something.
    len: usize,
    /// Page-locked blocks; on the CPU there are none.
    blocks: Vec<Block>,
    /// Outgrown buffers, which work under way may still read. Their sizes double, so that together they are no larger than the
    /// one that is used.
    outgrown: Vec<Buffer>,
}

/// Page-locked memory with a copy from it.
struct Block {
    bytes: Buffer,
    /// Passed when the copy has run.
    copied: Event,
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged")
            .field("device", &self.device)
            .field("capacity", &self.bytes.len())
            .field("len", &self.len)
            .field("blocks", &self.blocks.len())
            .finish()
    }
}

impl Staged {
    /// Room for `bytes` bytes on the stream's device.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn with_capacity(stream: &Stream, bytes: usize) -> Result<Staged> {
        let device = stream.device();
        let mut staged = Staged {
            device,
            bytes: Staged::room(device, bytes)?,
            len: 0,
            blocks: Vec::new(),
            outgrown: Vec::new(),
        };
        if device != Device::Cpu && bytes > 0 {
            // Two plans at once are the rule: one that runs, one that is made.
            for _ in 0..2 {
                staged.blocks.push(Block::new(device, bytes)?);
            }
        }
        Ok(staged)
    }

    fn room(device: Device, bytes: usize) -> Result<Buffer> {
        Buffer::zeroed_on(device, bytes).map_err(|why| why.wanted_for("a plan's tables"))
    }

    /// Replaces the bytes by `bytes`, in stream order: what is put into the stream afterwards reads them. The address stays
    /// unless they do not fit. Never waits for the device.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] for a stream of another device; memory that cannot be had; a copy that the driver refuses.
    pub fn set(&mut self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        self.set_with(stream, bytes.len(), |to| to.copy_from_slice(bytes))
    }

    /// As [`Staged::set`]: `write` writes the `len` bytes, whose content before is anything.
    ///
    /// # Errors
    /// As [`Staged::set`].
    pub fn set_with(&mut self, stream: &Stream, len: usize, write: impl FnOnce(&mut [u8])) -> Result<()> {
        self.check(stream)?;
        self.reserve(len)?;
        self.len = len;
        if len == 0 {
            return Ok(());
        }
        self.put(stream, len, std::slice::from_ref(&(0..len)), write)
    }

    /// Replaces some of the bytes that [`Staged::set_with`] wrote, in stream order: `write` is given all `len` bytes, of which it
    /// writes `parts`. What else it was given never reaches the device.
    ///
    /// # Errors
    /// As [`Staged::set`]; bytes that would have to move.
    pub fn set_parts(
        &mut self,
        stream: &Stream,
        len: usize,
        parts: &[std::ops::Range<usize>],
        write: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        self.check(stream)?;
        let end = parts.iter().map(|part| part.end).max().unwrap_or(0);
        if len > self.bytes.len() || end > len {
            return Err(Error::Capacity {
                what: "staged bytes",
                capacity: self.bytes.len().min(len),
                got: len.max(end),
            });
        }
        self.len = len;
        self.put(stream, len, parts, write)
    }

    fn check(&self, stream: &Stream) -> Result<()> {
        if stream.device() != self.device {
            let (tensor, expected, got) = ("staged bytes", self.device, stream.device());
            return Err(Error::DeviceMismatch { tensor, expected, got });
        }
        Ok(())
    }

    /// Has `write` write `parts` of `len` bytes, and puts these on their way.
    fn put(
        &mut self,
        stream: &Stream,
        len: usize,
        parts: &[std::ops::Range<usize>],
        write: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        if self.device == Device::Cpu {
            let mut to = self.bytes.tensor_mut(0, DType::U8, &[len])?;
            write(to.as_mut_slice::<u8>().expect("contiguous bytes on the host"));
            return Ok(());
        }
        let free = self.free_block(len)?;
        let block = &mut self.blocks[free];
        let mut from = block.bytes.tensor_mut(0, DType::U8, &[len])?;
        write(from.as_mut_slice::<u8>().expect("contiguous bytes on the host"));
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let from = block.bytes.tensor(part.start, DType::U8, &[part.len()])?;
            let to = self.bytes.tensor_mut(part.start, DType::U8, &[part.len()])?;
            // SAFETY: both are bytes of buffers that live as long as `self`, which outlives its plan's runs; the block is not
            // touched again until the event behind the copies has passed.
            unsafe { crate::copy_async(stream, from, to) }?;
        }
        block.copied.record(stream)
    }

    /// Grows to `len` bytes; belongs to planning. Returns whether the address changed.
    ///
    /// # Errors
    /// When the memory cannot be had; the bytes are then as they were.
    pub fn reserve(&mut self, len: usize) -> Result<bool> {
        if len <= self.bytes.len() {
            return Ok(false);
        }
        let larger = Staged::room(self.device, len.max(2 * self.bytes.len()))?;
        let outgrown = std::mem::replace(&mut self.bytes, larger);
        if self.device != Device::Cpu && !outgrown.is_empty() {
            self.outgrown.push(outgrown);
        }
        Ok(true)
    }

    /// A block whose copy has run, of at least `len` bytes; put last, where the next search looks last. Blocks that have become
    /// too small stay: to give them back would wait for the device.
    fn free_block(&mut self, len: usize) -> Result<usize> {
        let mut free = None;
        for (index, block) in self.blocks.iter().enumerate() {
            if block.bytes.len() >= len && block.copied.query()? {
                free = Some(index);
                break;
            }
        }
        match free {
            Some(index) => self.blocks[index..].rotate_left(1),
            None => self.blocks.push(Block::new(self.device, self.bytes.len())?),
        }
        Ok(self.blocks.len() - 1)
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Bytes that were set last.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no byte is set.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that fit without growing.
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    /// Where the bytes lie on the device. Stays until [`Staged::reserve`] says that it changed.
    pub fn address(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    /// The first bytes as a row-major tensor on the device.
    ///
    /// # Errors
    /// When it would leave the buffer.
    pub fn tensor(&self, dtype: DType, shape: &[usize]) -> Result<TensorRef<'_>> {
        self.bytes.tensor(0, dtype, shape)
    }
}

impl Block {
    fn new(device: Device, bytes: usize) -> Result<Block> {
        Ok(Block { bytes: Buffer::pinned(device, bytes)?, copied: Event::new(device)? })
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // The copies read blocks that are about to go.
        for block in &self.blocks {
            let _gone_or_done = block.copied.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_the_cpu_it_is_memory_that_grows_when_it_must() {
        let stream = Stream::cpu();
        let mut staged = Staged::with_capacity(&stream, 8).unwrap();
        let before = staged.address();
        staged.set(&stream, bytemuck::cast_slice(&[1i32, 2])).unwrap();
        assert_eq!((staged.address(), staged.len()), (before, 8));
        staged.set(&stream, bytemuck::cast_slice(&[3i32, 4, 5])).unwrap();
        assert_eq!(staged.tensor(DType::I32, &[3]).unwrap().as_slice::<i32>().unwrap(), [3, 4, 5]);
        assert!(staged.capacity() >= 16);
        staged.set(&stream, &[]).unwrap();
        assert!(staged.is_empty());
    }
}
