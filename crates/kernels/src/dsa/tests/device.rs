//! The device's kernels against the CPU's, on the emulated device: picks, scores, quantised keys and attention over picks.

use half::{bf16, f16};

use super::fixture::{Batch, FLOATS, FORMATS, Random, stored};
use crate::cuda::exec::{Joiner, with_cluster, with_joiner};
use crate::cuda::{OwnedStream, emulate};
use crate::dsa::{
    self, DeviceTable, KeyFormat, ScoresParams, SelectParams, SparseParams, Table, TopkParams, quantise_keys,
    store_keys_at,
};
use crate::mla::Geometry;
use crate::{Buffer, DType, Device, Element, Kernels, Stream, TensorMut, TensorRef};

const CARD: Device = Device::Cuda(0);

fn card() -> OwnedStream {
    assert!(emulate(), "another test chose the driver");
    OwnedStream::new(CARD).unwrap()
}

/// A host tensor's copy on the card.
fn put(stream: &Stream, from: TensorRef<'_>) -> Buffer {
    let mut to = Buffer::for_tensor_on(CARD, from.dtype(), from.shape()).unwrap();
    crate::copy(stream, from, to.tensor_mut(0, from.dtype(), from.shape()).unwrap()).unwrap();
    to
}

fn take<E: Element>(stream: &Stream, from: &Buffer, len: usize, value: E) -> Vec<E> {
    let mut to = vec![value; len];
    let view = TensorMut::from_slice(&mut to, &[len]).unwrap();
    crate::copy(stream, from.tensor(0, E::DTYPE, &[len]).unwrap(), view).unwrap();
    to
}

/// Picks and scores `[T, N]` of a batch on the card; scratch for `rows` rows at once.
fn selected(batch: &Batch, rows: usize) -> (Vec<i32>, Vec<f32>) {
    let own = card();
    let stream = own.stream();
    let pool = batch.pool();
    let (row_request, positions): (Vec<i32>, Vec<i32>) = batch.rows.iter().copied().unzip();
    let (t, h, d, k) = (row_request.len(), batch.heads, batch.width, batch.topk);
    let n = pool.kv_lens.iter().copied().max().unwrap_or(0) as usize + 1;
    let table = Table {
        row_request: &row_request,
        positions: &positions,
        kv_indptr: &pool.kv_indptr,
        kv_indices: &pool.kv_indices,
        page_start: &pool.page_start,
        kv_lens: &pool.kv_lens,
    };
    let mut on = DeviceTable::with_capacity(&stream, t, pool.kv_lens.len(), pool.pages, 0).unwrap();
    on.set(&stream, &table).unwrap();
    dsa::prepare_select(&stream, batch.q_dtype, batch.format, h, d, on.kernels()).unwrap();
    let (q, w) = (stored(batch.q_dtype, &batch.q), stored(DType::F32, &batch.weights));
    let q = put(&stream, q.tensor(0, batch.q_dtype, &[t, h, d]).unwrap());
    let w = put(&stream, w.tensor(0, DType::F32, &[t, h]).unwrap());
    let shape = [pool.pages, batch.page_size, batch.format.width(d)];
    let keys = put(&stream, pool.keys.tensor(0, batch.format.dtype(), &shape).unwrap());
    let mut picks = put(&stream, TensorRef::from_slice(&vec![-7i32; t * k], &[t, k]).unwrap());
    let mut scores = put(&stream, TensorRef::from_slice(&vec![f32::NAN; t * n], &[t, n]).unwrap());
    let bytes = dsa::select_workspace_bytes_on(CARD, rows, on.max_keys(), h, d, k, 1);
    let mut workspace = Buffer::zeroed_on(CARD, bytes.max(1)).unwrap();
    // A run needs nothing of the one before.
    for _ in 0..2 {
        let params = SelectParams {
            q: q.tensor(0, batch.q_dtype, &[t, h, d]).unwrap(),
            weights: w.tensor(0, DType::F32, &[t, h]).unwrap(),
            keys: keys.tensor(0, batch.format.dtype(), &shape).unwrap(),
            format: batch.format,
            row_request: &row_request,
            positions: &positions,
            kv_indptr: &pool.kv_indptr,
            kv_indices: &pool.kv_indices,
            page_start: &pool.page_start,
            kv_lens: &pool.kv_lens,
            topk: k,
            selection: picks.tensor_mut(0, DType::I32, &[t, k]).unwrap(),
            workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
            workers: 1,
        };
        dsa::select_at(&stream, &on, params).unwrap();
    }
    let mut nothing = Buffer::zeroed_on(CARD, 1).unwrap();
    let params = ScoresParams {
        q: q.tensor(0, batch.q_dtype, &[t, h, d]).unwrap(),
        weights: w.tensor(0, DType::F32, &[t, h]).unwrap(),
        keys: keys.tensor(0, batch.format.dtype(), &shape).unwrap(),
        format: batch.format,
        row_request: &row_request,
        positions: &positions,
        kv_indptr: &pool.kv_indptr,
        kv_indices: &pool.kv_indices,
        page_start: &pool.page_start,
        kv_lens: &pool.kv_lens,
        scores: scores.tensor_mut(0, DType::F32, &[t, n]).unwrap(),
        workspace: nothing.tensor_mut(0, DType::U8, &[1]).unwrap(),
        workers: 1,
    };
    dsa::scores_at(&stream, &on, params).unwrap();
    (take(&stream, &picks, t * k, 0), take(&stream, &scores, t * n, 0.0))
}

fn ragged(seed: u64, heads: usize, width: usize, topk: usize) -> Batch {
    let mut batch = Batch::random(seed, heads, width, &[(90, 3), (1, 0), (333, 16), (40, 7)]).whole();
    batch.topk = topk;
    for (request, position) in [(0, 89), (2, 332), (2, 7), (-1, 0), (1, 0), (3, 39), (0, 15), (2, 200)] {
        batch.row(request, position);
    }
    batch.whole()
}

#[test]
fn whole_numbers_are_picked_as_on_the_cpu_ties_and_all() {
    for (index, format) in FORMATS.into_iter().enumerate() {
        for q_dtype in FLOATS {
            let mut batch = ragged(7 + index as u64, [1, 3, 16, 5][index], [20, 32, 12, 8][index], 32);
            (batch.format, batch.q_dtype) = (format, q_dtype);
            let (picks, scores) = selected(&batch, 3);
            assert_eq!(picks, batch.select(), "{format:?} {q_dtype}");
            let (wanted, n) = batch.scores();
            for (row, wanted) in wanted.chunks(n).enumerate() {
                let got = &scores[row * (n + 1)..][..n + 1];
                assert_eq!(
                    (&got[..n], got[n]),
                    (wanted, f32::NEG_INFINITY),
                    "{format:?} {q_dtype} row {row}"
                );
            }
        }
    }
}

#[test]
fn long_rows_are_picked_over_several_blocks_as_on_the_cpu() {
    let mut batch = Batch::random(23, 2, 8, &[(13_000, 5), (4097, 0), (9000, 16)]).whole();
    // All equal but for a few: more of the last pick's class than shared memory has room for.
    for (at, key) in batch.requests[0].keys.iter_mut().enumerate() {
        *key = if at / 8 % 1000 == 7 { 3.0 } else { 1.0 };
    }
    for (request, position) in
        [(0, 12_999), (1, 4096), (-1, 0), (1, 4095), (2, 8999), (2, 299), (2, 300), (0, 8200), (1, 0)]
    {
        batch.row(request, position);
    }
    let mut batch = batch.whole();
    for topk in [300, 4096, 1] {
        batch.topk = topk;
        let swept = with_cluster(0, || selected(&batch, 4).0);
        assert_eq!((selected(&batch, 4).0, swept), (batch.select(), batch.select()), "{topk}");
    }
}

#[test]
fn one_row_alone_is_picked_as_on_the_cpu() {
    for (format, q_dtype) in
        [(KeyFormat::Bf16, DType::Bf16), (KeyFormat::Fp8, DType::Bf16), (KeyFormat::F32, DType::F32)]
    {
        let mut batch = Batch::random(37, 3, 16, &[(9000, 5)]).whole();
        (batch.format, batch.q_dtype) = (format, q_dtype);
        batch.row(0, 8990);
        let mut batch = batch.whole();
        for topk in [2048, 9000, 7] {
            batch.topk = topk;
            assert_eq!(selected(&batch, 1).0, batch.select(), "{format:?} {topk}");
        }
    }
}

#[test]
fn nan_and_infinite_keys_are_picked_as_on_the_cpu() {
    let mut batch = ragged(3, 4, 16, 48);
    batch.q_dtype = DType::Bf16;
    batch.format = KeyFormat::Bf16;
    for (at, key) in batch.requests[2].keys.iter_mut().enumerate() {
        match at / 16 % 7 {
            2 if at % 16 == 3 => *key = f32::NAN,
            4 if at % 16 == 5 => *key = f32::INFINITY,
            _ => {}
        }
    }
    assert_eq!(selected(&batch, 8).0, batch.select());
}

#[test]
fn many_heads_of_wide_keys_score_as_on_the_cpu() {
    for (heads, width, format) in [
        (70, 200, KeyFormat::Bf16),
        (40, 132, KeyFormat::Fp8),
        (65, 56, KeyFormat::F16),
        (1, 36, KeyFormat::Bf16),
    ] {
        let mut batch = ragged(31, heads, width, 20);
        batch.format = format;
        batch.q_dtype = if format == KeyFormat::F16 { DType::F16 } else { DType::Bf16 };
        let (picks, scores) = selected(&batch, 8);
        assert_eq!(picks, batch.select(), "{heads} x {width} {format:?}");
        let (wanted, n) = batch.scores();
        for (row, wanted) in wanted.chunks(n).enumerate() {
            assert_eq!(&scores[row * (n + 1)..][..n], wanted, "{heads} x {width} {format:?} row {row}");
        }
    }
}

/// Queries become f16 beside keys in e4m3.
#[test]
fn queries_of_any_size_score_keys_in_e4m3_as_on_the_cpu() {
    let mut batch = Batch::random(29, 9, 64, &[(150, 3), (70, 0)]);
    (batch.q_dtype, batch.format, batch.topk) = (DType::Bf16, KeyFormat::Fp8, 16);
    batch.row(0, 149).row(1, 69).row(0, 64);
    // Heads from 2^-60 to 2^100, whose weights make them count alike; and one of zeros.
    for (at, q) in batch.q.iter_mut().enumerate() {
        let head = at / 64 % 9;
        *q *= if head == 4 { 0.0 } else { 2f32.powi(20 * head as i32 - 60) };
    }
    for (at, weight) in batch.weights.iter_mut().enumerate() {
        *weight *= 2f32.powi(60 - 20 * (at % 9) as i32);
    }
    let (_, scores) = selected(&batch, 3);
    let (wanted, n) = batch.scores();
    for (row, wanted) in wanted.chunks(n).enumerate() {
        for (key, (&got, &wanted)) in scores[row * (n + 1)..].iter().zip(wanted).enumerate() {
            let close = got == wanted || (got - wanted).abs() <= 1e-4 * (1.0 + wanted.abs());
            assert!(close, "row {row} key {key}: {got} on the card, {wanted} on the CPU");
        }
    }
}

#[test]
fn a_row_alone_scores_the_bits_that_it_scores_among_others() {
    let mut batch = Batch::random(11, 8, 64, &[(300, 5), (100, 0)]);
    (batch.q_dtype, batch.format) = (DType::Bf16, KeyFormat::Bf16);
    batch.row(0, 299).row(1, 50).row(0, 120);
    let (_, all) = selected(&batch, 8);
    let mut alone = batch.clone();
    alone.place = 99;
    alone.page_size = 5;
    alone.rows = vec![batch.rows[2]];
    (alone.q, alone.weights) = (batch.q[2 * 8 * 64..].to_vec(), batch.weights[2 * 8..].to_vec());
    let (_, one) = selected(&alone, 1);
    assert_eq!(one[..121], all[2 * 301..][..121]);
}

#[test]
fn keys_are_quantised_to_the_bits_of_the_cpu() {
    let own = card();
    let mut random = Random(5);
    let (t, d) = (40, 36);
    let mut numbers: Vec<f32> =
        (0..t * d).map(|i| random.number() * 10f32.powi((i / d) as i32 % 12 - 6)).collect();
    numbers[..d].fill(0.0);
    (numbers[d], numbers[2 * d + 1], numbers[3 * d]) = (f32::NAN, f32::INFINITY, -f32::NAN);
    numbers[4 * d..][..d].fill(1e-42);
    numbers[5 * d..][..d].fill(-3e38);
    for dtype in FLOATS {
        let keys = stored(dtype, &numbers);
        let keys = keys.tensor(0, dtype, &[t, d]).unwrap();
        let mut wanted = vec![0u8; t * (d + 4)];
        quantise_keys(keys, TensorMut::from_slice(&mut wanted, &[t, d + 4]).unwrap()).unwrap();
        let on = put(&own.stream(), keys);
        let mut out = Buffer::zeroed_on(CARD, wanted.len()).unwrap();
        let to = out.tensor_mut(0, DType::U8, &[t, d + 4]).unwrap();
        let on = on.tensor(0, dtype, &[t, d]).unwrap();
        store_keys_at(&own.stream(), on, KeyFormat::Fp8, to).unwrap();
        assert_eq!(take(&own.stream(), &out, wanted.len(), 0u8), wanted, "{dtype}");
        // Rounded to another float, where numbers show what a NaN's bits may not.
        let mut rounded = vec![0f32; t * d];
        let (mut narrow, mut wide) =
            (stored(DType::F16, &rounded), Buffer::zeroed_on(CARD, 2 * t * d).unwrap());
        let to = narrow.tensor_mut(0, DType::F16, &[t, d]).unwrap();
        store_keys_at(&Stream::cpu(), keys, KeyFormat::F16, to).unwrap();
        store_keys_at(&own.stream(), on, KeyFormat::F16, wide.tensor_mut(0, DType::F16, &[t, d]).unwrap())
            .unwrap();
        let narrow = narrow.tensor(0, DType::F16, &[t * d]).unwrap();
        rounded.iter_mut().zip(narrow.as_slice::<f16>().unwrap()).for_each(|(to, x)| *to = x.to_f32());
        let got = take(&own.stream(), &wide, t * d, f16::ZERO);
        let same = |(a, b): (&f32, &f16)| *a == b.to_f32() || a.is_nan() && b.is_nan();
        assert!(rounded.iter().zip(&got).all(same), "{dtype}");
    }
}

/// Rows over two requests of 1200 and 60 positions, in pages in reverse.
struct Sparse<'a> {
    geometry: Geometry,
    row_request: &'a [i32],
    /// `[T, K]`.
    selection: &'a [i32],
    kv_indices: Vec<i32>,
    kv_indptr: [i32; 3],
    page_start: [i32; 2],
}

const KV_LENS: [i32; 2] = [1200, 60];

impl<'a> Sparse<'a> {
    fn new(geometry: Geometry, row_request: &'a [i32], selection: &'a [i32]) -> Sparse<'a> {
        let s = geometry.page_size;
        let pages = [1200usize.div_ceil(s), (60 + s / 2).div_ceil(s)];
        let kv_indptr = [0, pages[0] as i32, (pages[0] + pages[1]) as i32];
        let kv_indices = (0..kv_indptr[2]).rev().collect();
        let page_start = [0, s as i32 / 2];
        Sparse { geometry, row_request, selection, kv_indices, kv_indptr, page_start }
    }

    /// Shapes of queries, rotary parts, latents and picks.
    fn shapes(&self) -> [Vec<usize>; 4] {
        let g = &self.geometry;
        let (t, h, c, e) = (self.row_request.len(), g.num_qo_heads, g.kv_lora_rank, g.qk_rope_head_dim);
        let pages = self.kv_indptr[2] as usize;
        let k = self.selection.len() / t;
        [vec![t, h, c], vec![t, h, e], vec![pages, g.page_size, c + e], vec![t, k]]
    }

    fn params<'b>(
        &'b self,
        [q_nope, q_pe, latent, selection]: [TensorRef<'b>; 4],
        o: TensorMut<'b>,
        lse: TensorMut<'b>,
        workspace: TensorMut<'b>,
    ) -> SparseParams<'b> {
        SparseParams {
            geometry: self.geometry,
            sm_scale: 0.11,
            q_nope,
            q_pe,
            latent,
            selection,
            row_request: self.row_request,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            page_start: &self.page_start,
            kv_lens: &KV_LENS,
            o,
            lse: Some(lse),
            workspace,
            workers: 2,
        }
    }

    /// Outputs and log-sum-exps on the CPU and on the card, there with scratch for so many rows' states. Both start as 9s.
    fn attended(&self, rows: usize, kernels: Kernels) -> [(Vec<f32>, Vec<f32>); 2] {
        let own = card();
        let stream = own.stream();
        let (geometry, dtype, shapes) = (self.geometry, self.geometry.q_dtype, self.shapes());
        let (t, h, k) = (shapes[0][0], shapes[0][1], shapes[3][1]);
        let mut random = Random(17);
        let numbers: Vec<Buffer> = shapes[..3]
            .iter()
            .map(|shape| {
                let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| random.number()).collect();
                stored(dtype, &numbers)
            })
            .collect();
        let [q, pe, latent] = [0, 1, 2].map(|i: usize| numbers[i].tensor(0, dtype, &shapes[i]).unwrap());
        let selection = TensorRef::from_slice(self.selection, &shapes[3]).unwrap();
        let mut o = stored(dtype, &vec![9.0; shapes[0].iter().product()]);
        let mut lse = vec![9f32; t * h];
        let o_on = put(&stream, o.tensor(0, dtype, &shapes[0]).unwrap());
        let lse_on = put(&stream, TensorRef::from_slice(&lse, &[t, h]).unwrap());

        let bytes = dsa::sparse_workspace_bytes(&geometry, k, 2);
        let mut workspace = vec![0u8; bytes];
        let params = self.params(
            [q, pe, latent, selection],
            o.tensor_mut(0, dtype, &shapes[0]).unwrap(),
            TensorMut::from_slice(&mut lse, &[t, h]).unwrap(),
            TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
        );
        dsa::sparse_attend(&Stream::cpu(), params).unwrap();

        let table = Table {
            row_request: self.row_request,
            positions: &vec![0; t],
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            page_start: &self.page_start,
            kv_lens: &KV_LENS,
        };
        let mut on = DeviceTable::with_capacity(&stream, 0, 0, 0, 0).unwrap().with_kernels(kernels);
        on.set(&stream, &table).unwrap();
        dsa::prepare_sparse(&stream, &geometry, on.kernels()).unwrap();
        let inputs = [q, pe, latent, selection].map(|from| put(&stream, from));
        let views: Vec<TensorRef<'_>> = (0..4)
            .map(|i| inputs[i].tensor(0, if i == 3 { DType::I32 } else { dtype }, &shapes[i]).unwrap())
            .collect();
        // Picks of all rows, states of some.
        let bytes = dsa::sparse_workspace_bytes_on(CARD, &geometry, rows, k, 2) + t * (k + 1) * 4 + 128;
        let (mut o_on, mut lse_on) = (o_on, lse_on);
        let mut workspace = Buffer::zeroed_on(CARD, bytes).unwrap();
        let params = self.params(
            [views[0], views[1], views[2], views[3]],
            o_on.tensor_mut(0, dtype, &shapes[0]).unwrap(),
            lse_on.tensor_mut(0, DType::F32, &[t, h]).unwrap(),
            workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
        );
        dsa::sparse_attend_at(&stream, &on, params).unwrap();
        let mut back = Buffer::for_tensor(dtype, &shapes[0]).unwrap();
        let there = o_on.tensor(0, dtype, &shapes[0]).unwrap();
        crate::copy(&stream, there, back.tensor_mut(0, dtype, &shapes[0]).unwrap()).unwrap();
        let len = shapes[0].iter().product::<usize>();
        let widened = |buffer: &Buffer| -> Vec<f32> {
            let view = buffer.tensor(0, dtype, &[len]).unwrap();
            match dtype {
                DType::Bf16 => view.as_slice::<bf16>().unwrap().iter().map(|x| x.to_f32()).collect(),
                DType::F16 => view.as_slice::<f16>().unwrap().iter().map(|x| x.to_f32()).collect(),
                _ => view.as_slice::<f32>().unwrap().to_vec(),
            }
        };
        let card = (widened(&back), take(&stream, &lse_on, t * h, 0f32));
        [(widened(&o), lse), card]
    }
}

fn layer(heads: usize, c: usize, e: usize, page_size: usize, dtype: DType) -> Geometry {
    Geometry {
        num_qo_heads: heads,
        kv_lora_rank: c,
        qk_rope_head_dim: e,
        page_size,
        q_dtype: dtype,
        kv_dtype: dtype,
    }
}

/// Picks of `[T, K]`, of which each row lists so many of its request's positions, with steps between them.
fn picks(k: usize, rows: &[(usize, usize)]) -> Vec<i32> {
    let row =
        |&(count, step): &(usize, usize)| (0..k).map(move |i| if i < count { (i * step) as i32 } else { -1 });
    rows.iter().flat_map(row).collect()
}

fn close(dtype: DType, [cpu, card]: &[(Vec<f32>, Vec<f32>); 2], what: &str) {
    let bound = match dtype {
        DType::Bf16 => 0.02,
        DType::F16 => 0.003,
        _ => 1e-4,
    };
    for (index, (a, b)) in cpu.0.iter().zip(&card.0).enumerate() {
        assert!((a - b).abs() <= bound, "{what}: o {index}: {a} on the CPU, {b} on the card");
    }
    for (index, (a, b)) in cpu.1.iter().zip(&card.1).enumerate() {
        assert!(a == b || (a - b).abs() <= 1e-3, "{what}: lse {index}: {a} on the CPU, {b} on the card");
    }
}

#[test]
fn given_scores_are_picked_as_on_the_cpu() {
    let own = card();
    let stream = own.stream();
    let mut random = Random(23);
    // Segments of several blocks, equal scores, NaN, and rows that see less than they pick.
    let (t, n, positions) = (5usize, 9000usize, [8999, 40, -1, 5000, 8191]);
    let mut scores: Vec<f32> =
        (0..t * n).map(|i| (random.number() * [8.0, 1e6][i / n % 2]).round() / 8.0).collect();
    (scores[7], scores[8]) = (f32::NAN, f32::INFINITY);
    for k in [1, 64, 700] {
        let mut wanted = vec![-9i32; t * k];
        let given = TensorRef::from_slice(&scores, &[t, n]).unwrap();
        let out = TensorMut::from_slice(&mut wanted, &[t, k]).unwrap();
        let params = TopkParams { scores: given, positions: &positions, topk: k, out, workers: 1 };
        dsa::topk(&Stream::cpu(), params).unwrap();
        let lens = positions.map(|position| position + 1);
        let table = Table {
            row_request: &[0, 1, -1, 3, 4],
            positions: &positions,
            kv_indptr: &[0; 6],
            kv_indices: &[],
            page_start: &[0; 5],
            kv_lens: &lens,
        };
        for kernels in BOTH {
            let mut on = DeviceTable::with_capacity(&stream, 0, 0, 0, 0).unwrap().with_kernels(kernels);
            on.set(&stream, &table).unwrap();
            dsa::prepare_topk(&stream).unwrap();
            let there = put(&stream, given);
            let mut out = put(&stream, TensorRef::from_slice(&vec![-9i32; t * k], &[t, k]).unwrap());
            let bytes = dsa::topk_workspace_bytes_on(CARD, t, n);
            let mut workspace = Buffer::zeroed_on(CARD, bytes).unwrap();
            for _ in 0..2 {
                let scores = there.tensor(0, DType::F32, &[t, n]).unwrap();
                let out = out.tensor_mut(0, DType::I32, &[t, k]).unwrap();
                let workspace = workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap();
                let params = TopkParams { scores, positions: &positions, topk: k, out, workers: 1 };
                dsa::topk_at(&stream, &on, params, workspace).unwrap();
            }
            assert_eq!(take(&stream, &out, t * k, 0i32), wanted, "{k}, {kernels:?}");
        }
    }
}

/// Rows by clusters of any size: more rows than clusters at a time, longer than what blocks keep and shorter than a thread each, rows of which
/// all is picked between others, equal scores at every edge, and zeros of both signs.
#[test]
fn rows_are_picked_by_clusters_as_on_the_cpu() {
    let own = card();
    let stream = own.stream();
    let mut random = Random(41);
    let (n, positions) = (36_000usize, [35_999, 12, 899, -1, 9000, 20, 33_000, 4095, 1000, 7, 3]);
    let t = positions.len();
    let mut scores: Vec<f32> =
        (0..t * n).map(|i| (random.number() * [4.0, 1e30, 1e3][i / n % 3]).round()).collect();
    scores[6 * n..7 * n].fill(-0.0);
    for (at, score) in scores[4 * n..5 * n].iter_mut().enumerate() {
        *score = [0.0, -0.0, 1.5, f32::NAN, f32::NEG_INFINITY, f32::INFINITY][at / 5 % 6];
    }
    let requests: Vec<i32> =
        positions.iter().zip(0..).map(|(&of, row)| if of < 0 { -1 } else { row }).collect();
    let lens = positions.map(|position| position + 1);
    let table = Table {
        row_request: &requests,
        positions: &positions,
        kv_indptr: &vec![0; t + 1],
        kv_indices: &[],
        page_start: &vec![0; t],
        kv_lens: &lens,
    };
    let given = TensorRef::from_slice(&scores, &[t, n]).unwrap();
    let there = put(&stream, given);
    for k in [1, 900, 2048] {
        let mut wanted = vec![-9i32; t * k];
        let out = TensorMut::from_slice(&mut wanted, &[t, k]).unwrap();
        let params = TopkParams { scores: given, positions: &positions, topk: k, out, workers: 1 };
        dsa::topk(&Stream::cpu(), params).unwrap();
        for blocks in [2, 4, 8] {
            let mut on = DeviceTable::with_capacity(&stream, 0, 0, 0, 0).unwrap();
            on.set(&stream, &table).unwrap();
            let mut out = put(&stream, TensorRef::from_slice(&vec![-9i32; t * k], &[t, k]).unwrap());
            let bytes = dsa::topk_workspace_bytes_on(CARD, t, n);
            let mut workspace = Buffer::zeroed_on(CARD, bytes).unwrap();
            let params = TopkParams {
                scores: there.tensor(0, DType::F32, &[t, n]).unwrap(),
                positions: &positions,
                topk: k,
                out: out.tensor_mut(0, DType::I32, &[t, k]).unwrap(),
                workers: 1,
            };
            let workspace = workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap();
            with_cluster(blocks, || dsa::topk_at(&stream, &on, params, workspace)).unwrap();
            assert_eq!(take(&stream, &out, t * k, 0i32), wanted, "{k} of a row by {blocks} blocks");
        }
    }
}

/// Over picks as they are, and over a list of them.
const BOTH: [Kernels; 2] = [Kernels::Mma, Kernels::Wgmma];

#[test]
fn picks_are_attended_as_on_the_cpu() {
    let rows = [(700, 1), (0, 1), (513, 1), (9, 60), (40, 1)];
    let row_request = [0, 0, 0, 0, 1];
    let selection = picks(700, &rows);
    for (dtype, heads, c, e, page_size) in [
        (DType::Bf16, 5, 64, 16, 16),
        (DType::F16, 17, 24, 8, 1),
        (DType::Bf16, 3, 33, 5, 7),
        (DType::Bf16, 70, 48, 16, 16),
        (DType::F32, 2, 40, 8, 16),
    ] {
        let sparse = Sparse::new(layer(heads, c, e, page_size, dtype), &row_request, &selection);
        for kernels in BOTH {
            let what = format!("{dtype} {heads} {c} {e} {page_size} {kernels:?}");
            close(dtype, &sparse.attended(2, kernels), &what);
        }
    }
}

#[test]
fn leaves_of_many_heads_are_joined() {
    let selection = picks(1150, &[(1150, 1), (1024, 1), (60, 1)]);
    let sparse = Sparse::new(layer(40, 48, 16, 16, DType::Bf16), &[0, 0, 1], &selection);
    for kernels in BOTH {
        close(DType::Bf16, &sparse.attended(3, kernels), &format!("{kernels:?}"));
    }
}

/// Whichever kernel joins a row's items: rows of one to five, under so many heads that a warp takes several slices.
#[test]
fn items_have_the_same_bits_whichever_kernel_joins_them() {
    for (heads, c) in [(16, 48), (5, 512), (40, 200)] {
        let selection = picks(1150, &[(1150, 1), (1024, 1), (60, 1)]);
        let sparse = Sparse::new(layer(heads, c, 16, 16, DType::Bf16), &[0, 0, 1], &selection);
        for kernels in BOTH {
            let run = |joiner| with_joiner(joiner, || sparse.attended(3, kernels));
            let [few, near, many] = Joiner::ALL.map(run);
            close(DType::Bf16, &few, &format!("{heads} heads"));
            assert!(few[1] == near[1] && few[1] == many[1], "{heads} heads, {c} columns, {kernels:?}");
        }
    }
}

#[test]
fn picks_of_a_request_of_many_rows_are_one_leaf() {
    // Nine rows of a request, which leave no states, around one of another and one of nobody.
    let row_request = [0, 0, 1, 0, 0, 0, -1, 0, 0, 0, 0];
    let rows: Vec<(usize, usize)> = row_request
        .iter()
        .zip(0..)
        .map(|(&of, row)| if of == 1 { (60, 1) } else { (520 + 17 * row, 1) })
        .collect();
    let selection = picks(700, &rows);
    for (heads, c) in [(5, 64), (70, 48)] {
        let sparse = Sparse::new(layer(heads, c, 16, 16, DType::Bf16), &row_request, &selection);
        for kernels in BOTH {
            close(DType::Bf16, &sparse.attended(11, kernels), &format!("{heads} {c} {kernels:?}"));
        }
    }
}

#[test]
fn a_rows_picks_are_a_set_and_rows_of_no_request_are_left_alone() {
    let row_request = [0, -1, 1];
    for kernels in BOTH {
        let mut selection = picks(600, &[(600, 1), (600, 1), (60, 1)]);
        let sparse = Sparse::new(layer(4, 32, 0, 8, DType::Bf16), &row_request, &selection);
        let [_, (o, lse)] = sparse.attended(3, kernels);
        let row = 4 * 32;
        assert!(o[row..2 * row].iter().chain(&lse[4..8]).all(|&x| x == 9.0), "not a row of this call");
        // Listed otherwise, with -1 between.
        selection[..600].reverse();
        selection[1200..1800].rotate_right(77);
        let other = Sparse::new(layer(4, 32, 0, 8, DType::Bf16), &row_request, &selection);
        let [_, again] = other.attended(1, kernels);
        let what = "bits depend on the order of a list, or on how many rows are taken at once";
        assert!(again == (o, lse), "{what}: {kernels:?}");
    }
}
