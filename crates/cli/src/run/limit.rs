//! The measured limits of this machine: how fast its cores read memory together, and how fast they multiply and add.
//!
//! No phase can be faster than the bytes that it must read at the one rate, nor than its operations at the other
//! (Williams, Waterman and Patterson's roofline, CACM 2009): decode is bound by the first, prefill by the second. Both
//! are measured in the run itself, so that a report's percentages hold for the machine that it was made on. The memory
//! read is larger than the caches, and is given back before anything else is allocated.

use std::hint::black_box;
use std::time::{Duration, Instant};

use mstar_core::attend::Work;
use mstar_kernels::DType;
use mstar_kernels::cpu::Isa;
use mstar_kernels::cpu::peak::peak_flops;
use rayon::prelude::*;

/// The limits that phases are held against; `None` where one could not be measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Roof {
    /// Bytes a second.
    pub(crate) read: Option<f64>,
    /// Floating-point operations a second.
    pub(crate) flops: Option<f64>,
}

impl Roof {
    /// Measures both over all threads of the current rayon pool, for kernels of `isa` on `dtype`.
    pub(crate) fn measure(isa: Isa, dtype: DType) -> Roof {
        let read = read_bandwidth();
        let flops: f64 =
            rayon::broadcast(|_| peak_flops(isa, dtype, Duration::from_millis(40))).into_iter().sum();
        Roof { read, flops: (flops > 0.0).then_some(flops) }
    }

    /// The least time that `work` can take here, in seconds; 0 where nothing is known of either.
    pub(crate) fn least_seconds(&self, work: &Work) -> f64 {
        let bound = |amount: u64, rate: Option<f64>| rate.map_or(0.0, |rate| amount as f64 / rate);
        bound(work.bytes_read, self.read).max(bound(work.flops, self.flops))
    }
}

/// Bytes read in one pass; well past a last-level cache's share of two cores.
const BYTES: usize = 192 << 20;
/// Passes, of which the fastest counts.
const PASSES: usize = 3;
/// Bytes that one task reads at a time.
const CHUNK: usize = 1 << 20;

/// Bytes a second that the current rayon pool reads; `None` where there is no memory to measure over.
pub(crate) fn read_bandwidth() -> Option<f64> {
    let mut words: Vec<i64> = Vec::new();
    words.try_reserve_exact(BYTES / 8).ok()?;
    // Written, so that every page is a page of its own and not the system's page of zeros.
    words.extend((0..BYTES as i64 / 8).map(|i| i ^ 0x55));
    let best = (0..PASSES)
        .map(|_| {
            let started = Instant::now();
            let sum = words.par_chunks(CHUNK / 8).map(folded).reduce(|| 0, |a, b| a ^ b);
            black_box(sum);
            started.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    (best > 0.0).then(|| BYTES as f64 / best)
}

/// Independent lanes, so that additions do not wait for one another and the loop vectorises.
fn folded(words: &[i64]) -> i64 {
    let mut lanes = [0i64; 32];
    for chunk in words.chunks_exact(32) {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane ^= word;
        }
    }
    lanes.iter().fold(0, |a, b| a ^ b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tighter_limit_counts() {
        let roof = Roof { read: Some(10.0), flops: Some(100.0) };
        let work = |bytes_read, flops| Work { bytes_read, flops, ..Work::default() };
        assert_eq!(roof.least_seconds(&work(20, 100)), 2.0);
        assert_eq!(roof.least_seconds(&work(20, 1000)), 10.0);
        assert_eq!(Roof::default().least_seconds(&work(20, 1000)), 0.0);
    }
}
