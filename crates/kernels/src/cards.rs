//! What a machine's CUDA driver says of itself and of its cards.

use std::ffi::c_int;

/// A driver that answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// The newest CUDA version that it supports, as (major, minor).
    pub version: (c_int, c_int),
    /// Cards that this process may use (`CUDA_VISIBLE_DEVICES` counts), by ordinal; there may be none.
    pub cards: Vec<Card>,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its number in `cuda:N`.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: usize,
    /// Its compute capability, as (major, minor): (9, 0) is `sm_90`.
    pub compute_capability: (c_int, c_int),
    /// Whether its memory comes from pools: taking it and giving it back then waits for no work.
    pub pools: bool,
}

/// Why there is no driver to ask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCuda {
    /// This build has no CUDA in it.
    #[error("CUDA was not compiled in; build with the feature `cuda`")]
    NotCompiled,
    /// No library under the driver's names.
    #[error("no CUDA driver found (tried {tried})")]
    NoDriver {
        /// The names.
        tried: String,
    },
    /// A library is there and does not work.
    #[error("the CUDA driver does not work: {call} {}", match code {
        Some(code) => format!("failed with code {code}"),
        None => "is missing from it".to_string(),
    })]
    Broken {
        /// The call that failed.
        call: &'static str,
        /// Its result; `None` when the library has no such function.
        code: Option<c_int>,
    },
    /// A driver that lacks functions called here.
    #[error(
        "the CUDA driver is too old: it serves CUDA {}.{}, {}.{} is needed; update the NVIDIA driver (525 or later)",
        found.0, found.1, needed.0, needed.1
    )]
    TooOld {
        /// The newest CUDA version that it serves, as (major, minor).
        found: (c_int, c_int),
        /// What is needed.
        needed: (c_int, c_int),
    },
    /// The environment variable that chooses a driver says something else.
    #[error("the environment variable MSTAR_CUDA is {got:?}: {why}")]
    Variable {
        /// What it says.
        got: String,
        /// What it may say.
        why: &'static str,
    },
}

/// The name of a `CUresult`, of those that can come of what is called here.
pub(crate) fn code_name(code: i32) -> &'static str {
    match code {
        1 => "invalid value",
        2 => "out of memory",
        3 => "not initialised",
        4 => "driver shutting down",
        34 => "stub library",
        46 => "device unavailable",
        100 => "no device",
        101 => "invalid device",
        200 => "invalid image",
        201 => "invalid context",
        209 => "no binary for this device",
        214 => "uncorrectable memory error",
        218 => "invalid PTX",
        301 => "file not found",
        400 => "invalid handle",
        500 => "not found",
        600 => "not ready",
        700 => "illegal address",
        701 => "too many resources for a launch",
        702 => "launch timed out",
        710 => "device assertion",
        715 => "illegal instruction",
        716 => "misaligned address",
        719 => "launch failed",
        802 => "system not ready",
        803 => "driver and library versions differ",
        804 => "card not supported by this driver",
        900 => "not allowed while a stream is captured",
        901 => "capture invalidated",
        904 => "capture not joined",
        905 => "captured work depends on work outside the capture",
        906 => "captured work depends on the default stream",
        907 => "event recorded in a capture",
        908 => "capture ended by another thread",
        _ => "see CUresult in cuda.h",
    }
}

/// What to do about a `CUresult`.
pub(crate) fn cure(code: i32) -> &'static str {
    match code {
        2 => "make a cache, a plan or a batch smaller, or free the card of other programs",
        34 => "a toolkit's stub was loaded in place of the driver; remove it from the library path",
        46 | 802 => "another program holds the card, or its services are not running; see nvidia-smi",
        200 | 209 | 218 => {
            "the kernel was built for another device; remove the kernel cache, and it is built anew"
        }
        214 | 715 => "the card may be faulty; see nvidia-smi -q",
        700 | 710 | 716 | 719 => {
            "a kernel went wrong, and the process must start again; run it under compute-sanitizer, and report it"
        }
        803 | 804 => "install the driver that fits the card and its kernel module",
        900..=908 => {
            "what is captured may only launch, copy pinned memory, and record and wait for events of its own"
        }
        _ => "this is a bug of mstar's or of the driver's; report it with the command that led here",
    }
}
