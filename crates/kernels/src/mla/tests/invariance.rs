//! What may not change a bit: threads, neighbours, page placement and size, padding, retention, cascades.

use half::bf16;

use super::batch::{Number, Result};
use super::{Batch, RowSpec, Shape, on_every_isa, row, same_bits};
use crate::cpu::Isa;
use crate::mla::Variant;
use crate::paged::ScheduleOptions;

const SHAPE: Shape = Shape { h: 6, c: 64, e: 16, s: 16 };
const CAUSAL: Variant = Variant { sm_scale: 0.11, causal: true };

fn in_pool<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    let isa = Isa::current();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let _forced = Isa::force(isa).unwrap();
        work()
    })
}

/// Rows of both families, with lengths about every tile and leaf edge.
fn mixed() -> Vec<RowSpec> {
    let lengths = [
        (1, 511),
        (1, 512),
        (1, 513),
        (2, 1500),
        (1, 127),
        (1, 128),
        (20, 129),
        (4, 3000),
        (50, 200),
        (30, 4097),
    ];
    lengths.into_iter().map(|(q, kv)| row(q, kv)).collect()
}

fn threads<T: Number>() {
    let batch = Batch::<T, T>::of(SHAPE, CAUSAL, &mixed());
    let one = in_pool(1, || batch.run());
    for threads in [2, 3] {
        for workers in [0, 1, 2, 5, 64] {
            let options = ScheduleOptions { workers, ..ScheduleOptions::default() };
            let many = in_pool(threads, || batch.run_with(&options));
            same_bits(&one, &many, &format!("{threads} threads, {workers} workers"));
        }
    }
}

#[test]
fn f11_threads_and_workers_change_no_bit() {
    on_every_isa(|_| {
        threads::<bf16>();
        threads::<f32>();
    });
}

#[test]
fn f40_a_row_alone_is_the_row_in_a_batch_with_its_pages_renumbered() {
    fn alone<T: Number>() {
        let whole = Batch::<T, T>::of(SHAPE, CAUSAL, &mixed()).run();
        let mut from = 0;
        for (id, spec) in mixed().into_iter().enumerate() {
            let upto = from + spec.q_len;
            let single = Batch::<T, T>::make(SHAPE, CAUSAL, &[(id as u64, spec)], 99).run();
            same_bits(&single, &whole.tokens(&SHAPE, from, upto), &format!("row {id}"));
            from = upto;
        }
    }
    on_every_isa(|_| {
        alone::<bf16>();
        alone::<f32>();
    });
}

#[test]
fn page_size_and_placement_change_no_bit() {
    let rows: Vec<_> = mixed().into_iter().enumerate().map(|(id, spec)| (id as u64, spec)).collect();
    let run = |s, placement| Batch::<bf16, bf16>::make(Shape { s, ..SHAPE }, CAUSAL, &rows, placement).run();
    let first = run(16, 1);
    for (s, placement) in [(16, 2), (1, 3), (5, 4), (64, 5), (1000, 6)] {
        same_bits(&first, &run(s, placement), &format!("pages of {s}, placement {placement}"));
    }
}

#[test]
fn padding_changes_no_bit() {
    let batch = Batch::<bf16, bf16>::of(SHAPE, CAUSAL, &mixed());
    let plain = batch.run();
    for extra in [0, 1, 3, 200] {
        let pad_to = Some(batch.tokens() + extra);
        let padded = batch.run_with(&ScheduleOptions { pad_to, workers: 2, ..ScheduleOptions::default() });
        same_bits(&plain, &padded, &format!("{extra} padded tokens"));
    }
}

#[test]
fn a_cascade_changes_no_bit() {
    let shared = |q_len, kv_len, pages| RowSpec { shares: Some((0, pages)), ..row(q_len, kv_len) };
    let rows = [
        row(1, 2000),
        shared(1, 1500, 64),
        shared(2, 1800, 100),
        shared(1, 1100, 64),
        shared(1, 700, 33),
        row(1, 600),
    ];
    let run = |h: usize, cascade| -> Result<bf16> {
        let batch = Batch::<bf16, bf16>::of(Shape { h, ..SHAPE }, CAUSAL, &rows);
        batch.run_with(&ScheduleOptions { cascade, workers: 2, ..ScheduleOptions::default() })
    };
    on_every_isa(|_| {
        for h in [1, 6, 16, 70] {
            same_bits(&run(h, false), &run(h, true), &format!("{h} heads"));
        }
    });
}

#[test]
fn pages_given_back_that_nobody_sees_again_leave_the_tree_in_place() {
    // A stream that gave back its first pages has the bits of one whose first keys weigh nothing.
    let spec = RowSpec { dropped_pages: 40, start: 5, ..row(1, 900) };
    let batch = |spec: RowSpec| Batch::<f32, f32>::make(SHAPE, CAUSAL, &[(7, spec)], 1);
    let kept = batch(spec.clone()).run();
    let mut whole = batch(row(1, 40 * 16 + 900));
    // Their scores are -inf: a key of -infinity under a query that is positive there.
    whole.q_nope.iter_mut().step_by(SHAPE.c).for_each(|x| *x = 1.0);
    let mut dropped = batch(spec);
    dropped.q_nope.iter_mut().step_by(SHAPE.c).for_each(|x| *x = 1.0);
    for at in 0..40 * 16 + 5 {
        let token = whole.kv_indices[at / 16] as usize * 16 + at % 16;
        whole.latent[token * 80] = -1e30;
        whole.latent[token * 80 + 1..(token + 1) * 80].fill(0.0);
    }
    let (a, b) = (whole.run(), dropped.run());
    same_bits(&a, &b, "retention");
    assert_ne!(kept, b);
}
