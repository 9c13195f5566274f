//! What happened in a run, in order: the log that reports carry and that a model of the prefix index replays.

use mstar_core::{Label, RequestId};
use serde::Serialize;

use super::script::Walk;

/// One event. `step` counts the steps that had committed before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// A request entered.
    Admit {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// Its prompt.
        prompt_tokens: usize,
        /// Prompt tokens that the prefix index had.
        hit_tokens: usize,
    },
    /// Tokens of a request became part of its streams.
    Commit {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// In which kind of forward.
        #[serde(serialize_with = "walk_name")]
        walk: Walk,
        /// Tokens that each stream of the step now holds.
        streams: Vec<Stored>,
    },
    /// A whole page of a stream was put into the prefix index.
    Index {
        /// When.
        step: u64,
        /// The entry's number, never used twice.
        entry: u64,
        /// Who filled it.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// On which stream.
        #[serde(serialize_with = "label_text")]
        label: Label,
        /// Which of the stream's pages: its tokens `ordinal * page_size ..`.
        ordinal: usize,
    },
    /// The prefix index let an entry go, so that somebody else could have its page.
    Evict {
        /// When.
        step: u64,
        /// The entry's number.
        entry: u64,
    },
    /// A request's pages went to the host.
    Offload {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// Pages that came free.
        pages: usize,
    },
    /// A request came back.
    Reload {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// Pages that it took.
        pages: usize,
    },
    /// A request was sent back to the queue, with nothing kept but what the prefix index has.
    Restart {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
    },
    /// A request's world was copied to the host.
    Save {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// Frames that it had kept.
        frames: usize,
    },
    /// A request's world became what had been saved.
    Restore {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// Frames that it has kept from then on.
        frames: usize,
    },
    /// A request was refused.
    Refuse {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
        /// Why, with its numbers.
        why: String,
    },
    /// A request ran to its end.
    Finish {
        /// When.
        step: u64,
        /// Who.
        #[serde(serialize_with = "text")]
        request: RequestId,
    },
}

/// How much a stream holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Stored {
    /// The stream.
    #[serde(serialize_with = "label_text")]
    pub(crate) label: Label,
    /// Tokens from its beginning on.
    pub(crate) tokens: usize,
}

impl Event {
    /// The event as of `now`.
    pub(crate) fn at(mut self, now: u64) -> Event {
        let (Event::Admit { step, .. }
        | Event::Commit { step, .. }
        | Event::Index { step, .. }
        | Event::Evict { step, .. }
        | Event::Offload { step, .. }
        | Event::Reload { step, .. }
        | Event::Restart { step, .. }
        | Event::Save { step, .. }
        | Event::Restore { step, .. }
        | Event::Refuse { step, .. }
        | Event::Finish { step, .. }) = &mut self;
        *step = now;
        self
    }
}

fn text<S: serde::Serializer>(request: &RequestId, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(request.as_str())
}

fn walk_name<S: serde::Serializer>(walk: &Walk, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(walk.name())
}

fn label_text<S: serde::Serializer>(label: &Label, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(label.as_str())
}
