//! The measured limit of this machine: how fast its cores read memory together.
//!
//! Decode is bound by it: an attention phase cannot be faster than the bytes it must read divided by this rate. It is
//! measured in the run itself, over memory larger than the caches, so that a report's percentages hold for the
//! machine that it was made on. The memory is given back before anything else is allocated.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;

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
