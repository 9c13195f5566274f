use proptest::prelude::*;

use super::*;

/// The pick by a plain stable sort.
fn sorted(scores: &[f32], topk: usize) -> Vec<i32> {
    let mut order: Vec<i32> = (0..scores.len() as i32).filter(|&j| !scores[j as usize].is_nan()).collect();
    order.sort_by(|&a, &b| scores[b as usize].partial_cmp(&scores[a as usize]).unwrap());
    order.truncate(topk);
    order.sort_unstable();
    order.resize(topk, -1);
    order
}

fn agrees(scores: &[f32], topk: usize) {
    let expected = sorted(scores, topk);
    for &isa in Isa::supported() {
        let mut out = vec![-7; topk];
        pick(isa, scores, &mut out);
        assert_eq!(out, expected, "{isa}: {topk} of {scores:?}");
    }
}

#[test]
fn orders_are_those_of_scores_and_come_back() {
    let scores = [f32::NEG_INFINITY, f32::MIN, -1.5, -1.0, -1e-45, 0.0, 1e-45, 1.0, f32::MAX, f32::INFINITY];
    assert!(scores.windows(2).all(|pair| order(pair[0]) < order(pair[1])));
    assert!(scores.iter().all(|&x| score(order(x)) == x));
    assert_eq!((order(f32::NEG_INFINITY), order(f32::INFINITY), order(-0.0)), (LEAST, MOST, order(0.0)));
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
        assert_eq!(order(nan), 0);
    }
}

#[test]
fn every_edge_of_number_and_place_agrees_with_the_sort() {
    let edges = [
        f32::NAN,
        f32::NEG_INFINITY,
        f32::MIN,
        -1.0,
        -f32::MIN_POSITIVE,
        -1e-45,
        -0.0,
        0.0,
        1e-45,
        1.0,
        1.0f32.next_up(),
        f32::MAX,
        f32::INFINITY,
        -f32::NAN,
    ];
    for &a in &edges {
        for &b in &edges {
            for n in [1, 2, 15, 16, 17, 40] {
                let scores: Vec<f32> = (0..n).map(|i| if i * 7 % 5 < 2 { a } else { b }).collect();
                for topk in [0, 1, 2, n / 2, n - 1, n, n + 1, n + 20] {
                    agrees(&scores, topk);
                }
            }
        }
    }
}

/// Few values, so that most are ties; sometimes close neighbours; NaN and infinities among them.
fn scores() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        6 => Just(0.0f32),
        1 => Just(-0.0f32),
        2 => (-3i32..4).prop_map(|i| i as f32),
        2 => (0u32..6).prop_map(|i| f32::from_bits(0x3f80_0000 + i)),
        2 => any::<u32>().prop_map(f32::from_bits),
        1 => Just(f32::NAN),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(f32::INFINITY),
    ];
    prop_oneof![prop::collection::vec(value, 0..200), prop::collection::vec((0f32..1.0).boxed(), 0..400)]
}

proptest! {
    #[test]
    fn ties_go_as_a_stable_sort_lets_them(scores in scores(), topk in 0usize..220) {
        agrees(&scores, topk);
    }
}

#[test]
fn long_rows_agree_with_the_sort() {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let uniform: Vec<f32> = (0..40_000).map(|_| next() as f32 / 1e6 - 8.0).collect();
    let relu: Vec<f32> = (0..40_000).map(|_| (next() as f32 / 1e6 - 12.0).max(0.0)).collect();
    let near: Vec<f32> = (0..40_000).map(|_| f32::from_bits(0x4000_0000 + next() % 3000)).collect();
    for scores in [uniform, relu, near] {
        for topk in [1, 2047, 2048, 30_000, 39_999] {
            agrees(&scores, topk);
        }
    }
}
