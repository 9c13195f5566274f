//! Sparse attention through an engine and a real cache: against the oracle, and its promises about bits, order, memory and
//! refusals.

mod alloc;
mod boundary;
mod events;
mod faults;
mod oracle;
mod order;
mod rig;
mod wrapper;
