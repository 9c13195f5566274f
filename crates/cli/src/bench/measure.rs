//! Timing one case.

use std::time::{Duration, Instant};

/// What is called again and again.
pub(super) type Work = Box<dyn FnMut() -> anyhow::Result<()>>;

/// Times of one case.
#[derive(Clone, Debug)]
pub(super) struct Timed {
    /// Seconds a call, the middle one of all repetitions.
    pub(super) median: f64,
    /// Seconds a call of the fastest repetition.
    pub(super) fastest: f64,
    /// Repetitions.
    pub(super) repetitions: usize,
}

/// Makes a case, warms it up and repeats it: at least five times (three when `quick`), then until a second (a tenth)
/// has passed. Calls shorter than 50 us are timed in bundles.
pub(super) fn measure(make: impl FnOnce() -> anyhow::Result<Work>, quick: bool) -> anyhow::Result<Timed> {
    let mut work = make()?;
    let started = Instant::now();
    work()?;
    let once = started.elapsed().max(Duration::from_nanos(50));
    let bundle = (Duration::from_micros(50).as_nanos() / once.as_nanos()).clamp(0, 10_000) as usize + 1;
    let (least, budget) = if quick { (3, 100) } else { (5, 1000) };
    let mut times = Vec::new();
    let started = Instant::now();
    while times.len() < least || started.elapsed() < Duration::from_millis(budget) {
        let begun = Instant::now();
        for _ in 0..bundle {
            work()?;
        }
        times.push(begun.elapsed().as_secs_f64() / bundle as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(Timed { median: times[times.len() / 2], fastest: times[0], repetitions: times.len() })
}
