//! The kernel of latents on tensor cores: which variant takes a list, or attention over picks.

use crate::cuda::Context;
use crate::cuda::jit::{Key, Unit};
use crate::cuda::tensor_map::{Boxes, Swizzle, TensorMap};
use crate::paged::{
    LATENT_FEW_HEADS, LATENT_LANES, LATENT_TREE_HEADS, Stored, Target, latents_by_tasks, latents_in_codes,
    latents_in_tensors,
};
use crate::work::{Item, WorkList};
use crate::{Kernels, TensorRef, paged};

use super::Choice;
use super::params::{Walk, number};

const THREADS: u32 = 256;
/// Of a Hopper's kernels: three groups.
const HOPPER_THREADS: u32 = 384;
/// Latents a tile.
const KEYS: usize = 32;
/// Bytes of shared memory that a multiprocessor keeps of each block.
const RESERVED: usize = 1024;

/// The variant for some items of a list; `None` where there is none: other types, wider latents.
pub(super) fn choose(work: &WorkList, walk: Walk, context: &Context) -> Option<Choice> {
    if work.stored != Stored::Latents {
        return None;
    }
    let geometry = &work.geometry;
    let items = match walk {
        Walk::Few => &work.items[..work.few],
        Walk::Many => &work.items[work.few..],
        Walk::All => &work.items[..],
    };
    let heads = geometry.num_qo_heads;
    let lanes = |item: &Item| item.q_count as usize * heads;
    let largest = items.iter().map(lanes).max().unwrap_or(0).max(heads);
    // Lists to come, which a captured run goes over, may have items of as many tokens as there can be.
    let most = largest.max((LATENT_LANES / heads).max(1) * heads);
    let kernels = work.kernels.settled();
    // A list that was cut before its kernels were known has no tasks, which codes do not need.
    let cut =
        kernels == Kernels::Wgmma || geometry.num_qo_heads > LATENT_FEW_HEADS || latents_in_codes(geometry);
    if kernels != Kernels::Mma
        && cut
        && let Some(choice) = hopper(geometry, walk, largest, most, in_boxes(geometry), context)
    {
        return Some(choice);
    }
    variant(Key::new(Unit::LATENT, "latent_attend"), geometry, largest, most, context)
}

/// Whether tiles of the Hopper's kernel for many heads come as boxes: pages are whole tiles, and several blocks read each, so that
/// products bind. Where bytes do, latents that are asked for row by row come faster.
fn in_boxes(geometry: &paged::Geometry) -> bool {
    geometry.page_size.is_multiple_of(BOX as usize) && geometry.num_qo_heads > LATENT_LANES
}
/// Latents and lanes of a box.
const BOX: u32 = 64;

/// Whether a kernel asks for boxes, and so takes a map of the latents.
pub(super) fn takes_a_map(key: &Key) -> bool {
    key.defines.as_slice().contains(&("BOXES", 1))
}

/// The map of latents [P, S, C + E] for such a kernel, where there can be one: where there is none, it gathers.
///
/// # Errors
/// A driver that refuses what [`Boxes`] allows.
pub(super) fn map(latents: &TensorRef<'_>, context: &Context) -> crate::Result<Option<TensorMap>> {
    let Ok(boxes) = Boxes::of(latents, &[1, BOX, BOX], Swizzle::B128) else { return Ok(None) };
    boxes.map(context).map(Some)
}

/// The Hopper's kernel for items of mostly up to `usual` query vectors, at most `most`; `None` on another card, and for what there
/// is none for. `boxes`: as `in_boxes` says.
pub(super) fn hopper(
    geometry: &paged::Geometry,
    walk: Walk,
    usual: usize,
    most: usize,
    boxes: bool,
    context: &Context,
) -> Option<Choice> {
    if context.is_hopper() && latents_in_codes(geometry) {
        return codes(geometry, walk, most, context);
    }
    if !context.is_hopper() || !latents_in_tensors(geometry) {
        return None;
    }
    let depth = geometry.head_dim_qk.next_multiple_of(64);
    let width = geometry.head_dim_vo.next_power_of_two().max(128);
    // Which of the two changes bits, and so follows from the heads and the row's family; how many rows a block of the first has does not.
    let few = walk == Walk::Few && latents_by_tasks(geometry, Target::Blocks, Kernels::Wgmma);
    let (unit, entry, rows) = match (few, usual) {
        (true, 0..=LATENT_TREE_HEADS) => (Unit::LATENT_FEW, "latent_few", 16),
        (true, _) => (Unit::LATENT_FEW, "latent_few", 32),
        _ => (Unit::LATENT_WIDE, "latent_wide", 64),
    };
    let boxes = boxes && rows == 64;
    let all = context.shared_per_block_optin() as usize;
    let shared = |stages| hopper_shared(rows, depth, width, stages, boxes);
    let stages = (2..=4).rev().find(|&stages| shared(stages) <= all)?;
    let sure = geometry.num_qo_heads.div_ceil(rows);
    let key = Key::new(unit, entry)
        .with("Q_TYPE", number(geometry.q_dtype))
        .with("ROWS", rows as i64)
        .with("DEPTH", depth as i64)
        .with("WIDTH", width as i64)
        .with("STAGES", stages as i64)
        .with("PIECES", most.div_ceil(rows).next_multiple_of(sure) as i64);
    let key = if boxes { key.with("BOXES", 1) } else { key };
    // Two blocks that have heads of the same token ask for latents together: then what a token has is pairs of them.
    let pairs = boxes && geometry.num_qo_heads.is_multiple_of(2 * rows);
    let key = if pairs { key.with("CLUSTER", 2) } else { key };
    Some(Choice { key, threads: HOPPER_THREADS, shared: shared(stages) as u32 })
}

/// The Hopper's kernels over latents in e4m3. As of the others, which of the two changes bits, and follows from the heads and the row's
/// family.
fn codes(geometry: &paged::Geometry, walk: Walk, most: usize, context: &Context) -> Option<Choice> {
    let few = walk == Walk::Few && geometry.num_qo_heads <= LATENT_TREE_HEADS;
    let (unit, entry, rows) = match few {
        true => (Unit::LATENT_CODES_FEW, "latent_codes_few", 16),
        false => (Unit::LATENT_CODES, "latent_codes", 64),
    };
    let depth = geometry.head_dim_qk.next_multiple_of(64);
    let sure = geometry.num_qo_heads.div_ceil(rows);
    let key = Key::new(unit, entry)
        .with("DEPTH", depth as i64)
        .with("PIECES", most.div_ceil(rows).next_multiple_of(sure) as i64);
    // As `SHARED_BYTES` in both: queries, tiles and their scales, batches on their way and pages, groups; what former sums shrink by, ends of
    // two units (a factor and a sum, or a factor for each group of lanes), what warps tell each other.
    let (keys, stages, batch, ahead) = if few { (64, 2, 32, 2) } else { (32, 3, 16, 3) };
    let ring = rows * depth * 2 + stages * keys * (9 * 128 + 4 * (8 + 4));
    let coming = ahead * batch * (8 * 16 * 5 + 16) + 2 * 8 * batch * 4;
    let told = (3 * stages + 4) * 8 + 2 * 128;
    let ends = if few { 2 * 4 * rows * 4 + 2 * 4 * rows * 4 } else { 2 * 2 * rows * 4 };
    let shared = ring + coming + 192 + told + stages * rows * 4 + ends;
    (shared <= context.shared_per_block_optin() as usize).then_some(Choice {
        key,
        threads: 512,
        shared: shared as u32,
    })
}

/// As `SHARED_BYTES` in `cu/latent_few.cu`, or `cu/latent_wide.cu` for 64 rows: queries, tiles, weights, what groups tell each other,
/// marks, and units.
fn hopper_shared(rows: usize, depth: usize, width: usize, stages: usize, boxes: bool) -> usize {
    const KEYS: usize = 64;
    let (queries, weights) = (rows * depth * 2, rows * KEYS * 2);
    if rows == 64 {
        let tile = depth.max(width) * KEYS * 2;
        // Of each tile that it is there, and that each of four shares of its room is free, or both of each of its blocks; two of units.
        let marks = stages * if boxes { 2 * depth.max(width) / 64 } else { 5 } + 2;
        return queries + stages * tile + weights + 2 * rows * 4 + 3 * 8 + marks * 8 + 2 * 128;
    }
    // Of what lies behind the values of a tile there is one less, and the weights lie there.
    let rest = depth.saturating_sub(width) * KEYS * 2;
    let rests = if stages == 2 { 2 } else { stages - 1 };
    let behind = if rest > 0 { rests * rest } else { 2 * weights };
    let told = 2 * 4 * rows * 4 + 2 * 2 * rows * 4;
    queries + stages * width * KEYS * 2 + behind + told + (2 * stages + 6) * 8 + 2 * 80
}

/// Blocks that can share an item of a kernel.
pub(super) fn pieces(key: &Key) -> usize {
    let said = key.defines.as_slice().iter().find(|(name, _)| *name == "PIECES");
    said.map_or(1, |&(_, pieces)| pieces.max(1) as usize)
}

/// The variant of a kernel for items of mostly up to `usual` query vectors, at most `most`.
pub(super) fn variant(
    key: Key,
    geometry: &paged::Geometry,
    usual: usize,
    most: usize,
    context: &Context,
) -> Option<Choice> {
    let (depth, width) = (geometry.head_dim_qk, geometry.head_dim_vo);
    if !latents_in_tensors(geometry) {
        return None;
    }
    let (depth, width) = (depth.next_multiple_of(64), width.next_multiple_of(128));
    let all = context.shared_per_block_optin() as usize;
    let wanted = [16, 32, 64].into_iter().find(|&rows| usual <= rows).unwrap_or(64);
    // Fewer query vectors a block, where more do not fit.
    let fits = [64, 32, 16].into_iter().filter(|&rows| rows <= wanted);
    let (rows, stages, blocks) = fits.into_iter().find_map(|rows| {
        let stages =
            |room: usize| (2..=4).rev().find(|&stages| shared_bytes(rows, depth, width, stages) <= room);
        // Two small blocks hide each other's barriers.
        let two = if rows == 16 { stages((all + RESERVED) / 2 - RESERVED) } else { None };
        two.map(|stages| (rows, stages, 2)).or_else(|| Some((rows, stages(all)?, 1)))
    })?;
    // What every item has, a token's heads, comes first; see the kernel.
    let sure = geometry.num_qo_heads.div_ceil(rows);
    let key = key
        .with("Q_TYPE", number(geometry.q_dtype))
        .with("ROWS", rows as i64)
        .with("DEPTH", depth as i64)
        .with("WIDTH", width as i64)
        .with("STAGES", stages as i64)
        .with("MIN_BLOCKS", blocks)
        .with("PIECES", most.div_ceil(rows).next_multiple_of(sure) as i64);
    Some(Choice { key, threads: THREADS, shared: shared_bytes(rows, depth, width, stages) as u32 })
}

/// As `SHARED_BYTES` in `cu/latent.cuh`.
fn shared_bytes(rows: usize, depth: usize, width: usize, stages: usize) -> usize {
    let pitch = depth.max(width) * 2 + 16;
    (rows + stages * KEYS) * pitch + 4 * rows * KEYS * 4 + rows * (KEYS * 2 + 16) + 2 * rows * 4
}
