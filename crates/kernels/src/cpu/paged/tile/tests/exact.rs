//! What must hold to the last bit: masks, junk slots, tile neighbours, key ranges, page placement.

use super::fixture::{Case, Output, Random, Row, every_edge};
use crate::DType;
use crate::cpu::Isa;

fn same(a: &Output, b: &Output) -> bool {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    bits(&a.o) == bits(&b.o) && bits(&a.lse) == bits(&b.lse)
}

fn rows() -> Vec<Row> {
    let base = Row { q_len: 45, kv_len: 420, group: 2, d: 40, dv: 24, page_size: 5, ..Row::default() };
    let mut random = Random(9);
    let mask = (0..45 * 7).map(|_| random.next()).collect();
    let variants = vec![
        base.clone(),
        Row { causal: false, ..base.clone() },
        Row { window_left: Some(70), ..base.clone() },
        Row { window_left: Some(0), ..base.clone() },
        Row { cap: 5.0, slopes: Some(vec![0.1, 0.2]), ..base.clone() },
        Row { mask: Some(mask), ..base.clone() },
        Row { kv_offset: 125, kv_begin: 127, ..base },
    ];
    variants
        .into_iter()
        .flat_map(|row| [DType::F32, DType::Bf16].map(|dtype| Row { dtype, ..row.clone() }))
        .collect()
}

#[test]
fn f40_a_query_keeps_its_bits_in_any_tile() {
    for row in rows() {
        let case = Case::new(row);
        for &isa in Isa::supported() {
            let whole = case.run_cut(isa, 45, &[]);
            for tokens in [1, 2, 3, 7, 13, 16, 44] {
                assert!(same(&whole, &case.run_cut(isa, tokens, &[])), "{tokens} tokens a tile on {isa}");
            }
        }
    }
}

#[test]
fn key_ranges_and_masked_tiles_change_no_bit() {
    for row in rows() {
        let case = Case::new(row);
        for &isa in Isa::supported() {
            let whole = case.run(isa);
            for cuts in [every_edge(case.row.kv_len), vec![128], vec![256, 384]] {
                assert!(same(&whole, &case.run_cut(isa, 48, &cuts)), "cut at {cuts:?} on {isa}");
            }
        }
    }
}

#[test]
fn retention_under_a_window_changes_no_bit() {
    for dtype in [DType::F32, DType::Bf16] {
        let row =
            Row { dtype, q_len: 30, kv_len: 400, page_size: 16, window_left: Some(20), ..Row::default() };
        let mut case = Case::new(row);
        for &isa in Isa::supported() {
            (case.row.kv_offset, case.row.kv_begin) = (0, 0);
            let kept = case.run(isa);
            for (offset, begin) in [(16, 20), (336, 340), (350, 350)] {
                (case.row.kv_offset, case.row.kv_begin) = (offset, begin);
                assert!(same(&kept, &case.run(isa)), "retained from {begin} on {isa}");
            }
        }
    }
}

#[test]
fn f03_slots_nobody_sees_and_page_placement_change_no_bit() {
    for row in rows() {
        let mut case = Case::new(row);
        for &isa in Isa::supported() {
            (case.junk, case.placement) = (0.0, 7);
            let clean = case.run(isa);
            assert!(clean.o.iter().all(|x| x.is_finite()));
            for junk in [f32::NAN, f32::INFINITY, -1e30] {
                (case.junk, case.placement) = (junk, 11);
                assert!(same(&clean, &case.run(isa)), "{junk} in slots of nobody on {isa}");
            }
        }
    }
}

#[test]
fn f03_a_key_that_the_mask_hides_from_all_may_hold_anything() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for hidden in [0, 3, 10, 63, 64, 69] {
            let mut mask = vec![u64::MAX; 6 * 2];
            for query in mask.chunks_mut(2) {
                query[hidden / 64] &= !(1 << (hidden % 64));
            }
            let row = Row { dtype, q_len: 6, kv_len: 70, causal: false, mask: Some(mask), ..Row::default() };
            let mut case = Case::new(row);
            for &isa in Isa::supported() {
                let clean = Case::new(case.row.clone()).run(isa);
                case.k[hidden * 32..(hidden + 1) * 32].fill(f32::NAN);
                case.v[hidden * 32..(hidden + 1) * 32].fill(f32::NAN);
                assert!(same(&clean, &case.run(isa)), "key {hidden}, {dtype} on {isa}");
            }
        }
    }
}

#[test]
fn f01_a_query_that_sees_nothing_is_empty() {
    for dtype in [DType::F32, DType::Bf16] {
        let row =
            Row { dtype, q_len: 5, kv_len: 2, d: 4, dv: 4, page_size: 2, sm_scale: 1.0, ..Row::default() };
        let mut case = Case::new(row);
        case.k.fill(0.0);
        case.v = [[1.0; 4], [3.0; 4]].concat();
        for &isa in Isa::supported() {
            let out = case.run(isa);
            assert_eq!(out.o, [[0.0; 4], [0.0; 4], [0.0; 4], [1.0; 4], [2.0; 4]].concat(), "{isa}");
            assert_eq!(out.lse[..3], [f32::NEG_INFINITY; 3]);
            assert!(
                out.lse[3] == 0.0 && (out.lse[4] - std::f32::consts::LN_2).abs() < 1e-6,
                "{isa}: {:?}",
                out.lse
            );
        }
    }
}

#[test]
fn f02_very_negative_scores_are_scores() {
    for dtype in [DType::F32, DType::Bf16] {
        for (scale, kv_len) in [(1.0, 2), (1.0, 1), (1.0 / 128f32.sqrt(), 2)] {
            let row = Row {
                dtype,
                q_len: 1,
                kv_len,
                d: 2,
                dv: 2,
                causal: false,
                sm_scale: scale,
                ..Row::default()
            };
            let mut case = Case::new(row);
            case.q = vec![1024.0, 1.0];
            case.k = [[-512.0, 0.0], [-512.0, -1.0]][..kv_len].concat();
            case.v = [[1.0, 1.0], [0.0, 0.0]][..kv_len].concat();
            let (o, lse) = case.oracle();
            for &isa in Isa::supported() {
                let out = case.run(isa);
                assert!((f64::from(out.o[0]) - o[0]).abs() < 3e-3, "{isa}: {:?} for {o:?}", out.o);
                assert!((f64::from(out.lse[0]) / lse[0] - 1.0).abs() < 1e-7, "{isa}: {:?}", out.lse);
            }
        }
    }
}

#[test]
fn a_huge_hidden_score_changes_nothing() {
    let mut mask = vec![0b1111];
    let row = Row { q_len: 1, kv_len: 4, causal: false, mask: Some(mask.clone()), ..Row::default() };
    let mut case = Case::new(row);
    mask[0] = 0b1011;
    case.row.mask = Some(mask);
    for &isa in Isa::supported() {
        let before = case.run(isa);
        case.k[2 * 32..3 * 32].fill(1e30);
        assert!(same(&before, &case.run(isa)), "{isa}");
    }
}

#[test]
fn a_nan_that_is_seen_is_not_swallowed() {
    let mut case = Case::new(Row { q_len: 2, kv_len: 2, ..Row::default() });
    case.k[..32].fill(f32::NAN);
    for &isa in Isa::supported() {
        assert!(case.run(isa).o.iter().all(|x| x.is_nan()), "{isa}");
    }
}
