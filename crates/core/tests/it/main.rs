//! The crate's integration tests, one binary of named modules.

mod alloc;
mod ring;
mod store;
