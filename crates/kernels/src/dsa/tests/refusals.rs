//! Input that is refused, and input that is merely empty.

use super::fixture::{Batch, stored};
use crate::cpu::Isa;
use crate::dsa::{KeyFormat, TopkParams, index_topk, select_topk_causal, topk};
use crate::{DType, Error, Stream, TensorMut, TensorRef};

fn batch() -> Batch {
    let mut batch = Batch::random(3, 2, 4, &[(20, 3), (9, 0)]);
    batch.row(0, 19).row(1, 8).row(-1, i32::MAX).row(0, 0);
    batch
}

#[test]
fn what_is_not_there_is_refused_with_array_entry_and_value_and_nothing_is_written() {
    let mut batch = Batch::random(3, 2, 4, &[(20, 3), (9, 0)]);
    batch.row(0, 19).row(1, 8).row(-1, i32::MAX).row(0, 0);
    batch.select();
    let refused = |array: &str, index: usize, got: i64, result: Result<Vec<i32>, (Error, Vec<i32>)>| {
        let (error, out) = result.unwrap_err();
        let right = matches!(&error, Error::Index { array: a, index: i, got: g, .. } if (*a, *i, *g) == (array, index, got));
        assert!(right, "{array}: {error}");
        assert!(out.iter().all(|&x| x == -7), "{array}: written");
    };
    for bad in [20, 21, -1, i32::MIN, i32::MAX] {
        let result = batch.select_with(|p| p.positions = Vec::leak(vec![bad, 8, 0, 0]));
        refused("positions", 0, bad.into(), result);
    }
    for bad in [2, -2, i32::MAX] {
        let result = batch.select_with(|p| p.row_request = Vec::leak(vec![0, 1, -1, bad]));
        refused("row_request", 3, bad.into(), result);
    }
    for bad in [6, -1, i32::MAX] {
        let result = batch.select_with(|p| p.kv_indices = Vec::leak(vec![0, 1, bad]));
        refused("kv_indices", 2, bad.into(), result);
    }
    for bad in [30, -1] {
        refused("kv_lens", 0, bad.into(), batch.select_with(|p| p.kv_lens = Vec::leak(vec![bad, 9])));
    }
    for bad in [17, -1] {
        refused("page_start", 1, bad.into(), batch.select_with(|p| p.page_start = Vec::leak(vec![3, bad])));
    }
    refused("kv_indptr", 1, 4, batch.select_with(|p| p.kv_indptr = &[0, 4, 3]));
    refused("kv_indptr", 0, 1, batch.select_with(|p| p.kv_indptr = &[1, 2, 3]));
    refused("kv_indptr", 2, 1, batch.select_with(|p| p.kv_indptr = &[0, 2, 1]));
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name_and_nothing_is_written() {
    let batch = batch();
    let refused = |result: Result<Vec<i32>, (Error, Vec<i32>)>, words: &[&str]| {
        let (error, out) = result.unwrap_err();
        let said = error.to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        assert!(out.iter().all(|&x| x == -7), "{said}: written");
    };
    let numbers = &*Box::leak(Box::new(stored(DType::F32, &[0.0; 64])));
    refused(batch.select_with(|p| p.positions = &[0]), &["positions", "[T] = [4]"]);
    refused(batch.select_with(|p| p.row_request = &[]), &["row_request"]);
    refused(batch.select_with(|p| p.kv_indptr = &[]), &["kv_indptr", "[R + 1]"]);
    refused(batch.select_with(|p| p.kv_lens = &[20]), &["kv_lens", "[R] = [2]"]);
    refused(batch.select_with(|p| p.page_start = &[0, 0, 0]), &["page_start"]);
    refused(batch.select_with(|p| p.topk = 9), &["selection", "[4, 9]"]);
    refused(batch.select_with(|p| p.format = KeyFormat::Bf16), &["keys", "bf16"]);
    refused(batch.select_with(|p| p.format = KeyFormat::Fp8), &["keys", "[_, _, 8]"]);
    let weights = numbers.tensor(0, DType::F32, &[4, 3]).unwrap();
    refused(batch.select_with(|p| p.weights = weights), &["weights", "[4, 2]"]);
    let q = TensorRef::from_slice(&[0i32; 32], &[4, 2, 4]).unwrap();
    refused(batch.select_with(|p| p.q = q), &["q", "f32, bf16 or f16"]);
    let q = numbers.tensor(0, DType::F32, &[4, 0, 4]).unwrap();
    refused(batch.select_with(|p| p.q = q), &["index_n_heads"]);
    let q = numbers.tensor(0, DType::F32, &[4, 2, 0]).unwrap();
    refused(batch.select_with(|p| p.q = q), &["index_head_dim"]);
    let q = numbers.tensor(0, DType::F32, &[4, 2, 8]).unwrap().narrow(2, 0, 4).unwrap().transpose(1, 2);
    refused(batch.select_with(|p| p.q = q), &["q"]);
    let needed = super::super::select_workspace_bytes(4, 20, 2, 4, 8, 1);
    refused(
        batch
            .select_with(|p| p.workspace = TensorMut::from_slice(Vec::leak(vec![0u8; 100]), &[100]).unwrap()),
        &["workspace", &needed.to_string(), "100"],
    );
    refused(
        batch.select_with(|p| {
            let shared = Vec::leak(vec![-7i32; 8]);
            p.selection = TensorMut::from_slice_strided(shared, &[4, 8], &[0, 1]).unwrap();
        }),
        &["selection", "overlap"],
    );
}

#[test]
fn nothing_to_do_is_done() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        let mut none = Batch::random(1, 2, 4, &[]);
        assert_eq!(none.select(), []);
        none.requests = Batch::random(1, 2, 4, &[(0, 0), (0, 9)]).requests;
        none.row(-1, 0).row(-1, -5);
        assert_eq!(none.select(), [-1; 16]);
        let zero = Batch { topk: 0, ..batch() };
        assert_eq!(zero.select(), []);
        assert_eq!(batch().select()[16..24], [-1; 8]);
    }
}

#[test]
fn a_bucket_has_room_for_whatever_fits_in_it() {
    let bytes = |rows, keys, workers| super::super::select_workspace_bytes(rows, keys, 8, 32, 16, workers);
    let sizes = [0, 1, 3, 4, 5, 63, 64, 65, 200, 4096, 65_536, 65_537, 100_000, 110_000, 1 << 20, 1 << 24];
    for pair in sizes.windows(2) {
        for other in sizes {
            assert!(bytes(pair[0], other, 2) <= bytes(pair[1], other, 2));
            assert!(bytes(other, pair[0], 2) <= bytes(other, pair[1], 2));
            assert!(bytes(other, 99, pair[0]) <= bytes(other, 99, pair[1]));
        }
    }
    // Bounded in rows, whatever their number, and never the products of all heads.
    assert_eq!(bytes(64, 1 << 17, 2), bytes(1 << 20, 1 << 17, 2));
    assert!(bytes(1 << 20, 1 << 17, 2) < 17 << 20);
    assert_eq!(
        super::super::select_workspace_bytes(usize::MAX, usize::MAX, usize::MAX, usize::MAX, 0, 1),
        usize::MAX
    );
}

#[test]
fn given_scores_are_picked_at_any_stride_and_refused_where_they_are_not() {
    let scores: Vec<f32> = (0..3 * 10).map(|i| (i * 7 % 10) as f32).collect();
    let view = TensorRef::from_slice(&scores, &[3, 10]).unwrap();
    let narrow = view.narrow(1, 2, 6).unwrap();
    let run = |scores: TensorRef<'_>, positions: &[i32], sort: bool| {
        let mut out = vec![-7; 3 * 5];
        let to = TensorMut::from_slice_strided(&mut out, &[3, 3], &[5, 1]).unwrap();
        let result = if sort {
            select_topk_causal(scores, positions, 3, to)
        } else {
            topk(&Stream::cpu(), TopkParams { scores, positions, topk: 3, out: to, workers: 2 })
        };
        (result, out)
    };
    for sort in [true, false] {
        let (result, out) = run(narrow, &[5, -1, 1], sort);
        result.unwrap();
        // 4 1 8 5 2 9 | none | 4 1.
        assert_eq!(out, [2, 3, 5, -7, -7, -1, -1, -1, -7, -7, 0, 1, -1, -7, -7]);
        for bad in [6, -2, i32::MAX, i32::MIN] {
            let (result, out) = run(narrow, &[5, bad, 1], sort);
            let right = matches!(result, Err(Error::Index { array: "positions", index: 1, got, .. }) if got == i64::from(bad));
            assert!(right && out.iter().all(|&x| x == -7), "{result:?}");
        }
        assert!(run(narrow, &[5, 5], sort).0.is_err());
        assert!(run(view.transpose(0, 1), &[0; 10], sort).0.is_err());
    }
}

#[test]
fn positions_beyond_2_to_the_24_are_whole_numbers() {
    let (first, len) = (1 << 24, (1 << 24) + 40);
    let mut scores = vec![0f32; len];
    // A f32 could tell none of these from its even neighbour.
    let high: Vec<i32> = (0..10).map(|i| first + 1 + 2 * i).collect();
    high.iter().for_each(|&j| scores[j as usize] = 1.0);
    let view = TensorRef::from_slice(&scores, &[1, len]).unwrap();
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        let mut out = [0; 12];
        let to = TensorMut::from_slice(&mut out, &[1, 12]).unwrap();
        let positions = [len as i32 - 1];
        topk(
            &Stream::cpu(),
            TopkParams { scores: view, positions: &positions, topk: 12, out: to, workers: 1 },
        )
        .unwrap();
        assert_eq!((&out[..2], &out[2..]), (&[0, 1][..], &high[..]), "{isa}");
    }
}

#[test]
fn one_requests_keys_in_one_tensor_give_the_same_pick_as_in_pages() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let mut batch = Batch::random(6, 3, 10, &[(90, 4)]);
            batch.q_dtype = dtype;
            batch.format = KeyFormat::of(dtype).unwrap();
            batch.page_size = 8;
            for position in [89, 3, 88, 40] {
                batch.row(0, position);
            }
            // Keys within wider entries.
            let wide: Vec<f32> = batch.requests[0]
                .keys
                .chunks(10)
                .flat_map(|k| k.iter().chain(&[f32::NAN; 3]))
                .copied()
                .collect();
            let (q, w, keys) =
                (stored(dtype, &batch.q), stored(DType::F32, &batch.weights), stored(dtype, &wide));
            let mut out = vec![0; 4 * 8];
            index_topk(
                q.tensor(0, dtype, &[4, 3, 10]).unwrap(),
                w.tensor(0, DType::F32, &[4, 3]).unwrap(),
                keys.tensor(0, dtype, &[90, 13]).unwrap().narrow(1, 0, 10).unwrap(),
                &[89, 3, 88, 40],
                8,
                TensorMut::from_slice(&mut out, &[4, 8]).unwrap(),
            )
            .unwrap();
            assert_eq!(out, batch.select(), "{isa} {dtype}");
        }
    }
    let (nothing, zero) = (
        TensorRef::from_slice::<f32>(&[], &[0, 4]).unwrap(),
        TensorRef::from_slice(&[0f32; 8], &[1, 2, 4]).unwrap(),
    );
    let weights = TensorRef::from_slice(&[0f32; 2], &[1, 2]).unwrap();
    let mut out = [-7; 2];
    let said = index_topk(zero, weights, nothing, &[0], 2, TensorMut::from_slice(&mut out, &[1, 2]).unwrap());
    assert!(matches!(said, Err(Error::Index { array: "positions", index: 0, got: 0, .. })), "{said:?}");
    assert_eq!(out, [-7; 2]);
}
