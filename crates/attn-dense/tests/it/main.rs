//! The two levels of dense attention against the oracle, and the faults that other projects had.

mod alloc;
mod faults;
mod life;
mod oracle;
mod rig;
mod stale;
