use mstar_core::{PlanId, Slot, StepSerial};

use super::*;

const S: usize = 4;

/// Rows of (q_len, kv_len, first kept token), on consecutive pages of 4 slots from page 1 on.
fn kv_plan(rows: &[(usize, usize, usize)]) -> KvPlan {
    let id = PlanId { slot: Slot(0), label: Label::main(), serial: StepSerial(1) };
    let mut plan = KvPlan {
        id,
        rows: vec![],
        qo_indptr: vec![0],
        kv_indptr: vec![0],
        kv_indices: vec![],
        kv_last_page_len: vec![],
        slots: vec![],
        positions: vec![],
        real_rows: rows.len(),
    };
    for (index, &(q_len, kv_len, kept)) in rows.iter().enumerate() {
        let (kv_offset, page_start) = (kept / S * S, kept % S);
        let pages = (kv_len - kv_offset).div_ceil(S);
        let (request, label) = (RequestId::new(format!("r{index}")), Label::main());
        plan.rows.push(KvRow { request, label, q_len, kv_len, kv_offset, page_start, generation: 0 });
        plan.kv_indices.extend((0..pages).map(|page| (10 * (index + 1) + page) as i32));
        plan.slots.resize(plan.slots.len() + q_len, 0);
        plan.qo_indptr.push(plan.slots.len() as i32);
        plan.kv_indptr.push(plan.kv_indices.len() as i32);
        plan.kv_last_page_len.push(if pages == 0 {
            0
        } else {
            (kv_len - kv_offset - (pages - 1) * S) as i32
        });
    }
    plan
}

#[test]
fn selection_is_needed_from_the_key_after_topk_on() {
    for (kv_len, needed) in [(1, false), (7, false), (8, false), (9, true), (100, true)] {
        let plan = DsaPlan::new(&kv_plan(&[(1, kv_len, 0)]), S, 8);
        assert_eq!(plan.needs_selection, needed, "{kv_len} keys");
        assert_eq!(plan.row_request, [if needed { 0 } else { -1 }]);
    }
    // Keys that were given back are not seen.
    assert!(!DsaPlan::new(&kv_plan(&[(1, 29, 21)]), S, 8).needs_selection);
    assert!(DsaPlan::new(&kv_plan(&[(1, 29, 20)]), S, 8).needs_selection);
    // A read without queries needs nothing.
    assert!(!DsaPlan::new(&kv_plan(&[(0, 100, 0)]), S, 8).needs_selection);
}

#[test]
fn a_row_that_crosses_topk_is_dense_up_to_there() {
    let plan = DsaPlan::new(&kv_plan(&[(5, 11, 0), (1, 8, 0), (1, 9, 0)]), S, 8);
    assert_eq!(plan.positions, [6, 7, 8, 9, 10, 7, 8]);
    assert_eq!(plan.row_request, [-1, -1, 0, 0, 0, -1, 2]);
    let dense = plan.dense(64);
    assert_eq!(dense.qo_indptr, [0, 2, 5, 6, 7]);
    assert_eq!(dense.kv_indptr, [0, 2, 2, 4, 4]);
    assert_eq!(dense.kv_indices, [10, 11, 20, 21]);
    assert_eq!(dense.kv_last_page_len, [4, 0, 4, 0]);
    assert_eq!((plan.dense_queries, plan.max_keys(), plan.num_rows()), (3, 11, 3));
    // 7 + 8 + 9 + 10 + 11 + 8 + 9 keys seen; five queries attend no more than topk.
    assert_eq!(plan.work, SparseWork { scored: 9 + 10 + 11 + 9, attended: 7 + 8 * 6, dense: 62 });
}

#[test]
fn positions_count_from_the_first_kept_token() {
    // Tokens 0..6 were given back: pages start at token 4, the first kept one is slot 2 of them.
    let plan = DsaPlan::new(&kv_plan(&[(3, 17, 6)]), S, 9);
    let span = &plan.spans[0];
    assert_eq!((span.ctx_start, span.page_start, span.kept_from, span.q_len), (8, 2, 6, 3));
    assert_eq!(plan.pages[span.pages.clone()], [10, 11, 12, 13]);
    assert_eq!(
        (&plan.row_start[..], &plan.row_keys[..], &plan.row_kept_from[..]),
        (&[2][..], &[11][..], &[6][..])
    );
    assert_eq!((&plan.positions[..], &plan.row_request[..]), (&[8, 9, 10][..], &[-1, 0, 0][..]));
    let dense = plan.dense(64);
    assert_eq!((dense.qo_indptr, dense.kv_indptr), (&[0, 1, 3][..], &[0, 3, 3][..]));
    assert_eq!((dense.kv_last_page_len, dense.kv_offset), (&[3, 0][..], Some(&[4, 0][..])));
    assert_eq!(dense.page_start, Some(&[2, 0][..]));
}

#[test]
fn padding_is_in_no_span_and_sees_nothing() {
    let mut kv = kv_plan(&[(1, 9, 0), (2, 0, 0)]);
    kv.real_rows = 1;
    kv.slots.extend([-1; 3]);
    let plan = DsaPlan::new(&kv, S, 8);
    assert_eq!((plan.spans.len(), plan.num_rows(), plan.num_tokens()), (1, 2, 6));
    assert_eq!(plan.row_request, [0, -1, -1, -1, -1, -1]);
    assert_eq!(plan.positions, [8, -1, -1, -1, -1, -1]);
    assert_eq!(plan.dense(9).qo_indptr, [0, 1, 3]);
}

#[test]
fn f13_a_plan_made_again_lists_nothing_of_the_one_before_and_moves_nothing() {
    let mut plan = DsaPlan::default();
    plan.reserve(4, 8, 40);
    plan.make(&kv_plan(&[(5, 100, 0), (1, 9, 0), (1, 3, 0)]), S, 8);
    let addresses = |plan: &DsaPlan| {
        let dense = plan.dense(64);
        [
            plan.pages.as_ptr(),
            plan.row_request.as_ptr(),
            plan.positions.as_ptr(),
            plan.row_page_offset.as_ptr(),
        ]
        .into_iter()
        .chain([plan.row_start.as_ptr(), dense.qo_indptr.as_ptr(), dense.kv_indices.as_ptr()])
        .collect::<Vec<_>>()
    };
    let before = addresses(&plan);
    let short = kv_plan(&[(1, 5, 0)]);
    plan.make(&short, S, 8);
    assert_eq!(addresses(&plan), before);
    let fresh = DsaPlan::new(&short, S, 8);
    assert_eq!(format!("{plan:?}"), format!("{fresh:?}"));
    assert_eq!((&plan.pages[..], &plan.row_page_offset[..]), (&[10, 11][..], &[0, 2][..]));
}
