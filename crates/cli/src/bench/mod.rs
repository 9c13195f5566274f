//! `mstar bench`.

use crate::exit::Exit;

/// Arguments of `mstar bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

/// Runs the subcommand.
pub(crate) fn command(_args: Arguments) -> anyhow::Result<Exit> {
    anyhow::bail!("mstar bench is not built yet")
}
