//! Block-mask attention held against plain loops, compacted keys and the faults of others.

mod alloc;
mod faults;
mod life;
mod rig;
mod ring;
mod wrapper;
