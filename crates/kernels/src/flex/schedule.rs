//! Visible blocks as a work list.

use crate::Result;
use crate::mutant::planted;
use crate::paged::{APPEND_LEAF, Family, ScheduleOptions, Stored, Target, Variant, blocks_leaf};
use crate::work::{NO_MASK, Row, WorkList};

use super::{Blocks, Geometry};

/// Checks what is visible and writes its work list into `list`, whose memory is used again. The list is for
/// [`attend`](super::attend) alone. `options.cascade` has no meaning here; of `options.pad_to` only whether it is there: runs over
/// the list may then be captured on a device, and go over lists to come.
///
/// Neighbouring blocks of queries that see the same become one row: how queries are tiled changes no bit.
///
/// # Errors
/// What [`Geometry::check`] and [`Blocks::check`] refuse; `list` is then as it was.
pub fn schedule(
    geometry: &Geometry,
    blocks: &Blocks<'_>,
    options: &ScheduleOptions,
    list: &mut WorkList,
) -> Result<()> {
    geometry.check()?;
    blocks.check(geometry)?;
    let per_head = blocks.heads > 1;
    let heads = if per_head { geometry.num_qo_heads } else { 1 };
    let shapes = geometry.with_blocks(blocks.block_kv, per_head);
    let full = Variant { sm_scale: 1.0, ..Variant::full(geometry.head_dim_qk) };
    list.start(Stored::Blocks, &shapes, &full, geometry.batch * heads * blocks.q_len);
    list.blocks.partial.clear();
    list.blocks.positions.clear();
    each_row(geometry, blocks, options.target, |row, first| {
        list.rows.push(row);
        if let Some(at) = first {
            let visible = at..at + row.page_count as usize;
            list.pages.extend_from_slice(&blocks.indices[visible.clone()]);
            if planted("flex-block-order") {
                list.pages[row.page_begin as usize..].reverse();
            }
            if !blocks.partial.is_empty() {
                list.blocks.partial.extend_from_slice(&blocks.partial[visible.clone()]);
            }
            if let Some(positions) = blocks.positions {
                let logical = blocks.indices[visible].iter().map(|&block| positions[block as usize]);
                list.blocks.positions.extend(logical);
            }
        }
    });
    list.num_pages = blocks.kv_blocks();
    list.blocks.batch = geometry.batch;
    list.blocks.num_qo_heads = geometry.num_qo_heads;
    list.blocks.num_kv_heads = geometry.num_kv_heads;
    list.blocks.q_len = blocks.q_len;
    list.blocks.kv_len = blocks.kv_len;
    list.blocks.per_head = per_head;
    list.blocks.any_partial = list.blocks.partial.iter().any(|&partial| partial != 0);
    list.blocks.key_bound = blocks.key_bound();
    list.cut(&ScheduleOptions { cascade: false, ..*options });
    Ok(())
}

/// Keys that a leaf on a device is a multiple of: a tile.
const DEVICE_TILE: u32 = 64;

/// Visible keys of a leaf of a row with `kv_len` of them, whatever the number of queries: several streams may stand side by
/// side along `L`. On a device a row's leaves are alike, so that none is left over when the others are done.
fn leaf_keys(target: Target, heads: usize, kv_len: u32) -> u32 {
    match target {
        Target::Threads => APPEND_LEAF,
        Target::Blocks => {
            let most = blocks_leaf(heads);
            kv_len.div_ceil(kv_len.div_ceil(most).max(1)).next_multiple_of(DEVICE_TILE).max(DEVICE_TILE)
        }
    }
}

/// Gives each row to `take`, with where its blocks start in `indices` when they are to be appended to the list's pages;
/// `None` for a row whose blocks are there already.
fn each_row(
    geometry: &Geometry,
    blocks: &Blocks<'_>,
    target: Target,
    mut take: impl FnMut(Row, Option<usize>),
) {
    let heads = if blocks.heads > 1 { geometry.num_qo_heads } else { 1 };
    let q_blocks = blocks.q_blocks();
    let family = Family::Tile;
    let list = |plane: usize, block: usize| {
        let at = plane * q_blocks + block;
        (blocks.indptr[at] as usize, blocks.indptr[at + 1] as usize)
    };
    let alike = |(a, b): (usize, usize), (c, d): (usize, usize)| {
        let partial = |from: usize, to: usize| blocks.partial.get(from..to).unwrap_or_default();
        blocks.indices[a..b] == blocks.indices[c..d] && partial(a, b) == partial(c, d)
    };
    let mut pages = 0;
    for plane in 0..geometry.batch * heads {
        // One mask for all batches: the first batch's blocks serve the others.
        let shared = blocks.batch == 1 && plane >= heads;
        let of = if shared { plane % heads } else { plane };
        if shared && plane.is_multiple_of(heads) {
            pages = 0;
        }
        let mut block = 0;
        while block < q_blocks {
            let (from, to) = list(of, block);
            let mut end = block + 1;
            while end < q_blocks && alike((from, to), list(of, end)) {
                end += 1;
            }
            let q_first = block * blocks.block_q;
            let q_len = (end * blocks.block_q).min(blocks.q_len) - q_first;
            let kv_len = blocks.keys(from, to) as u32;
            let row = Row {
                mask_begin: NO_MASK,
                q_begin: (plane * blocks.q_len + q_first) as u32,
                q_len: q_len as u32,
                kv_len,
                page_begin: pages as u32,
                page_count: (to - from) as u32,
                family: family as u32,
                leaf_keys: leaf_keys(target, geometry.num_qo_heads, kv_len),
                ..Row::default()
            };
            take(row, (!shared).then_some(from));
            pages += to - from;
            block = end;
        }
    }
}

/// Whether `list` is the list of these blocks, compared in full; never for blocks that would be refused.
pub fn is_for(list: &WorkList, geometry: &Geometry, blocks: &Blocks<'_>) -> bool {
    let of = &list.blocks;
    let shapes = list.stored == Stored::Blocks
        && list.geometry == geometry.with_blocks(blocks.block_kv, blocks.heads > 1)
        && (of.batch, of.num_qo_heads, of.num_kv_heads)
            == (geometry.batch, geometry.num_qo_heads, geometry.num_kv_heads)
        && (of.q_len, of.kv_len) == (blocks.q_len, blocks.kv_len)
        && of.partial.is_empty() == (blocks.partial.is_empty() || list.pages.is_empty())
        && of.positions.is_empty() == (blocks.positions.is_none() || list.pages.is_empty());
    if !shapes || blocks.check(geometry).is_err() || of.key_bound != blocks.key_bound() {
        return false;
    }
    let (mut rows, mut pages, mut same) = (0, 0, true);
    each_row(geometry, blocks, list.target, |row, first| {
        same &= list.rows.get(rows) == Some(&row);
        rows += 1;
        if let (true, Some(at)) = (same, first) {
            let (here, there) = (pages..pages + row.page_count as usize, at..at + row.page_count as usize);
            pages = here.end;
            same &= list.pages.get(here.clone()) == blocks.indices.get(there.clone());
            if !blocks.partial.is_empty() {
                same &= of.partial.get(here.clone()) == blocks.partial.get(there.clone());
            }
            if let (true, Some(positions)) = (same, blocks.positions) {
                let logical = blocks.indices[there].iter().map(|&block| &positions[block as usize]);
                same &= of.positions[here].iter().eq(logical);
            }
        }
    });
    same && rows == list.rows.len() && pages == list.pages.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_of_a_row_on_a_device_are_alike_and_know_nothing_of_its_queries() {
        let leaves = |heads, kv_len: u32| {
            let leaf = leaf_keys(Target::Blocks, heads, kv_len);
            assert!(leaf.is_multiple_of(DEVICE_TILE) && leaf > 0, "{heads} heads, {kv_len} keys: {leaf}");
            (leaf, kv_len.div_ceil(leaf))
        };
        assert_eq!(leaves(16, 6528), (1664, 4));
        assert_eq!(leaves(1, 6528), (512, 13));
        assert_eq!(leaves(64, 6528), (3264, 2));
        assert_eq!(leaves(16, 2048), (2048, 1));
        assert_eq!(leaves(16, 2049), (1088, 2));
        assert_eq!((leaves(16, 0).1, leaves(16, 1)), (0, (64, 1)));
        leaves(usize::from(u16::MAX), u32::MAX - 64);
    }
}
