//! The manager level: an indexer and attention over its picks, as a resource of a spec over a latent cache.
//!
//! A step's rows come from the plans of the cache. Each label's plan says which queries attend everything they see (a row
//! of absorbed attention, with the bits that it has without an indexer) and which attend a pick. Both are there at once:
//! crossing `index_topk` needs no other memory and no other plan.
//!
//! Index keys lie in a plane of the cache's pages, or in buffers ([`IndexKeyStore`]), which know no forks and no prefixes.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `factory` | what is served, and the factory that the program registers |
//! | `layers` | the calls of a layer |
//! | `places` | typed plan storage |
//! | `memory` | picks, staging and scratch of a label and slot, and their sizes |
//! | `work` | bytes and operations of a plan, for reports |

mod factory;
mod layers;
mod memory;
mod places;
mod work;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use mstar_core::attend::{BuildContext, IndexGeometry, IndexStore, StepShape};
use mstar_core::graph::captured_page_capacity;
use mstar_core::kv::PagedKv;
use mstar_core::resource::{Fingerprint, Ingest, Outcome, PaddedShape, Promotion, StepContext};
use mstar_core::step::{AttentionStep, Declaration};
use mstar_core::{Error, Label, PlanId, RequestId, Resource, ResourceName, Result, Step, StepSerial};
use mstar_kernels::plan::{Capacity, PlanOptions};
use mstar_kernels::{Kernels, Stream};

pub use factory::DsaFactory;
pub(crate) use factory::supports;

use self::memory::{Memory, Sizes};
use self::places::{Places, Stored};
use crate::batch::{self, Room};
use crate::{DsaPlan, IndexKeyStore, Layer, Plan};

/// DeepSeek sparse attention over one latent cache.
pub struct DsaManager {
    name: ResourceName,
    /// Where plans are staged.
    stream: Stream,
    kv: Arc<dyn PagedKv>,
    layer: Layer,
    /// Which kernels run on a device.
    kernels: Kernels,
    index: IndexGeometry,
    /// The plane of index keys, when they lie in pages.
    plane: String,
    /// A store for each label, when they lie in buffers.
    buffers: Mutex<HashMap<Label, IndexKeyStore>>,
    /// What each label and slot gets from the first.
    foreseen: Sizes,
    /// What plans have room for from the first.
    largest: Option<StepShape>,
    places: Places,
}

impl fmt::Debug for DsaManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DsaManager")
            .field("name", &self.name)
            .field("kv_cache", self.kv.name())
            .field("layer", &self.layer)
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

impl DsaManager {
    /// The resource over the cache of `cx`.
    ///
    /// # Errors
    /// What [`DsaFactory`] does not serve, with the reason; no cache, one without latents or without the plane that `index`
    /// asks for; memory that cannot be had.
    pub fn build(cx: &BuildContext, index: &IndexGeometry) -> Result<DsaManager> {
        if let Err(reason) = supports(cx.device(), &cx.geometry, index) {
            let operation = "sparse attention";
            let error = mstar_kernels::Error::Unsupported { operation, device: cx.device(), why: reason.0 };
            return Err(Error::backend(cx.name.as_str(), error));
        }
        let kv = cx.paged_cache()?;
        if kv.config().layout != cx.geometry.layout || kv.config().page_size != cx.geometry.page_size {
            let why = format!("the cache {} has other latents than the geometry says", kv.name());
            return Err(cx.refuse("kv_cache", &why, &kv.config().layout));
        }
        if let Some(plane) = index.plane(&cx.name)
            && !kv.config().planes.contains(&plane)
        {
            let planes: Vec<&str> = kv.config().planes.iter().map(|plane| plane.name.as_str()).collect();
            let why =
                format!("the cache {} needs the plane {plane:?}, or say index_store: buffers", kv.name());
            return Err(cx.refuse("planes", &why, &planes));
        }
        let said = |error| Error::backend(cx.name.as_str(), error);
        let layer = factory::layer(&cx.geometry, index)
            .map_err(|reason| cx.refuse("layout", &reason.0, &cx.geometry.layout))?;
        let foreseen = match cx.largest {
            Some(largest) => Sizes::foreseen(&layer, index, largest, cx.device()).map_err(said)?,
            None => Sizes::default(),
        };
        batch::prepare(&layer, cx.kernels, &cx.stream)
            .map_err(|error| Error::backend(cx.name.as_str(), error))?;
        Ok(DsaManager {
            name: cx.name.clone(),
            stream: cx.stream,
            kv,
            layer,
            kernels: cx.kernels,
            index: index.clone(),
            plane: IndexGeometry::plane_name(&cx.name),
            buffers: Mutex::default(),
            foreseen,
            largest: cx.largest,
            places: Places::default(),
        })
    }

    /// The rows of a plan.
    ///
    /// # Errors
    /// A missing plan.
    pub fn dsa_plan(&self, plan: &PlanId) -> Result<Arc<DsaPlan>> {
        Ok(Arc::clone(self.stored(plan)?.plan.rows()))
    }

    /// Bytes of picks, staging and scratch, and of index keys in buffers.
    pub fn bytes(&self) -> usize {
        let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        self.places.bytes() + buffers.values().map(IndexKeyStore::bytes).sum::<usize>()
    }

    fn stored(&self, plan: &PlanId) -> Result<Arc<Stored>> {
        self.places.get(&self.name, plan)
    }

    fn said<T>(
        &self,
        result: std::result::Result<T, impl std::error::Error + Send + Sync + 'static>,
    ) -> Result<T> {
        result.map_err(|error| Error::backend(self.name.as_str(), error))
    }

    fn in_buffers(&self) -> bool {
        self.index.store == IndexStore::Buffers
    }

    /// The buffers, for one call of a layer; never waits.
    fn buffers(&self, call: &'static str) -> Result<MutexGuard<'_, HashMap<Label, IndexKeyStore>>> {
        match self.buffers.try_lock() {
            Ok(buffers) => Ok(buffers),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let why = "another call has the buffers of index keys; run one after the other".into();
                Err(Error::Order { call, why })
            }
        }
    }

    /// Plans one label: rows, work list, memory. What there was before under the label and slot is used again.
    fn plan_label(&self, id: &PlanId, bucket: Option<PaddedShape>) -> Result<()> {
        let kv = self.kv.kv_plan(id)?;
        let config = self.kv.config();
        let mut room = Room::default();
        if let Some(StepShape { rows, tokens, kv_len }) = self.largest {
            let pages = rows.saturating_mul(config.pages_for(kv_len).saturating_add(1));
            room.add(PaddedShape { rows, tokens }, pages);
            room.keys = kv_len;
        }
        for shape in [self.places.captured(), bucket].into_iter().flatten() {
            room.add(shape, captured_page_capacity(shape, config));
        }
        let capacity = bucket.map(|PaddedShape { rows, tokens }| Capacity {
            rows,
            tokens,
            pages: captured_page_capacity(PaddedShape { rows, tokens }, config),
        });
        if let (0, Some(capacity)) = (room.keys, &capacity) {
            room.keys = capacity.pages.saturating_mul(config.page_size);
        }
        let (device, kernels) = (self.stream.device(), self.kernels);
        let options = PlanOptions { capacity, device, kernels, ..PlanOptions::default() };
        if self.in_buffers() {
            self.grow_buffers(&kv)?;
        }
        self.places.plan(id, |before| {
            let (before, memory) = match before.map(Arc::try_unwrap) {
                Some(Ok(stored)) => (Some(stored.plan), Some(stored.memory)),
                Some(Err(held)) => (None, Some(Arc::clone(&held.memory))),
                None => (None, None),
            };
            let num_pages = config.max_num_pages;
            let mut plan = self.said(Plan::of_cache(&self.layer, &kv, before, room, num_pages, &options))?;
            self.said(plan.stage(&self.stream))?;
            let sizes = Sizes::of_plan(&plan, room.tokens, &self.index).max(self.foreseen);
            let memory = match memory {
                Some(memory) => {
                    let mut held = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    self.said(held.reserve(sizes))?;
                    drop(held);
                    memory
                }
                None => Arc::new(Mutex::new(self.said(Memory::new(self.stream.device(), sizes))?)),
            };
            let (rows, geometry) = (plan.rows(), &self.layer.geometry);
            let selecting = work::of_selecting(rows, geometry, &self.index);
            let work = (selecting, work::of_attending(rows, geometry, &self.index));
            Ok(Arc::new(Stored { plan, memory, work }))
        })
    }

    /// Makes room for a step's keys in every full layer's buffer.
    fn grow_buffers(&self, kv: &mstar_core::kv::KvPlan) -> Result<()> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        for row in &kv.rows[..kv.real_rows] {
            if !buffers.contains_key(&row.label) {
                let store = self.said(IndexKeyStore::new(self.index.format, self.index.index_head_dim))?;
                buffers.insert(row.label.clone(), store);
            }
            let store = buffers.get_mut(&row.label).expect("it was just made");
            for &layer in &self.index.full_layers {
                self.said(store.reserve(&row.request, layer, row.kv_len))?;
            }
        }
        Ok(())
    }

    fn evict(&self, request: &RequestId) {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.values_mut().for_each(|store| store.evict(request));
    }

    fn refuse<T>(&self, why: &str) -> Result<T> {
        Err(Error::Step { resource: self.name.clone(), why: why.into() })
    }
}

impl Resource for DsaManager {
    fn name(&self) -> &ResourceName {
        &self.name
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        vec![self.kv.name().clone()]
    }

    /// Pages of the second layer on are projected from what this resource computed, so everything that changes its numbers
    /// is part of what they depend on: heads, widths, `index_topk`, format, full layers, scale. Where index keys are kept is
    /// not: it changes no bit.
    fn fingerprint(&self) -> Option<Fingerprint> {
        let IndexGeometry { index_n_heads, index_head_dim, index_topk, format, full_layers, .. } =
            &self.index;
        let (scale, kernels) = (self.layer.sm_scale.to_bits(), self.kernels.name());
        let text = format!(
            "dsa {:?} {scale:08x} {index_n_heads} {index_head_dim} {index_topk} {format} {full_layers:?} {kernels}",
            self.layer.geometry
        );
        Some(Fingerprint(text.into_bytes()))
    }

    /// Index keys in pages are found with the latents; those in buffers are nobody's but the request's.
    fn prefix_skip_safe(&self) -> bool {
        !self.in_buffers()
    }

    /// Nothing is kept for a request before its first step.
    fn ingest_request(&self, _: &Ingest) -> Result<()> {
        Ok(())
    }

    fn admit(&self, _: &StepContext, step: &Step) -> Result<Outcome> {
        match step.resources.get(&self.name) {
            None => {}
            Some(Declaration::Attention(said)) if *said == AttentionStep::default() => {}
            Some(_) => {
                return self.refuse(
                    "its rows are those of its cache's plan, and each query sees every earlier key; declare nothing for it",
                );
            }
        }
        let forks =
            step.kv(self.kv.name()).is_some_and(|kv| !kv.pre_forks.is_empty() || !kv.post_forks.is_empty());
        if self.in_buffers() && forks {
            return self
                .refuse("index keys in buffers are not forked with their stream; say index_store: pages");
        }
        Ok(Outcome::Admitted)
    }

    fn rollback(&self, serial: StepSerial) {
        self.places.forget(serial);
    }

    fn plan(&self, cx: &StepContext, _: &Step) -> Result<()> {
        for label in self.kv.plan_labels(cx.serial)? {
            self.plan_label(&PlanId { slot: cx.slot, label, serial: cx.serial }, cx.bucket)?;
        }
        Ok(())
    }

    fn promote(&self, cx: &StepContext, _: &Step) -> Result<Promotion> {
        // Whether the rows moved is for the cache to say; these plans are of the rows it had.
        Ok(if self.places.has(cx.serial) { Promotion::Valid } else { Promotion::Stale })
    }

    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.places.forget(serial);
        Ok(())
    }

    /// Buffers are dropped, unless a planned step reads them.
    fn reset_request(&self, request: &RequestId, _: bool) -> Result<()> {
        if self.in_buffers() && self.places.names(request) {
            let why = format!("a step holds request {request}; commit or roll it back");
            return Err(Error::Order { call: "reset_request", why });
        }
        self.evict(request);
        Ok(())
    }

    fn remove_request(&self, request: &RequestId) -> Result<()> {
        self.evict(request);
        Ok(())
    }

    /// Growing buffers would move under the step that reads them.
    fn supports_preplan(&self) -> bool {
        !self.in_buffers()
    }

    fn build_accelerator_graph_buffers(&self, _: usize, shape: PaddedShape) -> Result<()> {
        self.places.capture(shape);
        Ok(())
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut requests: Vec<RequestId> =
            buffers.values().flat_map(IndexKeyStore::tracked_requests).collect();
        requests.sort();
        requests.dedup();
        requests
    }
}
