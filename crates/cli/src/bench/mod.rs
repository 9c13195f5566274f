//! `mstar bench`: kernels alone, over a list of shapes, against the measured limits of this machine.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `cases` | the kernels, their shapes, and what each must move and compute; a file a family |
//! | `filter` | rows asked for by name |
//! | `limits` | read bandwidth and multiply-add peak, measured before anything is timed |
//! | `measure` | repeated timing of one case, in turns with plain reads of its cache where it is bound by them |
//! | `device` | the same on a device, by its clock and behind cold caches |
//! | `place` | where cases run, and memory there |
//! | `report` | the table, and a baseline saved and compared |

mod cases;
#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "device_off.rs"]
mod device;
mod filter;
mod limits;
mod measure;
mod place;
mod report;

use std::path::PathBuf;

use anyhow::{Context, bail};

use mstar_core::spec::DeviceChoice;

use self::device::Clock;
use self::place::Place;
use crate::backends::choose;
use crate::exit::Exit;
use crate::output::Output;
use crate::text;

/// Kernels that can be named.
const KERNELS: [&str; 15] = [
    "prefill", "append", "decode", "cascade", "plan", "mla", "sparse", "index", "select", "topk", "dense",
    "flex", "step", "scatter", "merge",
];

/// Arguments of `mstar bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Kernels to time: prefill, append, decode, cascade, plan, mla, sparse, index, select, topk, dense, flex,
    /// step (on a device), scatter, merge; all when none is named.
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Time only rows whose name this is or has in it ("64x8192", "d256", "decode 1 x 8192, 32/8, bf16"); spaces do not
    /// count, numbers are matched whole. May be given several times. Leaves neighbours out but for --neighbours.
    #[arg(long, value_name = "TEXT")]
    rows: Vec<String>,
    /// With --rows, time the neighbours of the rows that are chosen too: 1.37 times the keys, and an odd batch.
    #[arg(long, requires = "rows")]
    neighbours: bool,
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
    /// Time the kernels of this device: cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: String,
}

/// Runs the subcommand.
pub(crate) fn command(args: Arguments) -> anyhow::Result<Exit> {
    for kernel in &args.kernels {
        if !KERNELS.contains(&kernel.as_str()) {
            bail!("no kernel is called {kernel}; there are {}", KERNELS.join(", "));
        }
    }
    let choice = DeviceChoice::parse(&args.device).map_err(|why| anyhow::anyhow!("--device: {why}"))?;
    crate::kernels::tell(false);
    let place = Place::on(choose(choice)?.device)?;
    let baseline = args.baseline.as_deref().map(report::Saved::read).transpose()?;
    // Before anything is timed, so that a path that cannot be written is not found out after it.
    let json = args.json.as_deref().map(Output::open).transpose()?;
    let threads = args.threads.map_or(0, usize::from);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().context("starting threads")?;
    let saved = pool.install(|| time(&args, &place, baseline.as_ref()))?;
    if let Some(json) = json {
        saved.write(json).context("--json: cannot write")?;
    }
    Ok(Exit::Success)
}

fn time(args: &Arguments, place: &Place, baseline: Option<&report::Saved>) -> anyhow::Result<report::Saved> {
    let mut clock = if place.is_cpu() { None } else { Some(Clock::of(place)?) };
    let limits = match &mut clock {
        None => limits::Limits::measure()?,
        Some(clock) => clock.limits(place)?,
    };
    text::print(&report::head(&limits, baseline))?;
    if clock.as_ref().is_some_and(Clock::is_emulated) {
        text::print("the device is emulated: its times mean nothing\n")?;
    }
    let mut saved = report::Saved::new(&limits);
    let mut listed = cases::list(place, args.quick);
    listed.retain(|case| args.kernels.is_empty() || args.kernels.iter().any(|kernel| kernel == case.kernel));
    if !listed.is_empty() && !args.rows.is_empty() {
        filter::keep(&mut listed, &args.rows, args.neighbours)?;
    }
    for mut case in listed {
        let name = case.name();
        let make = std::mem::replace(&mut case.make, Box::new(|_| bail!("made once")));
        let timed = make(place).and_then(|made| match &mut clock {
            Some(clock) if case.kernel != "plan" => clock.measure(place, made, args.quick),
            _ => measure::measure(made, case.cost.bytes, args.quick),
        });
        let timed = timed.with_context(|| name.clone())?;
        let line = report::Line::of(&case, name, &timed, &limits, &saved.lines);
        text::print(&line.text(baseline))?;
        saved.lines.push(line);
    }
    text::print(&saved.beside())?;
    text::print(&saved.against())?;
    if saved.lines.is_empty() {
        bail!(
            "none of {} is compiled in or timed on {}; build with --features paged,dsa",
            args.kernels.join(", "),
            place.device()
        );
    }
    Ok(saved)
}
