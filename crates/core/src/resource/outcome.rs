//! Answers of admission: outcomes, never errors, with the numbers a scheduler needs.

use std::fmt;

use crate::{Label, RequestId, ResourceName};

/// A resource's answer to a step that it was asked to reserve for.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Outcome {
    /// Reserved.
    Admitted,
    /// Nothing is wrong, but not now: ask again after other work has finished.
    NotReady(Refusal),
    /// Not while things are as they are.
    Refused(Refusal),
}

/// Who refused, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// The resource that gave the answer.
    pub resource: ResourceName,
    /// Why, with its numbers.
    pub reason: RefusalReason,
}

/// Why a step cannot be admitted.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RefusalReason {
    /// Too few pages, free and evictable together.
    AllocationFailed {
        /// Pages missing.
        pages_short: usize,
        /// Pages the whole step needs.
        pages_needed: usize,
        /// The first stream that could not be served.
        request: RequestId,
        /// Its label.
        label: Label,
    },
    /// The request needs more pages at once, somewhere in its life, than there are: it is refused before it begins.
    NeverFits {
        /// The request.
        request: RequestId,
        /// The label of its streams.
        label: Label,
        /// Pages of all its streams at once, at the most.
        pages_needed: usize,
        /// Pages that requests may hold.
        pages_total: usize,
    },
    /// The stream would be longer than the spec allows.
    SequenceTooLong {
        /// The request.
        request: RequestId,
        /// Its label.
        label: Label,
        /// Tokens it would have.
        tokens: usize,
        /// Tokens it may have.
        max_seq_len: usize,
    },
    /// The request's pages are on their way to or from the host, or there already.
    RequestOffloading {
        /// The request.
        request: RequestId,
    },
    /// No world of a ring is free for a request that has none yet.
    NoWorldFree {
        /// The first request that could not be given one.
        request: RequestId,
        /// Worlds missing.
        worlds_short: usize,
        /// Worlds that the whole step needs beside those that its requests hold.
        worlds_needed: usize,
        /// Worlds of the ring, free or held.
        worlds_total: usize,
    },
    /// The request's world is being emptied, saved or restored.
    WorldBusy {
        /// The request.
        request: RequestId,
    },
    /// A ring's clock advances by one frame at a time.
    RingClock {
        /// The request.
        request: RequestId,
        /// The frame that may be passed, and committed, next.
        expected: u64,
        /// The frame asked for.
        got: u64,
    },
    /// No captured bucket is large enough.
    NoBucket {
        /// Rows of the step.
        rows: usize,
        /// Tokens of the step.
        tokens: usize,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.resource, self.reason)
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RefusalReason::AllocationFailed { pages_short, pages_needed, request, label } => {
                write!(
                    f,
                    "request {request} ({label}) is {pages_short} pages short of the {pages_needed} it needs"
                )
            }
            RefusalReason::NeverFits { request, label, pages_needed, pages_total } => {
                let short = pages_needed.saturating_sub(*pages_total);
                write!(
                    f,
                    "request {request} ({label}) is {short} pages short of the {pages_needed} it needs at \
                     once; the pool has {pages_total}"
                )
            }
            RefusalReason::SequenceTooLong { request, label, tokens, max_seq_len } => {
                write!(
                    f,
                    "request {request} ({label}) would hold {tokens} tokens, max_seq_len is {max_seq_len}"
                )
            }
            RefusalReason::RequestOffloading { request } => write!(f, "request {request} is offloaded"),
            RefusalReason::NoWorldFree { request, worlds_short, worlds_needed, worlds_total } => {
                write!(
                    f,
                    "request {request} is {worlds_short} worlds short of the {worlds_needed} that the step needs; the \
                     ring has {worlds_total}"
                )
            }
            RefusalReason::WorldBusy { request } => {
                write!(f, "the world of request {request} is being emptied, saved or restored")
            }
            RefusalReason::RingClock { request, expected, got } => {
                write!(f, "request {request} passes frame {got}, the next one is {expected}")
            }
            RefusalReason::NoBucket { rows, tokens } => {
                write!(f, "no captured bucket holds {rows} rows of {tokens} tokens")
            }
        }
    }
}

/// What became of a step, or of a plan made ahead, that was offered to the engine.
#[derive(Debug)]
#[must_use = "an admitted step is rolled back when it is dropped"]
pub enum Admission<T> {
    /// Every resource reserved what it needs.
    Admitted(T),
    /// Nothing is wrong, but not now: ask again after other work has finished. Nothing is reserved.
    NotReady(Refusal),
    /// Not while things are as they are. Nothing is reserved.
    Refused(Refusal),
}

impl<T> Admission<T> {
    /// The token, or the refusal of whichever kind.
    ///
    /// # Errors
    /// The refusal.
    pub fn admitted(self) -> Result<T, Refusal> {
        match self {
            Admission::Admitted(token) => Ok(token),
            Admission::NotReady(refusal) | Admission::Refused(refusal) => Err(refusal),
        }
    }

    /// The same outcome about something else.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Admission<U> {
        match self {
            Admission::Admitted(token) => Admission::Admitted(f(token)),
            Admission::NotReady(refusal) => Admission::NotReady(refusal),
            Admission::Refused(refusal) => Admission::Refused(refusal),
        }
    }
}
