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
}
