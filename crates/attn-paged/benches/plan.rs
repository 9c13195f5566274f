//! Planning: host time a step, before any layer runs.
//!
//! `cargo bench -p mstar-attn-paged --bench plan`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use mstar_attn_paged::{DType, Geometry, PageTable, Plan, PlanOptions, Variant};

fn benches(c: &mut Criterion) {
    let geometry = Geometry {
        num_qo_heads: 32,
        num_kv_heads: 8,
        head_dim_qk: 128,
        head_dim_vo: 128,
        page_size: 16,
        q_dtype: DType::Bf16,
        kv_dtype: DType::Bf16,
    };
    let mut group = c.benchmark_group("plan, page 16");
    for (rows, kv_len) in [(1usize, 65536usize), (64, 8192), (256, 1024)] {
        let per_row = kv_len / 16;
        let pages = rows * per_row;
        // Two batches in turn, so that a plan is never skipped: a decode step gives each row one more token.
        let tables: Vec<[Vec<i32>; 4]> = [15, 16]
            .into_iter()
            .map(|last| {
                [
                    (0..=rows as i32).collect(),
                    (0..=rows).map(|r| (r * per_row) as i32).collect(),
                    (0..pages).map(|i| (i * 7919 % pages) as i32).collect(),
                    vec![last; rows],
                ]
            })
            .collect();
        let views: Vec<PageTable<'_>> = tables
            .iter()
            .map(|[qo, kv, indices, last]| PageTable {
                qo_indptr: qo,
                kv_indptr: kv,
                kv_indices: indices,
                kv_last_page_len: last,
                num_pages: pages,
                ..PageTable::default()
            })
            .collect();
        let (variant, options) = (Variant::causal(128), PlanOptions::default());
        let mut plan = Plan::new(&geometry, &variant, &views[0], &options).unwrap();
        let mut turn = 0;
        group.bench_function(BenchmarkId::new("changed", format!("{rows} x {kv_len}")), |b| {
            b.iter(|| {
                turn ^= 1;
                plan.replan(&geometry, &variant, black_box(&views[turn]), &options).unwrap()
            });
        });
        group.bench_function(BenchmarkId::new("unchanged", format!("{rows} x {kv_len}")), |b| {
            b.iter(|| plan.replan(&geometry, &variant, black_box(&views[turn]), &options).unwrap());
        });
    }
    group.finish();
}

criterion_group!(plan_benches, benches);
criterion_main!(plan_benches);
