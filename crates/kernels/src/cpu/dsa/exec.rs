//! Blocks of rows: queries packed, keys scored chunk by chunk, then each row's pick.
//!
//! Neighbouring rows of one request form a *run* that shares every packed block of keys. Work is numbered, (run, chunk of
//! keys) and then (row), and shared among threads; which thread does what, and how rows are blocked, never shows in a result.

use super::body::{Ahead, BLOCK, Block, Body};
use super::pack::{self, Keys};
use super::pick::pick;
use crate::TensorRef;
use crate::cpu::Isa;
use crate::cpu::arena::Arena;
use crate::cpu::workers::{MAX_WORKERS, each};
use crate::dsa::{KeyFormat, Table};

/// Rows of a block at most.
const PANEL: usize = 64;
/// Bytes of a block's scores, unless [`LEAST_ROWS`] need more.
const SCORE_BYTES: usize = 16 << 20;
/// Rows of a block at least, when there are so many.
const LEAST_ROWS: usize = 4;
/// Blocks of keys in a piece of work at most.
const CHUNK_BLOCKS: usize = 16;
/// Pieces of work a thread, where there are enough blocks of keys: one that is slow leaves the others something to do.
const PIECES: usize = 8;
/// Multiply-adds below which starting other workers costs more than it gives.
const SERIAL_WORK: usize = 1 << 18;

/// Everything that is read, checked by the caller.
pub(crate) struct Call<'a> {
    pub(crate) isa: Isa,
    /// `[T, Hi, Di]` of a float type.
    pub(crate) q: TensorRef<'a>,
    /// `[T, Hi]` f32.
    pub(crate) weights: TensorRef<'a>,
    /// `[P, S, W]`.
    pub(crate) keys: TensorRef<'a>,
    pub(crate) format: KeyFormat,
    pub(crate) table: Table<'a>,
}

/// Where results go.
#[derive(Clone, Copy)]
pub(crate) enum Sink {
    /// `[T, K]`, rows `stride` elements apart.
    Picks { to: *mut i32, stride: usize, topk: usize },
    /// `[T, N]`, rows `stride` elements apart; keys that a row does not see become `-inf`.
    Scores { to: *mut f32, stride: usize, width: usize },
}

// SAFETY: addresses; each row is written by one piece of work.
unsafe impl Sync for Sink {}

/// Floats from one row's scores to the next: whole blocks of keys.
fn score_stride(keys: usize) -> usize {
    keys.div_ceil(BLOCK).saturating_mul(BLOCK)
}

/// Floats that hold a block's scores.
fn score_floats(rows: usize, keys: usize) -> usize {
    let stride = score_stride(keys);
    let all = rows.min(PANEL).saturating_mul(stride);
    all.min((SCORE_BYTES / 4).max(stride.saturating_mul(LEAST_ROWS)))
}

/// Rows of a block.
fn panel_rows(rows: usize, keys: usize) -> usize {
    let fit = score_floats(rows, keys).checked_div(score_stride(keys)).unwrap_or(PANEL);
    fit.clamp(1, PANEL)
}

/// Bytes of a worker's packed block of keys and its scales: whole cache lines, 64 words a step and as many scales.
fn scratch_bytes(width: usize) -> usize {
    width.saturating_add(1).saturating_mul(4 * BLOCK)
}

/// Bytes that [`run`] needs, from a cache line on.
pub(crate) fn workspace_bytes(rows: usize, keys: usize, heads: usize, width: usize, workers: usize) -> usize {
    let bytes = |words: usize| words.saturating_mul(4).saturating_add(63);
    let queries = rows.min(PANEL).saturating_mul(heads).saturating_mul(width);
    let scratch = workers.clamp(1, MAX_WORKERS).saturating_mul(scratch_bytes(width));
    bytes(score_floats(rows, keys)).saturating_add(bytes(queries)).saturating_add(scratch)
}

/// Neighbouring rows of one request.
#[derive(Clone, Copy, Default)]
struct Run {
    /// Rows of the block.
    begin: usize,
    end: usize,
    request: usize,
    /// Keys that some row sees.
    seen: usize,
    /// Number of its first chunk among all chunks of the block.
    first_chunk: usize,
}

/// Memory that threads write disjoint parts of.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: an address; see the uses.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// The elements lie in the memory, and nobody else uses them while the slice lives.
    #[allow(clippy::mut_from_ref)]
    unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.wrapping_add(at), len) }
    }
}

/// Scores every row's keys and hands them to `sink`.
///
/// # Safety
/// The tensors of `call` have the shapes and types that its fields name, with contiguous innermost axes, on the CPU, and
/// its table was checked against them; `sink` has `T` rows of the stated width (for scores, at least what each row
/// sees) that do not overlap, and nobody else reads or writes them.
pub(crate) unsafe fn run(call: &Call<'_>, sink: Sink, workspace: &mut [u8], workers: usize) {
    let [rows, heads, width] = [0, 1, 2].map(|axis| call.q.shape()[axis]);
    let most = (0..rows).map(|row| call.table.seen(row)).max().unwrap_or(0);
    assert!(
        workspace.len() >= workspace_bytes(rows, most, heads, width, workers)
            && (workspace.as_ptr() as usize).is_multiple_of(64),
        "checked by the caller"
    );
    let work = (0..rows).fold(0usize, |sum, row| sum.saturating_add(call.table.seen(row)));
    let serial = work.saturating_mul(heads * width) < SERIAL_WORK;
    let workers = if serial { 1 } else { workers.clamp(1, MAX_WORKERS) };
    let body = Body::of(call.isa, call.q.dtype(), call.format);
    let (panel, stride, depth) = (panel_rows(rows, most), score_stride(most), body.depth(width));
    let lines = call.format.bytes(width).div_ceil(64);
    let mut arena = Arena::new(workspace);
    let scores = Shared(arena.take::<f32>(score_floats(rows, most)).as_mut_ptr());
    let queries = Shared(arena.take::<u32>(rows.min(PANEL) * heads * width).as_mut_ptr());
    let scratch_len = scratch_bytes(width);
    let scratch = Shared(arena.take::<u8>(workers * scratch_len).as_mut_ptr());

    for first in (0..rows).step_by(panel) {
        let count = panel.min(rows - first);
        let cut = Runs::cut(&call.table, first, count, workers);
        each(if cut.chunks > 1 { workers } else { 1 }, count, &|_, row| {
            if call.table.seen(first + row) == 0 {
                return;
            }
            // SAFETY: each row has its own part of the packed queries, `depth <= width` words a head.
            let packed = unsafe { queries.slice(row * heads * depth, heads * depth) };
            // SAFETY: the row is one of `q`, whose inner axes are as `call` says.
            unsafe { pack::queries(&call.q, first + row, body.pairs, packed) };
        });
        each(workers, cut.chunks, &|worker, index| {
            let (run, piece) = cut.piece(index);
            // SAFETY: the workspace has scratch for each worker, and a worker does one thing at a time.
            let mut arena = Arena::new(unsafe { scratch.slice(worker * scratch_len, scratch_len) });
            let (packed, scales) = (arena.take::<u32>(depth * BLOCK), arena.take::<f32>(BLOCK));
            let keys = Keys::new(call, run.request);
            let end = piece.end;
            let mut next = keys.locate(piece.start, end);
            for at in piece.step_by(BLOCK) {
                let rows = std::mem::replace(&mut next, keys.locate(at + BLOCK, end));
                // SAFETY: the table found the run's keys, up to `seen`, in pages of the pool.
                unsafe { pack::keys(&body, call.format, &rows, width, packed, scales) };
                let mut ahead = Ahead { rows: &next, lines };
                for row in run.begin..run.end {
                    if call.table.seen(first + row) <= at {
                        continue;
                    }
                    // SAFETY: row `first + row` of `[T, Hi]` has `heads` contiguous weights.
                    let weights = unsafe {
                        let weights = call.weights.as_ptr().cast::<f32>();
                        let at = (first + row) * call.weights.strides()[0];
                        std::slice::from_raw_parts(weights.wrapping_add(at), heads)
                    };
                    // SAFETY: the queries are packed and only read now; this piece of work alone has these scores,
                    // a whole block of a row's `stride`.
                    let (q, out) = unsafe {
                        (
                            &*queries.slice(row * heads * depth, heads * depth),
                            scores.slice(row * stride + at, BLOCK),
                        )
                    };
                    let scales = (call.format == KeyFormat::Fp8).then_some(&*scales);
                    body.score(&Block { keys: packed, q, weights, depth, scales, ahead }, out);
                    ahead = Ahead::NOTHING;
                }
            }
        });
        each(workers, count, &|_, row| {
            // SAFETY: the row's scores are complete and only read now, below `stride`.
            let scores = unsafe { &*scores.slice(row * stride, call.table.seen(first + row)) };
            // SAFETY: the caller's promise about `sink`; this piece of work alone has the row.
            unsafe { finish(call.isa, sink, first + row, scores) };
        });
    }
}

/// A block of rows, cut into runs.
struct Runs {
    runs: [Run; PANEL],
    len: usize,
    /// Keys of a piece of work.
    chunk: usize,
    /// Pieces in all.
    chunks: usize,
}

impl Runs {
    fn cut(table: &Table<'_>, first: usize, count: usize, workers: usize) -> Runs {
        let mut cut = Runs { runs: [Run::default(); PANEL], len: 0, chunk: BLOCK, chunks: 0 };
        let (mut row, mut blocks) = (0, 0);
        while row < count {
            let request = table.row_request[first + row];
            let (begin, mut seen) = (row, 0);
            while row < count && table.row_request[first + row] == request {
                seen = seen.max(table.seen(first + row));
                row += 1;
            }
            if request >= 0 {
                cut.runs[cut.len] = Run { begin, end: row, request: request as usize, seen, first_chunk: 0 };
                cut.len += 1;
                blocks += seen.div_ceil(BLOCK);
            }
        }
        cut.chunk = BLOCK * blocks.div_ceil(PIECES * workers).clamp(1, CHUNK_BLOCKS);
        for run in &mut cut.runs[..cut.len] {
            run.first_chunk = cut.chunks;
            cut.chunks += run.seen.div_ceil(cut.chunk);
        }
        cut
    }

    /// The run that piece `index` is of, and its keys.
    fn piece(&self, index: usize) -> (&Run, std::ops::Range<usize>) {
        let runs = &self.runs[..self.len];
        let run = &runs[runs.partition_point(|run| run.first_chunk <= index) - 1];
        let begin = (index - run.first_chunk) * self.chunk;
        (run, begin..run.seen.min(begin + self.chunk))
    }
}

/// Hands a row's scores on.
///
/// # Safety
/// Row `row` of `sink` is there, and nobody else uses it.
unsafe fn finish(isa: Isa, sink: Sink, row: usize, scores: &[f32]) {
    match sink {
        Sink::Picks { topk: 0, .. } => {}
        Sink::Picks { to, stride, topk } => {
            // SAFETY: the caller's promise.
            let out = unsafe { std::slice::from_raw_parts_mut(to.wrapping_add(row * stride), topk) };
            pick(isa, scores, out);
        }
        Sink::Scores { width: 0, .. } => {}
        Sink::Scores { to, stride, width } => {
            // SAFETY: the caller's promise.
            let out = unsafe { std::slice::from_raw_parts_mut(to.wrapping_add(row * stride), width) };
            out[..scores.len()].copy_from_slice(scores);
            out[scores.len()..].fill(f32::NEG_INFINITY);
        }
    }
}
