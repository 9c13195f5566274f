//! Items of the tile family: leaves of one tile of queries under one key head, by [`tile::accumulate`].

use super::call::Call;
use super::source;
use super::state::{State, Tree, state_len};
use super::tile::{self, RowMask, TileJob, TileState};
use crate::cpu::arena::{Arena, arena_bytes};
use crate::mutant::planted;
use crate::paged::Stored;
use crate::work::{Item, Member, NO_MASK, WorkList};

/// Bytes of scratch that [`run`] takes for the largest item.
pub(super) fn scratch_bytes(work: &WorkList) -> usize {
    let g = &work.geometry;
    arena_bytes::<f32>(work.max_state_len * work.max_depth)
        + arena_bytes::<u32>(tile::scratch_words(work.max_lanes, g.head_dim_qk, g.head_dim_vo))
}

/// Sums an item's leaves and hands its key heads' states to `emit`.
pub(super) fn run(
    call: &Call<'_>,
    item: &Item,
    members: &[Member],
    mut arena: Arena<'_>,
    emit: &mut impl FnMut(usize, &State<'_>),
) {
    let work = call.work;
    let index = members[0].row as usize;
    let row = &work.rows[index];
    let g = &call.geometry;
    let states = arena.take::<f32>(work.max_state_len * work.max_depth);
    let words = tile::scratch_words(work.max_lanes, g.head_dim_qk, g.head_dim_vo);
    let scratch = arena.take::<u32>(words);
    let lanes = item.q_count as usize * g.group();
    let (len, width) = (state_len(lanes, g.head_dim_vo), g.head_dim_vo);
    let c = call.exponent(row);
    for kv_head in item.kv_head_begin..item.kv_head_begin + item.kv_head_count {
        let job = job(call, item, index, kv_head as usize);
        let mut tree = Tree::new();
        State::dense(&mut states[..len], lanes, width).clear();
        for leaf in item.leaf_begin..item.leaf_end {
            let depth = tree.len();
            let mut state = State::dense(&mut states[depth * len..(depth + 1) * len], lanes, width);
            state.clear();
            let begin = u64::from(leaf) * u64::from(row.leaf_keys);
            let end = (begin + u64::from(row.leaf_keys)).min(row.kv_len.into());
            let mut state = TileState { m: state.m, l: state.l, o: state.acc };
            tile::accumulate(call.isa, &job, begin as usize..end as usize, &mut state, scratch);
            tree.push(0, leaf, |left| join(states, left, len, lanes, width, c));
        }
        tree.finish(|left| join(states, left, len, lanes, width, c));
        emit(kv_head as usize, &State::pad(&mut states[..len], lanes, width));
    }
}

/// Joins the states at depths `left` and `left + 1`.
fn join(states: &mut [f32], left: usize, len: usize, lanes: usize, width: usize, c: f32) {
    let (below, above) = states.split_at_mut((left + 1) * len);
    let right = State::dense(&mut above[..len], lanes, width);
    State::dense(&mut below[left * len..], lanes, width).join(&right, c);
}

/// What the kernel is told about the item's queries under a key head.
fn job<'a>(call: &'a Call<'a>, item: &Item, index: usize, kv_head: usize) -> TileJob<'a> {
    let row = &call.work.rows[index];
    let words_per_query = row.mask_words as usize;
    let mask = (row.mask_begin != NO_MASK).then(|| RowMask {
        words: &call.work.mask[row.mask_begin as usize..][..row.q_len as usize * words_per_query],
        words_per_query,
    });
    let source = source::of(call, index, item.q_begin as usize, kv_head);
    let corner = if planted("dense-causal-corner") && call.work.stored == Stored::Segments {
        0
    } else {
        i64::from(row.kv_len) - i64::from(row.q_len)
    };
    TileJob {
        q: source.q,
        keys: source.keys,
        kv_begin: row.kv_begin as usize,
        kv_len: row.kv_len as usize,
        t0: source.q_begin + item.q_begin as usize,
        tokens: item.q_count as usize,
        query0: item.q_begin as usize,
        q_pos0: corner + i64::from(item.q_begin),
        kv_head,
        group: call.geometry.group(),
        sm_scale: call.variant.sm_scale,
        causal: call.variant.causal,
        window_left: call.variant.window_left,
        logits_soft_cap: call.variant.logits_soft_cap.unwrap_or(0.0),
        alibi_slopes: call.alibi_slopes,
        mask,
        mods: source.mods,
    }
}
