//! The call: one layer's attention over the latents that each row picked, into the caller's buffers.

use crate::cpu::Isa;
use crate::cpu::mla::{Picks, picks_run, picks_workspace_bytes};
use crate::cpu::paged::Out;
use crate::cpu::tokens::{apart, on_cpu};
use crate::mla::Geometry;

use super::DeviceTable;
use crate::{DType, Device, Error, Kernels, Result, Stream, TensorMut, TensorRef};

/// What [`sparse_attend`] reads and writes. `T` query rows, `K` picks a row at most, `R` requests, `P` pages; other
/// letters are the [`Geometry`]'s.
#[derive(Debug)]
pub struct SparseParams<'a> {
    /// The layer's shapes.
    pub geometry: Geometry,
    /// Factor of the dot product; finite.
    pub sm_scale: f32,
    /// `[T, H, C]`, of the geometry's `q_dtype`: queries multiplied into latent space; any outer strides.
    pub q_nope: TensorRef<'a>,
    /// `[T, H, E]`, as `q_nope`: the rotary part; empty when `E` is 0.
    pub q_pe: TensorRef<'a>,
    /// `[P, S, C + E]`, of the geometry's `kv_dtype`: `[ckv | kpe]` a token; any outer strides. Of e4m3 `[P, S, B]` u8, as
    /// [`fp8`](crate::fp8) has it.
    pub latent: TensorRef<'a>,
    /// `[T, K]` i32: positions within the row's request, in any order; -1 anywhere picks nothing. A position listed
    /// twice counts twice. Bits do not depend on the order.
    pub selection: TensorRef<'a>,
    /// `[T]`: the request whose pages a row reads. -1: the row is not sparse, its `selection` means nothing and its `o`
    /// and `lse` are left as they are.
    pub row_request: &'a [i32],
    /// `[R + 1]`: from 0, never decreasing, to at most the length of `kv_indices`.
    pub kv_indptr: &'a [i32],
    /// Page ids, each `0..P`, request after request.
    pub kv_indices: &'a [i32],
    /// `[R]`: position `p` of request `r` is at offset `page_start[r] + p` of its pages; `0..=S`.
    pub page_start: &'a [i32],
    /// `[R]`: positions that each request has stored; its pages must hold them.
    pub kv_lens: &'a [i32],
    /// `[T, H, C]`, of the geometry's `q_dtype`, in latent space; written for every row that has a request.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32: natural log-sum-exp, `-inf` where nothing is picked.
    pub lse: Option<TensorMut<'a>>,
    /// `[n]` u8, contiguous: scratch of at least [`sparse_workspace_bytes`]; its content means nothing before or after.
    pub workspace: TensorMut<'a>,
    /// Threads to use at most; the caller's rayon pool decides which.
    pub workers: usize,
}

/// Bytes that [`sparse_attend`] needs for up to `topk` picks a row (`K` of the selection) and up to `workers` threads,
/// however many rows there are and wherever the workspace starts. The geometry is one that
/// [`Geometry::check`] accepts.
pub fn sparse_workspace_bytes(geometry: &Geometry, topk: usize, workers: usize) -> usize {
    picks_workspace_bytes(geometry, topk, workers).saturating_add(63)
}

impl SparseParams<'_> {
    /// Refuses what [`sparse_attend`] would, which a caller may ask before it does anything else. Writes nothing. Picks on a
    /// device are not looked at.
    ///
    /// # Errors
    /// Those of [`sparse_attend`].
    pub fn check(&self, stream: &Stream) -> Result<()> {
        let SparseParams { geometry, row_request, kv_indptr, kv_indices, page_start, kv_lens, .. } = *self;
        let device = crate::device::supported("sparse attention", stream)?;
        geometry.check()?;
        if !self.sm_scale.is_finite() {
            let (why, got) = ("must be finite".into(), self.sm_scale.to_string());
            return Err(Error::Parameter { name: "sm_scale", why, got });
        }
        let (tokens, h) = (Some(row_request.len()), Some(geometry.num_qo_heads));
        let (c, e) = (geometry.kv_lora_rank, geometry.qk_rope_head_dim);
        let q_dtype = Some(geometry.q_dtype);
        let (slot, kv_dtype) = geometry.slot();
        self.q_nope.expect("q_nope", "[T, H, C]", &[tokens, h, Some(c)], q_dtype, device)?;
        self.q_pe.expect("q_pe", "[T, H, E]", &[tokens, h, Some(e)], q_dtype, device)?;
        let page = [None, Some(geometry.page_size), Some(slot)];
        self.latent.expect("latent", "[P, S, C + E], or a token's bytes", &page, Some(kv_dtype), device)?;
        self.selection.expect("selection", "[T, K]", &[tokens, None], Some(DType::I32), device)?;
        self.o.expect("o", "[T, H, C]", &[tokens, h, Some(c)], q_dtype, device)?;
        apart("o", &self.o)?;
        if let Some(lse) = &self.lse {
            lse.expect("lse", "[T, H]", &[tokens, h], Some(DType::F32), device)?;
            apart("lse", lse)?;
        }
        let tables = Tables { kv_indptr, kv_indices, page_start, kv_lens };
        tables.check(geometry.page_size, self.latent.shape()[0])?;
        tables.check_rows(row_request)?;
        self.workspace.expect("workspace", "[n]", &[None], Some(DType::U8), device)?;
        let available = self.workspace.numel();
        if device != Device::Cpu {
            return Ok(());
        }
        tables.check_picks(row_request, &self.selection)?;
        let needed = sparse_workspace_bytes(&geometry, self.selection.shape()[1], self.workers);
        if available < needed {
            return Err(Error::Workspace { needed, available });
        }
        Ok(())
    }
}

/// Attends one layer over each row's picks: absorbed attention as [`mla::attend`](crate::mla::attend) computes it, with
/// the picks in ascending order of position as the keys. Allocates nothing, and writes nothing when it refuses.
///
/// A row's bits depend on its query and its set of picks alone. A row that picks nothing yields 0 and `-inf`. Latents
/// that a row does not pick may hold anything, NaN included.
///
/// # Errors
/// Tensors of another shape, dtype, layout or device than the geometry says; arrays out of order or range; a pick below
/// -1 or beyond what its request has stored; a scale that is not finite; a workspace that is too small; a device without
/// a kernel.
pub fn sparse_attend(stream: &Stream, params: SparseParams<'_>) -> Result<()> {
    on_cpu("sparse attention", stream)?;
    params.check(stream)?;
    let SparseParams { geometry, sm_scale, q_nope, q_pe, latent, selection, row_request, .. } = params;
    let SparseParams { kv_indptr, kv_indices, page_start, mut o, lse, mut workspace, workers, .. } = params;
    let available = workspace.numel();
    let needed = sparse_workspace_bytes(&geometry, selection.shape()[1], workers);
    let Some(memory) = workspace.as_mut_slice::<u8>() else {
        return Err(Error::Workspace { needed, available });
    };
    let skip = memory.as_ptr().align_offset(64);
    let picks = Picks {
        geometry,
        sm_scale,
        isa: Isa::current(),
        q_nope,
        q_pe,
        latent,
        selection,
        row_request,
        kv_indptr,
        kv_indices,
        page_start,
        o: Out::of(&mut o),
        lse: lse.map(|mut lse| Out::of(&mut lse)),
    };
    picks_run(&picks, &mut memory[skip..], workers);
    Ok(())
}

/// As [`sparse_attend`], in stream order on the stream's device. There, `on` is the call's row arrays and page tables as they were
/// [set](DeviceTable::set) on it, with whatever `positions`: kernels read that, and the call's own are checked only. Picks are not
/// checked there: one beyond what its request has stored picks nothing, as -1 does. On the CPU `on` is not looked at.
///
/// It allocates nothing once [`prepare_sparse`] was called.
///
/// # Errors
/// As [`sparse_attend`]; a table that is not on the device, or of another number of rows or requests; a device without a kernel.
pub fn sparse_attend_at(stream: &Stream, on: &DeviceTable, params: SparseParams<'_>) -> Result<()> {
    #[cfg(feature = "cuda")]
    if stream.device() != Device::Cpu {
        params.check(stream)?;
        let SparseParams { geometry, sm_scale, q_nope, q_pe, latent, selection, .. } = params;
        let SparseParams { row_request, kv_indptr, kv_indices, page_start, kv_lens, .. } = params;
        let SparseParams { mut o, lse, mut workspace, .. } = params;
        let table = super::Table { row_request, positions: &[], kv_indptr, kv_indices, page_start, kv_lens };
        on.is_of(&table, stream.device())?;
        let picks = crate::cuda::exec::Picks {
            geometry,
            sm_scale,
            q_nope,
            q_pe,
            latent,
            selection,
            table: on,
            o: Out::of(&mut o),
            lse: lse.map(|mut lse| Out::of(&mut lse)),
        };
        return crate::cuda::exec::sparse_attend(stream, &picks, &mut workspace);
    }
    let _ = on;
    sparse_attend(stream, params)
}

/// Bytes that [`sparse_attend_at`] needs on a device for up to so many rows, as [`sparse_workspace_bytes`] on the CPU.
pub fn sparse_workspace_bytes_on(
    device: Device,
    geometry: &Geometry,
    max_rows: usize,
    topk: usize,
    workers: usize,
) -> usize {
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::sparse_bytes(geometry, max_rows, topk);
    }
    let _ = (device, max_rows);
    sparse_workspace_bytes(geometry, topk, workers)
}

/// Has the kernels of [`sparse_attend_at`] over a table [of such kernels](DeviceTable::with_kernels) built and loaded. Belongs to planning; nothing on the CPU.
///
/// # Errors
/// A kernel that cannot be built; no such device.
pub fn prepare_sparse(stream: &Stream, geometry: &Geometry, kernels: Kernels) -> Result<()> {
    let device = crate::device::supported("sparse attention", stream)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::prepare_sparse(device, geometry, kernels);
    }
    let _ = (device, geometry, kernels);
    Ok(())
}

/// Where requests' positions lie.
struct Tables<'a> {
    kv_indptr: &'a [i32],
    kv_indices: &'a [i32],
    page_start: &'a [i32],
    kv_lens: &'a [i32],
}

fn refuse<T>(array: &'static str, index: usize, got: i32, why: String) -> Result<T> {
    Err(Error::Index { array, index, got: got.into(), why })
}

fn length(tensor: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape { tensor, expected: format!("[{expected}]"), got: vec![got] })
}

impl Tables<'_> {
    /// Refuses tables that name what is not there.
    fn check(&self, page_size: usize, num_pages: usize) -> Result<()> {
        let Some(&first) = self.kv_indptr.first() else {
            return Err(Error::Shape { tensor: "kv_indptr", expected: "[R + 1]".into(), got: vec![0] });
        };
        let requests = self.kv_indptr.len() - 1;
        if first != 0 {
            return refuse("kv_indptr", 0, first, "the first entry is 0".into());
        }
        length("page_start", self.page_start.len(), requests)?;
        length("kv_lens", self.kv_lens.len(), requests)?;
        for request in 0..requests {
            let (begin, end) = (self.kv_indptr[request], self.kv_indptr[request + 1]);
            if end < begin || end as usize > self.kv_indices.len() {
                let why = format!(
                    "request {request} starts at {begin}, and there are {} entries",
                    self.kv_indices.len()
                );
                return refuse("kv_indptr", request + 1, end, why);
            }
            let start = self.page_start[request];
            if start < 0 || start as usize > page_size {
                return refuse("page_start", request, start, format!("pages have {page_size} slots"));
            }
            let pages = i64::from(end - begin);
            let held = pages.saturating_mul(page_size as i64) - i64::from(start);
            let stored = self.kv_lens[request];
            if stored < 0 || i64::from(stored) > held.max(0) {
                let why = format!(
                    "its {pages} pages of {page_size}, from slot {start} on, hold 0..={}",
                    held.max(0)
                );
                return refuse("kv_lens", request, stored, why);
            }
        }
        let used = &self.kv_indices[..self.kv_indptr[requests] as usize];
        let bad = |&page: &i32| page < 0 || page as usize >= num_pages;
        if let Some(index) = used.iter().position(bad) {
            return refuse("kv_indices", index, used[index], format!("the pool has pages 0..{num_pages}"));
        }
        Ok(())
    }

    /// Refuses a request that is not there.
    fn check_rows(&self, row_request: &[i32]) -> Result<()> {
        let requests = -1..i32::try_from(self.kv_lens.len()).unwrap_or(i32::MAX);
        match row_request.iter().position(|request| !requests.contains(request)) {
            None => Ok(()),
            Some(row) => {
                let why =
                    format!("there are requests 0..{}; -1 is a row that is not sparse", self.kv_lens.len());
                refuse("row_request", row, row_request[row], why)
            }
        }
    }

    /// Refuses a pick that its request, which is there, has not stored.
    fn check_picks(&self, row_request: &[i32], selection: &TensorRef<'_>) -> Result<()> {
        let topk = selection.shape()[1];
        for (row, &request) in row_request.iter().enumerate().filter(|&(_, &request)| request != -1) {
            let stored = self.kv_lens[request as usize];
            let picks = selection.select(0, row)?;
            let picks = picks.as_slice::<i32>().expect("one contiguous i32 axis on the CPU");
            let (least, most) = picks.iter().fold((-1, -1), |(a, b), &pick| (pick.min(a), pick.max(b)));
            if least < -1 || most >= stored {
                let bad = |&pick: &i32| pick < -1 || pick >= stored;
                let at = picks.iter().position(bad).expect("an extreme one is out of range");
                let why = format!(
                    "row {row}'s request {request} has stored positions 0..{stored}; -1 picks nothing"
                );
                return refuse("selection", row * topk + at, picks[at], why);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
