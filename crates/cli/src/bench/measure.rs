//! Timing one case, and where the case reads a cache, that same memory read and nothing else.

use std::time::{Duration, Instant};

#[cfg(any(feature = "paged", feature = "mla", feature = "dsa"))]
use mstar_kernels::plan::Schedule;
use serde::{Deserialize, Serialize};

/// What is called again and again.
pub(super) type Work = Box<dyn FnMut() -> anyhow::Result<()>>;

/// A case ready to be timed.
pub(super) struct Made {
    pub(super) work: Work,
    /// The same work by `schedule: throughput`, where there is one.
    pub(super) throughput: Option<Work>,
    /// What a whole step is made of.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a device captures steps"))]
    pub(super) step: Option<Step>,
    /// Plain reads of the memory that `work` reads.
    pub(super) reads: Option<PlainReads>,
}

impl Made {
    /// A case that is held against the limits of the machine alone.
    pub(super) fn alone(work: impl FnMut() -> anyhow::Result<()> + 'static) -> Made {
        Made { work: Box::new(work), throughput: None, step: None, reads: None }
    }

    /// A case that is planned twice: by the invariant schedule, and by the one that it is held against.
    #[cfg(any(feature = "paged", feature = "mla", feature = "dsa"))]
    pub(super) fn twice(work: impl FnMut(Schedule) -> anyhow::Result<()> + 'static) -> Made {
        let work = std::rc::Rc::new(std::cell::RefCell::new(work));
        let of = |schedule: Schedule| -> Work {
            let work = work.clone();
            Box::new(move || (work.borrow_mut())(schedule))
        };
        Made {
            work: of(Schedule::Invariant),
            throughput: Some(of(Schedule::Throughput)),
            step: None,
            reads: None,
        }
    }
}

/// A step of several kernels, and what it is held against.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a device captures steps"))]
pub(super) struct Step {
    /// Its kernels and copies, one by one.
    pub(super) parts: Vec<Alone>,
    /// A launch that finds nothing to do: what it takes is what any launch takes beside its work.
    pub(super) nothing: Work,
    /// The same rows from a graph of their own number.
    pub(super) exact: Option<Work>,
    /// Pieces of work in the graph.
    pub(super) nodes: usize,
}

/// A piece of a step.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a device captures steps"))]
pub(super) struct Alone {
    pub(super) work: Work,
    /// How many of it a step has.
    pub(super) times: usize,
}

/// What a step takes beyond its kernels.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Gaps {
    /// Microseconds of all its kernels and copies, each alone.
    pub(super) kernels_us: f64,
    /// What is left of the step, in percent of it: what passes between one kernel's end and the next one's start.
    pub(super) percent: f64,
    /// Pieces of work in its graph.
    pub(super) nodes: usize,
    /// The step's time over that of the same rows from a graph of their own number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) over_exact: Option<f64>,
}

/// Reads of a case's own memory by all threads, which compute nothing.
pub(super) struct PlainReads {
    /// Bytes that either read takes.
    pub(super) bytes: f64,
    /// From end to end.
    pub(super) in_order: Work,
    /// Page by page in the order in which the case takes them.
    pub(super) in_page_order: Work,
}

/// Times of one case.
#[derive(Clone, Debug)]
pub(super) struct Timed {
    /// Seconds a call, the middle one of all repetitions.
    pub(super) median: f64,
    /// Seconds a call of the fastest repetition.
    pub(super) fastest: f64,
    /// Repetitions.
    pub(super) repetitions: usize,
    /// Seconds a call by `schedule: throughput`, the middle one, in turns with the others.
    pub(super) throughput: Option<f64>,
    /// What of a step is gaps between kernels.
    pub(super) gaps: Option<Gaps>,
    /// What the plain reads came to in the same repetitions.
    pub(super) reads: Option<Reads>,
}

/// The middle one.
pub(super) fn middle(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

/// Plain reads beside a case.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reads {
    pub(super) in_order: Beside,
    pub(super) in_page_order: Beside,
}

/// One kind of read, in turns with the case.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Beside {
    /// Gigabytes a second: the middle repetition, the tenth and the ninetieth percentile.
    pub(super) gb_per_s: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    /// The case's bytes a second, in percent of this read's: of the medians, and the same percentiles of the
    /// repetitions, in each of which the two stood side by side.
    pub(super) percent: f64,
    pub(super) percent_low: f64,
    pub(super) percent_high: f64,
}

/// Warms a case up and repeats it: at least five times (three when `quick`), then until a second (a tenth)
/// has passed. Calls shorter than 50 us are timed in bundles. A case of `case_bytes` with reads of its own is repeated
/// in turns with them, for three seconds: memory that is shared with others does not stay as fast as it was.
pub(super) fn measure(mut made: Made, case_bytes: f64, quick: bool) -> anyhow::Result<Timed> {
    let started = Instant::now();
    (made.work)()?;
    let once = started.elapsed().max(Duration::from_nanos(50));
    let bundle = (Duration::from_micros(50).as_nanos() / once.as_nanos()).clamp(0, 10_000) as usize + 1;
    let (least, budget) = match (quick, made.reads.is_some()) {
        (true, _) => (3, 100),
        (false, false) => (5, 1000),
        (false, true) => (15, 3000),
    };
    let (mut times, mut in_order, mut in_page_order) = (Vec::new(), Vec::new(), Vec::new());
    let mut throughput = Vec::new();
    let started = Instant::now();
    while times.len() < least || started.elapsed() < Duration::from_millis(budget) {
        if let Some(reads) = &mut made.reads {
            in_order.push(seconds(&mut reads.in_order, bundle)?);
        }
        times.push(seconds(&mut made.work, bundle)?);
        if let Some(work) = &mut made.throughput {
            throughput.push(seconds(work, bundle)?);
        }
        if let Some(reads) = &mut made.reads {
            in_page_order.push(seconds(&mut reads.in_page_order, bundle)?);
        }
    }
    let reads = made.reads.map(|reads| Reads {
        in_order: beside(&in_order, &times, reads.bytes, case_bytes),
        in_page_order: beside(&in_page_order, &times, reads.bytes, case_bytes),
    });
    times.sort_by(f64::total_cmp);
    let (throughput, repetitions) = (middle(throughput), times.len());
    Ok(Timed {
        median: times[repetitions / 2],
        fastest: times[0],
        repetitions,
        throughput,
        gaps: None,
        reads,
    })
}

/// Seconds a call, over a bundle of them.
fn seconds(work: &mut Work, bundle: usize) -> anyhow::Result<f64> {
    let begun = Instant::now();
    for _ in 0..bundle {
        work()?;
    }
    Ok(begun.elapsed().as_secs_f64().max(1e-9) / bundle as f64)
}

/// A read of `bytes` in `reads` seconds beside a case of `case_bytes` in `cases` seconds, repetition by repetition.
fn beside(reads: &[f64], cases: &[f64], bytes: f64, case_bytes: f64) -> Beside {
    // Low, middle, high.
    let spread = |values: Vec<f64>| {
        let mut sorted = values;
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len() - 1;
        [last / 10, sorted.len() / 2, last - last / 10].map(|at| sorted[at])
    };
    let [low, gb_per_s, high] = spread(reads.iter().map(|read| bytes / read / 1e9).collect());
    let [_, case, _] = spread(cases.iter().map(|case| case_bytes / case / 1e9).collect());
    let shares = reads.iter().zip(cases).map(|(read, case)| 100.0 * case_bytes / case / (bytes / read));
    let [percent_low, _, percent_high] = spread(shares.collect());
    Beside { gb_per_s, low, high, percent: 100.0 * case / gb_per_s, percent_low, percent_high }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_the_medians_and_its_spread_of_the_repetitions() {
        // The machine is twice as fast from the third repetition on, for both alike.
        let (reads, cases) = ([2.0, 2.0, 1.0, 1.0, 1.0], [4.0, 4.0, 2.0, 2.0, 2.5]);
        let share = beside(&reads, &cases, 1e9, 0.5e9);
        assert_eq!((share.low, share.gb_per_s, share.high), (0.5, 1.0, 1.0));
        assert_eq!((share.percent_low, share.percent, share.percent_high), (20.0, 20.0, 25.0));
    }

    #[test]
    fn reads_take_turns_with_the_case() {
        let order = std::rc::Rc::new(std::cell::RefCell::new(String::new()));
        let step = |name: char| -> Work {
            let order = order.clone();
            Box::new(move || {
                order.borrow_mut().push(name);
                std::thread::sleep(Duration::from_micros(60));
                Ok(())
            })
        };
        let made = Made {
            work: step('w'),
            throughput: None,
            step: None,
            reads: Some(PlainReads { bytes: 1.0, in_order: step('o'), in_page_order: step('p') }),
        };
        let timed = measure(made, 1.0, true).unwrap();
        let order = order.borrow();
        let turns = order.strip_prefix('w').expect("warmed up once");
        assert_eq!(turns, "owp".repeat(timed.repetitions));
        assert!(timed.reads.is_some() && timed.repetitions >= 3);
    }
}
