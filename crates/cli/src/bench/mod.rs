//! `mstar bench`: kernels alone, over a list of shapes, against the measured limits of this machine.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `cases` | the kernels, their shapes, and what each must move and compute; a file a family |
//! | `limits` | read bandwidth and multiply-add peak, measured before anything is timed |
//! | `measure` | repeated timing of one case, in turns with plain reads of its cache where it is bound by them |
//! | `report` | the table, and a baseline saved and compared |

mod cases;
mod limits;
mod measure;
mod report;

use std::path::PathBuf;

use anyhow::{Context, bail};

use crate::exit::Exit;
use crate::output::Output;
use crate::text;

/// Kernels that can be named.
const KERNELS: [&str; 14] = [
    "prefill", "append", "decode", "cascade", "plan", "mla", "sparse", "index", "select", "topk", "dense",
    "flex", "scatter", "merge",
];

/// Arguments of `mstar bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Kernels to time: prefill, append, decode, cascade, plan, mla, sparse, index, select, topk, dense, flex,
    /// scatter, merge; all when none is named.
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Save the results, to compare with later.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare with results saved by --json.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Small shapes and few repetitions: a few seconds in all.
    #[arg(long)]
    quick: bool,
    /// Threads to use; as many as there are processors when not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Runs the subcommand.
pub(crate) fn command(args: Arguments) -> anyhow::Result<Exit> {
    for kernel in &args.kernels {
        if !KERNELS.contains(&kernel.as_str()) {
            bail!("no kernel is called {kernel}; there are {}", KERNELS.join(", "));
        }
    }
    let baseline = args.baseline.as_deref().map(report::Saved::read).transpose()?;
    // Before anything is timed, so that a path that cannot be written is not found out after it.
    let json = args.json.as_deref().map(Output::open).transpose()?;
    let threads = args.threads.map_or(0, usize::from);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().context("starting threads")?;
    let saved = pool.install(|| time(&args, baseline.as_ref()))?;
    if let Some(json) = json {
        saved.write(json).context("--json: cannot write")?;
    }
    Ok(Exit::Success)
}

fn time(args: &Arguments, baseline: Option<&report::Saved>) -> anyhow::Result<report::Saved> {
    let limits = limits::Limits::measure()?;
    text::print(&report::head(&limits, baseline))?;
    let mut saved = report::Saved::new(&limits);
    for case in cases::list(args.quick) {
        if !args.kernels.is_empty() && !args.kernels.iter().any(|kernel| kernel == case.kernel) {
            continue;
        }
        let name = format!("{} {}", case.kernel, case.shape);
        let timed = measure::measure(case.make, case.cost.bytes, args.quick).with_context(|| name.clone())?;
        let line = report::Line::new(name, &timed, case.dtype, case.cost, &limits);
        text::print(&line.text(baseline))?;
        saved.lines.push(line);
    }
    if saved.lines.is_empty() {
        bail!("none of {} is compiled in; build with --features paged,dsa", args.kernels.join(", "));
    }
    Ok(saved)
}
