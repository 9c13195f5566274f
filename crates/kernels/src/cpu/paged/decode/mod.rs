//! The decode family: few query vectors a key head, keys and values streamed once for all of them.
//!
//! An item walks its keys tile by tile ([`TILE`] keys at absolute positions): scores, softmax, weighted values, each a
//! few tokens at a time under all its key heads, so that pages are read as they lie. While a tile's keys are multiplied
//! its values are prefetched, and then the next tile's keys: pages are scattered, and a hardware prefetcher stops at
//! their edges. Prefetching in the order in which memory lies is what lets the two add up to the machine's bandwidth.
//!
//! A tile no query sees is not visited; a key that none of the item's queries sees is not read.

mod body;
mod generic;

#[cfg(target_arch = "x86_64")]
mod avx512;

use half::{bf16, f16};

pub(crate) use self::body::TILE;
use self::body::{Ahead, Body, Scores, Transform, Values};
use super::call::Call;
use super::state::{State, Tree, acc_begin, acc_stride, state_len};
use crate::cpu::address::token_offset;
use crate::cpu::arena::{Arena, arena_bytes};
use crate::cpu::e4m3::widen_on;
use crate::mutant::planted;
use crate::paged::Geometry;
use crate::work::{Item, Member, NO_MASK, Row, WorkList};
use crate::{DType, TensorRef};

/// A query token of an item: what it sees, and where it is.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Query {
    /// First word of its custom mask, or [`NO_MASK`].
    mask: u64,
    /// Absolute position; negative where queries outnumber keys.
    position: i64,
    /// Packed index.
    token: u32,
    /// Keys `from..to` that the variant lets it see.
    from: u32,
    to: u32,
    mask_words: u32,
}

impl Query {
    /// The keys of tile `tile` that it sees, one bit each.
    fn sees(&self, tile: u32, words: &[u64]) -> u64 {
        let base = u64::from(tile) * TILE as u64;
        let from = u64::from(self.from).saturating_sub(base).min(TILE as u64);
        let to = u64::from(self.to).saturating_sub(base).min(TILE as u64);
        if from >= to {
            return 0;
        }
        let bits = u64::MAX >> (TILE as u64 - (to - from)) << from;
        match self.mask {
            NO_MASK => bits,
            first if tile < self.mask_words => bits & words[first as usize + tile as usize],
            _ => 0,
        }
    }
}

/// Floats from one packed query to the next: whole registers of 32 bf16.
fn q_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(32)
}

/// Bytes of scratch that [`run`] takes for the largest item.
pub(super) fn scratch_bytes(work: &WorkList) -> usize {
    arena_bytes::<Query>(work.max_lanes)
        + arena_bytes::<u64>(work.max_lanes)
        + arena_bytes::<f32>(work.max_vectors * q_stride(work.geometry.head_dim_qk))
        + arena_bytes::<f32>(work.max_vectors * TILE)
        + arena_bytes::<f32>(work.max_state_len * work.max_depth)
        + arena_bytes::<f32>(widened_len(&work.geometry))
}

/// Floats that a tile of keys, or of values, takes when it is widened from e4m3 for all heads of an item.
fn widened_len(geometry: &Geometry) -> usize {
    let width = geometry.head_dim_qk.max(geometry.head_dim_vo);
    if geometry.is_fp8() { TILE * crate::paged::most_heads(geometry) * width } else { 0 }
}

/// A cache tensor `[P, S, G, D]` from an item's first head on, as addresses.
#[derive(Clone, Copy)]
struct Plane {
    base: *const u8,
    page: u64,
    token: u64,
    head: usize,
    size: usize,
    /// Bytes of one head's row.
    width: usize,
}

impl Plane {
    fn of(tensor: &TensorRef<'_>, first_head: usize) -> Plane {
        let (strides, size) = (tensor.strides(), tensor.dtype().size());
        let (page, token) = (strides[0] as u64, strides[1] as u64);
        let width = tensor.shape()[3] * size;
        let base = tensor.as_ptr().wrapping_add(first_head * strides[2] * size);
        Plane { base, page, token, head: strides[2] * size, size, width }
    }

    /// Token `slot` of page `page` under the first head.
    fn row(&self, page: u32, slot: u32) -> *const u8 {
        self.base.wrapping_add(token_offset(page, slot, self.page, self.token) as usize * self.size)
    }
}

/// Where the rows of a tile's keys lie, under the item's first head.
#[derive(Clone, Copy)]
struct Rows {
    k: [*const u8; TILE],
    v: [*const u8; TILE],
    /// Keys that some query sees.
    seen: u64,
}

impl Rows {
    const NONE: Rows = Rows { k: [std::ptr::null(); TILE], v: [std::ptr::null(); TILE], seen: 0 };

    /// The tokens from the first to the last seen one.
    fn seen(&self) -> std::ops::Range<usize> {
        if self.seen == 0 {
            return 0..0;
        }
        self.seen.trailing_zeros() as usize..64 - self.seen.leading_zeros() as usize
    }

    /// Looks up the keys from the first to the last seen one.
    fn locate(&mut self, row: &Row, pages: &[i32], page_size: u32, tile: u32, k: &Plane, v: &Plane) {
        let keys = self.seen();
        let Some(first) = keys.clone().next() else { return };
        let at = (u64::from(tile) * TILE as u64 + first as u64 - u64::from(row.kv_offset)) as u32;
        let (mut page, mut slot) = (at / page_size, at % page_size);
        let mut id = pages[page as usize] as u32;
        for key in keys {
            if slot == page_size {
                (page, slot) = (page + 1, 0);
                id = pages[page as usize] as u32;
            }
            (self.k[key], self.v[key]) = (k.row(id, slot), v.row(id, slot));
            slot += 1;
        }
    }
}

/// Sums an item's leaves and hands each key head's state to `emit`, lanes in the order member, token, head of the
/// group.
pub(super) fn run(
    call: &Call<'_>,
    item: &Item,
    members: &[Member],
    mut arena: Arena<'_>,
    emit: &mut impl FnMut(usize, &State<'_>),
) {
    let work = call.work;
    let (group, geometry) = (call.geometry.group(), &call.geometry);
    let queries = arena.take::<Query>(work.max_lanes);
    let seen = arena.take::<u64>(work.max_lanes);
    let mut count = 0;
    for member in members {
        let row = &work.rows[member.row as usize];
        let tokens = if item.q_count == 0 { row.q_len } else { item.q_count };
        for q in item.q_begin..item.q_begin + tokens {
            queries[count] = query(call, row, q);
            count += 1;
        }
    }
    let queries = &queries[..count];
    let body = Body::select(call.isa, geometry.q_dtype, geometry.kv_dtype);
    let heads = item.kv_head_count as usize;
    let lanes = count * group;
    let stride = q_stride(geometry.head_dim_qk);
    let packed = arena.take::<f32>(work.max_vectors * stride);
    for head in 0..heads {
        let to = &mut packed[head * lanes * stride..(head + 1) * lanes * stride];
        pack_queries(call, queries, item.kv_head_begin as usize + head, &body, stride, to);
    }
    let scores = arena.take::<f32>(work.max_vectors * TILE);
    let states = arena.take::<f32>(work.max_state_len * work.max_depth);
    let widened = arena.take::<f32>(widened_len(geometry));
    Pass {
        call,
        row: work.rows[members[0].row as usize],
        body,
        queries,
        seen: &mut seen[..count],
        packed,
        scores,
        states,
        widened,
        first_head: item.kv_head_begin as usize,
        heads,
        lanes,
        k: Plane::of(&call.k, item.kv_head_begin as usize),
        v: Plane::of(&call.v, item.kv_head_begin as usize),
    }
    .leaves(item.leaf_begin, item.leaf_end);
    let len = state_len(lanes, geometry.head_dim_vo);
    for head in 0..heads {
        let memory = &mut states[head * len..(head + 1) * len];
        let state = State::new(memory, lanes, geometry.head_dim_vo);
        emit(item.kv_head_begin as usize + head, &state);
    }
}

fn query(call: &Call<'_>, row: &Row, q: u32) -> Query {
    let (from, to) = crate::paged::visible(&call.variant, row, q, q + 1);
    let mask = if row.mask_begin == NO_MASK {
        NO_MASK
    } else {
        row.mask_begin + u64::from(q) * u64::from(row.mask_words)
    };
    let position = i64::from(row.kv_len) - i64::from(row.q_len) + i64::from(q);
    Query { mask, position, token: row.q_begin + q, from, to, mask_words: row.mask_words }
}

/// Copies the queries of one key head, `[lanes, stride]`, widened to f32 or kept in bf16, zeros after each.
fn pack_queries(
    call: &Call<'_>,
    queries: &[Query],
    kv_head: usize,
    body: &Body,
    stride: usize,
    to: &mut [f32],
) {
    let (group, width) = (call.geometry.group(), call.geometry.head_dim_qk);
    let strides = call.q.strides();
    for (index, query) in queries.iter().enumerate() {
        for j in 0..group {
            let lane = index * group + j;
            let head = if planted("gqa-head-mapping") {
                kv_head + j * call.geometry.num_kv_heads
            } else {
                kv_head * group + j
            };
            let at = query.token as usize * strides[0] + head * strides[1];
            let from = call.q.as_ptr().wrapping_add(at * call.q.dtype().size());
            // SAFETY: token and head are in range of `q` `[T, H, D]`, whose innermost axis is contiguous, so
            // `width` elements are readable at `from`.
            unsafe {
                if body.q_bf16 {
                    let to: &mut [u16] = bytemuck::cast_slice_mut(to);
                    let to = &mut to[lane * stride..(lane + 1) * stride];
                    let (whole, rest) = to.split_at_mut(width);
                    whole.copy_from_slice(std::slice::from_raw_parts(from.cast::<u16>(), width));
                    rest.fill(0);
                    continue;
                }
                let to = &mut to[lane * stride..(lane + 1) * stride];
                let (whole, rest) = to.split_at_mut(width);
                rest.fill(0.0);
                match call.q.dtype() {
                    DType::Bf16 => {
                        let from = std::slice::from_raw_parts(from.cast::<bf16>(), width);
                        whole.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
                    }
                    DType::F16 => {
                        let from = std::slice::from_raw_parts(from.cast::<f16>(), width);
                        whole.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_f32());
                    }
                    _ => whole.copy_from_slice(std::slice::from_raw_parts(from.cast::<f32>(), width)),
                }
            }
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy)]
enum Side {
    Keys,
    Values,
}

/// One item's pass over its keys.
struct Pass<'a> {
    call: &'a Call<'a>,
    /// The row whose pages are read; members that share the item have the same ones.
    row: Row,
    body: Body,
    queries: &'a [Query],
    /// The keys of the current tile that each query sees.
    seen: &'a mut [u64],
    /// `[heads, lanes, q_stride]`.
    packed: &'a [f32],
    /// `[heads, lanes, TILE]`.
    scores: &'a mut [f32],
    /// `[depth, heads, state_len]`.
    states: &'a mut [f32],
    /// A tile's keys, then its values, `[TILE, heads, D]`, where they are codes.
    widened: &'a mut [f32],
    first_head: usize,
    heads: usize,
    lanes: usize,
    k: Plane,
    v: Plane,
}

impl Pass<'_> {
    /// Leaves the joined states of leaves `from..to` at depth 0.
    fn leaves(&mut self, from: u32, to: u32) {
        self.clear(0);
        let keys = self.queries.iter().filter(|query| query.from < query.to);
        let lo = keys.clone().map(|query| query.from).min().unwrap_or(0);
        let hi = keys.map(|query| query.to).max().unwrap_or(0);
        let leaf = u64::from(self.row.leaf_keys);
        let lo = u64::from(lo).max(u64::from(from) * leaf);
        let hi = u64::from(hi).min(u64::from(to) * leaf);
        if lo >= hi {
            return;
        }
        let tiles = (lo / TILE as u64) as u32..hi.div_ceil(TILE as u64) as u32;
        let tiles_per_leaf = (leaf / TILE as u64) as u32;
        let mut tree = Tree::new();
        let mut current = tiles.start / tiles_per_leaf;
        let mut pair = [Rows::NONE; 2];
        pair[0].seen = self.look(tiles.start);
        self.locate(&mut pair[0], tiles.start);
        for tile in tiles.clone() {
            if tile / tiles_per_leaf != current {
                self.push(&mut tree, current);
                current = tile / tiles_per_leaf;
                self.clear(tree.len());
            }
            let [now, next] = &mut pair;
            next.seen = if tile + 1 < tiles.end { self.look(tile + 1) } else { 0 };
            self.locate(next, tile + 1);
            if now.seen != 0 {
                self.look(tile);
                self.tile(tile, now, next, tree.len());
            }
            pair.swap(0, 1);
        }
        self.push(&mut tree, current);
        tree.finish(|left| self.join(left));
    }

    /// Notes what each query sees of a tile; returns what any does.
    fn look(&mut self, tile: u32) -> u64 {
        let words = &self.call.work.mask;
        let mut any = 0;
        for (seen, query) in self.seen.iter_mut().zip(self.queries) {
            *seen = query.sees(tile, words);
            any |= *seen;
        }
        any
    }

    fn locate(&self, rows: &mut Rows, tile: u32) {
        let row = &self.row;
        let pages = &self.call.work.pages[row.page_begin as usize..][..row.page_count as usize];
        rows.locate(row, pages, self.call.geometry.page_size as u32, tile, &self.k, &self.v);
    }

    /// What to fetch of token rows: a row under all heads at once where those are neighbours, else head by head.
    fn ahead<'r>(&self, plane: &Plane, rows: &'r [*const u8], then: &'r [*const u8]) -> Ahead<'r> {
        let bytes = plane.head * (self.heads - 1) + plane.width;
        if bytes <= 2 * self.heads * plane.width {
            Ahead { rows, then, stretches: 1, stride: 0, lines: bytes.div_ceil(64) }
        } else {
            Ahead { rows, then, stretches: self.heads, stride: plane.head, lines: plane.width.div_ceil(64) }
        }
    }

    /// Widens the rows of the keys in `seen` under the item's heads, each by its own scale, and says where they lie then.
    /// Returns the bytes from a row under one head to the same row under the next.
    fn widen(&mut self, tile: u32, seen: u64, side: Side, rows: &mut [*const u8; TILE]) -> usize {
        let geometry = &self.call.geometry;
        let (width, plane, scales) = match (side, &self.call.extra.scales) {
            (Side::Keys, Some([scales, _])) => (geometry.head_dim_qk, &self.k, scales),
            (Side::Values, Some([_, scales])) => (geometry.head_dim_vo, &self.v, scales),
            (_, None) => unreachable!("a call over codes has scales"),
        };
        let row = &self.row;
        let pages = &self.call.work.pages[row.page_begin as usize..][..row.page_count as usize];
        let page_size = geometry.page_size as u64;
        let first = u64::from(tile) * TILE as u64;
        let widen = widen_on(self.call.isa);
        let strides = scales.strides();
        for (begin, end) in runs(seen) {
            for key in begin..end {
                let at = first + key as u64 - u64::from(row.kv_offset);
                let at = if planted("fp8-neighbours-scale") { at ^ 1 } else { at };
                let (id, slot) = (pages[(at / page_size) as usize] as u32, (at % page_size) as u32);
                let scale = token_offset(id, slot, strides[0] as u64, strides[1] as u64) as usize;
                let to = &mut self.widened[key * self.heads * width..][..self.heads * width];
                for (head, to) in to.chunks_exact_mut(width).enumerate() {
                    let scale = scale + (self.first_head + head) * strides[2];
                    // SAFETY: the key is seen by a query of the row, hence inside its pages, whose ids are below `P`: its codes
                    // and its scale under each of the item's heads lie in their tensors. The instruction set is supported.
                    unsafe {
                        let scale = scales.as_ptr().cast::<f32>().add(scale).read_unaligned();
                        let scale = if planted("fp8-scale-ignored") { 1.0 } else { scale };
                        widen(rows[key].wrapping_add(head * plane.head), scale, to);
                    }
                }
                rows[key] = to.as_ptr().cast();
            }
        }
        width * size_of::<f32>()
    }

    fn state_len(&self) -> usize {
        state_len(self.lanes, self.call.geometry.head_dim_vo)
    }

    fn state<'s>(states: &'s mut [f32], index: usize, len: usize, lanes: usize, width: usize) -> State<'s> {
        State::new(&mut states[index * len..(index + 1) * len], lanes, width)
    }

    fn clear(&mut self, depth: usize) {
        let (len, width) = (self.state_len(), self.call.geometry.head_dim_vo);
        for head in 0..self.heads {
            Self::state(self.states, depth * self.heads + head, len, self.lanes, width).clear();
        }
    }

    fn push(&mut self, tree: &mut Tree, leaf: u32) {
        tree.push(0, leaf, |left| self.join(left));
    }

    /// Joins depths `left` and `left + 1`.
    fn join(&mut self, left: usize) {
        let (len, width) = (self.state_len(), self.call.geometry.head_dim_vo);
        let c = self.call.exponent(&self.row);
        let (below, above) = self.states.split_at_mut((left + 1) * self.heads * len);
        let below = &mut below[left * self.heads * len..];
        for head in 0..self.heads {
            let right = Self::state(above, head, len, self.lanes, width);
            Self::state(below, head, len, self.lanes, width).join(&right, c);
        }
    }

    /// One tile under all heads, into the states at `depth`.
    fn tile(&mut self, tile: u32, now: &Rows, next: &Rows, depth: usize) {
        let geometry = &self.call.geometry;
        let (len, width) = (self.state_len(), geometry.head_dim_vo);
        let group = geometry.group();
        let c = self.call.exponent(&self.row);
        let raw = self.call.raw_scores();
        let stride = q_stride(geometry.head_dim_qk);
        let mut ahead = self.ahead(&self.v, &now.v[now.seen()], &next.k[next.seen()]);
        let codes = geometry.is_fp8();
        let (mut keys, mut key_head) = (now.k, self.k.head);
        if codes {
            key_head = self.widen(tile, now.seen, Side::Keys, &mut keys);
        }
        for (first, end) in runs(now.seen) {
            let job = Scores {
                q: self.packed.as_ptr().cast(),
                q_stride: stride,
                q_head: self.lanes * stride * size_of::<f32>(),
                heads: self.heads,
                lanes: self.lanes,
                keys: &keys[first..end],
                key_head,
                head_dim: geometry.head_dim_qk,
                scores: self.scores[first..].as_mut_ptr(),
                ahead: std::mem::replace(&mut ahead, Ahead::NOTHING),
            };
            // SAFETY: `Body::select` was given a supported instruction set. Queries are packed `[heads, lanes, stride]`,
            // scores hold `[heads, lanes, TILE]`. Every key of the run is seen by a query of the row, hence inside its
            // pages, whose ids are below `P`: its rows under the item's heads lie in `k`, with `head_dim` elements.
            unsafe { (self.body.scores)(&job) };
        }
        let acc_width = acc_stride(width);
        for head in 0..self.heads {
            let kv_head = self.first_head + head;
            let state = Self::state(self.states, depth * self.heads + head, len, self.lanes, width);
            let scores = &mut self.scores[head * self.lanes * TILE..];
            for lane in 0..self.lanes {
                let tile_scores: &mut [f32; TILE] = (&mut scores[lane * TILE..(lane + 1) * TILE])
                    .try_into()
                    .expect("a tile of scores has TILE entries");
                let seen = self.seen[lane / group];
                if seen == 0 {
                    tile_scores.fill(0.0);
                    continue;
                }
                let acc = &mut state.acc[lane * acc_width..(lane + 1) * acc_width];
                // SAFETY: the instruction set is supported.
                unsafe {
                    if !raw {
                        let position = self.queries[lane / group].position;
                        let by = transform(self.call, kv_head * group + lane % group, position, tile);
                        (self.body.transform)(tile_scores, &by);
                    }
                    let alpha =
                        (self.body.softmax)(tile_scores, seen, &mut state.m[lane], &mut state.l[lane], c);
                    if alpha != 1.0 {
                        (self.body.rescale)(acc, alpha);
                    }
                }
            }
        }
        // Rows between seen ones are located but not read: a hidden key may hold anything.
        let between = span(now.seen);
        let valued = if planted("masked-v-not-zeroed") { between } else { now.seen };
        let mut ahead = self.ahead(&self.k, &next.k[next.seen()], &next.v[next.seen()]);
        let (mut rows, mut value_head) = (now.v, self.v.head);
        if codes {
            value_head = self.widen(tile, valued, Side::Values, &mut rows);
        }
        let states = &mut self.states[depth * self.heads * len..(depth + 1) * self.heads * len];
        let acc = states[acc_begin(self.lanes)..].as_mut_ptr();
        for (first, end) in runs(valued) {
            let job = Values {
                weights: self.scores[first..].as_ptr(),
                heads: self.heads,
                lanes: self.lanes,
                values: &rows[first..end],
                value_head,
                head_dim: width,
                acc,
                acc_stride: acc_width,
                acc_head: len,
                ahead: std::mem::replace(&mut ahead, Ahead::NOTHING),
            };
            // SAFETY: as for scores; each head's accumulators hold `[lanes, acc_stride]`, `len` floats apart.
            unsafe { (self.body.values)(&job) };
        }
    }
}

fn transform(call: &Call<'_>, head: usize, position: i64, tile: u32) -> Transform {
    let cap = call.variant.logits_soft_cap.unwrap_or(0.0);
    Transform {
        sm_scale: call.variant.sm_scale,
        cap: if planted("dropped-soft-cap") { 0.0 } else { cap },
        slope: call
            .alibi_slopes
            .map_or(0.0, |slopes| if planted("alibi-sign") { -slopes[head] } else { slopes[head] }),
        distance: (i64::from(tile) * TILE as i64 - position) as f32,
    }
}

/// All bits from the first to the last set one.
fn span(bits: u64) -> u64 {
    match bits {
        0 => 0,
        bits => u64::MAX << bits.trailing_zeros() & u64::MAX >> bits.leading_zeros(),
    }
}

/// Maximal runs of set bits, as `first..end`.
fn runs(bits: u64) -> impl Iterator<Item = (usize, usize)> {
    let mut left = bits;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let first = left.trailing_zeros();
        let length = (left >> first).trailing_ones();
        let end = first + length;
        left = if end == 64 { 0 } else { left >> end << end };
        Some((first as usize, end as usize))
    })
}
