//! Sharing numbered pieces of work among the caller's threads, without allocating.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Workers that take part at most, whatever a plan says: a workspace has a scratch for each.
pub(crate) const MAX_WORKERS: usize = 1024;

/// Calls `work(worker, index)` once for each index below `count`, from up to `workers` threads. Indices are taken from
/// a shared counter in order; a worker runs one at a time. Returns when all are done.
pub(crate) fn each(workers: usize, count: usize, work: &(impl Fn(usize, usize) + Sync)) {
    let next = AtomicUsize::new(0);
    fan_out(0, workers.min(count), &|worker| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            work(worker, index);
        }
    });
}

fn fan_out(from: usize, to: usize, work: &(impl Fn(usize) + Sync)) {
    match to - from {
        0 => {}
        1 => work(from),
        n => {
            let middle = from + n / 2;
            rayon::join(|| fan_out(from, middle, work), || fan_out(middle, to, work));
        }
    }
}
