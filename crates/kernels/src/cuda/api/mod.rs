//! The few calls that this crate makes of a CUDA driver, as one trait of two: the driver itself, or a device made of the host.
//!
//! Everything above this room (contexts, memory, streams, graphs, launches) is written once against [`Api`], so that its logic
//! is tested where there is no card. Which of the two serves a process is settled once, at its first use: by the environment
//! variable `MSTAR_CUDA` (`driver`, the default, or `emulated`), or by [`emulate`] in a test.
//! A device on paper (`paper`) stands beside either of them: see [`Context::on_paper`](super::Context::on_paper).

mod elf;
#[cfg(feature = "emulator")]
mod emulated;
mod paper;
mod real;

pub(super) use paper::Paper;

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use super::tensor_map::{Boxes, TensorMap};
use crate::cards::{Card, Driver, NoCuda};

/// The environment variable that chooses between a driver and the emulated device.
const VARIABLE: &str = "MSTAR_CUDA";

/// The oldest driver that has every function called here, as `cuDriverGetVersion` counts: CUDA 12.0.
const OLDEST_DRIVER: i32 = 12_000;

/// A driver's opaque handle: a context, stream, event, module, function or graph. Null is no handle but for streams,
/// where it is the context's default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(pub(crate) *mut c_void);

// SAFETY: an opaque value that only a driver reads; the functions of `Api` may be called from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// A call that failed, and with what `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    /// The driver's function.
    pub(crate) call: &'static str,
    /// Its result.
    pub(crate) code: i32,
}

/// The result of a call.
pub(crate) type Called<T> = Result<T, Failed>;

/// What a device says of itself, asked once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) arch: (u32, u32),
    pub(crate) sm_count: u32,
    pub(crate) shared_per_block_optin: u32,
    pub(crate) memory_bytes: usize,
    /// Whether memory can be had and given back in stream order.
    pub(crate) pools: bool,
    pub(crate) driver_version: (u32, u32),
}

/// Code for a device, ready to be loaded.
#[derive(Clone, Copy, Debug)]
pub enum Image<'a> {
    /// Machine code for the device's architecture, as NVRTC makes it. Of the driver alone.
    Cubin(&'a [u8]),
    /// A shared object, whose functions are called `NAME__run`; where it has a word `NAME__cluster`, so many blocks are a cluster. Of the
    /// emulated device alone.
    SharedObject(&'a Path),
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub block: u32,
    /// Bytes of dynamic shared memory of a block; at most what the function was made for.
    pub shared: u32,
}

/// When a kernel may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// When all that comes before it in the stream has run.
    Behind,
    /// Sooner, if it is a kernel that comes right before it: it waits by itself (`after_earlier` in `cu/ptx.cuh`) before it touches
    /// memory. Where a device does not know that, as [`Begin::Behind`].
    Early,
}

/// What the compiler made of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionAttributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: more than 0 means a spill or an indexed array.
    pub local_bytes: u32,
    /// Bytes of static shared memory of a block.
    pub static_shared_bytes: u32,
    /// The most threads that a block may have.
    pub max_threads: u32,
    /// Blocks of a cluster, of which a grid's x is a multiple; 1 for a kernel without clusters.
    pub cluster: u32,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
}

/// The calls. The first argument is the context that they are made in; a thread's current context is left as it was.
pub(crate) trait Api: Send + Sync {
    /// Whether this is the emulated device.
    fn is_emulated(&self) -> bool;
    /// Whether nothing is done at all: see [`Paper`].
    fn is_on_paper(&self) -> bool {
        false
    }
    /// Devices that there are.
    fn device_count(&self) -> Called<u32>;
    /// What a device says of itself; `ordinal` is below the count.
    fn properties(&self, ordinal: u32) -> Called<Properties>;
    /// The device's primary context, kept for as long as the process lives.
    fn retain(&self, ordinal: u32) -> Called<Handle>;
    /// Bytes of free memory.
    fn free_memory(&self, context: Handle) -> Called<usize>;

    /// Device memory, aligned to 256 bytes; `bytes` is not 0.
    fn allocate(&self, context: Handle, bytes: usize) -> Called<*mut u8>;
    /// Frees device memory, after all work that was put in before.
    ///
    /// # Safety
    /// `ptr` is of `allocate`, and freed once; no later work touches it.
    unsafe fn free(&self, context: Handle, ptr: *mut u8) -> Called<()>;
    /// A pool of a device's memory that is kept for as long as the process lives. It keeps what was given back to it, and hands it
    /// out again when the work that was to come before has run: it makes no stream wait for another one.
    fn create_pool(&self, ordinal: u32) -> Called<Handle>;
    /// Memory of a pool, aligned to 256 bytes, that is there for what comes later in the stream; `bytes` is not 0. Waits for
    /// no work.
    fn allocate_from(&self, context: Handle, pool: Handle, stream: Handle, bytes: usize) -> Called<*mut u8>;
    /// Gives memory back to its pool in stream order. Waits for no work.
    ///
    /// # Safety
    /// `ptr` is of `allocate_from`, and given back once; no work touches it but what comes before in this stream. The stream is live.
    unsafe fn free_async(&self, context: Handle, stream: Handle, ptr: *mut u8) -> Called<()>;
    /// Bytes that a pool holds of its device, and of which are handed out.
    fn pool_bytes(&self, pool: Handle) -> Called<(usize, usize)>;
    /// Gives what a pool does not use back to the device, as long as it holds more than `keep` bytes.
    fn trim_pool(&self, pool: Handle, keep: usize) -> Called<()>;
    /// Host memory that the device reads and writes by itself, on a page; `bytes` is not 0.
    fn allocate_pinned(&self, context: Handle, bytes: usize) -> Called<*mut u8>;
    /// Frees it.
    ///
    /// # Safety
    /// `ptr` is of `allocate_pinned`, and freed once; no work that was put in still touches it.
    unsafe fn free_pinned(&self, context: Handle, ptr: *mut u8) -> Called<()>;

    /// Copies in stream order. Host memory that is not pinned is staged: the call returns when it may be reused, or was written.
    ///
    /// # Safety
    /// Both ranges exist on the sides that `way` names and stay until the copy has run; pinned memory is untouched until then.
    unsafe fn copy(
        &self,
        context: Handle,
        stream: Handle,
        way: Way,
        src: *const u8,
        dst: *mut u8,
        bytes: usize,
    ) -> Called<()>;
    /// Copies from memory of another context.
    ///
    /// # Safety
    /// As `copy`: `src` is memory of `src_context`, `dst` of `context`.
    unsafe fn copy_peer(
        &self,
        context: Handle,
        stream: Handle,
        src_context: Handle,
        src: *const u8,
        dst: *mut u8,
        bytes: usize,
    ) -> Called<()>;
    /// Sets device bytes in stream order.
    ///
    /// # Safety
    /// The range is device memory that stays until it has run.
    unsafe fn fill(
        &self,
        context: Handle,
        stream: Handle,
        dst: *mut u8,
        value: u8,
        bytes: usize,
    ) -> Called<()>;

    /// A stream that does not wait for the default one. An urgent one gets what becomes free of the device before others.
    fn create_stream(&self, context: Handle, urgent: bool) -> Called<Handle>;
    /// Waits for all that was put in.
    ///
    /// # Safety
    /// `stream` is a live stream of the context. So it is of every function below that takes one.
    unsafe fn synchronize_stream(&self, context: Handle, stream: Handle) -> Called<()>;
    /// Whether all that was put in has run.
    ///
    /// # Safety
    /// As `synchronize_stream`.
    unsafe fn query_stream(&self, context: Handle, stream: Handle) -> Called<bool>;
    /// Calls a function of the host in stream order.
    ///
    /// # Safety
    /// As `synchronize_stream`; `data` serves `call` until it has run, on whatever thread.
    unsafe fn call_host(
        &self,
        context: Handle,
        stream: Handle,
        call: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Called<()>;

    /// An event, with the time of day if `timed`.
    fn create_event(&self, context: Handle, timed: bool) -> Called<Handle>;
    /// # Safety
    /// `event` is a live event of the context, destroyed once. So it is of every function below that takes one.
    unsafe fn destroy_event(&self, context: Handle, event: Handle) -> Called<()>;
    /// Marks what was put in up to here.
    ///
    /// # Safety
    /// `event` and `stream` are live.
    unsafe fn record_event(&self, context: Handle, event: Handle, stream: Handle) -> Called<()>;
    /// Whether what was marked has run; an event that was never recorded has.
    ///
    /// # Safety
    /// `event` is live.
    unsafe fn query_event(&self, context: Handle, event: Handle) -> Called<bool>;
    /// Waits until what was marked has run.
    ///
    /// # Safety
    /// `event` is live.
    unsafe fn synchronize_event(&self, context: Handle, event: Handle) -> Called<()>;
    /// Makes what is put into `stream` from here on wait for what was marked.
    ///
    /// # Safety
    /// `event` and `stream` are live.
    unsafe fn wait_event(&self, context: Handle, stream: Handle, event: Handle) -> Called<()>;
    /// Milliseconds between two timed events that have both passed.
    ///
    /// # Safety
    /// Both are live.
    unsafe fn elapsed(&self, context: Handle, start: Handle, end: Handle) -> Called<f32>;

    /// Loads code; it stays for as long as the process lives.
    ///
    /// # Safety
    /// The image was made for this device, and its code is what the caller means to run.
    unsafe fn load_module(&self, context: Handle, image: Image<'_>) -> Called<Handle>;
    /// A kernel, allowed `shared` bytes of dynamic shared memory.
    ///
    /// # Safety
    /// `module` is of `load_module`.
    unsafe fn function(&self, context: Handle, module: Handle, name: &str, shared: u32) -> Called<Handle>;
    /// What the compiler made of it.
    ///
    /// # Safety
    /// `function` is of `function`. So it is below.
    unsafe fn attributes(&self, context: Handle, function: Handle) -> Called<FunctionAttributes>;
    /// Blocks that fit a multiprocessor at once.
    ///
    /// # Safety
    /// As `attributes`.
    unsafe fn blocks_per_sm(&self, context: Handle, function: Handle, block: u32, shared: u32)
    -> Called<u32>;
    /// What a kernel is told of a tensor, so that it may ask for boxes of it.
    #[cfg_attr(not(feature = "lists"), allow(dead_code, reason = "maps are for kernels over lists"))]
    fn encode_map(&self, boxes: &Boxes) -> Called<TensorMap>;
    /// Launches a kernel of one parameter of `bytes` bytes, which are read before the call returns.
    ///
    /// # Safety
    /// A kernel that begins early waits by itself, as does the one before it if that was to begin early.
    /// `params` is what the kernel takes, and what it points to is there until it has run, touched by nobody else but in
    /// stream order; `stream` is live.
    unsafe fn launch(
        &self,
        context: Handle,
        function: Handle,
        stream: Handle,
        launch: Launch,
        begin: Begin,
        params: *const c_void,
        bytes: usize,
    ) -> Called<()>;

    /// From here on the stream takes down what is put in, and runs none of it. The thread allocates and waits for nothing meanwhile.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn begin_capture(&self, context: Handle, stream: Handle) -> Called<()>;
    /// Whether the stream takes down what is put in.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn is_capturing(&self, context: Handle, stream: Handle) -> Called<bool>;
    /// Ends it: an executable graph, and how many nodes it has.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn end_capture(&self, context: Handle, stream: Handle) -> Called<(Handle, usize)>;
    /// Puts a graph in.
    ///
    /// # Safety
    /// `graph` is of `end_capture`, and no other thread launches it now; what it names is there until it has run.
    unsafe fn launch_graph(&self, context: Handle, graph: Handle, stream: Handle) -> Called<()>;
    /// Destroys a graph.
    ///
    /// # Safety
    /// `graph` is of `end_capture`, and destroyed once.
    unsafe fn destroy_graph(&self, context: Handle, graph: Handle) -> Called<()>;
}

/// Which of the two a process uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Driver,
    Emulated,
}

static CHOICE: OnceLock<Result<Choice, NoCuda>> = OnceLock::new();

fn choice() -> Result<Choice, NoCuda> {
    CHOICE
        .get_or_init(|| match std::env::var_os(VARIABLE) {
            // This crate's own tests run on the emulated device where it is compiled in, whichever comes first.
            None if cfg!(all(test, feature = "emulator")) => Ok(Choice::Emulated),
            None => Ok(Choice::Driver),
            Some(value) => chosen(&value.to_string_lossy()),
        })
        .clone()
}

fn chosen(value: &str) -> Result<Choice, NoCuda> {
    match value {
        "" | "driver" => Ok(Choice::Driver),
        "emulated" if cfg!(feature = "emulator") => Ok(Choice::Emulated),
        "emulated" => Err(NoCuda::Variable {
            got: value.into(),
            why: "this build has no emulated device; build with the feature `emulator`",
        }),
        _ => Err(NoCuda::Variable { got: value.into(), why: "expected `driver` or `emulated`" }),
    }
}

/// Whether this process uses the emulated device.
pub(crate) fn is_emulated() -> Result<bool, NoCuda> {
    Ok(choice()? == Choice::Emulated)
}

/// Chooses the emulated device for this process, as `MSTAR_CUDA=emulated` does; for tests. Returns whether it serves:
/// false when the driver was chosen before.
#[cfg(feature = "emulator")]
pub fn emulate() -> bool {
    CHOICE.get_or_init(|| Ok(Choice::Emulated)) == &Ok(Choice::Emulated)
}

/// The one that serves this process.
///
/// # Errors
/// [`NoCuda`]: why there is none. Asked again, it answers the same.
pub(crate) fn api() -> Result<&'static dyn Api, NoCuda> {
    static API: OnceLock<Result<&'static dyn Api, NoCuda>> = OnceLock::new();
    API.get_or_init(|| match choice()? {
        Choice::Driver => Ok(real::Real::open()? as &'static dyn Api),
        #[cfg(feature = "emulator")]
        Choice::Emulated => Ok(emulated::Emulated::open() as &'static dyn Api),
        #[cfg(not(feature = "emulator"))]
        Choice::Emulated => unreachable!("`chosen` refuses it in this build"),
    })
    .clone()
}

/// What the emulated device says in place of a driver.
///
/// # Errors
/// As [`api`].
pub(crate) fn emulated_driver() -> Result<Driver, NoCuda> {
    let broken = |failed: Failed| NoCuda::Broken { call: failed.call, code: Some(failed.code) };
    let api = api()?;
    let mut driver = Driver { version: (0, 0), cards: Vec::new() };
    for ordinal in 0..api.device_count().map_err(broken)? {
        let properties = api.properties(ordinal).map_err(broken)?;
        let both = |(major, minor): (u32, u32)| (major as c_int, minor as c_int);
        driver.version = both(properties.driver_version);
        driver.cards.push(Card {
            ordinal,
            name: properties.name,
            memory_bytes: properties.memory_bytes,
            compute_capability: both(properties.arch),
            pools: properties.pools,
        });
    }
    Ok(driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_checked() {
        assert_eq!(chosen(""), Ok(Choice::Driver));
        assert_eq!(chosen("driver"), Ok(Choice::Driver));
        assert_eq!(chosen("emulated").is_ok(), cfg!(feature = "emulator"));
        let why = chosen("emulate").unwrap_err().to_string();
        assert!(why.contains("MSTAR_CUDA") && why.contains("emulate") && why.contains("expected"), "{why}");
    }
}
