//! Cutting a batch for a device: many small items, each for one thread block.
//!
//! An item is one row, one key head, one leaf, and at most a tile of query vectors; a row of one leaf is written by its item,
//! the others by a merge for each key head. Rows that see nothing have no item at all: a merge without parts writes their 0
//! and `-inf`. Leaves and families are the row's own, as for threads.

use crate::work::{DIRECT, Item, Member, Merge, Part, Row, WorkList};

use super::family::latent_tokens;
use super::schedule::{leaves, visible};
use super::{Family, Geometry, Stored};

/// Query vectors (tokens times heads of a group) of an item of the tile family.
pub(crate) const TILE_ROWS: usize = 128;

/// Classes of cost: eight for each doubling.
const CLASSES: usize = 64 * 8;

/// Memory that cutting uses and keeps.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// Items as they are before heads are told apart.
    units: Vec<Item>,
    order: Vec<u32>,
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
    for index in 0..list.rows.len() {
        row(list, index, &mut scratch.units);
    }
    let heads = list.geometry.num_kv_heads;
    // Few query vectors first, then by cost: a counting sort, which is stable.
    let mut ends = [0u32; 2 * CLASSES];
    let place = |list: &WorkList, unit: &Item| {
        let few = is_few(&list.rows[list.members[unit.member_begin as usize].row as usize]);
        class(unit.cost) + if few { 0 } else { CLASSES }
    };
    for unit in &scratch.units {
        ends[place(list, unit)] += 1;
    }
    let few: u32 = ends[..CLASSES].iter().sum();
    let mut begin = 0;
    for end in &mut ends {
        begin += std::mem::replace(end, begin);
    }
    scratch.order.clear();
    scratch.order.resize(scratch.units.len(), 0);
    for (index, unit) in scratch.units.iter().enumerate() {
        let at = &mut ends[place(list, unit)];
        scratch.order[*at as usize] = index as u32;
        *at += 1;
    }
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
    list.scratch.blocks = scratch;
}

/// Query tokens of an item of the families whose rows are spread over items.
pub(crate) fn cut_tokens(geometry: &Geometry, stored: Stored) -> usize {
    match stored {
        Stored::Latents => latent_tokens(geometry),
        _ => (TILE_ROWS / geometry.group().max(1)).max(1),
    }
}

fn row(list: &mut WorkList, index: usize, units: &mut Vec<Item>) {
    let row = list.rows[index];
    let group = list.geometry.group();
    let heads = list.geometry.num_kv_heads;
    let tokens = if is_few(&row) { row.q_len } else { cut_tokens(&list.geometry, list.stored) as u32 };
    let mut q_begin = 0;
    while q_begin < row.q_len {
        let q_count = tokens.min(row.q_len - q_begin);
        let lanes = q_count as usize * group;
        let (lo, hi) = visible(&list.variant, &row, q_begin, q_begin + q_count);
        let (first, end) = leaves(&row, (lo, hi));
        let part_begin = list.parts.len() as u32;
        let state = crate::cpu::paged::state_len(lanes, list.geometry.head_dim_vo) * heads;
        for leaf in first..end {
            let partial = if end - first == 1 {
                DIRECT
            } else {
                let at = list.partial_len;
                list.partial_len += state as u64;
                list.parts.push(Part { partial: at, index: leaf, level: 0 });
                at
            };
            let begin = u64::from(leaf) * u64::from(row.leaf_keys);
            let keys = (begin + u64::from(row.leaf_keys)).min(hi.into()) - begin.max(lo.into());
            let cost = keys * lanes as u64;
            list.total_cost = list.total_cost.saturating_add(cost.saturating_mul(heads as u64));
            let member_begin = list.members.len() as u32;
            list.members.push(Member { partial, row: index as u32, reserved: 0 });
            let (leaf_begin, leaf_end) = (leaf, leaf + 1);
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
            units.push(of);
        }
        if end - first != 1 {
            let (row, part_count) = (index as u32, end - first);
            let of =
                Merge { row, q_begin, q_count, kv_head_count: 1, part_begin, part_count, ..Merge::default() };
            list.merges.extend((0..heads as u32).map(|head| Merge { kv_head_begin: head, ..of }));
        }
        list.max_lanes = list.max_lanes.max(lanes);
        q_begin += q_count;
    }
}
