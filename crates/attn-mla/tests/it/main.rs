//! The crate through its public names: the wrapper level over raw tables, the manager level over a real cache and engine.

mod alloc;
mod faults;
mod harness;
mod invariance;
mod manager;
mod merging;
mod oracle;
mod plans;
