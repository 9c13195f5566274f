//! `mstar parity`: numbers against recorded reference tensors.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `find` | which files the arguments mean |
//! | `header`, `params`, `shapes`, `case` | a file, checked before it is believed |
//! | `ops` | one file an operation: what a case of it holds, and how it is run |
//! | `compare`, `selection` | the gate |
//! | `judge` | one case from file to verdict |
//! | `report`, `dump` | what is said and written |
//! | `across` | `--across`: devices compared over a spec |
//!
//! Exit codes: 0 when every case passed; 1 when one failed; 2 when one could not be judged, because it
//! cannot be read or because no backend runs it here (the others are judged all the same, and 2 wins over 1).

mod across;
mod case;
mod compare;
mod dump;
mod find;
mod header;
mod judge;
mod ops;
mod params;
mod place;
mod report;
mod selection;
mod shapes;

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use mstar_core::spec::DeviceChoice;
use mstar_kernels::Device;

use self::across::Across;
use crate::exit::Exit;
use crate::{backends, kernels, text};

const EXIT_CODES: &str = "\
A case passes when every output is within its tolerance and accurate against the
reference. Exit codes: 0 every case passed; 1 a case failed; 2 a case could not
be read, or no backend runs it here (the others are judged all the same; 2 wins
over 1).

With --across the argument is a spec. It runs on each device with the same
content and steps; every layer's outputs are compared with the first device's. A
row may differ by twice what each device may be off the f64 oracle (1.4 times
the output's rounding, sqrt 2 times that for 16-bit probabilities, 1e-6 for f32
and lse), one vector of it by four units of rounding; a device against itself by
no bit. Picks that differ are judged by f64 scores, and attention over each by
the oracle. Exit codes: 0 they agree; 1 they do not; 2 the spec or a device was
refused.";

/// Arguments of `mstar parity`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    /// Recorded cases: `.safetensors` files, or folders that are searched for them; with `--across` one spec.
    #[arg(required = true, value_name = "CASE")]
    cases: Vec<PathBuf>,
    /// Compare devices over a spec, such as cpu,cuda:0: each with the first.
    #[arg(long, value_name = "DEVICE,DEVICE...", value_delimiter = ',', conflicts_with_all = ["device", "backend", "dump"])]
    across: Vec<String>,
    /// Replace one value of the spec, such as `workload.requests=20`; may be given often.
    #[arg(long, value_name = "KEY=VALUE", requires = "across")]
    set: Vec<String>,
    /// Stop after this many steps of the spec.
    #[arg(long, value_name = "N", requires = "across")]
    steps: Option<u64>,
    /// No progress bar, and no table.
    #[arg(long, requires = "across")]
    quiet: bool,
    /// Where to run: auto, cpu or cuda:N.
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: String,
    /// What runs the cases. `auto` takes each case's own backend; `reference` is the f64 oracle, for any op.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,
    /// Write what was computed to this folder, as safetensors under the same names.
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Print one JSON document instead of a table.
    #[arg(long)]
    json: bool,
}

/// What runs the cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    /// Each case's own backend.
    Auto,
    /// The f64 oracle.
    Reference,
    /// Paged and cross-attention.
    Paged,
    /// Absorbed latent attention.
    Mla,
    /// Dense varlen attention.
    Dense,
    /// Block-mask attention and rings.
    Flex,
    /// Sparse selection and attention.
    Dsa,
}

impl Backend {
    /// The op family that a named backend runs; `None` for the two that run any.
    fn family(self) -> Option<&'static str> {
        match self {
            Backend::Auto | Backend::Reference => None,
            Backend::Paged => Some("paged"),
            Backend::Mla => Some("mla"),
            Backend::Dense => Some("dense"),
            Backend::Flex => Some("flex"),
            Backend::Dsa => Some("dsa"),
        }
    }
}

/// Runs the subcommand.
pub(crate) fn command(args: Arguments) -> Result<Exit> {
    kernels::tell(args.quiet);
    if !args.across.is_empty() {
        return across::command(&spec(args)?);
    }
    let device = device(&args.device)?;
    let place = place::Place::new(device)?;
    let device = device.to_string();
    let mut reports = Vec::new();
    let mut table = report::Table::to_stdout(!args.json);
    let all = find::find(&args.cases);
    if let Some(folder) = &args.dump {
        dump::distinct(folder, &all)?;
    }
    for found in all {
        let report = judge::judge(&found, args.backend, &place, args.dump.as_deref());
        table.add(&report)?;
        reports.push(report);
    }
    if args.json {
        text::print(&report::json(&reports, &device)?)?;
    } else {
        table.end(&reports, &device)?;
    }
    Ok(report::exit(&reports))
}

/// What `--across` asks for.
fn spec(args: Arguments) -> Result<Across> {
    let Arguments { cases, across, set, steps, quiet, json, .. } = args;
    let [spec] = <[PathBuf; 1]>::try_from(cases)
        .map_err(|cases| anyhow!("--across: one spec is compared, {} were named", cases.len()))?;
    Ok(Across { devices: across, spec, set, steps, quiet, json })
}

/// Settles `--device`; `auto` says on stderr what it came to.
fn device(name: &str) -> Result<Device> {
    let choice = DeviceChoice::parse(name).map_err(|why| anyhow!("--device: {why}"))?;
    if let (DeviceChoice::Named(device @ Device::Cuda(_)), true) = (&choice, cfg!(feature = "cuda")) {
        // Whether it can be used shows when its stream is made.
        return Ok(*device);
    }
    let chosen = backends::choose(choice)?;
    if let Some(note) = chosen.note {
        text::say(note);
    }
    Ok(chosen.device)
}
