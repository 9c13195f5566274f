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

#[cfg(feature = "cuda")]
mod needed;
#[cfg(not(feature = "cuda"))]
#[path = "needed_off.rs"]
mod needed;

pub(crate) use self::needed::needed;
pub(crate) use self::progress::tell;

use std::path::PathBuf;

use crate::exit::Exit;

/// Arguments of `mstar kernels`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Compile the list of kernel variants, or what a spec needs, into the cache, and say what each takes.
    Build(Build),
}

/// Arguments of `mstar kernels build`.
#[derive(Debug, clap::Args)]
struct Build {
    /// A spec: exactly the kernels that its resources need are compiled, instead of the list.
    spec: Option<PathBuf>,
    /// Replace one value of the spec; may be given often.
    #[arg(long, value_name = "KEY=VALUE", requires = "spec")]
    set: Vec<String>,
    /// Architectures, such as sm_80,sm_90a; those of the cards here otherwise.
    #[arg(long, value_delimiter = ',')]
    arch: Vec<String>,
    /// Only kernels whose line has this in it, such as paged.cu or WIDTH=128.
    #[arg(long)]
    only: Option<String>,
    /// Only name the kernels, one a line; nothing is compiled.
    #[arg(long, conflicts_with = "check")]
    list: bool,
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
