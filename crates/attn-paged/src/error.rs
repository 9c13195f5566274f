//! What can be wrong with a plan or a run.

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A call that was refused. Nothing was written, and an earlier plan still stands.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A table, tensor or parameter was refused; the message names it, the row or axis, and its value.
    #[error(transparent)]
    Kernel(#[from] mstar_kernels::Error),
    /// A batch is larger than the plan was made to hold.
    #[error("{what}: the plan was made for at most {capacity}, the batch has {got}; use a larger bucket")]
    Capacity {
        /// What there is too much of: rows, tokens or pages.
        what: &'static str,
        /// The most that fits.
        capacity: usize,
        /// What came.
        got: usize,
    },
}
