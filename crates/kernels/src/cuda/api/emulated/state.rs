//! The emulated device's books: what was made of it, and which streams take down what.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Instant;

use libloading::Library;

use super::super::{Called, Failed, Handle, Way};
use super::memory::Memory;
use super::queue::Queue;
use super::work::{Kernel, Work};
use super::{CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_HANDLE, fail};

pub(super) struct State {
    pub(super) last_handle: usize,
    pub(super) memory: Memory,
    pub(super) queue: Queue,
    /// What went wrong while work ran; the next wait reports it.
    pub(super) fault: Option<Failed>,
    pub(super) streams: HashMap<usize, Option<usize>>,
    pub(super) captures: HashMap<usize, Capture>,
    pub(super) events: HashMap<usize, EventState>,
    pub(super) modules: HashMap<usize, &'static Library>,
    pub(super) functions: HashMap<usize, Kernel>,
    pub(super) graphs: HashMap<usize, Arc<Vec<Work>>>,
}

/// What a stream takes down.
pub(super) struct Capture {
    pub(super) origin: Handle,
    pub(super) thread: ThreadId,
    pub(super) work: Vec<Work>,
    pub(super) broken: bool,
}

#[derive(Clone, Copy, Default)]
pub(super) struct EventState {
    pub(super) timed: bool,
    /// Records that were put in and have not run.
    pub(super) waiting: usize,
    /// The last of them.
    pub(super) mark: u64,
    pub(super) passed: Option<Instant>,
    pub(super) capture: Option<usize>,
}

impl State {
    pub(super) fn new() -> State {
        State {
            last_handle: 0,
            memory: Memory::default(),
            queue: Queue::default(),
            fault: None,
            streams: HashMap::from([(0, None)]),
            captures: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
        }
    }

    pub(super) fn handle(&mut self) -> Handle {
        self.last_handle += 16;
        Handle(self.last_handle as *mut c_void)
    }

    /// The capture that a stream takes part in.
    pub(super) fn stream(&self, call: &'static str, stream: Handle) -> Called<Option<usize>> {
        self.streams.get(&(stream.0 as usize)).copied().ok_or(Failed { call, code: INVALID_HANDLE })
    }

    pub(super) fn event(&mut self, call: &'static str, event: Handle) -> Called<&mut EventState> {
        self.events.get_mut(&(event.0 as usize)).ok_or(Failed { call, code: INVALID_HANDLE })
    }

    pub(super) fn kernel(&self, call: &'static str, function: Handle) -> Called<Kernel> {
        self.functions.get(&(function.0 as usize)).copied().ok_or(Failed { call, code: INVALID_HANDLE })
    }

    /// Refuses a call that a capture of this thread does not allow, and spoils the capture, as a driver does.
    pub(super) fn not_in_capture(&mut self, call: &'static str) -> Called<()> {
        let thread = std::thread::current().id();
        let mut inside = false;
        for capture in self.captures.values_mut().filter(|capture| capture.thread == thread) {
            capture.broken = true;
            inside = true;
        }
        if inside { fail(call, CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Takes work down, when the stream is captured; else gives it back.
    pub(super) fn take_down(
        &mut self,
        call: &'static str,
        stream: Handle,
        work: Work,
    ) -> Called<Option<Work>> {
        let Some(id) = self.stream(call, stream)? else { return Ok(Some(work)) };
        let capture = self.captures.get_mut(&id).expect("a stream names a capture only while it lasts");
        if capture.broken {
            return fail(call, CAPTURE_INVALIDATED);
        }
        if let Work::Copy { way, src, dst, bytes } = work {
            let host = if way == Way::HostToDevice { src } else { dst };
            if way != Way::DeviceToDevice && !self.memory.is_pinned(host, bytes) {
                capture.broken = true;
                return fail(call, CAPTURE_UNSUPPORTED);
            }
        }
        capture.work.push(work);
        Ok(None)
    }
}

/// A record has run. Its event may have been destroyed before.
pub(super) fn pass(events: &mut HashMap<usize, EventState>, event: Handle) {
    if let Some(event) = events.get_mut(&(event.0 as usize)) {
        event.waiting -= 1;
        event.passed = Some(Instant::now());
    }
}
