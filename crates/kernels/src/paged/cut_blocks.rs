//! Cutting a batch for a device: many small items, each for one thread block.
//!
//! An item is one row, one key head, one leaf, and at most a tile of query vectors; a row of one leaf is written by its item,
//! the others by a merge for each key head. Rows that see nothing have no item at all: a merge without parts writes their 0
//! and `-inf`. Leaves and families are the row's own; but for long leaves ([`Stored::leaf_keys`]) they are those that threads have.
//!
//! Items of the decode kernel take an aligned run of leaves, as long as leaves are many: their nodes of the tree are joined in
//! the block, and changes no bit. So do those of the Hopper's kernel over latents of few heads. Such items have a [`Task`] each. Of the
//! kernel of many heads they do where there are items enough; nodes that wait for a sibling lie in the workspace.

use crate::Kernels;
use crate::cpu::paged::STATE_LINE;
use crate::plan::Schedule;
use crate::work::{DIRECT, Item, Member, Merge, NO_MASK, Part, Row, Task, WorkList};

use super::family::{
    LATENT_LANES, LATENT_LEAVES, LATENT_LEAVES_AT_HAND, LATENT_TREE_HEADS, LATENT_WIDTH, in_codes, in_halves,
    latent_tokens, latents_by_tasks, latents_in_tensors,
};
use super::schedule::{leaves, visible};
use super::{Family, Stored};

/// Items of the decode kernel that a large device works on at a time: two blocks a multiprocessor.
const RESIDENT: u64 = 264;

/// Items of which as many read as fast as its memory gives; one item among fewer is no faster.
const SATURATING: u64 = 143;

/// Lanes of keys and values that one item could read while it starts and ends.
const DECODE_END: u64 = 97_280;

/// Most leaves of such an item, as a power of two.
const MOST_LEVEL: u32 = 5;

/// Nodes of a tree that a block joins at once, as a power of two; `cu/arrive.cuh` has the same.
const FAN: u32 = 4;

/// Query vectors (tokens times heads of a group) of an item of the tile family.
const TILE_ROWS: usize = 128;

/// The same of narrow heads for the Hopper's kernel over segments, which has registers for a third group of them.
const NARROW_ROWS: usize = 192;

/// Classes of cost: eight for each doubling.
const CLASSES: usize = 64 * 8;

/// Memory that cutting uses and keeps.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// Items as they are before heads are told apart.
    units: Vec<Item>,
    /// Beside them, in a list with tasks.
    tasks: Vec<Task>,
    order: Vec<u32>,
    /// Merges that the decode kernel does itself.
    fused: Vec<Merge>,
    /// Rows of many query vectors, and beside every row of the list the section that its tiles are in.
    tiled: Vec<u32>,
    sections: Vec<u32>,
    /// Where units of a section and class go.
    ends: Vec<u32>,
}

/// Bytes of keys and values that tiles in flight at once may read and find in a large device's second-level cache.
const CACHED: u64 = 32 << 20;

/// Most sections of a list.
const MOST_SECTIONS: u64 = 64;

/// Multiprocessors of a large device: as many items over latents are worked on at a time.
const MULTIPROCESSORS: u64 = 132;

/// Keys whose sums cost an item over latents as much as its end.
const LATENT_END: u64 = 64;

/// Of the kernel of many heads over latents: what the end of an item costs, its part of a merge where it leaves a state to one, and
/// each leaf that is joined within it. Keys whose sums take as long.
const WIDE_END: u64 = 128;
/// As before.
const WIDE_PART: u64 = 128;
/// As before.
const WIDE_JOIN: u64 = 160;

/// Leaves of an item over latents, as a power of two: of rows of few queries, and of others. Changes no bit: their states are joined
/// as a merge would join them.
fn latent_levels(list: &WorkList) -> (u32, u32) {
    if list.schedule == Schedule::Throughput {
        return (0, 0);
    }
    let wide = latents_in_leaves(list);
    if !wide && (!over_latents(list) || list.geometry.num_qo_heads > LATENT_TREE_HEADS) {
        return (0, 0);
    }
    #[cfg(all(test, feature = "cuda"))]
    if let Some(level) = forced::level() {
        return (level, if wide { level } else { 0 });
    }
    if wide {
        let level = wide_level(list);
        return (level, level);
    }
    (few_level(list), 0)
}

/// Whether items over latents are for the Hopper's kernel of many heads, and may have several leaves there.
fn latents_in_leaves(list: &WorkList) -> bool {
    let geometry = &list.geometry;
    // Nodes wait in the workspace as what a whole block has of them.
    let whole = geometry.num_qo_heads.is_multiple_of(LATENT_LANES)
        && [128, 256, LATENT_WIDTH].contains(&geometry.head_dim_vo);
    list.stored == Stored::Latents && list.kernels == Kernels::Wgmma && latents_in_tensors(geometry) && whole
}

/// Of that kernel.
fn wide_level(list: &WorkList) -> u32 {
    let pieces = list.geometry.num_qo_heads.div_ceil(LATENT_LANES) as u64;
    let mut items = [0u64; LATENT_LEAVES as usize + 1];
    let mut longest = [(0u64, 0u64); LATENT_LEAVES as usize + 1];
    let mut parts = [false; LATENT_LEAVES as usize + 1];
    for row in &list.rows {
        let tokens = if is_few(row) { row.q_len } else { cut_tokens(list) as u32 };
        let (first, end) = leaves(row, visible(&list.variant, row, 0, row.q_len));
        if first >= end {
            continue;
        }
        for level in 0..items.len() {
            let nodes = u64::from(((end - 1) >> level) - (first >> level) + 1);
            items[level] += nodes * u64::from(row.q_len.div_ceil(tokens));
            let most = u64::from((end - first).min(1 << level));
            longest[level] = longest[level].max((most * u64::from(row.leaf_keys.min(row.kv_len)), most));
            parts[level] |= nodes > 1;
        }
    }
    let time = |level: u32| {
        let level = level as usize;
        let (keys, leaves) = longest[level];
        let ends = WIDE_END + leaves * WIDE_JOIN + if parts[level] { WIDE_PART } else { 0 };
        (items[level] * pieces).div_ceil(MULTIPROCESSORS) * (keys + ends)
    };
    (0..=LATENT_LEAVES).rev().min_by_key(|&level| time(level)).unwrap_or(0)
}

/// Of the kernel of few heads.
fn few_level(list: &WorkList) -> u32 {
    let geometry = &list.geometry;
    let heads = geometry.num_qo_heads;
    // Items of a round are worked on at a time; what the last round leaves idle is worth a few more ends.
    let mut items = [0u64; LATENT_LEAVES as usize + 1];
    let mut longest = [0u64; LATENT_LEAVES as usize + 1];
    let mut most = if geometry.head_dim_vo == LATENT_WIDTH { LATENT_LEAVES } else { LATENT_LEAVES_AT_HAND };
    for row in list.rows.iter().filter(|row| is_few(row)) {
        // The kernel that joins has room for no more query vectors.
        if row.q_len as usize * heads > LATENT_TREE_HEADS {
            return 0;
        }
        let (first, end) = leaves(row, visible(&list.variant, row, 0, row.q_len));
        if first > 0 || (row.q_len as usize * heads) < LATENT_TREE_HEADS {
            most = most.min(LATENT_LEAVES_AT_HAND);
        }
        for (level, (items, longest)) in
            items.iter_mut().zip(&mut longest).enumerate().filter(|_| first < end)
        {
            *items += u64::from(((end - 1) >> level) - (first >> level) + 1);
            *longest = (*longest).max(u64::from((end - first).min(1 << level)) * u64::from(row.leaf_keys));
        }
    }
    let time = |level: u32| {
        let level = level as usize;
        items[level].div_ceil(MULTIPROCESSORS) * (longest[level] + LATENT_END)
    };
    (0..=most).rev().min_by_key(|&level| time(level)).unwrap_or(0)
}

/// Whether items of few query vectors are for the kernel over latents that takes tasks.
fn over_latents(list: &WorkList) -> bool {
    list.stored == Stored::Latents && latents_by_tasks(&list.geometry, list.target, list.kernels)
}

/// Whether a row's items have few query vectors.
fn is_few(row: &Row) -> bool {
    row.family == Family::Decode as u32 || row.family == Family::Latent as u32
}

/// Where an item of a cost stands: dearer ones first, those of about the same cost in the order of rows.
fn class(cost: u64) -> usize {
    let cost = cost.max(8);
    let top = cost.ilog2();
    let eighth = (cost >> (top - 3)) & 7;
    CLASSES - 1 - (top as usize * 8 + eighth as usize)
}

/// Cuts the rows that are there into items and merges.
pub(super) fn cut(list: &mut WorkList) {
    let mut scratch = std::mem::take(&mut list.scratch.blocks);
    scratch.units.clear();
    scratch.tasks.clear();
    scratch.fused.clear();
    let (level, latents) = (level(list), latent_levels(list));
    for index in 0..list.rows.len() {
        row(list, index, level, latents, &mut scratch);
    }
    list.merges.extend_from_slice(&scratch.fused);
    list.fused = scratch.fused.len();
    let heads = list.geometry.num_kv_heads;
    // Few query vectors first, then section by section, then by cost: a counting sort, which is stable.
    let sections = section(list, &mut scratch);
    scratch.ends.clear();
    scratch.ends.resize((1 + sections) * CLASSES, 0);
    let mut ends = std::mem::take(&mut scratch.ends);
    let place = |list: &WorkList, scratch: &Scratch, unit: &Item| {
        let row = list.members[unit.member_begin as usize].row as usize;
        let before = if is_few(&list.rows[row]) { 0 } else { 1 + scratch.sections[row] as usize };
        class(unit.cost) + before * CLASSES
    };
    for unit in &scratch.units {
        ends[place(list, &scratch, unit)] += 1;
    }
    let few: u32 = ends[..CLASSES].iter().sum();
    let mut begin = 0;
    for end in &mut ends {
        begin += std::mem::replace(end, begin);
    }
    scratch.order.clear();
    scratch.order.resize(scratch.units.len(), 0);
    for index in 0..scratch.units.len() {
        let at = &mut ends[place(list, &scratch, &scratch.units[index])];
        scratch.order[*at as usize] = index as u32;
        *at += 1;
    }
    scratch.ends = ends;
    list.items.reserve(scratch.units.len() * heads);
    for &unit in &scratch.order {
        let unit = scratch.units[unit as usize];
        list.items.extend((0..heads as u32).map(|head| Item {
            kv_head_begin: head,
            kv_head_count: 1,
            ..unit
        }));
    }
    list.few = few as usize * heads;
    if level.is_some() || over_latents(list) {
        let stages = |task: &Task| tickets(task.leaf_first, task.leaf_end, task.level);
        for &unit in &scratch.order[..few as usize] {
            let task = scratch.tasks[unit as usize];
            let each = if level.is_some() { stages(&task) } else { 0 };
            list.tasks.extend((0..heads as u32).map(|head| Task {
                head,
                ticket: task.ticket + head * each,
                ..task
            }));
        }
    }
    list.scratch.blocks = scratch;
    if list.schedule == Schedule::Throughput && matches!(list.stored, Stored::Heads | Stored::Latents) {
        // Batches to come of as many rows may be cut more finely: scratch is theirs too, so that it never grows.
        list.partial_len += super::balance::most_floats(list, list.rows.len());
    }
}

/// Puts rows of many query vectors into sections, longest rows first, and says how many there are: tiles of a section are worked on
/// together, so that those of equal cost, which come one after the other, find keys in the second-level cache that another tile has read.
/// A row whose keys and values are more than it holds has a section of its own.
fn section(list: &WorkList, scratch: &mut Scratch) -> usize {
    scratch.tiled.clear();
    scratch.sections.clear();
    scratch.sections.resize(list.rows.len(), 0);
    if !matches!(list.stored, Stored::Heads | Stored::Segments) {
        return 1;
    }
    let rows = &list.rows;
    scratch.tiled.extend((0..rows.len() as u32).filter(|&row| !is_few(&rows[row as usize])));
    let geometry = &list.geometry;
    let token =
        geometry.num_kv_heads * (geometry.head_dim_qk + geometry.head_dim_vo) * geometry.kv_dtype.size();
    let bytes = |row: u32| {
        u64::from(rows[row as usize].kv_len.saturating_sub(rows[row as usize].kv_begin)) * token as u64
    };
    let all: u64 = scratch.tiled.iter().map(|&row| bytes(row)).sum();
    let most = CACHED.max(all.div_ceil(MOST_SECTIONS / 2));
    scratch.tiled.sort_unstable_by_key(|&row| (class(u64::from(rows[row as usize].kv_len)), row));
    let (mut index, mut held) = (0, 0);
    for &row in &scratch.tiled {
        let own = bytes(row);
        if held > 0 && held + own > most {
            (index, held) = (index + 1, 0);
        }
        held += own;
        scratch.sections[row as usize] = index;
    }
    index as usize + 1
}

/// Query tokens of an item of the families whose rows are spread over items.
pub(crate) fn cut_tokens(list: &WorkList) -> usize {
    match list.stored {
        Stored::Latents => latent_tokens(&list.geometry),
        _ => (tile_rows(list) / list.geometry.group().max(1)).max(1),
    }
}

/// Query vectors of an item of the tile family. Changes no bit.
fn tile_rows(list: &WorkList) -> usize {
    let widths = [list.geometry.head_dim_qk, list.geometry.head_dim_vo];
    let narrow = widths.iter().all(|&width| width <= 64 && width.is_multiple_of(8));
    let segments = list.stored == Stored::Segments;
    if narrow && segments && list.kernels == Kernels::Wgmma { NARROW_ROWS } else { TILE_ROWS }
}

/// Leaves, as a power of two, that an item of the decode kernel takes; `None` for a list that it does not take.
fn level(list: &WorkList) -> Option<u32> {
    if list.stored != Stored::Heads || !(in_halves(&list.geometry) || in_codes(&list.geometry)) {
        return None;
    }
    // Wide heads of codes are for another kernel where a block has less memory than a Hopper's.
    let width = list.geometry.head_dim_qk.max(list.geometry.head_dim_vo);
    if list.schedule == Schedule::Throughput || in_codes(&list.geometry) && width > 128 {
        return Some(0);
    }
    #[cfg(all(test, feature = "cuda"))]
    if let Some(level) = forced::level() {
        return Some(level);
    }
    Some(decode_level(list))
}

/// Of the decode kernel: the level whose rounds of resident items take the least time. Memory binds a full round, its own keys an item
/// that has the device nearly for itself; `docs/perf-notes.md` has what was measured beside this.
fn decode_level(list: &WorkList) -> u32 {
    let geometry = &list.geometry;
    let heads = geometry.num_kv_heads as u64;
    let end = DECODE_END / (geometry.head_dim_qk + geometry.head_dim_vo).max(1) as u64;
    let mut nodes = [0u64; MOST_LEVEL as usize + 1];
    let mut longest = [0u64; MOST_LEVEL as usize + 1];
    let mut keys = 0u64;
    for row in list.rows.iter().filter(|row| is_few(row)) {
        let (first, last) = leaves(row, visible(&list.variant, row, 0, row.q_len));
        if first >= last {
            continue;
        }
        // Whole leaves, so that a row which grows within its last one is cut as it was.
        let own = u64::from(last - first) * u64::from(row.leaf_keys);
        keys = own.saturating_add(keys);
        for (level, (nodes, longest)) in nodes.iter_mut().zip(&mut longest).enumerate() {
            *nodes += u64::from(((last - 1) >> level) - (first >> level) + 1);
            *longest = own.min(u64::from(row.leaf_keys) << level).max(*longest);
        }
    }
    let time = |level: u32| {
        let items = (nodes[level as usize] * heads).max(1);
        let average = keys.saturating_mul(heads) / items;
        // What as many take where memory binds.
        let bound = |items: u64| average.saturating_mul(items) / SATURATING;
        let (full, rest) = (items / RESIDENT, items % RESIDENT);
        // The longest come first.
        let alone = if full == 0 { longest[level as usize] } else { average };
        let last = if rest > 0 { bound(rest).max(alone).saturating_add(end) } else { 0 };
        bound(RESIDENT).saturating_add(end).saturating_mul(full).saturating_add(last)
    };
    (0..=MOST_LEVEL).min_by_key(|&level| time(level)).unwrap_or(0)
}

/// Tickets of one key head of a row whose visible leaves are `first..end`, with items of `1 << level` leaves: one for each node that
/// up to `1 << FAN` children are joined to.
fn tickets(first: u32, end: u32, mut level: u32) -> u32 {
    let nodes = |level: u32| ((end - 1) >> level) - (first >> level) + 1;
    let mut all = 0;
    while nodes(level) > 1 {
        level += FAN;
        all += nodes(level);
    }
    all
}

fn row(list: &mut WorkList, index: usize, level: Option<u32>, latents: (u32, u32), scratch: &mut Scratch) {
    let row = list.rows[index];
    let group = list.geometry.group();
    let heads = list.geometry.num_kv_heads;
    let tokens = if is_few(&row) { row.q_len } else { cut_tokens(list) as u32 };
    let mut q_begin = 0;
    while q_begin < row.q_len {
        let q_count = tokens.min(row.q_len - q_begin);
        let lanes = q_count as usize * group;
        let (lo, hi) = visible(&list.variant, &row, q_begin, q_begin + q_count);
        let (first, end) = leaves(&row, (lo, hi));
        let part_begin = list.parts.len() as u32;
        let state = crate::cpu::paged::state_len(lanes, list.geometry.head_dim_vo) * heads;
        let base = list.partial_len;
        if end - first > 1 {
            list.partial_len += u64::from(end - first) * state as u64;
        }
        let level = level.filter(|_| is_few(&row));
        let height = level.unwrap_or(if is_few(&row) { latents.0 } else { latents.1 });
        let nodes = if first < end { first >> height..((end - 1) >> height) + 1 } else { 0..0 };
        let single = nodes.len() == 1;
        for node in nodes.clone() {
            let (leaf_begin, leaf_end) = (first.max(node << height), end.min((node + 1) << height));
            let partial = if single {
                DIRECT
            } else {
                let at = base + u64::from(leaf_begin - first) * state as u64;
                list.parts.push(Part { partial: at, index: node, level: height });
                at
            };
            let begin = u64::from(leaf_begin) * u64::from(row.leaf_keys);
            let stop = u64::from(leaf_end) * u64::from(row.leaf_keys);
            let (lo, hi) = (begin.max(lo.into()), stop.min(hi.into()));
            let cost = (hi - lo) * lanes as u64;
            list.total_cost = list.total_cost.saturating_add(cost.saturating_mul(heads as u64));
            let member_begin = list.members.len() as u32;
            // Behind the first leaf's state, where the item leaves its own.
            let waits = (base + u64::from(leaf_begin + 1 - first) * state as u64) / STATE_LINE as u64;
            list.members.push(Member { partial, row: index as u32, waits: waits as u32 });
            let of = Item {
                cost,
                member_begin,
                member_count: 1,
                q_begin,
                q_count,
                leaf_begin,
                leaf_end,
                ..Item::default()
            };
            scratch.units.push(of);
            scratch.tasks.push(Task {
                lo: lo as u32,
                hi: hi as u32,
                page_begin: row.page_begin,
                kv_offset: row.kv_offset,
                head: 0,
                mask_words: if row.mask_begin == NO_MASK { 0 } else { row.mask_words },
                leaf_keys: row.leaf_keys,
                leaf_first: first,
                leaf_end: end,
                ticket: list.tickets as u32,
                token: row.q_begin + q_begin,
                q_begin,
                q_count,
                level: height,
                mask_begin: row.mask_begin,
                state: base,
                first: i64::from(row.kv_len) - i64::from(row.q_len) + i64::from(q_begin),
            });
        }
        if !single {
            let (row, part_count) = (index as u32, nodes.len() as u32);
            let of =
                Merge { row, q_begin, q_count, kv_head_count: 1, part_begin, part_count, ..Merge::default() };
            let merges = (0..heads as u32).map(|head| Merge { kv_head_begin: head, ..of });
            if level.is_some() && part_count > 0 {
                list.tickets += heads * tickets(first, end, height) as usize;
                scratch.fused.extend(merges);
            } else {
                list.merges.extend(merges);
            }
        }
        list.max_lanes = list.max_lanes.max(lanes);
        q_begin += q_count;
    }
}

/// Tests say how many leaves an item has.
#[cfg(all(test, feature = "cuda"))]
pub(crate) mod forced {
    use std::cell::Cell;

    thread_local! {
        static LEVEL: Cell<Option<u32>> = const { Cell::new(None) };
    }

    pub(super) fn level() -> Option<u32> {
        LEVEL.get()
    }

    /// What `run` cuts on this thread has items of up to two to the `level` leaves.
    #[allow(dead_code, reason = "trials are there with every feature alone")]
    pub(crate) fn with_level<R>(level: u32, run: impl FnOnce() -> R) -> R {
        LEVEL.set(Some(level));
        let result = run();
        LEVEL.set(None);
        result
    }
}

#[cfg(all(test, feature = "paged", feature = "mla"))]
mod tests {
    use crate::DType;
    use crate::paged::renew::tests::Batch;
    use crate::paged::{Geometry, ScheduleOptions, Target, Variant, schedule};

    use super::*;

    /// Items of a batch of rows of one query token over latents on a Hopper, and the leaves of the longest.
    fn items(kv_lens: &[usize], heads: usize) -> (usize, u32) {
        let options =
            ScheduleOptions { target: Target::Blocks, kernels: Kernels::Wgmma, ..ScheduleOptions::default() };
        let list = Batch::of(kv_lens, 1, 0).over_latents(heads, &options);
        let longest = list.items.iter().map(|item| item.leaf_end - item.leaf_begin).max().unwrap_or(0);
        (list.items.len(), longest)
    }

    #[test]
    fn leaves_under_many_heads_are_joined_where_items_fill_a_device_anyway() {
        // Blocks of 64 heads: whole rows of 128 heads, halves of rows of 64.
        assert_eq!(items(&[16384; 64], 128), (64, 4));
        assert_eq!(items(&[16384; 64], 64), (128, 2));
        assert_eq!(items(&[4096; 128], 64), (128, 2));
        assert_eq!(items(&[4096; 64], 128), (64, 2));
        // Else a leaf each, so that a row alone is spread as far as it can be.
        assert_eq!(items(&[4096; 64], 64), (128, 1));
        assert_eq!(items(&[4096; 16], 128), (32, 1));
        assert_eq!(items(&[16384], 128), (4, 1));
        // Heads that are no whole blocks leave their states to a merge.
        assert_eq!(items(&[16384; 64], 80), (256, 1));
    }

    /// Leaves of the longest item of a batch of rows of one query token, on a device with matrix units.
    fn joined(kv_lens: &[usize], heads: (usize, usize)) -> u32 {
        let geometry = Geometry {
            num_qo_heads: heads.0,
            num_kv_heads: heads.1,
            head_dim_qk: 128,
            head_dim_vo: 128,
            page_size: 16,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        let options = ScheduleOptions { target: Target::Blocks, ..ScheduleOptions::default() };
        let (batch, mut list) = (Batch::of(kv_lens, 1, 0), WorkList::default());
        schedule(&geometry, &Variant::causal(128), &batch.table(), &options, &mut list).unwrap();
        list.items.iter().map(|item| item.leaf_end - item.leaf_begin).max().unwrap_or(0)
    }

    #[test]
    fn items_of_the_decode_kernel_fill_whole_rounds_of_a_device() {
        // As on an H200: the fastest of what was timed.
        assert_eq!(joined(&[8192], (32, 8)), 1);
        assert_eq!(joined(&[8192; 3], (32, 8)), 2);
        assert_eq!(joined(&[11_223], (32, 32)), 4);
        assert_eq!(joined(&[8192; 3], (32, 32)), 8);
        assert_eq!(joined(&[179_568], (32, 8)), 16);
        assert_eq!(joined(&[8192; 16], (32, 8)), 8);
        assert_eq!(joined(&[8192; 64], (64, 8)), 16);
        // Items that are resident all at once have no round that is nearly empty.
        assert_eq!(joined(&[131_072; 3], (32, 8)), 32);
    }
}
