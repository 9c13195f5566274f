//! Work lists executed by thread blocks: the list's image, the kernels that walk it, and the moves around them.
//!
//! What `cpu::paged` does with threads happens here with three launches at most: the items of few query vectors, those of
//! tiles, and the merges. A list is *staged* when it is planned: its kernels are compiled and its records are on their way to
//! the device. A run then only fills in addresses and launches: it neither allocates nor copies nor waits, so that it can be
//! captured; and since kernels find the list by its address, a captured run goes over whatever list was staged there last.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `image` | a list as bytes |
//! | `params` | what kernels are given, as `cu/list.cuh` has it |
//! | `list` | a list on a device: staging, choosing kernels, launching them |
//! | `latents` | the kernel of latents on tensor cores |
//! | `heads` | which tensor-core kernel takes a list over keys and values a head |
//! | `plain` | the kernel of f32 and of odd shapes |
//! | `merge`, `tickets` | joining what items left, by a launch of its own or by the last block to arrive |
//! | `select`, `sparse` | index scores and their pick; attention over picks |
//! | `mods` | mods over blocks: which, and their numbers |

mod heads;
mod image;
mod latents;
mod list;
mod merge;
mod mods;
mod params;
mod plain;
#[cfg(feature = "dsa")]
mod select;
#[cfg(feature = "dsa")]
mod sparse;
#[cfg(test)]
mod tests;
mod tickets;

pub(crate) use list::stage;
#[cfg(feature = "flex")]
pub(crate) use list::stage_blocks;
pub(crate) use list::{Numbers, StagedList, attend};
#[cfg(test)]
#[allow(unused_imports, reason = "trials are there with every feature alone")]
pub(crate) use merge::{Joiner, forced::with_joiner};
#[cfg(all(test, feature = "dsa"))]
#[allow(unused_imports, reason = "trials are there with every feature alone")]
pub(crate) use select::forced::with_cluster;
#[cfg(feature = "dsa")]
pub(crate) use select::{
    prepare as prepare_select, prepare_topk, scores, select, select_bytes, store_keys, topk, topk_bytes,
};
#[cfg(feature = "dsa")]
pub(crate) use sparse::{Picks, attend as sparse_attend, bytes as sparse_bytes, prepare as prepare_sparse};

use super::jit::Key;

/// A kernel for some of a list's items.
pub(crate) struct Choice {
    /// What to compile.
    pub(crate) key: Key,
    /// Threads a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory a block.
    pub(crate) shared: u32,
}
