//! A device on paper: it says what a card of an architecture says of itself, hands out addresses and handles, and does nothing.
//!
//! What is built on it asks for the kernels that it would on a card; nothing is compiled or run. Its memory is no memory: only what
//! works beside a device's memory, as resources do while they are built, may run on it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::cuda::tensor_map::{Boxes, TensorMap};

use super::{Api, Begin, Called, Failed, FunctionAttributes, Handle, Image, Launch, Properties, Way};

/// Where addresses begin: past what a process has.
const FIRST: usize = 1 << 56;
const ALIGNMENT: usize = 256;
const PAGE: usize = 4096;
const OUT_OF_MEMORY: i32 = 2;

/// The device.
pub(crate) struct Paper {
    properties: Properties,
    next: AtomicUsize,
    pinned: Mutex<HashMap<usize, Layout>>,
}

impl Paper {
    /// A device that says this of itself, but for its memory: there is always enough, and no pools.
    pub(crate) fn new(properties: Properties) -> Paper {
        let properties = Properties { memory_bytes: isize::MAX as usize, pools: false, ..properties };
        Paper { properties, next: AtomicUsize::new(FIRST), pinned: Mutex::default() }
    }

    /// What a card of an architecture says of itself, as far as kernels are chosen by it.
    pub(crate) fn card(arch: (u32, u32)) -> Properties {
        // NVIDIA, CUDA C++ Programming Guide, technical specifications by compute capability: shared memory of a block.
        let shared = match arch {
            (8, 0 | 7) => 163 << 10,
            (8, _) | (12, _) => 99 << 10,
            _ => 227 << 10,
        };
        Properties {
            name: format!("sm_{}{} on paper", arch.0, arch.1),
            arch,
            sm_count: 132,
            shared_per_block_optin: shared,
            memory_bytes: 0,
            pools: false,
            driver_version: (0, 0),
        }
    }

    /// An address or a handle that is nobody's yet.
    fn fresh(&self, bytes: usize) -> usize {
        self.next.fetch_add(bytes.max(1).next_multiple_of(ALIGNMENT), Ordering::Relaxed)
    }

    fn handle(&self) -> Handle {
        Handle(self.fresh(1) as *mut c_void)
    }
}

impl Api for Paper {
    fn is_emulated(&self) -> bool {
        false
    }

    fn is_on_paper(&self) -> bool {
        true
    }

    fn device_count(&self) -> Called<u32> {
        Ok(1)
    }

    fn properties(&self, _ordinal: u32) -> Called<Properties> {
        Ok(self.properties.clone())
    }

    fn retain(&self, _ordinal: u32) -> Called<Handle> {
        Ok(self.handle())
    }

    fn free_memory(&self, _context: Handle) -> Called<usize> {
        Ok(self.properties.memory_bytes)
    }

    fn allocate(&self, _context: Handle, bytes: usize) -> Called<*mut u8> {
        Ok(self.fresh(bytes) as *mut u8)
    }

    unsafe fn free(&self, _context: Handle, _ptr: *mut u8) -> Called<()> {
        Ok(())
    }

    fn create_pool(&self, _ordinal: u32) -> Called<Handle> {
        Ok(self.handle())
    }

    fn allocate_from(
        &self,
        _context: Handle,
        _pool: Handle,
        _stream: Handle,
        bytes: usize,
    ) -> Called<*mut u8> {
        Ok(self.fresh(bytes) as *mut u8)
    }

    unsafe fn free_async(&self, _context: Handle, _stream: Handle, _ptr: *mut u8) -> Called<()> {
        Ok(())
    }

    fn pool_bytes(&self, _pool: Handle) -> Called<(usize, usize)> {
        Ok((0, 0))
    }

    fn trim_pool(&self, _pool: Handle, _keep: usize) -> Called<()> {
        Ok(())
    }

    /// The host's memory is real: the host writes there.
    fn allocate_pinned(&self, _context: Handle, bytes: usize) -> Called<*mut u8> {
        let failed = Failed { call: "cuMemHostAlloc", code: OUT_OF_MEMORY };
        let layout = Layout::from_size_align(bytes.max(1), PAGE).map_err(|_| failed)?;
        // SAFETY: the layout has a size.
        let ptr = unsafe { alloc_zeroed(layout) };
        if ptr.is_null() {
            return Err(failed);
        }
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).insert(ptr as usize, layout);
        Ok(ptr)
    }

    unsafe fn free_pinned(&self, _context: Handle, ptr: *mut u8) -> Called<()> {
        let layout = self.pinned.lock().unwrap_or_else(PoisonError::into_inner).remove(&(ptr as usize));
        if let Some(layout) = layout {
            // SAFETY: it is of `allocate_pinned`, by this layout, and is in the table no more.
            unsafe { dealloc(ptr, layout) };
        }
        Ok(())
    }

    unsafe fn copy(
        &self,
        _context: Handle,
        _stream: Handle,
        _way: Way,
        _src: *const u8,
        _dst: *mut u8,
        _bytes: usize,
    ) -> Called<()> {
        Ok(())
    }

    unsafe fn copy_peer(
        &self,
        _context: Handle,
        _stream: Handle,
        _src_context: Handle,
        _src: *const u8,
        _dst: *mut u8,
        _bytes: usize,
    ) -> Called<()> {
        Ok(())
    }

    unsafe fn fill(
        &self,
        _context: Handle,
        _stream: Handle,
        _dst: *mut u8,
        _value: u8,
        _bytes: usize,
    ) -> Called<()> {
        Ok(())
    }

    fn create_stream(&self, _context: Handle, _urgent: bool) -> Called<Handle> {
        Ok(self.handle())
    }

    unsafe fn synchronize_stream(&self, _context: Handle, _stream: Handle) -> Called<()> {
        Ok(())
    }

    unsafe fn query_stream(&self, _context: Handle, _stream: Handle) -> Called<bool> {
        Ok(true)
    }

    unsafe fn call_host(
        &self,
        _context: Handle,
        _stream: Handle,
        call: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Called<()> {
        // SAFETY: the caller's: `data` serves `call`. What was put in before has run.
        unsafe { call(data) };
        Ok(())
    }

    fn create_event(&self, _context: Handle, _timed: bool) -> Called<Handle> {
        Ok(self.handle())
    }

    unsafe fn destroy_event(&self, _context: Handle, _event: Handle) -> Called<()> {
        Ok(())
    }

    unsafe fn record_event(&self, _context: Handle, _event: Handle, _stream: Handle) -> Called<()> {
        Ok(())
    }

    unsafe fn query_event(&self, _context: Handle, _event: Handle) -> Called<bool> {
        Ok(true)
    }

    unsafe fn synchronize_event(&self, _context: Handle, _event: Handle) -> Called<()> {
        Ok(())
    }

    unsafe fn wait_event(&self, _context: Handle, _stream: Handle, _event: Handle) -> Called<()> {
        Ok(())
    }

    unsafe fn elapsed(&self, _context: Handle, _start: Handle, _end: Handle) -> Called<f32> {
        Ok(0.0)
    }

    unsafe fn load_module(&self, _context: Handle, _image: Image<'_>) -> Called<Handle> {
        Ok(self.handle())
    }

    unsafe fn function(
        &self,
        _context: Handle,
        _module: Handle,
        _name: &str,
        _shared: u32,
    ) -> Called<Handle> {
        Ok(self.handle())
    }

    unsafe fn attributes(&self, _context: Handle, _function: Handle) -> Called<FunctionAttributes> {
        Ok(FunctionAttributes {
            registers: 0,
            local_bytes: 0,
            static_shared_bytes: 0,
            max_threads: 1024,
            cluster: 1,
        })
    }

    unsafe fn blocks_per_sm(
        &self,
        _context: Handle,
        _function: Handle,
        _block: u32,
        _shared: u32,
    ) -> Called<u32> {
        Ok(1)
    }

    fn encode_map(&self, _boxes: &Boxes) -> Called<TensorMap> {
        Ok(TensorMap::default())
    }

    unsafe fn launch(
        &self,
        _context: Handle,
        _function: Handle,
        _stream: Handle,
        _launch: Launch,
        _begin: Begin,
        _params: *const c_void,
        _bytes: usize,
    ) -> Called<()> {
        Ok(())
    }

    unsafe fn begin_capture(&self, _context: Handle, _stream: Handle) -> Called<()> {
        Ok(())
    }

    unsafe fn is_capturing(&self, _context: Handle, _stream: Handle) -> Called<bool> {
        Ok(false)
    }

    unsafe fn end_capture(&self, _context: Handle, _stream: Handle) -> Called<(Handle, usize)> {
        Ok((self.handle(), 0))
    }

    unsafe fn launch_graph(&self, _context: Handle, _graph: Handle, _stream: Handle) -> Called<()> {
        Ok(())
    }

    unsafe fn destroy_graph(&self, _context: Handle, _graph: Handle) -> Called<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::jit::{Key, Target, Unit, asked_for, prepare, target_of};
    use crate::cuda::{Context, OwnedStream};
    use crate::{Buffer, Device};

    #[test]
    fn a_device_on_paper_is_asked_for_kernels_and_makes_none() {
        let of = |major, minor| Context::on_paper(Target::Sm { major, minor }).unwrap();
        let (ampere, hopper) = (of(8, 0), of(9, 0));
        assert_eq!((of(8, 0), of(9, 0)), (ampere, hopper), "one a target");
        assert_ne!(ampere, hopper);
        assert_eq!(target_of(hopper).unwrap(), Target::Sm { major: 9, minor: 0 });
        let optin = |device| Context::of(device).unwrap().shared_per_block_optin();
        assert_eq!((optin(ampere), optin(hopper), optin(of(8, 6))), (166_912, 232_448, 101_376));
        // No text, so that no compiler could make anything of it.
        let key = |number| Key::new(Unit::of("no.cu", ""), "no_kernel").with("NUMBER", number);
        prepare(ampere, &[key(2), key(1), key(2)]).unwrap();
        assert_eq!(asked_for(ampere), [key(1), key(2)]);
        assert_eq!(asked_for(hopper), []);
        // More than any card has, and none of it is there.
        let buffer = Buffer::zeroed_on(hopper, 1 << 50).unwrap();
        assert_eq!(buffer.len(), 1 << 50);
        let stream = OwnedStream::new(hopper).unwrap();
        assert_eq!(stream.stream().device(), hopper);
        assert!(matches!(hopper, Device::Cuda(number) if number > 31), "no card has the number");
    }
}
