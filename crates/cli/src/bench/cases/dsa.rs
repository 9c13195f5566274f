//! The sparse attention indexer: scores, the pick of given scores, and both at once.

use mstar_kernels::dsa::{
    DeviceTable, KeyFormat, ScoresParams, SelectParams, Table, TopkParams, prepare_select, prepare_topk,
    quantise_keys, scores_at, scores_workspace_bytes, select_at, select_workspace_bytes_on, topk, topk_at,
    topk_workspace_bytes_on,
};
use mstar_kernels::{Buffer, DType, Device};

use super::{Case, Cost, Made, Place, longer, odd, strewn};

/// DeepSeek-V3.2's indexer.
const HEADS: usize = 64;
const WIDTH: usize = 128;
const TOPK: usize = 2048;
const PAGE_SIZE: usize = 64;
/// Keys that are quantised for a pool on a device.
const STRETCH: usize = 1 << 17;

/// Equal requests of `q_len` rows each, the last at the last of `keys` keys.
#[derive(Clone, Copy)]
struct Rows {
    requests: usize,
    q_len: usize,
    keys: usize,
    format: KeyFormat,
}

/// The cases of this family.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let keys = if quick { 4096 } else { 32768 };
    let mut cases = Vec::new();
    for format in [KeyFormat::F32, KeyFormat::Bf16, KeyFormat::Fp8] {
        for q_len in [1, 16] {
            cases.push(indexer("index", Rows { requests: 1, q_len, keys, format }));
        }
    }
    let batch = Rows { requests: 16, q_len: 1, keys: keys / 4, format: KeyFormat::Bf16 };
    cases.push(indexer("index", batch));
    cases.push(indexer("select", Rows { requests: 1, keys, ..batch }));
    cases.push(indexer("select", batch));
    for ties in [false, true] {
        cases.push(picker(keys, ties));
    }
    cases
}

/// Those of a device.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    let (few, short) = if quick { (2, 128) } else { (usize::MAX, 1) };
    let mut cases = Vec::new();
    for kernel in ["index", "select"] {
        for format in [KeyFormat::Bf16, KeyFormat::Fp8] {
            for (requests, keys) in [(64, 32768), (64, 8192), (16, 32768), (1, 65536)] {
                let row = Rows { requests: requests.min(few), q_len: 1, keys: keys / short, format };
                let near =
                    [Rows { keys: longer(row.keys), ..row }, Rows { requests: odd(row.requests), ..row }];
                cases.extend(indexer(kernel, row).with_neighbours(near.map(|row| indexer(kernel, row))));
            }
        }
    }
    for (rows, keys) in [(1, 65536), (16, 32768), (64, 32768), (64, 8192)] {
        let (rows, keys) = (rows.min(few), keys / short);
        let near = [(rows, longer(keys) / 4 * 4), (odd(rows), keys)];
        let near = near.map(|(rows, keys)| picker_of_rows(rows, keys));
        cases.extend(picker_of_rows(rows, keys).with_neighbours(near));
    }
    cases
}

impl Rows {
    fn rows(&self) -> usize {
        self.requests * self.q_len
    }

    fn shape(&self) -> String {
        let Rows { requests, q_len, keys, .. } = self;
        let format = match self.format {
            KeyFormat::Fp8 => "fp8".into(),
            format => format.dtype().to_string(),
        };
        match q_len {
            1 => format!("{requests} x {keys}, {HEADS}x{WIDTH}, {format}"),
            q_len => format!("{q_len} of {keys}, {HEADS}x{WIDTH}, {format}"),
        }
    }

    fn q_dtype(&self) -> DType {
        if self.format == KeyFormat::F32 { DType::F32 } else { DType::Bf16 }
    }

    /// Every key once; a product a head for each key that a row sees.
    fn cost(&self) -> Cost {
        let pairs = self.requests * self.q_len * (2 * self.keys + 1 - self.q_len) / 2;
        let bytes = self.requests * self.keys * self.format.bytes(WIDTH);
        Cost { bytes: bytes as f64, flops: (2 * HEADS * WIDTH * pairs) as f64 }
    }
}

fn stored_keys(place: &Place, tokens: usize, format: KeyFormat) -> anyhow::Result<Buffer> {
    if format != KeyFormat::Fp8 {
        return place.filled(format.dtype(), tokens * WIDTH);
    }
    // A pool is made of one stretch over and over: quantising on the host takes its time.
    let some = if place.is_cpu() { tokens } else { tokens.min(STRETCH) };
    let host = Place::on(Device::Cpu)?;
    let plain = host.filled(DType::F32, some * WIDTH)?;
    let shape = [some, format.width(WIDTH)];
    let mut stored = host.room(DType::U8, &shape)?;
    quantise_keys(plain.tensor(0, DType::F32, &[some, WIDTH])?, stored.tensor_mut(0, DType::U8, &shape)?)?;
    place.tiled(stored, tokens * format.width(WIDTH))
}

fn indexer(kernel: &'static str, rows: Rows) -> Case {
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let (t, keys, format, q_dtype) = (rows.rows(), rows.keys, rows.format, rows.q_dtype());
        let per_request = keys.div_ceil(PAGE_SIZE);
        let pages = rows.requests * per_request;
        let q = place.filled(q_dtype, t * HEADS * WIDTH)?;
        let weights = place.filled(DType::F32, t * HEADS)?;
        let pool = stored_keys(place, pages * PAGE_SIZE, format)?;
        let kv_indices: Vec<i32> = (0..pages).map(strewn(pages)).collect();
        let kv_indptr: Vec<i32> = (0..=rows.requests).map(|r| (r * per_request) as i32).collect();
        let row_request: Vec<i32> = (0..t).map(|row| (row / rows.q_len) as i32).collect();
        let positions: Vec<i32> = (0..t).map(|row| (keys - rows.q_len + row % rows.q_len) as i32).collect();
        let (page_start, kv_lens) = (vec![0; rows.requests], vec![keys as i32; rows.requests]);
        let workers = rayon::current_num_threads();
        let mut on = DeviceTable::with_capacity(&stream, t, rows.requests, pages, keys)?;
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
        prepare_select(&stream, q_dtype, format, HEADS, WIDTH, on.kernels())?;
        let device = place.device();
        let bytes = scores_workspace_bytes(t, keys, HEADS, WIDTH, workers)
            .max(select_workspace_bytes_on(device, t, keys, HEADS, WIDTH, TOPK, workers));
        let mut workspace = place.scratch(bytes)?;
        let picks = kernel == "select";
        let width = if picks { TOPK } else { keys };
        let dtype = if picks { DType::I32 } else { DType::F32 };
        let mut out = place.room(dtype, &[t, width])?;
        Ok(Made::alone(move || {
            let q = q.tensor(0, q_dtype, &[t, HEADS, WIDTH])?;
            let weights = weights.tensor(0, DType::F32, &[t, HEADS])?;
            let keys = pool.tensor(0, format.dtype(), &[pages, PAGE_SIZE, format.width(WIDTH)])?;
            let workspace = workspace.tensor_mut(0, DType::U8, &[bytes])?;
            let out = out.tensor_mut(0, dtype, &[t, width])?;
            let (row_request, positions) = (&row_request[..], &positions[..]);
            let (kv_indptr, kv_indices) = (&kv_indptr[..], &kv_indices[..]);
            let (page_start, kv_lens) = (&page_start[..], &kv_lens[..]);
            if picks {
                let (topk, selection) = (TOPK, out);
                let params = SelectParams {
                    q,
                    weights,
                    keys,
                    format,
                    row_request,
                    positions,
                    kv_indptr,
                    kv_indices,
                    page_start,
                    kv_lens,
                    topk,
                    selection,
                    workspace,
                    workers,
                };
                return Ok(select_at(&stream, &on, params)?);
            }
            let params = ScoresParams {
                q,
                weights,
                keys,
                format,
                row_request,
                positions,
                kv_indptr,
                kv_indices,
                page_start,
                kv_lens,
                scores: out,
                workspace,
                workers,
            };
            Ok(scores_at(&stream, &on, params)?)
        }))
    };
    Case {
        kernel,
        shape: rows.shape(),
        dtype: rows.q_dtype(),
        cost: rows.cost(),
        beside: None,
        make: Box::new(make),
    }
}

/// The pick of one row's scores, all different or rectified to many ties.
fn picker(keys: usize, ties: bool) -> Case {
    let topk_of = TOPK.min(keys / 2);
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let mut given = place.filled(DType::F32, keys)?;
        if ties {
            let mut view = given.tensor_mut(0, DType::F32, &[keys])?;
            let numbers = view.as_mut_slice::<f32>().unwrap_or_default();
            numbers.iter_mut().for_each(|x| *x = (*x * 256.0).round().max(0.0) / 256.0);
        }
        let mut out = place.room(DType::I32, &[topk_of])?;
        let positions = [keys as i32 - 1];
        Ok(Made::alone(move || {
            let params = TopkParams {
                scores: given.tensor(0, DType::F32, &[1, keys])?,
                positions: &positions,
                topk: topk_of,
                out: out.tensor_mut(0, DType::I32, &[1, topk_of])?,
                workers: 1,
            };
            Ok(topk(&stream, params)?)
        }))
    };
    let shape = format!("{topk_of} of {keys}, {}", if ties { "ties" } else { "different" });
    let cost = Cost { bytes: (4 * (keys + topk_of)) as f64, flops: 0.0 };
    Case { kernel: "topk", shape, dtype: DType::F32, cost, beside: None, make: Box::new(make) }
}

/// The pick of rows of scores that are there.
fn picker_of_rows(rows: usize, keys: usize) -> Case {
    let topk = TOPK.min(keys / 2);
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let (stream, device) = (place.stream(), place.device());
        let scores = place.filled(DType::F32, rows * keys)?;
        let mut out = place.room(DType::I32, &[rows, topk])?;
        let row_request: Vec<i32> = (0..rows as i32).collect();
        let positions = vec![keys as i32 - 1; rows];
        let mut on = DeviceTable::with_capacity(&stream, rows, rows, 0, keys)?;
        on.set(
            &stream,
            &Table {
                row_request: &row_request,
                positions: &positions,
                kv_indptr: &vec![0; rows + 1],
                kv_indices: &[],
                page_start: &vec![0; rows],
                kv_lens: &vec![keys as i32; rows],
            },
        )?;
        prepare_topk(&stream)?;
        let bytes = topk_workspace_bytes_on(device, rows, keys);
        let mut workspace = place.scratch(bytes)?;
        Ok(Made::alone(move || {
            let params = TopkParams {
                scores: scores.tensor(0, DType::F32, &[rows, keys])?,
                positions: &positions,
                topk,
                out: out.tensor_mut(0, DType::I32, &[rows, topk])?,
                workers: 1,
            };
            Ok(topk_at(&stream, &on, params, workspace.tensor_mut(0, DType::U8, &[bytes])?)?)
        }))
    };
    let cost = Cost { bytes: (4 * rows * (keys + topk)) as f64, flops: 0.0 };
    let shape = format!("{rows} x {topk} of {keys}");
    Case { kernel: "topk", shape, dtype: DType::F32, cost, beside: None, make: Box::new(make) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useful_work_counts_seen_pairs_and_every_key_once() {
        let rows = Rows { requests: 2, q_len: 4, keys: 10, format: KeyFormat::Fp8 };
        // 7 + 8 + 9 + 10 keys a request.
        assert_eq!(rows.cost().flops, (2 * HEADS * WIDTH * 2 * 34) as f64);
        assert_eq!(rows.cost().bytes, (2 * 10 * (WIDTH + 4)) as f64);
    }
}
