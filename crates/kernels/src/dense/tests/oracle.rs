//! Ragged and empty shapes against the f64 loops, on every instruction set.

use half::{bf16, f16};

use super::batch::{Batch, Row, STORES, Shape, row};
use crate::testing::{Number, bound, judge, on_every_isa};

fn hold<Q: Number, K: Number>(batch: &Batch, what: &str) {
    let want = batch.oracle::<Q, K>();
    on_every_isa(|isa| {
        for store in STORES {
            let got = batch.run::<Q, K>(store);
            let what = format!("{what}, {store:?}, {} over {} on {isa}", Q::DTYPE, K::DTYPE);
            judge(&what, got.o.iter().map(|o| o.to_f64()), &want.o, bound(Q::DTYPE, K::DTYPE));
            judge(&format!("lse of {what}"), got.lse.iter().map(|&lse| lse.into()), &want.lse, 2e-6);
        }
    });
}

const RAGGED: [(usize, usize, usize); 9] = [
    (3, 0, 3),
    (0, 4, 9),
    (1, 130, 1),
    (40, 60, 40),
    (5, 0, 0),
    (0, 0, 0),
    (7, 3, 2),
    (2, 129, 0),
    (33, 1, 200),
];

fn ragged() -> Vec<Row> {
    RAGGED.iter().map(|&(q, p, f)| row(q, p, f)).collect()
}

#[test]
fn ragged_rows_with_and_without_prefixes_agree_in_every_dtype() {
    let shape = Shape { h: 4, g: 2, d: 40, dv: 24, s: 5 };
    for causal in [true, false] {
        let batch = Batch::new(shape, causal, &ragged());
        let what = format!("ragged, causal {causal}");
        hold::<f32, f32>(&batch, &what);
        hold::<bf16, bf16>(&batch, &what);
        hold::<f16, f16>(&batch, &what);
        hold::<f32, bf16>(&batch, &what);
        hold::<bf16, f32>(&batch, &what);
    }
}

/// Every window and cap over every kind of row and prefix, causal and not.
#[test]
fn windows_and_caps_agree_over_ragged_rows_in_every_dtype() {
    let shape = Shape { h: 4, g: 2, d: 24, dv: 16, s: 5 };
    // None, the query alone, within a key tile, across segments and tiles, longer than any row.
    for (i, window_left) in [None, Some(0), Some(3), Some(70), Some(128), Some(5000)].into_iter().enumerate()
    {
        for (j, logits_soft_cap) in [None, Some(0.4), Some(30.0)].into_iter().enumerate() {
            if (window_left, logits_soft_cap) == (None, None) {
                continue;
            }
            for causal in [true, false] {
                let mut batch = Batch::new(shape, causal, &ragged());
                (batch.variant.window_left, batch.variant.logits_soft_cap) = (window_left, logits_soft_cap);
                let what = format!("causal {causal}, window {window_left:?}, cap {logits_soft_cap:?}");
                hold::<f32, f32>(&batch, &what);
                match (i + j) % 4 {
                    0 => hold::<bf16, bf16>(&batch, &what),
                    1 => hold::<f16, f16>(&batch, &what),
                    2 => hold::<f32, bf16>(&batch, &what),
                    _ => hold::<bf16, f32>(&batch, &what),
                }
            }
        }
    }
}

#[test]
fn a_window_over_several_leaves_agrees() {
    let shape = Shape { h: 2, g: 1, d: 16, dv: 16, s: 64 };
    for causal in [true, false] {
        let mut batch =
            Batch::new(shape, causal, &[row(9, 9000, 9), row(1, 4095, 4098), row(300, 4000, 300)]);
        (batch.variant.window_left, batch.variant.logits_soft_cap) = (Some(4200), Some(2.0));
        hold::<f32, f32>(&batch, &format!("several leaves, causal {causal}"));
        hold::<bf16, bf16>(&batch, &format!("several leaves, causal {causal}"));
    }
}

#[test]
fn f15_any_width_and_group_agrees() {
    for (i, (d, dv)) in
        [(1, 1), (8, 3), (192, 128), (64, 64), (128, 192), (512, 512), (33, 512)].into_iter().enumerate()
    {
        let group = [1, 3, 7, 8, 5][i % 5];
        let shape = Shape { h: 2 * group, g: 2, d, dv, s: 16 };
        let batch = Batch::new(shape, i % 2 == 0, &[row(5, 20, 5), row(3, 0, 140)]);
        hold::<f32, f32>(&batch, &format!("D {d}, Dv {dv}, group {group}"));
        hold::<bf16, bf16>(&batch, &format!("D {d}, Dv {dv}, group {group}"));
    }
}

#[test]
fn rows_of_several_leaves_agree() {
    let shape = Shape { h: 2, g: 1, d: 16, dv: 16, s: 64 };
    let batch = Batch::new(shape, true, &[row(9, 9000, 9), row(1, 4095, 4098)]);
    hold::<f32, f32>(&batch, "several leaves");
}

#[test]
fn long_fresh_rows_agree() {
    let shape = Shape { h: 1, g: 1, d: 16, dv: 16, s: 16 };
    let batch = Batch::new(shape, true, &[row(400, 77, 400)]);
    hold::<f32, f32>(&batch, "long");
    hold::<bf16, bf16>(&batch, "long");
}
