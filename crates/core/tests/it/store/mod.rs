//! The paged store, from outside: faults by name, forks, the prefix index, offload, preplan, and the model.

mod engine;
mod faults;
mod forks;
mod harness;
mod model;
mod offload;
mod plain;
mod prefix;
mod preplan;
mod threads;
