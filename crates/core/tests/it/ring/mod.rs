//! The ring cache: against plain vectors, against the oracle's visible blocks, and through a step's life.

mod faults;
mod harness;
mod life;
mod model;
mod snapshot;
mod threads;
mod visible;
