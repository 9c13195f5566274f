//! Everything that can be known of a run before it starts: the checked spec, the device, who serves each attention resource,
//! the requests, and what memory it will take. `mstar explain` prints it; `mstar run` begins with it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use mstar_core::ResourceName;
use mstar_core::attend::{
    AttnBackend, AttnGeometry, BackendOptions, IndexGeometry, IndexStore, Rank, Reason, SparseFactory,
    resolve_attn_backend,
};
use mstar_core::kv::{KvConfig, KvLayout, RingConfig};
use mstar_core::spec::{AttentionSpec, DeviceChoice, DsaSpec, Fallback, Faults, Node, ResourceKind, Spec};
use mstar_kernels::Device;

use super::fit;
use super::memory::{Available, Estimate, Place};
use crate::backends::{Chosen, auto, choose, device_memory, registry, softmax};
use crate::machine::Machine;
use crate::run::kernels_missing;
use crate::run::workload::trace::Located;
use crate::run::workload::{self, RequestPlan};
use crate::text::bytes;

/// Arguments of every subcommand that takes a spec.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SpecArguments {
    /// The spec, a YAML file.
    pub(crate) spec: PathBuf,
    /// Replace one value of the spec, such as `workload.requests=20`; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Run here instead of where the spec says: auto, cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
}

/// A spec, ready to run unless [`Prepared::refuse`] says why not.
pub(crate) struct Prepared {
    /// The checked spec.
    pub(crate) spec: Spec,
    /// Its file, as it was named.
    pub(crate) path: PathBuf,
    /// What was set of it on the command line.
    pub(crate) sets: Vec<String>,
    /// Where it runs.
    pub(crate) device: Device,
    /// The line that says why that device, when it was not named.
    pub(crate) note: Option<String>,
    /// The attention resources, in dependency order.
    pub(crate) attentions: Vec<Served>,
    /// The trace that they are read from.
    pub(crate) trace: Option<Located>,
    /// The resources of kind `dsa`, in dependency order.
    pub(crate) sparse: Vec<ServedSparse>,
    /// The workload's requests, in order of arrival; empty without a workload.
    pub(crate) requests: Vec<RequestPlan>,
    /// Memory by line.
    pub(crate) estimate: Estimate,
    /// The machine.
    pub(crate) machine: Machine,
    /// What memory there is now.
    pub(crate) available: Available,
}

/// An attention resource and the backend that serves it.
pub(crate) struct Served {
    /// The resource.
    pub(crate) name: ResourceName,
    /// The backend's name.
    pub(crate) backend: &'static str,
    /// Whether the spec named it, rather than `auto`.
    pub(crate) named: bool,
    /// What it attends.
    pub(crate) geometry: AttnGeometry,
    /// How well it serves that here, or why not.
    pub(crate) support: Result<Rank, Reason>,
    /// Its options, checked.
    pub(crate) options: Box<dyn BackendOptions>,
}

/// A resource of kind `dsa`, and who serves it.
pub(crate) struct ServedSparse {
    /// The resource.
    pub(crate) name: ResourceName,
    /// The cache whose latents it attends.
    pub(crate) kv_cache: ResourceName,
    /// What it attends.
    pub(crate) geometry: AttnGeometry,
    /// Its indexer.
    pub(crate) index: IndexGeometry,
    /// Who builds it; `None` in a program without sparse attention.
    pub(crate) factory: Option<Arc<dyn SparseFactory>>,
    /// How well that serves it here, or why not.
    pub(crate) support: Result<Rank, Reason>,
}

/// Reads and settles a spec. Nothing is allocated for it yet.
///
/// # Errors
/// A spec that is refused, a device that is not here, a backend that is not compiled in, a trace that cannot be read.
pub(crate) fn prepare(arguments: &SpecArguments) -> anyhow::Result<Prepared> {
    let spec = Spec::load(&arguments.spec, &arguments.set)?;
    let choice = match arguments.device.as_deref().map(DeviceChoice::parse) {
        None => spec.device,
        Some(Ok(choice)) => choice,
        Some(Err(why)) => bail!("--device: {why}"),
    };
    let source = arguments.spec.display().to_string();
    let chosen = match choice {
        DeviceChoice::Auto => auto(|device| served_whole(&spec, device, &source)),
        named => choose(named)?,
    };
    settle(arguments, spec, chosen)
}

/// Reads a spec and settles it for `device`, whatever it says of devices.
///
/// # Errors
/// As [`prepare`].
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a build without devices has one"))]
pub(crate) fn prepare_on(arguments: &SpecArguments, device: Device) -> anyhow::Result<Prepared> {
    let spec = Spec::load(&arguments.spec, &arguments.set)?;
    settle(arguments, spec, Chosen { device, note: None })
}

fn settle(arguments: &SpecArguments, spec: Spec, chosen: Chosen) -> anyhow::Result<Prepared> {
    let source = arguments.spec.display().to_string();
    let attentions = serve(&spec, chosen.device, &source)?;
    let sparse = serve_sparse(&spec, chosen.device)?;
    let (trace, requests) = match &spec.workload {
        None => (None, Vec::new()),
        Some(workload) => {
            let loaded = workload::locate(workload, &arguments.spec).and_then(|trace| {
                let mut requests = workload::load(workload, spec.seed, trace.as_ref())?;
                let frame = spec.rings().next().map(|(_, ring)| ring.config.tokens_per_frame);
                requests.iter_mut().for_each(|plan| plan.frame = frame);
                Ok((trace, requests))
            });
            loaded.with_context(|| format!("{source}: workload"))?
        }
    };
    let machine = Machine::probe();
    let available = Available { host: machine.memory_available, device: device_memory(chosen.device)? };
    let estimate = Estimate::of(&spec, &attentions, &sparse, &requests, chosen.device)
        .with_context(|| source.clone())?;
    Ok(Prepared {
        spec,
        path: arguments.spec.clone(),
        sets: arguments.set.clone(),
        device: chosen.device,
        note: chosen.note,
        attentions,
        trace,
        sparse,
        requests,
        estimate,
        machine,
        available,
    })
}

/// Whether `device` serves every resource of `spec`, by more than the slow reference unless the spec allows that.
fn served_whole(spec: &Spec, device: Device, source: &str) -> Result<(), String> {
    if let Some(why) = kernels_missing(spec.kernels, device) {
        return Err(why);
    }
    let attentions = serve(spec, device, source).map_err(|why| format!("{why:#}"))?;
    let sparse = serve_sparse(spec, device).map_err(|why| format!("{why:#}"))?;
    let dense = attentions.iter().map(|served| (&served.name, &served.support));
    let mut all = dense.chain(sparse.iter().map(|served| (&served.name, &served.support)));
    all.try_for_each(|(name, support)| match support {
        Err(reason) => Err(format!("{name}: {reason}")),
        Ok(Rank::REFERENCE) if spec.fallback == Fallback::Refuse => {
            Err(format!("{name}: only the slow reference serves it there"))
        }
        Ok(_) => Ok(()),
    })
}

/// Finds the backend of each attention resource and reads its options. That a backend does not serve its geometry is kept,
/// not refused: `explain` says it.
fn serve(spec: &Spec, device: Device, source: &str) -> anyhow::Result<Vec<Served>> {
    let backends = registry();
    let faults = Faults::new();
    let mut served = Vec::new();
    let heads = spec.model.rank_heads(spec.world_size).map_err(anyhow::Error::msg)?;
    for (name, attention) in spec.attentions() {
        let geometry = match attention.kv_cache.as_ref().and_then(|cache| spec.resource(cache)) {
            Some(cache) => match &cache.kind {
                ResourceKind::Kv(kv) => geometry(spec, &kv.config, heads.num_qo_heads),
                ResourceKind::Ring(ring) => geometry(spec, &as_pages(&ring.config), heads.num_qo_heads),
                _ => geometry(spec, &without_pages(spec), heads.num_qo_heads),
            },
            None => geometry(spec, &without_pages(spec), heads.num_qo_heads),
        };
        let asked = AttnBackend::parse(&attention.backend);
        let factory = match resolve_attn_backend(&asked, device, &geometry, &backends) {
            Ok(factory) => factory,
            Err(why) => {
                let at = attention.node.get("backend").unwrap_or(&attention.node);
                faults.push(at.error(why.to_string()));
                continue;
            }
        };
        let Some(options) = factory.parse(&attention.options, &faults) else { continue };
        served.push(Served {
            name: name.clone(),
            backend: factory.name(),
            named: asked != AttnBackend::Auto,
            support: factory.supports(device, &geometry),
            geometry,
            options,
        });
    }
    faults.settle(source)?;
    Ok(served)
}

/// Finds who builds the resources of kind `dsa`.
fn serve_sparse(spec: &Spec, device: Device) -> anyhow::Result<Vec<ServedSparse>> {
    let backends = registry();
    let heads = spec.model.rank_heads(spec.world_size).map_err(anyhow::Error::msg)?;
    let dsa = spec.resources.iter().filter_map(|resource| match &resource.kind {
        ResourceKind::Dsa(dsa) => Some((&resource.name, dsa)),
        _ => None,
    });
    let serve = |(name, dsa): (&ResourceName, &DsaSpec)| {
        let (_, kv) = spec
            .caches()
            .find(|(cache, _)| **cache == dsa.kv_cache)
            .with_context(|| format!("resources.{name}: {} is no cache", dsa.kv_cache))?;
        let geometry = geometry(spec, &kv.config, heads.num_qo_heads);
        let factory = backends.sparse().cloned();
        let support = match &factory {
            Some(factory) => factory.supports(device, &geometry, &dsa.index),
            None => Err("sparse attention is not compiled in; build with --features dsa".into()),
        };
        let (name, kv_cache, index) = (name.clone(), dsa.kv_cache.clone(), dsa.index.clone());
        Ok(ServedSparse { name, kv_cache, geometry, index, factory, support })
    };
    dsa.map(serve).collect()
}

fn geometry(spec: &Spec, kv: &KvConfig, num_qo_heads: usize) -> AttnGeometry {
    AttnGeometry::over(kv, num_qo_heads, spec.dtype, softmax(spec, num_qo_heads))
}

/// Whether the resource's own options leave it causal, as it is unless said; they were checked by its backend.
pub(crate) fn causal(attention: &AttentionSpec) -> bool {
    attention.options.get("causal").and_then(|node| node.scalar()).is_none_or(|scalar| scalar.text != "false")
}

fn latents(kv: &KvConfig) -> bool {
    matches!(kv.layout, KvLayout::Mla { .. })
}

/// Whether the options of attention over a ring hide later keys of a frame: none sees later frames.
pub(crate) fn causal_in_frames(attention: &AttentionSpec) -> bool {
    words(&attention.options, "mask_mod").any(|word| matches!(word, "causal" | "window"))
        || words(&attention.options, "score_mod").any(|word| word == "causal")
}

/// The word under a key, or those of its list.
pub(crate) fn words<'a>(options: &'a Node, key: &str) -> impl Iterator<Item = &'a str> {
    let node = options.get(key);
    let items = node.map(|node| node.items().unwrap_or(std::slice::from_ref(node))).unwrap_or_default();
    items.iter().filter_map(|item| item.scalar()).map(|scalar| scalar.text.as_str())
}

/// What an attention resource over a ring is asked about.
fn as_pages(ring: &RingConfig) -> KvConfig {
    let layout = KvLayout::Nhd { num_kv_heads: ring.num_kv_heads, head_dim: ring.head_dim };
    KvConfig { num_layers: ring.layers.len(), ..KvConfig::new(layout, ring.dtype, 1, 1) }
}

/// What an attention resource without a cache (keys of its own) is asked about.
fn without_pages(spec: &Spec) -> KvConfig {
    let model = &spec.model;
    let layout = match (model.head_dim, model.num_kv_heads, model.kv_lora_rank) {
        (Some(head_dim), Some(num_kv_heads), _) => KvLayout::Nhd { num_kv_heads, head_dim },
        (_, _, rank) => {
            KvLayout::Mla { kv_lora_rank: rank.unwrap_or(0), qk_rope_head_dim: model.qk_rope_head_dim }
        }
    };
    KvConfig { num_layers: model.layers, ..KvConfig::new(layout, spec.dtype, 1, 1) }
}

impl Prepared {
    /// What keeps this spec from running here, in words; empty when nothing does.
    pub(crate) fn refusals(&self) -> Vec<String> {
        let mut why = Vec::from_iter(kernels_missing(self.spec.kernels, self.device));
        for served in &self.attentions {
            match served.support {
                Err(ref reason) => {
                    why.push(format!("{}: backend {}: {reason}", served.name, served.backend));
                }
                Ok(Rank::REFERENCE) if self.spec.fallback == Fallback::Refuse => why.push(format!(
                    "{}: backend {} has only the slow reference for this; allow it with fallback: reference",
                    served.name, served.backend
                )),
                Ok(_) => {}
            }
        }
        for served in &self.sparse {
            match served.support {
                Err(ref reason) => why.push(format!("{}: {reason}", served.name)),
                Ok(Rank::REFERENCE) if self.spec.fallback == Fallback::Refuse => why.push(format!(
                    "{}: only the slow reference serves this; allow it with fallback: reference",
                    served.name
                )),
                Ok(_) => {}
            }
        }
        why.extend(self.undriven());
        if self.spec.workload.is_none() {
            why.push("the spec has no workload".into());
        }
        if let Some((place, most, free)) = self.estimate.too_much(&self.available) {
            let what = match (place, self.available.device) {
                (Place::Device, Some((_, total))) => format!(
                    "it may take {} of {}'s memory and {} of {} are free",
                    bytes(most),
                    self.device,
                    bytes(free.into()),
                    bytes(total.into())
                ),
                _ => {
                    format!("it may take {} of memory and {} are available", bytes(most), bytes(free.into()))
                }
            };
            why.push(format!("{what}; {}", fit::advice(self, &self.available)));
        }
        why
    }

    /// What the program's own part of a run does not do.
    fn undriven(&self) -> Vec<String> {
        let mut why = self.misfits_of_rings();
        if let [_, second, ..] = self.sparse.as_slice() {
            why.push(format!("{}: a run drives one resource of kind dsa; remove the others", second.name));
        }
        for served in &self.sparse {
            why.extend(self.misfits(served));
        }
        if self.sparse.is_empty() && !self.spec.caches().any(|(_, kv)| latents(&kv.config)) {
            return why;
        }
        if self.spec.synthetic().is_some_and(|synthetic| synthetic.tree.is_some()) {
            why.push("workload.tree: drafts need masks, and attention over latents takes none".into());
        }
        if self.spec.attentions().any(|(_, attention)| attention.query_from.is_some()) {
            why.push("cross-attention beside a cache of latents is not driven in this version".into());
        }
        why
    }

    /// What a ring does not go together with, and what attends it.
    fn misfits_of_rings(&self) -> Vec<String> {
        let mut why = Vec::new();
        let rings: Vec<_> = self.spec.rings().collect();
        for (name, attention) in self.spec.attentions() {
            let over = attention.kv_cache.as_ref();
            let ring = rings.iter().find(|(ring, _)| Some(*ring) == over);
            let Some(served) = self.attentions.iter().find(|served| served.name == *name) else { continue };
            match (ring, served.backend == "flex") {
                (Some((ring, _)), false) => why.push(format!(
                    "{name}: backend {} attends pages, and {ring} is a ring; say backend: flex",
                    served.backend
                )),
                (None, true) => {
                    why.push(format!("{name}: backend flex attends a ring; name one in kv_cache"))
                }
                _ => {}
            }
        }
        let [(name, ring), rest @ ..] = rings.as_slice() else { return why };
        if let Some((other, _)) = rest.first() {
            why.push(format!("{other}: a run drives one ring, {name}; remove the others"));
        }
        if let Some((cache, _)) = self.spec.caches().next() {
            why.push(format!("{cache}: a run drives a ring, {name}, or pages, not both; remove one"));
        }
        why.extend(self.workload_misfits(name, ring.config.tokens_per_frame));
        why
    }

    /// What of the workload is no pass over whole frames of `frame` tokens.
    fn workload_misfits(&self, ring: &ResourceName, frame: usize) -> Vec<String> {
        let mut why = Vec::new();
        let Some(synthetic) = self.spec.synthetic() else {
            if self.spec.workload.is_some() {
                why.push(format!("workload: a trace has no frames for {ring}; use kind synthetic"));
            }
            return why;
        };
        if synthetic.forks.is_some() {
            why.push(format!("workload.forks: a world of {ring} has no streams; remove it"));
        }
        if synthetic.tree.is_some() {
            why.push(format!("workload.tree: {ring} is passed in whole frames; remove it"));
        }
        match &synthetic.denoise {
            None if synthetic.tree.is_none() => why.push(format!(
                "workload.denoise is missing: {ring} is passed in whole frames; write denoise: {{ steps: 4, tokens: \
                 {frame} }}"
            )),
            Some(denoise) if denoise.tokens != frame => why.push(format!(
                "workload.denoise.tokens: {} tokens, and a frame of {ring} has {frame}; write {frame}",
                denoise.tokens
            )),
            _ => {}
        }
        let ragged = self.requests.iter().find(|plan| !plan.prompt_len().is_multiple_of(frame));
        if let Some(plan) = ragged {
            let len = plan.prompt_len();
            why.push(format!(
                "workload.prompt_len: request {} begins with {len} tokens, and {ring} takes whole frames of {frame}; \
                 write a multiple of {frame}",
                plan.id
            ));
        }
        why
    }

    /// What an indexer does not go together with.
    fn misfits(&self, served: &ServedSparse) -> Vec<String> {
        let (name, mut why) = (&served.name, Vec::new());
        let own = self.spec.attentions().filter(|(_, attention)| {
            attention.kv_cache.as_ref() == Some(&served.kv_cache) && attention.query_from.is_none()
        });
        for (attention, _) in own.filter(|(_, attention)| !causal(attention)) {
            why.push(format!("{attention}: causal: false, and {name} picks among earlier keys alone"));
        }
        if served.index.store == IndexStore::Buffers {
            if self.spec.synthetic().is_some_and(|synthetic| synthetic.forks.is_some()) {
                why.push(format!("{name}: index_store: buffers knows no forks; say index_store: pages"));
            }
            if self.spec.caches().any(|(cache, kv)| *cache == served.kv_cache && kv.config.prefix_cache) {
                why.push(format!(
                    "{name}: index_store: buffers knows no prefix hits; say index_store: pages"
                ));
            }
        }
        why
    }

    /// Refuses a spec that could not be finished.
    ///
    /// # Errors
    /// The first reason, and that `explain` says more.
    pub(crate) fn refuse(&self) -> anyhow::Result<()> {
        match self.refusals().as_slice() {
            [] => Ok(()),
            [first, ..] => {
                bail!("{}: {first} (mstar explain says more)", self.path.display())
            }
        }
    }
}
