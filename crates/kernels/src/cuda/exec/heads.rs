//! The tensor-core kernels over keys and values a head: `cu/decode.cu` for items of few query vectors over pages, `cu/tile.cu`
//! for tiles of queries over pages, segments and blocks, `cu/tile_wide.cu` for tiles over segments and pages on a Hopper. Of bf16 or f16, queries,
//! keys and values alike, up to 512 wide.
//!
//! What is chosen here follows from a list's shapes and the device, never from the batch: widths are padded to multiples of 64
//! by zeros in shared memory, and values wider than 256 are taken in two passes.

use crate::cpu::paged::Call;
use crate::cuda::Context;
use crate::cuda::jit::{Key, Unit};
use crate::cuda::tensor_map::{Boxes, Swizzle};
use crate::paged::{DECODE_LEAF, Stored, in_codes, in_halves};
use crate::work::WorkList;
use crate::{Kernels, Result, TensorRef};

use super::Choice;
use super::mods::Kinds;
use super::params::{Maps, Walk, number};
use super::plain::source;

/// The widest head.
const MOST_WIDTH: usize = 512;

/// The most value columns of a pass: a warp's sums of 16 rows fill half of its registers.
const MOST_VALUES: usize = 256;

/// The most of a decode kernel of 64 rows, where a warp has the scores of all keys of a tile beside its sums.
const MOST_VALUES_OF_64: usize = 128;

/// Shared memory that the system takes of each block.
const RESERVED: u32 = 1024;

/// The variant for a list's items of one kind; `None` where the plain kernel is to take them.
pub(super) fn choose(work: &WorkList, walk: Walk, mods: &Kinds, context: &Context) -> Option<Choice> {
    let geometry = &work.geometry;
    let codes = in_codes(geometry) && work.stored == Stored::Heads;
    if !(codes || in_halves(geometry)) || context.arch() < (8, 0) {
        return None;
    }
    let (width, values) = (geometry.head_dim_qk, geometry.head_dim_vo);
    let optin = context.shared_per_block_optin();
    let decodes = work.stored == Stored::Heads && walk == Walk::Few;
    // Keys of a tile that lies in one block are neighbours in the sequence, which mods of scores are told in fewer words; told key
    // by key, they leave a warp no registers for two times 16 rows.
    let changed = work.stored == Stored::Blocks && mods.change_scores();
    let whole = changed && geometry.page_size.is_multiple_of(64);
    let choice = match decodes {
        true if codes => {
            decode(width, values, geometry.group(), optin, true).or_else(|| codes_tile(width, values, optin))
        }
        true => few(width, values, geometry.group(), most_vectors(work), optin)
            .or_else(|| decode(width, values, geometry.group(), optin, false)),
        false if codes => codes_tile(width, values, optin),
        false if is_wide(work, context) => Wide::of(work).map(Wide::choice),
        false => tile(width, values, optin, if changed && !whole { 1 } else { 2 }),
    }?;
    let variant = &work.variant;
    let general = variant.logits_soft_cap.is_some() || variant.alibi;
    // Codes become bf16.
    let dtype = if codes { geometry.q_dtype } else { geometry.kv_dtype };
    let mut key = choice.key.with("KV_TYPE", number(dtype)).with("GENERAL", general.into());
    if codes {
        key = key.with("CODES", 1);
    }
    if !takes_tasks(&key) {
        key = key.with("SOURCE", source(work));
    }
    if work.stored == Stored::Blocks {
        key = mods.compile_into(key);
        if whole {
            key = key.with("WHOLE", 1);
        }
    }
    Some(Choice { key, ..choice })
}

/// Whether tiles of queries are for the Hopper's kernel: over segments, or pages of which boxes can have some slots.
fn is_wide(work: &WorkList, context: &Context) -> bool {
    let geometry = &work.geometry;
    let stored = match work.stored {
        Stored::Segments => true,
        Stored::Heads => in_halves(geometry) && slots_boxed(work) > 0,
        _ => false,
    };
    stored
        && work.kernels.settled() != Kernels::Mma
        && context.is_hopper()
        // Rows that no box has are gathered, which is slower than what others do.
        && [geometry.head_dim_qk, geometry.head_dim_vo].iter().all(|width| width.is_multiple_of(8))
        && Wide::of(work).is_some_and(|wide| geometry.group() <= wide.rows())
}

/// Slots of a page in a box: whole boxes make a tile and a page, and start where turns of their rows do. 0: there is no such number.
fn slots_boxed(work: &WorkList) -> usize {
    let slots = gcd(work.geometry.page_size, Wide::of(work).map_or(0, |wide| wide.keys));
    if slots.is_multiple_of(8) { slots } else { 0 }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// How the Hopper's kernel is built for heads of a padded width.
struct Wide {
    /// Of queries and keys.
    width: usize,
    /// Of values.
    values: usize,
    /// Groups of 64 query vectors.
    consumers: usize,
    /// Keys of a tile, which bits depend on.
    keys: usize,
    stages: usize,
    /// Items whose queries have room.
    query_stages: usize,
}

/// One for each pair of widths, over segments.
const WIDE: [Wide; 3] = [
    Wide { width: 64, values: 64, consumers: 3, keys: 96, stages: 4, query_stages: 1 },
    Wide { width: 128, values: 128, consumers: 2, keys: 128, stages: 2, query_stages: 1 },
    Wide { width: 256, values: 256, consumers: 2, keys: 80, stages: 2, query_stages: 1 },
];

/// Over pages, whose look-ups and masks take registers of a third group.
const WIDE_PAGES: [Wide; 3] = [
    Wide { width: 64, values: 64, consumers: 2, keys: 128, stages: 4, query_stages: 2 },
    Wide { width: 128, values: 128, consumers: 2, keys: 128, stages: 2, query_stages: 1 },
    Wide { width: 256, values: 256, consumers: 2, keys: 80, stages: 2, query_stages: 1 },
];

impl Wide {
    fn of(work: &WorkList) -> Option<&'static Wide> {
        let geometry = &work.geometry;
        let padded = [geometry.head_dim_qk, geometry.head_dim_vo].map(|width| width.next_multiple_of(64));
        let all = if work.stored == Stored::Heads { &WIDE_PAGES } else { &WIDE };
        all.iter().find(|wide| padded == [wide.width, wide.values])
    }

    /// Query vectors of a block.
    fn rows(&self) -> usize {
        64 * self.consumers
    }

    /// As `SHARED_BYTES` in `cu/tile_ring.cuh`: queries, tiles, marks of each tile and of queries, items for the consumers and for the producer.
    fn shared(&self) -> usize {
        let queries = self.query_stages * 2 * self.rows() * self.width;
        let tiles = self.stages * self.keys * 2 * (self.width + self.values);
        queries + tiles + 32 * self.stages + 16 * self.query_stages + 2 * 80 + 2 * 160
    }

    fn choice(&self) -> Choice {
        let key = Key::new(Unit::TILE_WIDE, "tile_wide")
            .with("WIDTH", self.width as i64)
            .with("VALUES", self.values as i64)
            .with("CONSUMERS", self.consumers as i64)
            .with("KEYS", self.keys as i64)
            .with("STAGES", self.stages as i64)
            .with("QUERY_STAGES", self.query_stages as i64);
        let threads = 128 * (self.consumers as u32 + 1);
        Choice { key, threads, shared: self.shared() as u32 }
    }
}

/// Whether a kernel's blocks take items as they come to them.
pub(super) fn takes_turns(key: &Key) -> bool {
    takes_maps(key)
}

/// Whether a kernel asks for boxes of heads, and so takes maps.
pub(super) fn takes_maps(key: &Key) -> bool {
    key.unit.name() == Unit::TILE_WIDE.name()
}

/// The maps for such a kernel, where there can be all of them, and the slots of a page in a box: where not, it gathers.
///
/// # Errors
/// A driver that refuses what [`Boxes`] allows.
pub(super) fn maps(call: &Call<'_>, context: &Context) -> Result<Option<(Maps, u32)>> {
    let Some(wide) = Wide::of(call.work) else { return Ok(None) };
    let slots = slots_boxed(call.work) as u32;
    let boxes = |tensor: &TensorRef<'_>, boxed: &[u32]| Boxes::of(tensor, boxed, Swizzle::B128).ok();
    let packed = |tensor: &TensorRef<'_>| boxes(tensor, &[wide.keys as u32, 1, LANES]);
    let pages = |tensor: &TensorRef<'_>| boxes(tensor, &[1, slots.max(1), 1, LANES]);
    let in_pages = call.work.stored == Stored::Heads;
    let tile = |tensor: &TensorRef<'_>| if in_pages { pages(tensor) } else { packed(tensor) };
    let group = call.geometry.group();
    let rows = [(wide.rows() / group) as u32, group as u32, LANES];
    let (Some(k), Some(v), Some(q)) = (tile(&call.k), tile(&call.v), boxes(&call.q, &rows)) else {
        return Ok(None);
    };
    #[cfg_attr(not(feature = "dense"), allow(unused_mut))]
    let mut maps =
        Maps { keys: k.map(context)?, values: v.map(context)?, queries: q.map(context)?, ..Maps::default() };
    #[cfg(feature = "dense")]
    if let Some([k, v]) = &call.extra.prefix {
        let of = |tensor| if call.work.segments.paged { pages(tensor) } else { packed(tensor) };
        let (Some(k), Some(v)) = (of(k), of(v)) else { return Ok(None) };
        (maps.key_prefix, maps.value_prefix) = (k.map(context)?, v.map(context)?);
    }
    Ok(Some((maps, slots)))
}

/// Lanes of a box.
const LANES: u32 = 64;

/// Tiles of queries over keys and values in e4m3.
fn codes_tile(width: usize, values: usize, optin: u32) -> Option<Choice> {
    let shape = Shape::of(width, values, MOST_VALUES)?;
    // Of three tiles, the scale of each key and value.
    let scales = |build: &Build| 3 * 8 * build.keys;
    let build =
        CODES.iter().find(|build| build.shared(&shape) + scales(build) <= share(optin, build.resident))?;
    let choice = build.choice(&shape);
    Some(Choice { shared: choice.shared + scales(build) as u32, ..choice })
}

/// Padded widths.
struct Shape {
    /// Of queries and keys.
    width: usize,
    /// Of the value columns of a pass.
    values: usize,
}

impl Shape {
    /// For heads of such widths, with up to `most` value columns a pass.
    fn of(width: usize, values: usize, most: usize) -> Option<Shape> {
        if width == 0 || values == 0 || width.max(values) > MOST_WIDTH {
            return None;
        }
        let passes = values.div_ceil(most);
        Some(Shape {
            width: width.next_multiple_of(64),
            values: values.div_ceil(passes).next_multiple_of(64),
        })
    }

    /// Bytes of `keys` keys and values in shared memory.
    fn stage(&self, keys: usize) -> usize {
        2 * keys * (self.width + self.values)
    }
}

/// Bytes that each of `resident` blocks of a multiprocessor may have.
fn share(optin: u32, resident: u32) -> usize {
    ((optin + RESERVED) / resident - RESERVED) as usize
}

/// Whether a kernel walks tasks, and joins what items leave by tickets.
pub(super) fn takes_tasks(key: &Key) -> bool {
    [Unit::DECODE, Unit::DECODE_FEW].iter().any(|unit| unit.name() == key.unit.name())
}

/// Query vectors of the largest item of few.
fn most_vectors(work: &WorkList) -> usize {
    let few = work.tasks.iter().map(|task| task.q_count as usize).max();
    few.unwrap_or(1) * work.geometry.group()
}

// A leaf's quarter is a warp's: whole steps of 32 keys.
const _: () = assert!(DECODE_LEAF.is_power_of_two() && DECODE_LEAF.is_multiple_of(4 * 32));

/// Up to 16 query vectors a row, `vectors` of the largest item, by the kernel that takes 8 or 16 of them at a time, as `few_ring.cuh`
/// lays its ring out: no bit depends on which, nor on how many stages there are. `None` where a warp's registers do not hold what
/// 16 of them need.
fn few(width: usize, values: usize, group: usize, vectors: usize, optin: u32) -> Option<Choice> {
    let shape = Shape::of(width, values, MOST_VALUES)?;
    let sixteen = vectors > 8 && shape.values <= 128;
    if group > 16 || group > 8 && !sixteen && shape.values > 128 {
        return None;
    }
    let columns = if sixteen { 16 } else { 8 };
    let keys = if shape.width + shape.values <= 128 { 4 * 32 } else { 4 * 16 };
    // What warps hand to each other at a round's end, and queries that registers do not hold.
    let joined = if sixteen { (8 << 10) + 2048 } else { (16 << 10) + 1024 };
    let held = columns / 8 * shape.width <= 128;
    let fixed = joined + if held { 0 } else { 2 * columns * shape.width };
    let (resident, stages) = (1..=2).rev().find_map(|resident| {
        let stages = share(optin, resident).checked_sub(fixed)? / shape.stage(keys);
        (stages >= if resident > 1 { 2 } else { 1 }).then_some((resident, stages.min(4)))
    })?;
    let key = Key::new(Unit::DECODE_FEW, "decode_few")
        .with("WIDTH", shape.width as i64)
        .with("VALUES", shape.values as i64)
        .with("COLUMNS", columns as i64)
        .with("STAGES", stages as i64)
        .with("RESIDENT", resident.into());
    Some(Choice { key, threads: 128, shared: (stages * shape.stage(keys) + fixed) as u32 })
}

/// Few query vectors: as many tiles in flight as fit, several blocks a multiprocessor where they do.
fn decode(width: usize, values: usize, group: usize, optin: u32, codes: bool) -> Option<Choice> {
    // A row of several query tokens has at most 16 query vectors a key head; see `Family::of`.
    let rows = if group <= 16 {
        16
    } else if group <= 32 {
        32
    } else {
        64
    };
    let shape = Shape::of(width, values, if rows == 64 { MOST_VALUES_OF_64 } else { MOST_VALUES })?;
    // The queries, and joined states, in the same place where registers hold the queries; and what the warps' largest scores and
    // sums take.
    let (queries, joined) = (2 * rows * shape.width, 16 << 10);
    let fixed = if shape.width <= 128 { queries.max(joined) } else { queries + joined } + 1024;
    // Codes come with scales, and have a tile as bf16 beside the ring.
    let (fixed, stage) = if codes {
        (fixed + shape.stage(64), shape.stage(64) / 2 + 2 * 64 * 4)
    } else {
        (fixed, shape.stage(64))
    };
    let most = if shape.width.max(shape.values) <= 64 && rows == 16 { 3 } else { 2 };
    let (resident, stages) = (1..=most).rev().find_map(|resident| {
        let stages = share(optin, resident).checked_sub(fixed)? / stage;
        (stages >= if resident > 1 { 2 } else { 1 }).then_some((resident, stages.min(4)))
    })?;
    let key = Key::new(Unit::DECODE, "decode")
        .with("WIDTH", shape.width as i64)
        .with("VALUES", shape.values as i64)
        .with("ROWS", rows as i64)
        .with("STAGES", stages as i64)
        .with("RESIDENT", resident.into());
    Some(Choice { key, threads: 128, shared: (stages * stage + fixed) as u32 })
}

/// How a block of the tile kernel is built.
struct Build {
    warps: usize,
    /// Times 16 query vectors of a warp.
    spread: usize,
    /// Keys of a tile.
    keys: usize,
    /// Blocks a multiprocessor.
    resident: u32,
}

/// The first that fits is taken.
const BUILDS: [Build; 5] = [
    Build { warps: 4, spread: 2, keys: 64, resident: 2 },
    Build { warps: 4, spread: 2, keys: 32, resident: 2 },
    Build { warps: 8, spread: 1, keys: 64, resident: 1 },
    Build { warps: 8, spread: 1, keys: 32, resident: 1 },
    Build { warps: 4, spread: 1, keys: 32, resident: 1 },
];

/// Over codes, whose scales take the registers of a second 16 rows.
const CODES: [Build; 3] = [
    Build { warps: 8, spread: 1, keys: 64, resident: 1 },
    Build { warps: 8, spread: 1, keys: 32, resident: 1 },
    Build { warps: 4, spread: 1, keys: 32, resident: 1 },
];

impl Build {
    fn choice(&self, shape: &Shape) -> Choice {
        let key = Key::new(Unit::TILE, "tile")
            .with("WIDTH", shape.width as i64)
            .with("VALUES", shape.values as i64)
            .with("WARPS", self.warps as i64)
            .with("SPREAD", self.spread as i64)
            .with("KEYS", self.keys as i64)
            .with("RESIDENT", self.resident.into());
        Choice { key, threads: 32 * self.warps as u32, shared: self.shared(shape) as u32 }
    }

    /// Bytes of shared memory: the queries, two tiles, and what `cu/tile.cu` calls its room.
    fn shared(&self, shape: &Shape) -> usize {
        let queries = 16 * self.warps * self.spread;
        let room = 3 * (20 * self.keys + self.keys / 4)
            + 16 * queries
            + 32 * self.warps
            + 20 * self.spread * 32 * self.warps
            + 544;
        2 * queries * shape.width + 2 * shape.stage(self.keys) + room
    }
}

/// Tiles of queries; a warp has up to `most` times 16 rows.
fn tile(width: usize, values: usize, optin: u32, most: usize) -> Option<Choice> {
    let shape = Shape::of(width, values, MOST_VALUES)?;
    let build = BUILDS.iter().find(|build| {
        // Two times 16 rows of sums 128 wide fill a warp's registers.
        let fits = build.spread == 1 || build.spread <= most && shape.values <= 128;
        fits && build.shared(&shape) <= share(optin, build.resident)
    })?;
    Some(build.choice(&shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_finds_a_kernel_that_fits() {
        // H200 and A100.
        for optin in [232_448, 166_912] {
            for width in 1..=MOST_WIDTH {
                for values in [1, 63, 64, 65, 128, 192, 256, 257, 384, MOST_WIDTH] {
                    for group in [1, 16, 17, 64] {
                        let choice = decode(width, values, group, optin, false).expect("a stage fits");
                        assert!(choice.shared <= optin, "{}: {} bytes", choice.key, choice.shared);
                        for vectors in [group, 16] {
                            match few(width, values, group, vectors, optin) {
                                Some(choice) => assert!(choice.shared <= optin, "{}", choice.key),
                                None => assert!(group > 8, "{width}, {values}"),
                            }
                        }
                        match decode(width, values, group, optin, true) {
                            Some(choice) => assert!(choice.shared <= optin, "{}", choice.key),
                            None => assert!(optin < 200_000 && width.max(values) > 128, "{width}, {values}"),
                        }
                    }
                    match tile(width, values, optin, 2) {
                        Some(choice) => assert!(choice.shared <= optin, "{}", choice.key),
                        None => assert!(optin < 200_000 && width > 256, "{width}, {values}"),
                    }
                }
            }
        }
        assert!(
            tile(MOST_WIDTH + 1, 1, 232_448, 2).is_none()
                && decode(1, MOST_WIDTH + 1, 1, 232_448, false).is_none()
        );
    }
}
