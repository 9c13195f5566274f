//! The files that a run writes: the JSON report, one CSV line a step, the timeline.

use std::io::Write;
use std::time::Duration;

use anyhow::bail;

use super::args::Arguments;
use super::phases::Phases;
use super::plot::Timeline;
use super::report::Report;
use super::runtime::StepCost;
use super::scheduler::Scheduler;
use crate::output::Output;

/// Phases that a step's line splits its time into.
pub(crate) const STEP_PHASES: [&str; 8] =
    ["plan", "kv write", "attend", "commit", "synthesize", "verify", "select", "replay"];

/// One step's line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepLine {
    /// The step, from 0.
    pub(crate) step: u64,
    /// Kinds of turns.
    pub(crate) walk: &'static str,
    /// Rows.
    pub(crate) rows: usize,
    /// Query tokens.
    pub(crate) tokens: usize,
    /// Whether it ran padded.
    pub(crate) padded: bool,
    /// Requests active after it.
    pub(crate) active: usize,
    /// The virtual clock after it.
    pub(crate) virtual_ms: f64,
    /// Wall time.
    pub(crate) seconds: f64,
    /// Seconds of [`STEP_PHASES`].
    pub(crate) phases: [f64; STEP_PHASES.len()],
}

impl StepLine {
    /// Seconds of each of [`STEP_PHASES`] so far.
    pub(crate) fn phases(phases: &Phases) -> [f64; STEP_PHASES.len()] {
        STEP_PHASES.map(|phase| phases.seconds(phase))
    }

    /// The line of the step that ran last; `before` is what the phases had cost before it.
    pub(crate) fn new(
        scheduler: &Scheduler<'_>,
        cost: &StepCost,
        elapsed: Duration,
        before: [f64; STEP_PHASES.len()],
        phases: &Phases,
    ) -> StepLine {
        let after = StepLine::phases(phases);
        StepLine {
            step: scheduler.counts().steps - 1,
            walk: cost.walk,
            rows: cost.rows,
            tokens: cost.tokens,
            padded: cost.padded,
            active: scheduler.active(),
            virtual_ms: scheduler.now_ms(),
            seconds: elapsed.as_secs_f64(),
            phases: std::array::from_fn(|i| after[i] - before[i]),
        }
    }
}

/// The files that were asked for, open.
pub(crate) struct Files {
    report: Option<Output>,
    csv: Option<csv::Writer<Output>>,
    /// Why the CSV was given up, told at the end: the run goes on without it.
    csv_fault: Option<csv::Error>,
    plot: Option<(Output, Timeline)>,
}

impl Files {
    /// Opens what `args` asks for. Nothing that lies there is touched before [`Files::finish`].
    pub(crate) fn open(args: &Arguments) -> anyhow::Result<Files> {
        let report = args.report.as_deref().map(Output::open).transpose()?;
        let plot = args.plot.as_deref().map(Output::open).transpose()?;
        let mut csv = args.csv.as_deref().map(Output::open).transpose()?.map(csv::Writer::from_writer);
        if let Some(csv) = &mut csv {
            let named = ["step", "walk", "rows", "tokens", "padded", "active", "virtual_ms", "seconds"];
            let split = STEP_PHASES.iter().map(|phase| format!("{}_s", phase.replace(' ', "_")));
            csv.write_record(named.iter().map(|name| (*name).to_owned()).chain(split))?;
        }
        Ok(Files { report, csv, csv_fault: None, plot: plot.map(|file| (file, Timeline::default())) })
    }

    /// Adds a step. A CSV that cannot be written is given up, and [`Files::finish`] says so.
    pub(crate) fn step(&mut self, line: &StepLine) {
        if let Some(csv) = &mut self.csv {
            let fixed = [
                line.step.to_string(),
                line.walk.to_owned(),
                line.rows.to_string(),
                line.tokens.to_string(),
                u8::from(line.padded).to_string(),
                line.active.to_string(),
                line.virtual_ms.to_string(),
                format!("{:.9}", line.seconds),
            ];
            let split = line.phases.iter().map(|seconds| format!("{seconds:.9}"));
            if let Err(why) = csv.write_record(fixed.into_iter().chain(split)) {
                (self.csv, self.csv_fault) = (None, Some(why));
            }
        }
        if let Some((_, timeline)) = &mut self.plot {
            timeline.add(line);
        }
    }

    /// Writes what is written at the end; each file, whatever became of the others.
    ///
    /// # Errors
    /// One line for each file that could not be written.
    pub(crate) fn finish(self, report: &Report) -> anyhow::Result<()> {
        let mut faults = Vec::new();
        if let Some(mut file) = self.report {
            let written = serde_json::to_writer_pretty(&mut file, report).map_err(std::io::Error::from);
            let written = written.and_then(|()| writeln!(file)).and_then(|()| file.finish());
            faults.extend(written.err().map(|why| format!("--report: cannot write: {why}")));
        }
        let finished = self.csv.map_or(Ok(()), |csv| {
            let file = csv.into_inner().map_err(csv::IntoInnerError::into_error)?;
            file.finish()
        });
        let fault = self.csv_fault.or(finished.err().map(csv::Error::from));
        faults.extend(fault.map(|why| format!("--csv: cannot write: {why}")));
        if let Some((mut file, timeline)) = self.plot {
            let drawn = timeline.svg(&report.name);
            let written = file.write_all(drawn.as_bytes()).and_then(|()| file.finish());
            faults.extend(written.err().map(|why| format!("--plot: cannot write: {why}")));
        }
        if !faults.is_empty() {
            bail!("{}", faults.join("\n"));
        }
        Ok(())
    }
}
