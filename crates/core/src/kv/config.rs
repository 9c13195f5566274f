//! A cache's geometry: what a token costs, what a page costs, what a rank of several keeps.
#![forbid(unsafe_code)]

use mstar_kernels::{DType, fp8};

use crate::Result;

/// Page 0 of every store: no request is ever given it. Padded table entries name it, so that every id is legal.
pub const SINK_PAGE: i32 = 0;

/// The plane that holds the scales of keys and values in e4m3, `[P, S, 2 * G]` f32 a layer: those of a token's keys, head after
/// head, then those of its values. Latents carry theirs.
pub const SCALES: &str = "kv_scales";

/// How a page's tokens lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvLayout {
    /// Keys and values per head: `[P, 2, S, G, D]` a layer.
    Nhd {
        /// `G`: key and value heads on this rank.
        num_kv_heads: usize,
        /// `D`: width of a key and of a value.
        head_dim: usize,
    },
    /// One latent a token, `[ckv | kpe]`: `[P, S, C + E]` a layer.
    Mla {
        /// `C`.
        kv_lora_rank: usize,
        /// `E`; may be 0.
        qk_rope_head_dim: usize,
    },
}

impl KvLayout {
    /// Elements that one token takes in one layer: `2 * G * D`, or `C + E`; `None` when that overflows.
    pub fn token_width(&self) -> Option<usize> {
        match *self {
            KvLayout::Nhd { num_kv_heads, head_dim } => num_kv_heads.checked_mul(head_dim)?.checked_mul(2),
            KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } => kv_lora_rank.checked_add(qk_rope_head_dim),
        }
    }
}

/// One more array of per-token entries, `[P, S, width]` a layer, moved with the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneConfig {
    /// Its name: `index_keys`, `scales`.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Elements a token.
    pub width: usize,
    /// Layers that have it, rising; `None` for all.
    pub layers: Option<Vec<usize>>,
}

impl PlaneConfig {
    /// Layers that have it, of a cache of `num_layers`.
    pub fn layer_count(&self, num_layers: usize) -> usize {
        self.layers.as_ref().map_or(num_layers, Vec::len)
    }
}

/// What is stored of a token in some layers: the keys, values or latents themselves, or a further plane.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Elements a token.
    pub(super) width: usize,
    /// Layers that have it; `None` for all.
    pub(super) layers: Option<Vec<usize>>,
}

/// A cache's geometry.
#[derive(Clone, Debug, PartialEq)]
pub struct KvConfig {
    /// How a page's tokens lie.
    pub layout: KvLayout,
    /// Element type of the stored keys, values or latents. e4m3 takes any floats and quantises them as they are written: make the
    /// cache by [`KvConfig::quantised`], which adds the scales.
    pub dtype: DType,
    /// `S`: tokens a page.
    pub page_size: usize,
    /// `P`: pages, the sink among them.
    pub max_num_pages: usize,
    /// Tokens that a stream may hold.
    pub max_seq_len: usize,
    /// Layers, each with its own pages under the one table.
    pub num_layers: usize,
    /// Further planes under the same table.
    pub planes: Vec<PlaneConfig>,
    /// Whether filled pages are offered to the prefix index.
    pub prefix_cache: bool,
    /// Tokens kept at the end of a stream; earlier whole pages are given back. `None` keeps all.
    pub retention: Option<usize>,
    /// Ranks that the cache is split over: 1 until [`KvConfig::shard`] narrowed it.
    pub world_size: usize,
}

fn refuse<T>(name: &'static str, got: impl ToString, why: impl Into<String>) -> Result<T> {
    Err(mstar_kernels::Error::Parameter { name, why: why.into(), got: got.to_string() }.into())
}

impl KvConfig {
    /// A cache of one layer that keeps everything and shares nothing; streams may fill it.
    pub fn new(layout: KvLayout, dtype: DType, page_size: usize, max_num_pages: usize) -> KvConfig {
        KvConfig {
            layout,
            dtype,
            page_size,
            max_num_pages,
            max_seq_len: max_num_pages.saturating_sub(1).saturating_mul(page_size).min(i32::MAX as usize),
            num_layers: 1,
            planes: Vec::new(),
            prefix_cache: false,
            retention: None,
            world_size: 1,
        }
    }

    /// The same cache in e4m3: keys and values get a further plane of scales ([`SCALES`]), a latent has its scales between its
    /// parts. See [`mstar_kernels::fp8`].
    pub fn quantised(mut self) -> KvConfig {
        self.dtype = DType::E4m3;
        self.planes.retain(|plane| plane.name != SCALES);
        if let Some(width) = self.scale_width() {
            self.planes.push(PlaneConfig { name: SCALES.to_owned(), dtype: DType::F32, width, layers: None });
        }
        self
    }

    /// Scales of a token in a plane of their own, in one layer.
    fn scale_width(&self) -> Option<usize> {
        match self.layout {
            KvLayout::Nhd { num_kv_heads, .. } if self.dtype == DType::E4m3 => {
                Some(num_kv_heads.saturating_mul(2))
            }
            _ => None,
        }
    }

    /// What one token takes of the keys and values, or latents, in one layer: elements, and their type. `2 * G * D` or `C + E` of
    /// `dtype`; a latent in e4m3 is [`fp8::latent_bytes`] bytes. `None` when that overflows.
    pub fn token(&self) -> Option<(usize, DType)> {
        match self.layout {
            KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } if self.dtype == DType::E4m3 => {
                self.layout.token_width()?;
                Some((fp8::latent_bytes(kv_lora_rank, qk_rope_head_dim), DType::U8))
            }
            layout => Some((layout.token_width()?, self.dtype)),
        }
    }

    /// Refuses a geometry that no store can have.
    ///
    /// # Errors
    /// The field at fault, its value, and what would be right.
    pub fn check(&self) -> Result<()> {
        if self.page_size == 0 {
            return refuse("page_size", self.page_size, "a page holds at least one token");
        }
        if self.max_num_pages < 2 {
            let why = "at least 2 are needed: page 0 is the sink, which no request is given";
            return refuse("max_num_pages", self.max_num_pages, why);
        }
        if self.max_num_pages > i32::MAX as usize {
            return refuse("max_num_pages", self.max_num_pages, "page ids are 32-bit: at most 2147483647");
        }
        if self.max_seq_len == 0 || self.max_seq_len > i32::MAX as usize {
            return refuse("max_seq_len", self.max_seq_len, "must be within 1..=2147483647");
        }
        if self.num_layers == 0 {
            return refuse("num_layers", 0, "at least one layer");
        }
        if !self.dtype.is_float() && !matches!(self.dtype, DType::U8 | DType::E4m3) {
            let why = "keys and values are f32, bf16, f16, fp8_e4m3, or u8 when somebody else quantises";
            return refuse("dtype", self.dtype, why);
        }
        match self.layout {
            KvLayout::Nhd { num_kv_heads: 0, .. } => {
                return refuse("num_kv_heads", 0, "at least one key and value head");
            }
            KvLayout::Nhd { head_dim: 0, .. } => return refuse("head_dim", 0, "at least one element"),
            KvLayout::Mla { kv_lora_rank: 0, .. } => {
                return refuse("kv_lora_rank", 0, "at least one element");
            }
            _ => {}
        }
        if let KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e } = self.layout
            && self.dtype == DType::E4m3
        {
            fp8::check_latent(c, e)?;
        }
        let scales = self.planes.iter().find(|plane| plane.name == SCALES);
        if let Some(width) = self.scale_width()
            && scales.is_none_or(|s| (s.dtype, s.width, &s.layers) != (DType::F32, width, &None))
        {
            let why = format!(
                "keys and values in fp8_e4m3 have the plane {SCALES} of {width} f32; use KvConfig::quantised"
            );
            return refuse("planes", format!("{scales:?}"), why);
        }
        for (i, plane) in self.planes.iter().enumerate() {
            if plane.width == 0 {
                return refuse(
                    "planes.width",
                    0,
                    format!("plane `{}` needs at least one element", plane.name),
                );
            }
            if let Some(layers) = &plane.layers
                && (layers.is_empty()
                    || layers.windows(2).any(|pair| pair[0] >= pair[1])
                    || layers.last().is_some_and(|&last| last >= self.num_layers))
            {
                let why = format!(
                    "plane `{}` needs layers in rising order below {}, none twice",
                    plane.name, self.num_layers
                );
                return refuse("planes.layers", format!("{layers:?}"), why);
            }
            if self.planes[..i].iter().any(|p| p.name == plane.name) {
                return refuse("planes.name", &plane.name, "two planes have the same name");
            }
        }
        if self.retention == Some(0) {
            return refuse("retention", 0, "a stream keeps at least one token; leave it out to keep all");
        }
        if self.world_size == 0 {
            return refuse("world_size", 0, "at least one rank");
        }
        self.memory_bytes().map(|_| ())
    }

    /// Pages that `tokens` tokens from a page's start fill, the last one perhaps in part.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size.max(1))
    }

    /// Pages that requests may hold: all but the sink.
    pub fn usable_pages(&self) -> usize {
        self.max_num_pages.saturating_sub(1)
    }

    /// Every plane, the keys, values or latents first (as `kv`).
    pub(super) fn all_planes(&self) -> Option<Vec<Stored>> {
        let (width, dtype) = self.token()?;
        let mut all = vec![Stored { name: "kv".to_owned(), dtype, width, layers: None }];
        all.extend(self.planes.iter().map(|p| Stored {
            name: p.name.clone(),
            dtype: p.dtype,
            width: p.width,
            layers: p.layers.clone(),
        }));
        Some(all)
    }

    /// Bytes of one page over all planes and layers: what one fork's copy moves.
    ///
    /// # Errors
    /// When they cannot be counted in 64 bits.
    pub fn page_bytes(&self) -> Result<usize> {
        let bytes = self.all_planes().and_then(|planes| {
            planes.iter().try_fold(0usize, |sum, stored| {
                let layers = stored.layers.as_ref().map_or(self.num_layers, Vec::len);
                let plane = stored
                    .width
                    .checked_mul(stored.dtype.size())?
                    .checked_mul(self.page_size)?
                    .checked_mul(layers)?;
                sum.checked_add(plane)
            })
        });
        match bytes {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(bytes),
            _ => refuse("page_size", self.page_size, "one page is larger than the address space"),
        }
    }

    /// The exact bytes that a store of this geometry allocates for its pages, all planes and layers.
    ///
    /// # Errors
    /// When they cannot be counted in 64 bits.
    pub fn memory_bytes(&self) -> Result<usize> {
        match self.page_bytes()?.checked_mul(self.max_num_pages) {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(bytes),
            _ => refuse("max_num_pages", self.max_num_pages, "the cache is larger than the address space"),
        }
    }

    /// This cache on one rank of `world_size`. Head counts are divided; with fewer heads than ranks each rank
    /// keeps one, replicated. Latents have no heads: every rank keeps them whole. Idempotent.
    ///
    /// # Errors
    /// A `world_size` of 0, one that divides neither way, or a cache already split another way.
    pub fn shard(&self, world_size: usize) -> Result<KvConfig> {
        if world_size == 0 {
            return refuse("world_size", 0, "at least one rank");
        }
        if self.world_size == world_size {
            return Ok(self.clone());
        }
        if self.world_size != 1 {
            let why =
                format!("the cache is already split over {} ranks; shard the whole one", self.world_size);
            return refuse("world_size", world_size, why);
        }
        let mut out = KvConfig { world_size, ..self.clone() };
        if let KvLayout::Nhd { num_kv_heads, .. } = &mut out.layout {
            let heads = *num_kv_heads;
            if !heads.is_multiple_of(world_size) && !world_size.is_multiple_of(heads.max(1)) {
                let why = format!("{heads} key and value heads are neither a multiple nor a divisor of it");
                return refuse("world_size", world_size, why);
            }
            *num_kv_heads = (heads / world_size).max(1);
        }
        Ok(if out.dtype == DType::E4m3 { out.quantised() } else { out })
    }

    /// Refuses a backend whose window reaches further back than the cache keeps tokens. `window_left` counts
    /// the keys to the left of a query's own; `None` sees all.
    ///
    /// # Errors
    /// [`mstar_kernels::Error::Parameter`] naming `retention`, with the least value that would do.
    pub fn check_window(&self, window_left: Option<usize>) -> Result<()> {
        match (self.retention, window_left) {
            (None, _) => Ok(()),
            (Some(kept), Some(left)) if kept >= left => Ok(()),
            (Some(kept), Some(left)) => refuse(
                "retention",
                kept,
                format!("the backend's window reaches {left} keys back: keep {left}"),
            ),
            (Some(kept), None) => refuse(
                "retention",
                kept,
                "the backend has no window, so every key must be kept: leave it out",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nhd(num_kv_heads: usize) -> KvConfig {
        KvConfig::new(KvLayout::Nhd { num_kv_heads, head_dim: 64 }, DType::Bf16, 16, 100)
    }

    #[test]
    fn bytes_are_counted_over_planes_and_layers() {
        let mut config = nhd(4);
        config.num_layers = 3;
        config.planes.push(PlaneConfig {
            name: "index_keys".into(),
            dtype: DType::U8,
            width: 128,
            layers: None,
        });
        assert_eq!(config.page_bytes().unwrap(), 3 * 16 * (2 * 4 * 64 * 2 + 128));
        config.planes[0].layers = Some(vec![0, 2]);
        assert_eq!(config.page_bytes().unwrap(), 16 * (3 * 2 * 4 * 64 * 2 + 2 * 128));
        assert_eq!(config.memory_bytes().unwrap(), 100 * config.page_bytes().unwrap());
    }

    #[test]
    fn sharding_is_idempotent_and_replicates_few_heads() {
        let half = nhd(8).shard(2).unwrap();
        assert_eq!(half.layout, KvLayout::Nhd { num_kv_heads: 4, head_dim: 64 });
        assert_eq!(half.shard(2).unwrap(), half);
        assert!(half.shard(4).is_err());
        assert_eq!(nhd(2).shard(8).unwrap().layout, KvLayout::Nhd { num_kv_heads: 1, head_dim: 64 });
        assert!(nhd(6).shard(4).is_err() && nhd(6).shard(0).is_err());
        let layout = KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 };
        assert_eq!(KvConfig::new(layout, DType::Bf16, 64, 4).shard(8).unwrap().layout, layout);
    }

    #[test]
    fn a_quantised_cache_has_its_scales_and_counts_them() {
        let mut config = nhd(4).quantised();
        config.num_layers = 3;
        assert!(config.check().is_ok());
        assert_eq!(config.page_bytes().unwrap(), 3 * 16 * (2 * 4 * 64 + 2 * 4 * 4));
        assert_eq!(config.clone().quantised(), config);
        let half = config.shard(2).unwrap();
        assert_eq!((half.planes.len(), half.planes[0].width), (1, 4));
        assert!(half.check().is_ok());
        config.planes[0].width = 4;
        assert!(config.check().unwrap_err().to_string().contains("the plane kv_scales of 8 f32"));
        config.planes.clear();
        assert!(config.check().unwrap_err().to_string().starts_with("planes"));
        let layout = KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 };
        let latents = KvConfig::new(layout, DType::Bf16, 64, 4).quantised();
        assert!(latents.check().is_ok() && latents.planes.is_empty());
        assert_eq!(latents.page_bytes().unwrap(), 64 * 656);
        let odd = KvLayout::Mla { kv_lora_rank: 510, qk_rope_head_dim: 64 };
        let said = KvConfig::new(odd, DType::Bf16, 64, 4).quantised().check().unwrap_err().to_string();
        assert!(said.starts_with("kv_lora_rank"), "{said}");
    }

    #[test]
    fn impossible_geometries_name_the_field() {
        let check = |change: fn(&mut KvConfig), field: &str| {
            let mut config = nhd(4);
            change(&mut config);
            let said = config.check().unwrap_err().to_string();
            assert!(said.starts_with(field), "{said}");
        };
        assert!(nhd(4).check().is_ok());
        check(|c| c.page_size = 0, "page_size");
        check(|c| c.page_size = usize::MAX, "page_size");
        check(|c| c.max_num_pages = 1, "max_num_pages");
        check(|c| c.max_num_pages = 1 << 40, "max_num_pages");
        check(|c| c.max_seq_len = 0, "max_seq_len");
        check(|c| c.num_layers = 0, "num_layers");
        check(|c| c.dtype = DType::I64, "dtype");
        check(|c| c.retention = Some(0), "retention");
        check(|c| c.layout = KvLayout::Nhd { num_kv_heads: 0, head_dim: 64 }, "num_kv_heads");
        check(
            |c| c.planes = vec![PlaneConfig { name: "x".into(), dtype: DType::U8, width: 0, layers: None }],
            "planes.width",
        );
        check(
            |c| {
                c.planes =
                    vec![PlaneConfig { name: "x".into(), dtype: DType::U8, width: 1, layers: Some(vec![1]) }]
            },
            "planes.layers",
        );
    }

    #[test]
    fn retention_must_reach_as_far_as_the_window() {
        let config = KvConfig { retention: Some(8), ..nhd(1) };
        assert!(config.check_window(Some(8)).is_ok() && config.check_window(Some(9)).is_err());
        assert!(config.check_window(None).is_err() && nhd(1).check_window(None).is_ok());
    }
}
