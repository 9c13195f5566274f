//! Work taken down once and put in again whole: CUDA graphs.
//!
//! A graph holds addresses and parameters as they were when it was captured. What changes from step to step lies in buffers that
//! stay where they are, and is rewritten before a replay.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use super::Context;
use super::api::Handle;
use crate::{Device, Error, Result, Stream};

/// A captured piece of work.
pub struct Graph {
    context: &'static Context,
    raw: Handle,
    nodes: usize,
    /// The driver allows one thread at a time to use a graph.
    launching: Mutex<()>,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph of {} nodes on {}", self.nodes, self.context.device())
    }
}

/// Takes down what `record` puts into `stream`, and runs none of it. Other threads go on as they were; this one may neither
/// allocate nor wait meanwhile, and copies of host memory are of pinned memory. `stream` is not a device's default stream.
///
/// # Errors
/// What `record` returned, or [`Error::Cuda`] when something in it cannot be captured. The stream is as before either way.
pub fn capture<E: From<Error>>(
    stream: &Stream,
    record: impl FnOnce() -> std::result::Result<(), E>,
) -> std::result::Result<Graph, E> {
    if stream.device() == Device::Cpu {
        return Err(E::from(Error::Unsupported {
            operation: "capturing a graph",
            device: Device::Cpu,
            why: "work on the CPU is done when a call returns; run it again".into(),
        }));
    }
    let context = Context::of(stream.device())?;
    let raw = Handle(stream.as_raw());
    context.uses().begin_capture();
    // SAFETY: whoever made the stream promised that it is live.
    let begun = context.ask(|api, own| unsafe { api.begin_capture(own, raw) });
    if let Err(why) = begun {
        context.uses().end_capture();
        return Err(E::from(why));
    }
    let mut open = Open { context, stream: raw, ended: false };
    let recorded = record();
    let graph = open.end();
    recorded?;
    Ok(graph?)
}

/// A capture under way, ended also when what is recorded panics: else the stream would stay broken.
struct Open {
    context: &'static Context,
    stream: Handle,
    ended: bool,
}

impl Open {
    fn end(&mut self) -> Result<Graph> {
        self.ended = true;
        let stream = self.stream;
        // SAFETY: the stream is live, and was set to capture by this thread.
        let ended = self.context.ask(|api, own| unsafe { api.end_capture(own, stream) });
        self.context.uses().end_capture();
        let (raw, nodes) = ended?;
        Ok(Graph { context: self.context, raw, nodes, launching: Mutex::new(()) })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.ended {
            // What was recorded so far is of no use to anybody.
            drop(self.end());
        }
    }
}

impl Graph {
    /// Pieces of work in it: launches, copies and fills.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Its device.
    pub fn device(&self) -> Device {
        self.context.device()
    }

    /// Puts it into a stream of its device, whichever; it allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] or [`Error::Cuda`].
    ///
    /// # Safety
    /// Every address that was captured is of memory that is there until the work has run, and that nobody else writes or reads
    /// but in stream order.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        if stream.device() != self.device() {
            return Err(Error::DeviceMismatch {
                tensor: "stream",
                expected: self.device(),
                got: stream.device(),
            });
        }
        let _alone = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
        let (graph, stream) = (self.raw, Handle(stream.as_raw()));
        // SAFETY: the caller's; the lock keeps other threads away.
        self.context.put(stream, |api, own| unsafe { api.launch_graph(own, graph, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let graph = self.raw;
        // SAFETY: made by this value, and destroyed once; the driver lets a launch under way finish.
        self.context.ask_or_note(|api, own| unsafe { api.destroy_graph(own, graph) });
    }
}
