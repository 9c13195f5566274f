//! The value tree with key paths, and the checked spec.

mod node;
pub mod workload;

pub use node::{Entry, Node, Place, Scalar, Value};

use std::fmt;

/// One refusal of a spec: where, what, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
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

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "--set {}: {}", self.path, self.why),
            line => write!(f, "{line}:{}: {}: {}", self.column, self.path, self.why),
        }
    }
}

impl std::error::Error for SpecError {}
