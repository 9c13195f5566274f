//! The names of [`cuda`](crate::cuda) in a build without the feature: there is no device, and it says why.

use crate::cards::{Driver, NoCuda};

/// The driver and its cards: none in this build.
///
/// # Errors
/// Always [`NoCuda::NotCompiled`].
pub fn driver() -> Result<Driver, NoCuda> {
    Err(NoCuda::NotCompiled)
}
