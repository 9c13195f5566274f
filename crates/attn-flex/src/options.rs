//! What a caller may ask of a run beside its result.

use mstar_kernels::Device;
use mstar_kernels::paged::ScheduleOptions;

/// Auxiliary results to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuxRequest {
    /// The natural log-sum-exp of each query's scores.
    pub lse: bool,
    /// Each query's largest score, after the mods.
    pub max_scores: bool,
}

/// Auxiliary results: those that were asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AuxOutput {
    /// `[B, H, L]`: `-inf` where a query sees nothing.
    pub lse: Option<Vec<f32>>,
    /// `[B, H, L]`: `-inf` where a query sees nothing.
    pub max_scores: Option<Vec<f32>>,
}

/// Choices of how a run is done. None of them changes a bit of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelOptions {
    /// Threads that a run may use; 0 stands for the rayon pool that plans.
    pub workers: usize,
    /// Where the plan runs; a plan for a device is staged before it does.
    pub device: Device,
}

impl Default for KernelOptions {
    fn default() -> KernelOptions {
        KernelOptions { workers: 0, device: Device::Cpu }
    }
}

impl KernelOptions {
    pub(crate) fn threads(&self) -> usize {
        if self.workers == 0 { ScheduleOptions::default().workers } else { self.workers }
    }
}
