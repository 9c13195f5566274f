//! Faults that users of such software have met, one test each.

use half::bf16;
use mstar_attn_paged::{
    DType, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut, TensorRef, Variant,
    Workspace, run,
};
use mstar_kernels::cpu::Isa;
use mstar_kernels::cpu::scatter::scatter;

use crate::harness::{Batch, Number, RowSpec, Shape, relative_error, row, same_bits};

fn plain() -> Variant {
    Variant { sm_scale: 1.0, ..Variant::causal(1) }
}

/// A batch of one head whose keys are 0 and whose values are `v(position)` in every lane.
fn flat<T: Number>(d: usize, s: usize, variant: Variant, rows: &[RowSpec], v: fn(usize) -> f32) -> Batch<T> {
    let mut batch = Batch::<T>::of(Shape { h: 1, g: 1, d, dv: d, s }, variant, rows);
    for r in 0..rows.len() {
        let pages = &batch.kv_indices[batch.kv_indptr[r] as usize..batch.kv_indptr[r + 1] as usize];
        for at in 0..rows[r].kv_len {
            let token = pages[at / s] as usize * s + at % s;
            batch.k[token * d..(token + 1) * d].fill(T::of(0.0));
            batch.v[token * d..(token + 1) * d].fill(T::of(v(at)));
        }
    }
    batch
}

/// Lane 0 of each query, and its log-sum-exp.
fn heads<T: Number>(batch: &Batch<T>) -> Vec<(f64, f32)> {
    let got = batch.run();
    let d = batch.shape.dv;
    got.lse.iter().enumerate().map(|(i, &lse)| (got.o[i * d].to_f64(), lse)).collect()
}

/// Two leaves of `q_len` rows: each fault is tried in the decode and in the tile family.
fn on_every_isa(mut test: impl FnMut()) {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        test();
    }
}

const EMPTY: (f64, f32) = (0.0, f32::NEG_INFINITY);

#[test]
fn f01_a_fully_masked_query_is_zero_and_minus_infinity() {
    on_every_isa(|| {
        let v = |j: usize| [1.0, 3.0][j];
        let got = heads(&flat::<f32>(4, 2, plain(), &[row(5, 2)], v));
        assert_eq!(got, [EMPTY, EMPTY, EMPTY, (1.0, 0.0), (2.0, 2f32.ln())]);
        let got = heads(&flat::<f32>(4, 2, plain(), &[row(25, 2)], v));
        assert!(got[..23].iter().all(|&x| x == EMPTY));
        assert_eq!(got[24].0, 2.0);
    });
}

#[test]
fn f02_very_negative_scores_keep_their_weights() {
    fn case<T: Number>(q_len: usize) {
        let shape = Shape { h: 1, g: 1, d: 2, dv: 2, s: 4 };
        for (keys, scale) in [(2usize, 1f32), (1, 1.0), (2, 1.0 / 128f32.sqrt())] {
            // One more key, hidden by the mask, with a huge positive score.
            let mut spec = RowSpec { mask: Some(|_, key| key != 2), ..row(q_len, 3) };
            if keys == 1 {
                spec.mask = Some(|_, key| key == 0);
            }
            let variant = Variant { sm_scale: scale, ..Variant::full(2) };
            let mut batch = Batch::<T>::of(shape, variant, &[spec]);
            let at = batch.kv_indices[0] as usize * 8;
            for (i, x) in [-512.0, 0.0, -512.0, -1.0, 512.0, 512.0].into_iter().enumerate() {
                batch.k[at + i] = T::of(x);
            }
            for (i, x) in [1.0, 1.0, 0.0, 0.0, 7.0, 7.0].into_iter().enumerate() {
                batch.v[at + i] = T::of(x);
            }
            for q in batch.q.chunks_mut(2) {
                q.copy_from_slice(&[T::of(1024.0), T::of(1.0)]);
            }
            let got = batch.run();
            let (want, tolerance) = match (keys, scale == 1.0) {
                (1, _) => (1.0, 0.0),
                (_, true) => (0.731059, 3e-3),
                _ => (1.0 / (1.0 + (-scale).exp()), 3e-3),
            };
            assert!((got.o[0].to_f64() - f64::from(want)).abs() <= tolerance, "{keys} keys: {:?}", got.o);
            let lse = match (keys, scale == 1.0) {
                (1, _) => -524288.0 * scale,
                (_, true) => -524_287.7,
                _ => -524288.0 * scale + (1.0 + (-scale).exp()).ln(),
            };
            assert!((got.lse[0] - lse).abs() <= 0.04, "{keys} keys, scale {scale}: {} for {lse}", got.lse[0]);
        }
    }
    on_every_isa(|| {
        case::<f32>(1);
        case::<f32>(20);
        case::<bf16>(1);
        case::<bf16>(20);
    });
}

#[test]
fn f03_what_lies_in_unowned_slots_never_shows() {
    fn case<T: Number>(q_len: usize) {
        for kv_len in [1, 15, 17] {
            // The harness fills every slot that no row owns with NaN.
            let shape = Shape { h: 4, g: 2, d: 32, dv: 32, s: 16 };
            let nan = Batch::<T>::of(shape, Variant::causal(32), &[row(q_len, kv_len)]);
            let with = |filling: f32| {
                let mut batch = nan.clone();
                for x in batch.k.iter_mut().chain(&mut batch.v) {
                    if x.to_f64().is_nan() {
                        *x = T::of(filling);
                    }
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
        case::<f32>(1);
        case::<f32>(20);
        case::<bf16>(1);
        case::<bf16>(20);
    });
}

#[test]
fn f03_a_key_that_a_mask_hides_from_all_queries_may_hold_nan() {
    let spec = RowSpec { mask: Some(|_, key| key != 20), ..row(2, 40) };
    for q_len in [2, 20] {
        let mut batch =
            flat::<f32>(8, 16, Variant::full(1), &[RowSpec { q_len, ..spec.clone() }], |j| j as f32);
        let clean = batch.run();
        let token = batch.kv_indices[1] as usize * 16 + 4;
        batch.k[token * 8..(token + 1) * 8].fill(f32::NAN);
        batch.v[token * 8..(token + 1) * 8].fill(f32::NAN);
        same_bits(&clean, &batch.run(), "NaN under the mask");
    }
}

#[test]
fn f05_zero_length_rows_leave_their_neighbours_alone() {
    let rows = [row(2, 3), row(0, 4), row(3, 0)];
    let shape = Shape { h: 1, g: 1, d: 8, dv: 8, s: 4 };
    let variant = Variant::full(8);
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
        assert_eq!(heads(&flat::<f32>(4, 2, plain(), &[row(2, 5)], v)), [(1.5, 4f32.ln()), (2.0, 5f32.ln())]);
        assert_eq!(heads(&flat::<f32>(4, 2, plain(), &[row(1, 5)], v)), [(2.0, 5f32.ln())]);
        let square = heads(&flat::<f32>(4, 2, plain(), &[row(3, 3)], v));
        assert_eq!(square.iter().map(|x| x.0).collect::<Vec<_>>(), [0.0, 0.5, 1.0]);
        let tile = heads(&flat::<f32>(4, 2, plain(), &[row(20, 31)], v));
        for (i, (o, lse)) in tile.into_iter().enumerate() {
            assert!((o - (11 + i) as f64 / 2.0).abs() < 1e-5 && (lse - ((12 + i) as f32).ln()).abs() < 1e-6);
        }
    });
}

#[test]
fn f07_a_window_counts_the_keys_to_the_left() {
    let v = |j: usize| j as f32;
    let with = |window_left| Variant { window_left, ..plain() };
    for q_len in [10usize, 2] {
        let at = |window, query: usize| {
            let got = heads(&flat::<f32>(4, 4, with(window), &[row(q_len, 10)], v));
            got[query + q_len - 10]
        };
        assert_eq!(at(Some(3), 9), (7.5, 4f32.ln()));
        assert_eq!(at(Some(3), 8), (6.5, 4f32.ln()));
        assert_eq!(at(Some(0), 9), (9.0, 0.0));
        for wide in [Some(9), Some(10), Some(1_000_000), Some(usize::MAX)] {
            assert_eq!(at(wide, 9), at(None, 9));
        }
        if q_len == 10 {
            assert_eq!(at(Some(3), 2), (1.0, 3f32.ln()));
            assert_eq!(at(Some(0), 4), (4.0, 0.0));
        }
    }
}

#[test]
fn f08_the_soft_cap_acts_before_the_mask() {
    for q_len in [1, 2, 20] {
        // (a) scores 10 and 0 under a cap of 2.
        let variant = Variant { logits_soft_cap: Some(2.0), causal: false, ..plain() };
        let mut batch = flat::<f32>(1, 2, variant, &[row(q_len, 2)], |j| [1.0, 0.0][j]);
        let page = batch.kv_indices[0] as usize;
        batch.k[2 * page] = 10.0;
        batch.q.fill(1.0);
        let (o, lse) = heads(&batch)[0];
        assert!((o - 0.880778).abs() < 1e-5 && (lse - 2.126768).abs() < 1e-5, "{o} {lse}");
    }
    // (b) a hidden key keeps no weight.
    let variant = Variant { logits_soft_cap: Some(1.0), ..plain() };
    let batch = flat::<f32>(4, 2, variant, &[row(2, 2)], |j| [3.0, 1e4][j]);
    assert_eq!(heads(&batch)[0], (3.0, 0.0));
}

#[test]
fn f08_a_run_takes_what_was_planned_and_nothing_else() {
    let batch = Batch::<f32>::of(Shape { h: 2, g: 1, d: 8, dv: 8, s: 4 }, plain(), &[row(1, 5)]);
    let plan = batch.plan(&PlanOptions::default());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let mut o = vec![7f32; 16];
    let sinks = [0f32; 2];
    let mut attempt = |sinks: Option<&[f32]>, slopes: Option<&[f32]>| {
        let inputs = Inputs {
            q: TensorRef::from_slice(&batch.q, &[1, 2, 8]).unwrap(),
            k: TensorRef::from_slice(&batch.k, &[batch.num_pages, 4, 1, 8]).unwrap(),
            v: TensorRef::from_slice(&batch.v, &[batch.num_pages, 4, 1, 8]).unwrap(),
            sinks: sinks.map(|x| TensorRef::from_slice(x, &[2]).unwrap()),
            alibi_slopes: slopes.map(|x| TensorRef::from_slice(x, &[2]).unwrap()),
        };
        let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[1, 2, 8]).unwrap(), lse: None };
        run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs)
    };
    let said = attempt(Some(&sinks), None).unwrap_err().to_string();
    assert!(said.contains("sinks") && said.contains("planned without"), "{said}");
    assert!(attempt(None, Some(&sinks)).is_err());
    assert!(attempt(None, None).is_ok());
}

#[test]
fn f10_more_rows_than_a_grid_has_blocks() {
    for rows in [65_535usize, 65_536, 65_537] {
        let shape = Shape { h: 1, g: 1, d: 8, dv: 8, s: 1 };
        let geometry = Batch::<f32>::of(shape, plain(), &[]).geometry();
        let indptr: Vec<i32> = (0..=rows as i32).collect();
        let indices: Vec<i32> = (0..rows as i32).rev().collect();
        let last = vec![1; rows];
        let table = PageTable {
            qo_indptr: &indptr,
            kv_indptr: &indptr,
            kv_indices: &indices,
            kv_last_page_len: &last,
            num_pages: rows,
            ..PageTable::default()
        };
        let plan = Plan::new(&geometry, &plain(), &table, &PlanOptions::default()).unwrap();
        let mut workspace = Workspace::for_plan(&plan).unwrap();
        let k = vec![0f32; rows * 8];
        let v: Vec<f32> = (0..rows * 8).map(|i| (i / 8) as f32).collect();
        let mut o = vec![7f32; rows * 8];
        let inputs = Inputs {
            q: TensorRef::from_slice(&k, &[rows, 1, 8]).unwrap(),
            k: TensorRef::from_slice(&k, &[rows, 1, 1, 8]).unwrap(),
            v: TensorRef::from_slice(&v, &[rows, 1, 1, 8]).unwrap(),
            sinks: None,
            alibi_slopes: None,
        };
        let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[rows, 1, 8]).unwrap(), lse: None };
        run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs).unwrap();
        assert!(o.iter().enumerate().all(|(i, &x)| x == (rows - 1 - i / 8) as f32));
    }
}

#[test]
fn f11_a_table_that_names_what_is_not_there_is_refused_by_row_and_value() {
    let geometry = Geometry {
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: 4,
        head_dim_vo: 4,
        page_size: 4,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };
    let good = PageTable {
        qo_indptr: &[0, 1],
        kv_indptr: &[0, 2],
        kv_indices: &[0, 1],
        kv_last_page_len: &[1],
        num_pages: 2,
        ..PageTable::default()
    };
    let plan = |table: &PageTable<'_>| Plan::new(&geometry, &plain(), table, &PlanOptions::default());
    for (last, length) in [(1, 5), (4, 8)] {
        let plan = plan(&PageTable { kv_last_page_len: &[last], ..good }).unwrap();
        assert_eq!(plan.kv_lens().collect::<Vec<_>>(), [length]);
    }
    let refused = |table: PageTable<'_>, parts: &[&str]| {
        let said = plan(&table).unwrap_err().to_string();
        assert!(parts.iter().all(|part| said.contains(part)), "{said}, wanted {parts:?}");
    };
    for bad in [0, 5, -1, i32::MAX] {
        refused(
            PageTable { kv_last_page_len: &[bad], ..good },
            &["kv_last_page_len[0]", "row 0", &bad.to_string()],
        );
    }
    for whatever in [0, 1, 4] {
        let empty = PageTable { kv_indptr: &[0, 0], kv_last_page_len: &[whatever], ..good };
        assert_eq!(plan(&empty).unwrap().kv_lens().next(), Some(0));
    }
    let two = PageTable { qo_indptr: &[0, 1, 2], kv_last_page_len: &[1, 1], ..good };
    refused(PageTable { kv_indptr: &[0, 2, 1], ..two }, &["kv_indptr[2]", "= 1", "row 1"]);
    refused(PageTable { kv_indptr: &[1, 2], ..good }, &["kv_indptr[0]", "= 1"]);
    refused(PageTable { kv_indptr: &[0, 3], ..good }, &["kv_indptr[1]", "= 3", "2 entries"]);
    refused(PageTable { qo_indptr: &[0, 2, 1], kv_indptr: &[0, 1, 2], ..two }, &["qo_indptr[2]", "row 1"]);
    refused(PageTable { qo_indptr: &[], ..good }, &["qo_indptr"]);
    refused(PageTable { kv_indptr: &[0, 1, 2], ..good }, &["kv_indptr", "[2]", "[3]"]);
    refused(PageTable { kv_indices: &[0, 2], ..good }, &["kv_indices[1]", "row 0", "= 2", "0..2"]);
    refused(PageTable { kv_indices: &[-1, 0], ..good }, &["kv_indices[0]", "= -1"]);
    refused(PageTable { kv_offset: Some(&[-4]), ..good }, &["kv_offset[0]", "= -4"]);
    refused(PageTable { kv_offset: Some(&[i64::MAX]), ..good }, &["kv_offset[0]"]);
    refused(PageTable { page_start: Some(&[5]), ..good }, &["page_start[0]", "= 5", "row 0"]);
    // A batch of another size than was planned.
    let batch = Batch::<f32>::of(Shape { h: 1, g: 1, d: 4, dv: 4, s: 4 }, plain(), &[row(1, 5)]);
    let plan = batch.plan(&PlanOptions::default());
    let mut workspace = Workspace::for_plan(&plan).unwrap();
    let (q, mut o) = (vec![0f32; 8], vec![0f32; 4]);
    let inputs = Inputs {
        q: TensorRef::from_slice(&q, &[2, 1, 4]).unwrap(),
        k: TensorRef::from_slice(&batch.k, &[batch.num_pages, 4, 1, 4]).unwrap(),
        v: TensorRef::from_slice(&batch.v, &[batch.num_pages, 4, 1, 4]).unwrap(),
        sinks: None,
        alibi_slopes: None,
    };
    let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[1, 1, 4]).unwrap(), lse: None };
    let said = run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs).unwrap_err().to_string();
    assert_eq!(said, "q: expected shape [T, H, D] = [1, 1, 4], got [2, 1, 4]");
}

#[test]
fn f12_no_extra_page_at_a_boundary() {
    for n in 1..=13usize {
        let batch = flat::<f32>(4, 4, plain(), &[row(1, n)], |j| j as f32);
        assert_eq!(batch.plan(&PlanOptions::default()).kv_lens().next(), Some(n));
        let (o, lse) = heads(&batch)[0];
        assert!(
            (o - (n - 1) as f64 / 2.0).abs() < 1e-6 && (lse - (n as f32).ln()).abs() < 1e-6,
            "{n}: {o} {lse}"
        );
    }
}

#[test]
fn f13_stale_entries_past_a_table_are_never_read_nor_written() {
    let shape = Shape { h: 2, g: 1, d: 8, dv: 8, s: 4 };
    let rows = [row(1, 11), row(1, 6)];
    let batch = Batch::<f32>::of(shape, Variant::causal(8), &rows);
    let used = batch.kv_indices.len();
    let mut results = Vec::new();
    for stale in [1, -1, i32::MAX, batch.num_pages as i32] {
        let mut table = batch.clone();
        table.kv_indices.resize(64, stale);
        let pool = table.k.clone();
        let entries = vec![5f32; 2 * 8];
        let slots = [table.kv_indices[2] as i64 * 4 + 2, -1];
        let cache = TensorMut::from_slice(&mut table.k, &[batch.num_pages, 4, 1, 8]).unwrap();
        let entries = TensorRef::from_slice(&entries, &[2, 1, 8]).unwrap();
        scatter(&Stream::cpu(), &slots, entries, cache).unwrap();
        let changed = pool.iter().zip(&table.k).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(changed, 8, "only the appended slot");
        assert_eq!(table.plan(&PlanOptions::default()).work().pages().len(), used);
        results.push(table.run());
    }
    results.windows(2).for_each(|pair| same_bits(&pair[0], &pair[1], "stale entries"));
}

#[test]
fn f15_heads_that_do_not_divide_are_refused() {
    for (h, g) in [(5, 2), (0, 1), (1, 0), (4, 3), (2, 4)] {
        let batch = Batch::<f32>::of(Shape { h: 1, g: 1, d: 8, dv: 8, s: 4 }, plain(), &[row(1, 5)]);
        let geometry = Geometry { num_qo_heads: h, num_kv_heads: g, ..batch.geometry() };
        let said = batch.with_table(|table| Plan::new(&geometry, &plain(), table, &PlanOptions::default()));
        assert!(said.is_err(), "{h}/{g}");
    }
}

#[test]
fn f18_a_workspace_of_exactly_the_bytes_works_and_one_less_is_refused_with_both() {
    let shape = Shape { h: 32, g: 2, d: 32, dv: 256, s: 16 };
    let batch = Batch::<f32>::of(shape, Variant::causal(32), &vec![row(1, 40); 512]);
    let capacity = mstar_attn_paged::Capacity { rows: 512, tokens: 512, pages: 4096 };
    let plan = batch.plan(&PlanOptions { capacity: Some(capacity), ..PlanOptions::default() });
    let needed = plan.workspace_bytes();
    assert!(needed < 64 << 20, "{needed} bytes");
    let mut exact = Workspace::with_bytes(needed).unwrap();
    let got = batch.run_plan(&plan, &mut exact);
    let mut short = Workspace::with_bytes(needed - 1).unwrap();
    let (q, mut o) = (&batch.q, vec![7f32; 512 * 32 * 256]);
    let inputs = Inputs {
        q: TensorRef::from_slice(q, &[512, 32, 32]).unwrap(),
        k: TensorRef::from_slice(&batch.k, &[batch.num_pages, 16, 2, 32]).unwrap(),
        v: TensorRef::from_slice(&batch.v, &[batch.num_pages, 16, 2, 256]).unwrap(),
        sinks: None,
        alibi_slopes: None,
    };
    let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[512, 32, 256]).unwrap(), lse: None };
    let said = run(&plan, &Stream::cpu(), &mut short, inputs, outputs).unwrap_err();
    let expected = mstar_kernels::Error::Workspace { needed, available: needed - 1 };
    assert_eq!(said, expected);
    assert!(o.iter().all(|&x| x == 7.0));
    same_bits(&got, &batch.run_plan(&plan, &mut exact), "the plan still runs");
}

#[test]
fn f20_several_query_tokens_of_a_decode_row_do_not_see_each_other() {
    let v = |j: usize| j as f32;
    on_every_isa(|| {
        let got = heads(&flat::<f32>(8, 4, plain(), &vec![row(3, 7); 4], v));
        for row in got.chunks(3) {
            for (got, want) in row.iter().zip([(2.0, 5f32.ln()), (2.5, 6f32.ln()), (3.0, 7f32.ln())]) {
                assert!((got.0 - want.0).abs() < 1e-6 && (got.1 - want.1).abs() < 1e-6, "{row:?}");
            }
        }
        let lengths = [7, 8, 9, 100];
        let rows: Vec<RowSpec> = lengths.iter().map(|&kv| row(3, kv)).collect();
        let batch = flat::<f32>(8, 4, plain(), &rows, v);
        let whole = batch.run();
        for (r, &kv) in lengths.iter().enumerate() {
            let alone = flat::<f32>(8, 4, plain(), &[row(3, kv)], v).run();
            let got = whole.tokens(&batch.shape, 3 * r, 3 * r + 3);
            // Queries differ by row, keys are 0: only masks and lengths matter.
            same_bits(&alone, &got, &format!("row {r}"));
        }
    });
}

#[test]
fn f21_parts_merged_agree_with_the_whole() {
    let (n, d) = (4096usize, 32usize);
    let shape = Shape { h: 4, g: 2, d, dv: d, s: 16 };
    let whole = Batch::<f32>::of(shape, Variant::full(d), &[row(1, n)]);
    let want = whole.run();
    for parts in [2usize, 3, 7] {
        let (mut o, mut lse) = (vec![0f64; 4 * d], vec![f64::NEG_INFINITY; 4]);
        for part in 0..parts {
            // Cut at pages: a part's table is a slice of the whole's.
            let (from, to) = (256 * part / parts, 256 * (part + 1) / parts);
            let mut cut = whole.clone();
            cut.kv_indices = whole.kv_indices[from..to].to_vec();
            cut.kv_indptr = vec![0, (to - from) as i32];
            cut.kv_last_page_len = vec![16];
            let got = cut.run();
            for h in 0..4 {
                let (a, b) = (lse[h], f64::from(got.lse[h]));
                let top = a.max(b);
                let (wa, wb) = ((a - top).exp(), (b - top).exp());
                for lane in 0..d {
                    let x = &mut o[h * d + lane];
                    *x = (*x * wa + f64::from(got.o[h * d + lane]) * wb) / (wa + wb);
                }
                lse[h] = top + (wa + wb).ln();
            }
        }
        let got = want.o.iter().map(|&x| f64::from(x));
        assert!(relative_error(got, &o, "o") < 1e-6);
        assert!(relative_error(want.lse.iter().map(|&x| x.into()), &lse, "lse") < 1e-6);
    }
}

#[test]
fn senseless_variants_and_geometries_are_refused() {
    let batch = Batch::<f32>::of(Shape { h: 1, g: 1, d: 8, dv: 8, s: 4 }, plain(), &[row(1, 5)]);
    let refused = |geometry: Geometry, variant: Variant, name: &str| {
        let said = batch.with_table(|table| Plan::new(&geometry, &variant, table, &PlanOptions::default()));
        let said = said.unwrap_err().to_string();
        assert!(said.starts_with(name), "{said}");
    };
    let geometry = batch.geometry();
    for scale in [f32::NAN, f32::INFINITY] {
        refused(geometry, Variant { sm_scale: scale, ..plain() }, "sm_scale");
    }
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(geometry, Variant { logits_soft_cap: Some(cap), ..plain() }, "logits_soft_cap");
    }
    for width in [0, 513] {
        refused(Geometry { head_dim_qk: width, ..geometry }, plain(), "head_dim_qk");
        refused(Geometry { head_dim_vo: width, ..geometry }, plain(), "head_dim_vo");
    }
    refused(Geometry { page_size: 0, ..geometry }, plain(), "page_size");
    refused(Geometry { kv_dtype: DType::U8, ..geometry }, plain(), "kv_dtype");
}

/// A NaN that a query sees makes that query NaN: it must never look like one that sees nothing.
#[test]
fn f39_a_nan_query_is_nan_and_leaves_the_others_alone() {
    fn case<T: Number>(q_len: usize) {
        let shape = Shape { h: 2, g: 1, d: 32, dv: 32, s: 16 };
        let clean = Batch::<T>::of(shape, Variant::causal(32), &[row(q_len, 700)]);
        let mut hurt = clean.clone();
        hurt.q[3] = T::of(f32::NAN); // the first token's first head
        let (want, got) = (clean.run(), hurt.run());
        assert!(got.lse[0].is_nan() && got.o[..32].iter().all(|x| x.to_f64().is_nan()));
        assert_eq!(got.lse[1..], want.lse[1..]);
        assert!(got.o[32..].iter().zip(&want.o[32..]).all(|(a, b)| a.bits() == b.bits()));
    }
    on_every_isa(|| {
        for q_len in [1, 2, 40] {
            case::<f32>(q_len);
            case::<bf16>(q_len);
        }
    });
}
