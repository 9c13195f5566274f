//! `mstar kernels`: CUDA kernels compiled before they are needed, with no card.

#[cfg(feature = "cuda")]
mod build;
#[cfg(not(feature = "cuda"))]
#[path = "build_off.rs"]
mod build;
#[cfg(feature = "cuda")]
mod progress;
#[cfg(not(feature = "cuda"))]
#[path = "progress_off.rs"]
mod progress;

pub(crate) use self::progress::tell;

use crate::exit::Exit;

/// Arguments of `mstar kernels`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Compile the list of kernel variants into the cache, and say what each takes.
    Build(Build),
}

/// Arguments of `mstar kernels build`.
#[derive(Debug, clap::Args)]
struct Build {
    /// Architectures, such as sm_80,sm_90a; those of the cards here otherwise.
    #[arg(long, value_delimiter = ',')]
    arch: Vec<String>,
    /// Only kernels whose line has this in it, such as paged.cu or WIDTH=128.
    #[arg(long)]
    only: Option<String>,
    /// Exit with 1, too, where a kernel spills registers, uses local memory or has
    /// its matrix instructions serialised, and no reason for it is listed.
    #[arg(long)]
    check: bool,
}

/// Runs the subcommand.
pub(crate) fn command(args: Arguments) -> anyhow::Result<Exit> {
    match args.command {
        Command::Build(args) => build::command(args),
    }
}
