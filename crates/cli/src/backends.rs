//! `mstar backends`.

use crate::exit::Exit;

/// Arguments of `mstar backends`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

/// Runs the subcommand.
pub(crate) fn command(_args: Arguments) -> anyhow::Result<Exit> {
    anyhow::bail!("mstar backends is not built yet")
}
