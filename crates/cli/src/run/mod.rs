//! `mstar run`.

#![allow(dead_code, reason = "the command that drives these rooms comes next")]

mod content;
mod declare;
mod digest;
mod event;
mod format;
mod limit;
mod memory;
mod phases;
mod replay;
mod scheduler;
mod script;
mod verify;
mod workload;

use crate::exit::Exit;

/// Arguments of `mstar run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

/// Runs the subcommand.
pub(crate) fn command(_args: Arguments) -> anyhow::Result<Exit> {
    anyhow::bail!("mstar run is not built yet")
}
