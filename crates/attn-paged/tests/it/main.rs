//! The wrapper level against the f64 oracle, and its promises about bits, memory and refusals.

mod harness;
mod oracle;
