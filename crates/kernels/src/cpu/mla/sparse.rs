//! Rows over picked latents.
//!
//! A row's picks are put in ascending order of position; leaves and tiles count them by ordinal. So a result depends on
//! what was picked, never on the order in which it was listed, and each latent is read once for all heads.
//!
//! Many rows are handed to workers whole. With few rows, workers take a row's leaves instead; the tree that joins the
//! leaves is the same, so the choice changes no bit.

use crate::TensorRef;
use crate::cpu::Isa;
use crate::cpu::address::token_offset;
use crate::cpu::arena::{Arena, arena_bytes};
use crate::cpu::paged::{LINE, Out, State, Tree, root, state_len, write_row};
use crate::cpu::workers::{MAX_WORKERS, each};
use crate::mla::Geometry;
use crate::mutant::planted;
use crate::paged::LATENT_LEAF;

use super::body::{AHEAD, Body, TILE};
use super::engine::{Engine, Shape};

/// Picks a leaf.
const LEAF: usize = LATENT_LEAF as usize;

/// Rows a worker from which rows are handed out whole.
const WHOLE_ROWS: usize = 4;

/// Multiply-adds below which starting other workers costs more than it gives.
const SERIAL_WORK: u64 = 1 << 18;

/// One call, checked: every pick lies in its request's pages, every page in the pool.
pub(crate) struct Picks<'a> {
    pub(crate) geometry: Geometry,
    pub(crate) sm_scale: f32,
    pub(crate) isa: Isa,
    /// `[T, H, C]`.
    pub(crate) q_nope: TensorRef<'a>,
    /// `[T, H, E]`.
    pub(crate) q_pe: TensorRef<'a>,
    /// `[P, S, C + E]`.
    pub(crate) latent: TensorRef<'a>,
    /// `[T, K]` i32.
    pub(crate) selection: TensorRef<'a>,
    pub(crate) row_request: &'a [i32],
    pub(crate) kv_indptr: &'a [i32],
    pub(crate) kv_indices: &'a [i32],
    pub(crate) page_start: &'a [i32],
    pub(crate) o: Out,
    pub(crate) lse: Option<Out>,
}

/// Sizes that follow from geometry and `K`.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    width: usize,
    depth: usize,
    topk: usize,
    /// Leaves of a row at most.
    leaves: usize,
    /// Floats of a row's state.
    state: usize,
    /// States that wait in a row's tree at most.
    waiting: usize,
}

impl Sizes {
    fn of(geometry: &Geometry, topk: usize) -> Sizes {
        let (heads, width) = (geometry.num_qo_heads, geometry.kv_lora_rank);
        let leaves = topk.div_ceil(LEAF).max(1);
        Sizes {
            heads,
            width,
            depth: geometry.latent_dim(),
            topk,
            leaves,
            state: state_len(heads, width),
            waiting: leaves.ilog2() as usize + 2,
        }
    }

    /// Bytes of one worker's scratch.
    fn scratch(&self) -> usize {
        let bytes = Engine::bytes(self.heads, self.depth)
            + arena_bytes::<i32>(self.topk)
            + arena_bytes::<f32>(self.state * self.waiting);
        bytes.next_multiple_of(64)
    }

    /// Bytes of what workers share while they take one row's leaves.
    fn shared(&self) -> usize {
        arena_bytes::<i32>(self.topk) + arena_bytes::<f32>(self.state * self.leaves)
    }
}

/// Bytes that [`run`] needs with up to `workers` workers.
pub(crate) fn workspace_bytes(geometry: &Geometry, topk: usize, workers: usize) -> usize {
    let sizes = Sizes::of(geometry, topk);
    sizes.shared().saturating_add(workers.clamp(1, MAX_WORKERS).saturating_mul(sizes.scratch()))
}

/// Memory that workers cut up among themselves.
struct Memory {
    base: *mut u8,
    each: usize,
}

// SAFETY: workers use disjoint parts.
unsafe impl Sync for Memory {}

impl Memory {
    /// Part `index` of the memory.
    ///
    /// # Safety
    /// The memory has such a part, and nobody else uses it now.
    #[allow(clippy::mut_from_ref)] // Parts are disjoint.
    unsafe fn part(&self, index: usize) -> &mut [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(index * self.each), self.each) }
    }
}

/// Attends. `workspace` starts on a cache line and has `workspace_bytes(..)` bytes.
pub(crate) fn run(picks: &Picks<'_>, workspace: &mut [u8], workers: usize) {
    let topk = picks.selection.shape()[1];
    let sizes = Sizes::of(&picks.geometry, topk);
    let (shared, scratch) = workspace.split_at_mut(sizes.shared());
    assert!(
        scratch.len() >= workers.clamp(1, MAX_WORKERS) * sizes.scratch()
            && (shared.as_ptr() as usize).is_multiple_of(64),
        "checked by the caller"
    );
    let scratch = Memory { base: scratch.as_mut_ptr(), each: sizes.scratch() };
    let rows = picks.row_request.len();
    let active = picks.row_request.iter().filter(|&&request| request >= 0).count();
    let row_work = (sizes.heads * (sizes.depth + sizes.width)) as u64 * topk as u64;
    let serial = row_work.saturating_mul(active as u64) < SERIAL_WORK;
    let workers = if serial { 1 } else { workers.clamp(1, MAX_WORKERS) };
    if workers == 1 || sizes.leaves == 1 || active >= WHOLE_ROWS * workers {
        each(workers, rows, &|worker, token| {
            if picks.row_request[token] >= 0 {
                // SAFETY: `worker` is below `workers`, for which the workspace has room; a worker has one row at a time.
                whole_row(picks, &sizes, token, unsafe { scratch.part(worker) });
            }
        });
    } else {
        for token in (0..rows).filter(|&token| picks.row_request[token] >= 0) {
            split_row(picks, &sizes, token, shared, &scratch, workers);
        }
    }
}

/// One row by one worker.
fn whole_row(picks: &Picks<'_>, sizes: &Sizes, token: usize, scratch: &mut [u8]) {
    let mut arena = Arena::new(scratch);
    let positions = arena.take::<i32>(sizes.topk);
    let states = arena.take::<f32>(sizes.state * sizes.waiting);
    let positions = sorted(picks, token, positions);
    if positions.is_empty() {
        clear(sizes, &mut states[..sizes.state]);
    } else {
        let mut row = PickedRow::new(picks, sizes, token, positions, &mut arena);
        let mut tree = Tree::new();
        for leaf in 0..positions.len().div_ceil(LEAF) {
            let at = tree.len();
            row.leaf(leaf, &mut states[at * sizes.state..][..sizes.state]);
            tree.push(0, leaf as u32, |left| join(picks, sizes, states, left, left + 1));
        }
        tree.finish(|left| join(picks, sizes, states, left, left + 1));
    }
    write(picks, sizes, token, &mut states[..sizes.state]);
}

/// One row by all workers.
fn split_row(
    picks: &Picks<'_>,
    sizes: &Sizes,
    token: usize,
    shared: &mut [u8],
    scratch: &Memory,
    workers: usize,
) {
    let mut arena = Arena::new(shared);
    let positions = arena.take::<i32>(sizes.topk);
    let states = arena.take::<f32>(sizes.state * sizes.leaves);
    let positions = sorted(picks, token, positions);
    let leaves = positions.len().div_ceil(LEAF);
    if leaves == 0 {
        clear(sizes, &mut states[..sizes.state]);
    }
    let bytes = sizes.state * size_of::<f32>();
    let memory = Memory { base: states.as_mut_ptr().cast(), each: bytes };
    each(workers, leaves, &|worker, leaf| {
        // SAFETY: `worker` is below `workers`, for which the workspace has room; each leaf has a state of its own.
        let (scratch, state) = unsafe { (scratch.part(worker), memory.part(leaf)) };
        let mut arena = Arena::new(scratch);
        let mut row = PickedRow::new(picks, sizes, token, positions, &mut arena);
        row.leaf(leaf, bytemuck::cast_slice_mut(state));
    });
    let mut at = [0usize; 34];
    let mut tree = Tree::new();
    for leaf in 0..leaves {
        at[tree.len()] = leaf;
        tree.push(0, leaf as u32, |left| join(picks, sizes, states, at[left], at[left + 1]));
    }
    tree.finish(|left| join(picks, sizes, states, at[left], at[left + 1]));
    write(picks, sizes, token, &mut states[..sizes.state]);
}

/// A row's picks in ascending order of position.
fn sorted<'a>(picks: &Picks<'_>, token: usize, to: &'a mut [i32]) -> &'a [i32] {
    let selection = &picks.selection;
    // SAFETY: `selection` is `[T, K]` i32 on the CPU with a contiguous innermost axis, and `token` is below `T`.
    let listed = unsafe {
        let start = selection.as_ptr().cast::<i32>().wrapping_add(token * selection.strides()[0]);
        if to.is_empty() { &[] } else { std::slice::from_raw_parts(start, to.len()) }
    };
    let mut count = 0;
    for &position in listed {
        let position = if planted("sparse-minus-one-read") { position.max(0) } else { position };
        to[count] = position;
        count += usize::from(position >= 0);
        if count == to.len() {
            break;
        }
    }
    let picked = &mut to[..count];
    if !picked.is_sorted() && !planted("sparse-order-kept") {
        picked.sort_unstable();
    }
    picked
}

fn clear(sizes: &Sizes, state: &mut [f32]) {
    let padded = sizes.heads.next_multiple_of(LINE);
    state[..padded].fill(f32::NEG_INFINITY);
    state[padded..].fill(0.0);
}

/// Joins the state at `right` to the one at `left`, which stands before it.
fn join(picks: &Picks<'_>, sizes: &Sizes, states: &mut [f32], left: usize, right: usize) {
    let (below, above) = states.split_at_mut(right * sizes.state);
    let right = State::new(&mut above[..sizes.state], sizes.heads, sizes.width);
    let left = &mut below[left * sizes.state..][..sizes.state];
    State::new(left, sizes.heads, sizes.width).join(&right, picks.exponent());
}

fn write(picks: &Picks<'_>, sizes: &Sizes, token: usize, state: &mut [f32]) {
    let state = State::new(state, sizes.heads, sizes.width);
    let unit = if picks.raw_scores() { picks.sm_scale.into() } else { 1.0 };
    let stride = state.acc.len() / sizes.heads;
    for head in 0..sizes.heads {
        let (factor, lse) = root(state.m[head], state.l[head], unit, None);
        let acc = &state.acc[head * stride..][..sizes.width];
        // SAFETY: token and head are in range of `o` and `lse`; each row is written by one worker.
        unsafe {
            write_row(&picks.o, token, head, acc, factor);
            if let Some(out) = &picks.lse {
                *out.ptr.cast::<f32>().add(token * out.strides[0] + head * out.strides[1]) = lse;
            }
        }
    }
}

impl Picks<'_> {
    /// Whether the scale enters the exponent alone, which keeps differences of large scores exact.
    fn raw_scores(&self) -> bool {
        self.sm_scale > 0.0
    }

    /// Factor that turns a difference of scores into a base-2 exponent.
    fn exponent(&self) -> f32 {
        let unit = if self.raw_scores() { self.sm_scale.into() } else { 1.0 };
        (unit * std::f64::consts::LOG2_E) as f32
    }
}

/// A row's queries and picks, ready to be attended leaf by leaf.
struct PickedRow<'a, 'p> {
    picks: &'p Picks<'p>,
    sizes: &'p Sizes,
    positions: &'p [i32],
    pages: &'p [i32],
    start: u32,
    engine: Engine<'a>,
}

impl<'a, 'p> PickedRow<'a, 'p> {
    fn new(
        picks: &'p Picks<'p>,
        sizes: &'p Sizes,
        token: usize,
        positions: &'p [i32],
        arena: &mut Arena<'a>,
    ) -> PickedRow<'a, 'p> {
        let g = &picks.geometry;
        let shape = Shape {
            body: Body::select(picks.isa, g.q_dtype, g.kv_dtype, sizes.width),
            width: sizes.width,
            depth: sizes.depth,
            q_dtype: g.q_dtype,
            kv_dtype: g.kv_dtype,
            scale: if picks.raw_scores() { 1.0 } else { picks.sm_scale },
            c: picks.exponent(),
        };
        let mut engine = Engine::new(arena, shape, sizes.heads);
        for head in 0..sizes.heads {
            let at = |tensor: &TensorRef<'_>| {
                let elements = token * tensor.strides()[0] + head * tensor.strides()[1];
                tensor.as_ptr().wrapping_add(elements * tensor.dtype().size())
            };
            // SAFETY: token and head are in range of both, whose innermost axes are contiguous.
            unsafe { engine.set_lane(head, at(&picks.q_nope), at(&picks.q_pe), 0, positions.len() as u32) };
        }
        let request = picks.row_request[token] as usize;
        let (begin, end) = (picks.kv_indptr[request] as usize, picks.kv_indptr[request + 1] as usize);
        let start = if planted("sparse-page-start-ignored") { 0 } else { picks.page_start[request] as u32 };
        PickedRow { picks, sizes, positions, pages: &picks.kv_indices[begin..end], start, engine }
    }

    /// Sums leaf `leaf` of the picks into `state`.
    fn leaf(&mut self, leaf: usize, state: &mut [f32]) {
        clear(self.sizes, state);
        let end = self.positions.len().min((leaf + 1) * LEAF);
        for first in (leaf * LEAF..end).step_by(TILE) {
            let count = TILE.min(end - first);
            let mut rows = [self.engine.zeros(); TILE];
            for (row, &position) in rows.iter_mut().zip(&self.positions[first..first + count]) {
                *row = self.latent(position as u32);
            }
            let next = &self.positions[first + count..end.min(first + count + AHEAD)];
            let mut ahead = [std::ptr::null(); AHEAD];
            for (row, &position) in ahead.iter_mut().zip(next) {
                *row = self.latent(position as u32);
            }
            let ahead = &ahead[..next.len()];
            let padded = count.next_multiple_of(2);
            // SAFETY: `Body::select` was given a supported instruction set; every pick was checked to lie in the pages.
            unsafe { self.engine.tile(&rows[..padded], first as u32, padded != count, ahead, state) };
        }
    }

    /// Where the latent at a position of the request lies.
    fn latent(&self, position: u32) -> *const u8 {
        let (tensor, page_size) = (&self.picks.latent, self.picks.geometry.page_size as u32);
        // Both are below 2^31.
        let at = self.start + position;
        let page = self.pages[(at / page_size) as usize] as u32;
        let strides = tensor.strides();
        let elements = token_offset(page, at % page_size, strides[0] as u64, strides[1] as u64) as usize;
        tensor.as_ptr().wrapping_add(elements * tensor.dtype().size())
    }
}
