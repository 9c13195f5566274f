//! `mstar explain`: what a spec resolves to, what it will cost, and what will run, before anything does.

mod fit;
mod memory;
mod prepare;
mod show;

pub(crate) use memory::Place;
#[cfg(feature = "cuda")]
pub(crate) use prepare::prepare_on;
pub(crate) use prepare::{
    Prepared, Served, ServedSparse, SpecArguments, causal, causal_in_frames, prepare, words,
};

use crate::exit::Exit;
use crate::kernels;
use crate::text::print;

/// Arguments of `mstar explain`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    spec: SpecArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand. A spec that reads well and could not run here is explained all the same.
pub(crate) fn command(args: Arguments) -> anyhow::Result<Exit> {
    let prepared = prepare(&args.spec)?;
    let kernels = kernels::needed(&args.spec, &prepared).map_err(|why| format!("{why:#}"));
    let text =
        if args.json { show::as_json(&prepared, &kernels) } else { show::as_text(&prepared, &kernels) };
    print(&text)?;
    Ok(Exit::Success)
}
