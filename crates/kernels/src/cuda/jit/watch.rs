//! What a program may want to say while kernels are compiled: libraries print nothing.

use std::sync::OnceLock;

use super::compile::Compiled;
use super::key::Key;
use super::target::Target;

/// Something that happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// So many kernels will be compiled or read from the cache.
    Begin {
        /// How many.
        kernels: usize,
    },
    /// One of them is not on disk, and is compiled now.
    Compiling {
        /// Which.
        key: &'a Key,
        /// For what.
        target: Target,
    },
    /// One of them is there.
    Ready {
        /// Which.
        key: &'a Key,
        /// What it is.
        compiled: &'a Compiled,
    },
    /// All of them are there, or one failed.
    End,
    /// Compiled kernels cannot be kept on disk: each process will compile them again. Told once a process.
    NotKept {
        /// Why.
        why: &'a str,
    },
}

type Watcher = Box<dyn Fn(&Event<'_>) + Send + Sync>;

static WATCHER: OnceLock<Watcher> = OnceLock::new();

/// Has `watcher` told of every event of this process, on whichever thread it happens. The first watcher stays.
pub fn watch(watcher: impl Fn(&Event<'_>) + Send + Sync + 'static) {
    let _ = WATCHER.set(Box::new(watcher));
}

pub(super) fn tell(event: &Event<'_>) {
    if let Some(watcher) = WATCHER.get() {
        watcher(event);
    }
}
