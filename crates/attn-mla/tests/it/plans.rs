//! Plans: reuse, capacity, cache keys, strided views, last hidden states.

use mstar_attn_mla::{
    Capacity, Error, Inputs, Outputs, PlanCacheKey, PlanOptions, Planned, Stream, TensorMut, TensorRef,
    Workspace, run, select_last_hidden,
};

use crate::harness::{Batch, Shape, causal, row, same_bits};

const SHAPE: Shape = Shape { h: 4, c: 32, e: 8, s: 16 };

fn batch(rows: &[(usize, usize)]) -> Batch<f32> {
    let rows: Vec<_> = rows.iter().map(|&(q, kv)| row(q, kv)).collect();
    Batch::of(SHAPE, causal(SHAPE), &rows)
}

#[test]
fn an_unchanged_batch_is_not_planned_again_and_a_changed_one_is() {
    let a = batch(&[(1, 40), (1, 700)]);
    let options = PlanOptions::default();
    let mut plan = a.plan(&options);
    let mut replan = |b: &Batch<f32>, options: &PlanOptions| {
        plan.replan(&b.geometry(), &b.variant, &b.table(), options).unwrap()
    };
    assert_eq!(replan(&a, &options), Planned::Unchanged);
    type Change = Box<dyn Fn(&mut Batch<f32>)>;
    let changes: Vec<Change> = vec![
        Box::new(|b| b.kv_last_page_len[1] -= 1),
        Box::new(|b| b.kv_indices.swap(0, 1)),
        Box::new(|b| b.variant.sm_scale *= 2.0),
        Box::new(|b| b.variant.causal = false),
        Box::new(|b| b.kv_offset[0] = 16),
        Box::new(|b| b.page_start[0] = 1),
        Box::new(|b| b.qo_indptr = vec![0, 0, 1]),
        Box::new(|b| (b.shape.c, b.shape.e) = (30, 10)),
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
fn f16_a_plan_made_again_leaves_nothing_of_the_one_before() {
    let (large, small) = (batch(&[(1, 3000), (70, 500), (1, 900)]), batch(&[(1, 17), (3, 3)]));
    let capacity = Capacity { rows: 8, tokens: 80, pages: 400 };
    for capacity in [None, Some(capacity)] {
        let options = PlanOptions { capacity, ..PlanOptions::default() };
        let mut plan = large.plan(&options);
        let mut workspace = Workspace::for_plan(&plan).unwrap();
        let first = large.run_plan(&plan, &mut workspace);
        for filling in [0x00, 0xff] {
            workspace.view().unwrap().as_mut_slice::<u8>().unwrap().fill(filling);
            plan.replan(&small.geometry(), &small.variant, &small.table(), &options).unwrap();
            same_bits(&small.run(), &small.run_plan(&plan, &mut workspace), "small after large");
            plan.replan(&large.geometry(), &large.variant, &large.table(), &options).unwrap();
            same_bits(&first, &large.run_plan(&plan, &mut workspace), "large again");
        }
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
    assert!(plan.replan(&bad.geometry(), &bad.variant, &bad.table(), &options).is_err());
    for (rows, what) in [(vec![(1, 1); 3], "rows"), (vec![(4, 4)], "tokens"), (vec![(1, 100)], "pages")] {
        let large = batch(&rows);
        let said = plan.replan(&large.geometry(), &large.variant, &large.table(), &options);
        assert!(matches!(said, Err(Error::Capacity { what: named, .. }) if named == what), "{said:?}");
    }
    let (geometry, table) = (good.geometry(), good.table());
    let key = PlanCacheKey { geometry: &geometry, variant: &good.variant, table: &table, options: &options };
    assert!(plan.is_current(&key));
    same_bits(&before, &good.run_plan(&plan, &mut workspace), "after refusals");
}

#[test]
fn queries_latents_and_outputs_may_be_views_of_wider_buffers() {
    let b = batch(&[(1, 90), (20, 33), (2, 600)]);
    let want = b.run();
    let Shape { h, c, e, s } = SHAPE;
    let (p, t, width) = (b.num_pages, b.tokens(), c + e);
    let plan = b.plan(&PlanOptions::default());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    // One row `[nope | pe]` a head; latents in rows of 16 lanes more; outputs every second row.
    let mut fused = vec![f32::NAN; t * h * width];
    for at in 0..t * h {
        fused[at * width..][..c].copy_from_slice(&b.q_nope[at * c..][..c]);
        fused[at * width + c..][..e].copy_from_slice(&b.q_pe[at * e..][..e]);
    }
    let mut pool = vec![f32::NAN; p * s * (width + 16)];
    for at in 0..p * s {
        pool[at * (width + 16)..][..width].copy_from_slice(&b.latent[at * width..][..width]);
    }
    let mut wide = vec![7f32; t * h * 2 * c];
    let fused_view = |from| {
        TensorRef::from_slice_strided(
            &fused[from..],
            &[t, h, if from == 0 { c } else { e }],
            &[h * width, width, 1],
        )
    };
    let inputs = Inputs {
        q_nope: fused_view(0).unwrap(),
        q_pe: fused_view(c).unwrap(),
        latent: TensorRef::from_slice_strided(&pool, &[p, s, width], &[s * (width + 16), width + 16, 1])
            .unwrap(),
    };
    let o = TensorMut::from_slice_strided(&mut wide, &[t, h, c], &[h * 2 * c, 2 * c, 1]).unwrap();
    run(&plan, &Stream::cpu(), &mut workspace, inputs, Outputs { o, lse: None }).unwrap();
    for (at, chunk) in wide.chunks(2 * c).enumerate() {
        assert_eq!(chunk[..c], want.o[at * c..(at + 1) * c]);
        assert!(chunk[c..].iter().all(|&x| x == 7.0));
    }
}

#[test]
fn tensors_that_were_not_planned_are_refused_by_name() {
    let b = batch(&[(3, 20)]);
    let plan = b.plan(&PlanOptions::default());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let mut o = vec![7f32; 3 * 4 * 32];
    let mut attempt = |nope: &[usize], pe: &[usize], latent: &[usize], strides: &[usize]| {
        let inputs = Inputs {
            q_nope: TensorRef::from_slice(&b.q_nope, nope).unwrap(),
            q_pe: TensorRef::from_slice(&b.q_pe, pe).unwrap(),
            latent: TensorRef::from_slice(&b.latent, latent).unwrap(),
        };
        let o = TensorMut::from_slice_strided(&mut o, &[3, 4, 32], strides).unwrap();
        run(&plan, &Stream::cpu(), &mut workspace, inputs, Outputs { o, lse: None })
            .map_err(|e| e.to_string())
    };
    let (p, plain) = (b.num_pages, &[128, 32, 1][..]);
    assert_eq!(attempt(&[3, 4, 32], &[3, 4, 8], &[p, 16, 40], plain), Ok(()));
    assert!(attempt(&[2, 4, 32], &[3, 4, 8], &[p, 16, 40], plain).unwrap_err().starts_with("q_nope"));
    assert!(attempt(&[3, 4, 32], &[3, 8, 4], &[p, 16, 40], plain).unwrap_err().starts_with("q_pe"));
    assert!(attempt(&[3, 4, 32], &[3, 4, 8], &[p, 20, 32], plain).unwrap_err().starts_with("latent"));
    assert!(attempt(&[3, 4, 32], &[3, 4, 8], &[1, 16, 40], plain).unwrap_err().contains("P at least"));
    let overlapping = attempt(&[3, 4, 32], &[3, 4, 8], &[p, 16, 40], &[128, 16, 1]).unwrap_err();
    assert!(overlapping.contains("overlap"), "{overlapping}");
}

#[test]
fn the_last_hidden_state_of_each_row_is_picked() {
    let plan = batch(&[(3, 3), (0, 5), (1, 9), (2, 2)]).plan(&PlanOptions::default());
    let hidden: Vec<f32> = (0..6 * 5).map(|i| (i / 5) as f32).collect();
    let mut out = vec![7f32; 4 * 5];
    let view = TensorRef::from_slice(&hidden, &[6, 5]).unwrap();
    let to = TensorMut::from_slice(&mut out, &[4, 5]).unwrap();
    select_last_hidden(&plan, &Stream::cpu(), view, to).unwrap();
    assert_eq!(out.chunks(5).map(|row| row[4]).collect::<Vec<_>>(), [2.0, 0.0, 3.0, 5.0]);
    let to = TensorMut::from_slice(&mut out[..15], &[3, 5]).unwrap();
    assert!(select_last_hidden(&plan, &Stream::cpu(), view, to).is_err());
}
