//! A paged store as a resource of a spec: what a step declares for it, and its plans, by name.
#![forbid(unsafe_code)]

use std::sync::{Arc, LazyLock};

use mstar_kernels::{Stream, TensorRef};

use super::{KvConfig, KvEntries, KvPlan, LayerView, Namespace, PagedKv, PagedStore};
use crate::resource::{Fingerprint, Ingest, Override, Promotion, StepContext};
use crate::step::{Declaration, KvStep};
use crate::{Error, Label, Outcome, PlanId, RequestId, Resource, ResourceName, Result, Step, StepSerial};

/// A paged KV cache in a spec. [`PagedKvCache::store`] has what is particular to a cache: offload, events, stats.
#[derive(Debug)]
pub struct PagedKvCache {
    name: ResourceName,
    store: PagedStore,
}

/// What a step that does not name a cache does to it: nothing, and it is kept.
static NOTHING: LazyLock<KvStep> = LazyLock::new(|| KvStep {
    segments: Vec::new(),
    commit: true,
    pre_forks: Vec::new(),
    post_forks: Vec::new(),
    combined: Vec::new(),
});

impl PagedKvCache {
    /// A cache of this geometry.
    ///
    /// # Errors
    /// An impossible geometry, or memory that cannot be had.
    pub fn new(name: ResourceName, config: KvConfig) -> Result<PagedKvCache> {
        PagedKvCache::on(Stream::cpu(), name, config)
    }

    /// As [`PagedKvCache::new`], with pages on `stream`'s device; see [`PagedStore::on`].
    ///
    /// # Errors
    /// As [`PagedKvCache::new`].
    pub fn on(stream: Stream, name: ResourceName, config: KvConfig) -> Result<PagedKvCache> {
        Ok(PagedKvCache { store: PagedStore::on(stream, name.clone(), config)?, name })
    }

    /// The store itself.
    pub fn store(&self) -> &PagedStore {
        &self.store
    }

    fn declared<'a>(&self, step: &'a Step) -> Result<&'a KvStep> {
        match step.resources.get(&self.name) {
            None => Ok(&NOTHING),
            Some(Declaration::Kv(declared)) => Ok(declared),
            Some(_) => {
                let why = "the step declares something else than a KV step for a cache".to_owned();
                Err(Error::Step { resource: self.name.clone(), why })
            }
        }
    }
}

impl Resource for PagedKvCache {
    fn name(&self) -> &ResourceName {
        &self.name
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        Vec::new()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        Some(Fingerprint(Namespace::new(self.store.config(), &[]).as_bytes().to_vec()))
    }

    fn takes_override(&self, wanted: &Override) -> bool {
        matches!(wanted, Override::Kv(_))
    }

    /// Pages are found again only among resources of the same fingerprints; a prefix index that nobody may use is refused.
    fn bind(
        &self,
        others: &[(ResourceName, Option<Fingerprint>)],
        unskippable: &[ResourceName],
    ) -> Result<()> {
        if let (true, Some(resource)) = (self.store.config().prefix_cache, unskippable.first()) {
            let why = format!(
                "prefix_cache is on, but a matched prefix may not skip the work of {resource}; say prefix_cache: false"
            );
            return Err(Error::Step { resource: self.name.clone(), why });
        }
        self.store.set_namespace(Namespace::new(self.store.config(), others))
    }

    fn ingest_request(&self, ingest: &Ingest) -> Result<()> {
        self.store.ingest(ingest)
    }

    fn admit(&self, cx: &StepContext, step: &Step) -> Result<Outcome> {
        self.store.admit(cx.serial, cx.slot, cx.preplan, self.declared(step)?)
    }

    fn rollback(&self, serial: StepSerial) {
        self.store.rollback(serial);
    }

    fn plan(&self, cx: &StepContext, _step: &Step) -> Result<()> {
        self.store.plan(cx.serial, cx.bucket)
    }

    fn promote(&self, cx: &StepContext, _step: &Step) -> Result<Promotion> {
        self.store.promote(cx.serial, cx.slot)
    }

    fn commit(&self, serial: StepSerial, _step: &Step) -> Result<()> {
        self.store.commit(serial)
    }

    fn reset_request(&self, request: &RequestId, free: bool) -> Result<()> {
        self.store.reset(request, free)
    }

    fn remove_request(&self, request: &RequestId) -> Result<()> {
        self.store.remove(request)
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        self.store.requests()
    }
}

impl PagedKv for PagedKvCache {
    fn config(&self) -> &KvConfig {
        self.store.config()
    }

    fn kv_plan(&self, id: &PlanId) -> Result<Arc<KvPlan>> {
        self.store.kv_plan(id)
    }

    fn plan_labels(&self, serial: StepSerial) -> Result<Vec<Label>> {
        self.store.plan_labels(serial)
    }

    fn capture_key(&self, id: &PlanId) -> Option<u64> {
        self.store.slots_address(id).map(|address| address as u64)
    }

    fn layer(&self, layer: usize) -> Result<LayerView<'_>> {
        self.store.layer(layer)
    }

    fn plane(&self, name: &str, layer: usize) -> Result<TensorRef<'_>> {
        self.store.plane(name, layer)
    }

    fn write_plane(
        &self,
        id: &PlanId,
        name: &str,
        layer: usize,
        entries: TensorRef<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.store.write_plane(id, name, layer, entries, stream)
    }

    fn write_kv(&self, id: &PlanId, layer: usize, entries: KvEntries<'_>, stream: &Stream) -> Result<()> {
        self.store.write_kv(id, layer, entries, stream)
    }
}
