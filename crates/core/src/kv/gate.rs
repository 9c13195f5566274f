//! The door between a step's bookkeeping and its memory: copies come first, writes one after the other, and
//! nothing is written once the step has ended.
#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use super::PageId;
use super::memory::KvMemory;

/// One step's door. Its lock is held over copies and writes; the store's lock never is.
#[derive(Debug, Default)]
pub(super) struct Gate(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    copies: Vec<(PageId, PageId)>,
    closed: bool,
}

/// The step has been committed or rolled back meanwhile.
#[derive(Debug)]
pub(super) struct Closed;

impl Gate {
    /// Pages to copy, from and to, before anything is written or read.
    pub(super) fn record(&self, copies: Vec<(PageId, PageId)>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).copies = copies;
    }

    /// Makes the copies that are left, then does `write` while no other write of the step runs.
    ///
    /// The caller has seen that the step's turn has come: whoever wrote the source pages before has finished.
    pub(super) fn pass<T>(&self, memory: &KvMemory, write: impl FnOnce() -> T) -> Result<T, Closed> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            return Err(Closed);
        }
        for (from, to) in state.copies.drain(..) {
            memory.copy_page(from, to);
        }
        Ok(write())
    }

    /// Lets nobody in any more, and returns when whoever is in has left.
    pub(super) fn close(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
    }
}
