//! `mstar explain`.

use crate::exit::Exit;

/// Arguments of `mstar explain`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

/// Runs the subcommand.
pub(crate) fn command(_args: Arguments) -> anyhow::Result<Exit> {
    anyhow::bail!("mstar explain is not built yet")
}
