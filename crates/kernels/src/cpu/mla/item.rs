//! Items of the latent families: leaves of a row's keys under all heads of some query tokens.

use std::ops::Range;

use crate::cpu::address::token_offset;
use crate::cpu::arena::{Arena, arena_bytes};
use crate::cpu::paged::{Call, LINE, State, Tree, state_len};
use crate::mutant::planted;
use crate::work::{Item, Member, Row, WorkList};

use super::body::{AHEAD, Body, TILE};
use super::engine::{Engine, Shape};

/// Bytes of scratch that [`run`] takes for the largest item.
pub(crate) fn scratch_bytes(work: &WorkList) -> usize {
    Engine::bytes(work.max_lanes, work.geometry.head_dim_qk)
        + arena_bytes::<f32>(work.max_state_len * work.max_depth)
}

/// Sums an item's leaves and hands the state to `emit`, lanes in the order member, token, head.
pub(crate) fn run(
    call: &Call<'_>,
    item: &Item,
    members: &[Member],
    mut arena: Arena<'_>,
    emit: &mut impl FnMut(usize, &State<'_>),
) {
    let (work, geometry) = (call.work, &call.geometry);
    let row = work.rows[members[0].row as usize];
    let shape = Shape {
        body: Body::select(call.isa, geometry.q_dtype, geometry.kv_dtype, geometry.head_dim_vo),
        width: geometry.head_dim_vo,
        depth: geometry.head_dim_qk,
        q_dtype: geometry.q_dtype,
        kv_dtype: geometry.kv_dtype,
        scale: if call.raw_scores() { 1.0 } else { call.variant.sm_scale },
        c: call.exponent(&row),
    };
    let tokens = |member: &Member| {
        if item.q_count == 0 { work.rows[member.row as usize].q_len } else { item.q_count }
    };
    let heads = geometry.num_qo_heads;
    let lanes = members.iter().map(|member| tokens(member) as usize * heads).sum();
    let mut engine = Engine::new(&mut arena, shape, lanes);
    let states = arena.take::<f32>(work.max_state_len * work.max_depth);
    let (mut lo, mut hi) = (u32::MAX, 0);
    let mut lane = 0;
    for member in members {
        let row = &work.rows[member.row as usize];
        for q in item.q_begin..item.q_begin + tokens(member) {
            let (from, to) = crate::paged::visible(&call.variant, row, q, q + 1);
            if from < to {
                (lo, hi) = (lo.min(from), hi.max(to));
            }
            for head in 0..heads {
                let (nope, pe) = query(call, (row.q_begin + q) as usize, head);
                // SAFETY: token and head are in range of both, whose innermost axes are contiguous.
                unsafe { engine.set_lane(lane, nope, pe, from, to) };
                lane += 1;
            }
        }
    }
    let mut pass = Pass { call, row, engine, lanes, states };
    pass.leaves(item.leaf_begin, item.leaf_end, lo, hi);
    emit(0, &State::new(&mut states_of(pass.states, 0, lanes, shape.width)[..], lanes, shape.width));
}

/// Where a head's query of a token starts, and its rotary part.
fn query(call: &Call<'_>, token: usize, head: usize) -> (*const u8, *const u8) {
    let at = |tensor: &crate::TensorRef<'_>| {
        let elements = token * tensor.strides()[0] + head * tensor.strides()[1];
        tensor.as_ptr().wrapping_add(elements * tensor.dtype().size())
    };
    (at(&call.q), call.q_pe.as_ref().map_or(std::ptr::null(), at))
}

/// The state at depth `depth`.
fn states_of(states: &mut [f32], depth: usize, lanes: usize, width: usize) -> &mut [f32] {
    let len = state_len(lanes, width);
    &mut states[depth * len..(depth + 1) * len]
}

/// One item's pass over its keys.
struct Pass<'a> {
    call: &'a Call<'a>,
    /// The row whose pages are read; members that share the item have the same ones.
    row: Row,
    engine: Engine<'a>,
    lanes: usize,
    /// `[depth, state_len]`.
    states: &'a mut [f32],
}

impl Pass<'_> {
    /// Leaves the joined states of leaves `from..to`, of which keys `lo..hi` are seen, at depth 0.
    fn leaves(&mut self, from: u32, to: u32, lo: u32, hi: u32) {
        self.clear(0);
        let leaf_keys = u64::from(self.row.leaf_keys);
        let lo = u64::from(lo).max(u64::from(from) * leaf_keys);
        let hi = u64::from(hi).min(u64::from(to) * leaf_keys);
        if lo >= hi {
            return;
        }
        let tiles_per_leaf = (leaf_keys / TILE as u64) as u32;
        let tiles = (lo / TILE as u64) as u32..hi.div_ceil(TILE as u64) as u32;
        let mut tree = Tree::new();
        let mut current = tiles.start / tiles_per_leaf;
        for tile in tiles {
            if tile / tiles_per_leaf != current {
                self.push(&mut tree, current);
                current = tile / tiles_per_leaf;
                self.clear(tree.len());
            }
            let begin = u64::from(tile) * TILE as u64;
            let keys = lo.max(begin) as u32..hi.min(begin + TILE as u64) as u32;
            self.tile(keys, hi as u32, tree.len());
        }
        self.push(&mut tree, current);
        tree.finish(|left| self.join(left));
    }

    /// Some keys of one tile, into the state at `depth`; those up to `upto` come next.
    fn tile(&mut self, keys: Range<u32>, upto: u32, depth: usize) {
        let (from, to) = (keys.start, keys.end);
        let mut rows = [self.engine.zeros(); TILE];
        // Keys go in pairs at even positions; one that nobody sees is a latent of zeros.
        let first = from & !1;
        let end = to.next_multiple_of(2);
        self.locate(from, to, &mut rows[(from - first) as usize..]);
        let mut ahead = [std::ptr::null(); AHEAD];
        let next = AHEAD.min((upto - to) as usize);
        self.locate(to, to + next as u32, &mut ahead);
        let ahead = &ahead[..next];
        let padded = (first != from || end != to) && !planted("mla-pad-key-seen");
        let hidden = padded || !self.engine.all_see(from, to);
        let width = self.call.geometry.head_dim_vo;
        let state = states_of(self.states, depth, self.lanes, width);
        // SAFETY: `Body::select` was given a supported instruction set. Every key of `from..to` is seen by a query of
        // the row, hence inside its pages, whose ids are below `P`: its latent lies in the tensor.
        unsafe { self.engine.tile(&rows[..(end - first) as usize], first, hidden, ahead, state) };
    }

    /// Looks up the latents at positions `from..to`.
    fn locate(&self, from: u32, to: u32, rows: &mut [*const u8]) {
        if from == to {
            return;
        }
        let (call, row) = (self.call, &self.row);
        let pages = &call.work.pages[row.page_begin as usize..][..row.page_count as usize];
        let page_size = call.geometry.page_size as u32;
        let (strides, size) = (call.k.strides(), call.k.dtype().size());
        let base = call.k.as_ptr();
        let at = from - row.kv_offset;
        let (mut page, mut slot) = (at / page_size, at % page_size);
        for to in &mut rows[..(to - from) as usize] {
            if slot == page_size {
                (page, slot) = (page + 1, 0);
            }
            let id = pages[page as usize] as u32;
            let elements = token_offset(id, slot, strides[0] as u64, strides[1] as u64) as usize;
            *to = base.wrapping_add(elements * size);
            slot += 1;
        }
    }

    fn clear(&mut self, depth: usize) {
        let width = self.call.geometry.head_dim_vo;
        let padded = self.lanes.next_multiple_of(LINE);
        let memory = states_of(self.states, depth, self.lanes, width);
        memory[..padded].fill(f32::NEG_INFINITY);
        memory[padded..].fill(0.0);
    }

    fn push(&mut self, tree: &mut Tree, leaf: u32) {
        tree.push(0, leaf, |left| self.join(left));
    }

    /// Joins depths `left` and `left + 1`.
    fn join(&mut self, left: usize) {
        let width = self.call.geometry.head_dim_vo;
        let (lanes, len) = (self.lanes, state_len(self.lanes, width));
        let c = self.call.exponent(&self.row);
        let (below, above) = self.states.split_at_mut((left + 1) * len);
        let right = State::new(&mut above[..len], lanes, width);
        State::new(&mut below[left * len..], lanes, width).join(&right, c);
    }
}
