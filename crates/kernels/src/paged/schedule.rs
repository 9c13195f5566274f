//! Cutting a batch into items of about equal cost, and listing how their results are joined.
//!
//! Nothing chosen here changes a bit of any result: leaves and their tree are the row's own
//! ([`Family::leaf_keys`]), or with `schedule: throughput` the batch's (`balance`); how many leaves, heads or query tokens an item
//! takes is free.

use std::ops::Range;

use crate::mutant::planted;
use crate::plan::Schedule;
use crate::work::{DIRECT, Item, Member, Merge, NO_MASK, Part, Row, WorkList};
use crate::{Device, Error, Kernels, Result};

use super::cascade::Cascade;
use super::family::latent_tokens;
use super::{Family, Geometry, PageTable, Stored, Variant};

/// Items a worker, at which more cutting no longer improves the balance.
pub(super) const ITEMS_PER_WORKER: u64 = 8;

/// Pairs of a query vector and a key below which an item is not worth cutting.
const MIN_ITEM_COST: u64 = 1 << 13;

/// Query vectors whose states one decode item keeps: 64 of width 128 are 32 KiB a tree level.
const MAX_ITEM_STATES: usize = 64;

/// Bytes of one tile's keys and values that an item takes: half of a second-level cache, since half a tile is fetched while
/// the other half is computed.
const MAX_TILE_BYTES: usize = 512 << 10;

/// Keys of a tile of the decode family.
#[cfg(feature = "paged")]
const KEYS_AHEAD: usize = crate::cpu::paged::TILE;
/// Latents have one head, whose tiles fit.
#[cfg(not(feature = "paged"))]
const KEYS_AHEAD: usize = 1;

/// Query vectors a key head of one cascade item.
const MAX_CASCADE_LANES: usize = 64;

/// How a batch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScheduleOptions {
    /// Workers that the items are spread over, at least 1.
    pub workers: usize,
    /// Whether leaves that rows share are summed once for all of them.
    pub cascade: bool,
    /// Query tokens to pad the batch to; the padding is one more row without keys, which yields 0 and `-inf`.
    pub pad_to: Option<usize>,
    /// Who will execute the list.
    pub target: Target,
    /// Which kernels are to run it, on a device.
    pub kernels: Kernels,
    /// Whether leaves may be the batch's, which changes bits, rather than each row's own.
    pub schedule: Schedule,
    /// Multiprocessors of the device; of use to [`Schedule::Throughput`] alone.
    pub processors: u32,
}

/// Multiprocessors of a device that nobody asked: a large one.
pub(crate) const PROCESSORS: u32 = 132;

/// Who executes a work list, and so how finely it is cut. A row's leaves and families are the same for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Target {
    /// Threads of the host: [`ScheduleOptions::workers`] of them.
    #[default]
    Threads,
    /// Thread blocks of a device: each item is one key head, one row and one leaf; workers and cascade have no meaning.
    Blocks,
}

impl Target {
    /// Who executes on a device.
    pub fn of(device: Device) -> Target {
        if device == Device::Cpu { Target::Threads } else { Target::Blocks }
    }
}

impl Default for ScheduleOptions {
    fn default() -> ScheduleOptions {
        let target = Target::Threads;
        ScheduleOptions {
            workers: rayon::current_num_threads(),
            cascade: true,
            pad_to: None,
            target,
            kernels: Kernels::Auto,
            schedule: Schedule::Invariant,
            processors: PROCESSORS,
        }
    }
}

/// Key heads that one item takes at most.
pub(crate) fn most_heads(geometry: &Geometry) -> usize {
    let width = geometry.head_dim_qk + geometry.head_dim_vo;
    // Codes are widened before they are multiplied.
    let size = if geometry.is_fp8() { size_of::<f32>() } else { geometry.kv_dtype.size() };
    (MAX_TILE_BYTES / (KEYS_AHEAD * width * size)).clamp(1, geometry.num_kv_heads)
}

/// Checks a batch and writes its work list into `list`, whose memory is used again.
///
/// # Errors
/// What [`Geometry::check`], [`Variant::check`] and [`PageTable::check`] refuse; `list` is then as it was.
pub fn schedule(
    geometry: &Geometry,
    variant: &Variant,
    table: &PageTable<'_>,
    options: &ScheduleOptions,
    list: &mut WorkList,
) -> Result<()> {
    geometry.check()?;
    schedule_as(Stored::Heads, geometry, variant, table, options, list)
}

/// As [`schedule`], for pages that hold `stored`; the geometry was checked.
pub(crate) fn schedule_as(
    stored: Stored,
    geometry: &Geometry,
    variant: &Variant,
    table: &PageTable<'_>,
    options: &ScheduleOptions,
    list: &mut WorkList,
) -> Result<()> {
    variant.check()?;
    table.check(geometry)?;
    let tokens = table.num_tokens();
    let padded = options.pad_to.unwrap_or(tokens);
    if padded < tokens || padded > i32::MAX as usize {
        let why = format!("the batch has {tokens} query tokens");
        return Err(Error::Parameter { name: "pad_to", why, got: padded.to_string() });
    }
    list.start(stored, geometry, variant, padded);
    list.padded = padded > tokens;
    list.num_pages = table.num_pages;
    let rows = table.num_rows();
    list.pages.extend_from_slice(&table.kv_indices[..table.kv_indptr[rows] as usize]);
    for index in 0..rows {
        let mut row = table.row(geometry, stored, options.target, options.kernels, index);
        table.pack_mask(index, &mut row, &mut list.mask);
        list.rows.push(row);
    }
    if list.padded {
        list.rows.push(padding(stored, geometry, tokens, padded));
    }
    list.cut(options);
    Ok(())
}

/// The row that stands for query tokens `from..to`, which belong to nobody.
pub(crate) fn padding(stored: Stored, geometry: &Geometry, from: usize, to: usize) -> Row {
    let family = stored.family(geometry, to - from);
    Row {
        mask_begin: NO_MASK,
        q_begin: from as u32,
        q_len: (to - from) as u32,
        family: family as u32,
        leaf_keys: family.leaf_keys(to - from),
        ..Row::default()
    }
}

impl WorkList {
    /// Forgets the batch, not the memory, and begins another.
    pub(crate) fn start(&mut self, stored: Stored, geometry: &Geometry, variant: &Variant, tokens: usize) {
        crate::cpu::probe();
        self.rows.clear();
        self.items.clear();
        self.members.clear();
        self.merges.clear();
        self.parts.clear();
        self.pages.clear();
        self.mask.clear();
        (self.partial_len, self.total_cost) = (0, 0);
        (self.max_lanes, self.max_vectors, self.max_state_len, self.max_depth) = (0, 0, 0, 0);
        self.stored = stored;
        self.geometry = *geometry;
        self.variant = *variant;
        self.num_tokens = tokens;
        self.padded = false;
        self.num_pages = 0;
        (self.few, self.fused, self.tickets) = (0, 0, 0);
        self.tasks.clear();
        self.staged.forget();
    }

    /// Cuts the rows that are there into items.
    pub(crate) fn cut(&mut self, options: &ScheduleOptions) {
        self.target = options.target;
        self.kernels = options.kernels;
        self.fixed = options.pad_to.is_some();
        (self.schedule, self.processors) = (options.schedule, options.processors);
        super::balance::balance(self, options);
        if options.target == Target::Blocks {
            return super::cut_blocks::cut(self);
        }
        Scheduler { geometry: self.geometry, variant: self.variant, options: *options, list: self }.run();
    }

    /// Makes room for batches of so many rows and page ids, so that scheduling them allocates little or nothing.
    pub fn reserve(&mut self, rows: usize, pages: usize) {
        self.rows.reserve(rows.saturating_sub(self.rows.len()));
        self.pages.reserve(pages.saturating_sub(self.pages.len()));
        self.items.reserve((2 * rows).saturating_sub(self.items.len()));
        self.members.reserve((2 * rows).saturating_sub(self.members.len()));
    }

    /// Whether this is the list of this batch, compared in full. A custom mask counts as another batch, and so does a
    /// table that would be refused.
    pub fn is_for(&self, geometry: &Geometry, variant: &Variant, table: &PageTable<'_>) -> bool {
        is_for(self, Stored::Heads, geometry, variant, table)
    }
}

/// [`WorkList::is_for`], for pages that hold `stored`.
pub(crate) fn is_for(
    list: &WorkList,
    stored: Stored,
    geometry: &Geometry,
    variant: &Variant,
    table: &PageTable<'_>,
) -> bool {
    let rows = table.num_rows();
    let sizes = table.kv_indptr.len() == rows + 1
        && table.kv_last_page_len.len() == rows
        && table.kv_offset.is_none_or(|offsets| offsets.len() == rows)
        && table.page_start.is_none_or(|starts| starts.len() == rows)
        && table.mask.is_none()
        && table.num_pages == list.num_pages
        && list.rows.len() == rows + usize::from(list.padded);
    if !sizes || stored != list.stored || *geometry != list.geometry || *variant != list.variant {
        return false;
    }
    let used = usize::try_from(table.kv_indptr[rows]).unwrap_or(usize::MAX);
    table.kv_indices.get(..used) == Some(&list.pages[..])
        && table.check_rows(geometry).is_ok()
        && (0..rows)
            .all(|index| same_row(list, table.row(geometry, stored, list.target, list.kernels, index), index))
}

/// Whether a row of a table is the list's, whose leaves may have come of the whole batch.
pub(super) fn same_row(list: &WorkList, row: Row, index: usize) -> bool {
    let old = list.rows[index];
    let leaf_keys = if list.schedule == Schedule::Throughput { old.leaf_keys } else { row.leaf_keys };
    Row { leaf_keys, ..row } == old
}

/// Keys that some query among tokens `q_begin..q_end` of a row may see, as absolute positions.
pub(crate) fn visible(variant: &Variant, row: &Row, q_begin: u32, q_end: u32) -> (u32, u32) {
    if q_end <= q_begin {
        return (row.kv_begin, row.kv_begin);
    }
    let first = i64::from(row.kv_len) - i64::from(row.q_len) + i64::from(q_begin);
    let last = first + i64::from(q_end - q_begin) - 1;
    let lo = match variant.window_left {
        Some(left) => first.saturating_sub(left.min(u32::MAX as usize) as i64).max(row.kv_begin.into()),
        None => row.kv_begin.into(),
    };
    let lo = if variant.window_left.is_some() && planted("window-off-by-one") {
        (lo - 1).max(row.kv_begin.into())
    } else {
        lo
    };
    let after = if planted("causal-off-by-one") { last + 2 } else { last + 1 };
    let hi = if variant.causal { after.min(row.kv_len.into()) } else { row.kv_len.into() };
    if lo >= hi { (row.kv_begin, row.kv_begin) } else { (lo as u32, hi as u32) }
}

/// Leaves that hold the keys `lo..hi`.
pub(super) fn leaves(row: &Row, (lo, hi): (u32, u32)) -> (u32, u32) {
    if lo >= hi { (0, 0) } else { (lo / row.leaf_keys, (hi - 1) / row.leaf_keys + 1) }
}

/// Memory that planning uses and keeps for the next time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scratch {
    cascade: Cascade,
    shared: Vec<(u32, Part)>,
    pub(super) blocks: super::cut_blocks::Scratch,
    /// Rows of a batch that a list may become, with leaves of `schedule: throughput`.
    #[cfg(any(feature = "paged", feature = "mla"))]
    pub(super) balanced: Vec<Row>,
}

struct Scheduler<'a> {
    geometry: Geometry,
    variant: Variant,
    options: ScheduleOptions,
    list: &'a mut WorkList,
}

impl Scheduler<'_> {
    fn run(mut self) {
        let group = self.geometry.group();
        let heads = self.geometry.num_kv_heads as u64;
        let mut total = 0u64;
        let mut leaf_total = 0u64;
        for row in &self.list.rows {
            let (lo, hi) = visible(&self.variant, row, 0, row.q_len);
            let pairs = u64::from(row.q_len) * group as u64 * u64::from(hi - lo);
            total = total.saturating_add(pairs.saturating_mul(heads));
            let (a, b) = leaves(row, (lo, hi));
            leaf_total += u64::from((b - a).max(1));
        }
        self.list.total_cost = total;
        let workers = self.options.workers.clamp(1, crate::cpu::workers::MAX_WORKERS) as u64;
        let target = (total / (workers * ITEMS_PER_WORKER)).max(MIN_ITEM_COST);
        // Heads are taken together, so that pages are read as they lie, unless leaves alone cannot feed the workers.
        let mut head_cap = most_heads(&self.geometry);
        while head_cap > 1 && leaf_total * heads.div_ceil(head_cap as u64) < 4 * workers && total > 2 * target
        {
            head_cap = head_cap.div_ceil(2);
        }
        let mut cascade = std::mem::take(&mut self.list.scratch.cascade);
        cascade.clear();
        if self.options.cascade {
            cascade.find(&self.geometry, &self.variant, &self.list.rows, &self.list.pages);
        }
        // Parts of shared runs come first, in the order of their leaves; each row then adds its own.
        let mut shared = std::mem::take(&mut self.list.scratch.shared);
        shared.clear();
        for run in &cascade.runs {
            for members in cascade.members[run.member_begin..run.member_end].chunks(self.cascade_chunk()) {
                self.shared_run(members, run.leaf_begin, run.leaf_end, target, head_cap, &mut shared);
            }
        }
        shared.sort_unstable_by_key(|(row, part)| (*row, part.index << part.level));
        let mut at = 0;
        for index in 0..self.list.rows.len() {
            let row = self.list.rows[index];
            let from = at;
            while shared.get(at).is_some_and(|(of, _)| *of == index as u32) {
                at += 1;
            }
            if row.q_len == 0 {
                continue;
            }
            if row.family == Family::Decode as u32 || row.family == Family::Latent as u32 {
                self.decode_row(index as u32, &row, &shared[from..at], target, head_cap);
            } else {
                self.tile_row(index as u32, &row, target);
            }
        }
        (self.list.scratch.cascade, self.list.scratch.shared) = (cascade, shared);
        self.list.items.sort_unstable_by(|a, b| {
            b.cost
                .cmp(&a.cost)
                .then(a.member_begin.cmp(&b.member_begin))
                .then(a.kv_head_begin.cmp(&b.kv_head_begin))
        });
    }

    /// Members a cascade item may have: as many as keep its lanes within bounds, whatever their `q_len`.
    fn cascade_chunk(&self) -> usize {
        let few = [Family::Decode as u32, Family::Latent as u32];
        let most = self.list.rows.iter().filter(|row| few.contains(&row.family)).map(|row| row.q_len);
        let lanes = most.max().unwrap_or(1).max(1) as usize * self.geometry.group();
        (MAX_CASCADE_LANES / lanes).max(1)
    }

    /// Room for the state of `lanes` query vectors a key head, over all key heads; where it starts.
    fn reserve(&mut self, lanes: usize) -> u64 {
        let at = self.list.partial_len;
        let floats =
            crate::cpu::paged::state_len(lanes, self.geometry.head_dim_vo) * self.geometry.num_kv_heads;
        self.list.partial_len += floats as u64;
        at
    }

    fn push_items(&mut self, item: Item, heads_each: usize, lanes: usize, level: u32) {
        let heads_each = heads_each.max(1).min((MAX_ITEM_STATES / lanes.max(1)).max(1));
        let heads = self.geometry.num_kv_heads;
        let pairs = item.cost;
        for begin in (0..heads).step_by(heads_each) {
            let count = heads_each.min(heads - begin);
            let (kv_head_begin, kv_head_count) = (begin as u32, count as u32);
            self.list.items.push(Item { cost: pairs * count as u64, kv_head_begin, kv_head_count, ..item });
        }
        self.list.max_lanes = self.list.max_lanes.max(lanes);
        self.list.max_vectors = self.list.max_vectors.max(lanes * heads_each);
        let floats = heads_each * crate::cpu::paged::state_len(lanes, self.geometry.head_dim_vo);
        self.list.max_state_len = self.list.max_state_len.max(floats);
        self.list.max_depth = self.list.max_depth.max(level as usize + 2);
    }

    fn shared_run(
        &mut self,
        members: &[u32],
        from: u32,
        upto: u32,
        target: u64,
        head_cap: usize,
        shared: &mut Vec<(u32, Part)>,
    ) {
        let group = self.geometry.group();
        let lanes: usize =
            members.iter().map(|&row| self.list.rows[row as usize].q_len as usize * group).sum();
        let leaf_keys = u64::from(self.list.rows[members[0] as usize].leaf_keys);
        let heads = head_cap.min((MAX_ITEM_STATES / lanes.max(1)).max(1)) as u64;
        let cap = target / (leaf_keys * lanes as u64 * heads).max(1);
        let mut leaf = from;
        while leaf < upto {
            let level = node_level(leaf, cap).min((upto - leaf).ilog2());
            let member_begin = self.list.members.len() as u32;
            for &row in members {
                let row_lanes = self.list.rows[row as usize].q_len as usize * group;
                let partial = self.reserve(row_lanes);
                self.list.members.push(Member { partial, row, waits: 0 });
                shared.push((row, Part { partial, index: leaf >> level, level }));
            }
            let leaf_end = leaf + (1 << level);
            let cost = (lanes as u64 * leaf_keys) << level;
            let member_count = members.len() as u32;
            let item =
                Item { cost, member_begin, member_count, leaf_begin: leaf, leaf_end, ..Item::default() };
            self.push_items(item, head_cap, lanes, level);
            leaf = leaf_end;
        }
    }

    fn decode_row(&mut self, index: u32, row: &Row, shared: &[(u32, Part)], target: u64, head_cap: usize) {
        let lanes = row.q_len as usize * self.geometry.group();
        let keys = visible(&self.variant, row, 0, row.q_len);
        let (first, end) = leaves(row, keys);
        let first = shared.last().map_or(first, |(_, part)| (part.index + 1) << part.level);
        let heads = head_cap.min((MAX_ITEM_STATES / lanes.max(1)).max(1)) as u64;
        let cap = target / (u64::from(row.leaf_keys) * lanes as u64 * heads).max(1);
        let part_begin = self.list.parts.len();
        self.list.parts.extend(shared.iter().map(|(_, part)| *part));
        let cut = Cut { row: index, q_begin: 0, q_count: row.q_len, lanes, keys, cap, heads_each: head_cap };
        self.own_leaves(&cut, row.leaf_keys, first..end, shared.is_empty());
        self.join(&cut, part_begin);
    }

    /// Query tokens of an item of a row whose queries are spread over items.
    fn item_tokens(&self, row: &Row) -> u32 {
        #[cfg(feature = "tiles")]
        if self.list.stored == Stored::Blocks {
            let tokens = crate::cpu::paged::tile::even_tokens(row.q_len as usize, self.geometry.group());
            return tokens as u32;
        }
        #[cfg(feature = "tiles")]
        if row.family == Family::Tile as u32 {
            return crate::cpu::paged::tile::tile_tokens(row.q_len as usize, self.geometry.group()) as u32;
        }
        latent_tokens(&self.geometry).min(row.q_len as usize) as u32
    }

    fn tile_row(&mut self, index: u32, row: &Row, target: u64) {
        let group = self.geometry.group();
        let tokens = self.item_tokens(row);
        let mut q_begin = 0;
        while q_begin < row.q_len {
            let q_count = tokens.min(row.q_len - q_begin);
            let lanes = q_count as usize * group;
            let keys = visible(&self.variant, row, q_begin, q_begin + q_count);
            let (first, end) = leaves(row, keys);
            let cap = target / (u64::from(row.leaf_keys) * lanes as u64).max(1);
            let part_begin = self.list.parts.len();
            let cut = Cut { row: index, q_begin, q_count, lanes, keys, cap, heads_each: 1 };
            self.own_leaves(&cut, row.leaf_keys, first..end, true);
            self.join(&cut, part_begin);
            q_begin += q_count;
        }
    }

    /// Items for leaves that a row has to itself. When `alone` they are all there is, and a single one writes the
    /// final result; a row that sees nothing then gets an item without leaves, which writes 0 and `-inf`.
    fn own_leaves(&mut self, cut: &Cut, leaf_keys: u32, leaves: Range<u32>, alone: bool) {
        if leaves.is_empty() {
            if alone {
                self.own_item(cut, leaf_keys, leaves.start..leaves.start, 0, DIRECT);
            }
            return;
        }
        let mut leaf = leaves.start;
        while leaf < leaves.end {
            let level = node_level(leaf, cut.cap);
            let upto = (u64::from(leaf) + (1 << level)).min(leaves.end.into()) as u32;
            let partial = if alone && leaf == leaves.start && upto == leaves.end {
                DIRECT
            } else {
                let partial = self.reserve(cut.lanes);
                self.list.parts.push(Part { partial, index: leaf >> level, level });
                partial
            };
            self.own_item(cut, leaf_keys, leaf..upto, level, partial);
            leaf = upto;
        }
    }

    fn own_item(&mut self, cut: &Cut, leaf_keys: u32, leaves: Range<u32>, level: u32, partial: u64) {
        let member_begin = self.list.members.len() as u32;
        self.list.members.push(Member { partial, row: cut.row, waits: 0 });
        let (lo, hi) = (u64::from(cut.keys.0), u64::from(cut.keys.1));
        let begin = u64::from(leaves.start) * u64::from(leaf_keys);
        let end = u64::from(leaves.end) * u64::from(leaf_keys);
        let keys = end.min(hi).saturating_sub(begin.max(lo));
        let item = Item {
            cost: keys * cut.lanes as u64,
            member_begin,
            member_count: 1,
            q_begin: cut.q_begin,
            q_count: cut.q_count,
            leaf_begin: leaves.start,
            leaf_end: leaves.end,
            ..Item::default()
        };
        self.push_items(item, cut.heads_each, cut.lanes, level);
    }

    /// Lists the merges of the parts from `part_begin` on, if there are any.
    fn join(&mut self, cut: &Cut, part_begin: usize) {
        let part_count = (self.list.parts.len() - part_begin) as u32;
        if part_count == 0 {
            return;
        }
        let heads = self.geometry.num_kv_heads;
        for begin in (0..heads).step_by(cut.heads_each.max(1)) {
            self.list.merges.push(Merge {
                row: cut.row,
                q_begin: cut.q_begin,
                q_count: cut.q_count,
                kv_head_begin: begin as u32,
                kv_head_count: cut.heads_each.min(heads - begin) as u32,
                part_begin: part_begin as u32,
                part_count,
                reserved: 0,
            });
        }
    }
}

/// Some of a row's query tokens, and how their keys are to be cut.
struct Cut {
    row: u32,
    q_begin: u32,
    q_count: u32,
    lanes: usize,
    keys: (u32, u32),
    cap: u64,
    heads_each: usize,
}

/// Height of the largest node of the tree that starts at `leaf` and has at most `cap` leaves.
fn node_level(leaf: u32, cap: u64) -> u32 {
    let aligned = if leaf == 0 { 31 } else { leaf.trailing_zeros() };
    aligned.min(cap.max(1).ilog2()).min(31)
}
