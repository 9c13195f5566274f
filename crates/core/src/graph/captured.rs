//! Captured regions: what a device runs of a padded step, taken down once and put into the queue as a whole.
//!
//! A forward may be one region, or several that share the step's lease. What changes from step to step lies in buffers at fixed
//! addresses, which plans are staged into before a replay. Where something that a graph takes for granted is another (a buffer
//! had to grow), the region is captured anew: [`Attention::capture_key`](crate::Attention::capture_key) says so.
#![allow(unsafe_code)]

use std::collections::HashMap;

use mstar_kernels::cuda::{Graph, capture};
use mstar_kernels::{Device, Stream};

use super::{Bucket, Lease};
use crate::{Label, Result, Slot};

/// Graphs that are kept of one region, each for a key of its own: a key that comes back finds its graph.
const KEPT: usize = 4;

/// A region of a padded step: which bucket's, in which buffer set, of which plan, and which of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    bucket: Bucket,
    slot: Slot,
    label: Label,
    part: usize,
}

impl Region {
    /// Part `part` of what a step under `lease` does with its plan `label`: parts are numbered by whoever captures.
    pub fn new(lease: &Lease, label: &Label, part: usize) -> Region {
        Region { bucket: lease.bucket().clone(), slot: lease.slot(), label: label.clone(), part }
    }
}

/// What became of a region that was to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ran {
    /// Nothing: the device has no graphs, so that the work is to be done as it is.
    Eagerly,
    /// It was taken down, and then put into the queue.
    Captured,
    /// A graph that was there was put into the queue.
    Replayed,
}

/// The captured regions of an engine's forwards.
#[derive(Debug, Default)]
pub struct Captured {
    /// The graphs of a region, the one that was used last at the end.
    regions: HashMap<Region, Vec<(u64, Graph)>>,
    captures: u64,
    replays: u64,
}

impl Captured {
    /// Nothing yet.
    pub fn new() -> Captured {
        Captured::default()
    }

    /// Regions taken down, those among them that were taken down again.
    pub fn captures(&self) -> u64 {
        self.captures
    }

    /// Regions put into a queue.
    pub fn replays(&self) -> u64 {
        self.replays
    }

    /// Graphs that are kept.
    pub fn graphs(&self) -> usize {
        self.regions.values().map(Vec::len).sum()
    }

    /// Puts `region` into `stream`, and captures it first by calling `record` where there is no graph of it that took `key` for
    /// granted. While it is captured nothing runs, and nothing may be allocated or waited for. Where there is one, `replaying` is
    /// called before it is put into the queue: it brings about on the host what `record` does there. Both are given `cx`. Of a
    /// region the graphs of a few keys are kept, those that were used last.
    ///
    /// # Errors
    /// What `record` or `replaying` says; what the device says. Nothing of the region runs then.
    ///
    /// # Safety
    /// All memory that `record` reads or writes on the device is there whenever the region runs, at the addresses of its capture as
    /// long as `key` is the same; nobody else uses it at odds with the stream's order.
    pub unsafe fn run<C>(
        &mut self,
        stream: &Stream,
        region: Region,
        key: u64,
        cx: &mut C,
        record: impl FnOnce(&mut C) -> Result<()>,
        replaying: impl FnOnce(&mut C) -> Result<()>,
    ) -> Result<Ran> {
        if stream.device() == Device::Cpu {
            return Ok(Ran::Eagerly);
        }
        let graphs = self.regions.entry(region).or_default();
        let ran = match graphs.iter().position(|(of, _)| *of == key) {
            Some(at) => {
                replaying(cx)?;
                graphs[at..].rotate_left(1);
                Ran::Replayed
            }
            None => {
                let graph = capture(stream, || record(cx))?;
                if graphs.len() == KEPT {
                    graphs.remove(0);
                }
                graphs.push((key, graph));
                self.captures += 1;
                Ran::Captured
            }
        };
        let (_, graph) = graphs.last().expect("it was found, or taken down just now");
        // SAFETY: the caller's promise.
        unsafe { graph.launch(stream)? };
        self.replays += 1;
        Ok(ran)
    }
}
