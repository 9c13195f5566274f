//! The crate's integration tests, one binary of named modules.

mod store;
