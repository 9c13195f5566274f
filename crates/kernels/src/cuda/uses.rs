//! Which streams may still use memory that is given back.
//!
//! Memory is given back in stream order, by a stream of the context's own that waits first for every stream that work was put into.
//! Nobody is told which memory a piece of work uses, so all of them are waited for. A stream of ours is live for ever: that it has
//! work is a flag, and its place is marked when memory is given back. Another's may be gone by then, so its place is marked behind
//! each piece of work that is put into it.
//!
//! While a stream is captured, no place can be marked without becoming part of the capture. What is given back meanwhile is kept
//! until the capture has ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, ThreadId};

use super::api::{Api, Called, Handle};

/// Streams of others that are remembered though nothing waits for them.
const MOST_REMEMBERED: usize = 32;

/// A stream that this crate made.
struct Ours {
    stream: Handle,
    mark: Handle,
    /// Whether work was put in that the mark is not behind.
    unmarked: AtomicBool,
}

/// A stream that somebody else made.
struct Other {
    stream: Handle,
    /// Behind the last work that was put in.
    mark: Handle,
    /// Whether the freeing stream waits for it.
    waited: bool,
}

/// What is held back while streams are captured.
#[derive(Default)]
pub(super) struct Held {
    /// Threads that capture, each as often as it does.
    threads: Vec<ThreadId>,
    /// Addresses that were given back.
    pub(super) given: Vec<usize>,
}

impl Held {
    /// Whether this thread captures.
    pub(super) fn is_capturing(&self) -> bool {
        self.threads.contains(&thread::current().id())
    }
}

/// The streams of a context.
#[derive(Default)]
pub(super) struct Uses {
    ours: RwLock<Vec<Ours>>,
    others: Mutex<Vec<Other>>,
    held: Mutex<Held>,
}

impl Uses {
    /// Makes a stream of ours known, with an event that is its own from here on.
    pub(super) fn know(&self, stream: Handle, mark: Handle) {
        let ours = Ours { stream, mark, unmarked: AtomicBool::new(false) };
        self.ours.write().unwrap_or_else(PoisonError::into_inner).push(ours);
    }

    /// Says that work was put into a stream. Allocates nothing but for a stream that was never seen.
    ///
    /// # Errors
    /// What the driver says of a stream of another's.
    pub(super) fn put(&self, api: &dyn Api, context: Handle, stream: Handle) -> Called<()> {
        let ours = self.ours.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(ours) = ours.iter().find(|ours| ours.stream == stream) {
            // Behind the work: whoever finds the flag down has not missed it.
            ours.unmarked.store(true, Ordering::Release);
            return Ok(());
        }
        drop(ours);
        // SAFETY: the stream just took work, so it is live; the events are this value's.
        unsafe {
            if api.is_capturing(context, stream)? {
                return Ok(());
            }
            let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
            let at = match others.iter().position(|other| other.stream == stream) {
                Some(at) => at,
                None => {
                    if others.len() >= MOST_REMEMBERED
                        && let Some(old) = others.iter().position(|other| other.waited)
                    {
                        // A driver keeps what a stream still waits for.
                        api.destroy_event(context, others.swap_remove(old).mark)?;
                    }
                    let mark = api.create_event(context, false)?;
                    others.push(Other { stream, mark, waited: true });
                    others.len() - 1
                }
            };
            api.record_event(context, others[at].mark, stream)?;
            others[at].waited = false;
        }
        Ok(())
    }

    /// What is held back; nobody begins a capture while this is had.
    pub(super) fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `freeing` wait for all that was put into any stream. Returns false where that cannot be done now, since a stream is
    /// captured.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn hold(&self, held: &Held, api: &dyn Api, context: Handle, freeing: Handle) -> Called<bool> {
        if !held.threads.is_empty() {
            return Ok(false);
        }
        for ours in self.ours.read().unwrap_or_else(PoisonError::into_inner).iter() {
            if !ours.unmarked.swap(false, Ordering::AcqRel) {
                continue;
            }
            // SAFETY: the stream and the event are ours, and live for ever.
            let waits = unsafe {
                match api.is_capturing(context, ours.stream) {
                    Ok(true) => Ok(false),
                    Ok(false) => api
                        .record_event(context, ours.mark, ours.stream)
                        .and_then(|()| api.wait_event(context, freeing, ours.mark))
                        .map(|()| true),
                    Err(failed) => Err(failed),
                }
            };
            if waits != Ok(true) {
                ours.unmarked.store(true, Ordering::Release);
                return waits;
            }
        }
        for other in self.others.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            if !other.waited {
                // SAFETY: the event is this value's, and live.
                unsafe { api.wait_event(context, freeing, other.mark) }?;
                other.waited = true;
            }
        }
        Ok(true)
    }

    /// Says that this thread captures, until [`Uses::end_capture`].
    pub(super) fn begin_capture(&self) {
        self.held().threads.push(thread::current().id());
    }

    /// Says that a capture of this thread has ended.
    pub(super) fn end_capture(&self) {
        let mut held = self.held();
        let own = thread::current().id();
        if let Some(at) = held.threads.iter().position(|&thread| thread == own) {
            held.threads.swap_remove(at);
        }
    }
}
