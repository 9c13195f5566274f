//! The pick of given scores.

use super::DeviceTable;
use crate::cpu::dsa::pick;
use crate::cpu::tokens::{apart, on_cpu};
use crate::cpu::{Isa, workers};
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

/// What [`topk`] reads and writes: `T` rows over `N` keys.
#[derive(Debug)]
pub struct TopkParams<'a> {
    /// `[T, N]` f32; any outer stride.
    pub scores: TensorRef<'a>,
    /// `[T]`: row `t` picks among keys `0..=positions[t]`, whatever stands behind them; -1 for a row that picks none.
    pub positions: &'a [i32],
    /// `K`: most keys that a row picks.
    pub topk: usize,
    /// `[T, K]` i32, any outer stride: positions, ascending, then -1. Every element is written.
    pub out: TensorMut<'a>,
    /// Threads to use at most; rows are shared among them.
    pub workers: usize,
}

/// The `topk` keys of largest score of each row, of equal ones the earlier: the set that [`select_topk_causal`] picks, in
/// time linear in the keys, by a radix selection. Exactly `min(topk, keys 0..=position that are not NaN)` are picked.
/// Allocates nothing, and writes nothing when it refuses.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit; a position that is neither -1 nor below `N`, with its row.
pub fn topk(stream: &Stream, params: TopkParams<'_>) -> Result<()> {
    on_cpu("top-k selection", stream)?;
    let TopkParams { scores, positions, topk, mut out, workers } = params;
    check(&scores, positions, topk, &out, Device::Cpu)?;
    let rows = Rows::of(&scores, topk, &mut out);
    let isa = Isa::current();
    let workers = workers.clamp(1, workers::MAX_WORKERS);
    workers::each(workers, positions.len(), &|_, row| {
        let (scores, out) = rows.row(row, (positions[row] + 1) as usize);
        pick(isa, scores, out);
    });
    Ok(())
}

/// As [`topk`], in stream order on the stream's device, with `workspace` `[n]` u8 as scratch. There, `on` is of as many rows, each of
/// any request and at `positions` as they were [set](DeviceTable::set): kernels read that, and the call's own are checked only.
/// `N` is a multiple of 4 there and rows of scores start at multiples of 16 bytes; keys that are picked are those of the CPU. It allocates nothing once
/// [`prepare_topk`] was called. On the CPU neither is looked at.
///
/// # Errors
/// As [`topk`]; a table that is not on the device, or of another number of rows; a workspace of fewer bytes than
/// [`topk_workspace_bytes_on`] says.
pub fn topk_at(
    stream: &Stream,
    on: &DeviceTable,
    params: TopkParams<'_>,
    workspace: TensorMut<'_>,
) -> Result<()> {
    let device = crate::device::supported("top-k selection", stream)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        let (TopkParams { scores, positions, topk, mut out, .. }, mut workspace) = (params, workspace);
        check(&scores, positions, topk, &out, device)?;
        on.has_rows(positions.len(), device)?;
        workspace.expect("workspace", "[n]", &[None], Some(DType::U8), device)?;
        return crate::cuda::exec::topk(stream, on, &scores, &mut out, &mut workspace);
    }
    let _ = (device, on, workspace);
    topk(stream, params)
}

/// Bytes that [`topk_at`] needs on a device for up to so many rows of up to so many scores; 0 on the CPU.
pub fn topk_workspace_bytes_on(device: Device, max_rows: usize, max_keys: usize) -> usize {
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::topk_bytes(max_rows, max_keys);
    }
    let _ = (device, max_rows, max_keys);
    0
}

/// Has the kernels of [`topk_at`] built and loaded. Belongs to planning; nothing on the CPU.
///
/// # Errors
/// A kernel that cannot be built; no such device.
pub fn prepare_topk(stream: &Stream) -> Result<()> {
    let device = crate::device::supported("top-k selection", stream)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::prepare_topk(device);
    }
    let _ = device;
    Ok(())
}

/// As [`topk`], by one stable sort a row: the plain path that the seed describes and the fast one is held against.
/// Allocates an index array.
///
/// # Errors
/// As [`topk`].
pub fn select_topk_causal(
    scores: TensorRef<'_>,
    positions: &[i32],
    topk: usize,
    mut out: TensorMut<'_>,
) -> Result<()> {
    check(&scores, positions, topk, &out, Device::Cpu)?;
    let rows = Rows::of(&scores, topk, &mut out);
    let mut order: Vec<i32> = Vec::new();
    for (row, &position) in positions.iter().enumerate() {
        let (scores, out) = rows.row(row, (position + 1) as usize);
        order.clear();
        order.extend((0..=position).filter(|&j| !scores[j as usize].is_nan()));
        // Of scores that compare equal, 0 and -0 among them, a stable sort keeps the earlier first.
        let by_score = |&a: &i32, &b: &i32| scores[b as usize].partial_cmp(&scores[a as usize]);
        order.sort_by(|a, b| by_score(a, b).expect("NaN was filtered out"));
        order.truncate(topk);
        order.sort_unstable();
        out.fill(-1);
        out[..order.len()].copy_from_slice(&order);
    }
    Ok(())
}

fn check(
    scores: &TensorRef<'_>,
    positions: &[i32],
    topk: usize,
    out: &TensorMut<'_>,
    device: Device,
) -> Result<()> {
    scores.expect("scores", "[T, N]", &[None, None], Some(DType::F32), device)?;
    let (rows, keys) = (scores.shape()[0], scores.shape()[1]);
    if positions.len() != rows {
        let expected = format!("[T] = [{rows}]");
        return Err(Error::Shape { tensor: "positions", expected, got: vec![positions.len()] });
    }
    out.expect("out", "[T, K]", &[Some(rows), Some(topk)], Some(DType::I32), device)?;
    apart("out", out)?;
    let keys = keys.min(i32::MAX as usize) as i32;
    if let Some(row) = positions.iter().position(|&p| !(-1..keys).contains(&p)) {
        let why = format!("row {row} has {keys} scores; -1 picks none");
        return Err(Error::Index { array: "positions", index: row, got: positions[row].into(), why });
    }
    Ok(())
}

/// Rows of scores and of picks that [`check`] accepted.
struct Rows {
    scores: *const f32,
    score_stride: usize,
    out: *mut i32,
    out_stride: usize,
    topk: usize,
}

// SAFETY: addresses; rows of `out` do not overlap, and each is given to one thread.
unsafe impl Sync for Rows {}

impl Rows {
    fn of(scores: &TensorRef<'_>, topk: usize, out: &mut TensorMut<'_>) -> Rows {
        Rows {
            scores: scores.as_ptr().cast(),
            score_stride: scores.strides()[0],
            out_stride: out.strides()[0],
            out: out.as_mut_ptr().cast(),
            topk,
        }
    }

    /// The first `seen` scores of a row, and its pick. Called once a row while the views live.
    #[allow(clippy::mut_from_ref)]
    fn row(&self, row: usize, seen: usize) -> (&[f32], &mut [i32]) {
        let scores: &[f32] = match seen {
            0 => &[],
            // SAFETY: `check` found `seen <= N` contiguous scores in row `row`.
            _ => unsafe {
                std::slice::from_raw_parts(self.scores.wrapping_add(row * self.score_stride), seen)
            },
        };
        if self.topk == 0 {
            return (scores, &mut []);
        }
        // SAFETY: `check` found K contiguous elements in row `row`, apart from other rows'; the caller asks once.
        let out = unsafe {
            std::slice::from_raw_parts_mut(self.out.wrapping_add(row * self.out_stride), self.topk)
        };
        (scores, out)
    }
}
