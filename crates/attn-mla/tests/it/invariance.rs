//! What may not change a bit: threads, neighbours, page placement, padding, retention, cascades.

use half::bf16;
use mstar_attn_mla::{Capacity, PlanOptions, Schedule, Workspace};
use mstar_kernels::cpu::Isa;

use crate::harness::{Batch, Number, RowSpec, Shape, agree, causal, on_every_isa, row, same_bits};

const SHAPE: Shape = Shape { h: 8, c: 32, e: 8, s: 16 };

fn in_pool<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    let isa = Isa::current();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let _forced = Isa::force(isa).unwrap();
        work()
    })
}

/// Rows of both families, with lengths about every leaf edge.
fn mixed() -> Vec<RowSpec> {
    let lengths = [
        (1, 511),
        (1, 512),
        (1, 513),
        (2, 1500),
        (1, 63),
        (20, 65),
        (4, 3000),
        (60, 80),
        (30, 4097),
        (9, 600),
    ];
    lengths.into_iter().map(|(q, kv)| row(q, kv)).collect()
}

fn threads<T: Number>() {
    let batch = Batch::<T>::of(SHAPE, causal(SHAPE), &mixed());
    let one = in_pool(1, || batch.run());
    for threads in [2, 5] {
        for workers in [0, 1, 2, 7, 64] {
            let options = PlanOptions { workers, ..PlanOptions::default() };
            let many = in_pool(threads, || batch.run_with(&options));
            same_bits(&one, &many, &format!("{threads} threads, {workers} workers"));
        }
    }
}

#[test]
fn threads_and_workers_change_no_bit() {
    threads::<f32>();
    threads::<bf16>();
}

fn alone<T: Number>() {
    let rows = mixed();
    let whole = Batch::<T>::of(SHAPE, causal(SHAPE), &rows).run();
    let mut from = 0;
    for (id, spec) in rows.iter().enumerate() {
        let upto = from + spec.q_len;
        let single = Batch::<T>::make(SHAPE, causal(SHAPE), &[(id as u64, *spec)], 1, 99).run();
        same_bits(&single, &whole.tokens(&SHAPE, from, upto), &format!("row {id} {spec:?}"));
        from = upto;
    }
}

#[test]
fn f40_a_row_alone_with_its_pages_renumbered_is_the_row_in_a_batch() {
    on_every_isa(|| {
        alone::<f32>();
        alone::<bf16>();
    });
}

#[test]
fn f40_a_long_decode_row_keeps_its_bits_beside_any_neighbour() {
    let shape = Shape { h: 16, c: 64, e: 16, s: 16 };
    let with = |before: &[RowSpec], after: &[RowSpec], placement| {
        let number = |rows: &[RowSpec], base: u64| -> Vec<(u64, RowSpec)> {
            rows.iter().enumerate().map(|(i, spec)| (base + i as u64, *spec)).collect()
        };
        let mut rows = number(before, 0);
        rows.push((1000, row(1, 9_802)));
        rows.extend(number(after, 500));
        let at: usize = before.iter().map(|spec| spec.q_len).sum();
        Batch::<bf16>::make(shape, causal(shape), &rows, 3, placement).run().tokens(&shape, at, at + 1)
    };
    let alone = with(&[], &[], 1);
    same_bits(&alone, &with(&[], &[row(9, 9)], 1), "9 prefill tokens after");
    same_bits(&alone, &with(&[row(10, 10)], &[], 2), "10 prefill tokens before");
    for n in [1, 7, 63] {
        let decodes = vec![row(1, 40); n];
        same_bits(&alone, &with(&decodes, &[], 3), "last");
        same_bits(&alone, &with(&decodes[..n / 2], &decodes[n / 2..], 4), "in the middle");
    }
}

#[test]
fn padding_changes_no_bit() {
    let batch = Batch::<bf16>::of(SHAPE, causal(SHAPE), &mixed());
    let plain = batch.run();
    for extra in [0, 1, 3, 200] {
        let capacity = Capacity { rows: 64, tokens: batch.tokens() + extra, pages: 2000 };
        let padded = PlanOptions { capacity: Some(capacity), ..PlanOptions::default() };
        same_bits(&plain, &batch.run_with(&padded), &format!("{extra} padded tokens"));
    }
}

/// Whoever gives invariance up keeps the numbers, and has the same bits every time, whatever was planned before.
#[test]
fn a_throughput_schedule_is_right_and_the_same_every_time() {
    let rows = [mixed(), vec![row(1, 9000), row(1, 30_000), row(2, 20_000)]].concat();
    let batch = Batch::<bf16>::of(SHAPE, causal(SHAPE), &rows);
    let options =
        PlanOptions { schedule: Schedule::Throughput, workers: 2, cascade: false, ..PlanOptions::default() };
    let got = batch.run_with(&options);
    agree(&got, &batch.reference(), true, "throughput");
    assert!(got != batch.run(), "longer leaves have other bits");
    let other = Batch::<bf16>::of(SHAPE, causal(SHAPE), &mixed());
    let mut plan = other.plan(&options);
    assert!(plan.replan(&batch.geometry(), &batch.variant, &batch.table(), &options).is_ok());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    same_bits(&got, &batch.run_plan(&plan, &mut workspace), "after another batch");
}

#[test]
fn how_a_streams_first_pages_were_given_back_changes_no_bit() {
    // The same kept positions, as pages that are not listed and as one listed page of which no slot is kept.
    for (q_len, kept) in [(1, 700), (2, 33), (30, 4500), (1, 16)] {
        let unlisted = RowSpec { dropped_pages: 5, ..row(q_len, kept) };
        let listed = RowSpec { dropped_pages: 4, start: SHAPE.s, ..row(q_len, kept + SHAPE.s) };
        let run = |spec| Batch::<f32>::of(SHAPE, causal(SHAPE), &[spec]).run();
        same_bits(&run(unlisted), &run(listed), &format!("{q_len} queries over {kept}"));
    }
}

#[test]
fn a_cascade_changes_no_bit() {
    let shape = Shape { h: 4, ..SHAPE };
    let mut rows = vec![row(1, 1600)];
    for (q_len, kv_len) in [(1, 1300), (1, 1100), (3, 2000), (1, 1024)] {
        rows.push(RowSpec { shares: Some((0, 64)), ..row(q_len, kv_len) });
    }
    let batch = Batch::<f32>::of(shape, causal(shape), &rows);
    let apart = PlanOptions { cascade: false, ..PlanOptions::default() };
    let plan = batch.plan(&PlanOptions::default());
    assert!(plan.shared_items() > 0, "rows that share 1024 latents read them once");
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    same_bits(&batch.run_with(&apart), &batch.run_plan(&plan, &mut workspace), "cascade");
    batch.check();
}
