//! The emulated device's memory: allocations of the host, known by their addresses.
//!
//! What a pool hands out, and what was given back to it, is full of `0xff`, a NaN in every format: who reads memory before it was
//! cleared, or after it was freed, computes with that. Freed memory that was written to is found out when it is handed out again.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

use super::super::{Called, Failed};
use super::{INVALID_VALUE, fail};

/// Bytes that the device has.
pub(super) const BYTES: usize = 8 << 30;

const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;
/// A driver aligns device memory to this.
const ALIGNMENT: usize = 256;
const PAGE: usize = 4096;
const POISON: u8 = 0xff;

/// Memory of the host, of which somebody asked for the first `bytes`.
#[derive(Clone, Copy)]
struct Block {
    layout: Layout,
    bytes: usize,
}

type Blocks = BTreeMap<usize, Block>;

/// What is allocated, by address.
#[derive(Default)]
pub(super) struct Memory {
    device: Blocks,
    device_bytes: usize,
    pinned: Blocks,
    pool: Pool,
}

/// The one pool.
#[derive(Default)]
struct Pool {
    live: Blocks,
    /// Given back by a call whose turn has not come.
    leaving: Blocks,
    /// Free to be handed out.
    idle: Blocks,
    reserved: usize,
}

/// Whether `[start, start + bytes)` lies in one allocation.
fn inside(blocks: &Blocks, start: usize, bytes: usize) -> bool {
    let Some(end) = start.checked_add(bytes) else { return false };
    blocks.range(..=start).next_back().is_some_and(|(&base, block)| end <= base + block.bytes)
}

fn take(call: &'static str, bytes: usize, align: usize) -> Called<(*mut u8, Block)> {
    if bytes == 0 {
        return fail(call, INVALID_VALUE);
    }
    let full = Failed { call, code: OUT_OF_MEMORY };
    let layout = Layout::from_size_align(bytes, align).map_err(|_| full)?;
    // SAFETY: the layout has a size.
    let ptr = unsafe { alloc_zeroed(layout) };
    if ptr.is_null() { Err(full) } else { Ok((ptr, Block { layout, bytes })) }
}

fn give_back(call: &'static str, blocks: &mut Blocks, ptr: *mut u8) -> Called<usize> {
    let Some(Block { layout, .. }) = blocks.remove(&(ptr as usize)) else { return fail(call, INVALID_VALUE) };
    // SAFETY: allocated by `take` with this layout, and just removed from the books.
    unsafe { dealloc(ptr, layout) };
    Ok(layout.size())
}

fn poison(at: usize, block: Block) {
    // SAFETY: a block of the pool, which nobody has.
    unsafe { (at as *mut u8).write_bytes(POISON, block.layout.size()) };
}

fn is_poisoned(at: usize, block: Block) -> bool {
    // SAFETY: as above.
    let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, block.layout.size()) };
    bytes.iter().all(|&byte| byte == POISON)
}

impl Memory {
    pub(super) fn free_bytes(&self) -> usize {
        BYTES - self.device_bytes - self.pool.reserved
    }

    pub(super) fn allocate(&mut self, bytes: usize) -> Called<*mut u8> {
        const CALL: &str = "cuMemAlloc_v2";
        if bytes > self.free_bytes() {
            return fail(CALL, OUT_OF_MEMORY);
        }
        let (ptr, block) = take(CALL, bytes, ALIGNMENT)?;
        self.device.insert(ptr as usize, block);
        self.device_bytes += bytes;
        Ok(ptr)
    }

    pub(super) fn free(&mut self, ptr: *mut u8) -> Called<()> {
        self.device_bytes -= give_back("cuMemFree_v2", &mut self.device, ptr)?;
        Ok(())
    }

    /// From the pool: what is idle and fits well, or more of the device.
    pub(super) fn allocate_pooled(&mut self, bytes: usize) -> Called<*mut u8> {
        const CALL: &str = "cuMemAllocFromPoolAsync";
        let fits = |block: &Block| block.layout.size() >= bytes && block.layout.size() / 2 <= bytes;
        let best = self
            .pool
            .idle
            .iter()
            .filter(|(_, block)| fits(block))
            .min_by_key(|(_, block)| block.layout.size());
        if let Some((&at, &block)) = best.filter(|_| bytes > 0) {
            self.pool.idle.remove(&at);
            if !is_poisoned(at, block) {
                // Somebody still writes there: it is never handed out again.
                return fail(CALL, ILLEGAL_ADDRESS);
            }
            self.pool.live.insert(at, Block { bytes, ..block });
            return Ok(at as *mut u8);
        }
        if bytes > self.free_bytes() {
            return fail(CALL, OUT_OF_MEMORY);
        }
        let (ptr, block) = take(CALL, bytes, ALIGNMENT)?;
        poison(ptr as usize, block);
        self.pool.live.insert(ptr as usize, block);
        self.pool.reserved += bytes;
        Ok(ptr)
    }

    /// The call that gives memory back: from here on no call may name it.
    pub(super) fn leave(&mut self, ptr: *mut u8) -> Called<()> {
        let at = ptr as usize;
        match self.pool.live.remove(&at) {
            Some(block) => {
                self.pool.leaving.insert(at, block);
                Ok(())
            }
            None => fail("cuMemFreeAsync", INVALID_VALUE),
        }
    }

    /// Its turn in the stream: from here on it may be another's.
    pub(super) fn left(&mut self, at: usize) {
        if let Some(block) = self.pool.leaving.remove(&at) {
            poison(at, block);
            self.pool.idle.insert(at, block);
        }
    }

    /// Bytes that the pool holds, and of which are handed out.
    pub(super) fn pool_bytes(&self) -> (usize, usize) {
        let used = self.pool.live.values().chain(self.pool.leaving.values()).map(|block| block.layout.size());
        (self.pool.reserved, used.sum())
    }

    /// Gives idle memory of the pool back to the device, down to `keep` bytes held.
    pub(super) fn trim(&mut self, keep: usize) {
        while self.pool.reserved > keep
            && let Some((at, block)) = self.pool.idle.pop_first()
        {
            // SAFETY: allocated by `take` with this layout, and just removed from the books.
            unsafe { dealloc(at as *mut u8, block.layout) };
            self.pool.reserved -= block.layout.size();
        }
    }

    pub(super) fn allocate_pinned(&mut self, bytes: usize) -> Called<*mut u8> {
        let (ptr, block) = take("cuMemHostAlloc", bytes, PAGE)?;
        self.pinned.insert(ptr as usize, block);
        Ok(ptr)
    }

    pub(super) fn free_pinned(&mut self, ptr: *mut u8) -> Called<()> {
        give_back("cuMemFreeHost", &mut self.pinned, ptr).map(drop)
    }

    /// Whether a range is device memory.
    pub(super) fn holds(&self, start: usize, bytes: usize) -> bool {
        bytes == 0 || inside(&self.device, start, bytes) || inside(&self.pool.live, start, bytes)
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

    #[test]
    fn pooled_memory_is_poisoned_and_handed_out_again_when_its_turn_has_come() {
        let mut memory = Memory::default();
        let first = memory.allocate_pooled(1000).unwrap();
        let at = first as usize;
        assert!(is_poisoned(at, memory.pool.live[&at]) && memory.holds(at, 1000));
        memory.leave(first).unwrap();
        assert_eq!(memory.leave(first), fail("cuMemFreeAsync", INVALID_VALUE));
        assert!(!memory.holds(at, 1), "freed when the call was made");
        let second = memory.allocate_pooled(1000).unwrap();
        assert_ne!(first, second, "its turn has not come");
        assert_eq!(memory.pool_bytes(), (2000, 2000));
        memory.left(at);
        assert_eq!(memory.allocate_pooled(900), Ok(first));
        assert!(memory.holds(at, 900) && !memory.holds(at, 901));
        assert_eq!(memory.pool_bytes(), (2000, 2000));
        memory.leave(first).unwrap();
        memory.left(at);
        // SAFETY: the block is the pool's still; this is the write after a free that is to be found out.
        unsafe { first.write(1) };
        assert_eq!(memory.allocate_pooled(1000), fail("cuMemAllocFromPoolAsync", ILLEGAL_ADDRESS));
        memory.leave(second).unwrap();
        memory.left(second as usize);
        memory.trim(0);
        assert_eq!(memory.pool_bytes(), (1000, 0), "what was written to is lost");
    }
}
