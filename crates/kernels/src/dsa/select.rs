//! Scores and pick at once, over keys in pages.

use super::{DeviceTable, KeyFormat, Table};
use crate::cpu::Isa;
use crate::cpu::dsa::{Call, Sink};
use crate::cpu::tokens::{apart, on_cpu};
use crate::{Buffer, DType, Device, Error, Kernels, Result, Stream, TensorMut, TensorRef};

/// What [`select`] reads and writes. `T` query rows of `R` requests; `P` pages of `S` slots of `W` elements, where `W` is
/// [`KeyFormat::width`] of `Di`.
///
/// Key `j` of request `r` lies at offset `o = page_start[r] + j` of its pages: slot `o % S` of page
/// `kv_indices[kv_indptr[r] + o / S]`. A history of keys in one tensor `[S, Di]` is the case of one page. Slots that no row
/// sees are not read.
#[derive(Debug)]
pub struct SelectParams<'a> {
    /// `[T, Hi, Di]` f32, bf16 or f16; any outer strides.
    pub q: TensorRef<'a>,
    /// `[T, Hi]` f32, the scale factors included; any outer stride.
    pub weights: TensorRef<'a>,
    /// `[P, S, W]` of the format's dtype; any outer strides.
    pub keys: TensorRef<'a>,
    /// How keys are stored.
    pub format: KeyFormat,
    /// `[T]`: whose keys each row scores, in any order; -1 for a row that is not selected (its pick becomes all -1).
    pub row_request: &'a [i32],
    /// `[T]`: row `t` sees its request's keys `0..=positions[t]`. Not looked at where `row_request` is -1.
    pub positions: &'a [i32],
    /// `[R + 1]`: where each request's pages start; entries of `kv_indices` past the last are never read.
    pub kv_indptr: &'a [i32],
    /// Page ids, each `0..P`.
    pub kv_indices: &'a [i32],
    /// `[R]`: slots of the request's first page that lie before its first key, `0..=S`.
    pub page_start: &'a [i32],
    /// `[R]`: keys that are stored.
    pub kv_lens: &'a [i32],
    /// `K`: most keys that a row picks.
    pub topk: usize,
    /// `[T, K]` i32, any outer stride: request-local positions, ascending, then -1. Every element is written.
    pub selection: TensorMut<'a>,
    /// `[n]` u8, contiguous: scratch of at least [`select_workspace_bytes`]; its content means nothing before or after.
    pub workspace: TensorMut<'a>,
    /// Threads to use at most; the caller's rayon pool decides which.
    pub workers: usize,
}

impl<'a> SelectParams<'a> {
    /// The call's row arrays and page tables.
    fn table(&self) -> Table<'a> {
        Table {
            row_request: self.row_request,
            positions: self.positions,
            kv_indptr: self.kv_indptr,
            kv_indices: self.kv_indices,
            page_start: self.page_start,
            kv_lens: self.kv_lens,
        }
    }
}

/// Bytes that [`select`] needs for up to `max_rows` rows that see up to `max_keys` keys with up to `workers` threads,
/// wherever the workspace starts. It grows with every argument, and enough for a bucket is enough for whatever fits in it.
/// Rows are taken in blocks: scores of one block are all that is ever held, 16 MiB at most beyond four rows.
pub fn select_workspace_bytes(
    max_rows: usize,
    max_keys: usize,
    index_n_heads: usize,
    index_head_dim: usize,
    topk: usize,
    workers: usize,
) -> usize {
    // Picks are written where they are wanted.
    let _ = topk;
    crate::cpu::dsa::workspace_bytes(max_rows, max_keys, index_n_heads, index_head_dim, workers)
        .saturating_add(63)
}

/// Each row's `topk` keys of largest index score (see the [module](super)). Allocates nothing, and writes nothing when it
/// refuses.
///
/// # Errors
/// Tensors of another shape, dtype, layout or device; a page, request, position or length that is not there, with
/// array, entry and value; a workspace that is too small.
pub fn select(stream: &Stream, params: SelectParams<'_>) -> Result<()> {
    on_cpu("index selection", stream)?;
    let table = params.table();
    let SelectParams { q, weights, keys, format, topk, mut selection, mut workspace, workers, .. } = params;
    let call = checked(q, weights, keys, format, table, Device::Cpu)?;
    check_selection(&selection, q.shape()[0], topk, Device::Cpu)?;
    let scratch = scratch(&call, &mut workspace, workers)?;
    let stride = selection.strides()[0];
    let sink = Sink::Picks { to: selection.as_mut_ptr().cast(), stride, topk };
    // SAFETY: `checked` accepted the inputs, and `selection` is `[T, K]` i32, its rows apart and ours alone.
    unsafe { crate::cpu::dsa::run(&call, sink, scratch, workers) };
    Ok(())
}

fn check_selection(selection: &TensorMut<'_>, rows: usize, topk: usize, device: Device) -> Result<()> {
    selection.expect("selection", "[T, K]", &[Some(rows), Some(topk)], Some(DType::I32), device)?;
    apart("selection", selection)
}

/// As [`select`], in stream order on the stream's device. There, `on` is the call's row arrays and page tables as they were
/// [set](DeviceTable::set) on it: kernels read that, and the call's own are checked only. On the CPU `on` is not looked at.
///
/// Scores are f32 sums in another order than the CPU's, so that keys whose scores are equal but for rounding may be picked
/// differently; equal keys have equal scores, and ties go to the earlier, as on the CPU. It allocates nothing once
/// [`prepare_select`] was called.
///
/// # Errors
/// As [`select`]; a table that is not on the device, or of another number of rows or requests; a device without a kernel.
pub fn select_at(stream: &Stream, on: &DeviceTable, params: SelectParams<'_>) -> Result<()> {
    let device = crate::device::supported("index selection", stream)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        let table = params.table();
        let SelectParams { q, weights, keys, format, topk, mut selection, mut workspace, .. } = params;
        let call = checked(q, weights, keys, format, table, device)?;
        on.is_of(&table, device)?;
        check_selection(&selection, q.shape()[0], topk, device)?;
        workspace.expect("workspace", "[n]", &[None], Some(DType::U8), device)?;
        return crate::cuda::exec::select(stream, &call, on, &mut selection, &mut workspace);
    }
    let _ = (device, on);
    select(stream, params)
}

/// Bytes that [`select_at`] needs on a device, as [`select_workspace_bytes`] on the CPU. `max_keys` is at least the
/// [table's](DeviceTable::max_keys).
pub fn select_workspace_bytes_on(
    device: Device,
    max_rows: usize,
    max_keys: usize,
    index_n_heads: usize,
    index_head_dim: usize,
    topk: usize,
    workers: usize,
) -> usize {
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::select_bytes(max_rows, max_keys);
    }
    let _ = device;
    select_workspace_bytes(max_rows, max_keys, index_n_heads, index_head_dim, topk, workers)
}

/// Has the kernels of [`select_at`] over a table [of such kernels](DeviceTable::with_kernels) built and loaded, for index queries
/// of a type over keys of a format. Belongs to planning;
/// nothing on the CPU.
///
/// # Errors
/// A kernel that cannot be built; no such device.
pub fn prepare_select(
    stream: &Stream,
    q_dtype: DType,
    format: KeyFormat,
    index_n_heads: usize,
    index_head_dim: usize,
    kernels: Kernels,
) -> Result<()> {
    let device = crate::device::supported("index selection", stream)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::prepare_select(
            device,
            q_dtype,
            format,
            index_n_heads,
            index_head_dim,
            kernels,
        );
    }
    let _ = (device, q_dtype, format, index_n_heads, index_head_dim, kernels);
    Ok(())
}

/// The inputs of an index computation, checked.
pub(super) fn checked<'a>(
    q: TensorRef<'a>,
    weights: TensorRef<'a>,
    keys: TensorRef<'a>,
    format: KeyFormat,
    table: Table<'a>,
    device: Device,
) -> Result<Call<'a>> {
    q.expect("q", "[T, Hi, Di]", &[None, None, None], None, device)?;
    if !q.dtype().is_float() {
        let expected = "f32, bf16 or f16".into();
        return Err(Error::DTypeMismatch { tensor: "q", expected, got: q.dtype() });
    }
    let (rows, heads, width) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    if heads == 0 {
        let why = "an indexer has at least 1 head".into();
        return Err(Error::Parameter { name: "index_n_heads", why, got: "0".into() });
    }
    format.check(width)?;
    weights.expect("weights", "[T, Hi]", &[Some(rows), Some(heads)], Some(DType::F32), device)?;
    let (w, dtype) = (Some(format.width(width)), Some(format.dtype()));
    keys.expect("keys", "[P, S, W]", &[None, None, w], dtype, device)?;
    table.check(rows, keys.shape()[0], keys.shape()[1])?;
    Ok(Call { isa: Isa::current(), q, weights, keys, format, table })
}

/// The workspace from its first cache line on, if it is large enough for a call.
pub(super) fn scratch<'a>(
    call: &Call<'_>,
    workspace: &'a mut TensorMut<'_>,
    workers: usize,
) -> Result<&'a mut [u8]> {
    workspace.expect("workspace", "[n]", &[None], Some(DType::U8), Device::Cpu)?;
    let [rows, heads, width] = [0, 1, 2].map(|axis| call.q.shape()[axis]);
    let keys = (0..rows).map(|row| call.table.seen(row)).max().unwrap_or(0);
    let needed = select_workspace_bytes(rows, keys, heads, width, 0, workers);
    let available = workspace.numel();
    match workspace.as_mut_slice::<u8>() {
        Some(memory) if available >= needed => {
            let skip = memory.as_ptr().align_offset(64);
            Ok(&mut memory[skip..])
        }
        _ => Err(Error::Workspace { needed, available }),
    }
}

/// Top-`topk` key positions per query row over one request's keys: what the seed calls `index_topk`. Row `t` sees keys
/// `0..=positions[t]`; `out` `[T, K]` i32 gets positions, ascending, -1 padded. The same bits as [`select`] over pages.
///
/// `q` `[T, Hi, Di]` and `keys` `[S, Di]` are f32, bf16 or f16, `weights` `[T, Hi]` f32. Allocates its workspace, and uses
/// the threads of the caller's rayon pool.
///
/// # Errors
/// As [`select`], and when there is no memory.
pub fn index_topk(
    q: TensorRef<'_>,
    weights: TensorRef<'_>,
    keys: TensorRef<'_>,
    positions: &[i32],
    topk: usize,
    out: TensorMut<'_>,
) -> Result<()> {
    keys.expect("keys", "[S, Di]", &[None, None], None, Device::Cpu)?;
    let Some(format) = KeyFormat::of(keys.dtype()) else {
        let expected = "f32, bf16 or f16".into();
        return Err(Error::DTypeMismatch { tensor: "keys", expected, got: keys.dtype() });
    };
    q.expect("q", "[T, Hi, Di]", &[None, None, None], None, Device::Cpu)?;
    let [rows, heads, width] = [0, 1, 2].map(|axis| q.shape()[axis]);
    let length = keys.shape()[0];
    let Ok(kv_len) = i32::try_from(length) else {
        let why = format!("positions are 32-bit: at most {} keys", i32::MAX);
        return Err(Error::Parameter { name: "keys", why, got: length.to_string() });
    };
    let workers = rayon::current_num_threads();
    let bytes = select_workspace_bytes(rows, length, heads, width, topk, workers);
    let mut workspace = Buffer::zeroed(bytes)?;
    let row_request = vec![0; rows];
    // The whole history is one page.
    let page = [keys.strides()[0].saturating_mul(length), keys.strides()[0], 1];
    // SAFETY: the same elements as `keys`, under one more axis of extent 1, for no longer.
    let pages = unsafe {
        TensorRef::from_raw_parts(
            keys.as_ptr(),
            Device::Cpu,
            keys.dtype(),
            &[1, length, keys.shape()[1]],
            &page,
        )
    }?;
    let params = SelectParams {
        q,
        weights,
        keys: pages,
        format,
        row_request: &row_request,
        positions,
        kv_indptr: &[0, 1],
        kv_indices: &[0],
        page_start: &[0],
        kv_lens: &[kv_len],
        topk,
        selection: out,
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
        workers,
    };
    select(&Stream::cpu(), params)
}
