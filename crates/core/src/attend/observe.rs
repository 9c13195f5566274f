//! What a step cost, phase by phase: who wants to know implements [`Observer`].

use std::fmt;
use std::time::{Duration, Instant};

use crate::ResourceName;

/// A phase of a step, as reports list them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Phase {
    /// Reserving pages and the like.
    Admit,
    /// Packing rows and making device work lists, on the host.
    Plan,
    /// Writing the step's entries into a cache.
    KvWrite,
    /// Choosing which positions to attend.
    Select,
    /// Attention itself.
    Attend,
    /// Merging partial results.
    Merge,
    /// Growing lengths, landing forks, offering pages to the prefix index.
    Commit,
    /// Moving a request's pages to the host.
    Offload,
    /// Moving them back.
    Reload,
}

impl Phase {
    /// The phase as reports write it.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Admit => "admit",
            Phase::Plan => "plan",
            Phase::KvWrite => "kv write",
            Phase::Select => "select",
            Phase::Attend => "attend",
            Phase::Merge => "merge",
            Phase::Commit => "commit",
            Phase::Offload => "offload",
            Phase::Reload => "reload",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The work that a call could not do with less: what a roofline is drawn from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Query tokens.
    pub tokens: u64,
    /// Bytes read at the least: every cache page once, every query once.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Multiplications and additions over the visible keys alone.
    pub flops: u64,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        self.tokens += other.tokens;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.flops += other.flops;
    }
}

/// One call's cost.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// What was done.
    pub phase: Phase,
    /// By whom.
    pub resource: &'a ResourceName,
    /// For which layer, where there is one.
    pub layer: Option<usize>,
    /// Wall time on the host; on the CPU that is the whole of the work.
    pub elapsed: Duration,
    /// The least work that it stands for; zero where nobody estimates it.
    pub work: Work,
}

/// Somebody who wants to know what a step cost. Without one no clock is read.
pub trait Observer: Send + Sync {
    /// Called after each phase of each resource, and after each layer. Must not block.
    fn record(&self, event: &Event<'_>);
}

/// A clock that runs only when somebody listens.
#[derive(Clone, Copy)]
pub(crate) struct Timer<'a> {
    listener: Option<(&'a dyn Observer, Instant)>,
}

impl<'a> Timer<'a> {
    pub(crate) fn start(observer: Option<&'a dyn Observer>) -> Timer<'a> {
        Timer { listener: observer.map(|observer| (observer, Instant::now())) }
    }

    pub(crate) fn stop(
        self,
        phase: Phase,
        resource: &ResourceName,
        layer: Option<usize>,
        work: impl FnOnce() -> Work,
    ) {
        if let Some((observer, started)) = self.listener {
            let elapsed = started.elapsed();
            observer.record(&Event { phase, resource, layer, elapsed, work: work() });
        }
    }
}
