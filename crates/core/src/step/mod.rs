//! What one forward does to each resource, as plain data that is never written again.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::{Label, RequestId, ResourceName};

/// One step's addition to one stream. Span 0 reads without extending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Whose stream.
    pub request: RequestId,
    /// Which of its streams.
    pub label: Label,
    /// Tokens added, which are also the segment's query tokens.
    pub span: usize,
    /// The content of those tokens (token ids, or any 64-bit content key), which page keys of the prefix index are made
    /// of. Either `span` long or empty; a page with unknown content is never indexed.
    pub tokens: Arc<[u64]>,
}

/// A stream that starts as a copy of another: full pages shared, the partial last one copied on write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fork {
    /// Whose streams.
    pub request: RequestId,
    /// The stream copied.
    pub from: Label,
    /// The stream made, or replaced.
    pub to: Label,
}

/// A plan label that packs several labels' segments into one plan (batched classifier-free guidance).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Combined {
    /// The name of the group.
    pub label: Label,
    /// Its members, in packed order: all rows of the first, then all of the second.
    pub parts: Vec<Label>,
}

/// What a step does to a KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvStep {
    /// Additions, in packed order within each label. A stream appears at most once.
    pub segments: Vec<Segment>,
    /// Whether lengths grow at commit. `false` (a denoise pass) keeps nothing, but still clears the marks.
    pub commit: bool,
    /// Forks made before the segments are placed.
    pub pre_forks: Vec<Fork>,
    /// Forks made at commit, after lengths grew.
    pub post_forks: Vec<Fork>,
    /// Groups of labels that are planned together.
    pub combined: Vec<Combined>,
}

impl Default for KvStep {
    /// Nothing to do, and committed.
    fn default() -> KvStep {
        KvStep { segments: vec![], commit: true, pre_forks: vec![], post_forks: vec![], combined: vec![] }
    }
}

/// What a step does to an attention resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionStep {
    /// Query rows, where they are not those of the KV cache's own plan (cross-attention over a fixed context).
    pub queries: Option<Vec<Segment>>,
    /// Plans that attend the stored context alone, not the step's own entries.
    pub context_only: bool,
    /// Rows whose queries see fewer keys than causality and window leave them; other rows have no mask.
    pub masks: Vec<RowMask>,
}

/// One pass over one frame of a ring. A request has one world, so it passes at most one frame a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSegment {
    /// Whose world; it claims one at its first admission.
    pub request: RequestId,
    /// The plan label that packs it. A world has no streams: labels only group passes into plans.
    pub label: Label,
    /// Query tokens, which are the frame: the ring's `tokens_per_frame`.
    pub span: usize,
    /// The frame's number in its world: as many as the request has committed. Passes that do not commit may repeat it.
    pub frame_pos: u64,
    /// Whether the step's commit keeps the frame. A pass that does not (a denoise step) is overwritten by the next.
    pub commit: bool,
}

/// What a step does to a ring of frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RingStep {
    /// Passes, in packed order within each label.
    pub segments: Vec<RingSegment>,
}

/// Which keys one row's queries may see, such as the ancestors in a draft tree of speculative decoding. A key is seen
/// when the mask, causality and the window all allow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowMask {
    /// Whose stream.
    pub request: RequestId,
    /// Which of its streams.
    pub label: Label,
    /// The keys.
    pub visible: MaskKeys,
}

/// A boolean mask, row-major, `true` where a query may see a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskKeys {
    /// `[q_len, q_len]`: which of the step's own tokens each of them may see. All that was stored before is allowed.
    Own(Arc<[bool]>),
    /// `[q_len, kv_len]`: every key of the row, by absolute position.
    All(Arc<[bool]>),
}

/// One resource's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Declaration {
    /// For a KV cache.
    Kv(KvStep),
    /// For an attention resource.
    Attention(AttentionStep),
    /// For a ring of frames.
    Ring(RingStep),
}

/// What one forward does. Resources that are not named take part with their defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The kind of forward (`prefill`, `decode`, `denoise`), which selects a captured graph.
    pub walk: String,
    /// Each resource's part.
    pub resources: BTreeMap<ResourceName, Declaration>,
}

impl Step {
    /// A step in which every resource takes part with its defaults.
    pub fn new(walk: impl Into<String>) -> Step {
        Step { walk: walk.into(), resources: BTreeMap::new() }
    }

    /// The step with `resource`'s part replaced.
    #[must_use]
    pub fn with(mut self, resource: impl Into<ResourceName>, declaration: Declaration) -> Step {
        self.resources.insert(resource.into(), declaration);
        self
    }

    /// Whether any part of the step is about `request`.
    pub fn names(&self, request: &RequestId) -> bool {
        self.resources.values().any(|declaration| match declaration {
            Declaration::Kv(kv) => {
                let forks = kv.pre_forks.iter().chain(&kv.post_forks).map(|fork| &fork.request);
                kv.segments.iter().map(|segment| &segment.request).chain(forks).any(|named| named == request)
            }
            Declaration::Attention(attention) => {
                let queries = attention.queries.iter().flatten().map(|segment| &segment.request);
                attention.masks.iter().map(|mask| &mask.request).chain(queries).any(|named| named == request)
            }
            Declaration::Ring(ring) => ring.segments.iter().any(|segment| segment.request == *request),
        })
    }

    /// What the step does to the KV cache `resource`, if anything.
    pub fn kv(&self, resource: &ResourceName) -> Option<&KvStep> {
        match self.resources.get(resource) {
            Some(Declaration::Kv(kv)) => Some(kv),
            _ => None,
        }
    }

    /// What the step does to the ring `resource`, if anything.
    pub fn ring(&self, resource: &ResourceName) -> Option<&RingStep> {
        match self.resources.get(resource) {
            Some(Declaration::Ring(ring)) => Some(ring),
            _ => None,
        }
    }

    /// What the step says to the attention resource `resource`, if anything.
    pub fn attention(&self, resource: &ResourceName) -> Option<&AttentionStep> {
        match self.resources.get(resource) {
            Some(Declaration::Attention(attention)) => Some(attention),
            _ => None,
        }
    }
}

/// A step's number; never used twice in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepSerial(pub u64);

impl fmt::Display for StepSerial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One of the buffer sets that plans and captured graphs live in; a preplan uses another than the running step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub usize);

/// A plan in a resource's own typed storage. A stale id is refused, never served.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanId {
    /// The buffer set.
    pub slot: Slot,
    /// The plan label.
    pub label: Label,
    /// The step it was made for.
    pub serial: StepSerial,
}
