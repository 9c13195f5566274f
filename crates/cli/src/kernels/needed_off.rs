//! The name of `needed.rs` in a build without CUDA.

use crate::explain::{Prepared, SpecArguments};

/// Nothing is compiled.
pub(crate) fn needed(arguments: &SpecArguments, prepared: &Prepared) -> anyhow::Result<Vec<String>> {
    let _ = (arguments, prepared);
    Ok(Vec::new())
}
