//! `mstar run`.

#![allow(dead_code, reason = "the command that drives these rooms comes next")]

mod content;
mod event;
mod scheduler;
mod script;
pub(crate) mod workload;

use crate::exit::Exit;

/// Arguments of `mstar run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

/// Runs the subcommand.
pub(crate) fn command(_args: Arguments) -> anyhow::Result<Exit> {
    anyhow::bail!("mstar run is not built yet")
}
