//! `mstar parity`.

use crate::exit::Exit;

/// Arguments of `mstar parity`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

/// Runs the subcommand.
pub(crate) fn command(_args: Arguments) -> anyhow::Result<Exit> {
    anyhow::bail!("mstar parity is not built yet")
}
