//! The choices of a plan.

use crate::{Device, Kernels};

/// How far the schedule may go for speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// A row's bits depend on the row alone.
    #[default]
    Invariant,
    /// A row's bits may depend on the batch it runs in (and on how many multiprocessors or threads there are), where that is
    /// faster: leaves are as many and as long as the batch asks for. The same batch still has the same bits every time.
    Throughput,
}

/// The largest batch that a plan will hold, for captured graphs and their CPU twin: buffers then never move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Capacity {
    /// Rows.
    pub rows: usize,
    /// Query tokens. Batches with fewer are padded to it: `q` and the outputs always have this many, and the padded
    /// ones yield 0 and `-inf`.
    pub tokens: usize,
    /// Page-table entries.
    pub pages: usize,
}

/// Choices of a plan that change no result, unless they say so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// How far the schedule may go for speed.
    pub schedule: Schedule,
    /// Threads that a run may use; 0 stands for the rayon pool that plans.
    pub workers: usize,
    /// Whether keys that rows share are read once for all of them.
    pub cascade: bool,
    /// Where the plan runs. Making a plan asks nothing of the device; [`Plan::stage`](super::Plan::stage) does.
    pub device: Device,
    /// Which kernels are to run it, on a device. This changes bits: families round in their own order.
    pub kernels: Kernels,
    /// A fixed shape to pad to; `None` plans each batch as it is.
    pub capacity: Option<Capacity>,
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        PlanOptions {
            schedule: Schedule::Invariant,
            workers: 0,
            cascade: true,
            device: Device::Cpu,
            kernels: Kernels::Auto,
            capacity: None,
        }
    }
}

/// What making a plan again did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planned {
    /// Nothing: the plan was already that of these inputs.
    Unchanged,
    /// Made the plan of these inputs.
    Changed,
}
