//! A whole spec, checked once: what everything after the loader takes, and never checks again.

use mstar_kernels::{DType, Device};

use super::model::ModelSpec;
use super::node::clip;
use super::resources::{self, FLOATS, ResourceKind, ResourceSpec, Surroundings};
use super::workload::{WorkloadKind, WorkloadSpec};
use super::{Faults, Fields, Node, SpecErrors, keys};
use crate::resource::dependency_order;
use crate::{Error, ResourceName};

/// A spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// `name`: what reports call it.
    pub name: String,
    /// `device`.
    pub device: DeviceChoice,
    /// `dtype`: element type of queries, keys, values and outputs.
    pub dtype: DType,
    /// `seed`: of everything that is drawn.
    pub seed: u64,
    /// `schedule`.
    pub schedule: Schedule,
    /// `fallback`.
    pub fallback: Fallback,
    /// `kernels`.
    pub kernels: KernelFamily,
    /// `world_size`: ranks that the model is sharded over; this process is one of them.
    pub world_size: usize,
    /// `model`.
    pub model: ModelSpec,
    /// `resources`, dependencies first.
    pub resources: Vec<ResourceSpec>,
    /// `graph`.
    pub graph: Option<GraphSpec>,
    /// `workload`.
    pub workload: Option<WorkloadSpec>,
}

/// `device`: where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A CUDA device when there is one that can run the spec, else the CPU; which one is said.
    Auto,
    /// This one, or nothing.
    Named(Device),
}

impl DeviceChoice {
    /// Reads `auto`, `cpu`, `cuda` or `cuda:N`.
    ///
    /// # Errors
    /// What was expected, and what came.
    pub fn parse(text: &str) -> Result<DeviceChoice, String> {
        let index = |digits: &str| -> Option<u32> {
            let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse().ok()).flatten().filter(|&n: &u32| n < 1024)
        };
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Named(Device::Cpu)),
            "cuda" => Ok(DeviceChoice::Named(Device::Cuda(0))),
            _ => match text.strip_prefix("cuda:").and_then(index) {
                Some(ordinal) => Ok(DeviceChoice::Named(Device::Cuda(ordinal))),
                None => {
                    Err(format!("expected auto, cpu, cuda or cuda:N with N below 1024, got {}", clip(text)))
                }
            },
        }
    }
}

/// `schedule`: what the scheduler may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// A row's bits never depend on its neighbours.
    Invariant,
    /// Bits may depend on the batch, where that is faster.
    Throughput,
}

/// `fallback`: what becomes of a shape that no kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// It is refused.
    Refuse,
    /// The slow reference serves it, and the report says so.
    Reference,
}

/// `kernels`: which CUDA family runs.
pub use mstar_kernels::Kernels as KernelFamily;

/// `graph`: the fixed shapes that decode steps are padded to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphSpec {
    /// `buckets`: rows, rising.
    pub buckets: Vec<usize>,
    /// `slots`: buffer sets of each bucket.
    pub slots: usize,
}

impl Spec {
    /// Checks a tree. `source` names it in messages.
    ///
    /// # Errors
    /// Every fault found, each with its place.
    pub fn from_node(root: &Node, source: &str) -> Result<Spec, SpecErrors> {
        let faults = Faults::new();
        let spec = read(root, &faults);
        faults.settle(source)?;
        spec.ok_or_else(|| SpecErrors::whole(source, "the spec could not be read"))
    }

    /// The resource called `name`.
    pub fn resource(&self, name: &ResourceName) -> Option<&ResourceSpec> {
        self.resources.iter().find(|resource| resource.name == *name)
    }

    /// Reads, overrides and checks the spec in `file`; each of `sets` is a `key=value`.
    ///
    /// # Errors
    /// A file that cannot be read, and every fault found in it.
    #[cfg(feature = "yaml")]
    pub fn load(file: &std::path::Path, sets: &[String]) -> Result<Spec, SpecErrors> {
        let source = file.display().to_string();
        let bytes = read_bounded(file).map_err(|why| SpecErrors::whole(&source, why))?;
        Spec::from_yaml(&bytes, sets, &source)
    }

    /// As [`Spec::load`], from bytes.
    ///
    /// # Errors
    /// Every fault found.
    #[cfg(feature = "yaml")]
    pub fn from_yaml(bytes: &[u8], sets: &[String], source: &str) -> Result<Spec, SpecErrors> {
        let faults = Faults::new();
        let mut spec = None;
        match super::yaml::read(bytes, &faults) {
            Err(error) => faults.push(error),
            Ok(mut root) => {
                for assignment in sets {
                    if let Err(error) = super::overrides::set(&mut root, assignment) {
                        faults.push(error);
                    }
                }
                spec = read(&root, &faults);
            }
        }
        faults.settle(source)?;
        spec.ok_or_else(|| SpecErrors::whole(source, "the spec could not be read"))
    }
}

/// The bytes of a file, of which no more than a spec may have are ever read.
#[cfg(feature = "yaml")]
fn read_bounded(file: &std::path::Path) -> Result<Vec<u8>, String> {
    use std::io::{ErrorKind, Read};
    let opened = std::fs::File::open(file).map_err(|error| match error.kind() {
        ErrorKind::NotFound => "no such file; specs/quickstart.yaml is one to begin with".to_string(),
        _ => format!("cannot be opened: {error}"),
    })?;
    match opened.metadata() {
        Ok(meta) if meta.is_dir() => return Err("a directory, not a spec; name one file".into()),
        Ok(_) => {}
        Err(error) => return Err(format!("cannot be read: {error}")),
    }
    let mut bytes = Vec::new();
    let most = super::yaml::MAX_BYTES as u64 + 1;
    opened.take(most).read_to_end(&mut bytes).map_err(|error| format!("cannot be read: {error}"))?;
    Ok(bytes)
}

fn read(root: &Node, faults: &Faults) -> Option<Spec> {
    let mut f = Fields::open(root, &keys::SPEC, faults);
    let name = f.text_opt("name").unwrap_or("unnamed").to_string();
    let device = match f.text_opt("device").map(DeviceChoice::parse) {
        Some(Err(why)) => {
            f.fault_at("device", why);
            None
        }
        Some(Ok(choice)) => Some(choice),
        None => Some(DeviceChoice::Auto),
    };
    let dtype = f.word_or("dtype", DType::F32, FLOATS);
    let seed = f.count_or("seed", 0, 0..=u64::MAX) as u64;
    let schedules = [("invariant", Schedule::Invariant), ("throughput", Schedule::Throughput)];
    let schedule = f.word_or("schedule", Schedule::Invariant, &schedules);
    let fallbacks = [("refuse", Fallback::Refuse), ("reference", Fallback::Reference)];
    let fallback = f.word_or("fallback", Fallback::Refuse, &fallbacks);
    let families = [("auto", KernelFamily::Auto), ("mma", KernelFamily::Mma), ("wgmma", KernelFamily::Wgmma)];
    let kernels = f.word_or("kernels", KernelFamily::Auto, &families);
    let world_size = f.count_or("world_size", 1, 1..=4096);
    let model = match f.required("model") {
        Some(node) => ModelSpec::read(Fields::open(node, &keys::MODEL, faults)),
        None => None,
    };
    if let Some(Err(why)) = model.as_ref().map(|model| model.rank_heads(world_size)) {
        f.fault_at("world_size", why);
    }
    let around = Surroundings { dtype, model: model.as_ref(), world_size };
    let resources = f.required("resources").and_then(|node| read_resources(node, around, faults));
    let graph = f.section("graph", &keys::GRAPH).and_then(read_graph);
    let workload = f.value("workload").and_then(|node| WorkloadSpec::read(node, faults));
    f.finish("here");
    let spec = Spec {
        name,
        device: device?,
        dtype,
        seed,
        schedule,
        fallback,
        kernels,
        world_size,
        model: model?,
        resources: resources?,
        graph,
        workload,
    };
    if faults.is_empty() {
        super::cross::check(&spec, root, faults);
    }
    Some(spec)
}

fn read_resources(node: &Node, around: Surroundings<'_>, faults: &Faults) -> Option<Vec<ResourceSpec>> {
    let entries = match node.entries() {
        Some(entries) if (1..=64).contains(&entries.len()) => entries,
        Some(entries) => {
            faults.push(node.error(format!("expected 1 to 64 resources, got {}", entries.len())));
            return None;
        }
        None => {
            faults.push(node.error(format!("expected a map of names to resources, got {}", node.describe())));
            return None;
        }
    };
    let names: Vec<&str> = entries.iter().map(|entry| entry.key.as_str()).collect();
    let read: Vec<Option<ResourceSpec>> = entries
        .iter()
        .map(|entry| {
            let plain = entry.key.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
            if !plain {
                let why = "a resource's name is made of letters, digits, _ and -".to_string();
                faults.push(super::fields::at_key(node, entry, why));
            }
            resources::read(&entry.key, &entry.value, &names, around, faults)
        })
        .collect();
    let mut read: Vec<ResourceSpec> = read.into_iter().collect::<Option<_>>()?;
    add_index_planes(&mut read);
    let declared: Vec<(ResourceName, Vec<ResourceName>)> =
        read.iter().map(|resource| (resource.name.clone(), resource.depends_on.clone())).collect();
    match dependency_order(&declared) {
        Ok(order) => Some(order.into_iter().map(|index| read[index].clone()).collect()),
        Err(Error::DependencyCycle { path }) => {
            let walk: Vec<&str> = path.iter().map(ResourceName::as_str).collect();
            let first = entries.iter().find(|entry| Some(&entry.key.as_str()) == walk.first());
            let why = format!("{} depend on one another; remove one of them", walk.join(" -> "));
            faults.push(first.map_or(node, |entry| &entry.value).error(why));
            None
        }
        Err(other) => {
            faults.push(node.error(other.to_string()));
            None
        }
    }
}

/// Gives each latent cache the planes that hold the index keys of the `dsa` resources over it.
fn add_index_planes(resources: &mut [ResourceSpec]) {
    let planes: Vec<_> = resources
        .iter()
        .filter_map(|resource| match &resource.kind {
            ResourceKind::Dsa(dsa) => Some((dsa.kv_cache.clone(), dsa.index.plane(&resource.name)?)),
            _ => None,
        })
        .collect();
    for resource in resources {
        if let ResourceKind::Kv(kv) = &mut resource.kind {
            let own = planes.iter().filter(|(cache, _)| *cache == resource.name);
            kv.config.planes.extend(own.map(|(_, plane)| plane.clone()));
        }
    }
}

fn read_graph(mut f: Fields<'_>) -> Option<GraphSpec> {
    f.required("buckets")?;
    let buckets = f.counts_opt("buckets", 1..=65_536, 64);
    let slots = f.count_or("slots", 2, 1..=8);
    if buckets.as_ref().is_some_and(|b| b.windows(2).any(|pair| pair[0] >= pair[1])) {
        f.fault_at("buckets", "expected rows in rising order, none twice");
    }
    f.finish("here");
    Some(GraphSpec { buckets: buckets?, slots })
}

impl Spec {
    /// The caches, in order.
    pub fn caches(&self) -> impl Iterator<Item = (&ResourceName, &resources::KvSpec)> {
        self.resources.iter().filter_map(|resource| match &resource.kind {
            ResourceKind::Kv(kv) => Some((&resource.name, kv)),
            _ => None,
        })
    }

    /// The rings, in order.
    pub fn rings(&self) -> impl Iterator<Item = (&ResourceName, &super::RingSpec)> {
        self.resources.iter().filter_map(|resource| match &resource.kind {
            ResourceKind::Ring(ring) => Some((&resource.name, ring)),
            _ => None,
        })
    }

    /// The attention resources, in order.
    pub fn attentions(&self) -> impl Iterator<Item = (&ResourceName, &resources::AttentionSpec)> {
        self.resources.iter().filter_map(|resource| match &resource.kind {
            ResourceKind::Attention(attention) => Some((&resource.name, attention)),
            _ => None,
        })
    }

    /// Whether the workload is drawn, and from what.
    pub fn synthetic(&self) -> Option<&super::workload::SyntheticSpec> {
        match self.workload.as_ref().map(|workload| &workload.kind) {
            Some(WorkloadKind::Synthetic(synthetic)) => Some(synthetic),
            _ => None,
        }
    }
}
