//! From a checked spec to an engine: caches, attention resources, buckets, and the part each plays.

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use mstar_core::attend::{AttnGeometry, BuildContext, SparseAttention, StepShape};
use mstar_core::graph::Buckets;
use mstar_core::kv::{KvConfig, PagedKv, PagedKvCache, RingCache, RingKv};
use mstar_core::resource::EngineOptions;
use mstar_core::spec::{KernelFamily, ResourceKind, Spec};
use mstar_core::{Engine, Resource, ResourceName};
use mstar_kernels::cuda::OwnedStream;
use mstar_kernels::{DType, Device};

use super::cache::OwnCache;
use super::declare::Parts;
use super::entries::Entries;
use super::phases::Phases;
use super::room::{Attends, Room};
use super::shapes::{self, of_frames, padded};
use super::verify::{Frames, Shape};
use crate::explain::{Served, ServedSparse, causal, causal_in_frames};

/// A model's attention state and work.
pub(crate) struct Model {
    /// The queue that layers run on; it outlives what was built on it.
    pub(crate) queue: OwnedStream,
    /// Everything in order.
    pub(crate) engine: Engine,
    /// The cache of the requests' own streams.
    pub(crate) kv: OwnCache,
    /// The cache of encoders' contexts.
    pub(crate) context: Option<Arc<PagedKvCache>>,
    /// Attention over `kv`.
    pub(crate) own: Vec<Room>,
    /// Attention over `context`.
    pub(crate) cross: Vec<Room>,
    /// Who plays which part in a step.
    pub(crate) parts: Parts,
    /// Shapes that decode steps are padded to.
    pub(crate) buckets: Buckets,
    /// `L`.
    pub(crate) layers: usize,
    /// Element type of queries and outputs.
    pub(crate) dtype: DType,
    /// Pages' worth of host memory for offloaded requests.
    pub(crate) host_pages: usize,
}

impl Model {
    /// Builds what the spec names, and nothing else.
    pub(crate) fn build(
        spec: &Spec,
        device: Device,
        served: &[Served],
        sparse: &[ServedSparse],
        largest: Option<StepShape>,
        phases: &Arc<Phases>,
    ) -> anyhow::Result<Model> {
        let preplan = spec.workload.as_ref().is_some_and(|workload| workload.preplan);
        let slots = spec.graph.as_ref().map_or(1, |graph| graph.slots).max(if preplan { 2 } else { 1 });
        // What pads a bucket over a ring has tiles of its own, though it sees nothing.
        let largest = largest.map(|largest| of_frames(spec, largest));
        if let Some(why) = kernels_missing(spec.kernels, device) {
            bail!("{why}");
        }
        let queue = OwnedStream::new(device)?;
        let stream = queue.stream();
        let mut caches: Vec<(ResourceName, Arc<PagedKvCache>)> = Vec::new();
        let mut rings: Vec<(ResourceName, Arc<RingCache>)> = Vec::new();
        let mut resources: Vec<Arc<dyn Resource>> = Vec::new();
        let (mut own, mut cross) = (Vec::new(), Vec::new());
        let (mut main, mut context): (Option<ResourceName>, Option<ResourceName>) = (None, None);
        let mut host_pages = 0usize;
        let mut indexer: Option<(ResourceName, Arc<dyn SparseAttention>, Shape)> = None;
        for resource in &spec.resources {
            let name = &resource.name;
            let find = |caches: &[(ResourceName, Arc<PagedKvCache>)], name: Option<&ResourceName>| {
                let cache = caches.iter().find(|(other, _)| Some(other) == name)?;
                Some(cache.1.clone() as Arc<dyn PagedKv>)
            };
            let context_of = |geometry: &AttnGeometry, kv_cache, query_from| BuildContext {
                name: name.clone(),
                geometry: geometry.clone(),
                stream,
                kv_cache: find(&caches, kv_cache),
                ring: ring_of(&rings, kv_cache).map(|ring| ring as Arc<dyn RingKv>),
                query_from: find(&caches, query_from),
                slots,
                largest,
                schedule: spec.schedule,
                kernels: spec.kernels,
                fallback: spec.fallback,
            };
            match &resource.kind {
                ResourceKind::Kv(kv) => {
                    let made = PagedKvCache::on(stream, name.clone(), kv.config.clone())
                        .with_context(|| format!("resources.{name}"))?;
                    let cache = Arc::new(made);
                    host_pages += kv.host_pages;
                    resources.push(cache.clone());
                    caches.push((name.clone(), cache));
                }
                ResourceKind::Ring(ring) => {
                    let made = RingCache::on(stream, name.clone(), ring.config.clone())
                        .with_context(|| format!("resources.{name}"))?;
                    let ring = Arc::new(made);
                    resources.push(ring.clone());
                    rings.push((name.clone(), ring));
                }
                ResourceKind::Attention(attention) => {
                    let served = served
                        .iter()
                        .find(|served| served.name == *name)
                        .with_context(|| format!("no backend was chosen for resources.{name}"))?;
                    let (kv_cache, query_from) = (attention.kv_cache.as_ref(), attention.query_from.as_ref());
                    let built = served.options.build(&context_of(&served.geometry, kv_cache, query_from));
                    let built = built.with_context(|| format!("resources.{name}"))?;
                    resources.push(built.clone());
                    let is_cross = attention.query_from.is_some();
                    let part = if is_cross { &mut context } else { &mut main };
                    claim(part, attention.kv_cache.as_ref(), name)?;
                    let shape = match ring_of(&rings, kv_cache) {
                        Some(ring) => {
                            let shape = shape(&served.geometry, causal_in_frames(attention))?;
                            let (entries, frames) = (
                                Entries::of_ring(ring.config()),
                                Frames::of(ring.config(), &attention.options),
                            );
                            Shape { entries, frames: Some(frames), ..shape }
                        }
                        None => shape(&served.geometry, !is_cross && causal(attention))?,
                    };
                    let room = Room {
                        name: name.clone(),
                        attends: Attends::Dense(built),
                        shape,
                        index: own.len() + cross.len(),
                        backend: served.backend.to_owned(),
                    };
                    if is_cross { cross.push(room) } else { own.push(room) }
                }
                ResourceKind::Dsa(dsa) => {
                    let served = sparse
                        .iter()
                        .find(|served| served.name == *name)
                        .with_context(|| format!("nobody serves resources.{name}"))?;
                    let factory = served.factory.as_ref().with_context(|| format!("resources.{name}"))?;
                    let cx = context_of(&served.geometry, Some(&dsa.kv_cache), None);
                    let largest = largest.map(|largest| padded(spec, largest));
                    let cx = BuildContext { largest, ..cx };
                    let built = factory.build(&cx, &dsa.index);
                    let built = built.with_context(|| format!("resources.{name}"))?;
                    resources.push(built.clone());
                    claim(&mut main, Some(&dsa.kv_cache), name)?;
                    ensure!(indexer.is_none(), "resources.{name}: run drives one resource of kind dsa");
                    indexer = Some((name.clone(), built, shape(&served.geometry, true)?));
                }
                other => bail!("resources.{name}: kind {} cannot be run yet", other.name()),
            }
        }
        let masked = own.iter().map(|room: &Room| room.name.clone()).collect();
        if let Some((name, sparse, shape)) = indexer {
            under(&mut own, cross.len(), name, sparse, shape);
        }
        let Some(main) = main else {
            bail!(
                "resources: no attention over a cache of its own; add one of kind attention without query_from"
            )
        };
        let cache =
            |name: &ResourceName| caches.iter().find(|(other, _)| other == name).map(|(_, c)| c.clone());
        let kv = match (cache(&main), ring_of(&rings, Some(&main))) {
            (Some(pages), _) => OwnCache::Pages(pages),
            (None, Some(ring)) => OwnCache::Ring(ring),
            (None, None) => bail!("resources.{main} is no cache"),
        };
        if let Some(pages) = kv.pages() {
            pages.store().record_events(true);
        }
        let frame = kv.ring().map(|ring| ring.config().tokens_per_frame);
        let buckets = shapes::buckets(spec);
        let options =
            EngineOptions { slots, preplan, observer: Some(phases.clone()), ..EngineOptions::default() };
        let engine = Engine::with_options(resources, options)?;
        engine.build_accelerator_graph_buffers(buckets.iter())?;
        let parts = Parts { kv: main, own: masked, context: context.clone(), frame };
        Ok(Model {
            queue,
            engine,
            kv,
            context: context.as_ref().and_then(cache),
            own,
            cross,
            parts,
            buckets,
            layers: spec.model.layers,
            dtype: spec.dtype,
            host_pages,
        })
    }

    /// Geometry of the requests' own cache, where that has pages.
    pub(crate) fn config(&self) -> Option<&KvConfig> {
        Some(self.kv.pages()?.store().config())
    }

    /// All attention resources, in the order of their indices.
    pub(crate) fn rooms(&self) -> impl Iterator<Item = &Room> {
        self.own.iter().chain(&self.cross)
    }
}

/// Why the kernels that a spec asks for do not run on a device; the CPU has a family of its own.
pub(crate) fn kernels_missing(family: KernelFamily, device: Device) -> Option<String> {
    let Device::Cuda(ordinal) = device else { return None };
    let driver = mstar_kernels::cuda::driver().ok()?;
    let card = driver.cards.get(ordinal as usize)?;
    missing_on(family, card.compute_capability)
}

fn missing_on(family: KernelFamily, (major, minor): (i32, i32)) -> Option<String> {
    let missing = family == KernelFamily::Wgmma && (major, minor) != (9, 0);
    missing.then(|| {
        format!("kernels: wgmma runs on sm_90 alone, and the device is sm_{major}{minor}; write auto or mma")
    })
}

/// The ring called `name`.
fn ring_of(rings: &[(ResourceName, Arc<RingCache>)], name: Option<&ResourceName>) -> Option<Arc<RingCache>> {
    rings.iter().find(|(other, _)| Some(other) == name).map(|(_, ring)| ring.clone())
}

/// Notes that `part` of the model lives in `cache`, which everybody of that part must agree on.
fn claim(
    part: &mut Option<ResourceName>,
    cache: Option<&ResourceName>,
    attention: &ResourceName,
) -> anyhow::Result<()> {
    let Some(cache) = cache else {
        bail!("resources.{attention}: kv_cache is missing; run needs pages to attend")
    };
    match part {
        Some(other) if other != cache => {
            bail!(
                "resources.{attention}: attends {cache}, others of its kind attend {other}; run drives one of each"
            )
        }
        _ => *part = Some(cache.clone()),
    }
    Ok(())
}

/// Puts the first attention over the requests' own cache under the indexer `sparse`: it runs the plans that need no
/// pick, in the same room. Without one the indexer has a room of its own.
fn under(
    own: &mut Vec<Room>,
    others: usize,
    name: ResourceName,
    sparse: Arc<dyn SparseAttention>,
    shape: Shape,
) {
    let backend = "dsa".to_owned();
    match own.first_mut() {
        Some(room) => {
            if let Attends::Dense(attention) = &room.attends {
                room.attends = Attends::Sparse { sparse, dense: Some(attention.clone()) };
                (room.name, room.backend) = (name, backend);
            }
        }
        None => own.push(Room {
            name,
            attends: Attends::Sparse { sparse, dense: None },
            shape,
            index: others,
            backend,
        }),
    }
}

/// The mathematics of a geometry, for the oracle.
fn shape(geometry: &AttnGeometry, causal: bool) -> anyhow::Result<Shape> {
    let Some(entries) = Entries::of(geometry.layout) else {
        bail!("a cache of layout {:?} cannot be run", geometry.layout);
    };
    let softmax = &geometry.softmax;
    Ok(Shape {
        num_qo_heads: geometry.num_qo_heads,
        entries,
        fp8: geometry.kv_dtype == DType::E4m3,
        sm_scale: f64::from(softmax.sm_scale),
        causal,
        window_left: softmax.window_left.map_or(-1, |window| window as i64),
        logits_soft_cap: softmax.logits_soft_cap.map_or(0.0, f64::from),
        sinks: softmax.sinks.as_ref().map(|sinks| sinks.to_vec()),
        alibi_slopes: softmax.alibi_slopes.as_ref().map(|slopes| slopes.to_vec()),
        frames: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_that_is_not_there_is_refused_where_it_would_run() {
        for card in [(8, 0), (8, 9), (10, 0)] {
            let said = missing_on(KernelFamily::Wgmma, card).unwrap();
            assert!(said.contains("kernels") && said.contains("wgmma") && said.contains("auto"), "{said}");
            assert_eq!(missing_on(KernelFamily::Mma, card), None);
            assert_eq!(missing_on(KernelFamily::Auto, card), None);
        }
        assert_eq!(missing_on(KernelFamily::Wgmma, (9, 0)), None);
        assert_eq!(kernels_missing(KernelFamily::Wgmma, Device::Cpu), None);
    }
}
