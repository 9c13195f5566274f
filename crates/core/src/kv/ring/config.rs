//! A ring's geometry: how many frames each layer keeps and of which, what a world costs.
#![forbid(unsafe_code)]

use mstar_kernels::DType;

use crate::Result;

/// Tokens of one block of a ring's visibility. Frames are whole blocks, so that no block is ever visible in part.
pub const RING_BLOCK: usize = 128;

/// Which frames one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingGeometry {
    /// Frame slots of a world, before its scratch frame.
    pub ring_frames: usize,
    /// Slots that kept frames go round, at most `ring_frames`.
    pub ring_buckets: usize,
    /// Frames whose number is a multiple of this are kept; the others reach the scratch alone.
    pub pinned_dilation: usize,
}

impl RingGeometry {
    /// A layer that keeps the last `ring_frames` frames.
    pub fn last(ring_frames: usize) -> RingGeometry {
        RingGeometry { ring_frames, ring_buckets: ring_frames, pinned_dilation: 1 }
    }

    /// Frames of a world, the scratch among them.
    pub fn frames(&self) -> usize {
        self.ring_frames + 1
    }
}

/// A ring's geometry, on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingConfig {
    /// What each layer keeps.
    pub layers: Vec<RingGeometry>,
    /// `F`: tokens of a frame, a multiple of [`RING_BLOCK`].
    pub tokens_per_frame: usize,
    /// Requests that may hold a span at once.
    pub num_worlds: usize,
    /// `G`.
    pub num_kv_heads: usize,
    /// `D`: width of a key.
    pub head_dim: usize,
    /// `Dv`: width of a value.
    pub head_dim_vo: usize,
    /// Element type of keys and values.
    pub dtype: DType,
    /// Ranks that heads are split over: 1 until [`RingConfig::shard`] narrowed them.
    pub world_size: usize,
}

/// Layers by geometry: those of one group see the same blocks in every pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingGroups {
    /// Each geometry once, in order of its first layer.
    pub geometries: Vec<RingGeometry>,
    /// Each layer's index into `geometries`.
    pub of_layer: Vec<usize>,
}

fn refuse<T>(name: &'static str, got: impl ToString, why: impl Into<String>) -> Result<T> {
    Err(mstar_kernels::Error::Parameter { name, why: why.into(), got: got.to_string() }.into())
}

impl RingConfig {
    /// A ring of `layers` layers with one head of `head_dim` and one world.
    pub fn new(
        layers: Vec<RingGeometry>,
        tokens_per_frame: usize,
        head_dim: usize,
        dtype: DType,
    ) -> RingConfig {
        RingConfig {
            layers,
            tokens_per_frame,
            num_worlds: 1,
            num_kv_heads: 1,
            head_dim,
            head_dim_vo: head_dim,
            dtype,
            world_size: 1,
        }
    }

    /// Refuses a geometry that no ring can have.
    ///
    /// # Errors
    /// The field at fault, its value, and what would be right.
    pub fn check(&self) -> Result<()> {
        let f = self.tokens_per_frame;
        if f == 0 || !f.is_multiple_of(RING_BLOCK) {
            let why = format!("a frame is whole blocks: a positive multiple of {RING_BLOCK}");
            return refuse("tokens_per_frame", f, why);
        }
        for (name, extent) in [
            ("num_worlds", self.num_worlds),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("head_dim_vo", self.head_dim_vo),
            ("layers", self.layers.len()),
            ("world_size", self.world_size),
        ] {
            if extent == 0 {
                return refuse(name, 0, "at least 1");
            }
        }
        if !self.dtype.is_float() {
            return refuse("dtype", self.dtype, "keys and values are f32, bf16 or f16");
        }
        for (layer, geometry) in self.layers.iter().enumerate() {
            let RingGeometry { ring_frames, ring_buckets, pinned_dilation } = *geometry;
            if ring_frames == 0 {
                return refuse("ring_frames", 0, format!("layer {layer} keeps at least one frame"));
            }
            if ring_buckets == 0 || ring_buckets > ring_frames {
                let why = format!("layer {layer} has {ring_frames} ring_frames: within 1..={ring_frames}");
                return refuse("ring_buckets", ring_buckets, why);
            }
            if pinned_dilation == 0 {
                return refuse("pinned_dilation", 0, format!("layer {layer}: 1 keeps every frame"));
            }
            let frames = ring_frames.checked_add(1).and_then(|frames| frames.checked_mul(self.num_worlds));
            if frames.and_then(|n| n.checked_mul(f / RING_BLOCK)).is_none_or(|n| n > i32::MAX as usize) {
                let why = format!("the blocks of all worlds in layer {layer} must have 32-bit numbers");
                return refuse("num_worlds", self.num_worlds, why);
            }
        }
        self.memory_bytes().map(|_| ())
    }

    /// Blocks of a frame.
    pub fn blocks_per_frame(&self) -> usize {
        self.tokens_per_frame / RING_BLOCK
    }

    /// Tokens of one layer, over all worlds: `M`.
    pub fn layer_tokens(&self, geometry: &RingGeometry) -> usize {
        self.num_worlds * geometry.frames() * self.tokens_per_frame
    }

    /// Layers by geometry.
    pub fn groups(&self) -> RingGroups {
        let mut geometries: Vec<RingGeometry> = Vec::new();
        let of = |geometry: &RingGeometry| match geometries.iter().position(|known| known == geometry) {
            Some(group) => group,
            None => {
                geometries.push(*geometry);
                geometries.len() - 1
            }
        };
        let of_layer = self.layers.iter().map(of).collect();
        RingGroups { geometries, of_layer }
    }

    /// Bytes of one world, over all layers.
    ///
    /// # Errors
    /// As [`RingConfig::memory_bytes`].
    pub fn world_bytes(&self) -> Result<usize> {
        Ok(self.memory_bytes()? / self.num_worlds.max(1))
    }

    /// Bytes that a cache of this geometry allocates: over the layers, `num_worlds * (ring_frames + 1) * F` tokens of
    /// `G * (D + Dv)` elements.
    ///
    /// # Errors
    /// A size past the address space, at `ring_frames`.
    pub fn memory_bytes(&self) -> Result<usize> {
        let frames = self.layers.iter().try_fold(0usize, |sum, layer| {
            layer.ring_frames.checked_add(1).and_then(|frames| sum.checked_add(frames))
        });
        let width = self.head_dim.checked_add(self.head_dim_vo);
        let bytes = [Some(self.num_worlds), Some(self.tokens_per_frame), Some(self.num_kv_heads), width]
            .into_iter()
            .try_fold(self.dtype.size(), |bytes, extent| bytes.checked_mul(extent?));
        match frames.zip(bytes).and_then(|(frames, bytes)| bytes.checked_mul(frames)) {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(bytes),
            _ => {
                let frames = frames.map_or_else(|| "too many".to_owned(), |n| n.to_string());
                refuse("ring_frames", frames, "the ring is larger than the address space")
            }
        }
    }

    /// This ring on one rank of `world_size`: as [`KvConfig::shard`](crate::kv::KvConfig::shard). Idempotent.
    ///
    /// # Errors
    /// A `world_size` of 0, one that divides neither way, or a ring already split another way.
    pub fn shard(&self, world_size: usize) -> Result<RingConfig> {
        if self.world_size == world_size && world_size > 0 {
            return Ok(self.clone());
        }
        if world_size == 0 {
            return refuse("world_size", 0, "at least one rank");
        }
        if self.world_size != 1 {
            let why =
                format!("the ring is already split over {} ranks; shard the whole one", self.world_size);
            return refuse("world_size", world_size, why);
        }
        let heads = self.num_kv_heads;
        if !heads.is_multiple_of(world_size) && !world_size.is_multiple_of(heads.max(1)) {
            let why = format!("{heads} key and value heads are neither a multiple nor a divisor of it");
            return refuse("world_size", world_size, why);
        }
        Ok(RingConfig { num_kv_heads: (heads / world_size).max(1), world_size, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> RingConfig {
        let wide = RingGeometry { ring_frames: 8, ring_buckets: 6, pinned_dilation: 4 };
        let layers = vec![RingGeometry::last(4), wide, RingGeometry::last(4)];
        RingConfig { num_worlds: 3, num_kv_heads: 2, ..RingConfig::new(layers, 256, 64, DType::Bf16) }
    }

    #[test]
    fn layers_of_one_geometry_are_one_group() {
        let groups = config().groups();
        assert_eq!((groups.geometries.len(), groups.of_layer), (2, vec![0, 1, 0]));
        assert_eq!(groups.geometries[1].pinned_dilation, 4);
    }

    #[test]
    fn bytes_are_counted_over_layers_worlds_and_scratch() {
        let config = config();
        config.check().unwrap();
        assert_eq!(config.memory_bytes().unwrap(), 3 * (5 + 9 + 5) * 256 * 2 * 128 * 2);
        assert_eq!(config.world_bytes().unwrap() * 3, config.memory_bytes().unwrap());
        assert_eq!(config.layer_tokens(&config.layers[1]), 3 * 9 * 256);
    }

    #[test]
    fn impossible_geometries_name_the_field() {
        let check = |change: fn(&mut RingConfig), field: &str| {
            let mut config = config();
            change(&mut config);
            let said = config.check().unwrap_err().to_string();
            assert!(said.starts_with(field), "{said}");
        };
        check(|c| c.tokens_per_frame = 0, "tokens_per_frame");
        check(|c| c.tokens_per_frame = 100, "tokens_per_frame");
        check(|c| c.num_worlds = 0, "num_worlds");
        check(|c| c.num_worlds = 1 << 30, "num_worlds");
        check(|c| c.layers.clear(), "layers");
        check(|c| c.layers[1].ring_frames = 0, "ring_frames");
        check(|c| c.layers[1].ring_buckets = 9, "ring_buckets");
        check(|c| c.layers[1].ring_buckets = 0, "ring_buckets");
        check(|c| c.layers[1].pinned_dilation = 0, "pinned_dilation");
        check(|c| c.dtype = DType::I32, "dtype");
        check(|c| c.head_dim = usize::MAX, "ring_frames");
    }

    #[test]
    fn sharding_is_idempotent_and_replicates_few_heads() {
        let half = config().shard(2).unwrap();
        assert_eq!((half.num_kv_heads, half.shard(2).unwrap()), (1, half.clone()));
        assert!(half.shard(4).is_err() && config().shard(0).is_err() && config().shard(3).is_err());
        assert_eq!(config().shard(8).unwrap().num_kv_heads, 1);
    }
}
