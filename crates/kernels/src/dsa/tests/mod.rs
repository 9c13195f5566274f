//! The indexer against the oracle, against itself under every arrangement, and against hostile input.

mod alloc;
#[cfg(feature = "emulator")]
mod device;
mod faults;
mod fixture;
mod invariance;
mod oracle;
mod refusals;
