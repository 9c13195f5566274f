//! The door between a step's bookkeeping and its memory: copies come first, two writes never meet, and nothing
//! is written once the step has ended.
#![forbid(unsafe_code)]

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use mstar_kernels::mutant::planted;

use super::PageId;
use super::memory::KvMemory;
use crate::Error;

/// What a write covers, among all writes of a step: a plan, a layer, a plane. Two of one step that differ in any
/// of them touch different slots or different memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// The plan's address: a step's plans list different slots.
    pub(super) plan: usize,
    pub(super) layer: usize,
    /// 0 for keys, values or latents; else one past the further plane's index.
    pub(super) plane: usize,
}

/// One step's door. No lock is held while a write runs, so that a write may use the caller's thread pool.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    copies: Vec<(PageId, PageId)>,
    inside: Vec<Extent>,
    closed: bool,
}

/// Why nobody was let in.
#[derive(Debug)]
pub(super) enum Barred {
    /// The step has been committed or rolled back meanwhile.
    Closed,
    /// The same write runs already, on another thread.
    Busy,
    /// A copy that comes first failed.
    Failed(Error),
}

/// Leaves the gate when dropped, however the write ends.
struct Inside<'a>(&'a Gate, Extent);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if let Some(at) = state.inside.iter().position(|extent| *extent == self.1) {
            state.inside.swap_remove(at);
        }
        self.0.left.notify_all();
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages to copy, from and to, before anything is written or read.
    pub(super) fn record(&self, copies: Vec<(PageId, PageId)>) {
        let mut state = self.lock();
        state.copies = copies;
        state.inside.reserve(8); // so that a write allocates nothing
    }

    /// Makes the copies that are left. Whoever comes meanwhile waits for them.
    ///
    /// The caller has seen that the step's turn has come: whoever wrote the source pages before has finished.
    pub(super) fn copy(&self, memory: &KvMemory) -> Result<(), Barred> {
        self.copied(memory).map(|_| ())
    }

    fn copied(&self, memory: &KvMemory) -> Result<MutexGuard<'_, State>, Barred> {
        let mut state = self.lock();
        if state.closed {
            return Err(Barred::Closed);
        }
        for (from, to) in state.copies.drain(..) {
            if !planted("stale-fork-page") {
                memory.copy_page(from, to).map_err(Barred::Failed)?;
            }
        }
        Ok(state)
    }

    /// Makes the copies that are left, then writes; refuses a second write of the same extent meanwhile.
    pub(super) fn pass<T>(
        &self,
        memory: &KvMemory,
        extent: Extent,
        write: impl FnOnce() -> T,
    ) -> Result<T, Barred> {
        let state = self.copied(memory)?;
        self.enter_from(state, extent, write)
    }

    /// As [`Gate::pass`], of a step that has no copies to make.
    pub(super) fn enter<T>(&self, extent: Extent, write: impl FnOnce() -> T) -> Result<T, Barred> {
        let state = self.lock();
        if state.closed {
            return Err(Barred::Closed);
        }
        self.enter_from(state, extent, write)
    }

    fn enter_from<T>(
        &self,
        mut state: MutexGuard<'_, State>,
        extent: Extent,
        write: impl FnOnce() -> T,
    ) -> Result<T, Barred> {
        if state.inside.contains(&extent) {
            return Err(Barred::Busy);
        }
        state.inside.push(extent);
        drop(state);
        let _inside = Inside(self, extent);
        Ok(write())
    }

    /// Lets nobody in any more, and returns when whoever is in has left.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        while !state.inside.is_empty() {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};

    use mstar_kernels::{DType, Stream};

    use super::*;
    use crate::kv::{KvConfig, KvLayout};

    fn extent(layer: usize) -> Extent {
        Extent { plan: 1, layer, plane: 0 }
    }

    #[test]
    fn writes_that_differ_run_at_once_and_the_end_waits_for_them() {
        let layout = KvLayout::Mla { kv_lora_rank: 1, qk_rope_head_dim: 0 };
        let memory = KvMemory::new(&KvConfig::new(layout, DType::F32, 1, 2), Stream::cpu()).unwrap();
        let (gate, both, written) = (Gate::default(), Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = || gate.pass(&memory, extent(0), || ()).is_ok();
                gate.pass(&memory, extent(1), || {
                    assert!(other()); // another layer, inside the first one's write
                    assert!(matches!(gate.pass(&memory, extent(1), || ()), Err(Barred::Busy)));
                    both.wait();
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    written.store(true, Ordering::SeqCst);
                })
                .unwrap();
            });
            both.wait();
            gate.close();
            assert!(written.load(Ordering::SeqCst));
        });
        assert!(matches!(gate.pass(&memory, extent(0), || ()), Err(Barred::Closed)));
        assert!(matches!(gate.copy(&memory), Err(Barred::Closed)));
    }

    #[test]
    fn a_write_that_panics_has_left() {
        let layout = KvLayout::Mla { kv_lora_rank: 1, qk_rope_head_dim: 0 };
        let memory = KvMemory::new(&KvConfig::new(layout, DType::F32, 1, 2), Stream::cpu()).unwrap();
        let gate = Gate::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = gate.pass(&memory, extent(0), || panic!("a kernel's assertion"));
        }));
        assert!(panicked.is_err());
        gate.close();
    }
}
