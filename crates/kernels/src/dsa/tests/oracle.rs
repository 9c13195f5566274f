//! Scores within rounding of the oracle's, and exactly the pick that a stable sort makes of them.

use super::fixture::{Batch, FLOATS, FORMATS, Random, decoded, rounded, sorted};
use crate::cpu::Isa;
use crate::dsa::KeyFormat;

/// Every score within rounding of the oracle's; every pick the stable sort's of the scores.
fn agrees(batch: &Batch) {
    let what = format!(
        "{} heads x {}, page {}, {} over {:?}, {}",
        batch.heads,
        batch.width,
        batch.page_size,
        batch.q_dtype,
        batch.format,
        Isa::current()
    );
    let (scores, stride) = batch.scores();
    let picks = batch.select();
    let expected = batch.oracle();
    let mut at = 0;
    for (row, &(request, position)) in batch.rows.iter().enumerate() {
        let seen = position as usize + 1;
        let ours = &scores[row * stride..][..stride];
        for (key, (&got, &want)) in ours[..seen].iter().zip(&expected.scores[at..]).enumerate() {
            let bound = bound(batch, row, request as usize, key);
            assert!(
                (got - want).abs() <= bound,
                "{what}: row {row}, key {key}: {got}, expected {want} +- {bound}"
            );
        }
        assert!(ours[seen..].iter().all(|&x| x == f32::NEG_INFINITY), "{what}: row {row} past its position");
        let pick = &picks[row * batch.topk..][..batch.topk];
        assert_eq!(pick, sorted(&ours[..seen], batch.topk), "{what}: row {row}");
        at += seen;
    }
}

/// What rounding may do to a score: a few ulp of the sum of magnitudes.
fn bound(batch: &Batch, row: usize, request: usize, key: usize) -> f32 {
    let width = batch.width;
    let key = decoded(batch.format, &batch.requests[request].keys[key * width..][..width]);
    let magnitude: f64 = (0..batch.heads)
        .map(|head| {
            let q = &batch.q[(row * batch.heads + head) * width..][..width];
            let product: f64 =
                q.iter().zip(&key).map(|(&a, &b)| f64::from(rounded(a, batch.q_dtype) * b).abs()).sum();
            product * f64::from(batch.weights[row * batch.heads + head].abs())
        })
        .sum();
    (magnitude * f64::from(f32::EPSILON) * (width + batch.heads) as f64) as f32
}

fn mixed(seed: u64, heads: usize, width: usize, page_size: usize) -> Batch {
    let start = |n: usize| n % page_size;
    let mut batch =
        Batch::random(seed, heads, width, &[(130, start(3)), (1, 0), (67, start(1)), (200, start(7))]);
    batch.page_size = page_size;
    // Decode rows, a prefill of several rows, an append, and out of order.
    for (request, position) in
        [(3, 199), (0, 0), (0, 1), (0, 2), (0, 63), (0, 64), (1, 0), (2, 66), (0, 129), (2, 65)]
    {
        batch.row(request, position);
    }
    batch
}

#[test]
fn every_body_format_and_query_type_agrees_over_ragged_shapes() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for (seed, (heads, width)) in
            [(1, 4), (2, 32), (4, 64), (5, 36), (7, 128), (17, 12), (64, 8)].into_iter().enumerate()
        {
            for format in FORMATS {
                for q_dtype in FLOATS {
                    let page_size = [1, 16, 5, 64, 300][(seed + q_dtype.size()) % 5];
                    let batch = Batch { format, q_dtype, ..mixed(seed as u64, heads, width, page_size) };
                    agrees(&batch);
                }
            }
        }
    }
}

#[test]
fn odd_widths_agree() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for width in [1, 2, 3, 15, 17, 31, 33, 63, 129] {
            for format in [KeyFormat::F32, KeyFormat::Bf16, KeyFormat::F16] {
                agrees(&Batch { format, q_dtype: format.dtype(), ..mixed(width as u64, 3, width, 7) });
            }
        }
    }
}

#[test]
fn whole_numbers_are_exact_and_picks_equal_the_oracles() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        let mut random = Random(9);
        for format in FORMATS {
            for q_dtype in FLOATS {
                for topk in [0, 1, 7, 64, 199, 200, 201] {
                    let (heads, width) = (1 + random.below(9), 4 * (1 + random.below(8)));
                    let batch =
                        Batch { format, q_dtype, topk, ..mixed(random.next(), heads, width, 16) }.whole();
                    assert_eq!(batch.select(), batch.oracle().selection, "{isa} {format:?} {q_dtype} {topk}");
                }
            }
        }
    }
}

#[test]
fn several_chunks_and_blocks_of_rows_agree() {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        let mut batch = Batch::random(4, 2, 8, &[(1500, 2), (1200, 0)]);
        for t in 0..70 {
            batch.row(0, 1400 + t);
        }
        for t in 0..70 {
            batch.row(t % 2, 1100 + t);
        }
        batch.topk = 100;
        batch.workers = 3;
        agrees(&batch);
    }
}
