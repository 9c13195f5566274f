//! Scores and picks.

use super::super::memory::{noise, scratch};
use super::*;
use crate::dsa::{self, DeviceTable, KeyFormat, SelectParams, SparseParams, Table};
use crate::{Kernels, mla};

/// Keys of one request in one page each of 64, in order; queries and weights of one head.
struct Indexer {
    width: usize,
    topk: usize,
    keys: Vec<f32>,
}

impl Indexer {
    fn count(&self) -> usize {
        self.keys.len() / self.width
    }

    /// The picks of queries at positions.
    fn picks(
        &self,
        stream: &Stream,
        dtype: DType,
        queries: &[f32],
        weight: f32,
        positions: &[i32],
    ) -> Vec<i32> {
        let (t, d, k, size) = (positions.len(), self.width, self.topk, 64);
        let pages = self.count().div_ceil(size);
        let format = KeyFormat::of(dtype).unwrap();
        dsa::prepare_select(stream, dtype, format, 1, d, Kernels::Auto).unwrap();
        let (indices, indptr): (Vec<i32>, _) = ((0..pages as i32).collect(), [0, pages as i32]);
        let lens = [self.count() as i32];
        let table = Table {
            row_request: &vec![0; t],
            positions,
            kv_indptr: &indptr,
            kv_indices: &indices,
            page_start: &[0],
            kv_lens: &lens,
        };
        let mut on = DeviceTable::with_capacity(stream, 0, 0, 0, 0).unwrap();
        on.set(stream, &table).unwrap();
        let mut all = self.keys.clone();
        all.resize(pages * size * d, f32::NAN);
        let (keys, q) = (put(stream, &encoded(dtype, &all)), put(stream, &encoded(dtype, queries)));
        let weights = put(stream, &encoded(DType::F32, &vec![weight; t]));
        let mut out = put(stream, &vec![0x77; 4 * t * k]);
        let bytes = dsa::select_workspace_bytes_on(DEVICE, t, on.max_keys(), 1, d, k, 1);
        let mut workspace = scratch(stream, bytes, NAN);
        let params = SelectParams {
            q: q.tensor(0, dtype, &[t, 1, d]).unwrap(),
            weights: weights.tensor(0, DType::F32, &[t, 1]).unwrap(),
            keys: keys.tensor(0, dtype, &[pages, size, d]).unwrap(),
            format,
            row_request: table.row_request,
            positions,
            kv_indptr: &indptr,
            kv_indices: &indices,
            page_start: &[0],
            kv_lens: &lens,
            topk: k,
            selection: out.tensor_mut(0, DType::I32, &[t, k]).unwrap(),
            workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
            workers: 1,
        };
        dsa::select_at(stream, &on, params).unwrap();
        let bytes = take(stream, &out, out.len());
        bytes.chunks_exact(4).map(|pick| i32::from_ne_bytes(pick.try_into().expect("4 bytes"))).collect()
    }
}

/// A vector whose first lane is a number.
fn first(width: usize, number: f32) -> Vec<f32> {
    let mut all = vec![0.0; width];
    all[0] = number;
    all
}

const BF16: DType = DType::Bf16;

#[test]
fn f22_many_equal_scores_leave_no_hole() {
    let Some(owned) = stream("f22_many_equal_scores_leave_no_hole") else { return };
    let stream = owned.stream();
    let (count, width, times) = (8320, 32, if is_emulated() { 1 } else { 20 });
    let of = |number: &dyn Fn(usize) -> f32, count: usize, topk: usize| Indexer {
        width,
        topk,
        keys: (0..count).flat_map(|key| first(width, number(key))).collect(),
    };
    let query = first(width, 1.0);
    let last = [count as i32 - 1];
    for dtype in [BF16, DType::F32] {
        let winners = of(&|key| if key % 83 == 0 && key / 83 < 100 { 1.0 } else { -1.0 }, count, 2048);
        let mut want: Vec<i32> = (0..100).map(|i| 83 * i).collect();
        want.extend((0..count as i32).filter(|key| key % 83 != 0 || key / 83 >= 100).take(1948));
        want.sort_unstable();
        for _ in 0..times {
            assert_eq!(winners.picks(&stream, dtype, &query, 1.0, &last), want, "{dtype}");
        }
        // Equal scores, and picks of all, one less, one more.
        for topk in [99, 100, 101] {
            let equal = of(&|_| 0.0, 100, topk);
            let want: Vec<i32> = (0..topk as i32).map(|key| if key < 100 { key } else { -1 }).collect();
            assert_eq!(equal.picks(&stream, dtype, &query, 1.0, &[99]), want, "{dtype} {topk}");
        }
        let infinite = of(&|key| if key % 3 == 1 { f32::INFINITY } else { 1.0 }, 60, 20);
        let want: Vec<i32> = (0..20).map(|i| 3 * i + 1).collect();
        assert_eq!(infinite.picks(&stream, dtype, &query, 1.0, &[59]), want, "{dtype}");
    }
}

#[test]
fn f23_nan_is_never_picked_and_a_row_of_nothing_attends_to_nothing() {
    let Some(owned) = stream("f23_nan_is_never_picked") else { return };
    let stream = owned.stream();
    let width = 32;
    let of = |nan: &dyn Fn(usize) -> bool| Indexer {
        width,
        topk: 16,
        keys: (0..100)
            .flat_map(|key| first(width, if nan(key) { f32::NAN } else { 1.0 + key as f32 / 128.0 }))
            .collect(),
    };
    let query = first(width, 1.0);
    for dtype in [BF16, DType::F32] {
        // 16 of the largest, the NaN among them left out.
        let picks = of(&|key| key == 90).picks(&stream, dtype, &query, 1.0, &[99]);
        let want: Vec<i32> = (83..100).filter(|&key| key != 90).collect();
        assert_eq!(picks, want, "{dtype}");
        for (nan, weight) in [(true, 1.0), (false, f32::NAN)] {
            let picks = of(&|_| nan).picks(&stream, dtype, &query, weight, &[99]);
            assert_eq!(picks, [-1; 16], "{dtype}");
        }
        // -inf is a score like another.
        let picks = of(&|_| false).picks(&stream, dtype, &query, f32::NEG_INFINITY, &[99]);
        assert_eq!(picks, (0..16).collect::<Vec<i32>>(), "{dtype}");
        for kernels in [Kernels::Auto, Kernels::Mma] {
            let (o, lse) = attended(&stream, dtype, kernels, &[-1; 16]);
            let nothing = o.iter().all(|&o| o == 0.0) && lse.iter().all(|&lse| lse == f32::NEG_INFINITY);
            assert!(nothing, "{dtype} {kernels:?}");
        }
    }
}

/// Two heads over picks of 100 latents.
fn attended(stream: &Stream, dtype: DType, kernels: Kernels, picks: &[i32]) -> (Vec<f32>, Vec<f32>) {
    let (h, c, size, pages, k) = (2, 48, 16, 7, picks.len());
    let geometry = mla::Geometry {
        num_qo_heads: h,
        kv_lora_rank: c,
        qk_rope_head_dim: 16,
        page_size: size,
        q_dtype: dtype,
        kv_dtype: dtype,
    };
    dsa::prepare_sparse(stream, &geometry, kernels).unwrap();
    let (indices, indptr): (Vec<i32>, _) = ((0..pages).collect(), [0, pages]);
    let table = Table {
        row_request: &[0],
        positions: &[0],
        kv_indptr: &indptr,
        kv_indices: &indices,
        page_start: &[0],
        kv_lens: &[100],
    };
    let mut on = DeviceTable::with_capacity(stream, 0, 0, 0, 0).unwrap().with_kernels(kernels);
    on.set(stream, &table).unwrap();
    let ones = put(stream, &encoded(dtype, &vec![1.0; h * 64]));
    let numbers: Vec<f32> = (0..7 * size * 64).map(|i| noise(&[i as u64])).collect();
    let latent = put(stream, &encoded(dtype, &numbers));
    let selection = put(stream, bytemuck::cast_slice(picks));
    let (mut o, mut lse) = (scratch(stream, h * c * dtype.size(), NAN), scratch(stream, 4 * h, NAN));
    let bytes = dsa::sparse_workspace_bytes_on(DEVICE, &geometry, 1, k, 1) + (k + 1) * 4 + 128;
    let mut workspace = scratch(stream, bytes, NAN);
    let params = SparseParams {
        geometry,
        sm_scale: 0.1,
        q_nope: ones.tensor(0, dtype, &[1, h, c]).unwrap(),
        q_pe: ones.tensor(0, dtype, &[1, h, 16]).unwrap(),
        latent: latent.tensor(0, dtype, &[7, size, 64]).unwrap(),
        selection: selection.tensor(0, DType::I32, &[1, k]).unwrap(),
        row_request: &[0],
        kv_indptr: &indptr,
        kv_indices: &indices,
        page_start: &[0],
        kv_lens: &[100],
        o: o.tensor_mut(0, dtype, &[1, h, c]).unwrap(),
        lse: Some(lse.tensor_mut(0, DType::F32, &[1, h]).unwrap()),
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
        workers: 1,
    };
    dsa::sparse_attend_at(stream, &on, params).unwrap();
    (floats(dtype, &take(stream, &o, o.len())), floats(DType::F32, &take(stream, &lse, lse.len())))
}

#[test]
fn f24_a_chunk_scores_the_prefix_before_it() {
    let Some(owned) = stream("f24_a_chunk_scores_the_prefix_before_it") else { return };
    let stream = owned.stream();
    let (width, count) = (32, 64usize);
    let number = |key: usize, lane: usize| match (key, lane) {
        (5, 0) => 8.0,
        (61, 0) => 4.0,
        _ => noise(&[key as u64, lane as u64]) / 8.0,
    };
    let keys: Vec<f32> = (0..count * width).map(|i| number(i / width, i % width)).collect();
    let query = |position: usize| -> Vec<f32> {
        (0..width)
            .map(|lane| if lane == 0 { 1.0 } else { noise(&[9, position as u64, lane as u64]) })
            .collect()
    };
    for dtype in [BF16, DType::F32] {
        // The picks of all positions when keys come in chunks: those of a chunk see what is stored by then.
        let chunked = |chunks: &[usize]| -> Vec<i32> {
            let (mut all, mut begin) = (Vec::new(), 0);
            for &chunk in chunks {
                let end = begin + chunk;
                let indexer = Indexer { width, topk: 8, keys: keys[..end * width].to_vec() };
                let queries: Vec<f32> = (begin..end).flat_map(query).collect();
                let positions: Vec<i32> = (begin as i32..end as i32).collect();
                all.extend(indexer.picks(&stream, dtype, &queries, 1.0, &positions));
                begin = end;
            }
            all
        };
        let whole = chunked(&[64]);
        for (position, picks) in whole.chunks_exact(8).enumerate() {
            assert!(picks.iter().all(|&pick| pick <= position as i32), "{position}: {picks:?}");
            assert!(position < 5 || picks.contains(&5), "{position}: {picks:?}");
            assert!(position < 61 || picks.contains(&61), "{position}: {picks:?}");
        }
        let sevens = [7, 7, 7, 7, 7, 7, 7, 7, 7, 1];
        for chunks in [&[60, 4][..], &[63, 1], &sevens] {
            assert_eq!(chunked(chunks), whole, "{dtype} {chunks:?}");
        }
    }
}
