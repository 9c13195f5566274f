//! A resource of kind `ring`: which frames each layer keeps, of how many worlds.

use mstar_kernels::DType;

use super::model::ModelSpec;
use super::{Fields, keys};
use crate::kv::{RING_BLOCK, RingConfig, RingGeometry};

/// A ring of frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSpec {
    /// Its geometry on one rank.
    pub config: RingConfig,
}

/// Frames that a layer may keep.
const MAX_FRAMES: u64 = 65_536;

/// Reads the section; `dtype` is the spec's.
pub(super) fn read(
    mut f: Fields<'_>,
    dtype: DType,
    model: Option<&ModelSpec>,
    world_size: usize,
    most_bytes: u128,
) -> Option<RingSpec> {
    let dtype = f.word_or("dtype", dtype, super::resources::FLOATS);
    let tokens_per_frame = f.count("tokens_per_frame", 1..=1 << 20);
    let num_worlds = f.count_or("num_worlds", 1, 1..=65_536);
    if let Some(tokens) = tokens_per_frame.filter(|tokens| !tokens.is_multiple_of(RING_BLOCK)) {
        f.fault_at("tokens_per_frame", format!("expected a multiple of {RING_BLOCK}, got {tokens}"));
    }
    let layers = model.map_or(1, |model| model.layers);
    let geometries = match f.value("layers") {
        None => read_geometry(&mut f).map(|geometry| vec![geometry; layers]),
        Some(_) => read_pattern(&mut f, layers),
    };
    let heads = model.and_then(|model| model.rank_heads(world_size).ok());
    let widths = model.and_then(|model| match (model.head_dim, model.num_kv_heads) {
        (Some(head_dim), Some(_)) => Some((head_dim, model.value_width()?)),
        _ => {
            f.fault("a ring holds keys and values by head; it needs model.head_dim and model.num_kv_heads");
            None
        }
    });
    let config = match (geometries, tokens_per_frame, heads, widths) {
        (Some(layers), Some(tokens_per_frame), Some(heads), Some((head_dim, head_dim_vo))) => RingConfig {
            layers,
            tokens_per_frame,
            num_worlds,
            num_kv_heads: heads.num_kv_heads,
            head_dim,
            head_dim_vo,
            dtype,
            world_size,
        },
        _ => {
            f.finish("here");
            return None;
        }
    };
    if tokens_per_frame.is_some_and(|tokens| tokens.is_multiple_of(RING_BLOCK)) {
        check_size(&f, &config, most_bytes);
    }
    f.finish("here");
    Some(RingSpec { config })
}

/// `ring_frames`, `ring_buckets` and `pinned_dilation` of the map.
fn read_geometry(f: &mut Fields<'_>) -> Option<RingGeometry> {
    let ring_frames = f.count("ring_frames", 1..=MAX_FRAMES);
    let ring_buckets = f.count_or("ring_buckets", ring_frames.unwrap_or(1), 1..=MAX_FRAMES);
    let pinned_dilation = f.count_or("pinned_dilation", 1, 1..=i32::MAX as u64);
    let ring_frames = ring_frames?;
    if ring_buckets > ring_frames {
        let why = format!("expected at most ring_frames, {ring_frames}, got {ring_buckets}");
        f.fault_at("ring_buckets", why);
        return None;
    }
    Some(RingGeometry { ring_frames, ring_buckets, pinned_dilation })
}

/// `layers`: runs of layers, repeated until all of the model's have one.
fn read_pattern(f: &mut Fields<'_>, layers: usize) -> Option<Vec<RingGeometry>> {
    let node = f.value("layers")?;
    let items = f.list(node, "runs of layers", 1024)?;
    let mut pattern: Vec<RingGeometry> = Vec::new();
    let (mut whole, mut total) = (true, 0usize);
    for item in items {
        let mut run = f.sibling(item, &keys::RING_LAYERS);
        let count = run.count_or("count", 1, 1..=layers as u64);
        let geometry = read_geometry(&mut run);
        run.finish("here");
        whole &= geometry.is_some();
        total = total.saturating_add(count);
        if total <= layers {
            pattern.extend(geometry.into_iter().flat_map(|geometry| std::iter::repeat_n(geometry, count)));
        }
    }
    if !whole {
        return None;
    }
    if !layers.is_multiple_of(total) {
        let why = format!(
            "the counts add up to {total}, and the runs repeat until all layers have one; model.layers is \
             {layers}, no multiple of it"
        );
        f.fault_at("layers", why);
        return None;
    }
    Some(pattern.iter().copied().cycle().take(layers).collect())
}

/// Refuses what no machine has, and what block numbers cannot count.
fn check_size(f: &Fields<'_>, config: &RingConfig, most_bytes: u128) {
    match config.memory_bytes() {
        Ok(bytes) if bytes as u128 <= most_bytes => {}
        _ => {
            let each: u128 = config.layers.iter().map(|layer| layer.frames() as u128).sum();
            let why = format!(
                "{} worlds of {each} frames over all layers are more than any machine has; lower it",
                config.num_worlds
            );
            f.fault_at("num_worlds", why);
            return;
        }
    }
    if let Err(error) = config.check() {
        f.fault_at("num_worlds", error.to_string());
    }
}
