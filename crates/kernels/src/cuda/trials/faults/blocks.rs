//! Block masks.

use super::super::memory::scratch;
use super::*;
use crate::flex::{AttendParams, Blocks, Geometry, schedule, stage, workspace_bytes};
use crate::paged::{ScheduleOptions, Target};
use crate::work::WorkList;

/// Zero keys and values of one in blocks of 128, NaN past the last and where nothing is written: outputs and log-sum-exps.
fn ones(stream: &Stream, dtype: DType, l: usize, m: usize, written: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let (d, block) = (64, 128);
    let geometry = Geometry {
        batch: 1,
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: d,
        head_dim_vo: d,
        q_dtype: dtype,
        kv_dtype: dtype,
    };
    let indices: Vec<i32> = written.iter().map(|&block| block as i32).collect();
    let indptr: Vec<i32> = vec![0, indices.len() as i32];
    let visible = Blocks {
        q_len: l,
        kv_len: m,
        block_q: l,
        block_kv: block,
        batch: 1,
        heads: 1,
        indptr: &indptr,
        indices: &indices,
        partial: &[],
        positions: None,
    };
    let options = ScheduleOptions { workers: 1, target: Target::Blocks, ..ScheduleOptions::default() };
    let mut work = WorkList::default();
    schedule(&geometry, &visible, &options, &mut work).unwrap();
    stage(stream, &mut work, &[], &[]).unwrap();
    // Whole blocks are stored, of which the last has slack.
    let stored = m.div_ceil(block) * block;
    let pool = |number: f32| {
        let of = |key: usize| if key < m && written.contains(&(key / block)) { number } else { f32::NAN };
        let all: Vec<f32> = (0..stored * d).map(|i| of(i / d)).collect();
        put(stream, &encoded(dtype, &all))
    };
    let (q, k, v) = (put(stream, &encoded(dtype, &vec![1.0; l * d])), pool(0.0), pool(1.0));
    let (mut o, mut lse) = (scratch(stream, l * d * dtype.size(), NAN), scratch(stream, 4 * l, NAN));
    let bytes = workspace_bytes(&work, 1);
    let mut workspace = scratch(stream, bytes, NAN);
    let params = AttendParams {
        work: &work,
        q: q.tensor(0, dtype, &[1, 1, l, d]).unwrap(),
        k: k.tensor(0, dtype, &[1, 1, m, d]).unwrap(),
        v: v.tensor(0, dtype, &[1, 1, m, d]).unwrap(),
        sm_scale: 1.0,
        q_offset: 0,
        score_mods: &[],
        mask_mods: &[],
        o: o.tensor_mut(0, dtype, &[1, 1, l, d]).unwrap(),
        lse: Some(lse.tensor_mut(0, DType::F32, &[1, 1, l]).unwrap()),
        max_scores: None,
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
        workers: 1,
    };
    crate::flex::attend(stream, params).unwrap();
    (floats(dtype, &take(stream, &o, o.len())), floats(DType::F32, &take(stream, &lse, lse.len())))
}

#[test]
fn f33_key_lengths_that_are_not_a_multiple_of_the_block() {
    let Some(owned) = stream("f33_key_lengths_that_are_not_a_multiple") else { return };
    let stream = owned.stream();
    for dtype in [DType::Bf16, DType::F32] {
        for m in [1, 64, 127, 128, 129, 200] {
            for l in if is_emulated() { vec![5] } else { vec![1, 5, 127, 128, 129] } {
                let all: Vec<usize> = (0..usize::div_ceil(m, 128)).collect();
                for written in [&all[..], &all[..1], &[]] {
                    let (o, lse) = ones(&stream, dtype, l, m, written);
                    let seen: usize = written.iter().map(|block| (m - block * 128).min(128)).sum();
                    let want = if seen == 0 { (0.0, f32::NEG_INFINITY) } else { (1.0, (seen as f32).ln()) };
                    assert!(o.iter().all(|&o| o == want.0), "{dtype} {l} x {m}, {written:?}: {}", o[0]);
                    let right = lse.iter().all(|&lse| near(lse, want.1, 1e-6));
                    assert!(right, "{dtype} {l} x {m}, {written:?}: {}", lse[0]);
                }
            }
        }
    }
}
