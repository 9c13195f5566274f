//! What can be wrong with a call.

use mstar_core::RequestId;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A call that was refused. Nothing was written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor, table or parameter was refused; the message names it, the row or axis, and its value.
    #[error(transparent)]
    Kernel(#[from] mstar_kernels::Error),
    /// Keys that would leave positions without a key before them.
    #[error(
        "request {request}, layer {layer}: keys from position {start_pos} on would leave a gap after the {stored} \
         that are stored; append position {stored} first"
    )]
    Gap {
        /// Whose keys.
        request: RequestId,
        /// Of which layer.
        layer: usize,
        /// Where they would start.
        start_pos: usize,
        /// Keys that are stored.
        stored: usize,
    },
    /// More keys were asked for than are stored.
    #[error(
        "request {request}, layer {layer}: {length} index keys were asked for, {stored} are stored; append the step's \
         keys before selecting"
    )]
    History {
        /// Whose keys.
        request: RequestId,
        /// Of which layer.
        layer: usize,
        /// Keys asked for.
        length: usize,
        /// Keys that are stored.
        stored: usize,
    },
}
