//! Which kernel sums a row's keys, and how long its leaves are.
//!
//! Both follow from the geometry and the row's *own* query length alone, never from its neighbours: this is
//! what makes a row's bits independent of the batch it runs in.

use crate::work::ONE_LEAF;
use crate::{DType, Kernels};

use super::{Geometry, Target};

/// Keys a leaf of the decode family.
pub const DECODE_LEAF: u32 = 512;

/// Query vectors a key head beyond which a row's leaves on a device are longer: an end of a leaf costs a block twice as much, which has no
/// registers for nodes that wait. Such a row has about four leaves, until they are [`DECODE_LONGEST_LEAF`] long.
pub(crate) const DECODE_FEW_LANES: usize = 8;

/// Most keys of such a leaf.
pub(crate) const DECODE_LONGEST_LEAF: u32 = 2048;

/// Keys a leaf of the tile family, for rows of at most [`APPEND_QUERIES`] query tokens.
pub const APPEND_LEAF: u32 = 4096;

/// Query tokens up to which a tile row's keys are cut, so that few tiles over long keys fill all threads.
pub const APPEND_QUERIES: usize = 256;

/// Query vectors a key head (tokens times `H / G`) up to which a row is of the decode family.
pub const DECODE_LANES: usize = 16;

/// Keys a leaf of the latent family.
pub const LATENT_LEAF: u32 = 512;

/// Query vectors (tokens times heads) of a row up to which items of the Hopper's kernel over latents may have several leaves, up to
/// [`LATENT_LEAVES`].
pub(crate) const LATENT_TREE_HEADS: usize = 16;

/// Most leaves of such an item, as a power of two; `cu/latent_few.cu` has the same.
pub(crate) const LATENT_LEAVES: u32 = 5;

/// The same where nodes that wait for a sibling are in registers alone: those of more leaves wait in the workspace, where they have room
/// if a state is of [`LATENT_TREE_HEADS`] query vectors and values are [`LATENT_WIDTH`] wide, and the row's first leaf is seen.
pub(crate) const LATENT_LEAVES_AT_HAND: u32 = 3;

/// Keys a leaf of such rows: short, so that a row alone is spread over many blocks; an item of many rows has several.
pub(crate) const LATENT_TREE_LEAF: u32 = 256;

/// Keys of a row up to which they are so short: a longer row has enough of twice the length, each end of which costs a block a microsecond.
pub(crate) const LATENT_TREE_SHORT: u32 = 12_288;

/// The widest latent and value that the tensor-core kernels over latents take.
pub(crate) const LATENT_DEPTH: usize = 640;
/// As before.
pub(crate) const LATENT_WIDTH: usize = 512;

/// Whether those kernels take latents of a layer.
pub(crate) fn latents_in_tensors(geometry: &Geometry) -> bool {
    let types = (geometry.q_dtype, geometry.kv_dtype);
    matches!(types, (DType::Bf16, DType::Bf16) | (DType::F16, DType::F16))
        && geometry.head_dim_qk <= LATENT_DEPTH
        && geometry.head_dim_vo <= LATENT_WIDTH
}

/// Whether the Hopper's kernel over latents in e4m3 takes those of a layer: of 512 lanes under scales, as models have them, whose
/// tokens are whole steps of 16 bytes.
#[cfg(feature = "cuda")]
pub(crate) fn latents_in_codes(geometry: &Geometry) -> bool {
    let (depth, width) = (geometry.head_dim_qk, geometry.head_dim_vo);
    (geometry.q_dtype, geometry.kv_dtype) == (DType::Bf16, DType::E4m3)
        && width == LATENT_WIDTH
        && (width..=width + 64).contains(&depth)
        && depth.is_multiple_of(8)
}

/// Query heads up to which few query vectors are worth a kernel of their own over latents.
pub(crate) const LATENT_FEW_HEADS: usize = 32;

/// Whether rows of few query vectors over latents are for that kernel, `cu/latent_few.cu`, which takes tasks.
pub(crate) fn latents_by_tasks(geometry: &Geometry, target: Target, kernels: Kernels) -> bool {
    target == Target::Blocks
        && kernels == Kernels::Wgmma
        && geometry.group() <= LATENT_FEW_HEADS
        && latents_in_tensors(geometry)
}

/// Keys that a leaf of the latent family on a device has at most, of rows that have more than four.
pub(crate) const LATENT_LONGEST_LEAF: u32 = 4096;

/// Query vectors (tokens times heads) that an item of latent attention takes, unless one token has more heads.
pub const LATENT_LANES: usize = 64;

/// Most visible keys of a leaf over blocks on a device, of calls with so many query heads: few heads make few tiles, and many
/// multiprocessors want work.
#[cfg(any(feature = "cuda", feature = "flex"))]
pub(crate) fn blocks_leaf(heads: usize) -> u32 {
    128 * (heads as u32).clamp(4, 32)
}

/// Whether keys and values a head, of such a geometry, are for the decode kernel of devices with matrix units: bf16 or f16 alike,
/// up to 512 wide.
pub(crate) fn in_halves(geometry: &Geometry) -> bool {
    let half = matches!(geometry.kv_dtype, DType::Bf16 | DType::F16);
    let width = geometry.head_dim_qk.max(geometry.head_dim_vo);
    half && geometry.q_dtype == geometry.kv_dtype && width <= 512
}

/// Whether they are codes that those kernels make bf16 of, beside queries of bf16.
pub(crate) fn in_codes(geometry: &Geometry) -> bool {
    let width = geometry.head_dim_qk.max(geometry.head_dim_vo);
    (geometry.q_dtype, geometry.kv_dtype) == (DType::Bf16, DType::E4m3) && width <= 512
}

/// What a slot of a page holds, which decides the families of rows over it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stored {
    /// A key and a value for each key head.
    #[default]
    Heads,
    #[cfg_attr(not(feature = "mla"), allow(dead_code))]
    /// One latent that all heads read, its first lanes as the value.
    Latents,
    #[cfg_attr(not(feature = "dense"), allow(dead_code))]
    /// Packed keys and values a head, behind a prefix that is packed or lies in pages.
    Segments,
    #[cfg_attr(not(feature = "flex"), allow(dead_code))]
    /// Blocks of keys and values a head, in batches.
    Blocks,
}

impl Stored {
    /// Keys a leaf of a row. Over latents under many heads a device's blocks have no room for a second state, and each end of a leaf
    /// costs microseconds and a state in memory: short rows have two leaves, longer ones four, whatever the batch; and leaves alike, since
    /// a short last one would leave most of a device idle.
    pub(crate) fn leaf_keys(
        self,
        geometry: &Geometry,
        target: Target,
        kernels: Kernels,
        q_len: usize,
        kv_len: u32,
    ) -> u32 {
        match self.family(geometry, q_len) {
            Family::Latent
                if latents_by_tasks(geometry, target, kernels)
                    && q_len * geometry.group() <= LATENT_TREE_HEADS =>
            {
                if kv_len > LATENT_TREE_SHORT {
                    2 * LATENT_TREE_LEAF
                } else {
                    LATENT_TREE_LEAF
                }
            }
            Family::Latent if target == Target::Blocks && geometry.group() > LATENT_FEW_HEADS => {
                let parts = match kv_len {
                    0..=6144 => 2,
                    6145..=24_576 => 4,
                    _ => kv_len.div_ceil(LATENT_LONGEST_LEAF).next_power_of_two(),
                };
                let leaf = kv_len.div_ceil(parts);
                // A row that grows by a token seldom has another leaf.
                let granule = 1 << (leaf / 8).max(128).ilog2();
                leaf.next_multiple_of(granule).max(LATENT_LEAF)
            }
            Family::Decode
                if target == Target::Blocks
                    && in_halves(geometry)
                    && (DECODE_FEW_LANES + 1..=DECODE_LANES).contains(&(q_len * geometry.group())) =>
            {
                (kv_len.clamp(1, 4 * DECODE_LONGEST_LEAF).next_power_of_two() / 4).max(DECODE_LEAF)
            }
            family => family.leaf_keys(q_len),
        }
    }

    /// The family of a row of `q_len` query tokens.
    pub(crate) fn family(self, geometry: &Geometry, q_len: usize) -> Family {
        match self {
            Stored::Heads => Family::of(geometry, q_len),
            Stored::Latents if q_len <= latent_tokens(geometry) => Family::Latent,
            Stored::Latents => Family::LatentTile,
            // Their rows are long as a rule, and few queries are right in a tile too.
            Stored::Segments | Stored::Blocks => Family::Tile,
        }
    }
}

/// Query tokens that an item over latents takes.
pub(super) fn latent_tokens(geometry: &Geometry) -> usize {
    (LATENT_LANES / geometry.group().max(1)).max(1)
}

/// A kernel family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Family {
    /// Few query vectors a key head: keys and values are streamed once for all of them.
    Decode = 0,
    /// Many query vectors a key head: tiles of queries over tiles of keys.
    Tile = 1,
    /// Latents under few query vectors: one item holds all of a row's queries.
    Latent = 2,
    /// Latents under many query vectors: a row's query tokens are spread over items.
    LatentTile = 3,
}

impl Family {
    /// The family of a row of `q_len` query tokens over keys and values a head.
    pub fn of(geometry: &Geometry, q_len: usize) -> Family {
        let lanes = q_len.saturating_mul(geometry.group());
        if q_len <= 1 && lanes <= 4 * DECODE_LANES || lanes <= DECODE_LANES {
            Family::Decode
        } else {
            Family::Tile
        }
    }

    /// Keys a leaf of a row of `q_len` query tokens; [`ONE_LEAF`] when its keys are never cut.
    pub fn leaf_keys(self, q_len: usize) -> u32 {
        match self {
            Family::Decode => DECODE_LEAF,
            Family::Latent => LATENT_LEAF,
            Family::Tile | Family::LatentTile if q_len <= APPEND_QUERIES => APPEND_LEAF,
            Family::Tile | Family::LatentTile => ONE_LEAF,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_of_latents_under_many_heads_are_alike() {
        let geometry = Geometry {
            num_qo_heads: 64,
            num_kv_heads: 1,
            head_dim_qk: 576,
            head_dim_vo: 512,
            page_size: 64,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        let leaf = |kv_len| Stored::Latents.leaf_keys(&geometry, Target::Blocks, Kernels::Wgmma, 1, kv_len);
        let lengths = [0, 1, 512, 2048, 4096, 5611, 8192, 16_384, 22_446, 131_072, u32::MAX];
        let expected = [512, 512, 512, 1024, 2048, 2816, 2048, 4096, 5632, 4096, 4096];
        assert_eq!(lengths.map(leaf), expected);
        for kv_len in (1..200_000).step_by(61) {
            let leaf = leaf(kv_len);
            assert!(leaf % 128 == 0 && leaf >= LATENT_LEAF, "{kv_len}: {leaf}");
            let count = kv_len.div_ceil(leaf);
            assert!(count <= 4 || kv_len > 24_576, "{kv_len}: {count} leaves");
            // Enough for the last of them.
            let last = kv_len - (count - 1) * leaf;
            assert!(count > 4 || kv_len < 4096 || last > leaf / 2, "{kv_len} in leaves of {leaf}");
        }
    }

    #[test]
    fn a_rows_leaves_follow_from_its_own_query_vectors_and_keys() {
        let geometry = |group: usize| Geometry {
            num_qo_heads: 2 * group,
            num_kv_heads: 2,
            head_dim_qk: 128,
            head_dim_vo: 128,
            page_size: 16,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        let leaf = |group, target, q_len, kv_len| {
            Stored::Heads.leaf_keys(&geometry(group), target, Kernels::Auto, q_len, kv_len)
        };
        let blocks = |group, q_len, kv_len| leaf(group, Target::Blocks, q_len, kv_len);
        let lengths = [0, 1, 2048, 2049, 4096, 4097, 8192, 131_072];
        assert_eq!(lengths.map(|keys| blocks(16, 1, keys)), [512, 512, 512, 1024, 1024, 2048, 2048, 2048]);
        assert_eq!(blocks(4, 3, 8192), 2048, "three tokens are twelve query vectors");
        for (group, q_len) in [(8, 1), (4, 2), (17, 1), (32, 1)] {
            assert_eq!(blocks(group, q_len, 131_072), DECODE_LEAF, "{group} {q_len}");
        }
        assert_eq!(leaf(16, Target::Threads, 1, 131_072), DECODE_LEAF);
    }
}
