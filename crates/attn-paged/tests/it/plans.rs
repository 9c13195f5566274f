//! Plans: reuse, capacity, cache keys, mixed types, strided caches, last hidden states.

use half::bf16;
use mstar_attn_paged::{
    Capacity, DType, Error, Inputs, Outputs, Plan, PlanCacheKey, PlanOptions, Planned, Stream, TensorMut,
    TensorRef, Variant, Workspace, run, select_last_hidden,
};

use crate::harness::{Batch, Shape, row, same_bits};

const SHAPE: Shape = Shape { h: 4, g: 2, d: 32, dv: 32, s: 16 };

fn batch(rows: &[(usize, usize)]) -> Batch<f32> {
    let rows: Vec<_> = rows.iter().map(|&(q, kv)| row(q, kv)).collect();
    Batch::of(SHAPE, Variant::causal(32), &rows)
}

#[test]
fn an_unchanged_batch_is_not_planned_again_and_a_changed_one_is() {
    let a = batch(&[(1, 40), (1, 700)]);
    let options = PlanOptions::default();
    let mut plan = a.plan(&options);
    let mut replan = |b: &Batch<f32>, options: &PlanOptions| {
        b.with_table(|table| plan.replan(&b.geometry(), &b.variant, table, options)).unwrap()
    };
    assert_eq!(replan(&a, &options), Planned::Unchanged);
    type Change = Box<dyn Fn(&mut Batch<f32>)>;
    let changes: Vec<Change> = vec![
        Box::new(|b| b.kv_last_page_len[1] -= 1),
        Box::new(|b| b.kv_indices.swap(0, 1)),
        Box::new(|b| b.variant.sm_scale *= 2.0),
        Box::new(|b| b.variant.causal = false),
        Box::new(|b| b.variant.window_left = Some(3)),
        Box::new(|b| b.kv_offset[0] = 16),
        Box::new(|b| b.page_start[0] = 1),
        Box::new(|b| b.qo_indptr = vec![0, 0, 1]),
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut changed = a.clone();
        change(&mut changed);
        assert_eq!(replan(&changed, &options), Planned::Changed, "change {index}");
        assert_eq!(replan(&changed, &options), Planned::Unchanged, "change {index}");
        assert_eq!(replan(&a, &options), Planned::Changed, "change {index} back");
    }
    assert_eq!(replan(&a, &PlanOptions { cascade: false, ..options }), Planned::Changed);
}

#[test]
fn a_plan_made_again_is_the_plan_made_anew_and_f16_leaves_nothing_behind() {
    let (large, small) = (batch(&[(1, 3000), (40, 500), (1, 900)]), batch(&[(1, 17), (3, 3)]));
    let options = PlanOptions::default();
    let mut plan = large.plan(&options);
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let first = large.run_plan(&plan, &mut workspace);
    for _ in 0..3 {
        small.with_table(|t| plan.replan(&small.geometry(), &small.variant, t, &options)).unwrap();
        same_bits(&small.run(), &small.run_plan(&plan, &mut workspace), "small after large");
        large.with_table(|t| plan.replan(&large.geometry(), &large.variant, t, &options)).unwrap();
        same_bits(&first, &large.run_plan(&plan, &mut workspace), "large again");
    }
}

#[test]
fn a_refused_batch_leaves_the_plan_as_it_was() {
    let good = batch(&[(1, 40), (2, 30)]);
    let capacity = Capacity { rows: 2, tokens: 3, pages: 6 };
    let options = PlanOptions { capacity: Some(capacity), ..PlanOptions::default() };
    let mut plan = good.plan(&options);
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let before = good.run_plan(&plan, &mut workspace);
    let mut bad = good.clone();
    bad.kv_indices[0] = 1000;
    assert!(bad.with_table(|t| plan.replan(&bad.geometry(), &bad.variant, t, &options)).is_err());
    for (rows, what) in [(vec![(1, 1); 3], "rows"), (vec![(4, 4)], "tokens"), (vec![(1, 100)], "pages")] {
        let large = batch(&rows);
        let said = large.with_table(|t| plan.replan(&large.geometry(), &large.variant, t, &options));
        assert!(matches!(said, Err(Error::Capacity { what: named, .. }) if named == what), "{said:?}");
    }
    let key = |plan: &Plan| {
        let (geometry, variant) = (good.geometry(), good.variant);
        good.with_table(|table| {
            let key = PlanCacheKey { geometry: &geometry, variant: &variant, table, options: &options };
            plan.is_current(&key)
        })
    };
    assert!(key(&plan));
    same_bits(&before, &good.run_plan(&plan, &mut workspace), "after refusals");
}

#[test]
fn a_combined_and_a_head_major_pool_are_views() {
    let b = batch(&[(1, 90), (20, 33), (2, 600)]);
    let want = b.run();
    let Shape { h, g, d, s, .. } = SHAPE;
    let (p, t) = (b.num_pages, b.tokens());
    let plan = b.plan(&PlanOptions::default());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let mut attempt = |k: TensorRef<'_>, v: TensorRef<'_>| {
        // Queries from a fused projection, outputs into a wider buffer.
        let mut fused = vec![f32::NAN; t * (h + 3) * d];
        let mut wide = vec![7f32; t * h * 2 * d];
        for token in 0..t {
            fused[token * (h + 3) * d..][..h * d].copy_from_slice(&b.q[token * h * d..][..h * d]);
        }
        let inputs = Inputs {
            q: TensorRef::from_slice_strided(&fused, &[t, h, d], &[(h + 3) * d, d, 1]).unwrap(),
            k,
            v,
            sinks: None,
            alibi_slopes: None,
        };
        let o = TensorMut::from_slice_strided(&mut wide, &[t, h, d], &[h * 2 * d, 2 * d, 1]).unwrap();
        run(&plan, &Stream::cpu(), &mut workspace, inputs, Outputs { o, lse: None }).unwrap();
        for (at, chunk) in wide.chunks(2 * d).enumerate() {
            assert_eq!(chunk[..d], want.o[at * d..(at + 1) * d]);
            assert!(chunk[d..].iter().all(|&x| x == 7.0));
        }
    };
    let page = s * g * d;
    let mut combined = vec![f32::NAN; 2 * p * page];
    let mut head_major = vec![f32::NAN; 2 * p * page];
    for index in 0..p {
        for (which, pool) in [&b.k, &b.v].into_iter().enumerate() {
            let from = &pool[index * page..(index + 1) * page];
            combined[(2 * index + which) * page..][..page].copy_from_slice(from);
            for slot in 0..s {
                for head in 0..g {
                    let to = ((which * p + index) * g + head) * s + slot;
                    head_major[to * d..(to + 1) * d].copy_from_slice(&from[(slot * g + head) * d..][..d]);
                }
            }
        }
    }
    let view = TensorRef::from_slice(&combined, &[p, 2, s, g, d]).unwrap();
    attempt(view.select(1, 0).unwrap(), view.select(1, 1).unwrap());
    let view = TensorRef::from_slice(&head_major, &[2, p, g, s, d]).unwrap();
    attempt(view.select(0, 0).unwrap().transpose(1, 2), view.select(0, 1).unwrap().transpose(1, 2));
}

#[test]
fn overlapping_outputs_are_refused() {
    let b = batch(&[(3, 20)]);
    let plan = b.plan(&PlanOptions::default());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let mut o = vec![7f32; 3 * 4 * 32];
    let inputs = Inputs {
        q: TensorRef::from_slice(&b.q, &[3, 4, 32]).unwrap(),
        k: TensorRef::from_slice(&b.k, &[b.num_pages, 16, 2, 32]).unwrap(),
        v: TensorRef::from_slice(&b.v, &[b.num_pages, 16, 2, 32]).unwrap(),
        sinks: None,
        alibi_slopes: None,
    };
    let o = TensorMut::from_slice_strided(&mut o, &[3, 4, 32], &[128, 16, 1]).unwrap();
    let said = run(&plan, &Stream::cpu(), &mut workspace, inputs, Outputs { o, lse: None }).unwrap_err();
    assert!(said.to_string().contains("overlap"), "{said}");
}

#[test]
fn keys_and_queries_may_have_different_types() {
    let b = Batch::<bf16>::of(SHAPE, Variant::causal(32), &[row(1, 90), row(20, 33)]);
    let want = b.reference();
    let geometry = mstar_attn_paged::Geometry { q_dtype: DType::F32, ..b.geometry() };
    let plan = b.with_table(|t| Plan::new(&geometry, &b.variant, t, &PlanOptions::default())).unwrap();
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let q: Vec<f32> = b.q.iter().map(|x| x.to_f32()).collect();
    let mut o = vec![0f32; 21 * 4 * 32];
    let inputs = Inputs {
        q: TensorRef::from_slice(&q, &[21, 4, 32]).unwrap(),
        k: TensorRef::from_slice(&b.k, &[b.num_pages, 16, 2, 32]).unwrap(),
        v: TensorRef::from_slice(&b.v, &[b.num_pages, 16, 2, 32]).unwrap(),
        sinks: None,
        alibi_slopes: None,
    };
    let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[21, 4, 32]).unwrap(), lse: None };
    run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs).unwrap();
    let error = crate::harness::relative_error(o.iter().map(|&x| x.into()), &want.o, "o");
    assert!(error < 1e-6, "{error:e}");
}

#[test]
fn the_last_hidden_state_of_each_row_is_picked() {
    let b = batch(&[(3, 3), (0, 5), (1, 9), (2, 2)]);
    let plan = b.plan(&PlanOptions::default());
    let hidden: Vec<f32> = (0..6 * 5).map(|i| (i / 5) as f32).collect();
    let mut out = vec![7f32; 4 * 5];
    let view = TensorRef::from_slice(&hidden, &[6, 5]).unwrap();
    let to = TensorMut::from_slice(&mut out, &[4, 5]).unwrap();
    select_last_hidden(&plan, &Stream::cpu(), view, to).unwrap();
    let rows: Vec<f32> = out.chunks(5).map(|row| row[4]).collect();
    assert_eq!(rows, [2.0, 0.0, 3.0, 5.0]);
    let to = TensorMut::from_slice(&mut out[..15], &[3, 5]).unwrap();
    assert!(select_last_hidden(&plan, &Stream::cpu(), view, to).is_err());
}

#[test]
fn any_number_of_workers_and_any_capacity_is_bounded_or_refused() {
    let batch = batch(&[(1, 40), (40, 90)]);
    let plan = batch.plan(&PlanOptions::default());
    let want = batch.run_plan(&plan, &mut Workspace::for_plan(&plan).unwrap());
    for workers in [1, 7, 1000, 1 << 20, 1 << 58, 1 << 61, usize::MAX] {
        let plan = batch.plan(&PlanOptions { workers, ..PlanOptions::default() });
        assert!(plan.workspace_bytes() > 1 << 12, "{workers}: {}", plan.workspace_bytes());
        let mut workspace = Workspace::for_plan(&plan).unwrap();
        same_bits(&want, &batch.run_plan(&plan, &mut workspace), "workers");
    }
    for capacity in [usize::MAX, i32::MAX as usize] {
        let capacity = Some(Capacity { rows: capacity, tokens: 200, pages: 200 });
        let options = PlanOptions { capacity, ..PlanOptions::default() };
        let made = batch.with_table(|table| Plan::new(&batch.geometry(), &batch.variant, table, &options));
        assert!(made.unwrap_err().to_string().contains("capacity"));
    }
}
