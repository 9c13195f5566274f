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

/// A region of a padded step: which bucket's, in which buffer set, of which plan, and which of its parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Region {
    bucket: Bucket,
    slot: Slot,
    label: Label,
    part: usize,
}

/// The captured regions of an engine's forwards.
#[derive(Debug, Default)]
pub struct Captured {
    regions: HashMap<Region, (u64, Graph)>,
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

    /// Puts part `part` of a step's plan `label` into `stream`, and captures it first by calling `record` where there is no graph of
    /// it, or one that took another `key` for granted. While it is captured nothing runs, and nothing may be allocated or waited
    /// for. Returns whether it ran: the CPU has no graphs.
    ///
    /// # Errors
    /// What `record` says; what the device says.
    ///
    /// # Safety
    /// All memory that `record` reads or writes on the device is there whenever the region runs, at the addresses of its capture as
    /// long as `key` is the same; nobody else uses it at odds with the stream's order.
    pub unsafe fn run(
        &mut self,
        stream: &Stream,
        lease: &Lease,
        label: &Label,
        part: usize,
        key: u64,
        record: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        if stream.device() == Device::Cpu {
            return Ok(false);
        }
        let region =
            Region { bucket: lease.bucket().clone(), slot: lease.slot(), label: label.clone(), part };
        if self.regions.get(&region).is_none_or(|(of, _)| *of != key) {
            let graph = capture(stream, record)?;
            self.captures += 1;
            self.regions.insert(region.clone(), (key, graph));
        }
        let (_, graph) = &self.regions[&region];
        // SAFETY: the caller's promise.
        unsafe { graph.launch(stream)? };
        self.replays += 1;
        Ok(true)
    }
}
