//! Latent attention: decode and prefill over every key, and attention over picked latents.

#[cfg(feature = "dsa")]
use mstar_kernels::dsa::{
    DeviceTable, SparseParams, Table, prepare_sparse, sparse_attend_at, sparse_workspace_bytes_on,
};
use mstar_kernels::fp8::store_latents;
use mstar_kernels::mla::{AttendParams, Geometry, Variant, attend};
use mstar_kernels::paged::PageTable;
use mstar_kernels::plan::{Latents, Plan, PlanOptions, Schedule};
use mstar_kernels::{Buffer, DType, Device, TensorRef};

use super::{Case, Cost, Made, Place, longer, odd, strewn};

/// DeepSeek-V3's latents.
const C: usize = 512;
const E: usize = 64;
const PAGE_SIZE: usize = 64;
const SM_SCALE: f32 = 0.0721688;
/// Latents that are quantised for a pool.
const STRETCH: usize = 1 << 14;

/// Equal rows of `q_len` query tokens each, the last at the last of `kv_len` keys.
#[derive(Clone, Copy)]
struct Rows {
    rows: usize,
    q_len: usize,
    kv_len: usize,
    heads: usize,
    dtype: DType,
    /// Picks a row; 0 attends every key.
    picks: usize,
    /// Whether latents are kept in e4m3.
    codes: bool,
}

/// The cases of this family.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let kv_len = if quick { 2048 } else { 32768 };
    let base = Rows { rows: 1, q_len: 1, kv_len, heads: 16, dtype: DType::Bf16, picks: 0, codes: false };
    let mut cases: Vec<Case> =
        [16, 64, 128].into_iter().map(|heads| latent(Rows { heads, ..base })).collect();
    cases.push(latent(Rows { dtype: DType::F32, ..base }));
    cases.push(latent(Rows { rows: 16, kv_len: kv_len / 16, ..base }));
    cases.push(latent(Rows { q_len: kv_len / 16, kv_len: kv_len / 16, ..base }));
    #[cfg(feature = "dsa")]
    {
        let sparse = Rows { picks: if quick { 256 } else { 2048 }, ..base };
        cases.extend([16, 64, 128].into_iter().map(|heads| picked(Rows { heads, ..sparse })));
        cases.push(picked(Rows { rows: 16, kv_len: kv_len / 4, ..sparse }));
    }
    cases
}

/// Those of a device.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    let short = |tokens: usize| if quick { tokens / 128 } else { tokens };
    let few = |rows: usize| if quick { rows.min(2) } else { rows };
    let base = Rows { rows: 1, q_len: 1, kv_len: 1, heads: 16, dtype: DType::Bf16, picks: 0, codes: false };
    let mut cases = Vec::new();
    let batches = [
        (16, 1, &[(64, 16384), (1, 8192), (16, 4096), (64, 4096), (128, 4096)][..]),
        (64, 1, &[(64, 16384), (64, 4096), (128, 4096)]),
        (128, 1, &[(64, 16384), (16, 4096), (64, 4096), (128, 4096)]),
        (128, 2, &[(64, 16384), (64, 4096), (128, 4096)]),
    ];
    for (heads, q_len, lengths) in batches {
        for &(rows, kv_len) in lengths {
            let row = Rows { rows: few(rows), q_len, kv_len: short(kv_len), heads, ..base };
            let near = [Rows { kv_len: longer(row.kv_len), ..row }, Rows { rows: odd(row.rows), ..row }];
            cases.extend(latent(row).with_neighbours(near.map(latent)));
        }
    }
    // Latents in e4m3.
    for (heads, rows, kv_len) in [(16, 64, 4096), (64, 64, 4096), (128, 128, 4096), (128, 1, 8192)] {
        let row = Rows { rows: few(rows), kv_len: short(kv_len), heads, codes: true, ..base };
        let near = [Rows { kv_len: longer(row.kv_len), ..row }, Rows { rows: odd(row.rows), ..row }];
        cases.extend(latent(row).with_neighbours(near.map(latent)));
    }
    #[cfg(feature = "dsa")]
    for (heads, rows) in [(16, 64), (64, 64), (64, 128), (128, 64), (128, 128), (128, 1)] {
        let (kv_len, picks) = (short(32768), short(2048));
        let row = Rows { rows: few(rows), kv_len, heads, picks, codes: true, ..base };
        let near = [Rows { kv_len: longer(row.kv_len), ..row }, Rows { rows: odd(row.rows), ..row }];
        cases.extend(picked(row).with_neighbours(near.map(picked)));
    }
    #[cfg(feature = "dsa")]
    for heads in [16, 64, 128] {
        // Requests of a row each, and many rows of one request.
        for (rows, q_len) in [(1, 1), (64, 1), (1, 1024), (1, 4096)] {
            let (kv_len, picks) = (short(32768), short(2048));
            let q_len = if quick { q_len.min(4) } else { q_len };
            let row = Rows { rows: few(rows), q_len, kv_len, heads, picks, ..base };
            let odd = if q_len > 1 {
                Rows { q_len: odd(row.q_len), ..row }
            } else {
                Rows { rows: odd(row.rows), ..row }
            };
            let near = [Rows { kv_len: longer(row.kv_len), ..row }, odd];
            cases.extend(picked(row).with_neighbours(near.map(picked)));
        }
    }
    cases
}

impl Rows {
    fn tokens(&self) -> usize {
        self.rows * self.q_len
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            num_qo_heads: self.heads,
            kv_lora_rank: C,
            qk_rope_head_dim: E,
            page_size: PAGE_SIZE,
            q_dtype: self.dtype,
            kv_dtype: if self.codes { DType::E4m3 } else { self.dtype },
        }
    }

    /// Bytes of a latent.
    fn token(&self) -> usize {
        let (elements, dtype) = self.geometry().slot();
        elements * dtype.size()
    }

    fn shape(&self) -> String {
        let Rows { rows, q_len, kv_len, heads, picks, .. } = self;
        let dtype = if self.codes { "fp8".into() } else { self.dtype.to_string() };
        let kept = if self.codes { ", fp8" } else { "" };
        match (picks, q_len) {
            (0, 1) => format!("{rows} x {kv_len}, {heads} heads, {dtype}"),
            (0, q_len) => format!("{rows} x {q_len} of {kv_len}, {heads} heads, {dtype}"),
            (picks, 1) => format!("{rows} x {picks} of {kv_len}, {heads} h{kept}"),
            (picks, q_len) => format!("{q_len}q x {picks} of {kv_len}, {heads} h{kept}"),
        }
    }

    /// Every latent that is attended once, however many rows pick it; queries and outputs once; unmasked pairs.
    fn cost(&self) -> Cost {
        let (each, read) = match self.picks {
            0 => ((2 * self.kv_len + 1 - self.q_len) as f64 / 2.0, self.kv_len),
            picks => (picks as f64, self.kv_len.min(picks * self.q_len)),
        };
        let latents = self.rows * read * self.token();
        let qo = self.tokens() * self.heads * (C + E + C) * self.dtype.size();
        let bytes = (latents + qo) as f64;
        Cost { bytes, flops: 2.0 * (self.heads * (C + E + C)) as f64 * each * self.tokens() as f64 }
    }

    fn pages_per_row(&self) -> usize {
        self.kv_len.div_ceil(PAGE_SIZE)
    }

    /// Where each row's pages start, and the pages.
    fn pages(&self) -> (Vec<i32>, Vec<i32>) {
        let (each, pages) = (self.pages_per_row(), self.rows * self.pages_per_row());
        let indptr = (0..=self.rows).map(|row| (row * each) as i32).collect();
        (indptr, (0..pages).map(strewn(pages)).collect())
    }
}

/// What both kinds of case attend with.
struct Tensors {
    q: Buffer,
    latent: Buffer,
    o: Buffer,
    workspace: Buffer,
}

impl Tensors {
    fn new(place: &Place, rows: Rows, workspace: usize) -> anyhow::Result<Tensors> {
        let (t, pages) = (rows.tokens(), rows.rows * rows.pages_per_row());
        Ok(Tensors {
            q: place.filled(rows.dtype, t * rows.heads * (C + E))?,
            latent: stored(place, rows, pages * PAGE_SIZE)?,
            o: place.room(rows.dtype, &[t, rows.heads, C])?,
            workspace: place.scratch(workspace)?,
        })
    }
}

/// So many latents.
fn stored(place: &Place, rows: Rows, tokens: usize) -> anyhow::Result<Buffer> {
    if !rows.codes {
        return place.filled(rows.dtype, tokens * (C + E));
    }
    // Quantising on the host takes its time: a stretch over and over.
    let some = tokens.min(STRETCH);
    let host = Place::on(Device::Cpu)?;
    let plain = host.filled(DType::F32, some * (C + E))?;
    let plain = plain.tensor(0, DType::F32, &[some, C + E])?;
    let slots: Vec<i64> = (0..some as i64).collect();
    let shape = [1, some, rows.token()];
    let mut codes = host.room(DType::U8, &shape)?;
    let to = codes.tensor_mut(0, DType::U8, &shape)?;
    let (ckv, kpe) = (plain.narrow(1, 0, C)?, plain.narrow(1, C, E)?);
    store_latents(&host.stream(), TensorRef::from_slice(&slots, &[some])?, ckv, kpe, to)?;
    place.tiled(codes, tokens * rows.token())
}

/// `q_nope`, `q_pe` and the latents.
fn inputs<'a>(rows: &Rows, q: &'a Buffer, latent: &'a Buffer) -> anyhow::Result<[TensorRef<'a>; 3]> {
    let q = q.tensor(0, rows.dtype, &[rows.tokens(), rows.heads, C + E])?;
    let (elements, dtype) = rows.geometry().slot();
    let pool = [rows.rows * rows.pages_per_row(), PAGE_SIZE, elements];
    Ok([q.narrow(2, 0, C)?, q.narrow(2, C, E)?, latent.tensor(0, dtype, &pool)?])
}

fn latent(rows: Rows) -> Case {
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let (kv_indptr, kv_indices) = rows.pages();
        let qo_indptr: Vec<i32> = (0..=rows.rows).map(|row| (row * rows.q_len) as i32).collect();
        let last = ((rows.kv_len - 1) % PAGE_SIZE + 1) as i32;
        let table = PageTable {
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            kv_last_page_len: &vec![last; rows.rows],
            num_pages: kv_indices.len(),
            ..PageTable::default()
        };
        let workers = rayon::current_num_threads();
        let variant = Variant { sm_scale: SM_SCALE, causal: true };
        let on_device = !place.is_cpu();
        let mut plans = Vec::new();
        for schedule in
            [Schedule::Invariant, Schedule::Throughput].into_iter().take(1 + usize::from(on_device))
        {
            let options = PlanOptions { schedule, workers, device: place.device(), ..PlanOptions::default() };
            let mut plan = Plan::<Latents>::new(&rows.geometry(), &variant, &table, &options)?;
            plan.stage(&stream)?;
            plans.push(plan);
        }
        let bytes = plans.iter().map(Plan::workspace_bytes).max().unwrap_or(0);
        let mut tensors = Tensors::new(place, rows, bytes)?;
        let mut work = move |schedule: Schedule| -> anyhow::Result<()> {
            let plan = &plans[usize::from(schedule == Schedule::Throughput)];
            let Tensors { q, latent, o, workspace } = &mut tensors;
            let [q_nope, q_pe, latent] = inputs(&rows, q, latent)?;
            let params = AttendParams {
                work: plan.work(),
                q_nope,
                q_pe,
                latent,
                o: o.tensor_mut(0, rows.dtype, &[rows.tokens(), rows.heads, C])?,
                lse: None,
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
                workers,
            };
            Ok(attend(&stream, params)?)
        };
        Ok(if on_device { Made::twice(work) } else { Made::alone(move || work(Schedule::Invariant)) })
    };
    Case {
        kernel: "mla",
        shape: rows.shape(),
        dtype: rows.dtype,
        cost: rows.cost(),
        beside: None,
        make: Box::new(make),
    }
}

#[cfg(feature = "dsa")]
fn picked(rows: Rows) -> Case {
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let (kv_indptr, kv_indices) = rows.pages();
        let (t, picks) = (rows.tokens(), rows.picks);
        let mut selection = Buffer::for_tensor(DType::I32, &[t, picks])?;
        let mut view = selection.tensor_mut(0, DType::I32, &[t * picks])?;
        // Strewn over the context, ascending as a selection is.
        let step = rows.kv_len / picks;
        for (i, pick) in view.as_mut_slice::<i32>().unwrap_or_default().iter_mut().enumerate() {
            *pick = (i % picks * step + i * 5 % step) as i32;
        }
        let selection = place.moved(selection)?;
        let row_request: Vec<i32> = (0..t).map(|row| (row / rows.q_len) as i32).collect();
        let positions = vec![rows.kv_len as i32 - 1; t];
        let (page_start, kv_lens) = (vec![0; rows.rows], vec![rows.kv_len as i32; rows.rows]);
        let workers = rayon::current_num_threads();
        let mut on = DeviceTable::with_capacity(&stream, t, rows.rows, kv_indices.len(), rows.kv_len)?;
        on.set(
            &stream,
            &Table {
                row_request: &row_request,
                positions: &positions,
                kv_indptr: &kv_indptr,
                kv_indices: &kv_indices,
                page_start: &page_start,
                kv_lens: &kv_lens,
            },
        )?;
        prepare_sparse(&stream, &rows.geometry(), on.kernels())?;
        let bytes = sparse_workspace_bytes_on(place.device(), &rows.geometry(), t, picks, workers);
        let mut tensors = Tensors::new(place, rows, bytes)?;
        Ok(Made::alone(move || {
            let Tensors { q, latent, o, workspace } = &mut tensors;
            let [q_nope, q_pe, latent] = inputs(&rows, q, latent)?;
            let params = SparseParams {
                geometry: rows.geometry(),
                sm_scale: SM_SCALE,
                q_nope,
                q_pe,
                latent,
                selection: selection.tensor(0, DType::I32, &[t, picks])?,
                row_request: &row_request,
                kv_indptr: &kv_indptr,
                kv_indices: &kv_indices,
                page_start: &page_start,
                kv_lens: &kv_lens,
                o: o.tensor_mut(0, rows.dtype, &[t, rows.heads, C])?,
                lse: None,
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes])?,
                workers,
            };
            Ok(sparse_attend_at(&stream, &on, params)?)
        }))
    };
    Case {
        kernel: "sparse",
        shape: rows.shape(),
        dtype: rows.dtype,
        cost: rows.cost(),
        beside: None,
        make: Box::new(make),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useful_work_counts_a_latent_once_whatever_the_heads() {
        let rows =
            Rows { rows: 2, q_len: 1, kv_len: 100, heads: 3, dtype: DType::Bf16, picks: 0, codes: false };
        let (latents, qo) = (2 * 100 * 576, 2 * 3 * (576 + 512));
        assert_eq!(rows.cost().bytes, (2 * (latents + qo)) as f64);
        assert_eq!(rows.cost().flops, (2 * 2 * 100 * 3 * (576 + 512)) as f64);
        let picks = Rows { picks: 10, ..rows };
        assert_eq!(picks.cost().flops, rows.cost().flops / 10.0);
        // Rows of one request cannot read more than it has.
        let many = Rows { rows: 1, q_len: 11, ..picks };
        assert_eq!(many.cost().bytes, (2 * (100 * 576 + 11 * 3 * (576 + 512))) as f64);
        let codes = Rows { codes: true, ..rows };
        assert_eq!(codes.cost().bytes, (2 * 100 * 656 + 2 * qo) as f64);
        let square = Rows { rows: 1, q_len: 4, kv_len: 4, ..rows };
        assert_eq!(square.cost().flops, (2 * 10 * 3 * (576 + 512)) as f64);
    }
}
