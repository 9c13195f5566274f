//! The wrapper level against the f64 oracle, and its promises about bits, memory and refusals.

mod alloc;
mod faults;
mod harness;
mod invariance;
mod manager;
mod oracle;
mod plans;
