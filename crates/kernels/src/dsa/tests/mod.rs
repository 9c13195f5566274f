//! The indexer against the oracle, against itself under every arrangement, and against hostile input.

mod alloc;
mod faults;
mod fixture;
mod invariance;
mod oracle;
mod refusals;
