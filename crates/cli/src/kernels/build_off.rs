//! `mstar kernels build` in a build without CUDA.

use super::Build;
use crate::exit::Exit;

/// Says that there is nothing to compile.
pub(super) fn command(args: Build) -> anyhow::Result<Exit> {
    let Build { spec: _, set: _, arch, only: _, list: _, check: _ } = args;
    anyhow::bail!("kernels build {}: CUDA is not compiled in; build with --features cuda", arch.join(","))
}
