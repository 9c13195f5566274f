//! The `resources` section: caches, attention backends and indexers, each under a name of the user's.

use mstar_kernels::DType;

use super::model::ModelSpec;
use super::node::clip;
use super::ring::RingSpec;
use super::{Fields, Node, keys};
use crate::ResourceName;
use crate::attend::{IndexFormat, IndexGeometry, IndexStore};
use crate::kv::{KvConfig, KvLayout, PlaneConfig, SCALES};

/// Bytes that one cache may be said to take: 256 TiB, past any machine and far from overflow.
const MAX_POOL_BYTES: u128 = 1 << 48;
/// Ids of pages and positions of tokens are `i32` in plans.
const MAX_I32: u64 = i32::MAX as u64;

/// One resource.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceSpec {
    /// Its name, the key in `resources`.
    pub name: ResourceName,
    /// What it is.
    pub kind: ResourceKind,
    /// Resources that go before it: those it names, and those of `depends_on`.
    pub depends_on: Vec<ResourceName>,
}

/// What a resource is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ResourceKind {
    /// `kind: kv`.
    Kv(KvSpec),
    /// `kind: attention`.
    Attention(AttentionSpec),
    /// `kind: dsa`.
    Dsa(DsaSpec),
    /// `kind: ring`.
    Ring(RingSpec),
}

impl ResourceKind {
    /// The word in `kind`.
    pub fn name(&self) -> &'static str {
        match self {
            ResourceKind::Kv(_) => "kv",
            ResourceKind::Attention(_) => "attention",
            ResourceKind::Dsa(_) => "dsa",
            ResourceKind::Ring(_) => "ring",
        }
    }
}

/// A paged KV cache.
#[derive(Clone, Debug, PartialEq)]
pub struct KvSpec {
    /// Its geometry on one rank.
    pub config: KvConfig,
    /// `host_pages`: the most pages' worth of host memory that whole requests are offloaded to, taken as needed; as many as
    /// `max_num_pages` unless said, and 0 offloads nothing.
    pub host_pages: usize,
}

/// An attention resource. What `backend` means is up to the program's registry of compiled backends.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// `backend`: `auto`, or a backend's name as it was written.
    pub backend: String,
    /// `kv_cache`: the cache that is attended; `None` for a backend that brings its own keys.
    pub kv_cache: Option<ResourceName>,
    /// `query_from`: the cache whose plan packs the queries, for cross-attention; `None` packs them from the step.
    pub query_from: Option<ResourceName>,
    /// The resource's map without the common keys: the backend's own options.
    pub options: Node,
    /// The whole map, for messages about the resource.
    pub node: Node,
}

/// DeepSeek sparse attention over a latent cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DsaSpec {
    /// `kv_cache`.
    pub kv_cache: ResourceName,
    /// `index_n_heads`, `index_head_dim`, `index_topk`, `index_dtype`, `index_store` and `full_layers`.
    pub index: IndexGeometry,
}

/// What resources are read against: values of the spec's other sections.
#[derive(Clone, Copy)]
pub(super) struct Surroundings<'a> {
    pub dtype: DType,
    pub model: Option<&'a ModelSpec>,
    pub world_size: usize,
}

const KINDS: &[(&str, Kind)] =
    &[("kv", Kind::Kv), ("attention", Kind::Attention), ("dsa", Kind::Dsa), ("ring", Kind::Ring)];

#[derive(Clone, Copy)]
enum Kind {
    Kv,
    Attention,
    Dsa,
    Ring,
}

/// The element types that numbers are stored and attended in.
/// Element types of a paged cache.
const KV_TYPES: &[(&str, DType)] =
    &[("f32", DType::F32), ("bf16", DType::Bf16), ("f16", DType::F16), ("fp8_e4m3", DType::E4m3)];

pub(super) const FLOATS: &[(&str, DType)] =
    &[("f32", DType::F32), ("bf16", DType::Bf16), ("f16", DType::F16)];

/// Formats of a stored index key.
const INDEX_FORMATS: &[(&str, IndexFormat)] = &[
    ("f32", IndexFormat::F32),
    ("bf16", IndexFormat::Bf16),
    ("f16", IndexFormat::F16),
    ("fp8", IndexFormat::Fp8),
];

/// Where index keys may be kept.
const INDEX_STORES: &[(&str, IndexStore)] = &[("pages", IndexStore::Pages), ("buffers", IndexStore::Buffers)];

/// Element types of a plane.
const PLANE_TYPES: &[(&str, DType)] = &[
    ("f32", DType::F32),
    ("bf16", DType::Bf16),
    ("f16", DType::F16),
    ("u8", DType::U8),
    ("i32", DType::I32),
    ("i64", DType::I64),
];

/// One resource; `others` are all names of the section.
pub(super) fn read(
    name: &str,
    node: &Node,
    others: &[&str],
    around: Surroundings<'_>,
    faults: &super::Faults,
) -> Option<ResourceSpec> {
    if node.place().line == 0
        && let Some(entries) = node.entries()
        && node.get("kind").is_none()
        && !entries.is_empty()
    {
        let real = others.iter().copied().filter(|other| *other != name);
        let hint = keys::nearest(name, real).map_or(String::new(), |n| format!("; did you mean {n}?"));
        faults.push(node.error(format!("no such resource in the file, and no kind is given{hint}")));
        return None;
    }
    // The kind decides which keys there are, so it is read before the section is opened.
    let kind = match node.get("kind") {
        None if node.entries().is_some() => {
            faults.push(node.error("missing kind; it is kv, attention, dsa or ring"));
            return None;
        }
        None => {
            faults.push(node.error(format!("expected a map with the key `kind`, got {}", node.describe())));
            return None;
        }
        Some(kind) => match super::fields::word(kind, KINDS) {
            Ok(kind) => kind,
            Err(why) => {
                faults.push(kind.error(why));
                return None;
            }
        },
    };
    let (section, reader): (&'static keys::Section, Reader) = match kind {
        Kind::Kv => (&keys::KV, read_kv),
        Kind::Attention => (&keys::ATTENTION, read_attention),
        Kind::Dsa => (&keys::DSA, read_dsa),
        Kind::Ring => (&keys::RING, read_ring),
    };
    let mut f = Fields::open(node, section, faults);
    f.value("kind");
    let mut names = Names { others, depends_on: Vec::new() };
    for (other, at) in f.names_opt("depends_on", 64).unwrap_or_default() {
        names.add(other, at, faults);
    }
    let kind = reader(f, around, &mut names, faults)?;
    Some(ResourceSpec { name: ResourceName::new(name), kind, depends_on: names.depends_on })
}

type Reader = fn(Fields<'_>, Surroundings<'_>, &mut Names<'_>, &super::Faults) -> Option<ResourceKind>;

/// Resolves names of other resources, and remembers them as dependencies.
struct Names<'a> {
    others: &'a [&'a str],
    depends_on: Vec<ResourceName>,
}

impl Names<'_> {
    fn add(&mut self, name: &str, at: &Node, faults: &super::Faults) -> Option<ResourceName> {
        if !self.others.contains(&name) {
            let hint = keys::nearest(name, self.others.iter().copied()).map_or_else(
                || format!("there is {}", self.others.join(", ")),
                |n| format!("did you mean {n}?"),
            );
            faults.push(at.error(format!("no resource is called {}; {}", clip(name), clip(&hint))));
            return None;
        }
        let name = ResourceName::new(name);
        if !self.depends_on.contains(&name) {
            self.depends_on.push(name.clone());
        }
        Some(name)
    }

    fn text(
        &mut self,
        f: &mut Fields<'_>,
        key: &'static str,
        faults: &super::Faults,
    ) -> Option<ResourceName> {
        let name = f.text_opt(key)?;
        self.add(name, f.node().get(key)?, faults)
    }
}

fn read_kv(
    mut f: Fields<'_>,
    around: Surroundings<'_>,
    _: &mut Names<'_>,
    _: &super::Faults,
) -> Option<ResourceKind> {
    #[derive(Clone, Copy)]
    enum Layout {
        Nhd,
        Mla,
    }
    let layout = f.word_or("layout", Layout::Nhd, &[("nhd", Layout::Nhd), ("mla", Layout::Mla)]);
    let dtype = f.word_or("dtype", around.dtype, KV_TYPES);
    let page_size = f.count("page_size", 1..=65_536);
    let max_num_pages = f.count("max_num_pages", 2..=MAX_I32);
    let max_seq_len = f.count("max_seq_len", 1..=MAX_I32);
    let prefix_cache = f.flag_or("prefix_cache", false);
    let retention = f.count_opt("retention", 1..=MAX_I32);
    let host_pages = f.count_or("host_pages", max_num_pages.unwrap_or(0), 0..=MAX_I32);
    let planes = read_planes(&mut f);
    let model = around.model;
    let heads = model.and_then(|model| model.rank_heads(around.world_size).ok());
    let layout = match (layout, model) {
        (_, None) => None,
        (Layout::Nhd, Some(model)) => match (model.head_dim, model.num_kv_heads) {
            (Some(head_dim), Some(_)) if model.value_width() == Some(head_dim) => {
                Some(KvLayout::Nhd { num_kv_heads: heads?.num_kv_heads, head_dim })
            }
            (Some(head_dim), Some(_)) => {
                f.fault(format!(
                    "a page holds keys and values of one width; model.head_dim_vo must be {head_dim} or left out"
                ));
                None
            }
            (None, _) => {
                f.fault("layout nhd needs model.head_dim and model.num_kv_heads");
                None
            }
            (Some(_), None) => None, // The model's own fault says so.
        },
        (Layout::Mla, Some(model)) => match model.kv_lora_rank {
            Some(kv_lora_rank) => {
                Some(KvLayout::Mla { kv_lora_rank, qk_rope_head_dim: model.qk_rope_head_dim })
            }
            None => {
                f.fault_at("layout", "mla needs model.kv_lora_rank");
                None
            }
        },
    };
    if dtype == DType::E4m3 && planes.iter().any(|plane| plane.name == SCALES) {
        f.fault_at("planes", format!("a cache in fp8_e4m3 has the plane {SCALES} of its own"));
    }
    if let (DType::E4m3, Some(KvLayout::Mla { kv_lora_rank, qk_rope_head_dim })) = (dtype, layout)
        && let Err(why) = mstar_kernels::fp8::check_latent(kv_lora_rank, qk_rope_head_dim)
    {
        f.fault_at("dtype", why.to_string());
    }
    let config = match (layout, page_size, max_num_pages, max_seq_len, model) {
        (Some(layout), Some(page_size), Some(max_num_pages), Some(max_seq_len), Some(model)) => {
            let config = KvConfig {
                layout,
                dtype,
                page_size,
                max_num_pages,
                max_seq_len,
                num_layers: model.layers,
                planes,
                prefix_cache,
                retention,
                world_size: around.world_size,
            };
            if dtype == DType::E4m3 { config.quantised() } else { config }
        }
        _ => {
            f.finish("here");
            return None;
        }
    };
    let bytes = page_bytes(&config);
    for (key, pages) in [("max_num_pages", config.max_num_pages), ("host_pages", host_pages)] {
        if f.node().get(key).is_some() && bytes.saturating_mul(pages as u128) > MAX_POOL_BYTES {
            let why = format!("{pages} pages of {bytes} bytes each are more than any machine has; lower it");
            f.fault_at(key, why);
        }
    }
    f.finish("here");
    Some(ResourceKind::Kv(KvSpec { config, host_pages }))
}

fn read_planes(f: &mut Fields<'_>) -> Vec<PlaneConfig> {
    let Some(node) = f.value("planes") else { return Vec::new() };
    let items = f.list(node, "planes", 16).unwrap_or_default();
    let mut planes: Vec<PlaneConfig> = Vec::new();
    for item in items {
        let mut plane = f.sibling(item, &keys::PLANE);
        let name = plane.text("name");
        let dtype = plane.word("dtype", PLANE_TYPES);
        let width = plane.count("width", 1..=65_536);
        if let Some(name) = name.filter(|name| planes.iter().any(|other| other.name == *name)) {
            plane.fault_at("name", format!("two planes are called {}", clip(name)));
        }
        plane.finish("here");
        if let (Some(name), Some(dtype), Some(width)) = (name, dtype, width) {
            planes.push(PlaneConfig { name: name.to_string(), dtype, width, layers: None });
        }
    }
    planes
}

/// Bytes of one page over all layers and planes.
fn page_bytes(config: &KvConfig) -> u128 {
    let token = match (config.layout, config.token()) {
        (KvLayout::Mla { .. }, Some((width, dtype))) => width as u128 * dtype.size() as u128,
        (KvLayout::Nhd { num_kv_heads, head_dim }, _) => {
            2 * num_kv_heads as u128 * head_dim as u128 * config.dtype.size() as u128
        }
        (KvLayout::Mla { .. }, None) => u128::MAX >> 64,
    };
    let layers = config.num_layers;
    let plane = |p: &PlaneConfig| p.width as u128 * p.dtype.size() as u128 * p.layer_count(layers) as u128;
    let planes: u128 = config.planes.iter().map(plane).sum();
    (token * layers as u128 + planes) * config.page_size as u128
}

fn read_attention(
    mut f: Fields<'_>,
    _: Surroundings<'_>,
    names: &mut Names<'_>,
    faults: &super::Faults,
) -> Option<ResourceKind> {
    let backend = f.text_opt("backend").unwrap_or("auto").to_string();
    let kv_cache = names.text(&mut f, "kv_cache", faults);
    let query_from = match f.text_opt("query_from") {
        Some("step") => None,
        Some(name) => {
            let at = f.node().get("query_from")?;
            Some(names.add(name, at, faults)?)
        }
        None => None,
    };
    // Keys beyond these are the backend's own; it refuses what it does not know when it is resolved.
    let (node, options) = (f.node().clone(), f.node().without(keys::ATTENTION.keys));
    Some(ResourceKind::Attention(AttentionSpec { backend, kv_cache, query_from, options, node }))
}

fn read_dsa(
    mut f: Fields<'_>,
    around: Surroundings<'_>,
    names: &mut Names<'_>,
    faults: &super::Faults,
) -> Option<ResourceKind> {
    f.required("kv_cache");
    let kv_cache = names.text(&mut f, "kv_cache", faults);
    let index_n_heads = f.count("index_n_heads", 1..=super::model::MAX_HEADS);
    let index_head_dim = f.count("index_head_dim", 1..=512);
    let index_topk = f.count("index_topk", 1..=MAX_I32);
    let kept = IndexFormat::of(around.dtype).unwrap_or(IndexFormat::F32);
    let format = f.word_or("index_dtype", kept, INDEX_FORMATS);
    if let Some(width) = index_head_dim.filter(|width| format == IndexFormat::Fp8 && width % 4 != 0) {
        f.fault_at("index_head_dim", format!("fp8 keys need a multiple of 4, got {width}"));
    }
    let store = f.word_or("index_store", IndexStore::Pages, INDEX_STORES);
    let layers = around.model.map_or(1024, |model| model.layers);
    let full_layers = f.counts_opt("full_layers", 0..=layers as u64 - 1, 1024);
    if let Some(full) = &full_layers {
        if full.windows(2).any(|pair| pair[0] >= pair[1]) {
            f.fault_at("full_layers", "expected layers in rising order, none twice");
        }
        if full[0] != 0 {
            f.fault_at(
                "full_layers",
                format!("layer 0 has no selection to share; begin with 0, not {}", full[0]),
            );
        }
    }
    f.finish("here");
    Some(ResourceKind::Dsa(DsaSpec {
        kv_cache: kv_cache?,
        index: IndexGeometry {
            index_n_heads: index_n_heads?,
            index_head_dim: index_head_dim?,
            index_topk: index_topk?,
            format,
            store,
            full_layers: full_layers.unwrap_or_else(|| (0..layers).collect()),
        },
    }))
}

fn read_ring(
    f: Fields<'_>,
    around: Surroundings<'_>,
    _: &mut Names<'_>,
    _: &super::Faults,
) -> Option<ResourceKind> {
    let Surroundings { dtype, model, world_size } = around;
    super::ring::read(f, dtype, model, world_size, MAX_POOL_BYTES).map(ResourceKind::Ring)
}
