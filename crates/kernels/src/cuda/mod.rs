//! CUDA: a driver that is asked what is there, and devices in use.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `driver` | what the machine has; makes nothing |
//! | `api` | the driver's calls, and the same of a device made of the host |
//! | `context` | a device in use: its primary context and what it can do |
//! | [`jit`], [`variants`] | kernels compiled for a device, and kept on disk; the list that is compiled ahead of time |
//! | [`peak`] | what a device can do at most, measured |
//! | `memory` | device memory, and host memory pinned for it; owned by [`Buffer`](crate::Buffer) |
//! | `pool`, `uses` | device memory taken and given back without a wait; the streams that may still use it |
//! | `queue`, `graph` | streams and events; work taken down once and replayed |
//! | `launch`, `transfer` | modules, kernels and their launch; copies, fills and calls of the host in stream order |
//!
//! The context is a device's primary one, so that memory and streams of other libraries work here. Whoever makes work orders it:
//! nothing here tracks which stream uses what. What is called while work is put in neither allocates nor waits.

mod api;
mod context;
mod driver;
#[cfg(feature = "lists")]
pub(crate) mod exec;
mod graph;
pub mod jit;
pub(crate) mod join;
mod launch;
mod memory;
pub(crate) mod moves;
pub mod peak;
mod pinned;
mod pool;
mod queue;
pub(crate) mod store;
pub(crate) mod synth;
#[cfg_attr(not(feature = "lists"), allow(dead_code, reason = "maps are for kernels over lists"))]
pub(crate) mod tensor_map;
#[cfg(test)]
mod tests;
mod transfer;
#[cfg(all(test, feature = "paged", feature = "dense", feature = "flex", feature = "dsa"))]
pub(crate) mod trials;
mod uses;
pub mod variants;

#[cfg(feature = "emulator")]
pub use api::emulate;
pub use api::{FunctionAttributes, Image, Launch};
pub use context::Context;
#[cfg(test)]
pub(crate) use context::forced;
pub use driver::driver;
#[cfg(feature = "lists")]
pub(crate) use exec::StagedList;
pub use graph::{Graph, capture};
#[cfg(test)]
pub(crate) use launch::launched;
pub use launch::{Function, Module, launch};
pub use moves::{Moving, prepare_moves};
pub use pool::Pooled;
pub use queue::{Event, OwnedStream};
pub use transfer::call_host;

pub(crate) use memory::Memory;
pub(crate) use queue::{is_idle, synchronize};
pub(crate) use transfer::{fill, transfer};
