//! Which backend serves an attention resource: what a backend must offer, and how one is chosen.
//!
//! No backend is named here. The program registers those that were compiled in ([`Backends::register`]) and the names
//! of those that were not ([`Backends::absent`]), so that a spec which asks for one is told which feature to enable.

use std::fmt;
use std::sync::Arc;

use mstar_kernels::{DType, Device, Stream};

use super::{Attention, SparseFactory};
use crate::kv::{KvConfig, KvLayout, PagedKv, RingKv};
use crate::spec::{Fallback, Faults, KernelFamily, Node, Schedule};
use crate::{ResourceName, Result};

/// A backend as a spec asks for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AttnBackend {
    /// The best for the device and the cache's layout.
    Auto,
    /// This one, or an error.
    Named(String),
}

impl AttnBackend {
    /// Reads `auto`, or a name.
    pub fn parse(text: &str) -> AttnBackend {
        if text == "auto" { AttnBackend::Auto } else { AttnBackend::Named(text.to_owned()) }
    }
}

impl fmt::Display for AttnBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttnBackend::Auto => f.write_str("auto"),
            AttnBackend::Named(name) => f.write_str(name),
        }
    }
}

/// How well a backend serves a geometry on a device: the largest wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

impl Rank {
    /// The plain reference serves it: right, and slow.
    pub const REFERENCE: Rank = Rank(10);
    /// It runs, on a path that is not tuned for this shape.
    pub const PORTABLE: Rank = Rank(50);
    /// A kernel made for it runs.
    pub const FAST: Rank = Rank(100);
}

/// Why a backend does not serve a geometry, and what would help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Reason(pub String);

impl From<String> for Reason {
    fn from(why: String) -> Reason {
        Reason(why)
    }
}

impl From<&str> for Reason {
    fn from(why: &str) -> Reason {
        Reason(why.to_owned())
    }
}

/// What becomes of a score before and inside the softmax. The same for every layer but the sinks.
#[derive(Clone, Debug, PartialEq)]
pub struct Softmax {
    /// Scores are multiplied by this.
    pub sm_scale: f32,
    /// Keys to the left of a query's own that it sees; `None` sees all.
    pub window_left: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`, before the mask.
    pub logits_soft_cap: Option<f32>,
    /// `[L, H]`: a learned logit per layer and query head that joins the denominator and no value.
    pub sinks: Option<Arc<[f32]>>,
    /// `[H]`: `slope * (key position - query position)` is added to each score, after the cap.
    pub alibi_slopes: Option<Arc<[f32]>>,
}

impl Softmax {
    /// Scaled, and nothing else.
    pub fn scaled(sm_scale: f32) -> Softmax {
        Softmax { sm_scale, window_left: None, logits_soft_cap: None, sinks: None, alibi_slopes: None }
    }
}

/// One rank's attention, as a backend is asked about it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttnGeometry {
    /// `H` on this rank.
    pub num_qo_heads: usize,
    /// How the cache's tokens lie, with their widths.
    pub layout: KvLayout,
    /// `S`.
    pub page_size: usize,
    /// Element type of queries and outputs.
    pub dtype: DType,
    /// Element type of the cache.
    pub kv_dtype: DType,
    /// `L`.
    pub num_layers: usize,
    /// Scores and softmax.
    pub softmax: Softmax,
}

impl AttnGeometry {
    /// `num_qo_heads` heads of `dtype` over the cache `kv`.
    pub fn over(kv: &KvConfig, num_qo_heads: usize, dtype: DType, softmax: Softmax) -> AttnGeometry {
        AttnGeometry {
            num_qo_heads,
            layout: kv.layout,
            page_size: kv.page_size,
            dtype,
            kv_dtype: kv.dtype,
            num_layers: kv.num_layers,
            softmax,
        }
    }
}

/// The largest step that will be declared, by which a backend sizes its memory once instead of letting it grow. What
/// pads a step to a bucket is not counted: [`Resource::build_accelerator_graph_buffers`](crate::Resource) tells of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Rows of one plan.
    pub rows: usize,
    /// Query tokens of one plan.
    pub tokens: usize,
    /// Keys that one row attends at most.
    pub kv_len: usize,
}

/// What a backend is built into.
#[derive(Clone)]
pub struct BuildContext {
    /// The resource's name.
    pub name: ResourceName,
    /// What it attends.
    pub geometry: AttnGeometry,
    /// The queue that its layers run on, and so its device. It lives as long as the resource.
    pub stream: Stream,
    /// The cache it attends.
    pub kv_cache: Option<Arc<dyn PagedKv>>,
    /// The ring it attends, where the spec's `kv_cache` names one.
    pub ring: Option<Arc<dyn RingKv>>,
    /// The cache whose plan packs its queries; `None` where the step does, or its own cache's plan.
    pub query_from: Option<Arc<dyn PagedKv>>,
    /// Buffer sets of the engine.
    pub slots: usize,
    /// The largest step, where it is known; memory grows by need otherwise.
    pub largest: Option<StepShape>,
    /// What the scheduler may change.
    pub schedule: Schedule,
    /// Which kernels run on a device.
    pub kernels: KernelFamily,
    /// What becomes of a shape that no kernel takes.
    pub fallback: Fallback,
}

/// Options of one backend, read and checked: nothing is left to refuse but what the device or the cache says.
pub trait BackendOptions: fmt::Debug + Send + Sync {
    /// The resource.
    ///
    /// # Errors
    /// A geometry or device that the backend does not serve, with the reason; memory that cannot be had.
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>>;

    /// Bytes that each plan label in each slot takes beside its workspace, in steps of up to `largest`.
    fn beside_workspaces(&self, geometry: &AttnGeometry, largest: StepShape) -> usize {
        let _ = (geometry, largest);
        0
    }
}

/// A backend that was compiled in.
pub trait BackendFactory: Send + Sync {
    /// Its name in specs.
    fn name(&self) -> &'static str;

    /// One line on what it is, for `mstar backends`.
    fn about(&self) -> &'static str;

    /// Names that other systems give it: a spec that uses one is told the right one.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether `auto` may choose it. A backend for special declarations is only ever named.
    fn auto(&self) -> bool {
        true
    }

    /// Reads its own options: the resource's map without the keys that every attention resource has. Unknown keys and
    /// impossible values go to `faults`, each with its place; what is returned then is of no use.
    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>>;

    /// How well it serves `geometry` on `device`.
    ///
    /// # Errors
    /// Why not, and what would help.
    fn supports(&self, device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason>;
}

/// A backend that was not compiled in.
#[derive(Clone, Copy, Debug)]
struct Absent {
    name: &'static str,
    feature: &'static str,
    aliases: &'static [&'static str],
}

/// The backends of this program.
#[derive(Clone, Default)]
pub struct Backends {
    present: Vec<Arc<dyn BackendFactory>>,
    absent: Vec<Absent>,
    sparse: Option<Arc<dyn SparseFactory>>,
    absent_sparse: Option<(&'static str, &'static str)>,
}

/// Why no backend could be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The name is that of another system.
    #[error("backend {asked} is called {name} here; write backend: {name}")]
    Alias {
        /// What was asked for.
        asked: String,
        /// Its name here.
        name: &'static str,
    },
    /// The backend exists and was not compiled in.
    #[error("backend {name} is not compiled in; build with --features {feature}")]
    NotCompiled {
        /// Its name.
        name: &'static str,
        /// The feature that brings it.
        feature: &'static str,
    },
    /// It is a kind of resource, not a backend of attention.
    #[error("{kind} is no attention backend but a resource of its own; write kind: {kind}")]
    Kind {
        /// What was asked for.
        kind: &'static str,
    },
    /// No resources of this kind can be built.
    #[error("this program builds no resources of kind dsa")]
    NoSparse,
    /// There is no such backend.
    #[error("no backend is called {asked}; there are: {}", known.join(", "))]
    Unknown {
        /// What was asked for.
        asked: String,
        /// Those there are.
        known: Vec<&'static str>,
    },
    /// `auto` found none that serves the geometry.
    #[error("no backend serves this on {device}: {}", listed(reasons))]
    NoneServes {
        /// The device.
        device: Device,
        /// Each backend's reason.
        reasons: Vec<(&'static str, Reason)>,
    },
}

fn listed(reasons: &[(&'static str, Reason)]) -> String {
    if reasons.is_empty() {
        return "none is compiled in".to_owned();
    }
    reasons.iter().map(|(name, why)| format!("{name}: {why}")).collect::<Vec<_>>().join("; ")
}

impl Backends {
    /// None yet.
    pub fn new() -> Backends {
        Backends::default()
    }

    /// Adds one that was compiled in.
    ///
    /// # Panics
    /// When its name is taken: two backends of one name are a bug of the program that registers them.
    pub fn register(&mut self, factory: Arc<dyn BackendFactory>) -> &mut Backends {
        assert!(self.get(factory.name()).is_none(), "two backends are called {}", factory.name());
        self.present.push(factory);
        self.present.sort_by_key(|factory| factory.name());
        self
    }

    /// Adds one that was not compiled in, under the feature that would bring it.
    pub fn absent(
        &mut self,
        name: &'static str,
        feature: &'static str,
        aliases: &'static [&'static str],
    ) -> &mut Backends {
        self.absent.push(Absent { name, feature, aliases });
        self
    }

    /// Adds the one that builds resources of kind `dsa`.
    pub fn register_sparse(&mut self, factory: Arc<dyn SparseFactory>) -> &mut Backends {
        self.sparse = Some(factory);
        self
    }

    /// Notes that the one that builds resources of kind `name` was not compiled in, and the feature that would bring it.
    pub fn absent_sparse(&mut self, name: &'static str, feature: &'static str) -> &mut Backends {
        self.absent_sparse = Some((name, feature));
        self
    }

    /// The one that builds resources of kind `dsa`, when it was compiled in.
    pub fn sparse(&self) -> Option<&Arc<dyn SparseFactory>> {
        self.sparse.as_ref()
    }

    /// The one that builds resources of kind `dsa`.
    ///
    /// # Errors
    /// [`ResolveError::NotCompiled`] with the feature that brings it; [`ResolveError::NoSparse`] where there is none.
    pub fn resolve_sparse(&self) -> Result<&Arc<dyn SparseFactory>, ResolveError> {
        let absent = || match self.absent_sparse {
            Some((name, feature)) => ResolveError::NotCompiled { name, feature },
            None => ResolveError::NoSparse,
        };
        self.sparse.as_ref().ok_or_else(absent)
    }

    /// Those that were compiled in, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn BackendFactory>> {
        self.present.iter()
    }

    /// Names and features of those that were not.
    pub fn not_compiled(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.absent.iter().map(|absent| (absent.name, absent.feature)).chain(self.absent_sparse)
    }

    /// The one called `name`.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn BackendFactory>> {
        self.present.iter().find(|factory| factory.name() == name)
    }

    fn named(&self, asked: &str) -> Result<&Arc<dyn BackendFactory>, ResolveError> {
        if let Some(factory) = self.get(asked) {
            return Ok(factory);
        }
        if let Some(absent) = self.absent.iter().find(|absent| absent.name == asked) {
            return Err(ResolveError::NotCompiled { name: absent.name, feature: absent.feature });
        }
        let sparse = self.sparse.iter().map(|factory| factory.name());
        if let Some(kind) = sparse.chain(self.absent_sparse.map(|(name, _)| name)).find(|&kind| kind == asked)
        {
            return Err(ResolveError::Kind { kind });
        }
        let present = self.present.iter().map(|factory| (factory.name(), factory.aliases()));
        let all = present.chain(self.absent.iter().map(|absent| (absent.name, absent.aliases)));
        for (name, aliases) in all {
            if aliases.contains(&asked) {
                return Err(ResolveError::Alias { asked: asked.to_owned(), name });
            }
        }
        let mut known: Vec<&'static str> = self.present.iter().map(|factory| factory.name()).collect();
        known.extend(self.absent.iter().map(|absent| absent.name));
        known.sort_unstable();
        Err(ResolveError::Unknown { asked: asked.to_owned(), known })
    }
}

impl fmt::Debug for Backends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backends")
            .field("present", &self.present.iter().map(|factory| factory.name()).collect::<Vec<_>>())
            .field("absent", &self.absent)
            .field("sparse", &self.sparse.as_ref().map(|factory| factory.name()))
            .field("absent_sparse", &self.absent_sparse)
            .finish()
    }
}

/// The concrete backend for `backend`. A named one is returned as it is, whatever it thinks of the geometry: it says so
/// itself when it is built. `auto` is the one that serves device and layout best, the first by name among equals.
///
/// # Errors
/// As [`ResolveError`] lists.
pub fn resolve_attn_backend<'a>(
    backend: &AttnBackend,
    device: Device,
    geometry: &AttnGeometry,
    backends: &'a Backends,
) -> Result<&'a Arc<dyn BackendFactory>, ResolveError> {
    if let AttnBackend::Named(name) = backend {
        return backends.named(name);
    }
    let mut best: Option<(Rank, &Arc<dyn BackendFactory>)> = None;
    let mut reasons = Vec::new();
    for factory in backends.iter().filter(|factory| factory.auto()) {
        match factory.supports(device, geometry) {
            Ok(rank) if best.is_none_or(|(most, _)| rank > most) => best = Some((rank, factory)),
            Ok(_) => {}
            Err(reason) => reasons.push((factory.name(), reason)),
        }
    }
    best.map(|(_, factory)| factory).ok_or(ResolveError::NoneServes { device, reasons })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake {
        name: &'static str,
        aliases: &'static [&'static str],
        auto: bool,
        nhd: Result<Rank, Reason>,
    }

    impl BackendFactory for Fake {
        fn name(&self) -> &'static str {
            self.name
        }

        fn about(&self) -> &'static str {
            "a fake"
        }

        fn aliases(&self) -> &'static [&'static str] {
            self.aliases
        }

        fn auto(&self) -> bool {
            self.auto
        }

        fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
            faults.push(options.error("a fake takes no options"));
            None
        }

        fn supports(&self, device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason> {
            match (device, geometry.layout) {
                (Device::Cpu, KvLayout::Nhd { .. }) => self.nhd.clone(),
                (Device::Cpu, _) => Err("reads keys and values, not latents".into()),
                (other, _) => Err(format!("no kernels for {other}").into()),
            }
        }
    }

    fn backends() -> Backends {
        let mut backends = Backends::new();
        for (name, aliases, auto, rank) in [
            ("plain", &[][..], true, Rank::REFERENCE),
            ("pages", &["flash"][..], true, Rank::FAST),
            ("named-only", &[][..], false, Rank(1000)),
            ("also-fast", &[][..], true, Rank::PORTABLE),
        ] {
            backends.register(Arc::new(Fake { name, aliases, auto, nhd: Ok(rank) }));
        }
        backends.absent("latents", "latents", &["flash_latents"]);
        backends
    }

    fn geometry(layout: KvLayout) -> AttnGeometry {
        AttnGeometry {
            num_qo_heads: 8,
            layout,
            page_size: 16,
            dtype: DType::F32,
            kv_dtype: DType::F32,
            num_layers: 1,
            softmax: Softmax::scaled(1.0),
        }
    }

    const NHD: KvLayout = KvLayout::Nhd { num_kv_heads: 2, head_dim: 64 };
    const MLA: KvLayout = KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 };

    fn resolve(name: &str, device: Device, layout: KvLayout) -> Result<&'static str, String> {
        let backends = backends();
        resolve_attn_backend(&AttnBackend::parse(name), device, &geometry(layout), &backends)
            .map(|factory| factory.name())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn auto_takes_the_best_rank_for_device_and_layout() {
        assert_eq!(resolve("auto", Device::Cpu, NHD).unwrap(), "pages");
        let none = resolve("auto", Device::Cpu, MLA).unwrap_err();
        assert!(
            none.contains("on cpu") && none.contains("pages: reads keys and values, not latents"),
            "{none}"
        );
        assert!(resolve("auto", Device::Cuda(0), NHD).unwrap_err().contains("no kernels for cuda:0"));
    }

    #[test]
    fn a_named_backend_is_returned_as_it_is() {
        assert_eq!(resolve("plain", Device::Cpu, NHD).unwrap(), "plain");
        assert_eq!(resolve("named-only", Device::Cuda(3), MLA).unwrap(), "named-only");
    }

    #[test]
    fn other_names_get_a_hint_and_missing_features_are_named() {
        let said = |name| resolve(name, Device::Cpu, NHD).unwrap_err();
        assert_eq!(said("flash"), "backend flash is called pages here; write backend: pages");
        assert_eq!(said("latents"), "backend latents is not compiled in; build with --features latents");
        assert_eq!(
            said("flash_latents"),
            "backend flash_latents is called latents here; write backend: latents"
        );
        let known = "also-fast, latents, named-only, pages, plain";
        assert_eq!(said("nothing"), format!("no backend is called nothing; there are: {known}"));
        let mut sparse = backends();
        sparse.absent_sparse("indexed", "indexer");
        let named = AttnBackend::parse("indexed");
        let kind = resolve_attn_backend(&named, Device::Cpu, &geometry(NHD), &sparse).map(|_| ());
        assert!(kind.unwrap_err().to_string().ends_with("write kind: indexed"));
        let missing = sparse.resolve_sparse().map(|_| ()).unwrap_err().to_string();
        assert_eq!(missing, "backend indexed is not compiled in; build with --features indexer");
        assert!(sparse.not_compiled().any(|absent| absent == ("indexed", "indexer")));
        assert_eq!(backends().resolve_sparse().map(|_| ()).unwrap_err(), ResolveError::NoSparse);
        let empty = Backends::new();
        let none = resolve_attn_backend(&AttnBackend::Auto, Device::Cpu, &geometry(NHD), &empty).map(|_| ());
        assert!(none.unwrap_err().to_string().ends_with("none is compiled in"));
    }
}
