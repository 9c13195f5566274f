//! What happened to a cache, in order, for a report or for a model that replays it.
#![forbid(unsafe_code)]

use crate::{Label, RequestId, StepSerial};

/// One event. Entries of the prefix index have numbers of their own, never used twice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvEvent {
    /// A request came in; each of its prompts found this many tokens (0 among them) in the prefix index.
    Hit {
        /// The request.
        request: RequestId,
        /// The stream.
        label: Label,
        /// Tokens that need not be computed: a multiple of the page size.
        tokens: usize,
    },
    /// A step was admitted.
    Admitted {
        /// The step.
        serial: StepSerial,
        /// Pages taken, copies of shared ones among them.
        pages: usize,
        /// Entries evicted to that end.
        evicted: usize,
    },
    /// A step was committed.
    Committed {
        /// The step.
        serial: StepSerial,
        /// Whether it kept what it did.
        kept: bool,
    },
    /// A step was undone.
    RolledBack {
        /// The step.
        serial: StepSerial,
    },
    /// A whole page of a stream was put into the index.
    Indexed {
        /// The entry's number.
        entry: u64,
        /// The stream's request.
        request: RequestId,
        /// The stream's label.
        label: Label,
        /// Which page of the stream, from 0.
        ordinal: usize,
    },
    /// A stream filled a page that the index already has.
    Duplicate {
        /// The entry's number.
        entry: u64,
        /// The stream's request.
        request: RequestId,
        /// The stream's label.
        label: Label,
        /// Which page of the stream, from 0.
        ordinal: usize,
        /// Whether the stream now uses the entry's page and gave its own back.
        repointed: bool,
    },
    /// An unreferenced entry was dropped and its page freed.
    Evicted {
        /// The entry's number.
        entry: u64,
    },
    /// A request's pages went to the host.
    Offloaded {
        /// The request.
        request: RequestId,
        /// Pages moved.
        pages: usize,
    },
    /// They came back.
    Reloaded {
        /// The request.
        request: RequestId,
        /// Pages moved.
        pages: usize,
    },
    /// A request was forgotten.
    Removed {
        /// The request.
        request: RequestId,
    },
}

/// An optional log: off until it is asked for, so that a server pays nothing.
#[derive(Debug, Default)]
pub(super) struct EventLog(Option<Vec<KvEvent>>);

impl EventLog {
    /// Starts (or stops) recording; what was recorded is dropped.
    pub(super) fn record(&mut self, on: bool) {
        self.0 = on.then(Vec::new);
    }

    /// Adds an event, when recording.
    pub(super) fn push(&mut self, event: impl FnOnce() -> KvEvent) {
        if let Some(events) = &mut self.0 {
            events.push(event());
        }
    }

    /// What was recorded since the last call.
    pub(super) fn drain(&mut self) -> Vec<KvEvent> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
