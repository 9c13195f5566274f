//! Index scores, their pick, and keys quantised, on a device.

use bytemuck::{Pod, Zeroable};

use crate::cpu::dsa::Call;
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::{Context, Launch, launch};
use crate::dsa::{DeviceTable, KeyFormat};
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

use super::params::{View, number};

/// Bytes of a panel's scores: rows are taken in panels, unless [`LEAST_ROWS`] need more.
const PANEL_BYTES: usize = 64 << 20;
/// Rows of a panel at least, when there are so many.
const LEAST_ROWS: usize = 16;
/// The widest key that tensor cores take.
const MAX_DEPTH: usize = 256;
/// Keys that a block takes in one round of its warps, with two tiles each.
const ROUND: usize = 192;
/// Bytes of shared memory of `cu/topk.cu`: counters, sums of warps, what was found.
const TOPK_SHARED: u32 = (2048 + 32 + 4) * 4;

/// As `Scores` in `cu/scores.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Scores {
    table: u64,
    q: u64,
    weights: u64,
    keys: u64,
    to: u64,
    q_token: i64,
    q_head: i64,
    weight_token: i64,
    key_page: i64,
    key_slot: i64,
    to_stride: i64,
    heads: u32,
    width: u32,
    page_size: u32,
    row_begin: u32,
    row_end: u32,
    to_row: u32,
    to_width: u32,
    chunk: u32,
}

/// As `Topk` in `cu/topk.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Topk {
    table: u64,
    scores: u64,
    to: u64,
    score_stride: i64,
    to_stride: i64,
    topk: u32,
    row_begin: u32,
    row_end: u32,
    reserved: u32,
}

/// As `Quantise` in `cu/quantise.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Quantise {
    keys: u64,
    to: u64,
    from_stride: i64,
    to_stride: i64,
    tokens: u32,
    width: u32,
}

const _: () = assert!(size_of::<Scores>() == 120 && size_of::<Topk>() == 56 && size_of::<Quantise>() == 40);

/// Floats from one row's scores to the next.
fn stride(keys: usize) -> usize {
    keys.next_multiple_of(4).max(4)
}

/// Bytes that [`select`] needs for up to so many rows, which see up to so many keys, wherever the workspace starts.
pub(crate) fn select_bytes(rows: usize, keys: usize) -> usize {
    let row = stride(keys).saturating_mul(4);
    rows.min((PANEL_BYTES / row).max(LEAST_ROWS)).saturating_mul(row).saturating_add(63)
}

/// A kernel of scores: what to compile, threads, bytes of shared memory, blocks a multiprocessor.
struct Choice {
    key: Key,
    threads: u32,
    shared: u32,
    blocks: u32,
}

fn choose(q: DType, format: KeyFormat, heads: usize, width: usize, aligned: bool, room: u32) -> Choice {
    let keys = if format == KeyFormat::Fp8 { 3 } else { number(format.dtype()) };
    let key = Key::new(Unit::SCORES, "scores").with("Q_TYPE", number(q)).with("KEY_TYPE", keys);
    let depth = width.next_multiple_of(32);
    // Queries of all heads, padded to eight, and their weights.
    let shared = heads.next_multiple_of(8) * ((depth * 2).next_multiple_of(128) + 64 + 4);
    // Codes are read four at once.
    let served = q != DType::F32 && (keys == number(q) || keys == 3 && aligned);
    if !served || depth > MAX_DEPTH || shared > room as usize {
        return Choice { key: Key { entry: "scores_plain", ..key }, threads: 128, shared: 0, blocks: 4 };
    }
    let aligned = aligned && (format == KeyFormat::Fp8 || width.is_multiple_of(8));
    let blocks = if aligned && 2 * (shared + 1024) <= room as usize { 2 } else { 1 };
    let key = key
        .with("DEPTH", depth as i64)
        .with("KEY_TILES", if depth <= 128 && aligned { 2 } else { 1 })
        .with("KEYS_ALIGNED", aligned.into())
        .with("MIN_BLOCKS", blocks);
    Choice { key, threads: 192, shared: shared as u32, blocks: blocks as u32 }
}

/// What keys' addresses are to be multiples of, for the loads of tensor cores' kernels.
fn alignment(format: KeyFormat) -> usize {
    if format == KeyFormat::Fp8 { 4 } else { 16 }
}

/// Compiles and loads what selecting with such an indexer will run.
pub(crate) fn prepare(device: Device, q: DType, format: KeyFormat, heads: usize, width: usize) -> Result<()> {
    let room = Context::of(device)?.shared_per_block_optin();
    let aligned = format.bytes(width).is_multiple_of(alignment(format));
    let scores = choose(q, format, heads, width, aligned, room).key;
    // Keys come in the queries' type.
    jit::prepare(device, &[scores, Key::new(Unit::TOPK, "topk"), storing(q, format)])
}

/// Puts the scores of rows `rows` into the stream, to `to`, where row `rows.start` comes first; with `fill`, so many a row,
/// `-inf` past what it sees.
fn score(
    stream: &Stream,
    call: &Call<'_>,
    table: &DeviceTable,
    rows: std::ops::Range<usize>,
    to: (u64, usize),
    fill: usize,
) -> Result<()> {
    let context = Context::of(stream.device())?;
    let [_, heads, width] = [0, 1, 2].map(|axis| call.q.shape()[axis]);
    let (room, keys) = (context.shared_per_block_optin(), table.max_keys().max(fill));
    let aligned = View::aligned_to(&call.keys, alignment(call.format));
    let choice = choose(call.q.dtype(), call.format, heads, width, aligned, room);
    let function = jit::function(stream.device(), &choice.key)?;
    let slots = context.sm_count() * choice.blocks;
    // Long chunks load queries seldom; short ones are spread evenly.
    let units = |chunk: usize| rows.len() * keys.div_ceil(chunk);
    let chunk = [8, 4, 2]
        .map(|rounds| rounds * ROUND)
        .into_iter()
        .find(|&chunk| units(chunk) >= 4 * slots as usize)
        .unwrap_or(ROUND);
    let chunk = if choice.shared == 0 { 128 } else { chunk };
    let size = call.format.dtype().size();
    let params = Scores {
        table: table.address(),
        q: call.q.as_ptr() as u64,
        weights: call.weights.as_ptr() as u64,
        keys: call.keys.as_ptr() as u64,
        to: to.0,
        q_token: call.q.strides()[0] as i64,
        q_head: call.q.strides()[1] as i64,
        weight_token: call.weights.strides()[0] as i64,
        key_page: (call.keys.strides()[0] * size) as i64,
        key_slot: (call.keys.strides()[1] * size) as i64,
        to_stride: to.1 as i64,
        heads: heads as u32,
        width: width as u32,
        page_size: call.keys.shape()[1] as u32,
        row_begin: rows.start as u32,
        row_end: rows.end as u32,
        to_row: rows.start as u32,
        to_width: fill as u32,
        chunk: chunk as u32,
    };
    let blocks = slots.min(u32::try_from(units(chunk)).unwrap_or(u32::MAX));
    let how = Launch { grid: [blocks, 1, 1], block: choice.threads, shared: choice.shared };
    // SAFETY: the kernel takes a `Scores`; the call was checked: tensors of these shapes on this device, a table whose keys lie in
    // the pages, and `to` has `keys` floats a row for the rows.
    unsafe { launch(&function, stream, how, &params) }
}

/// Scores to `[T, N]` f32, `-inf` for keys that a row does not see. The call was checked, its arrays are those of the table, and
/// `N` is at least what any row sees.
///
/// # Errors
/// A kernel that cannot be built or launched.
pub(crate) fn scores(
    stream: &Stream,
    call: &Call<'_>,
    table: &DeviceTable,
    to: &mut TensorMut<'_>,
) -> Result<()> {
    let (rows, width, stride) = (to.shape()[0], to.shape()[1], to.strides()[0]);
    if rows == 0 || width == 0 {
        return Ok(());
    }
    score(stream, call, table, 0..rows, (to.as_mut_ptr() as u64, stride), width)
}

/// Scores and picks to `[T, K]` i32. The call was checked, and its arrays are those of the table.
///
/// # Errors
/// A workspace that does not hold one row's scores; a kernel that cannot be built or launched.
pub(crate) fn select(
    stream: &Stream,
    call: &Call<'_>,
    table: &DeviceTable,
    selection: &mut TensorMut<'_>,
    workspace: &mut TensorMut<'_>,
) -> Result<()> {
    let (rows, topk) = (selection.shape()[0], selection.shape()[1]);
    if rows == 0 || topk == 0 {
        return Ok(());
    }
    let stride = stride(table.max_keys());
    let available = workspace.numel();
    let start = (workspace.as_mut_ptr() as u64).next_multiple_of(64);
    let skipped = (start - workspace.as_mut_ptr() as u64) as usize;
    let panel = (available.saturating_sub(skipped) / (4 * stride)).min(rows);
    if panel == 0 {
        return Err(Error::Workspace { needed: select_bytes(rows, table.max_keys()), available });
    }
    let context = Context::of(stream.device())?;
    let function = jit::function(stream.device(), &Key::new(Unit::TOPK, "topk"))?;
    for first in (0..rows).step_by(panel) {
        let end = rows.min(first + panel);
        score(stream, call, table, first..end, (start, stride), 0)?;
        let params = Topk {
            table: table.address(),
            scores: start,
            to: selection.as_mut_ptr() as u64,
            score_stride: stride as i64,
            to_stride: selection.strides()[0] as i64,
            topk: topk as u32,
            row_begin: first as u32,
            row_end: end as u32,
            reserved: 0,
        };
        let blocks = (2 * context.sm_count()).min((end - first) as u32);
        let how = Launch { grid: [blocks, 1, 1], block: 1024, shared: TOPK_SHARED };
        // SAFETY: the kernel takes a `Topk`; scores of the panel's rows lie in the workspace, `selection` is `[T, K]` i32 on this
        // device, both were checked.
        unsafe { launch(&function, stream, how, &params) }?;
    }
    Ok(())
}

/// Which kernel stores keys of a type in a format.
fn storing(from: DType, format: KeyFormat) -> Key {
    match format {
        KeyFormat::Fp8 => Key::new(Unit::QUANTISE, "quantise").with("KEY_TYPE", number(from)),
        _ => Key::new(Unit::QUANTISE, "convert")
            .with("KEY_TYPE", number(from))
            .with("TO_TYPE", number(format.dtype())),
    }
}

/// Stores keys `[T, Di]` as `[T, W]` of a format. Both were checked.
///
/// # Errors
/// A kernel that cannot be built or launched.
pub(crate) fn store_keys(
    stream: &Stream,
    keys: TensorRef<'_>,
    format: KeyFormat,
    out: &mut TensorMut<'_>,
) -> Result<()> {
    let (tokens, width) = (keys.shape()[0], keys.shape()[1]);
    let function = jit::function(stream.device(), &storing(keys.dtype(), format))?;
    let params = Quantise {
        keys: keys.as_ptr() as u64,
        to: out.as_mut_ptr() as u64,
        from_stride: keys.strides()[0] as i64,
        to_stride: out.strides()[0] as i64,
        tokens: tokens as u32,
        width: width as u32,
    };
    let blocks = (8 * Context::of(stream.device())?.sm_count()).min(tokens.div_ceil(4) as u32);
    let how = Launch { grid: [blocks, 1, 1], block: 128, shared: 0 };
    // SAFETY: the kernel takes a `Quantise`; both tensors were checked to have these shapes on this device.
    unsafe { launch(&function, stream, how, &params) }
}
