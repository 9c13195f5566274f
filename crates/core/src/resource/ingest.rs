//! Requests as they enter, with what they ask of single resources.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::{Label, RequestId, ResourceName};

/// A request as it enters.
#[derive(Clone, Debug, PartialEq)]
pub struct Ingest {
    /// Its id.
    pub request: RequestId,
    /// For each stream, the content of the tokens that will be computed first; what the prefix index matches.
    pub prompts: Vec<(Label, Arc<[u64]>)>,
    /// Separates namespaces of the prefix index (tenant, adapter); `None` and `Some(vec![])` are distinct.
    pub salt: Option<Vec<u8>>,
    /// What this request asks of single resources. One that a resource does not take is refused by the engine,
    /// never dropped.
    pub overrides: BTreeMap<ResourceName, Override>,
}

impl Ingest {
    /// A request without prompts, salt or overrides.
    pub fn new(request: RequestId) -> Ingest {
        Ingest { request, prompts: Vec::new(), salt: None, overrides: BTreeMap::new() }
    }

    /// What this request asks of the KV cache `resource`; the defaults if nothing.
    pub fn kv_overrides(&self, resource: &ResourceName) -> KvOverrides {
        match self.overrides.get(resource) {
            Some(Override::Kv(overrides)) => overrides.clone(),
            _ => KvOverrides::default(),
        }
    }

    /// What this request asks of the attention resource `resource`; the defaults if nothing.
    pub fn attention_overrides(&self, resource: &ResourceName) -> AttentionOverrides {
        match self.overrides.get(resource) {
            Some(Override::Attention(overrides)) => overrides.clone(),
            _ => AttentionOverrides::default(),
        }
    }
}

/// What a request asks of one resource, by the resource's kind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Override {
    /// Of a KV cache.
    Kv(KvOverrides),
    /// Of an attention resource.
    Attention(AttentionOverrides),
}

/// What a request asks of a KV cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvOverrides {
    /// Tokens that each of its streams may hold; never more than the cache's own limit.
    pub max_seq_len: Option<usize>,
    /// `Some(false)` keeps the request out of the prefix index: it neither matches nor is offered.
    pub prefix_cache: Option<bool>,
}

/// What a request asks of an attention resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionOverrides {
    /// `Some(false)` gathers a frozen prefix anew every step instead of keeping it (the dense backend).
    pub keep_prefix: Option<bool>,
}
