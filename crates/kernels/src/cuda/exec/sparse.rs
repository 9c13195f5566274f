//! Attention over picks on a device.

use bytemuck::{Pod, Zeroable};

use crate::cpu::paged::{Out, state_len};
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::{Context, Function, Launch, launch};
use crate::dsa::DeviceTable;
use crate::mla::Geometry;
use crate::{Device, Error, Result, Stream, TensorMut, TensorRef};

use super::params::{View, number};
use super::{Choice, latents};

/// Picks a leaf, as in `cu/sparse.cuh`.
const LEAF: usize = 512;
/// Bytes of the states of a panel of rows, unless [`LEAST_ROWS`] need more.
const PANEL_BYTES: usize = 256 << 20;
/// Rows of a panel at least, when there are so many.
const LEAST_ROWS: usize = 8;

/// As `Sparse` in `cu/sparse.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Sparse {
    table: u64,
    selection: u64,
    counts: u64,
    sorted: u64,
    partials: u64,
    q: u64,
    q_pe: u64,
    latents: u64,
    o: u64,
    lse: u64,
    selection_stride: i64,
    q_token: i64,
    q_head: i64,
    pe_token: i64,
    pe_head: i64,
    page: i64,
    slot: i64,
    o_token: i64,
    o_head: i64,
    lse_token: i64,
    lse_head: i64,
    heads: u32,
    c: u32,
    e: u32,
    page_size: u32,
    topk: u32,
    leaves: u32,
    row_begin: u32,
    row_end: u32,
    scale: f32,
    aligned: u32,
}

const _: () = assert!(size_of::<Sparse>() == 208);

/// One call, checked, its arrays those of the table.
pub(crate) struct Picks<'a> {
    pub(crate) geometry: Geometry,
    pub(crate) sm_scale: f32,
    /// `[T, H, C]`.
    pub(crate) q_nope: TensorRef<'a>,
    /// `[T, H, E]`.
    pub(crate) q_pe: TensorRef<'a>,
    /// `[P, S, C + E]`.
    pub(crate) latent: TensorRef<'a>,
    /// `[T, K]` i32.
    pub(crate) selection: TensorRef<'a>,
    pub(crate) table: &'a DeviceTable,
    pub(crate) o: Out,
    pub(crate) lse: Option<Out>,
}

/// How the workspace of a call is cut, in bytes: numbers of picks, picks in order, states.
struct Sizes {
    counts: usize,
    sorted: usize,
    /// States of one row.
    row: usize,
    leaves: usize,
}

impl Sizes {
    fn of(geometry: &Geometry, rows: usize, topk: usize) -> Sizes {
        let leaves = topk.div_ceil(LEAF).max(1);
        // A row of one leaf writes its result.
        let states = if leaves == 1 { 0 } else { leaves };
        let state = state_len(geometry.num_qo_heads, geometry.kv_lora_rank);
        let line = |words: usize| words.saturating_mul(4).checked_next_multiple_of(64).unwrap_or(usize::MAX);
        Sizes {
            counts: line(rows),
            sorted: line(rows.saturating_mul(topk)),
            row: states.saturating_mul(state).saturating_mul(4),
            leaves,
        }
    }

    /// Rows of a panel in `room` bytes.
    fn panel(&self, rows: usize, room: usize) -> usize {
        room.checked_div(self.row).unwrap_or(rows).min(rows)
    }
}

/// Bytes that [`attend`] needs for up to so many rows of up to `topk` picks, wherever the workspace starts.
pub(crate) fn bytes(geometry: &Geometry, rows: usize, topk: usize) -> usize {
    let sizes = Sizes::of(geometry, rows, topk);
    let panel = (PANEL_BYTES / sizes.row.max(1)).max(LEAST_ROWS).min(rows);
    let states = panel.saturating_mul(sizes.row);
    sizes.counts.saturating_add(sizes.sorted).saturating_add(states).saturating_add(63)
}

/// The kernels of a layer: around the picks, and over them where tensor cores serve.
fn choose(geometry: &Geometry, context: &Context) -> (Key, Option<Choice>) {
    let heads = geometry.num_qo_heads;
    let picks = Key::new(Unit::PICKS, "picks_order")
        .with("Q_TYPE", number(geometry.q_dtype))
        .with("KV_TYPE", number(geometry.kv_dtype));
    let key = Key::new(Unit::SPARSE, "sparse_attend");
    (picks, latents::variant(key, &geometry.one_head(), heads, heads, context))
}

/// Compiles and loads what attending such a layer's picks will run.
pub(crate) fn prepare(device: Device, geometry: &Geometry) -> Result<()> {
    let (picks, over) = choose(geometry, Context::of(device)?);
    let entry = |entry| Key { entry, ..picks.clone() };
    let mut keys = vec![entry("picks_order")];
    match over {
        Some(over) => keys.extend([entry("picks_merge"), over.key]),
        None => keys.push(entry("picks_plain")),
    }
    jit::prepare(device, &keys)
}

/// Attends every row that has a request over its picks.
///
/// # Errors
/// A workspace that is too small; a kernel that cannot be built or launched.
pub(crate) fn attend(stream: &Stream, picks: &Picks<'_>, workspace: &mut TensorMut<'_>) -> Result<()> {
    let Picks { geometry, q_nope, q_pe, latent, selection, table, .. } = picks;
    let (rows, topk) = (selection.shape()[0], selection.shape()[1]);
    if rows == 0 {
        return Ok(());
    }
    let sizes = Sizes::of(geometry, rows, topk);
    let available = workspace.numel();
    let base = workspace.as_mut_ptr() as u64;
    let counts = base.next_multiple_of(64);
    let fixed = (counts - base) as usize + sizes.counts + sizes.sorted;
    let panel = sizes.panel(rows, available.saturating_sub(fixed));
    if available < fixed || panel == 0 {
        return Err(Error::Workspace { needed: bytes(geometry, rows, topk), available });
    }
    let device = stream.device();
    let context = Context::of(device)?;
    let (key, over) = choose(geometry, context);
    let entry = |entry| jit::function(device, &Key { entry, ..key.clone() });
    let (c, e) = (geometry.kv_lora_rank, geometry.qk_rope_head_dim);
    let aligned = c.is_multiple_of(8)
        && e.is_multiple_of(8)
        && View::aligned(q_nope)
        && (e == 0 || View::aligned(q_pe))
        && View::aligned(latent);
    let mut params = Sparse {
        table: table.address(),
        selection: selection.as_ptr() as u64,
        counts,
        sorted: counts + sizes.counts as u64,
        partials: counts + (sizes.counts + sizes.sorted) as u64,
        q: q_nope.as_ptr() as u64,
        q_pe: q_pe.as_ptr() as u64,
        latents: latent.as_ptr() as u64,
        o: picks.o.ptr as u64,
        lse: picks.lse.as_ref().map_or(0, |lse| lse.ptr as u64),
        selection_stride: selection.strides()[0] as i64,
        q_token: q_nope.strides()[0] as i64,
        q_head: q_nope.strides()[1] as i64,
        pe_token: q_pe.strides()[0] as i64,
        pe_head: q_pe.strides()[1] as i64,
        page: latent.strides()[0] as i64,
        slot: latent.strides()[1] as i64,
        o_token: picks.o.strides[0] as i64,
        o_head: picks.o.strides[1] as i64,
        lse_token: picks.lse.as_ref().map_or(0, |lse| lse.strides[0] as i64),
        lse_head: picks.lse.as_ref().map_or(0, |lse| lse.strides[1] as i64),
        heads: geometry.num_qo_heads as u32,
        c: c as u32,
        e: e as u32,
        page_size: geometry.page_size as u32,
        topk: topk as u32,
        leaves: sizes.leaves as u32,
        row_begin: 0,
        row_end: rows as u32,
        scale: picks.sm_scale,
        aligned: aligned.into(),
    };
    let sms = context.sm_count() as usize;
    let put = |function: &Function, params: &Sparse, units: usize, most: usize, block: u32, shared: u32| {
        let how = Launch { grid: [units.min(most * sms) as u32, 1, 1], block, shared };
        // SAFETY: the kernel takes a `Sparse`; the call was checked: tensors of these shapes on this device, a table whose requests'
        // positions lie in the pages, picks that are looked up only where they were stored, a workspace cut by `Sizes`.
        unsafe { launch(function, stream, how, params) }
    };
    put(&entry("picks_order")?, &params, rows, 8, 256, 16)?;
    let slices = |width: usize| c.div_ceil(width) * geometry.num_qo_heads;
    let Some(over) = over else {
        return put(&entry("picks_plain")?, &params, rows * slices(1024), 8, 256, 256);
    };
    let (attend, merge) = (jit::function(device, &over.key)?, entry("picks_merge")?);
    let each = if over.shared * 2 + 2048 <= context.shared_per_block_optin() + 1024 { 2 } else { 1 };
    let pieces = geometry.num_qo_heads.div_ceil(16);
    for first in (0..rows).step_by(panel) {
        (params.row_begin, params.row_end) = (first as u32, rows.min(first + panel) as u32);
        let count = rows.min(first + panel) - first;
        put(&attend, &params, count * sizes.leaves * pieces, each, over.threads, over.shared)?;
        if sizes.leaves > 1 {
            put(&merge, &params, (count * slices(128)).div_ceil(4), 16, 128, 0)?;
        }
    }
    Ok(())
}
