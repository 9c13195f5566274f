//! A device made of the host, for testing what runs on cards where there is none.
//!
//! Its memory is the host's, its kernels are functions of shared objects that g++ made of the same text. It is as late as it may
//! be: what is put into a stream runs when somebody waits for a stream, an event or a copy, so that a result that is read too
//! early, and a staging buffer that is written again too early, are wrong here as they are on a card. And it is strict: a copy
//! that leaves its allocation, a launch beyond a card's limits, and an allocation or a wait in a capture are errors.
//!
//! Who waits for a stream runs that stream and what it waits for, and no other: what relies on an order that no event asks for is
//! wrong here too. Memory of the pool is poisoned when it is handed out and when it was given back.

mod map;
mod memory;
mod queue;
mod state;
mod work;

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use libloading::Library;

use self::queue::{Item, Next, Numbers};
use self::state::{Capture, EventState, State, pass};
use self::work::{Entry, Kernel, Work};
use super::{Api, Begin, Called, Failed, FunctionAttributes, Handle, Image, Launch, Properties, Way};
use crate::cuda::tensor_map::{Boxes, TensorMap};

const INVALID_VALUE: i32 = 1;
const INVALID_IMAGE: i32 = 200;
const INVALID_HANDLE: i32 = 400;
const NOT_FOUND: i32 = 500;
const NOT_READY: i32 = 600;
const INVALID_CLUSTER_SIZE: i32 = 912;
const CAPTURE_UNSUPPORTED: i32 = 900;
const CAPTURE_INVALIDATED: i32 = 901;
const ILLEGAL_STATE: i32 = 401;
const CAPTURE_ISOLATION: i32 = 905;
const CAPTURED_EVENT: i32 = 907;
const CAPTURE_WRONG_THREAD: i32 = 908;

/// Work that may wait; more is run at once, so that the queue never grows.
const MOST_WAITING: usize = 1024;
/// Bytes of dynamic shared memory that any kernel may have; more has to be asked for.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;
/// Bytes of shared memory that a block may ask for, as on compute capability 9.0.
const SHARED_PER_BLOCK: u32 = 227 << 10;
const MOST_THREADS: u32 = 1024;

/// The one emulated device.
pub(super) struct Emulated {
    state: Mutex<State>,
    /// Told whenever a piece of work has run.
    ran: Condvar,
}

static DEVICE: OnceLock<&Emulated> = OnceLock::new();

fn fail<T>(call: &'static str, code: i32) -> Called<T> {
    Err(Failed { call, code })
}

impl Emulated {
    pub(super) fn open() -> &'static Emulated {
        DEVICE.get_or_init(|| {
            Box::leak(Box::new(Emulated { state: Mutex::new(State::new()), ran: Condvar::new() }))
        })
    }

    /// A kernel that panicked left the books whole: nothing is run while they are held.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, call: &'static str, stream: Handle, work: Work) -> Called<()> {
        let full = {
            let mut state = self.state();
            let Some(work) = state.take_down(call, stream, work)? else { return Ok(()) };
            let marks = if let Work::Record { event } = work { Some(event) } else { None };
            if let Some(event) = marks {
                state.event(call, event)?.waiting += 1;
            }
            let number = state.queue.push(stream, work);
            if let Some(event) = marks {
                state.event(call, event)?.mark = number;
            }
            state.queue.len() >= MOST_WAITING
        };
        if full { self.run_all() } else { Ok(()) }
    }

    /// Runs everything that was put in, and reports what went wrong since the last time.
    fn run_all(&self) -> Called<()> {
        let all = self.state().queue.all();
        self.run_these(&all)
    }

    /// Runs these, beside whoever else runs some of them, and reports what went wrong since the last time.
    fn run_these(&self, numbers: &Numbers) -> Called<()> {
        let mut state = self.state();
        loop {
            match state.queue.next(numbers) {
                Next::Run(Item { number, work, .. }) => {
                    drop(state);
                    self.run(&work);
                    state = self.state();
                    state.queue.done(number);
                    self.ran.notify_all();
                }
                Next::Wait => state = self.ran.wait(state).unwrap_or_else(PoisonError::into_inner),
                Next::Nothing => break,
            }
        }
        match state.fault.take() {
            Some(failed) => Err(failed),
            None => Ok(()),
        }
    }

    /// Runs these for somebody who asks and does not wait: beside them, where a function of the host is among it, which may
    /// take as long as it likes.
    fn run_unwaited(&self, numbers: Numbers) -> Called<()> {
        if !self.state().queue.calls_the_host(&numbers) {
            return self.run_these(&numbers);
        }
        if let Some(device) = DEVICE.get() {
            // What goes wrong there is kept, and told to the next who waits.
            std::thread::spawn(move || {
                if let Err(failed) = device.run_these(&numbers) {
                    device.state().fault.get_or_insert(failed);
                }
            });
        }
        Ok(())
    }

    fn run(&self, work: &Work) {
        match work {
            Work::Record { event } => pass(&mut self.state().events, *event),
            Work::Graph(works) => works.iter().for_each(|work| self.run(work)),
            Work::Free { at } => self.state().memory.left(*at),
            _ => {
                // SAFETY: whoever put it in promised that it may run until somebody has waited for it.
                if let Err(failed) = unsafe { work.run() } {
                    self.state().fault.get_or_insert(failed);
                }
            }
        }
    }
}

/// What it says of itself: the limits of compute capability 9.0, on four multiprocessors.
fn properties() -> Properties {
    Properties {
        name: "Emulated (host)".into(),
        arch: (9, 0),
        sm_count: 4,
        shared_per_block_optin: SHARED_PER_BLOCK,
        memory_bytes: memory::BYTES,
        pools: true,
        driver_version: (12, 8),
    }
}

impl Api for Emulated {
    fn is_emulated(&self) -> bool {
        true
    }

    fn device_count(&self) -> Called<u32> {
        Ok(1)
    }

    fn properties(&self, _ordinal: u32) -> Called<Properties> {
        Ok(properties())
    }

    fn retain(&self, _ordinal: u32) -> Called<Handle> {
        Ok(self.state().handle())
    }

    fn free_memory(&self, _context: Handle) -> Called<usize> {
        Ok(self.state().memory.free_bytes())
    }

    fn allocate(&self, _context: Handle, bytes: usize) -> Called<*mut u8> {
        let mut state = self.state();
        state.not_in_capture("cuMemAlloc_v2")?;
        state.memory.allocate(bytes)
    }

    unsafe fn free(&self, _context: Handle, ptr: *mut u8) -> Called<()> {
        self.state().not_in_capture("cuMemFree_v2")?;
        let ran = self.run_all();
        self.state().memory.free(ptr)?;
        ran
    }

    fn create_pool(&self, _ordinal: u32) -> Called<Handle> {
        Ok(self.state().handle())
    }

    fn allocate_from(
        &self,
        _context: Handle,
        _pool: Handle,
        stream: Handle,
        bytes: usize,
    ) -> Called<*mut u8> {
        const CALL: &str = "cuMemAllocFromPoolAsync";
        let mut state = self.state();
        if state.stream(CALL, stream)?.is_some() {
            return fail(CALL, CAPTURE_UNSUPPORTED);
        }
        let State { queue, memory, events, .. } = &mut *state;
        queue.frees_that_are_due(|at| memory.left(at), |event| pass(events, event));
        memory.allocate_pooled(bytes)
    }

    unsafe fn free_async(&self, _context: Handle, stream: Handle, ptr: *mut u8) -> Called<()> {
        const CALL: &str = "cuMemFreeAsync";
        {
            let mut state = self.state();
            if state.stream(CALL, stream)?.is_some() {
                return fail(CALL, CAPTURE_UNSUPPORTED);
            }
            state.memory.leave(ptr)?;
        }
        self.put(CALL, stream, Work::Free { at: ptr as usize })
    }

    fn pool_bytes(&self, _pool: Handle) -> Called<(usize, usize)> {
        Ok(self.state().memory.pool_bytes())
    }

    fn trim_pool(&self, _pool: Handle, keep: usize) -> Called<()> {
        self.state().memory.trim(keep);
        Ok(())
    }

    fn allocate_pinned(&self, _context: Handle, bytes: usize) -> Called<*mut u8> {
        let mut state = self.state();
        state.not_in_capture("cuMemHostAlloc")?;
        state.memory.allocate_pinned(bytes)
    }

    unsafe fn free_pinned(&self, _context: Handle, ptr: *mut u8) -> Called<()> {
        self.state().not_in_capture("cuMemFreeHost")?;
        let ran = self.run_all();
        self.state().memory.free_pinned(ptr)?;
        ran
    }

    unsafe fn copy(
        &self,
        _context: Handle,
        stream: Handle,
        way: Way,
        src: *const u8,
        dst: *mut u8,
        bytes: usize,
    ) -> Called<()> {
        let (call, host) = match way {
            Way::HostToDevice => ("cuMemcpyHtoDAsync_v2", Some(src)),
            Way::DeviceToHost => ("cuMemcpyDtoHAsync_v2", Some(dst.cast_const())),
            Way::DeviceToDevice => ("cuMemcpyDtoDAsync_v2", None),
        };
        let (src, dst) = (src as usize, dst as usize);
        let staged = {
            let state = self.state();
            let on_device = match way {
                Way::HostToDevice => state.memory.holds(dst, bytes),
                Way::DeviceToHost => state.memory.holds(src, bytes),
                Way::DeviceToDevice => state.memory.holds(dst, bytes) && state.memory.holds(src, bytes),
            };
            if !on_device {
                return fail(call, INVALID_VALUE);
            }
            host.is_some_and(|host| !state.memory.is_pinned(host as usize, bytes))
        };
        self.put(call, stream, Work::Copy { way, src, dst, bytes })?;
        // Memory that is not pinned is staged: the host waits until it was read or written.
        if !staged {
            return Ok(());
        }
        let needed = self.state().queue.of_stream(stream);
        self.run_these(&needed)
    }

    unsafe fn copy_peer(
        &self,
        context: Handle,
        stream: Handle,
        _src_context: Handle,
        src: *const u8,
        dst: *mut u8,
        bytes: usize,
    ) -> Called<()> {
        // SAFETY: the caller's; there is one device.
        unsafe { self.copy(context, stream, Way::DeviceToDevice, src, dst, bytes) }
    }

    unsafe fn fill(
        &self,
        _context: Handle,
        stream: Handle,
        dst: *mut u8,
        value: u8,
        bytes: usize,
    ) -> Called<()> {
        if !self.state().memory.holds(dst as usize, bytes) {
            return fail("cuMemsetD8Async", INVALID_VALUE);
        }
        self.put("cuMemsetD8Async", stream, Work::Fill { dst: dst as usize, value, bytes })
    }

    fn create_stream(&self, _context: Handle, _urgent: bool) -> Called<Handle> {
        let mut state = self.state();
        let stream = state.handle();
        state.streams.insert(stream.0 as usize, None);
        Ok(stream)
    }

    unsafe fn synchronize_stream(&self, _context: Handle, stream: Handle) -> Called<()> {
        let needed = {
            let mut state = self.state();
            state.not_in_capture("cuStreamSynchronize")?;
            if let Some(id) = state.stream("cuStreamSynchronize", stream)? {
                state.captures.get_mut(&id).expect("it lasts").broken = true;
                return fail("cuStreamSynchronize", CAPTURE_UNSUPPORTED);
            }
            state.queue.of_stream(stream)
        };
        self.run_these(&needed)
    }

    unsafe fn query_stream(&self, _context: Handle, stream: Handle) -> Called<bool> {
        let needed = {
            let mut state = self.state();
            state.not_in_capture("cuStreamQuery")?;
            state.stream("cuStreamQuery", stream)?;
            if !state.queue.is_busy(stream) {
                return Ok(true);
            }
            state.queue.of_stream(stream)
        };
        // "Not yet", and before long it has run.
        self.run_unwaited(needed)?;
        Ok(false)
    }

    unsafe fn call_host(
        &self,
        _context: Handle,
        stream: Handle,
        call: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Called<()> {
        self.put("cuLaunchHostFunc", stream, Work::Call { call, data: Handle(data) })
    }

    fn create_event(&self, _context: Handle, timed: bool) -> Called<Handle> {
        let mut state = self.state();
        let event = state.handle();
        state.events.insert(event.0 as usize, EventState { timed, ..EventState::default() });
        Ok(event)
    }

    unsafe fn destroy_event(&self, _context: Handle, event: Handle) -> Called<()> {
        match self.state().events.remove(&(event.0 as usize)) {
            Some(_) => Ok(()),
            None => fail("cuEventDestroy_v2", INVALID_HANDLE),
        }
    }

    unsafe fn record_event(&self, _context: Handle, event: Handle, stream: Handle) -> Called<()> {
        {
            let mut state = self.state();
            let capture = state.stream("cuEventRecord", stream)?;
            state.event("cuEventRecord", event)?.capture = capture;
            if capture.is_some() {
                return Ok(());
            }
        }
        self.put("cuEventRecord", stream, Work::Record { event })
    }

    unsafe fn query_event(&self, _context: Handle, event: Handle) -> Called<bool> {
        let needed = {
            let mut state = self.state();
            state.not_in_capture("cuEventQuery")?;
            let event = state.event("cuEventQuery", event)?;
            if event.capture.is_some() {
                return fail("cuEventQuery", CAPTURED_EVENT);
            }
            if event.waiting == 0 {
                return Ok(true);
            }
            let mark = event.mark;
            state.queue.up_to(mark)
        };
        self.run_unwaited(needed)?;
        Ok(false)
    }

    unsafe fn synchronize_event(&self, _context: Handle, event: Handle) -> Called<()> {
        let needed = {
            let mut state = self.state();
            state.not_in_capture("cuEventSynchronize")?;
            let event = state.event("cuEventSynchronize", event)?;
            if event.capture.is_some() {
                return fail("cuEventSynchronize", CAPTURED_EVENT);
            }
            let mark = event.mark;
            state.queue.up_to(mark)
        };
        self.run_these(&needed)
    }

    unsafe fn wait_event(&self, _context: Handle, stream: Handle, event: Handle) -> Called<()> {
        let mut state = self.state();
        let waits = state.stream("cuStreamWaitEvent", stream)?;
        let EventState { capture: marked, mark, .. } = *state.event("cuStreamWaitEvent", event)?;
        match (waits, marked.filter(|id| state.captures.contains_key(id))) {
            (None, None) => {
                if state.queue.is_pending(mark) {
                    state.queue.push(stream, Work::Wait { mark });
                }
                Ok(())
            }
            // The stream joins the capture.
            (None, Some(id)) => {
                state.streams.insert(stream.0 as usize, Some(id));
                Ok(())
            }
            (Some(a), Some(b)) if a == b => Ok(()),
            (Some(id), _) => {
                state.captures.get_mut(&id).expect("it lasts").broken = true;
                fail("cuStreamWaitEvent", CAPTURE_ISOLATION)
            }
        }
    }

    unsafe fn elapsed(&self, _context: Handle, start: Handle, end: Handle) -> Called<f32> {
        const CALL: &str = "cuEventElapsedTime";
        let mut state = self.state();
        let mut passed = |event| -> Called<Instant> {
            let event = state.event(CALL, event)?;
            match event.passed {
                Some(at) if event.timed && event.waiting == 0 => Ok(at),
                Some(_) if event.timed => fail(CALL, NOT_READY),
                _ => fail(CALL, INVALID_HANDLE),
            }
        };
        let (start, end) = (passed(start)?, passed(end)?);
        Ok(end.saturating_duration_since(start).as_secs_f32() * 1e3)
    }

    unsafe fn load_module(&self, _context: Handle, image: Image<'_>) -> Called<Handle> {
        self.state().not_in_capture("cuModuleLoadData")?;
        let Image::SharedObject(path) = image else { return fail("cuModuleLoadData", INVALID_IMAGE) };
        // SAFETY: the caller means to run this object's code.
        let Ok(library) = (unsafe { Library::new(path) }) else {
            return fail("cuModuleLoadData", INVALID_IMAGE);
        };
        let mut state = self.state();
        let module = state.handle();
        state.modules.insert(module.0 as usize, Box::leak(Box::new(library)));
        Ok(module)
    }

    unsafe fn function(&self, _context: Handle, module: Handle, name: &str, shared: u32) -> Called<Handle> {
        const CALL: &str = "cuModuleGetFunction";
        let mut state = self.state();
        let Some(library) = state.modules.get(&(module.0 as usize)).copied() else {
            return fail(CALL, INVALID_HANDLE);
        };
        // SAFETY: functions of this name have this type, by the contract of `Image::SharedObject`.
        let Ok(entry) = (unsafe { library.get::<Entry>(format!("{name}__run").as_bytes()) }) else {
            return fail(CALL, NOT_FOUND);
        };
        if shared > SHARED_PER_BLOCK {
            return fail("cuFuncSetAttribute", INVALID_VALUE);
        }
        // SAFETY: what has this name is a word, by the same contract; it stays as the library does, and is not written.
        let cluster = unsafe {
            library.get::<*const u32>(format!("{name}__cluster").as_bytes()).map_or(1, |word| **word)
        };
        let kernel = Kernel { entry: *entry, shared: shared.max(SHARED_WITHOUT_ASKING), cluster };
        let function = state.handle();
        state.functions.insert(function.0 as usize, kernel);
        Ok(function)
    }

    unsafe fn attributes(&self, _context: Handle, function: Handle) -> Called<FunctionAttributes> {
        let kernel = self.state().kernel("cuFuncGetAttribute", function)?;
        Ok(FunctionAttributes {
            registers: 0,
            local_bytes: 0,
            static_shared_bytes: 0,
            max_threads: MOST_THREADS,
            cluster: kernel.cluster,
        })
    }

    unsafe fn blocks_per_sm(
        &self,
        _context: Handle,
        function: Handle,
        block: u32,
        shared: u32,
    ) -> Called<u32> {
        const CALL: &str = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        let kernel = self.state().kernel(CALL, function)?;
        if block == 0 {
            return fail(CALL, INVALID_VALUE);
        }
        Ok(u32::from(block <= MOST_THREADS && shared <= kernel.shared))
    }

    fn encode_map(&self, boxes: &Boxes) -> Called<TensorMap> {
        Ok(map::encode(boxes))
    }

    unsafe fn launch(
        &self,
        _context: Handle,
        function: Handle,
        stream: Handle,
        launch: Launch,
        _begin: Begin,
        params: *const c_void,
        bytes: usize,
    ) -> Called<()> {
        let kernel = self.state().kernel("cuLaunchKernel", function)?;
        let Launch { grid: [x, y, z], block, shared } = launch;
        let grid = (1..=i32::MAX as u32).contains(&x) && (1..=65535).contains(&y) && (1..=65535).contains(&z);
        if !grid || !(1..=MOST_THREADS).contains(&block) || shared > kernel.shared {
            return fail("cuLaunchKernel", INVALID_VALUE);
        }
        if x % kernel.cluster != 0 {
            return fail("cuLaunchKernel", INVALID_CLUSTER_SIZE);
        }
        // SAFETY: the caller's: `bytes` bytes are there.
        let params = unsafe { work::Params::copy(params.cast(), bytes) };
        self.put("cuLaunchKernel", stream, Work::Launch { entry: kernel.entry, launch, params })
    }

    unsafe fn begin_capture(&self, _context: Handle, stream: Handle) -> Called<()> {
        const CALL: &str = "cuStreamBeginCapture_v2";
        let mut state = self.state();
        if stream.0.is_null() {
            return fail(CALL, CAPTURE_UNSUPPORTED);
        }
        if state.stream(CALL, stream)?.is_some() {
            return fail(CALL, ILLEGAL_STATE);
        }
        let id = state.handle().0 as usize;
        let thread = std::thread::current().id();
        state.captures.insert(id, Capture { origin: stream, thread, work: Vec::new(), broken: false });
        state.streams.insert(stream.0 as usize, Some(id));
        Ok(())
    }

    unsafe fn is_capturing(&self, _context: Handle, stream: Handle) -> Called<bool> {
        Ok(self.state().stream("cuStreamIsCapturing", stream)?.is_some())
    }

    unsafe fn end_capture(&self, _context: Handle, stream: Handle) -> Called<(Handle, usize)> {
        const CALL: &str = "cuStreamEndCapture";
        let mut state = self.state();
        let Some(id) = state.stream(CALL, stream)? else { return fail(CALL, ILLEGAL_STATE) };
        let capture = &state.captures[&id];
        if capture.origin != stream {
            return fail(CALL, INVALID_VALUE);
        }
        if capture.thread != std::thread::current().id() {
            return fail(CALL, CAPTURE_WRONG_THREAD);
        }
        let capture = state.captures.remove(&id).expect("looked at above");
        state.streams.values_mut().filter(|of| **of == Some(id)).for_each(|of| *of = None);
        if capture.broken {
            return fail(CALL, CAPTURE_INVALIDATED);
        }
        let (graph, nodes) = (state.handle(), capture.work.len());
        state.graphs.insert(graph.0 as usize, Arc::new(capture.work));
        Ok((graph, nodes))
    }

    unsafe fn launch_graph(&self, _context: Handle, graph: Handle, stream: Handle) -> Called<()> {
        let works = self.state().graphs.get(&(graph.0 as usize)).cloned();
        match works {
            Some(works) => self.put("cuGraphLaunch", stream, Work::Graph(works)),
            None => fail("cuGraphLaunch", INVALID_HANDLE),
        }
    }

    unsafe fn destroy_graph(&self, _context: Handle, graph: Handle) -> Called<()> {
        match self.state().graphs.remove(&(graph.0 as usize)) {
            Some(_) => Ok(()),
            None => fail("cuGraphExecDestroy", INVALID_HANDLE),
        }
    }
}
