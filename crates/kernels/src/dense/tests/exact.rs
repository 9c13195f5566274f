//! What must hold to the last bit: where keys lie, who is beside a row, threads, padding, junk.

use half::bf16;

use super::batch::{Batch, Row, STORES, Shape, Store, row};
use crate::testing::{Number, hash, on_every_isa};

const SHAPE: Shape = Shape { h: 4, g: 2, d: 24, dv: 40, s: 7 };

fn rows() -> Vec<Row> {
    vec![row(40, 100, 40), row(1, 255, 1), row(5, 0, 300), row(0, 3, 0), row(12, 6000, 12), row(4, 129, 2)]
}

fn everywhere<Q: Number, K: Number>(batch: &Batch, other: &Batch, stores: &[Store], what: &str) {
    on_every_isa(|isa| {
        for &store in stores {
            let (a, b) = (batch.run::<Q, K>(Store::One), other.run::<Q, K>(store));
            assert!(a == b, "{what}, {store:?} on {isa}");
        }
    });
}

#[test]
fn two_segments_give_the_bits_of_one() {
    for causal in [true, false] {
        let batch = Batch::new(SHAPE, causal, &rows());
        everywhere::<f32, f32>(&batch, &batch, &STORES, "f32");
        everywhere::<bf16, bf16>(&batch, &batch, &STORES, "bf16");
    }
}

#[test]
fn any_cut_between_prefix_and_fresh_gives_the_same_bits() {
    for trial in 0..20u64 {
        let len = 1 + (hash(&[trial, 1]) % 400) as usize;
        let cut = (hash(&[trial, 2]) % (len as u64 + 1)) as usize;
        let q = 1 + (hash(&[trial, 3]) % 60) as usize;
        let whole = Batch::new(SHAPE, trial % 2 == 0, &[Row { id: 2 * trial, q, prefix: 0, fresh: len }]);
        let mut parts = whole.clone();
        (parts.rows[0].prefix, parts.rows[0].fresh) = (cut, len - cut);
        everywhere::<f32, f32>(&whole, &parts, &STORES, &format!("{cut} of {len}"));
    }
}

#[test]
fn f40_neighbours_threads_padding_and_placement_change_no_bit() {
    let all = Batch::new(SHAPE, true, &rows());
    on_every_isa(|isa| {
        let together = all.run::<bf16, bf16>(Store::Pages);
        let mut at = 0;
        for row in rows() {
            let mut alone = Batch { placement: 99, workers: 1, ..Batch::new(SHAPE, true, &[row]) };
            alone.pad_to = Some(row.q + 5);
            let got = alone.run::<bf16, bf16>(Store::Pages);
            let (h, dv) = (SHAPE.h, SHAPE.dv);
            assert_eq!(
                got.o[..row.q * h * dv],
                together.o[at * h * dv..(at + row.q) * h * dv],
                "{row:?} {isa}"
            );
            assert_eq!(got.lse[..row.q * h], together.lse[at * h..(at + row.q) * h], "{row:?} {isa}");
            assert!(got.o[row.q * h * dv..].iter().all(|o| o.to_f32() == 0.0));
            assert!(got.lse[row.q * h..].iter().all(|&lse| lse == f32::NEG_INFINITY));
            at += row.q;
        }
    });
}

#[test]
fn f03_slots_that_no_row_owns_may_hold_anything() {
    let clean = Batch { junk: 0.0, ..Batch::new(SHAPE, true, &rows()) };
    for junk in [f32::NAN, f32::INFINITY, -1e30] {
        let dirty = Batch { junk, ..clean.clone() };
        everywhere::<f32, f32>(&clean, &dirty, &STORES, &format!("{junk}"));
        everywhere::<bf16, bf16>(&clean, &dirty, &STORES, &format!("{junk}"));
    }
}
