//! Timing on a device: by its own clock, behind caches that hold none of what the case reads.

use std::time::{Duration, Instant};

use mstar_kernels::cuda::{Context, Event, peak};
use mstar_kernels::{Buffer, DType, fill};

use super::limits::Limits;
use super::measure::{Alone, Gaps, Made, Step, Timed, Work, middle};
use super::place::Place;

/// Bytes that are written before each repetition: several times a second-level cache.
const FLUSH: usize = 256 << 20;
/// Bytes read to know how fast memory is: well past that cache.
const READ: usize = 4 << 30;
/// Repetitions of a limit, of which the middle one counts.
const TIMES: usize = 15;
/// What stands for all of them on the emulated device, whose times mean nothing.
const SMALL: usize = 1 << 16;

/// A device's clock and what keeps its caches cold.
pub(super) struct Clock {
    flush: Buffer,
    emulated: bool,
}

impl Clock {
    /// Whether its times mean nothing.
    pub(super) fn is_emulated(&self) -> bool {
        self.emulated
    }

    /// Of a place on a device.
    ///
    /// # Errors
    /// Memory that cannot be had.
    pub(super) fn of(place: &Place) -> anyhow::Result<Clock> {
        let emulated = Context::of(place.device())?.is_emulated();
        let flush = place.scratch(if emulated { SMALL } else { FLUSH })?;
        Ok(Clock { flush, emulated })
    }

    /// Seconds of one call, the caches cold before it.
    fn seconds(
        &mut self,
        place: &Place,
        work: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<f64> {
        let stream = place.stream();
        let (start, end) = (Event::timed(place.device())?, Event::timed(place.device())?);
        let bytes = self.flush.len();
        // Longer than the host takes to put the case in, so that no launch waits for the host.
        fill(&stream, self.flush.tensor_mut(0, DType::U8, &[bytes])?, 0)?;
        start.record(&stream)?;
        work()?;
        end.record(&stream)?;
        end.synchronize()?;
        Ok((f64::from(start.elapsed_ms(&end)?) / 1e3).max(1e-9))
    }

    fn middle(&mut self, place: &Place, mut work: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
        let times = if self.emulated { 1 } else { TIMES };
        let mut seconds =
            (0..times).map(|_| self.seconds(place, &mut work)).collect::<anyhow::Result<Vec<f64>>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[times / 2])
    }

    /// What the device can do.
    ///
    /// # Errors
    /// A kernel that cannot be built; memory that cannot be had.
    pub(super) fn limits(&mut self, place: &Place) -> anyhow::Result<Limits> {
        let context = Context::of(place.device())?;
        peak::prepare(place.device())?;
        let stream = place.stream();
        let bytes = if self.emulated { SMALL } else { READ.min(context.free_memory()? / 4) };
        let memory = place.scratch(bytes)?;
        let read = self.middle(place, || Ok(peak::read(&stream, memory.tensor(0, DType::U8, &[bytes])?)?))?;
        let rounds = if self.emulated { 1 } else { 10_000 };
        let mut flops = 0.0;
        let multiply = self.middle(place, || {
            flops = peak::multiply(&stream, rounds)?;
            Ok(())
        })?;
        let (major, minor) = context.arch();
        let machine = format!("{} {}, sm_{major}{minor}, cold L2", place.device(), context.name());
        let threads = context.sm_count() as usize;
        Ok(Limits {
            machine,
            threads,
            read: bytes as f64 / read,
            flops_f32: 0.0,
            flops_bf16: flops / multiply,
        })
    }

    /// Warms a case up and repeats it: at least 20 times (3 when `quick`), then until a quarter of a second has passed.
    ///
    /// # Errors
    /// What the case says.
    pub(super) fn measure(&mut self, place: &Place, mut made: Made, quick: bool) -> anyhow::Result<Timed> {
        let (least, budget) = if quick { (3, 0) } else { (20, 250) };
        for _ in 0..if quick { 1 } else { 3 } {
            (made.work)()?;
            made.throughput.as_mut().map_or(Ok(()), |work| work())?;
        }
        place.stream().synchronize()?;
        let (mut times, mut throughput) = (Vec::new(), Vec::new());
        let started = Instant::now();
        while times.len() < least || started.elapsed() < Duration::from_millis(budget) {
            times.push(self.seconds(place, &mut made.work)?);
            if let Some(work) = &mut made.throughput {
                throughput.push(self.seconds(place, work)?);
            }
        }
        times.sort_by(f64::total_cmp);
        let (throughput, repetitions) = (middle(throughput), times.len());
        let median = times[repetitions / 2];
        let gaps = match made.step {
            Some(step) => Some(self.gaps(place, &mut made.work, step, quick)?),
            None => None,
        };
        Ok(Timed { median, fastest: times[0], repetitions, throughput, gaps, reads: None })
    }

    /// Times a step and its parts in turns. What any launch takes beside its work is taken off each: off the step once, since it
    /// is one run of work, and off every part. Alone, behind cold caches of
    /// instructions too, kernels take a little more than in the step, so that small gaps vanish among them.
    fn gaps(&mut self, place: &Place, work: &mut Work, step: Step, quick: bool) -> anyhow::Result<Gaps> {
        let Step { mut parts, mut nothing, mut exact, nodes } = step;
        for part in &mut parts {
            (part.work)()?;
        }
        let (mut whole, mut idle, mut own) = (Vec::new(), Vec::new(), Vec::new());
        let mut alone = vec![Vec::new(); parts.len()];
        for _ in 0..if quick || self.emulated { 2 } else { 25 } {
            whole.push(self.seconds(place, work)?);
            idle.push(self.seconds(place, &mut nothing)?);
            if let Some(exact) = &mut exact {
                own.push(self.seconds(place, exact)?);
            }
            for (part, times) in parts.iter_mut().zip(&mut alone) {
                times.push(self.seconds(place, &mut part.work)?);
            }
        }
        let (whole, idle) = (middle(whole).unwrap_or(0.0), middle(idle).unwrap_or(0.0));
        let of = |(part, times): (&Alone, Vec<f64>)| {
            part.times as f64 * (middle(times).unwrap_or(0.0) - idle).max(0.0)
        };
        let (kernels, step): (f64, f64) = (parts.iter().zip(alone).map(of).sum(), (whole - idle).max(1e-9));
        let percent = (100.0 * (step - kernels) / step).max(0.0);
        let over_exact = middle(own).map(|own| whole / own);
        Ok(Gaps { kernels_us: kernels * 1e6, percent, nodes, over_exact })
    }
}
