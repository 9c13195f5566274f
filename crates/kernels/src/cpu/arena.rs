//! Typed slices cut from one block of scratch memory.

use bytemuck::Pod;

/// What is left of a block. Slices start on cache lines.
pub(crate) struct Arena<'a> {
    memory: &'a mut [u8],
}

/// Bytes that `count` elements of `T` take from an [`Arena`].
pub(crate) const fn arena_bytes<T>(count: usize) -> usize {
    (count * size_of::<T>()).next_multiple_of(64)
}

impl<'a> Arena<'a> {
    /// A block, which starts on a cache line.
    pub(crate) fn new(memory: &'a mut [u8]) -> Arena<'a> {
        Arena { memory }
    }

    /// The next `count` elements, holding whatever was there.
    pub(crate) fn take<T: Pod>(&mut self, count: usize) -> &'a mut [T] {
        let memory = std::mem::take(&mut self.memory);
        let (taken, rest) = memory.split_at_mut(arena_bytes::<T>(count));
        self.memory = rest;
        bytemuck::cast_slice_mut(&mut taken[..count * size_of::<T>()])
    }
}
