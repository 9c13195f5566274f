//! Owned memory: aligned, zeroed, resident, and counted.
//!
//! Every byte that mstar allocates for caches, plans and workspaces goes through [`Buffer`], so that what
//! `mstar explain` promises can be held against what was taken ([`allocated_bytes`]).

use std::alloc::{Layout, LayoutError, alloc, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::Memory;
use crate::view::MAX_RANK;
use crate::{DType, Device, Error, Result, TensorMut, TensorRef};

/// Alignment of every buffer: a cache line, and a whole AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// CUDA devices that a process may use; their numbers are below.
pub(crate) const MOST_DEVICES: usize = 64;

/// What live buffers hold of one device, or of all together.
struct Counter {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Counter {
    const fn new() -> Counter {
        Counter { now: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }
}

static ALL: Counter = Counter::new();
static ON_HOST: Counter = Counter::new();
static ON_DEVICE: [Counter; MOST_DEVICES] = [const { Counter::new() }; MOST_DEVICES];
/// Of the host's, what is pinned for a device.
static PINNED: Counter = Counter::new();
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

fn counter(device: Device) -> Option<&'static Counter> {
    match device {
        Device::Cpu => Some(&ON_HOST),
        Device::Cuda(ordinal) => ON_DEVICE.get(ordinal as usize),
    }
}

/// The larger page size of x86-64 and AArch64 systems.
const HUGE_PAGE: usize = 2 << 20;

/// How `bytes` are allocated: large buffers start on a huge page. A cache's pages are read scattered, and with 4 KiB pages
/// each would cost a walk of the page tables.
fn layout(bytes: usize) -> std::result::Result<Layout, LayoutError> {
    let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { ALIGNMENT };
    Layout::from_size_align(bytes.max(1), align)
}

/// Asks the system to back memory with huge pages, where it decides by request. Nothing depends on the answer.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(ptr: *mut u8, bytes: usize) {
    const MADV_HUGEPAGE: std::ffi::c_int = 14;
    unsafe extern "C" {
        fn madvise(addr: *mut std::ffi::c_void, length: usize, advice: std::ffi::c_int) -> std::ffi::c_int;
    }
    // SAFETY: the range lies in an allocation of this process, starts on a page, and the advice changes no content.
    unsafe { madvise(ptr.cast(), bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE) };
}

/// Elsewhere the system decides by itself.
#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_ptr: *mut u8, _bytes: usize) {}

/// Bytes held by live buffers of this process, wherever they are.
pub fn allocated_bytes() -> usize {
    ALL.now.load(Ordering::Relaxed)
}

/// The most that [`allocated_bytes`] has been.
pub fn peak_allocated_bytes() -> usize {
    ALL.peak.load(Ordering::Relaxed)
}

/// Bytes of one device's memory held by live buffers. Pinned memory is the host's.
pub fn allocated_bytes_on(device: Device) -> usize {
    counter(device).map_or(0, |counter| counter.now.load(Ordering::Relaxed))
}

/// The most that [`allocated_bytes_on`] has been.
pub fn peak_allocated_bytes_on(device: Device) -> usize {
    counter(device).map_or(0, |counter| counter.peak.load(Ordering::Relaxed))
}

/// Bytes of the host's memory that live buffers have pinned for a device; they count as the host's too.
pub fn pinned_bytes() -> usize {
    PINNED.now.load(Ordering::Relaxed)
}

/// The most that [`pinned_bytes`] has been.
pub fn peak_pinned_bytes() -> usize {
    PINNED.peak.load(Ordering::Relaxed)
}

/// Buffers made since the process started: a run that allocates nothing leaves it unchanged.
pub fn allocation_count() -> usize {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Zeroed memory of the host or of a device, freed when dropped. The host's pages are touched when it is made, so that the
/// resident size is what was asked for and no kernel pays for a page fault.
///
/// Dropping memory of a device waits for nobody: it goes back when the work has run that was put into any stream through this
/// crate. Work that other code puts in by its address must have run by then. Dropping pinned memory waits for the device.
#[derive(Debug)]
pub struct Buffer {
    ptr: NonNull<u8>,
    bytes: usize,
    device: Device,
    /// A driver's memory; absent for the host's own.
    memory: Option<Memory>,
}

// SAFETY: a buffer owns plain bytes; it is as free to move between threads as a `Vec<u8>`.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read, except through `as_mut_shared`, whose caller promises disjointness.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `bytes` zero bytes on the host.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when they cannot be had; never an abort.
    pub fn zeroed(bytes: usize) -> Result<Buffer> {
        let refused = || Error::OutOfMemory { bytes, what: String::new(), device: Device::Cpu, free: None };
        let layout = layout(bytes).map_err(|_| refused())?;
        let ptr = if layout.align() == HUGE_PAGE {
            // SAFETY: the layout has a size of at least one byte.
            let ptr = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refused)?;
            ask_for_huge_pages(ptr.as_ptr(), bytes);
            // SAFETY: `bytes` bytes were just allocated there.
            unsafe { ptr.as_ptr().write_bytes(0, bytes) };
            ptr
        } else {
            // SAFETY: the layout has a size of at least one byte.
            NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?
        };
        for page in (0..bytes).step_by(4096) {
            // SAFETY: `page` is below `bytes`, inside the allocation. The volatile write makes it resident.
            unsafe { ptr.as_ptr().add(page).write_volatile(0) };
        }
        Ok(Buffer::counted(ptr, bytes, Device::Cpu, None))
    }

    /// `bytes` zero bytes on a device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when they cannot be had, [`Error::NoDevice`] when there is no such device, [`Error::Cuda`] when
    /// the driver refuses, as it does while this thread captures a graph.
    pub fn zeroed_on(device: Device, bytes: usize) -> Result<Buffer> {
        if device == Device::Cpu {
            return Buffer::zeroed(bytes);
        }
        let memory = Memory::on_device(device, bytes)?;
        Ok(Buffer::counted(memory.ptr(), bytes, device, Some(memory)))
    }

    /// `bytes` zero bytes on the host that `device` reads and writes by itself: copies to and from it wait for nobody. For
    /// [`Device::Cpu`] it is as [`Buffer::zeroed`].
    ///
    /// # Errors
    /// As [`Buffer::zeroed_on`].
    pub fn pinned(device: Device, bytes: usize) -> Result<Buffer> {
        if device == Device::Cpu {
            return Buffer::zeroed(bytes);
        }
        let memory = Memory::pinned(device, bytes)?;
        Ok(Buffer::counted(memory.ptr(), bytes, memory.device(), Some(memory)))
    }

    fn counted(ptr: NonNull<u8>, bytes: usize, device: Device, memory: Option<Memory>) -> Buffer {
        ALL.add(bytes);
        if let Some(counter) = counter(device) {
            counter.add(bytes);
        }
        if memory.as_ref().is_some_and(|memory| memory.pinned_for().is_some()) {
            PINNED.add(bytes);
        }
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        Buffer { ptr, bytes, device, memory }
    }

    /// Room for a row-major tensor on the host.
    ///
    /// # Errors
    /// [`Error::Overflow`] when the shape has no size, else as [`Buffer::zeroed`].
    pub fn for_tensor(dtype: DType, shape: &[usize]) -> Result<Buffer> {
        Buffer::for_tensor_on(Device::Cpu, dtype, shape)
    }

    /// Room for a row-major tensor on a device.
    ///
    /// # Errors
    /// [`Error::Overflow`] when the shape has no size, else as [`Buffer::zeroed_on`].
    pub fn for_tensor_on(device: Device, dtype: DType, shape: &[usize]) -> Result<Buffer> {
        let bytes = shape.iter().try_fold(dtype.size(), |n, &e| n.checked_mul(e));
        Buffer::zeroed_on(device, bytes.ok_or_else(|| Error::Overflow { shape: shape.to_vec() })?)
    }

    /// Where it is; the host for pinned memory.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The device that it is pinned for, if it is.
    pub fn pinned_for(&self) -> Option<Device> {
        self.memory.as_ref().and_then(Memory::pinned_for)
    }

    /// Where it starts: an address of its device, which stays for as long as the buffer does.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether no byte is held.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// A row-major view from `byte_offset` on.
    ///
    /// # Errors
    /// When the view would leave the buffer, or `byte_offset` is not aligned for `dtype`.
    pub fn tensor(&self, byte_offset: usize, dtype: DType, shape: &[usize]) -> Result<TensorRef<'_>> {
        let strides = self.check(byte_offset, dtype, shape)?;
        // SAFETY: `check` holds the view inside the buffer, which outlives the borrow.
        unsafe {
            TensorRef::from_raw_parts(
                self.ptr.as_ptr().add(byte_offset),
                self.device,
                dtype,
                shape,
                &strides[..shape.len()],
            )
        }
    }

    /// A row-major view from `byte_offset` on, writable.
    ///
    /// # Errors
    /// As [`Buffer::tensor`].
    pub fn tensor_mut(&mut self, byte_offset: usize, dtype: DType, shape: &[usize]) -> Result<TensorMut<'_>> {
        // SAFETY: `&mut self` is the only borrow.
        unsafe { self.as_mut_shared(byte_offset, dtype, shape) }
    }

    /// A writable view through a shared reference, for pools whose pages have one writer each.
    ///
    /// # Errors
    /// As [`Buffer::tensor`].
    ///
    /// # Safety
    /// No other thread reads or writes the elements that are written through the view while it lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_shared(
        &self,
        byte_offset: usize,
        dtype: DType,
        shape: &[usize],
    ) -> Result<TensorMut<'_>> {
        let strides = self.check(byte_offset, dtype, shape)?;
        // SAFETY: `check` holds the view inside the buffer; exclusivity is the caller's promise.
        unsafe {
            TensorMut::from_raw_parts(
                self.ptr.as_ptr().add(byte_offset),
                self.device,
                dtype,
                shape,
                &strides[..shape.len()],
            )
        }
    }

    /// Row-major strides of a view, which holds them inline: a run makes views and allocates nothing.
    fn check(&self, byte_offset: usize, dtype: DType, shape: &[usize]) -> Result<[usize; MAX_RANK]> {
        let overflow = || Error::Overflow { shape: shape.to_vec() };
        assert!(shape.len() <= MAX_RANK, "a view has at most {MAX_RANK} axes, got {shape:?}");
        let mut strides = [1usize; MAX_RANK];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis].checked_mul(shape[axis].max(1)).ok_or_else(overflow)?;
        }
        let numel = shape.iter().try_fold(1usize, |n, &e| n.checked_mul(e)).ok_or_else(overflow)?;
        let end =
            numel.checked_mul(dtype.size()).and_then(|b| b.checked_add(byte_offset)).ok_or_else(overflow)?;
        if end > self.bytes || !byte_offset.is_multiple_of(dtype.size()) {
            let available = self.bytes.saturating_sub(byte_offset) / dtype.size();
            let strides = strides[..shape.len()].to_vec();
            return Err(Error::OutOfBounds { shape: shape.to_vec(), strides, needed: numel, available });
        }
        Ok(strides)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.memory.is_none() {
            let layout = layout(self.bytes).expect("checked when it was made");
            // SAFETY: allocated in `zeroed` with this very layout, and freed once.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
        ALL.subtract(self.bytes);
        if self.pinned_for().is_some() {
            PINNED.subtract(self.bytes);
        }
        if let Some(counter) = counter(self.device) {
            counter.subtract(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(matches!(Buffer::zeroed(usize::MAX), Err(Error::OutOfMemory { .. })));
        assert!(Buffer::for_tensor(DType::F32, &[usize::MAX, 2]).is_err());
    }

    #[test]
    fn views_stay_inside_and_aligned() {
        let mut buffer = Buffer::zeroed(64).unwrap();
        buffer.tensor_mut(8, DType::F32, &[2, 7]).unwrap().as_mut_slice::<f32>().unwrap().fill(1.0);
        assert_eq!(buffer.tensor(8, DType::F32, &[14]).unwrap().as_slice::<f32>().unwrap(), &[1.0; 14]);
        assert!(buffer.tensor(8, DType::F32, &[15]).is_err());
        assert!(buffer.tensor(2, DType::F32, &[1]).is_err());
    }
}
