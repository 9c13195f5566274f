//! What may not change a bit: threads, neighbours, page placement, padding, retention, windows, cascades.

use half::bf16;
use mstar_attn_paged::{Capacity, PlanOptions, Schedule, Variant, Workspace};
use mstar_kernels::cpu::Isa;
use proptest::prelude::*;

use crate::harness::{Batch, Number, RowSpec, Shape, agree, row, same_bits};

const SHAPE: Shape = Shape { h: 8, g: 2, d: 32, dv: 32, s: 16 };

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
        (1, 63),
        (1, 64),
        (20, 65),
        (4, 5000),
        (150, 200),
        (30, 4097),
    ];
    lengths.into_iter().map(|(q, kv)| row(q, kv)).collect()
}

fn threads<T: Number>() {
    let batch = Batch::<T>::of(SHAPE, Variant::causal(32), &mixed());
    let one = in_pool(1, || batch.run());
    for threads in [2, 3, 8] {
        for workers in [0, 1, 2, 5, 64] {
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

/// Row `victim` alone has the bits it has in the batch.
fn alone<T: Number>(variant: Variant, rows: &[RowSpec]) {
    let whole = Batch::<T>::of(SHAPE, variant, rows).run();
    let mut from = 0;
    for (id, spec) in rows.iter().enumerate() {
        let upto = from + spec.q_len;
        if spec.shares.is_none() {
            let single = Batch::<T>::make(SHAPE, variant, &[(id as u64, spec.clone())], 1, 99).run();
            same_bits(&single, &whole.tokens(&SHAPE, from, upto), &format!("row {id} {spec:?} {variant:?}"));
        }
        from = upto;
    }
}

#[test]
fn f40_a_row_alone_is_the_row_in_a_batch_of_seven_with_its_pages_renumbered() {
    let rows: Vec<RowSpec> = mixed().into_iter().take(7).collect();
    for variant in [
        Variant::causal(32),
        Variant { sinks: true, logits_soft_cap: Some(4.0), ..Variant::causal(32) },
        Variant { window_left: Some(700), alibi: true, ..Variant::causal(32) },
    ] {
        alone::<f32>(variant, &rows);
        alone::<bf16>(variant, &rows);
    }
}

#[test]
fn f40_the_victim_of_the_report_keeps_its_bits_beside_any_neighbour() {
    let shape = Shape { h: 14, g: 2, d: 64, dv: 64, s: 16 };
    let victim = (1000u64, row(1, 19_802));
    let with = |before: &[RowSpec], after: &[RowSpec], placement| {
        let number = |rows: &[RowSpec], base: u64| -> Vec<(u64, RowSpec)> {
            rows.iter().enumerate().map(|(i, spec)| (base + i as u64, spec.clone())).collect()
        };
        let mut rows = number(before, 0);
        rows.push(victim.clone());
        rows.extend(number(after, 500));
        let at: usize = before.iter().map(|spec| spec.q_len).sum();
        Batch::<bf16>::make(shape, Variant::causal(64), &rows, 3, placement).run().tokens(&shape, at, at + 1)
    };
    let alone = with(&[], &[], 1);
    let prefill = |q| [row(q, q)];
    let decodes = |n| vec![row(1, 40); n];
    same_bits(&alone, &with(&[], &prefill(9), 1), "9 prefill tokens after");
    same_bits(&alone, &with(&prefill(10), &[], 2), "10 prefill tokens before");
    for n in [1, 7, 63] {
        same_bits(&alone, &with(&decodes(n), &[], 3), "last");
        same_bits(&alone, &with(&decodes(n / 2), &decodes(n - n / 2), 4), "in the middle");
        same_bits(&alone, &with(&[], &decodes(n), 5), "first");
    }
}

#[test]
fn shuffled_pages_change_no_bit() {
    let rows: Vec<_> = mixed().into_iter().enumerate().map(|(id, spec)| (id as u64, spec)).collect();
    let first = Batch::<f32>::make(SHAPE, Variant::causal(32), &rows, 1, 1).run();
    for placement in 2..5 {
        let other = Batch::<f32>::make(SHAPE, Variant::causal(32), &rows, 1, placement).run();
        same_bits(&first, &other, &format!("placement {placement}"));
    }
}

#[test]
fn padding_changes_no_bit() {
    let batch = Batch::<bf16>::of(SHAPE, Variant::causal(32), &mixed());
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
    let batch = Batch::<bf16>::of(SHAPE, Variant::causal(32), &rows);
    let options =
        PlanOptions { schedule: Schedule::Throughput, workers: 2, cascade: false, ..PlanOptions::default() };
    let got = batch.run_with(&options);
    agree(&got, &batch.reference(), "throughput");
    assert!(got != batch.run(), "longer leaves have other bits");
    let other = Batch::<bf16>::of(SHAPE, Variant::causal(32), &mixed());
    let mut plan = other.plan(&options);
    let planned = batch.with_table(|table| plan.replan(&batch.geometry(), &batch.variant, table, &options));
    assert!(planned.is_ok());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    same_bits(&got, &batch.run_plan(&plan, &mut workspace), "after another batch");
}

#[test]
fn retention_changes_no_bit_beyond_the_window() {
    // The window hides what was given back, so the row must not notice that it is gone.
    let variant = Variant { window_left: Some(600), ..Variant::causal(32) };
    let whole = [(7, row(1, 3000)), (8, row(30, 2000)), (9, row(2, 1200))];
    let dropped = |spec: &RowSpec, pages: usize| RowSpec {
        kv_len: spec.kv_len - 16 * pages,
        dropped_pages: pages,
        start: 3,
        ..spec.clone()
    };
    let kept = [(7, dropped(&whole[0].1, 149)), (8, dropped(&whole[1].1, 84)), (9, dropped(&whole[2].1, 36))];
    for causal in [true, false] {
        let variant = Variant { causal, ..variant };
        let a = Batch::<f32>::make(SHAPE, variant, &whole, 1, 1).run();
        let b = Batch::<f32>::make(SHAPE, variant, &kept, 1, 2).run();
        same_bits(&a, &b, "f32");
        let a = Batch::<bf16>::make(SHAPE, variant, &whole, 1, 1).run();
        let b = Batch::<bf16>::make(SHAPE, variant, &kept, 1, 2).run();
        same_bits(&a, &b, "bf16");
    }
}

#[test]
fn a_window_wider_than_the_row_changes_no_bit() {
    for rows in [vec![row(1, 900)], vec![row(40, 300)], vec![row(3, 5000)]] {
        let none = Batch::<f32>::of(SHAPE, Variant::causal(32), &rows).run();
        for left in [5000, 1_000_000, usize::MAX] {
            let variant = Variant { window_left: Some(left), ..Variant::causal(32) };
            same_bits(&none, &Batch::<f32>::of(SHAPE, variant, &rows).run(), "wide window");
        }
    }
}

/// A tree of rows: all share 100 pages, some share 40 more, one is wholly inside.
fn prefix_tree() -> Vec<RowSpec> {
    let from = |other, pages, q_len, kv_len| RowSpec { shares: Some((other, pages)), ..row(q_len, kv_len) };
    vec![
        row(1, 2600),
        from(0, 100, 1, 1700),
        from(0, 100, 2, 1601),
        from(0, 140, 1, 2241),
        from(0, 140, 1, 2900),
        row(1, 700),
        from(0, 100, 30, 1800),
        from(3, 140, 3, 4000),
        from(0, 33, 1, 530),
        from(0, 100, 1, 1600),
    ]
}

fn cascade<T: Number>(variant: Variant, rows: &[RowSpec], expect_shared: bool) {
    let batch = Batch::<T>::of(SHAPE, variant, rows);
    let flat = PlanOptions { cascade: false, ..PlanOptions::default() };
    assert_eq!(batch.plan(&flat).shared_items(), 0);
    let without = batch.run_with(&flat);
    for workers in [1, 2, 16] {
        let options = PlanOptions { workers, ..PlanOptions::default() };
        let shared = batch.plan(&options).shared_items();
        assert_eq!(shared > 0, expect_shared, "{shared} shared items");
        same_bits(
            &without,
            &batch.run_with(&options),
            &format!("cascade with {workers} workers, {variant:?}"),
        );
    }
}

#[test]
fn a_cascade_has_the_bits_of_the_flat_run() {
    let rows = prefix_tree();
    for variant in [
        Variant::causal(32),
        Variant::full(32),
        Variant { sinks: true, alibi: true, logits_soft_cap: Some(9.0), ..Variant::causal(32) },
    ] {
        cascade::<f32>(variant, &rows, true);
        cascade::<bf16>(variant, &rows, true);
    }
    cascade::<f32>(Variant { window_left: Some(900), ..Variant::causal(32) }, &rows, false);
    Batch::<f32>::of(SHAPE, Variant::causal(32), &rows).check();
}

#[test]
fn a_cascade_of_many_rows_reads_the_prefix_in_few_items() {
    let mut rows = vec![row(1, 2100)];
    rows.extend((0..40).map(|i| RowSpec { shares: Some((0, 128)), ..row(1, 2060 + 7 * i) }));
    cascade::<f32>(Variant::causal(32), &rows, true);
    let batch = Batch::<f32>::of(SHAPE, Variant::causal(32), &rows);
    let plan = batch.plan(&PlanOptions { workers: 1, ..PlanOptions::default() });
    let read = |shared: bool| -> u64 {
        let members = |item: &&mstar_kernels::work::Item| (item.member_count > 1) == shared;
        let leaves = |item: &mstar_kernels::work::Item| u64::from(item.leaf_end - item.leaf_begin);
        let heads = |item: &mstar_kernels::work::Item| u64::from(item.kv_head_count);
        plan.work().items().iter().filter(members).map(|item| leaves(item) * heads(item)).sum()
    };
    // Four shared leaves for 41 rows: in chunks of 16 rows, each read three times instead of 41.
    assert_eq!(read(true), 4 * 2 * 3);
    assert!(read(false) <= 41 * 2 * 2, "own leaves: {}", read(false));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_row_of_any_batch_is_itself_alone(
        lengths in proptest::collection::vec((1usize..40, 0usize..1400), 1..6),
        causal in any::<bool>(),
        window in proptest::option::of(0usize..900),
        isa in 0usize..8,
    ) {
        let _forced = Isa::force(Isa::supported()[isa % Isa::supported().len()]).unwrap();
        let rows: Vec<RowSpec> = lengths.iter().map(|&(q, kv)| row(if q > 20 { 1 } else { q }, kv)).collect();
        let variant = Variant { causal, window_left: window, ..Variant::causal(32) };
        alone::<f32>(variant, &rows);
        alone::<bf16>(variant, &rows);
    }
}
