//! Ragged shapes, page sizes, offsets, masks and score options, judged by the f64 loops.

use super::fixture::{Case, Random, Row};
use crate::DType;
use crate::cpu::Isa;

const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

fn judge_everywhere(row: Row, what: &str) {
    for dtype in DTYPES {
        let case = Case::new(Row { dtype, ..row.clone() });
        for &isa in Isa::supported() {
            case.judge(isa, &format!("{what}, {dtype}"));
        }
    }
}

#[test]
fn every_number_of_tokens() {
    for tokens in 1..=130 {
        let group = [1, 2, 3, 7, 8][tokens % 5];
        let row = Row { q_len: tokens, kv_len: tokens + 37 * (tokens % 3), group, ..Row::default() };
        let case = Case::new(Row { dtype: DTYPES[tokens % 3], ..row });
        for &isa in Isa::supported() {
            case.judge(isa, &format!("{tokens} tokens, group {group}"));
        }
    }
}

#[test]
fn f15_every_width_and_group() {
    for (i, d) in [1, 8, 32, 40, 64, 96, 128, 256, 512].into_iter().enumerate() {
        for (j, dv) in [d, 512, 1, 48, 33].into_iter().enumerate() {
            let group = [1, 2, 3, 7, 8][(i + j) % 5];
            let sm_scale = (d as f32).powf(-0.5);
            let row = Row { q_len: 6, kv_len: 70, kv_heads: 2, group, d, dv, sm_scale, ..Row::default() };
            judge_everywhere(row, &format!("D {d}, Dv {dv}, group {group}"));
        }
    }
}

#[test]
fn every_page_size_and_offset() {
    for page_size in [1, 5, 16, 64] {
        for (kv_offset, kv_begin) in [(0, 0), (0, 3), (128, 128), (130, 131), (5, 5)] {
            let row =
                Row { q_len: 9, kv_len: 301, page_size, kv_offset, kv_begin, group: 2, ..Row::default() };
            judge_everywhere(row, &format!("page size {page_size}, begin {kv_begin} of {kv_offset}"));
        }
    }
}

#[test]
fn f06_f07_causal_and_windows_with_a_prefix() {
    for (q_len, kv_len) in [(1, 5), (10, 10), (33, 300), (130, 130), (7, 4)] {
        for causal in [true, false] {
            for window_left in [None, Some(0), Some(1), Some(3), Some(9), Some(200), Some(usize::MAX)] {
                let row = Row { q_len, kv_len, causal, window_left, group: 3, ..Row::default() };
                let what = format!("{q_len} of {kv_len}, causal {causal}, window {window_left:?}");
                judge_everywhere(row, &what);
            }
        }
    }
}

#[test]
fn f08_soft_cap_and_alibi_and_scale() {
    for cap in [0.0, 0.5, 20.0, 1000.0] {
        for slopes in [None, Some(vec![0.5, 0.0, -0.125, 0.06])] {
            for sm_scale in [0.25, 0.0, -0.5, 3.0] {
                let slopes = slopes.clone();
                let what = format!("cap {cap}, slopes {slopes:?}, scale {sm_scale}");
                let row = Row {
                    q_len: 21,
                    kv_len: 150,
                    kv_heads: 2,
                    group: 2,
                    cap,
                    slopes,
                    sm_scale,
                    ..Row::default()
                };
                judge_everywhere(row, &what);
            }
        }
    }
}

#[test]
fn custom_masks_narrow_the_others() {
    for (q_len, kv_len, causal) in [(4, 9, true), (20, 150, true), (20, 150, false), (3, 64, false)] {
        let words = usize::div_ceil(kv_len, 64);
        let mut random = Random(5);
        let mut mask: Vec<u64> = (0..q_len * words).map(|_| random.next() & random.next()).collect();
        mask[words..2 * words].fill(0); // A query that sees nothing.
        let row = Row { q_len, kv_len, causal, mask: Some(mask), group: 2, ..Row::default() };
        judge_everywhere(row, &format!("mask over {q_len} of {kv_len}, causal {causal}"));
    }
}

#[test]
fn long_rows_cross_many_tiles() {
    let row = Row { q_len: 260, kv_len: 900, group: 3, d: 64, dv: 64, sm_scale: 0.125, ..Row::default() };
    judge_everywhere(row, "260 of 900");
}

#[test]
fn the_error_does_not_grow_with_the_keys() {
    for dtype in [DType::F32, DType::Bf16] {
        for sm_scale in [128f32.powf(-0.5), 0.01] {
            let row = Row { dtype, q_len: 16, kv_len: 6000, d: 128, dv: 128, sm_scale, ..Row::default() };
            let case = Case::new(row);
            for &isa in Isa::supported() {
                case.judge(isa, "16 of 6000");
            }
        }
    }
}

#[test]
fn rows_of_every_kind_at_random() {
    let mut random = Random(42);
    let mut pick = |choices: &[usize]| choices[(random.next() % choices.len() as u64) as usize];
    for round in 0..150 {
        let (q_len, kv_len) = (pick(&[1, 2, 5, 12, 13, 31, 64]), pick(&[1, 3, 17, 100, 128, 129, 257, 400]));
        let group = pick(&[1, 2, 3, 5, 8, 16]);
        let kv_heads = pick(&[1, 2]);
        let d = pick(&[1, 7, 16, 24, 64, 80]);
        let kv_begin = pick(&[0, 0, kv_len / 2, kv_len - 1]);
        let slopes = (0..group * kv_heads).map(|h| 0.5 / (1 + h) as f32).collect();
        let words = kv_len.div_ceil(64);
        let mask = (0..q_len * words).map(|i| 0x9e37_79b9_7f4a_7c15u64.rotate_left(i as u32)).collect();
        let row = Row {
            dtype: DTYPES[round % 3],
            q_len,
            kv_len,
            kv_heads,
            group,
            d,
            dv: pick(&[1, 15, 16, 32, 33, 64, 96]),
            page_size: pick(&[1, 3, 16, 64, 512]),
            kv_offset: kv_begin - pick(&[0, 1, 2]).min(kv_begin),
            kv_begin,
            sm_scale: (d as f32).powf(-0.5),
            causal: pick(&[0, 1]) == 1,
            window_left: [None, None, Some(0), Some(9), Some(150)][pick(&[0, 1, 2, 3, 4])],
            cap: [0.0, 0.0, 4.0][pick(&[0, 1, 2])],
            slopes: [None, None, Some(slopes)][pick(&[0, 1, 2])].clone(),
            mask: [None, None, Some(mask)][pick(&[0, 1, 2])].clone(),
            seed: round as u64,
        };
        let case = Case::new(row);
        for &isa in Isa::supported() {
            case.judge(isa, &format!("round {round}"));
        }
    }
}
