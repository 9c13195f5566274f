//! The faults of others that block-mask attention could share, and what a call must refuse.

use super::batch::{Batch, Lists, Shape};
use crate::flex::{
    AttendParams, Blocks, Geometry, MaskMod, ScoreMod, UserMask, UserMod, attend, is_for, schedule,
    workspace_bytes,
};
use crate::paged::ScheduleOptions;
use crate::testing::on_every_isa;
use crate::work::WorkList;
use crate::{DType, Stream, TensorMut, TensorRef};

const GEOMETRY: Geometry = Geometry {
    batch: 1,
    num_qo_heads: 1,
    num_kv_heads: 1,
    head_dim_qk: 1,
    head_dim_vo: 1,
    q_dtype: DType::F32,
    kv_dtype: DType::F32,
};

/// One call over one head of width 1: `o`, `lse` and the largest scores, or what was said.
fn call(
    blocks: &Blocks<'_>,
    keys: &[f32],
    values: &[f32],
    score: &[ScoreMod],
    mask: &[MaskMod],
    q_offset: i64,
) -> Result<[Vec<f32>; 3], String> {
    let (l, m) = (blocks.q_len, blocks.kv_len);
    let options = ScheduleOptions { workers: 2, ..ScheduleOptions::default() };
    let mut work = WorkList::default();
    schedule(&GEOMETRY, blocks, &options, &mut work).map_err(|error| error.to_string())?;
    let mut out = [vec![7f32; l + 128], vec![7f32; l + 128], vec![7f32; l + 128]];
    let [o, lse, top] = &mut out;
    let bytes = workspace_bytes(&work, 2);
    let (q, mut workspace) = (vec![1f32; l], vec![0u8; bytes]);
    let result = attend(
        &Stream::cpu(),
        AttendParams {
            work: &work,
            q: TensorRef::from_slice(&q, &[1, 1, l, 1]).unwrap(),
            k: TensorRef::from_slice(keys, &[1, 1, m, 1]).unwrap(),
            v: TensorRef::from_slice(values, &[1, 1, m, 1]).unwrap(),
            sm_scale: 1.0,
            q_offset,
            score_mods: score,
            mask_mods: mask,
            o: TensorMut::from_slice(&mut o[64..64 + l], &[1, 1, l, 1]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse[64..64 + l], &[1, 1, l]).unwrap()),
            max_scores: Some(TensorMut::from_slice(&mut top[64..64 + l], &[1, 1, l]).unwrap()),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers: 2,
        },
    );
    for out in &out {
        assert!(out[..64].iter().chain(&out[64 + l..]).all(|&x| x == 7.0), "a guard was written");
        assert!(result.is_ok() || out.iter().all(|&x| x == 7.0), "a refused call wrote");
    }
    result.map_err(|error| error.to_string())?;
    Ok(out.map(|out| out[64..64 + l].to_vec()))
}

/// One list for one block of queries over blocks of 128.
fn one<'a>(l: usize, m: usize, indptr: &'a [i32], indices: &'a [i32]) -> Blocks<'a> {
    let block_q = l.max(1);
    Blocks {
        q_len: l,
        kv_len: m,
        block_q,
        block_kv: 128,
        batch: 1,
        heads: 1,
        indptr,
        indices,
        ..Blocks::default()
    }
}

fn close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!(got == want || (got - want).abs() <= 2e-6 * want.abs().max(1.0), "{got} for {want}");
    }
}

const EMPTY: f32 = f32::NEG_INFINITY;

#[test]
fn f01_a_query_that_sees_nothing_yields_zero_and_minus_infinity() {
    on_every_isa(|_| {
        let values: Vec<f32> = (0..130).map(|j| j as f32).collect();
        let blocks = one(4, 130, &[0, 1], &[1]);
        let [o, lse, top] = call(&blocks, &[0.0; 130], &values, &[ScoreMod::Causal], &[], 126).unwrap();
        close(&o, &[0.0, 0.0, 128.0, 128.5]);
        close(&lse, &[EMPTY, EMPTY, 0.0, 2f32.ln()]);
        close(&top, &[EMPTY, EMPTY, 0.0, 0.0]);
        // The same said by a mod of the user's, and by a mask of a partial block.
        let user = UserMod::new("causal", |scores, row| {
            for (score, &k) in scores.iter_mut().zip(row.k_idx) {
                if i64::from(k) > row.q_idx as i64 + row.q_offset {
                    *score = f32::NEG_INFINITY;
                }
            }
        });
        let said = call(&blocks, &[0.0; 130], &values, &[ScoreMod::User(&user)], &[], 126).unwrap();
        assert_eq!(said, [o.clone(), lse.clone(), top.clone()]);
        let part = Blocks { partial: &[1], ..blocks };
        assert_eq!(call(&part, &[0.0; 130], &values, &[], &[MaskMod::Causal], 126).unwrap(), [o, lse, top]);
    });
}

#[test]
fn f02_very_negative_scores_are_not_empty_and_a_hidden_large_one_is_nothing() {
    on_every_isa(|_| {
        let keys = [-524_288.0, -524_289.0, 3e38];
        let values = [1.0, 0.0, 1e30];
        let blocks = Blocks { partial: &[1], ..one(1, 3, &[0, 1], &[0]) };
        let [o, lse, top] = call(&blocks, &keys, &values, &[], &[MaskMod::Causal], 1).unwrap();
        close(&o, &[0.731_059]);
        assert_eq!((lse[0], top[0]), (-524_287.7, -524_288.0));
    });
}

#[test]
fn f03_keys_that_masks_hide_from_every_query_may_hold_nan() {
    on_every_isa(|_| {
        let values: Vec<f32> = (0..256).map(|j| if j < 200 { 1.0 } else { f32::NAN }).collect();
        let keys: Vec<f32> = values.iter().map(|v| v - 1.0).collect();
        let ids: Vec<i32> = (0..256).map(|j| i32::from(j >= 200)).collect();
        let blocks = Blocks { partial: &[0, 1], ..one(3, 256, &[0, 2], &[0, 1]) };
        let user = UserMask::new("below 200", |seen, row| {
            seen.iter_mut().zip(row.k_idx).for_each(|(seen, &k)| *seen = k < 200);
        });
        let document = MaskMod::Document { q_ids: &[0, 0, 0], kv_ids: &ids };
        for mask in [MaskMod::Causal, document, MaskMod::User(&user)] {
            let [o, lse, _] = call(&blocks, &keys, &values, &[], &[mask], 197).unwrap();
            close(&o, &[1.0; 3]);
            assert!((lse[2] - 200f32.ln()).abs() < 1e-6, "{mask:?}: {lse:?}");
        }
    });
}

#[test]
fn f05_nothing_to_do_is_done() {
    on_every_isa(|_| {
        let none = call(&one(0, 5, &[0], &[]), &[0.0; 5], &[0.0; 5], &[], &[], 0).unwrap();
        assert_eq!(none, [vec![], vec![], vec![]]);
        let [o, lse, top] = call(&one(2, 0, &[0, 0], &[]), &[], &[], &[], &[], 0).unwrap();
        assert_eq!((o, lse, top), (vec![0.0; 2], vec![EMPTY; 2], vec![EMPTY; 2]));
        let shape = Shape { b: 0, h: 2, g: 1, l: 3, m: 4, d: 2, dv: 2, blocks: [4, 4] };
        let batch = Batch::new(shape, Lists { batch: 1, heads: 1, lists: vec![vec![(0, false)]] });
        assert!(batch.run::<f32, f32>(&[], &[]).o.is_empty());
    });
}

#[test]
fn f08_the_soft_cap_acts_before_the_mask() {
    on_every_isa(|_| {
        let [o, lse, top] =
            call(&one(1, 2, &[0, 1], &[0]), &[10.0, 0.0], &[1.0, 0.0], &[ScoreMod::SoftCap(2.0)], &[], 0)
                .unwrap();
        close(&o, &[0.880_778]);
        close(&lse, &[2.126_768]);
        close(&top, &[2.0 * 5f32.tanh()]);
        let mods = [ScoreMod::Causal, ScoreMod::SoftCap(1.0)];
        let [o, ..] = call(&one(2, 2, &[0, 1], &[0]), &[0.5, 0.25], &[3.0, 1e4], &mods, &[], 0).unwrap();
        assert_eq!(o[0], 3.0);
    });
}

#[test]
fn f33_lengths_that_are_no_multiple_of_the_block() {
    on_every_isa(|_| {
        for m in [1usize, 64, 127, 128, 129, 200] {
            for l in [1usize, 5, 127, 128, 129] {
                // One more key, which nobody may count, stands behind the last.
                let (keys, values) = (vec![0f32; m], vec![1f32; m]);
                let all: Vec<i32> = (0..m.div_ceil(128) as i32).collect();
                let indptr: Vec<i32> = (0..=l.div_ceil(128)).map(|i| (i * all.len()) as i32).collect();
                let indices = all.repeat(l.div_ceil(128));
                let blocks = Blocks { block_q: 128, ..one(l, m, &indptr, &indices) };
                let [o, lse, _] = call(&blocks, &keys, &values, &[], &[], 0).unwrap();
                close(&o, &vec![1.0; l]);
                assert!(lse.iter().all(|lse| (lse - (m as f32).ln()).abs() < 1e-5), "{l} over {m}: {lse:?}");
            }
        }
        let values: Vec<f32> = (0..200).map(|j| if j < 128 { f32::NAN } else { 1.0 }).collect();
        let keys: Vec<f32> = values.iter().map(|v| v - 1.0).collect();
        let [o, lse, _] = call(&one(2, 200, &[0, 1], &[1]), &keys, &values, &[], &[], 0).unwrap();
        close(&o, &[1.0; 2]);
        close(&lse, &[72f32.ln(); 2]);
    });
}

#[test]
fn a_nan_that_a_query_sees_makes_it_nan() {
    on_every_isa(|_| {
        let keys = [0.0, f32::NAN, 0.0];
        for score in [&[][..], &[ScoreMod::SoftCap(3.0)], &[ScoreMod::Alibi { slopes: &[0.5] }]] {
            let [o, lse, top] = call(&one(1, 3, &[0, 1], &[0]), &keys, &[1.0; 3], score, &[], 0).unwrap();
            assert!(o[0].is_nan() && lse[0].is_nan() && (top[0].is_nan() || top[0].is_finite()), "{score:?}");
        }
    });
}

#[test]
fn f11_hostile_blocks_are_refused_with_array_and_value() {
    let good = Blocks { block_q: 2, ..one(4, 300, &[0, 2, 3], &[0, 2, 1]) };
    let mut work = WorkList::default();
    schedule(&GEOMETRY, &good, &ScheduleOptions::default(), &mut work).unwrap();
    let mut refused = |blocks: Blocks<'_>, says: &str| {
        let said = schedule(&GEOMETRY, &blocks, &ScheduleOptions::default(), &mut work).unwrap_err();
        assert!(said.to_string().starts_with(says), "{said}");
        assert!(is_for(&work, &GEOMETRY, &good), "the list is as it was");
        assert!(!is_for(&work, &GEOMETRY, &blocks));
    };
    refused(Blocks { block_q: 0, ..good }, "block_q");
    refused(Blocks { block_kv: 0, ..good }, "block_kv");
    refused(Blocks { block_kv: usize::MAX, ..good }, "block_kv");
    refused(Blocks { kv_len: 1 << 40, ..good }, "kv_len");
    refused(Blocks { q_len: 1 << 40, ..good }, "q_len");
    refused(Blocks { batch: 3, ..good }, "batch");
    refused(Blocks { heads: 0, ..good }, "heads");
    refused(Blocks { indptr: &[0, 2], ..good }, "indptr: expected shape");
    refused(Blocks { indptr: &[0, 3, 2], ..good }, "indptr[2] = 2");
    refused(Blocks { indptr: &[0, 2, 4], ..good }, "indptr[2] = 4");
    refused(Blocks { indices: &[0, 3, 1], ..good }, "indices[1] = 3");
    refused(Blocks { indices: &[0, -1, 1], ..good }, "indices[1] = -1");
    refused(Blocks { indices: &[2, 0, 1], ..good }, "indices[1] = 0");
    refused(Blocks { indices: &[1, 1, 1], ..good }, "indices[1] = 1");
    refused(Blocks { partial: &[0, 1], ..good }, "partial");
    refused(Blocks { positions: Some(&[0, 1]), ..good }, "positions");
    refused(Blocks { positions: Some(&[0, -1, 2]), ..good }, "positions[1] = -1");
    refused(Blocks { positions: Some(&[0, 1, i32::MAX]), ..good }, "positions[2]");
}

#[test]
fn mods_that_do_not_fit_are_refused_and_nothing_is_written() {
    let blocks = Blocks { partial: &[1], ..one(2, 3, &[0, 1], &[0]) };
    let refused = |score: &[ScoreMod], mask: &[MaskMod], says: &str| {
        let said = call(&blocks, &[0.0; 3], &[0.0; 3], score, mask, 0).unwrap_err();
        assert!(said.starts_with(says), "{said}");
    };
    let no_half = UserMod { cpu: None, ..UserMod::new("tilt", |_, _| {}) };
    let no_mask = UserMask { cpu: None, ..UserMask::new("tilt", |_, _| {}) };
    refused(&[], &[], "mask_mods: some blocks are visible in part");
    refused(&[ScoreMod::Alibi { slopes: &[1.0, 2.0] }], &[MaskMod::None], "slopes");
    refused(&[ScoreMod::Alibi { slopes: &[f32::NAN] }], &[MaskMod::None], "slopes");
    refused(&[ScoreMod::RelBias { table: &[1.0; 4], window: 2 }], &[MaskMod::None], "table");
    refused(&[ScoreMod::RelBias { table: &[1.0; 4], window: usize::MAX }], &[MaskMod::None], "table");
    refused(&[ScoreMod::SoftCap(0.0)], &[MaskMod::None], "soft_cap");
    refused(&[ScoreMod::SoftCap(f32::INFINITY)], &[MaskMod::None], "soft_cap");
    refused(&[ScoreMod::User(&no_half)], &[MaskMod::None], "score_mods: it has no CPU half");
    refused(&[], &[MaskMod::User(&no_mask)], "mask_mods: it has no CPU half");
    refused(&[], &[MaskMod::Document { q_ids: &[0], kv_ids: &[0; 3] }], "q_ids");
    refused(&[], &[MaskMod::Document { q_ids: &[0; 2], kv_ids: &[0; 2] }], "kv_ids");
}
