//! Kernels compiled when they are needed: the texts of `cu/`, a compiler, a cache.
//!
//! A kernel is shipped as text. A [`Key`] names one variant of it: the file, the function, the `#define`s, and a user's snippet
//! where it takes one. [`compile`](fn@compile) makes that a binary for a [`Target`]: read from the user's cache folder, or
//! compiled by NVRTC (looked for on this machine) straight to the machine code of one architecture. One variant is one
//! compilation, so that many go in parallel, and so that its cost shows: registers and spills come back as [`Resources`].
//!
//! No header of CUDA's is included, so that the driver and NVRTC are all that a machine needs. The emulator's target makes the
//! very same text a shared object of the host.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `source` | the texts, embedded, and which headers a unit includes |
//! | `key` | the name of a variant |
//! | `target` | what to compile for |
//! | `compile` | cache or compiler, and what names a cached binary |
//! | `store` | what this process has loaded: [`prepare`] when planning, [`function`] when running |
//! | `nvrtc`, `find` | the run-time compiler's binding, and where it may lie |
//! | `twin` | the emulator's compiler |
//! | `cache` | compiled kernels on disk |
//! | `resources` | what a kernel takes, read from the log |
//! | `watch` | what a program may want to say meanwhile |

mod cache;
mod compile;
mod find;
mod key;
mod nvrtc;
mod resources;
mod source;
mod store;
mod target;
#[cfg(feature = "emulator")]
mod twin;
mod watch;

pub use compile::{Binary, Compiled, compile};
pub use find::CURE;
pub use key::{Defines, Key};
pub use nvrtc::Nvrtc;
pub use resources::Resources;
pub use source::Unit;
#[cfg(test)]
pub(crate) use store::{all_loaded, asked};
pub use store::{asked_for, count, function, prepare, target_of};
pub use target::Target;
pub use watch::{Event, watch};

use std::path::PathBuf;

/// The folder of compiled kernels, with how many it holds and their bytes; `None` where the environment names none.
pub fn cached() -> Option<(PathBuf, usize, u64)> {
    let cache = cache::Cache::of_user()?;
    let (entries, bytes) = cache.size();
    Some((cache.folder().to_path_buf(), entries, bytes))
}
