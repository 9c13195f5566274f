//! Faults that others shipped.

use super::fixture::{Batch, FORMATS, Request, sorted};
use crate::cpu::Isa;
use crate::dsa::KeyFormat;
use crate::{DType, reference};

/// One head, one row at the last position, the query `e0`, weight 1: a key scores its first lane where that is positive.
fn first_lane(lanes: &[f32], width: usize, format: KeyFormat) -> Batch {
    let mut batch = Batch::random(22, 1, width, &[]);
    let key = |&lane: &f32| (0..width).map(move |d| if d == 0 { lane } else { 0.0 });
    batch.requests.push(Request { keys: lanes.iter().flat_map(key).collect(), page_start: 5 });
    batch.rows.push((0, lanes.len() as i32 - 1));
    batch.q = (0..width).map(|d| f32::from(u8::from(d == 0))).collect();
    batch.weights = vec![1.0];
    batch.format = format;
    batch.q_dtype = if format == KeyFormat::F16 { DType::F16 } else { DType::Bf16 };
    batch
}

#[test]
fn f22_of_thousands_of_equal_scores_the_earliest_fill_the_pick_without_holes() {
    let lanes: Vec<f32> = (0..8320).map(|s| if s % 83 == 0 && s < 8300 { 1.0 } else { -1.0 }).collect();
    let others = (0..8320).filter(|&s| lanes[s as usize] < 0.0).take(1948);
    let mut expected: Vec<i32> = (0..100).map(|i| 83 * i).chain(others).collect();
    expected.sort_unstable();
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for format in FORMATS {
            let batch = Batch { topk: 2048, workers: 2, ..first_lane(&lanes, 4, format) };
            for _ in 0..if format == KeyFormat::Bf16 { 20 } else { 1 } {
                assert_eq!(batch.select(), expected, "{isa} {format:?}");
            }
        }
        // All scores 0; and infinities, which only formats that have them can score.
        for (lane, format) in
            [(-1.0, KeyFormat::Bf16), (f32::INFINITY, KeyFormat::Bf16), (f32::INFINITY, KeyFormat::F32)]
        {
            for topk in [1, 15, 299, 300, 301] {
                let mut batch = Batch { topk, ..first_lane(&[lane; 300], 1, format) };
                batch.page_size = 7;
                let expected: Vec<i32> = (0..topk as i32).map(|j| if j < 300 { j } else { -1 }).collect();
                assert_eq!(batch.select(), expected, "{isa} {format:?} {lane} {topk}");
            }
        }
    }
}

/// Attends a pick of one row by the oracle, one head over the keys as latents: whether it saw anything.
fn attended(pick: &[i32], keys: usize) -> (Vec<f64>, f64) {
    let latent: Vec<f32> = (0..keys).map(|j| j as f32 + 1.0).collect();
    let result = reference::dsa_attend(&reference::dsa_attend::DsaAttend {
        q_nope: &[1.0f32],
        q_pe: &[] as &[f32],
        latent: &latent,
        selection: pick,
        row_request: &[0],
        kv_indptr: &[0, keys as i32],
        kv_indices: &(0..keys as i32).collect::<Vec<_>>(),
        page_start: &[0],
        sm_scale: 1.0,
        num_qo_heads: 1,
        kv_lora_rank: 1,
        qk_rope_head_dim: 0,
        page_size: 1,
    })
    .unwrap();
    (result.o, result.lse[0])
}

#[test]
fn f23_nan_is_never_picked_and_minus_infinity_is() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for format in FORMATS {
            let lanes: Vec<f32> = (0..100).map(|s| (s * 37 % 100) as f32 / 4.0).collect();
            let mut batch = Batch { topk: 16, ..first_lane(&lanes, 4, format) };
            let valid = |batch: &Batch, picked: usize| {
                let pick = batch.select();
                assert_eq!(pick.iter().filter(|&&j| j >= 0).count(), picked, "{isa} {format:?} {pick:?}");
                assert!(
                    pick[..picked].windows(2).all(|pair| pair[0] < pair[1])
                        && pick[picked..].iter().all(|&j| j == -1)
                );
                assert!(pick.iter().all(|&j| (-1..100).contains(&j)));
                let (o, lse) = attended(&pick, 100);
                assert!(o[0].is_finite() && lse < f64::INFINITY);
                assert_eq!((o[0] == 0.0, lse == f64::NEG_INFINITY), (picked == 0, picked == 0));
                pick
            };
            // A NaN in one key, in the lane that scores and in one that multiplies 0.
            for lane in [0, 3] {
                let mut batch = batch.clone();
                batch.requests[0].keys[40 * 4 + lane] = f32::NAN;
                batch.requests[0].keys[41 * 4] = 0.0;
                assert!(!valid(&batch, 16).contains(&40));
                batch.topk = 100;
                let pick = valid(&batch, 99);
                assert!(!pick.contains(&40) && pick.contains(&41));
            }
            // In every key; in a weight; in a query.
            let mut all = batch.clone();
            all.requests[0].keys.iter_mut().step_by(4).for_each(|x| *x = f32::NAN);
            valid(&all, 0);
            let mut weight = batch.clone();
            weight.weights[0] = f32::NAN;
            valid(&weight, 0);
            let mut query = batch.clone();
            query.q[2] = f32::NAN;
            valid(&query, 0);
            if format == KeyFormat::Fp8 {
                continue;
            }
            // -inf counts as a key: it is picked when nothing better is left.
            batch.weights[0] = -1.0;
            for j in (0..100).step_by(2) {
                batch.requests[0].keys[4 * j] = f32::INFINITY;
            }
            batch.requests[0].keys[4] = f32::NAN;
            batch.topk = 60;
            let pick = valid(&batch, 60);
            let finite = pick.iter().filter(|&&j| j % 2 == 1).count();
            let infinite: Vec<i32> = pick.iter().copied().filter(|j| j % 2 == 0).collect();
            assert_eq!((finite, infinite), (49, (0..11).map(|i| 2 * i).collect()));
            batch.topk = 200;
            valid(&batch, 99);
        }
    }
}

#[test]
fn f24_a_chunk_scores_the_prefix_before_it() {
    let (width, keys) = (8, 64);
    let mut whole = Batch::random(24, 4, width, &[(keys, 3)]);
    for position in 0..keys as i32 {
        whole.row(0, position);
    }
    whole.weights.iter_mut().for_each(|w| *w = w.abs() + 0.1);
    // Key 5 along every query's sum wins clearly, key 61 comes second.
    whole.q.iter_mut().for_each(|x| *x = x.abs() + 0.5);
    for (key, size) in [(5, 9.0), (61, 6.0)] {
        whole.requests[0].keys[key * width..][..width].fill(size);
    }
    let row = whole.heads * width;
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for format in FORMATS {
            let chunked = |chunks: &[usize]| -> Vec<i32> {
                let mut picks = Vec::new();
                let mut begin = 0;
                for &len in chunks {
                    let end = begin + len;
                    let mut chunk = Batch { format, q_dtype: DType::Bf16, ..whole.clone() };
                    // Later keys are not written yet.
                    chunk.requests[0].keys.truncate(end * width);
                    chunk.rows = whole.rows[begin..end].to_vec();
                    chunk.q = whole.q[begin * row..end * row].to_vec();
                    chunk.weights = whole.weights[begin * whole.heads..end * whole.heads].to_vec();
                    picks.extend(chunk.select());
                    begin = end;
                }
                picks
            };
            let once = chunked(&[64]);
            for (position, pick) in once.chunks(8).enumerate() {
                let seen = |key: i32| key <= position as i32;
                assert!(!seen(5) || pick.contains(&5), "{isa} {format:?} {position}: {pick:?}");
                assert!(!seen(61) || pick.contains(&61), "{isa} {format:?} {position}: {pick:?}");
                assert!(pick.iter().all(|&j| seen(j)));
            }
            assert_eq!(chunked(&[60, 4]), once, "{isa} {format:?}");
            assert_eq!(chunked(&[63, 1]), once, "{isa} {format:?}");
            assert_eq!(chunked(&[7, 7, 7, 7, 7, 7, 7, 7, 7, 1]), once, "{isa} {format:?}");
        }
    }
}

#[test]
fn weights_of_either_sign_and_zero_order_the_keys() {
    let lanes: Vec<f32> = (0..50).map(|s| (s * 17 % 50) as f32 - 10.0).collect();
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        let mut batch = first_lane(&lanes, 3, KeyFormat::F32);
        batch.topk = 5;
        for weight in [1.0, -1.0, 0.0, -0.0] {
            batch.weights[0] = weight;
            let scores: Vec<f32> = lanes.iter().map(|&x| weight * x.max(0.0)).collect();
            assert_eq!(batch.select(), sorted(&scores, 5), "{isa} {weight}");
        }
    }
}
