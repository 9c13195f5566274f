//! Leaves of `schedule: throughput`: as many and as long as the batch at hand asks for.
//!
//! An invariant row's leaves are its own, so that a batch's items are as uneven as they come, and some join several leaves. Here
//! the whole batch decides, as FlashInfer's planner does (`include/flashinfer/attention/scheduler.cuh`): a device's rows
//! of few queries are cut into stretches of about one length, of which there are as many as its multiprocessors hold at once, or
//! twice or thrice as many; a stretch is one leaf, which nothing is joined within, and a row that is not cut is one leaf.
//! For threads a leaf is what one item takes. What a leaf is changes its row's bits; everything else of a list stands.
//!
//! The answer follows from the batch and the device alone, never from what was planned before, so that the same batch has the
//! same bits every time.

use crate::mutant::planted;
use crate::plan::Schedule;
use crate::work::{ONE_LEAF, Row, WorkList};

use super::cut_blocks::cut_tokens;
use super::schedule::{ITEMS_PER_WORKER, visible};
use super::{
    APPEND_LEAF, APPEND_QUERIES, DECODE_LANES, Family, LATENT_LANES, ScheduleOptions, Stored, Target,
};

/// Keys of a tile of the kernels, at a multiple of which a leaf ends.
const TILE: u32 = 64;

/// Fewest keys of a leaf on a device, before those of a row are made alike: shorter ones cost more to join than they spread; see `docs/perf-notes.md`.
const LEAST: u32 = 256;

/// What the end of an item costs a block, in keys that it could have read meanwhile.
const END: u64 = 96;

/// Times that a device is filled beyond what whole rows would take, which are tried.
const WAVES: u64 = 3;

/// Query heads of latents that a block takes.
const LATENT_BLOCK: usize = 64;

/// Whether a row's queries are few, so that its keys are what is spread over a device.
fn is_few(row: &Row) -> bool {
    row.family == Family::Decode as u32 || row.family == Family::Latent as u32
}

/// Gives the rows that are there the leaves that suit them all; nothing for an invariant schedule.
pub(super) fn balance(list: &mut WorkList, options: &ScheduleOptions) {
    if options.schedule == Schedule::Invariant && !planted("invariant-looks-at-the-batch") {
        return;
    }
    let mut rows = std::mem::take(&mut list.rows);
    balance_rows(list, &mut rows, options);
    list.rows = rows;
}

/// The same for rows of a batch that `list` may become.
pub(super) fn balance_rows(list: &WorkList, rows: &mut [Row], options: &ScheduleOptions) {
    match (options.target, list.stored) {
        (Target::Blocks, Stored::Heads | Stored::Latents) => for_blocks(list, rows, options),
        (Target::Threads, Stored::Heads | Stored::Latents) => for_threads(list, rows, options),
        // Rows of many queries make tiles enough.
        _ => {}
    }
}

/// Blocks that take rows of few queries, and that a device runs at once, for each key head.
fn slots(list: &WorkList, processors: u32) -> u64 {
    let geometry = &list.geometry;
    let (each, resident) = match list.stored {
        Stored::Latents => (geometry.num_qo_heads.div_ceil(LATENT_BLOCK), 1),
        _ => {
            // As `cuda/exec/heads.rs` builds them.
            let width = geometry.head_dim_qk.max(geometry.head_dim_vo);
            (geometry.num_kv_heads, if width <= 128 { 2 } else { 1 })
        }
    };
    (u64::from(processors) * resident / each as u64).max(1)
}

/// Stretches that rows of few queries of any batch of so many rows are cut into at most.
pub(crate) fn most_units(list: &WorkList, rows: usize) -> usize {
    let slots = slots(list, list.processors);
    (slots * ((rows as u64).div_ceil(slots) + WAVES - 1)) as usize
}

/// Floats of states that any batch of so many rows leaves behind, of rows of few queries.
pub(super) fn most_floats(list: &WorkList, rows: usize) -> u64 {
    let geometry = &list.geometry;
    let group = geometry.group();
    let lanes = match list.stored {
        Stored::Latents => group.max(LATENT_LANES / group.max(1) * group),
        _ => group.max(DECODE_LANES),
    };
    let state = crate::cpu::paged::state_len(lanes, geometry.head_dim_vo) * geometry.num_kv_heads;
    most_units(list, rows) as u64 * state as u64
}

fn for_blocks(list: &WorkList, rows: &mut [Row], options: &ScheduleOptions) {
    let slots = slots(list, options.processors);
    let keys = |row: &Row| visible(&list.variant, row, 0, row.q_len);
    let few = || rows.iter().filter(|row| is_few(row)).map(keys).filter(|(lo, hi)| lo < hi);
    let (whole, longest) = few().fold((0u64, 0), |(n, most), (_, hi)| (n + 1, most.max(hi)));
    let total: u64 = few().map(|(lo, hi)| u64::from(hi - lo)).sum();
    let units = |leaf: u32| -> u64 { few().map(|(lo, hi)| u64::from((hi - 1) / leaf - lo / leaf + 1)).sum() };
    // How long the busiest block takes, in keys: no less than the longest item, nor than its share of all, which is whole items.
    let takes = |leaf: u32, units: u64| {
        let item = u64::from(leaf.min(longest)) + END;
        item.max(units.div_ceil(slots) * (total.div_ceil(units.max(1)) + END))
    };
    let mut best = (ONE_LEAF, takes(ONE_LEAF, whole));
    if whole > 0 && !planted("throughput-never-cuts") {
        let least = whole.div_ceil(slots);
        for waves in least..least + WAVES {
            let budget = waves * slots;
            let leaf = shortest(total, longest, budget, &units);
            let taken = takes(leaf, units(leaf));
            if taken < best.1 {
                best = (leaf, taken);
            }
        }
    }
    let leaf = best.0;
    let tiles: u64 = rows.iter().filter(|row| is_spread(row)).map(|row| u64::from(row.q_len)).sum();
    let cut = cut_tokens(list) as u64;
    let enough = tiles / cut >= slots;
    for row in rows {
        if is_few(row) {
            row.leaf_keys = even(leaf, keys(row));
        } else if enough && is_spread(row) {
            row.leaf_keys = ONE_LEAF;
        }
    }
}

/// Whether a row of tiles of queries has its keys cut for want of tiles.
fn is_spread(row: &Row) -> bool {
    !is_few(row) && row.q_len > 0 && row.q_len as usize <= APPEND_QUERIES
}

/// Lengths are so coarse that a row which grows by a token seldom has another.
fn granule(leaf: u32) -> u32 {
    1 << (leaf / 16).max(TILE).ilog2()
}

fn rounded(leaf: u32) -> u32 {
    leaf.next_multiple_of(granule(leaf))
}

/// The shortest leaf of which there are at most `budget`.
fn shortest(total: u64, longest: u32, budget: u64, units: &impl Fn(u32) -> u64) -> u32 {
    let mut low = rounded((total.div_ceil(budget) as u32).clamp(LEAST, ONE_LEAF / 2));
    if units(low) <= budget {
        return low;
    }
    // One leaf is long enough: as many as there are rows fit any budget.
    let mut high = longest.max(low);
    while high - low > granule(low) {
        let middle = low + (high - low) / 2;
        if units(middle) <= budget { high = middle } else { low = middle }
    }
    let leaf = rounded(high);
    if units(leaf) <= budget { leaf } else { ONE_LEAF }
}

/// A row's leaf: as many as there would be, but alike.
fn even(leaf: u32, (lo, hi): (u32, u32)) -> u32 {
    if hi <= leaf || lo >= hi {
        return ONE_LEAF;
    }
    if lo >= leaf {
        return leaf;
    }
    let alike = rounded(hi.div_ceil(hi.div_ceil(leaf)));
    alike.min(leaf)
}

/// One length for all rows, so that rows that share keys still share leaves: what one item takes.
fn for_threads(list: &WorkList, rows: &mut [Row], options: &ScheduleOptions) {
    if options.cascade && shares_pages(list, rows) {
        return;
    }
    let few = || rows.iter().filter(|row| is_few(row));
    let total: u64 = few()
        .map(|row| {
            let (lo, hi) = visible(&list.variant, row, 0, row.q_len);
            u64::from(hi - lo)
        })
        .sum();
    let Some(leaf) = few().map(|row| row.leaf_keys).max() else { return };
    let items = options.workers.max(1) as u64 * ITEMS_PER_WORKER;
    // Sums over more keys lose digits, and have nothing left to gain.
    let share = (total / items).clamp(leaf.into(), APPEND_LEAF.max(leaf).into()).next_power_of_two();
    for row in rows.iter_mut().filter(|row| is_few(row)) {
        row.leaf_keys = share as u32;
    }
}

/// Whether two rows begin with the same page.
fn shares_pages(list: &WorkList, rows: &[Row]) -> bool {
    let listed = rows.iter().filter(|row| row.page_count > 0);
    let mut first: Vec<i32> =
        listed.filter_map(|row| list.pages.get(row.page_begin as usize).copied()).collect();
    first.sort_unstable();
    first.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(all(test, feature = "paged", feature = "mla"))]
mod tests {
    use crate::paged::renew::tests::{Batch, S};
    use crate::paged::{Geometry, Variant, schedule};
    use crate::{DType, Kernels};

    use super::*;

    fn options(schedule: Schedule) -> ScheduleOptions {
        let target = Target::Blocks;
        ScheduleOptions {
            workers: 2,
            target,
            kernels: Kernels::Wgmma,
            schedule,
            ..ScheduleOptions::default()
        }
    }

    fn heads(kv_lens: &[usize], how: Schedule, window_left: Option<usize>) -> WorkList {
        let geometry = Geometry {
            num_qo_heads: 32,
            num_kv_heads: 8,
            head_dim_qk: 128,
            head_dim_vo: 128,
            page_size: S,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        let variant = Variant { window_left, ..Variant::causal(128) };
        let mut list = WorkList::default();
        schedule(&geometry, &variant, &Batch::of(kv_lens, 1, 0).table(), &options(how), &mut list).unwrap();
        list
    }

    fn latents(kv_lens: &[usize], heads: usize) -> WorkList {
        Batch::of(kv_lens, 1, 0).over_latents(heads, &options(Schedule::Throughput))
    }

    /// Keys of the longest item, and items.
    fn items(list: &WorkList) -> (u64, usize) {
        assert!(list.items.iter().all(|item| item.leaf_end - item.leaf_begin == 1), "one leaf an item");
        let lanes = list.geometry.group() as u64;
        (list.items.iter().map(|item| item.cost / lanes).max().unwrap_or(0), list.items.len())
    }

    #[test]
    fn a_device_is_filled_once_by_items_alike() {
        let throughput = |kv_lens: &[usize]| items(&heads(kv_lens, Schedule::Throughput, None));
        // 264 blocks, 8 key heads.
        assert_eq!(throughput(&[8192]), (256, 256));
        assert_eq!(throughput(&[8192; 16]), (4096, 256));
        assert_eq!(throughput(&[131_072]), (4096, 256));
        // Whole rows are spread evenly enough.
        assert_eq!(throughput(&[8192; 64]), (8192, 512));
        // One long row among many short ones is cut, and they are not.
        let mut rows = vec![1024; 256];
        rows[7] = 131_072;
        let (longest, count) = throughput(&rows);
        assert!(longest < 15_000 && count < 8 * 300, "{longest} {count}");
        // 132 blocks.
        assert_eq!(items(&latents(&[16_384; 64], 16)), (8192, 128));
        assert_eq!(items(&latents(&[4096; 128], 16)), (4096, 128));
        assert_eq!(items(&latents(&[4096; 16], 128)), (1024, 64));
        let (longest, count) = items(&latents(&[8192], 16));
        assert!(longest <= 256 && count <= 132, "{longest} {count}");
    }

    #[test]
    fn an_invariant_rows_leaves_do_not_look_at_the_batch() {
        let alone = heads(&[9000], Schedule::Invariant, None);
        let company = heads(&[9000, 70, 100_000, 9000], Schedule::Invariant, None);
        let leaves = |list: &WorkList, row: usize| list.rows[row].leaf_keys;
        assert_eq!(leaves(&alone, 0), leaves(&company, 0));
        assert_eq!(leaves(&company, 3), leaves(&company, 0));
    }

    #[test]
    fn every_key_is_in_one_leaf_and_batches_of_as_many_rows_have_room() {
        let mut seed = 7u64;
        let mut random = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        for round in 0..120 {
            let rows = 1 + random(40);
            let longest = [100, 3000, 40_000][round % 3];
            let kv_lens: Vec<usize> = (0..rows).map(|_| random(longest)).collect();
            let window = (round % 4 == 3).then(|| 1 + random(5000));
            let list = heads(&kv_lens, Schedule::Throughput, window);
            let mut seen = vec![0u64; rows];
            for item in &list.items {
                let row = list.members[item.member_begin as usize].row as usize;
                assert!(item.cost > 0, "an item has keys");
                seen[row] += item.cost / 4;
            }
            for (row, &len) in kv_lens.iter().enumerate() {
                let keys = window.map_or(len, |left| len.min(left + 1));
                assert_eq!(seen[row], 8 * keys as u64, "{kv_lens:?} {window:?}");
                let leaf = list.rows[row].leaf_keys;
                assert!(leaf.is_multiple_of(TILE) && leaf >= LEAST / 2, "{leaf}");
            }
            let units = list.items.len() / 8;
            assert!(units <= most_units(&list, rows), "{units} of {rows} rows");
            let parts: u64 = list.parts.len() as u64;
            let state = most_floats(&list, rows) / most_units(&list, rows) as u64;
            assert!(parts * state <= 2 * list.partial_len, "{parts}");
            assert!(list.partial_len <= 2 * most_floats(&list, rows));
        }
    }

    #[test]
    fn threads_have_longer_leaves_unless_rows_share_pages() {
        let geometry = heads(&[1], Schedule::Invariant, None).geometry;
        let threads = ScheduleOptions { target: Target::Threads, ..options(Schedule::Throughput) };
        let mut batch = Batch::of(&[40_000, 40_000], 1, 0);
        let leaf = |batch: &Batch, options: &ScheduleOptions| {
            let mut list = WorkList::default();
            schedule(&geometry, &Variant::causal(128), &batch.table(), options, &mut list).unwrap();
            list.rows.iter().map(|row| row.leaf_keys).collect::<Vec<u32>>()
        };
        assert_eq!(leaf(&batch, &threads), [4096, 4096]);
        batch.kv_indices[2500] = batch.kv_indices[0];
        assert_eq!(leaf(&batch, &threads), [512, 512]);
        assert_eq!(leaf(&batch, &ScheduleOptions { cascade: false, ..threads }), [4096, 4096]);
    }
}
