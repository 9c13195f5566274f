//! The same row gives the same bits.

use proptest::prelude::*;

use super::fixture::{Batch, FORMATS, Random};
use crate::DType;
use crate::cpu::Isa;

fn bits(scores: &[f32]) -> Vec<u32> {
    scores.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn equal_keys_have_bit_equal_scores_wherever_they_lie() {
    let mut random = Random(1);
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for format in FORMATS {
            for q_dtype in [DType::F32, DType::Bf16] {
                for keys in [1, 17, 63, 64, 65, 1100] {
                    let (heads, width) = (1 + random.below(10), 4 * (1 + random.below(12)));
                    let mut batch = Batch::random(random.next(), heads, width, &[(keys, random.below(16))]);
                    (batch.format, batch.q_dtype, batch.workers) = (format, q_dtype, 3);
                    // Every key is the first.
                    let first = batch.requests[0].keys[..width].to_vec();
                    batch.requests[0].keys.chunks_mut(width).for_each(|key| key.copy_from_slice(&first));
                    batch.row(0, keys as i32 - 1);
                    let (scores, _) = batch.scores();
                    assert_eq!(
                        bits(&scores),
                        vec![scores[0].to_bits(); keys],
                        "{isa} {format:?} {q_dtype} {keys}"
                    );
                }
            }
        }
    }
}

/// A batch of decode rows, a prefill, an append and rows of no request, in some order.
fn shuffled(seed: u64) -> Batch {
    let mut random = Random(seed);
    let lens: Vec<(usize, usize)> = (0..4).map(|_| (1 + random.below(180), random.below(16))).collect();
    let mut batch = Batch::random(seed, 1 + random.below(9), 4 * (1 + random.below(10)), &lens);
    for _ in 0..random.below(90) {
        let request = random.below(5) as i32 - 1;
        let position = if request < 0 { -1 } else { random.below(lens[request as usize].0) as i32 };
        batch.row(request, position);
    }
    batch.format = FORMATS[random.below(4)];
    batch.q_dtype = [DType::F32, DType::Bf16, DType::F16][random.below(3)];
    batch.topk = random.below(100);
    batch
}

/// Row `row` alone, with only its request.
fn alone(batch: &Batch, row: usize) -> Batch {
    let (request, position) = batch.rows[row];
    let wide = batch.heads * batch.width;
    let requests = if request < 0 { Vec::new() } else { vec![batch.requests[request as usize].clone()] };
    Batch {
        requests,
        rows: vec![(request.min(0), position)],
        q: batch.q[row * wide..][..wide].to_vec(),
        weights: batch.weights[row * batch.heads..][..batch.heads].to_vec(),
        workers: 1,
        ..batch.clone()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn threads_pages_places_and_company_change_no_bit(
        seed in any::<u64>(),
        workers in 1usize..5,
        page_size in 1usize..40,
        start in 0usize..40,
    ) {
        for &isa in Isa::supported() {
            let _forced = Isa::force(isa).unwrap();
            let batch = shuffled(seed);
            let (scores, stride) = batch.scores();
            let picks = batch.select();
            let mut moved = Batch { workers, page_size, place: seed ^ 1, ..batch.clone() };
            moved.requests.iter_mut().for_each(|request| request.page_start = start % page_size);
            prop_assert_eq!(bits(&moved.scores().0), bits(&scores));
            prop_assert_eq!(moved.select(), picks.clone());
            for row in 0..batch.rows.len().min(12) {
                let one = alone(&batch, row);
                let seen = (batch.rows[row].1 + 1) as usize;
                prop_assert_eq!(bits(&one.scores().0[..seen]), bits(&scores[row * stride..][..seen]));
                prop_assert_eq!(one.select(), &picks[row * batch.topk..][..batch.topk]);
            }
        }
    }
}

#[test]
fn what_lies_past_a_requests_keys_does_not_matter() {
    // The fixture fills every slot that is nobody's with NaN; here later keys of the request itself are hostile.
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        for format in FORMATS {
            let mut batch = Batch::random(8, 3, 12, &[(150, 2)]);
            batch.format = format;
            batch.row(0, 99).row(0, 70);
            let before = (batch.scores().0[..100].to_vec(), batch.select());
            batch.requests[0].keys[100 * 12..].fill(f32::NAN);
            assert_eq!(bits(&batch.scores().0[..100]), bits(&before.0), "{isa} {format:?}");
            assert_eq!(batch.select(), before.1);
            batch.requests[0].keys.truncate(100 * 12);
            assert_eq!(batch.select(), before.1);
        }
    }
}
