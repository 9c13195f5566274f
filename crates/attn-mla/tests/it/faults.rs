//! Faults that users of such software have met, one test each.

use half::bf16;
use mstar_attn_mla::{
    Capacity, DType, Error, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut,
    TensorRef, Variant, Workspace, run,
};
use mstar_kernels::paged::{Mask, MaskEntries};

use crate::harness::{Batch, Number, RowSpec, Shape, causal, on_every_isa, row, same_bits};

const PLAIN: Variant = Variant { sm_scale: 1.0, causal: true };

/// A batch of one head whose queries are 0 and whose latents are `v(position)` in every lane, so that every visible
/// latent weighs the same.
fn flat<T: Number>(c: usize, e: usize, s: usize, rows: &[RowSpec], v: fn(usize) -> f32) -> Batch<T> {
    let mut batch = Batch::<T>::of(Shape { h: 1, c, e, s }, PLAIN, rows);
    let width = c + e;
    for r in 0..rows.len() {
        let pages = &batch.kv_indices[batch.kv_indptr[r] as usize..batch.kv_indptr[r + 1] as usize];
        for at in 0..rows[r].kv_len {
            let token = pages[at / s] as usize * s + at % s;
            batch.latent[token * width..(token + 1) * width].fill(T::of(v(at)));
        }
    }
    batch.q_nope.fill(T::of(0.0));
    batch.q_pe.fill(T::of(0.0));
    batch
}

/// Lane 0 of each query, and its log-sum-exp.
fn heads<T: Number>(batch: &Batch<T>) -> Vec<(f64, f32)> {
    let got = batch.run();
    let c = batch.shape.c;
    got.lse.iter().enumerate().map(|(i, &lse)| (got.o[i * c].to_f64(), lse)).collect()
}

const EMPTY: (f64, f32) = (0.0, f32::NEG_INFINITY);

#[test]
fn f01_a_fully_masked_query_is_zero_and_minus_infinity() {
    on_every_isa(|| {
        let v = |j: usize| [1.0, 3.0][j];
        let got = heads(&flat::<f32>(4, 2, 2, &[row(5, 2)], v));
        assert_eq!(got, [EMPTY, EMPTY, EMPTY, (1.0, 0.0), (2.0, 2f32.ln())]);
        let got = heads(&flat::<bf16>(4, 0, 2, &[row(100, 2)], v));
        assert!(got[..98].iter().all(|&x| x == EMPTY));
        assert_eq!(got[99].0, 2.0);
    });
}

#[test]
fn f02_very_negative_scores_keep_their_weights() {
    fn case<T: Number>(scale: f32, keys: usize) {
        // A latent is [-512, 0 or -1 | value]: the value is its first lane, which must not enter the score of interest;
        // so the query's first lane is 0 and the huge product comes from the rotary lanes.
        let shape = Shape { h: 1, c: 1, e: 2, s: 4 };
        let mut batch = Batch::<T>::of(shape, Variant { sm_scale: scale, causal: false }, &[row(1, keys)]);
        let at = batch.kv_indices[0] as usize * 4 * 3;
        let latents = [1.0, -512.0, 0.0, 0.0, -512.0, -1.0];
        for (i, x) in latents.into_iter().take(3 * keys).enumerate() {
            batch.latent[at + i] = T::of(x);
        }
        batch.q_nope.fill(T::of(0.0));
        batch.q_pe.copy_from_slice(&[T::of(1024.0), T::of(1.0)]);
        let got = batch.run();
        let second = if keys == 1 { 0.0 } else { f64::from(-scale).exp() };
        let (want, lse) = (1.0 / (1.0 + second), -524_288.0 * f64::from(scale) + (1.0 + second).ln());
        assert!(
            (got.o[0].to_f64() - want).abs() <= 3e-3,
            "{keys} keys, scale {scale}: {:?} for {want}",
            got.o
        );
        assert!(
            (f64::from(got.lse[0]) - lse).abs() <= 0.04,
            "{keys} keys, scale {scale}: {} for {lse}",
            got.lse[0]
        );
    }
    on_every_isa(|| {
        for (scale, keys) in [(1.0, 2), (1.0, 1), (1.0 / 128f32.sqrt(), 2)] {
            case::<f32>(scale, keys);
            case::<bf16>(scale, keys);
        }
    });
}

#[test]
fn f03_what_lies_in_unowned_slots_never_shows() {
    fn case<T: Number>(q_len: usize) {
        for kv_len in [1, 15, 17] {
            // The harness fills every slot that no row owns with NaN.
            let shape = Shape { h: 4, c: 32, e: 8, s: 16 };
            let nan = Batch::<T>::of(shape, causal(shape), &[row(q_len, kv_len)]);
            let with = |filling: f32| {
                let mut batch = nan.clone();
                for x in batch.latent.iter_mut().filter(|x| x.to_f64().is_nan()) {
                    *x = T::of(filling);
                }
                batch.run()
            };
            let clean = with(0.0);
            assert!(clean.o.iter().all(|x| x.to_f64().is_finite()));
            same_bits(&clean, &nan.run(), "NaN");
            same_bits(&clean, &with(f32::INFINITY), "inf");
        }
    }
    on_every_isa(|| {
        for q_len in [1, 40] {
            case::<f32>(q_len);
            case::<bf16>(q_len);
        }
    });
}

#[test]
fn f05_zero_length_rows_leave_their_neighbours_alone() {
    let rows = [row(2, 3), row(0, 4), row(3, 0)];
    let shape = Shape { h: 2, c: 8, e: 2, s: 4 };
    let variant = Variant { causal: false, ..causal(shape) };
    let got = Batch::<f32>::of(shape, variant, &rows).run();
    same_bits(&Batch::<f32>::of(shape, variant, &rows[..1]).run(), &got.tokens(&shape, 0, 2), "row 0");
    let empty = got.tokens(&shape, 2, 5);
    assert!(empty.o.iter().all(|&x| x.to_bits() == 0) && empty.lse.iter().all(|&x| x == f32::NEG_INFINITY));
    assert!(Batch::<f32>::of(shape, variant, &[row(0, 4), row(0, 0)]).run().o.is_empty());
    assert!(Batch::<f32>::of(shape, variant, &[]).run().o.is_empty());
}

#[test]
fn f06_causality_is_aligned_to_the_last_key() {
    let v = |j: usize| j as f32;
    on_every_isa(|| {
        assert_eq!(heads(&flat::<f32>(4, 2, 2, &[row(2, 5)], v)), [(1.5, 4f32.ln()), (2.0, 5f32.ln())]);
        assert_eq!(heads(&flat::<f32>(4, 2, 2, &[row(1, 5)], v)), [(2.0, 5f32.ln())]);
        let square = heads(&flat::<f32>(4, 2, 2, &[row(3, 3)], v));
        assert_eq!(square.iter().map(|x| x.0).collect::<Vec<_>>(), [0.0, 0.5, 1.0]);
        for (i, (o, lse)) in heads(&flat::<f32>(4, 2, 2, &[row(90, 101)], v)).into_iter().enumerate() {
            assert!((o - (11 + i) as f64 / 2.0).abs() < 1e-4 && (lse - ((12 + i) as f32).ln()).abs() < 1e-5);
        }
    });
}

#[test]
fn f10_more_rows_than_a_grid_has_blocks() {
    let rows = 65_537usize;
    let geometry = Geometry {
        num_qo_heads: 1,
        kv_lora_rank: 8,
        qk_rope_head_dim: 0,
        page_size: 1,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let indptr: Vec<i32> = (0..=rows as i32).collect();
    let indices: Vec<i32> = (0..rows as i32).rev().collect();
    let table = PageTable {
        qo_indptr: &indptr,
        kv_indptr: &indptr,
        kv_indices: &indices,
        kv_last_page_len: &vec![1; rows],
        num_pages: rows,
        ..PageTable::default()
    };
    let plan = Plan::new(&geometry, &PLAIN, &table, &PlanOptions::default()).unwrap();
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let (q, mut o) = (vec![0f32; rows * 8], vec![7f32; rows * 8]);
    let latent: Vec<f32> = (0..rows * 8).map(|i| (i / 8) as f32).collect();
    let inputs = Inputs {
        q_nope: TensorRef::from_slice(&q, &[rows, 1, 8]).unwrap(),
        q_pe: TensorRef::from_slice(&q[..0], &[rows, 1, 0]).unwrap(),
        latent: TensorRef::from_slice(&latent, &[rows, 1, 8]).unwrap(),
    };
    let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[rows, 1, 8]).unwrap(), lse: None };
    run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs).unwrap();
    assert!(o.iter().enumerate().all(|(i, &x)| x == (rows - 1 - i / 8) as f32));
}

#[test]
fn f11_a_table_that_names_what_is_not_there_is_refused_by_row_and_value() {
    let geometry = Batch::<f32>::of(Shape { h: 1, c: 4, e: 2, s: 4 }, PLAIN, &[]).geometry();
    let good = PageTable {
        qo_indptr: &[0, 1],
        kv_indptr: &[0, 2],
        kv_indices: &[0, 1],
        kv_last_page_len: &[1],
        num_pages: 2,
        ..PageTable::default()
    };
    let plan = |table: &PageTable<'_>| Plan::new(&geometry, &PLAIN, table, &PlanOptions::default());
    for (last, length) in [(1, 5), (4, 8)] {
        let plan = plan(&PageTable { kv_last_page_len: &[last], ..good }).unwrap();
        assert_eq!(plan.kv_lens().collect::<Vec<_>>(), [length]);
    }
    let refused = |table: PageTable<'_>, parts: &[&str]| {
        let said = plan(&table).unwrap_err().to_string();
        assert!(parts.iter().all(|part| said.contains(part)), "{said}, wanted {parts:?}");
    };
    for bad in [0, 5, -1, i32::MAX] {
        let table = PageTable { kv_last_page_len: &[bad], ..good };
        refused(table, &["kv_last_page_len[0]", "row 0", &bad.to_string()]);
    }
    refused(PageTable { kv_indptr: &[0, 3], ..good }, &["kv_indptr[1]", "= 3", "2 entries"]);
    refused(PageTable { kv_indices: &[0, 2], ..good }, &["kv_indices[1]", "row 0", "= 2", "0..2"]);
    refused(PageTable { kv_indices: &[-1, 0], ..good }, &["kv_indices[0]", "= -1"]);
    refused(PageTable { page_start: Some(&[5]), ..good }, &["page_start[0]", "= 5", "row 0"]);
    let mask = Mask { entries: MaskEntries::Bytes(&[1; 5]), indptr: &[0, 5] };
    refused(PageTable { mask: Some(mask), ..good }, &["mask", "no custom masks"]);
}

#[test]
fn f12_no_extra_page_at_a_boundary() {
    for n in 1..=13usize {
        let batch = flat::<f32>(4, 2, 4, &[row(1, n)], |j| j as f32);
        assert_eq!(batch.plan(&PlanOptions::default()).kv_lens().next(), Some(n));
        let (o, lse) = heads(&batch)[0];
        let (want, ln) = ((n - 1) as f64 / 2.0, (n as f32).ln());
        assert!((o - want).abs() < 1e-6 && (lse - ln).abs() < 1e-6, "{n}: {o} {lse}");
    }
}

#[test]
fn f13_stale_entries_past_a_table_are_never_read() {
    let shape = Shape { h: 2, c: 8, e: 2, s: 4 };
    let batch = Batch::<f32>::of(shape, causal(shape), &[row(1, 11), row(1, 6)]);
    let want = batch.run();
    for stale in [1, -1, i32::MAX, batch.num_pages as i32] {
        let mut table = batch.clone();
        table.kv_indices.resize(64, stale);
        same_bits(&want, &table.run(), "stale entries");
    }
}

#[test]
fn f18_a_workspace_of_exactly_the_bytes_works_and_one_less_is_refused_with_both() {
    let shape = Shape { h: 16, c: 64, e: 16, s: 16 };
    let batch = Batch::<f32>::of(shape, causal(shape), &[row(1, 3000), row(1, 40), row(20, 30)]);
    let capacity = Capacity { rows: 8, tokens: 22, pages: 4096 };
    let plan = batch.plan(&PlanOptions { capacity: Some(capacity), workers: 2, ..PlanOptions::default() });
    let needed = plan.workspace_bytes();
    let mut exact = Workspace::with_bytes(needed).unwrap();
    let got = batch.run_plan(&plan, &mut exact);
    let mut short = Workspace::with_bytes(needed - 1).unwrap();
    let mut o = vec![7f32; 22 * 16 * 64];
    let inputs = Inputs {
        q_nope: TensorRef::from_slice(&batch.q_nope, &[22, 16, 64]).unwrap(),
        q_pe: TensorRef::from_slice(&batch.q_pe, &[22, 16, 16]).unwrap(),
        latent: TensorRef::from_slice(&batch.latent, &[batch.num_pages, 16, 80]).unwrap(),
    };
    let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[22, 16, 64]).unwrap(), lse: None };
    let said = run(&plan, &Stream::cpu(), &mut short, inputs, outputs).unwrap_err();
    assert_eq!(said, Error::Workspace { needed, available: needed - 1 });
    assert!(o.iter().all(|&x| x == 7.0));
    same_bits(&got, &batch.run_plan(&plan, &mut exact), "the plan still runs");
}

#[test]
fn f20_several_query_tokens_of_a_decode_row_do_not_see_each_other() {
    let v = |j: usize| j as f32;
    on_every_isa(|| {
        for row in heads(&flat::<f32>(8, 2, 4, &[row(3, 7); 4], v)).chunks(3) {
            for (got, want) in row.iter().zip([(2.0, 5f32.ln()), (2.5, 6f32.ln()), (3.0, 7f32.ln())]) {
                assert!((got.0 - want.0).abs() < 1e-6 && (got.1 - want.1).abs() < 1e-6, "{row:?}");
            }
        }
        let rows: Vec<RowSpec> = [7, 8, 9, 100].iter().map(|&kv| row(3, kv)).collect();
        let batch = flat::<f32>(8, 2, 4, &rows, v);
        let whole = batch.run();
        for (r, spec) in rows.iter().enumerate() {
            let alone = flat::<f32>(8, 2, 4, &[*spec], v).run();
            same_bits(&alone, &whole.tokens(&batch.shape, 3 * r, 3 * r + 3), &format!("row {r}"));
        }
    });
}

/// A NaN that a query sees makes that query NaN: it must never look like one that sees nothing.
#[test]
fn f39_a_nan_query_is_nan_and_leaves_the_others_alone() {
    fn case<T: Number>(q_len: usize) {
        let shape = Shape { h: 2, c: 32, e: 8, s: 16 };
        let clean = Batch::<T>::of(shape, causal(shape), &[row(q_len, 700)]);
        for rotary in [false, true] {
            let mut hurt = clean.clone();
            // The first token's first head.
            let part = if rotary { &mut hurt.q_pe } else { &mut hurt.q_nope };
            part[3] = T::of(f32::NAN);
            let (want, got) = (clean.run(), hurt.run());
            assert!(got.lse[0].is_nan() && got.o[..32].iter().all(|x| x.to_f64().is_nan()));
            assert_eq!(got.lse[1..], want.lse[1..]);
            assert!(got.o[32..].iter().zip(&want.o[32..]).all(|(a, b)| a.bits() == b.bits()));
        }
    }
    on_every_isa(|| {
        for q_len in [1, 2, 70] {
            case::<f32>(q_len);
            case::<bf16>(q_len);
        }
    });
}

#[test]
fn senseless_variants_and_geometries_are_refused_by_name() {
    let batch = Batch::<f32>::of(Shape { h: 1, c: 8, e: 2, s: 4 }, PLAIN, &[row(1, 5)]);
    let refused = |geometry: Geometry, variant: Variant, name: &str| {
        let said = Plan::new(&geometry, &variant, &batch.table(), &PlanOptions::default());
        let said = said.unwrap_err().to_string();
        assert!(said.starts_with(name), "{said}");
    };
    let geometry = batch.geometry();
    for sm_scale in [f32::NAN, f32::INFINITY] {
        refused(geometry, Variant { sm_scale, ..PLAIN }, "sm_scale");
    }
    refused(Geometry { num_qo_heads: 0, ..geometry }, PLAIN, "num_qo_heads");
    refused(Geometry { kv_lora_rank: 0, ..geometry }, PLAIN, "kv_lora_rank");
    refused(Geometry { qk_rope_head_dim: usize::MAX, ..geometry }, PLAIN, "qk_rope_head_dim");
    refused(Geometry { page_size: 0, ..geometry }, PLAIN, "page_size");
    refused(Geometry { kv_dtype: DType::U8, ..geometry }, PLAIN, "kv_dtype");
}
