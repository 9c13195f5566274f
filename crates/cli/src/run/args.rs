//! Arguments of `mstar run`.

use std::path::PathBuf;

use crate::explain::SpecArguments;

/// Runs the workload of a spec and reports what its attention cost.
///
/// Exit codes: 0 when the run ended and every check passed; 1 when a verified row was wrong or the prefix index
/// disagreed with its own log; 2 when the spec, the trace or an argument was refused; 130 or 143 when SIGINT or SIGTERM
/// ended it after a step, with what was done reported. A second signal ends it at once. Files appear when they are whole.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) spec: SpecArguments,
    /// Recompute this share of every step's rows in f64 (0 to 1)
    #[arg(long, value_name = "RATE", default_value_t = 0.0)]
    pub(crate) verify: f64,
    /// Write the whole report as JSON (docs/report.md says what is in it)
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Write one CSV line a step
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Draw the run's timeline as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Stop after this many steps
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,
    /// Worker threads; all cores unless said
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// No progress bar, and no table
    #[arg(long)]
    pub(crate) quiet: bool,
}
