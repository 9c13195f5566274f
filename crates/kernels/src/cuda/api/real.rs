//! The driver's own calls.
//!
//! The binding resolves a symbol when it is first called and ends the process when it is missing; so the library is looked for
//! and its version read before anything else, and an absent or old driver is an answer. The binding's own errors are never
//! printed, since printing one asks the driver.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::sys::CUfunction_attribute_enum as FunctionAttribute;

use super::{
    Api, Begin, Called, Failed, FunctionAttributes, Handle, Image, Launch, OLDEST_DRIVER, Properties, Way,
    elf,
};
use crate::DType;
use crate::cards::NoCuda;
use crate::cuda::tensor_map::{Boxes, MOST_AXES, Swizzle, TensorMap};

const INVALID_VALUE: i32 = 1;
const NO_DEVICE: i32 = 100;
const INVALID_IMAGE: i32 = 200;
const NOT_READY: i32 = 600;
/// Bytes of dynamic shared memory that any kernel may have; more has to be asked for.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

/// The first driver that takes a kernel which begins early down into a graph.
const EARLY_IN_GRAPHS: (u32, u32) = (12, 3);

/// The driver, opened and initialised.
pub(super) struct Real {
    version: (u32, u32),
    devices: u32,
}

/// A call of the binding, with its name for the error.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        check(stringify!($name), sys::$name($($argument),*))
    };
}

fn check(call: &'static str, result: sys::CUresult) -> Called<()> {
    match result as i32 {
        0 => Ok(()),
        code => Err(Failed { call, code }),
    }
}

/// The answer of a query, whose "not yet" is no failure.
fn answered(result: Called<()>) -> Called<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(failed) if failed.code == NOT_READY => Ok(false),
        Err(failed) => Err(failed),
    }
}

/// Makes calls in a context, and leaves the thread's own as it was, if it had another.
fn within<T>(context: Handle, calls: impl FnOnce() -> Called<T>) -> Called<T> {
    let context: sys::CUcontext = context.0.cast();
    let mut current: sys::CUcontext = ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { call!(cuCtxGetCurrent(&mut current)) }?;
    if current == context {
        return calls();
    }
    // SAFETY: a primary context, retained for as long as the process lives.
    unsafe { call!(cuCtxSetCurrent(context)) }?;
    let result = calls();
    if !current.is_null() {
        // SAFETY: it was current a moment ago.
        unsafe { call!(cuCtxSetCurrent(current)) }?;
    }
    result
}

fn address(ptr: *const u8) -> sys::CUdeviceptr {
    ptr as usize as sys::CUdeviceptr
}

impl Real {
    /// Opens the driver once a process.
    ///
    /// # Errors
    /// [`NoCuda`]: no driver, one that does not work, or one that is too old.
    pub(super) fn open() -> Result<&'static Real, NoCuda> {
        // Each step is asked of the library itself first, by name; the binding would panic where one is missing.
        let driver = super::super::driver::ask_driver()?;
        // SAFETY: opens the driver's library, which was opened a moment ago.
        if !unsafe { sys::is_culib_present() } {
            return Err(NoCuda::NoDriver { tried: "libcuda.so".into() });
        }
        let found = driver.version;
        if found.0 * 1000 + found.1 * 10 < OLDEST_DRIVER {
            return Err(NoCuda::TooOld { found, needed: (OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10) });
        }
        // SAFETY: takes flags, of which 0 is the only value.
        match unsafe { call!(cuInit(0)) } {
            Ok(()) => {}
            Err(failed) if failed.code == NO_DEVICE => {}
            Err(failed) => return Err(NoCuda::Broken { call: failed.call, code: Some(failed.code) }),
        }
        let version = (found.0 as u32, found.1 as u32);
        Ok(Box::leak(Box::new(Real { version, devices: driver.cards.len() as u32 })))
    }
}

fn device(ordinal: u32) -> Called<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: writes one value.
    unsafe { call!(cuDeviceGet(&mut device, ordinal as c_int)) }?;
    Ok(device)
}

impl Api for Real {
    fn is_emulated(&self) -> bool {
        false
    }

    fn device_count(&self) -> Called<u32> {
        Ok(self.devices)
    }

    fn properties(&self, ordinal: u32) -> Called<Properties> {
        let device = device(ordinal)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one value.
            unsafe { call!(cuDeviceGetAttribute(&mut value, attribute, device)) }?;
            Ok(value as u32)
        };
        let mut text = [0 as c_char; 256];
        let mut memory_bytes = 0;
        // SAFETY: writes at most 256 characters, and one value.
        unsafe {
            call!(cuDeviceGetName(text.as_mut_ptr(), text.len() as c_int, device))?;
            call!(cuDeviceTotalMem_v2(&mut memory_bytes, device))?;
        }
        let name: Vec<u8> = text.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
        Ok(Properties {
            name: String::from_utf8_lossy(&name).into_owned(),
            arch: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_per_block_optin: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            memory_bytes,
            pools: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
            driver_version: self.version,
        })
    }

    fn retain(&self, ordinal: u32) -> Called<Handle> {
        let device = device(ordinal)?;
        let mut context: sys::CUcontext = ptr::null_mut();
        // SAFETY: writes one handle. It is never released: other libraries of the process share it.
        unsafe { call!(cuDevicePrimaryCtxRetain(&mut context, device)) }?;
        Ok(Handle(context.cast()))
    }

    fn free_memory(&self, context: Handle) -> Called<usize> {
        within(context, || {
            let (mut free, mut total) = (0, 0);
            // SAFETY: writes two values.
            unsafe { call!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
            Ok(free)
        })
    }

    fn allocate(&self, context: Handle, bytes: usize) -> Called<*mut u8> {
        within(context, || {
            let mut ptr: sys::CUdeviceptr = 0;
            // SAFETY: writes one address.
            unsafe { call!(cuMemAlloc_v2(&mut ptr, bytes)) }?;
            Ok(ptr as usize as *mut u8)
        })
    }

    unsafe fn free(&self, context: Handle, ptr: *mut u8) -> Called<()> {
        // SAFETY: the caller's; the driver waits for work that is under way.
        within(context, || unsafe { call!(cuMemFree_v2(address(ptr))) })
    }

    fn create_pool(&self, ordinal: u32) -> Called<Handle> {
        let mut pool: sys::CUmemoryPool = ptr::null_mut();
        // SAFETY: a structure of numbers and one pointer, for which zeros mean "none".
        let mut how: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        how.allocType = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        how.handleTypes = sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_NONE;
        how.location.type_ = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
        how.location.id = device(ordinal)?;
        // SAFETY: reads the structure, writes one handle.
        unsafe { call!(cuMemPoolCreate(&mut pool, &how)) }?;
        use sys::CUmemPool_attribute_enum as Of;
        // Kept, whatever was given back; and no allocation waits for the work that a free is to come after.
        let (mut all, mut no) = (u64::MAX, 0 as c_int);
        // SAFETY: the pool was just made; each attribute is of the type that its pointer is of.
        let set = unsafe {
            call!(cuMemPoolSetAttribute(
                pool,
                Of::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                ptr::from_mut(&mut all).cast()
            ))
            .and_then(|()| {
                call!(cuMemPoolSetAttribute(
                    pool,
                    Of::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
                    ptr::from_mut(&mut no).cast()
                ))
            })
        };
        if let Err(failed) = set {
            // SAFETY: made above, and handed to nobody.
            unsafe { call!(cuMemPoolDestroy(pool)) }?;
            return Err(failed);
        }
        Ok(Handle(pool.cast()))
    }

    fn allocate_from(&self, context: Handle, pool: Handle, stream: Handle, bytes: usize) -> Called<*mut u8> {
        within(context, || {
            let mut ptr: sys::CUdeviceptr = 0;
            // SAFETY: the pool and the stream are live by their makers' promise; writes one address.
            unsafe { call!(cuMemAllocFromPoolAsync(&mut ptr, bytes, pool.0.cast(), stream.0.cast())) }?;
            Ok(ptr as usize as *mut u8)
        })
    }

    unsafe fn free_async(&self, context: Handle, stream: Handle, ptr: *mut u8) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuMemFreeAsync(address(ptr), stream.0.cast())) })
    }

    fn pool_bytes(&self, pool: Handle) -> Called<(usize, usize)> {
        use sys::CUmemPool_attribute_enum as Of;
        let ask = |of| {
            let mut bytes = 0u64;
            // SAFETY: the pool is kept; both attributes are of this type.
            unsafe { call!(cuMemPoolGetAttribute(pool.0.cast(), of, ptr::from_mut(&mut bytes).cast())) }?;
            Ok(bytes as usize)
        };
        Ok((ask(Of::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?, ask(Of::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?))
    }

    fn trim_pool(&self, pool: Handle, keep: usize) -> Called<()> {
        // SAFETY: the pool is kept.
        unsafe { call!(cuMemPoolTrimTo(pool.0.cast(), keep)) }
    }

    fn allocate_pinned(&self, context: Handle, bytes: usize) -> Called<*mut u8> {
        within(context, || {
            let mut ptr: *mut c_void = ptr::null_mut();
            // Not write-combined: the processor reads it too.
            // SAFETY: writes one address.
            unsafe { call!(cuMemHostAlloc(&mut ptr, bytes, sys::CU_MEMHOSTALLOC_PORTABLE)) }?;
            Ok(ptr.cast())
        })
    }

    unsafe fn free_pinned(&self, context: Handle, ptr: *mut u8) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuMemFreeHost(ptr.cast())) })
    }

    unsafe fn copy(
        &self,
        context: Handle,
        stream: Handle,
        way: Way,
        src: *const u8,
        dst: *mut u8,
        bytes: usize,
    ) -> Called<()> {
        let stream = stream.0.cast();
        // SAFETY: the caller's.
        within(context, || unsafe {
            match way {
                Way::HostToDevice => call!(cuMemcpyHtoDAsync_v2(address(dst), src.cast(), bytes, stream)),
                Way::DeviceToHost => call!(cuMemcpyDtoHAsync_v2(dst.cast(), address(src), bytes, stream)),
                Way::DeviceToDevice => call!(cuMemcpyDtoDAsync_v2(address(dst), address(src), bytes, stream)),
            }
        })
    }

    unsafe fn copy_peer(
        &self,
        context: Handle,
        stream: Handle,
        src_context: Handle,
        src: *const u8,
        dst: *mut u8,
        bytes: usize,
    ) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe {
            call!(cuMemcpyPeerAsync(
                address(dst),
                context.0.cast(),
                address(src),
                src_context.0.cast(),
                bytes,
                stream.0.cast(),
            ))
        })
    }

    unsafe fn fill(
        &self,
        context: Handle,
        stream: Handle,
        dst: *mut u8,
        value: u8,
        bytes: usize,
    ) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuMemsetD8Async(address(dst), value, bytes, stream.0.cast())) })
    }

    fn create_stream(&self, context: Handle, urgent: bool) -> Called<Handle> {
        within(context, || {
            let mut stream: sys::CUstream = ptr::null_mut();
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
            let (mut least, mut greatest) = (0, 0);
            if urgent {
                // SAFETY: writes two values.
                unsafe { call!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest)) }?;
            }
            // SAFETY: writes one handle; 0 is the priority of a stream that asks for none.
            unsafe { call!(cuStreamCreateWithPriority(&mut stream, flags, greatest)) }?;
            Ok(Handle(stream.cast()))
        })
    }

    unsafe fn synchronize_stream(&self, context: Handle, stream: Handle) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuStreamSynchronize(stream.0.cast())) })
    }

    unsafe fn query_stream(&self, context: Handle, stream: Handle) -> Called<bool> {
        // SAFETY: the caller's.
        answered(within(context, || unsafe { call!(cuStreamQuery(stream.0.cast())) }))
    }

    unsafe fn call_host(
        &self,
        context: Handle,
        stream: Handle,
        call: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuLaunchHostFunc(stream.0.cast(), Some(call), data)) })
    }

    fn create_event(&self, context: Handle, timed: bool) -> Called<Handle> {
        use sys::CUevent_flags_enum as Flags;
        let flags = if timed { Flags::CU_EVENT_DEFAULT } else { Flags::CU_EVENT_DISABLE_TIMING };
        within(context, || {
            let mut event: sys::CUevent = ptr::null_mut();
            // SAFETY: writes one handle.
            unsafe { call!(cuEventCreate(&mut event, flags as c_uint)) }?;
            Ok(Handle(event.cast()))
        })
    }

    unsafe fn destroy_event(&self, context: Handle, event: Handle) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuEventDestroy_v2(event.0.cast())) })
    }

    unsafe fn record_event(&self, context: Handle, event: Handle, stream: Handle) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuEventRecord(event.0.cast(), stream.0.cast())) })
    }

    unsafe fn query_event(&self, context: Handle, event: Handle) -> Called<bool> {
        // SAFETY: the caller's.
        answered(within(context, || unsafe { call!(cuEventQuery(event.0.cast())) }))
    }

    unsafe fn synchronize_event(&self, context: Handle, event: Handle) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuEventSynchronize(event.0.cast())) })
    }

    unsafe fn wait_event(&self, context: Handle, stream: Handle, event: Handle) -> Called<()> {
        // SAFETY: the caller's; 0 is the only value of the flags here.
        within(context, || unsafe { call!(cuStreamWaitEvent(stream.0.cast(), event.0.cast(), 0)) })
    }

    unsafe fn elapsed(&self, context: Handle, start: Handle, end: Handle) -> Called<f32> {
        within(context, || {
            let mut milliseconds = 0.0;
            // SAFETY: the caller's; writes one value.
            unsafe { call!(cuEventElapsedTime(&mut milliseconds, start.0.cast(), end.0.cast())) }?;
            Ok(milliseconds)
        })
    }

    unsafe fn load_module(&self, context: Handle, image: Image<'_>) -> Called<Handle> {
        let Image::Cubin(bytes) = image else {
            return Err(Failed { call: "cuModuleLoadData", code: INVALID_IMAGE });
        };
        if !elf::lies_inside(bytes) {
            return Err(Failed { call: "cuModuleLoadData", code: INVALID_IMAGE });
        }
        within(context, || {
            let mut module: sys::CUmodule = ptr::null_mut();
            // SAFETY: a whole ELF image; writes one handle. The driver copies what it keeps.
            unsafe { call!(cuModuleLoadData(&mut module, bytes.as_ptr().cast())) }?;
            Ok(Handle(module.cast()))
        })
    }

    unsafe fn function(&self, context: Handle, module: Handle, name: &str, shared: u32) -> Called<Handle> {
        let Ok(name) = CString::new(name) else {
            return Err(Failed { call: "cuModuleGetFunction", code: INVALID_VALUE });
        };
        within(context, || {
            let mut function: sys::CUfunction = ptr::null_mut();
            // SAFETY: the module is the caller's; the name ends with a zero; writes one handle.
            unsafe { call!(cuModuleGetFunction(&mut function, module.0.cast(), name.as_ptr())) }?;
            if shared > SHARED_WITHOUT_ASKING {
                let most = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was just found.
                unsafe { call!(cuFuncSetAttribute(function, most, shared as c_int)) }?;
            }
            Ok(Handle(function.cast()))
        })
    }

    unsafe fn attributes(&self, context: Handle, function: Handle) -> Called<FunctionAttributes> {
        within(context, || {
            let attribute = |attribute| {
                let mut value = 0;
                // SAFETY: the function is the caller's; writes one value.
                unsafe { call!(cuFuncGetAttribute(&mut value, attribute, function.0.cast())) }?;
                Ok(value as u32)
            };
            Ok(FunctionAttributes {
                registers: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
                local_bytes: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
                static_shared_bytes: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
                max_threads: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
                // 0 where it has none.
                cluster: attribute(FunctionAttribute::CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH)?.max(1),
            })
        })
    }

    unsafe fn blocks_per_sm(
        &self,
        context: Handle,
        function: Handle,
        block: u32,
        shared: u32,
    ) -> Called<u32> {
        within(context, || {
            let mut blocks = 0;
            // SAFETY: the function is the caller's; writes one value.
            unsafe {
                call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &mut blocks,
                    function.0.cast(),
                    block as c_int,
                    shared as usize,
                ))
            }?;
            Ok(blocks as u32)
        })
    }

    fn encode_map(&self, boxes: &Boxes) -> Called<TensorMap> {
        use sys::CUtensorMapDataType_enum as Type;
        use sys::CUtensorMapSwizzle_enum as Pieces;
        let dtype = match boxes.dtype {
            DType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            DType::I32 => Type::CU_TENSOR_MAP_DATA_TYPE_INT32,
            DType::I64 => Type::CU_TENSOR_MAP_DATA_TYPE_INT64,
            DType::E4m3 | DType::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        };
        let swizzle = match boxes.swizzle {
            Swizzle::None => Pieces::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::B128 => Pieces::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: writes one map; every array has as many entries as the driver reads of it, which is the number of axes or one less.
        unsafe {
            call!(cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                boxes.axes as u32,
                boxes.at as *mut c_void,
                boxes.extent.as_ptr(),
                boxes.stride[1..].as_ptr(),
                boxes.boxed.as_ptr(),
                [1u32; MOST_AXES].as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ))
        }?;
        Ok(TensorMap(map.opaque))
    }

    unsafe fn launch(
        &self,
        context: Handle,
        function: Handle,
        stream: Handle,
        launch: Launch,
        begin: Begin,
        params: *const c_void,
        _bytes: usize,
    ) -> Called<()> {
        // The driver copies the parameter at the call, as many bytes as the kernel was compiled for.
        let mut arguments = [params.cast_mut()];
        let early = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
        let mut attributes = [sys::CUlaunchAttribute { id: early, pad: [0; 4], value }];
        let [x, y, z] = launch.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream.0.cast(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: (begin == Begin::Early && self.version >= EARLY_IN_GRAPHS).into(),
        };
        // SAFETY: the caller's; configuration and argument are read before the call returns.
        within(context, || unsafe {
            call!(cuLaunchKernelEx(&config, function.0.cast(), arguments.as_mut_ptr(), ptr::null_mut()))
        })
    }

    unsafe fn begin_capture(&self, context: Handle, stream: Handle) -> Called<()> {
        // Of the thread alone: another may allocate meanwhile.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuStreamBeginCapture_v2(stream.0.cast(), mode)) })
    }

    unsafe fn is_capturing(&self, context: Handle, stream: Handle) -> Called<bool> {
        use sys::CUstreamCaptureStatus_enum as Status;
        within(context, || {
            let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
            // SAFETY: the stream is the caller's; writes one value.
            unsafe { call!(cuStreamIsCapturing(stream.0.cast(), &mut status)) }?;
            Ok(status != Status::CU_STREAM_CAPTURE_STATUS_NONE)
        })
    }

    unsafe fn end_capture(&self, context: Handle, stream: Handle) -> Called<(Handle, usize)> {
        within(context, || {
            let mut graph: sys::CUgraph = ptr::null_mut();
            // SAFETY: the caller's; writes one handle.
            unsafe { call!(cuStreamEndCapture(stream.0.cast(), &mut graph)) }?;
            let (mut executable, mut nodes): (sys::CUgraphExec, usize) = (ptr::null_mut(), 0);
            // SAFETY: the graph was just made; a null list of nodes asks for their number.
            let made = unsafe {
                call!(cuGraphGetNodes(graph, ptr::null_mut(), &mut nodes))
                    .and_then(|()| call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)))
            };
            // SAFETY: the graph was just made, and what it was instantiated to does not need it.
            let destroyed = unsafe { call!(cuGraphDestroy(graph)) };
            made?;
            // SAFETY: it was just made; both paths leave the caller nothing.
            let ready = destroyed.and_then(|()| unsafe { call!(cuGraphUpload(executable, stream.0.cast())) });
            if let Err(failed) = ready {
                // SAFETY: made above, and handed to nobody.
                unsafe { call!(cuGraphExecDestroy(executable)) }?;
                return Err(failed);
            }
            Ok((Handle(executable.cast()), nodes))
        })
    }

    unsafe fn launch_graph(&self, context: Handle, graph: Handle, stream: Handle) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuGraphLaunch(graph.0.cast(), stream.0.cast())) })
    }

    unsafe fn destroy_graph(&self, context: Handle, graph: Handle) -> Called<()> {
        // SAFETY: the caller's.
        within(context, || unsafe { call!(cuGraphExecDestroy(graph.0.cast())) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f37_opening_the_driver_is_an_answer_not_a_panic() {
        match Real::open() {
            Ok(real) => assert!(real.version.0 >= 12),
            Err(why) => assert!(why.to_string().contains("CUDA"), "{why}"),
        }
    }
}
