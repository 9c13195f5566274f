//! The paged store, from outside: faults by name, forks, the prefix index, offload, preplan, and the model.

mod faults;
mod harness;
mod plain;
