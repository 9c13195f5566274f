//! What this machine can do, measured in the program that is about to be judged by it.

use std::sync::Barrier;
use std::time::Duration;

use anyhow::Context;
use mstar_kernels::DType;
use mstar_kernels::cpu::{Isa, peak::peak_flops};

use crate::run::limit::read_bandwidth;

/// Time that one peak is measured for.
const PEAK_TIME: Duration = Duration::from_millis(200);

/// The roofline's two sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The kernels' instruction set.
    pub(super) isa: Isa,
    /// Threads that were measured, and will be used.
    pub(super) threads: usize,
    /// Bytes a second that all threads read together.
    pub(super) read: f64,
    /// Operations a second of all threads, on f32 operands.
    pub(super) flops_f32: f64,
    /// The same on bf16 operands.
    pub(super) flops_bf16: f64,
}

impl Limits {
    /// Measures the current rayon pool.
    pub(super) fn measure() -> anyhow::Result<Limits> {
        let isa = Isa::current();
        let threads = rayon::current_num_threads();
        let read = read_bandwidth().context("no memory to measure the read bandwidth over")?;
        let peak = |dtype| {
            // All threads at once: they share power and clocks.
            let barrier = Barrier::new(threads);
            let peaks = rayon::broadcast(|_| {
                barrier.wait();
                peak_flops(isa, dtype, PEAK_TIME)
            });
            peaks.into_iter().sum()
        };
        Ok(Limits { isa, threads, read, flops_f32: peak(DType::F32), flops_bf16: peak(DType::Bf16) })
    }

    /// Operations a second on operands of a type.
    pub(super) fn flops(&self, dtype: DType) -> f64 {
        if dtype == DType::Bf16 { self.flops_bf16 } else { self.flops_f32 }
    }
}
