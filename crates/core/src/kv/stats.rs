//! What a cache holds and what has happened to it, in numbers.
#![forbid(unsafe_code)]

/// Counts since the store was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    pub(super) evictions: u64,
    pub(super) prompt_tokens: u64,
    pub(super) hit_tokens: u64,
    pub(super) repointed: u64,
    pub(super) copies: u64,
    pub(super) offloads: u64,
    pub(super) reloads: u64,
    pub(super) offloaded_bytes: u64,
}

/// A cache at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvStats {
    /// Pages that requests may hold: all but the sink. The next three add up to it.
    pub pages_total: usize,
    /// Pages on the free list.
    pub pages_free: usize,
    /// Pages that only the prefix index keeps.
    pub pages_cached: usize,
    /// Pages of requests and of outstanding steps.
    pub pages_held: usize,
    /// Cached pages that could be evicted now; the others have a descendant in use.
    pub pages_evictable: usize,
    /// Bytes of all pages, the sink among them.
    pub bytes: usize,
    /// Entries of the prefix index.
    pub indexed: usize,
    /// Entries evicted so far.
    pub evictions: u64,
    /// Prompt tokens seen at ingest so far.
    pub prompt_tokens: u64,
    /// Of those, tokens found in the prefix index.
    pub hit_tokens: u64,
    /// Pages given up for an equal one of the index.
    pub repointed: u64,
    /// Pages copied because they were shared and about to be written.
    pub copies: u64,
    /// Requests sent to the host.
    pub offloads: u64,
    /// Requests brought back.
    pub reloads: u64,
    /// Bytes sent to the host so far.
    pub offloaded_bytes: u64,
    /// Requests present, those on the host among them.
    pub requests: usize,
    /// Requests whose pages are on the host, or on the way.
    pub offloaded: usize,
}

/// One stream as it is stored, for tests and reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamState {
    /// Tokens stored.
    pub len: usize,
    /// Position of the first kept token.
    pub first_kept: usize,
    /// Position of slot 0 of the first page.
    pub kv_offset: usize,
    /// The generation.
    pub generation: u64,
    /// Its pages, the spare ones among them; ordinals of saved pages while it is on the host.
    pub pages: Vec<i32>,
}
