//! The value tree with key paths, and the checked spec.

/// A spec that was refused: where, what, and the nearest valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path} (line {line}, column {column}): {why}")]
pub struct SpecError {
    /// The key's path, such as `resources.kv.page_size`.
    pub path: String,
    /// Line, from 1; 0 when the value came from the command line.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
    /// What is wrong, and what would be right.
    pub why: String,
}
