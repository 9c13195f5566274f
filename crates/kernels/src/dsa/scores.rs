//! The scores by themselves.

use super::select::{checked, scratch};
use super::{DeviceTable, KeyFormat, Table};
use crate::cpu::dsa::Sink;
use crate::cpu::tokens::{apart, on_cpu};
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

/// What [`scores`] reads and writes: the inputs of [`SelectParams`](super::SelectParams), and scores instead of a pick.
#[derive(Debug)]
pub struct ScoresParams<'a> {
    /// `[T, Hi, Di]` f32, bf16 or f16; any outer strides.
    pub q: TensorRef<'a>,
    /// `[T, Hi]` f32; any outer stride.
    pub weights: TensorRef<'a>,
    /// `[P, S, W]` of the format's dtype; any outer strides.
    pub keys: TensorRef<'a>,
    /// How keys are stored.
    pub format: KeyFormat,
    /// `[T]`: whose keys each row scores; -1 for a row that sees none.
    pub row_request: &'a [i32],
    /// `[T]`: row `t` sees its request's keys `0..=positions[t]`.
    pub positions: &'a [i32],
    /// `[R + 1]`: where each request's pages start.
    pub kv_indptr: &'a [i32],
    /// Page ids, each `0..P`.
    pub kv_indices: &'a [i32],
    /// `[R]`: slots of the request's first page that lie before its first key, `0..=S`.
    pub page_start: &'a [i32],
    /// `[R]`: keys that are stored.
    pub kv_lens: &'a [i32],
    /// `[T, N]` f32, any outer stride, `N` at least what any row sees: `I`, and `-inf` for keys that a row does not see.
    /// Every element is written.
    pub scores: TensorMut<'a>,
    /// `[n]` u8, contiguous: scratch of at least [`scores_workspace_bytes`].
    pub workspace: TensorMut<'a>,
    /// Threads to use at most.
    pub workers: usize,
}

impl<'a> ScoresParams<'a> {
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

/// Bytes that [`scores`] needs; grows with every argument.
pub fn scores_workspace_bytes(
    max_rows: usize,
    max_keys: usize,
    index_n_heads: usize,
    index_head_dim: usize,
    workers: usize,
) -> usize {
    super::select_workspace_bytes(max_rows, max_keys, index_n_heads, index_head_dim, 0, workers)
}

/// The index scores that [`select`](super::select) picks by, bit for bit. Allocates nothing, and writes nothing when it
/// refuses.
///
/// # Errors
/// As [`select`](super::select); `scores` narrower than what a row sees.
pub fn scores(stream: &Stream, params: ScoresParams<'_>) -> Result<()> {
    on_cpu("index scores", stream)?;
    let table = params.table();
    let ScoresParams { q, weights, keys, format, mut scores, mut workspace, workers, .. } = params;
    let call = checked(q, weights, keys, format, table, Device::Cpu)?;
    check_scores(&scores, &table, Device::Cpu)?;
    let (width, stride) = (scores.shape()[1], scores.strides()[0]);
    let scratch = scratch(&call, &mut workspace, workers)?;
    let sink = Sink::Scores { to: scores.as_mut_ptr().cast(), stride, width };
    // SAFETY: `checked` accepted the inputs; `scores` is `[T, N]` f32, wide enough, its rows apart and ours alone.
    unsafe { crate::cpu::dsa::run(&call, sink, scratch, workers) };
    Ok(())
}

fn check_scores(scores: &TensorMut<'_>, table: &Table<'_>, device: Device) -> Result<()> {
    let rows = table.row_request.len();
    scores.expect("scores", "[T, N]", &[Some(rows), None], Some(DType::F32), device)?;
    apart("scores", scores)?;
    if let Some(row) = (0..rows).find(|&row| table.seen(row) > scores.shape()[1]) {
        let expected = format!("[T, N] with N at least {}, which row {row} sees", table.seen(row));
        return Err(Error::Shape { tensor: "scores", expected, got: scores.shape().to_vec() });
    }
    Ok(())
}

/// As [`scores`], in stream order on the stream's device, over the table that was set there; see [`select_at`](super::select_at),
/// which picks by these very bits. The workspace is not used on a device.
///
/// # Errors
/// As [`scores`] and [`select_at`](super::select_at).
pub fn scores_at(stream: &Stream, on: &DeviceTable, params: ScoresParams<'_>) -> Result<()> {
    let device = crate::device::supported("index scores", stream)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        let table = params.table();
        let ScoresParams { q, weights, keys, format, scores: mut to, .. } = params;
        let call = checked(q, weights, keys, format, table, device)?;
        on.is_of(&table, device)?;
        check_scores(&to, &table, device)?;
        return crate::cuda::exec::scores(stream, &call, on, &mut to);
    }
    let _ = (device, on);
    scores(stream, params)
}
