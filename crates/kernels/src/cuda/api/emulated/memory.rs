//! The emulated device's memory: allocations of the host, known by their addresses.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

use super::super::{Called, Failed};
use super::{INVALID_VALUE, fail};

/// Bytes that the device has.
pub(super) const BYTES: usize = 8 << 30;

const OUT_OF_MEMORY: i32 = 2;
/// A driver aligns device memory to this.
const ALIGNMENT: usize = 256;
const PAGE: usize = 4096;

/// What is allocated, by address.
#[derive(Default)]
pub(super) struct Memory {
    device: BTreeMap<usize, Layout>,
    device_bytes: usize,
    pinned: BTreeMap<usize, Layout>,
}

/// Whether `[start, start + bytes)` lies in one allocation.
fn inside(blocks: &BTreeMap<usize, Layout>, start: usize, bytes: usize) -> bool {
    let Some(end) = start.checked_add(bytes) else { return false };
    blocks.range(..=start).next_back().is_some_and(|(&base, layout)| end <= base + layout.size())
}

fn take(call: &'static str, bytes: usize, align: usize) -> Called<(*mut u8, Layout)> {
    if bytes == 0 {
        return fail(call, INVALID_VALUE);
    }
    let full = Failed { call, code: OUT_OF_MEMORY };
    let layout = Layout::from_size_align(bytes, align).map_err(|_| full)?;
    // SAFETY: the layout has a size.
    let ptr = unsafe { alloc_zeroed(layout) };
    if ptr.is_null() { Err(full) } else { Ok((ptr, layout)) }
}

fn give_back(call: &'static str, blocks: &mut BTreeMap<usize, Layout>, ptr: *mut u8) -> Called<usize> {
    let Some(layout) = blocks.remove(&(ptr as usize)) else { return fail(call, INVALID_VALUE) };
    // SAFETY: allocated by `take` with this layout, and just removed from the books.
    unsafe { dealloc(ptr, layout) };
    Ok(layout.size())
}

impl Memory {
    pub(super) fn free_bytes(&self) -> usize {
        BYTES - self.device_bytes
    }

    pub(super) fn allocate(&mut self, bytes: usize) -> Called<*mut u8> {
        const CALL: &str = "cuMemAlloc_v2";
        if bytes > self.free_bytes() {
            return fail(CALL, OUT_OF_MEMORY);
        }
        let (ptr, layout) = take(CALL, bytes, ALIGNMENT)?;
        self.device.insert(ptr as usize, layout);
        self.device_bytes += bytes;
        Ok(ptr)
    }

    pub(super) fn free(&mut self, ptr: *mut u8) -> Called<()> {
        self.device_bytes -= give_back("cuMemFree_v2", &mut self.device, ptr)?;
        Ok(())
    }

    pub(super) fn allocate_pinned(&mut self, bytes: usize) -> Called<*mut u8> {
        let (ptr, layout) = take("cuMemHostAlloc", bytes, PAGE)?;
        self.pinned.insert(ptr as usize, layout);
        Ok(ptr)
    }

    pub(super) fn free_pinned(&mut self, ptr: *mut u8) -> Called<()> {
        give_back("cuMemFreeHost", &mut self.pinned, ptr).map(drop)
    }

    /// Whether a range is device memory.
    pub(super) fn holds(&self, start: usize, bytes: usize) -> bool {
        bytes == 0 || inside(&self.device, start, bytes)
    }

    /// Whether a range of host memory is pinned.
    pub(super) fn is_pinned(&self, start: usize, bytes: usize) -> bool {
        bytes == 0 || inside(&self.pinned, start, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_one_allocation() {
        let mut memory = Memory::default();
        let ptr = memory.allocate(1000).unwrap();
        let at = ptr as usize;
        assert_eq!(at % ALIGNMENT, 0);
        assert_eq!(memory.free_bytes(), BYTES - 1000);
        assert!(memory.holds(at, 1000) && memory.holds(at + 999, 1) && memory.holds(at + 5000, 0));
        assert!(!memory.holds(at, 1001) && !memory.holds(at - 1, 2) && !memory.holds(at + 1, usize::MAX));
        assert!(!memory.is_pinned(at, 1));
        memory.free(ptr).unwrap();
        assert_eq!(memory.free(ptr), fail("cuMemFree_v2", INVALID_VALUE));
        assert_eq!(memory.free_bytes(), BYTES);
        assert_eq!(memory.allocate(BYTES + 1), fail("cuMemAlloc_v2", OUT_OF_MEMORY));
        assert_eq!(memory.allocate(0), fail("cuMemAlloc_v2", INVALID_VALUE));
    }
}
