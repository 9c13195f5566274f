//! What this machine can do, measured in the program that is about to be judged by it.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use mstar_kernels::cpu::{Isa, peak::peak_flops};
use mstar_kernels::{Buffer, DType};
use rayon::prelude::*;

/// Time that one peak is measured for.
const PEAK_TIME: Duration = Duration::from_millis(200);

/// Words read in one pass: 256 MiB, well past a last-level cache.
const READ_WORDS: usize = 32 << 20;

/// Passes over them, of which the fastest counts.
const READ_PASSES: usize = 5;

/// The roofline's two sides.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// The kernels' instruction set, or the device.
    pub(super) machine: String,
    /// Threads that were measured, and will be used; multiprocessors of a device.
    pub(super) threads: usize,
    /// Bytes a second that all threads read together.
    pub(super) read: f64,
    /// Operations a second of all threads, on f32 operands; 0 where nobody measured them.
    pub(super) flops_f32: f64,
    /// The same on bf16 operands.
    pub(super) flops_bf16: f64,
}

impl Limits {
    /// Measures the current rayon pool.
    pub(super) fn measure() -> anyhow::Result<Limits> {
        let isa = Isa::current();
        let threads = rayon::current_num_threads();
        let read = read_bandwidth()?;
        let peak = |dtype| {
            // All threads at once: they share power and clocks.
            let barrier = Barrier::new(threads);
            let peaks = rayon::broadcast(|_| {
                barrier.wait();
                peak_flops(isa, dtype, PEAK_TIME)
            });
            peaks.into_iter().sum()
        };
        Ok(Limits {
            machine: isa.to_string(),
            threads,
            read,
            flops_f32: peak(DType::F32),
            flops_bf16: peak(DType::Bf16),
        })
    }

    /// Operations a second on operands of a type.
    pub(super) fn flops(&self, dtype: DType) -> f64 {
        if dtype == DType::Bf16 { self.flops_bf16 } else { self.flops_f32 }
    }
}

/// Reads words in whole groups of 32.
pub(super) fn fold(words: &[i64]) -> i64 {
    // Independent lanes, so that operations do not wait for one another and the loop vectorises.
    let mut lanes = [0i64; 32];
    for row in words.chunks_exact(32) {
        lanes.iter_mut().zip(row).for_each(|(lane, word)| *lane ^= word);
    }
    lanes.into_iter().fold(0, |a, b| a ^ b)
}

/// Bytes a second that all threads read together, from the same kind of memory as the cases' caches.
fn read_bandwidth() -> anyhow::Result<f64> {
    let mut buffer = Buffer::for_tensor(DType::I64, &[READ_WORDS])?;
    let mut view = buffer.tensor_mut(0, DType::I64, &[READ_WORDS])?;
    let words = view.as_mut_slice::<i64>().unwrap_or_default();
    words.iter_mut().enumerate().for_each(|(i, word)| *word = i as i64);
    let mut best = 0f64;
    for _ in 0..READ_PASSES {
        let begun = Instant::now();
        std::hint::black_box(words.par_chunks(1 << 17).map(fold).reduce(|| 0, |a, b| a ^ b));
        best = best.max(size_of_val(words) as f64 / begun.elapsed().as_secs_f64().max(1e-9));
    }
    Ok(best)
}
