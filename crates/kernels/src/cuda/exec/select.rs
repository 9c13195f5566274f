//! Index scores, their pick, and keys quantised, on a device.

use bytemuck::{Pod, Zeroable};

use crate::cpu::dsa::Call;
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::launch::launch_next;
use crate::cuda::{Context, Launch, launch};
use crate::dsa::{DeviceTable, KeyFormat};
use crate::{DType, Device, Error, Kernels, Result, Stream, TensorMut, TensorRef};

use super::params::{View, number};

/// Bytes of a panel's scores: rows are taken in panels, unless [`LEAST_ROWS`] need more.
const PANEL_BYTES: usize = 64 << 20;
/// Rows of a panel at least, when there are so many.
const LEAST_ROWS: usize = 16;
/// The widest key that tensor cores take.
const MAX_DEPTH: usize = 256;
/// Of the kernel for Hopper: threads of a block, keys that it takes at once, and bytes that a multiprocessor keeps of each block.
const WIDE_THREADS: u32 = 128;
const WIDE_TILE: usize = 64;
const RESERVED: usize = 1024;
/// Keys that a block takes in one round of its warps, with two tiles each.
const ROUND: usize = 192;
/// Of `cu/topk.cu`: threads; keys of a segment, a block's; words of a row's state; bytes of shared memory of its two kernels.
const TOPK_THREADS: u32 = 512;
const SEGMENT: usize = 4096;
const STATE: usize = 8192 + 512 + 16;
const COUNT_SHARED: u32 = 8192 * 4;
const PICK_SHARED: u32 = 39040;
/// Of `cu/topk_row.cu`, whose threads are as many: bytes of shared memory of a block, and those more for each block of a cluster; blocks that
/// clusters may have; keys that a block keeps. Longer rows than a cluster keeps are swept by all multiprocessors.
const ROW_SHARED: u32 = 57456;
const ROW_SHARED_EACH: u32 = 32;
const CLUSTERS: [usize; 3] = [2, 4, 8];
const KEPT: usize = 8192;

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
    states: u64,
    state_words: u64,
    table_bytes: u64,
}

/// As `Topk` in `cu/topk.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Topk {
    table: u64,
    scores: u64,
    lists: u64,
    states: u64,
    lengths: u64,
    to: u64,
    score_stride: i64,
    list_stride: i64,
    to_stride: i64,
    topk: u32,
    row_begin: u32,
    row_end: u32,
    segments: u32,
    width: u32,
    reserved: u32,
}

/// As `Topk` in `cu/topk_row.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct TopkRow {
    table: u64,
    scores: u64,
    to: u64,
    score_stride: i64,
    to_stride: i64,
    topk: u32,
    row_begin: u32,
    row_end: u32,
    width: u32,
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

const _: () = assert!(size_of::<Scores>() == 144 && size_of::<Topk>() == 96 && size_of::<TopkRow>() == 56);
const _: () = assert!(size_of::<Quantise>() == 40);

/// Floats from one row's scores to the next.
fn stride(keys: usize) -> usize {
    keys.next_multiple_of(4).max(4)
}

/// How the workspace of a panel of rows is cut: states, scores, lengths of lists, each of so many words a row.
struct Panel {
    scores: usize,
    segments: usize,
}

impl Panel {
    fn of(keys: usize) -> Panel {
        Panel { scores: stride(keys), segments: keys.div_ceil(SEGMENT).max(1) }
    }

    /// Bytes of a row.
    fn row(&self) -> usize {
        self.scores.saturating_add(self.segments).saturating_add(STATE).saturating_mul(4)
    }
}

/// Bytes that [`select`] needs for up to so many rows, which see up to so many keys, wherever the workspace starts.
pub(crate) fn select_bytes(rows: usize, keys: usize) -> usize {
    let row = Panel::of(keys).row();
    rows.min((PANEL_BYTES / row).max(LEAST_ROWS)).saturating_mul(row).saturating_add(63)
}

/// A kernel of scores: what to compile, threads, bytes of shared memory, blocks a multiprocessor.
struct Choice {
    key: Key,
    threads: u32,
    shared: u32,
    blocks: u32,
    /// Keys that a block takes at once, where that is not for the call to say.
    tile: usize,
}

/// Bytes of shared memory of `cu/scores_wide.cu`, as it cuts them.
fn wide_bytes(codes: bool, heads: usize, depth: usize, stages: usize) -> usize {
    let product = [8, 16, 32].into_iter().find(|&columns| heads <= columns).unwrap_or(64);
    let pitch = if codes { depth + 4 } else { depth * 2 };
    heads.next_multiple_of(product) * (depth * 2 + 4) + stages * WIDE_TILE * pitch
}

/// The kernel for Hopper, where it serves.
fn choose_wide(
    q: DType,
    format: KeyFormat,
    heads: usize,
    width: usize,
    aligned: bool,
    kernels: Kernels,
    context: &Context,
) -> Option<Choice> {
    let codes = format == KeyFormat::Fp8;
    let served = q != DType::F32 && if codes { aligned } else { format.dtype() == q };
    let depth = width.next_multiple_of(64);
    let room = context.shared_per_block_optin() as usize;
    if !served || depth > MAX_DEPTH || !context.is_hopper() || kernels.settled() == Kernels::Mma {
        return None;
    }
    // Blocks share a multiprocessor's memory, and products need registers; many bytes are to be on their way.
    let fits = |blocks: usize| {
        let each = (room + RESERVED) / blocks - RESERVED;
        // Three blocks have enough on their way with two tiles each.
        let most = if !codes && blocks == 3 { 2 } else { 8 };
        (2..=most)
            .rev()
            .find(|&stages| wide_bytes(codes, heads, depth, stages) <= each)
            .map(|stages| (blocks, stages))
    };
    let most = if codes { 5 } else { 3 };
    let (blocks, stages) =
        [most, 2, 1].into_iter().filter(|&blocks| depth <= 128 || blocks < 3).find_map(fits)?;
    let key = Key::new(Unit::SCORES_WIDE, "scores_wide")
        .with("Q_TYPE", number(q))
        .with("KEY_TYPE", if codes { 3 } else { number(format.dtype()) })
        .with("DEPTH", depth as i64)
        .with("HEADS", heads as i64)
        .with("STAGES", stages as i64)
        .with("KEYS_ALIGNED", (codes || aligned && width.is_multiple_of(8)).into())
        .with("MIN_BLOCKS", blocks as i64);
    let shared = wide_bytes(codes, heads, depth, stages) as u32;
    Some(Choice { key, threads: WIDE_THREADS, shared, blocks: blocks as u32, tile: WIDE_TILE })
}

fn choose(
    q: DType,
    format: KeyFormat,
    heads: usize,
    width: usize,
    aligned: bool,
    kernels: Kernels,
    context: &Context,
) -> Choice {
    if let Some(wide) = choose_wide(q, format, heads, width, aligned, kernels, context) {
        return wide;
    }
    let room = context.shared_per_block_optin();
    let keys = if format == KeyFormat::Fp8 { 3 } else { number(format.dtype()) };
    let key = Key::new(Unit::SCORES, "scores").with("Q_TYPE", number(q)).with("KEY_TYPE", keys);
    let depth = width.next_multiple_of(32);
    // Queries of all heads, padded to eight, and their weights.
    let shared = heads.next_multiple_of(8) * ((depth * 2).next_multiple_of(128) + 64 + 4);
    // Codes are read four at once.
    let served = q != DType::F32 && (keys == number(q) || keys == 3 && aligned);
    if !served || depth > MAX_DEPTH || shared > room as usize {
        return Choice {
            key: Key { entry: "scores_plain", ..key },
            threads: 128,
            shared: 0,
            blocks: 4,
            tile: 128,
        };
    }
    let aligned = aligned && (format == KeyFormat::Fp8 || width.is_multiple_of(8));
    let blocks = if aligned && 2 * (shared + 1024) <= room as usize { 2 } else { 1 };
    let key = key
        .with("DEPTH", depth as i64)
        .with("KEY_TILES", if depth <= 128 && aligned { 2 } else { 1 })
        .with("KEYS_ALIGNED", aligned.into())
        .with("MIN_BLOCKS", blocks);
    Choice { key, threads: 192, shared: shared as u32, blocks: blocks as u32, tile: 0 }
}

/// What keys' addresses are to be multiples of, for the loads of tensor cores' kernels.
fn alignment(format: KeyFormat) -> usize {
    if format == KeyFormat::Fp8 { 4 } else { 16 }
}

/// Compiles and loads what selecting with such an indexer will run.
pub(crate) fn prepare(
    device: Device,
    q: DType,
    format: KeyFormat,
    heads: usize,
    width: usize,
    kernels: Kernels,
) -> Result<()> {
    let context = Context::of(device)?;
    let aligned = format.bytes(width).is_multiple_of(alignment(format));
    let scores = choose(q, format, heads, width, aligned, kernels, context).key;
    // Keys come in the queries' type.
    let mut keys = picking(context, kernels);
    keys.extend([scores, storing(q, format)]);
    jit::prepare(device, &keys)
}

/// Compiles and loads what [`topk`] runs.
pub(crate) fn prepare_topk(device: Device) -> Result<()> {
    jit::prepare(device, &picking(Context::of(device)?, Kernels::Auto))
}

/// The kernels of the pick, whatever rows are long and many.
fn picking(context: &Context, kernels: Kernels) -> Vec<Key> {
    let clusters = CLUSTERS.into_iter().filter(|_| picks_by_clusters(context, kernels)).map(by_cluster);
    sweeps().into_iter().chain(clusters).collect()
}

/// Those that go over a row by all multiprocessors.
fn sweeps() -> [Key; 2] {
    ["topk_count", "topk_pick"].map(|entry| Key::new(Unit::TOPK, entry))
}

/// The one that has a row by a cluster of so many blocks.
fn by_cluster(blocks: usize) -> Key {
    Key::new(Unit::TOPK_ROW, "topk_row").with("BLOCKS", blocks as i64)
}

fn picks_by_clusters(context: &Context, kernels: Kernels) -> bool {
    context.is_hopper() && kernels.settled() != Kernels::Mma
}

/// Blocks of the cluster of a row of up to so many scores; `None` where the row is for all multiprocessors. Changes no bit.
fn cluster_of(context: &Context, kernels: Kernels, width: usize) -> Option<usize> {
    #[cfg(test)]
    if let Some(blocks) = forced::cluster() {
        return (blocks > 0).then_some(blocks);
    }
    CLUSTERS
        .into_iter()
        .find(|&blocks| blocks * KEPT >= width)
        .filter(|_| picks_by_clusters(context, kernels))
}

/// Puts the scores of rows `rows` into the stream, to `to`, where row `rows.start` comes first; with `fill`, so many a row,
/// `-inf` past what it sees; and zeros to so many words of states.
fn score(
    stream: &Stream,
    call: &Call<'_>,
    table: &DeviceTable,
    rows: std::ops::Range<usize>,
    to: (u64, usize),
    fill: usize,
    states: (u64, usize),
) -> Result<()> {
    let context = Context::of(stream.device())?;
    let [_, heads, width] = [0, 1, 2].map(|axis| call.q.shape()[axis]);
    let keys = table.max_keys().max(fill);
    let aligned = View::aligned_to(&call.keys, alignment(call.format));
    let choice = choose(call.q.dtype(), call.format, heads, width, aligned, table.kernels(), context);
    let function = jit::function(stream.device(), &choice.key)?;
    let slots = context.sm_count() * choice.blocks;
    // Long chunks load queries seldom; short ones are spread evenly.
    let units = |chunk: usize| rows.len() * keys.div_ceil(chunk);
    let chunk = [8, 4, 2]
        .map(|rounds| rounds * ROUND)
        .into_iter()
        .find(|&chunk| units(chunk) >= 4 * slots as usize)
        .unwrap_or(ROUND);
    let chunk = if choice.tile == 0 { chunk } else { choice.tile };
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
        states: states.0,
        state_words: states.1 as u64,
        table_bytes: table.room() as u64,
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
    score(stream, call, table, 0..rows, (to.as_mut_ptr() as u64, stride), width, (0, 0))
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
    let context = Context::of(stream.device())?;
    let cut = Panel::of(table.max_keys());
    let available = workspace.numel();
    let start = (workspace.as_mut_ptr() as u64).next_multiple_of(64);
    let skipped = (start - workspace.as_mut_ptr() as u64) as usize;
    let panel = (available.saturating_sub(skipped) / cut.row()).min(rows);
    if panel == 0 {
        return Err(Error::Workspace { needed: select_bytes(rows, table.max_keys()), available });
    }
    let scores = start + (panel * STATE * 4) as u64;
    let lengths = scores + (panel * cut.scores * 4) as u64;
    for first in (0..rows).step_by(panel) {
        let end = rows.min(first + panel);
        // What nobody counts in is not cleared.
        let swept = cluster_of(context, table.kernels(), cut.scores).is_none();
        let states = (start, if swept { (end - first) * STATE } else { 0 });
        score(stream, call, table, first..end, (scores, cut.scores), 0, states)?;
        let scores = (scores, cut.scores);
        let of = Given { scores, width: cut.scores, lists: scores.0, states: start, lengths, next: true };
        pick(stream, table, first..end, &cut, of, selection)?;
    }
    Ok(())
}

/// What the pick of a panel of rows reads and is given to write in.
struct Given {
    /// Scores, and floats from one row's to the next.
    scores: (u64, usize),
    /// Scores of a row, a multiple of 4.
    width: usize,
    /// Lists, as far apart as scores of the panel's rows are.
    lists: u64,
    /// Zeros, where rows are swept.
    states: u64,
    lengths: u64,
    /// Whether what made the scores was put in right before.
    next: bool,
}

/// Puts the pick of rows `rows` of a selection into the stream.
fn pick(
    stream: &Stream,
    table: &DeviceTable,
    rows: std::ops::Range<usize>,
    cut: &Panel,
    of: Given,
    selection: &mut TensorMut<'_>,
) -> Result<()> {
    let context = Context::of(stream.device())?;
    let sms = context.sm_count() as usize;
    if let Some(blocks) = cluster_of(context, table.kernels(), of.width) {
        let function = jit::function(stream.device(), &by_cluster(blocks))?;
        let shared = ROW_SHARED + ROW_SHARED_EACH * blocks as u32;
        let fit = function.blocks_per_sm(TOPK_THREADS, shared)?.max(1) as usize * sms / blocks;
        let grid = [(rows.len().min(fit.max(1)) * blocks) as u32, 1, 1];
        let how = Launch { grid, block: TOPK_THREADS, shared };
        let params = TopkRow {
            table: table.address(),
            scores: of.scores.0,
            to: selection.as_mut_ptr() as u64,
            score_stride: of.scores.1 as i64,
            to_stride: selection.strides()[0] as i64,
            topk: selection.shape()[1] as u32,
            row_begin: rows.start as u32,
            row_end: rows.end as u32,
            width: of.width as u32,
        };
        // SAFETY: the kernel takes a `TopkRow`; scores lie in the workspace or in a tensor of as many rows; `selection` is `[T, K]` i32 on
        // this device, both were checked.
        return unsafe {
            match of.next {
                true => launch_next(&function, stream, how, &params),
                false => launch(&function, stream, how, &params),
            }
        };
    }
    let [count, pick] = sweeps().map(|key| jit::function(stream.device(), &key));
    let params = Topk {
        table: table.address(),
        scores: of.scores.0,
        lists: of.lists,
        states: of.states,
        lengths: of.lengths,
        to: selection.as_mut_ptr() as u64,
        score_stride: of.scores.1 as i64,
        list_stride: cut.scores as i64,
        to_stride: selection.strides()[0] as i64,
        topk: selection.shape()[1] as u32,
        row_begin: rows.start as u32,
        row_end: rows.end as u32,
        segments: cut.segments as u32,
        width: of.width as u32,
        reserved: 0,
    };
    let units = rows.len().saturating_mul(cut.segments);
    let how = |shared: u32, each: usize| {
        let grid = [units.min(each * sms) as u32, 1, 1];
        Launch { grid, block: TOPK_THREADS, shared }
    };
    let (count, how_count) = (count?, how(COUNT_SHARED, 4));
    // SAFETY: the kernels take a `Topk`; the panel's states, lists and lengths lie in the workspace as it was cut, its scores
    // there or in a tensor of as many rows; `selection` is `[T, K]` i32 on this device, both were checked.
    unsafe {
        match of.next {
            true => launch_next(&count, stream, how_count, &params),
            false => launch(&count, stream, how_count, &params),
        }?;
        launch_next(&pick?, stream, how(PICK_SHARED, 2), &params)
    }
}

/// Bytes that [`topk`] needs for up to so many rows over up to so many scores.
pub(crate) fn topk_bytes(rows: usize, keys: usize) -> usize {
    rows.saturating_mul(Panel::of(keys).row()).saturating_add(63)
}

/// The pick of scores `[T, N]` f32 to `[T, K]` i32 by a table of as many rows, which see no more than `N` keys. Checked, but for
/// the workspace.
///
/// # Errors
/// Rows of scores that do not start at multiples of 16 bytes; a workspace that is too small; a kernel that cannot be built or launched.
pub(crate) fn topk(
    stream: &Stream,
    table: &DeviceTable,
    scores: &TensorRef<'_>,
    selection: &mut TensorMut<'_>,
    workspace: &mut TensorMut<'_>,
) -> Result<()> {
    let (rows, keys) = (scores.shape()[0], scores.shape()[1]);
    if rows == 0 || selection.shape()[1] == 0 {
        return Ok(());
    }
    let stride = if rows == 1 { stride(keys) } else { scores.strides()[0] };
    if !View::aligned_to(scores, 16) || !keys.is_multiple_of(4) || !stride.is_multiple_of(4) {
        let expected = "[T, N], N a multiple of 4, whose rows start at multiples of 16 bytes".into();
        return Err(Error::Shape { tensor: "scores", expected, got: vec![rows, keys] });
    }
    let (cut, available, needed) = (Panel::of(keys), workspace.numel(), topk_bytes(rows, keys));
    if available < needed {
        return Err(Error::Workspace { needed, available });
    }
    let skipped = (workspace.as_mut_ptr() as usize).next_multiple_of(64) - workspace.as_mut_ptr() as usize;
    if cluster_of(Context::of(stream.device())?, table.kernels(), keys).is_none() {
        let states = workspace.reborrow().narrow(0, skipped, rows * STATE * 4)?;
        crate::fill(stream, states, 0)?;
    }
    let states = (workspace.as_mut_ptr() as usize + skipped) as u64;
    let lists = states + (rows * STATE * 4) as u64;
    let lengths = lists + (rows * cut.scores * 4) as u64;
    let of =
        Given { scores: (scores.as_ptr() as u64, stride), width: keys, lists, states, lengths, next: false };
    pick(stream, table, 0..rows, &cut, of, selection)
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

/// For a test in which rows are picked by clusters of so many blocks.
#[cfg(test)]
pub(crate) mod forced {
    use std::cell::Cell;

    thread_local! {
        static CLUSTER: Cell<Option<usize>> = const { Cell::new(None) };
    }

    pub(super) fn cluster() -> Option<usize> {
        CLUSTER.get()
    }

    /// What `run` picks on this thread is picked by clusters of `blocks`, or, of none, by sweeps.
    #[allow(dead_code, reason = "trials are there with every feature alone")]
    pub(crate) fn with_cluster<R>(blocks: usize, run: impl FnOnce() -> R) -> R {
        CLUSTER.set(Some(blocks));
        let result = run();
        CLUSTER.set(None);
        result
    }
}
