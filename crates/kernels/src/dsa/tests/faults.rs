//! Faults that others shipped.

use super::fixture::Batch;
use crate::Error;

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
        refused(
            "page_start",
            1,
            bad.into(),
            batch.select_with(|p| p.page_start = Vec::leak(vec![3, bad as i32])),
        );
    }
    refused("kv_indptr", 1, 4, batch.select_with(|p| p.kv_indptr = &[0, 4, 3]));
    refused("kv_indptr", 0, 1, batch.select_with(|p| p.kv_indptr = &[1, 2, 3]));
    refused("kv_indptr", 2, 1, batch.select_with(|p| p.kv_indptr = &[0, 2, 1]));
}
