//! The host's memory pinned for a device, taken and given back without a wait.
//!
//! A driver that frees pinned memory waits for everything that runs on the device (measured on an H200: to the end of a kernel of
//! another stream, and of a host function). So what is given back is kept here, marked behind all work that was put in before, and
//! serves again once that has run. Up to [`MOST_KEPT`] bytes are kept; what is beyond goes back to the system, which waits.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Context;
use super::api::{Api, Called, Handle};
use super::uses::Held;

/// Bytes that are kept for whoever asks next.
const MOST_KEPT: usize = 1 << 30;

/// Pieces are of at least so many bytes, and in steps of an eighth of their size.
const LEAST: usize = 4096;

/// A piece that was given back.
struct Kept {
    at: usize,
    bytes: usize,
    /// Passes when the work that may use it has run; `None` where that could not be marked yet, since a stream was captured.
    free: Option<Handle>,
}

/// What was given back.
#[derive(Default)]
pub(super) struct Pinned {
    kept: Mutex<Vec<Kept>>,
    /// Events that mark nothing.
    spare: Mutex<Vec<Handle>>,
}

/// Bytes that are taken for `bytes`.
fn rounded(bytes: usize) -> usize {
    let step = (bytes.checked_next_power_of_two().unwrap_or(1) / 8).max(LEAST);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

impl Pinned {
    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Handle>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_passed(&self, api: &dyn Api, context: Handle, piece: &Kept) -> Called<bool> {
        match piece.free {
            // SAFETY: the event is this value's.
            Some(event) => unsafe { api.query_event(context, event) },
            None => Ok(false),
        }
    }
}

impl Context {
    /// At least `bytes` bytes, not cleared, and how many.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::Cuda`](crate::Error::Cuda).
    pub(super) fn take_pinned(&self, bytes: usize) -> crate::Result<(*mut u8, usize)> {
        let bytes = rounded(bytes);
        if let Some(again) = self.ask(|api, raw| self.take_kept(api, raw, bytes))? {
            return Ok(again);
        }
        let taken = self.ask_for_memory(bytes, |api, raw| api.allocate_pinned(raw, bytes));
        let taken = match taken {
            Err(crate::Error::OutOfMemory { .. }) => {
                self.trim_pinned(0)?;
                self.ask_for_memory(bytes, |api, raw| api.allocate_pinned(raw, bytes))
            }
            other => other,
        };
        taken.map(|ptr| (ptr, bytes))
    }

    /// The smallest kept piece that will do and that no work uses.
    fn take_kept(&self, api: &dyn Api, context: Handle, bytes: usize) -> Called<Option<(*mut u8, usize)>> {
        let held = self.uses().held();
        // A captured thread may ask no event.
        if held.is_capturing() {
            return Ok(None);
        }
        self.mark_kept(&held, api, context)?;
        let mut kept = self.pinned().kept();
        let mut best: Option<usize> = None;
        for (at, piece) in kept.iter().enumerate() {
            let fits = bytes <= piece.bytes && piece.bytes / 4 <= bytes;
            let smaller = best.is_none_or(|best| piece.bytes < kept[best].bytes);
            if fits && smaller && self.pinned().has_passed(api, context, piece)? {
                best = Some(at);
            }
        }
        Ok(best.map(|at| {
            let piece = kept.swap_remove(at);
            self.pinned().spare().extend(piece.free);
            (piece.at as *mut u8, piece.bytes)
        }))
    }

    /// Gives a piece back; waits for nothing while there is room to keep it.
    ///
    /// # Safety
    /// Of [`Context::take_pinned`], with the bytes that it said, and given back once; no later work touches it.
    pub(super) unsafe fn give_pinned(&self, ptr: *mut u8, bytes: usize) {
        if self.pool().is_none() {
            // SAFETY: as above; the driver waits for work that is under way.
            return self.ask_or_note(|api, raw| unsafe { api.free_pinned(raw, ptr) });
        }
        self.pinned().kept().push(Kept { at: ptr as usize, bytes, free: None });
        self.ask_or_note(|api, raw| {
            let held = self.uses().held();
            self.mark_kept(&held, api, raw)
        });
        if let Err(crate::Error::Cuda { call, code, .. }) = self.trim_pinned(MOST_KEPT) {
            self.ask_or_note(|_, _| Err(super::api::Failed { call, code }));
        }
    }

    /// Marks kept pieces behind all work that was put in, where no stream is captured.
    fn mark_kept(&self, held: &Held, api: &dyn Api, context: Handle) -> Called<()> {
        let mut kept = self.pinned().kept();
        let Some(pool) = self.pool() else { return Ok(()) };
        if kept.iter().all(|piece| piece.free.is_some())
            || !self.uses().hold(held, api, context, pool.freeing())?
        {
            return Ok(());
        }
        for piece in kept.iter_mut().filter(|piece| piece.free.is_none()) {
            let spare = self.pinned().spare().pop();
            let event = match spare {
                Some(event) => event,
                None => api.create_event(context, false)?,
            };
            // SAFETY: the event and the stream are this context's.
            unsafe { api.record_event(context, event, pool.freeing()) }?;
            piece.free = Some(event);
        }
        Ok(())
    }

    /// Frees kept pieces that no work uses, the oldest first, until no more than `keep` bytes are kept. The driver waits.
    pub(super) fn trim_pinned(&self, keep: usize) -> crate::Result<()> {
        let all = || self.pinned().kept().iter().map(|piece| piece.bytes).sum::<usize>();
        while all() > keep {
            let free = self.ask(|api, raw| {
                let mut kept = self.pinned().kept();
                for at in 0..kept.len() {
                    if self.pinned().has_passed(api, raw, &kept[at])? {
                        return Ok(Some(kept.remove(at)));
                    }
                }
                Ok(None)
            })?;
            let Some(piece) = free else { return Ok(()) };
            self.pinned().spare().extend(piece.free);
            // SAFETY: it was given back, and the work that may touch it has run.
            self.ask(|api, raw| unsafe { api.free_pinned(raw, piece.at as *mut u8) })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_in_steps() {
        assert_eq!([1, 4096, 4097, 40_000].map(rounded), [4096, 4096, 8192, 40_960]);
        assert_eq!(rounded((1 << 30) + 1), (1 << 30) + (1 << 28));
        for bytes in [1, 100, 5000, 1 << 20, 12_345_678, usize::MAX] {
            assert!(rounded(bytes) >= bytes && rounded(rounded(bytes)) == rounded(bytes));
        }
    }
}
