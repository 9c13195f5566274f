//! The faults of others that dense attention could share, and what a call must refuse.

use crate::dense::{
    AttendParams, Geometry, Prefix, Table, Variant, attend, is_for, schedule, workspace_bytes,
};
use crate::paged::ScheduleOptions;
use crate::testing::on_every_isa;
use crate::work::WorkList;
use crate::{DType, Error, Stream, TensorMut, TensorRef};

const OPTIONS: ScheduleOptions = ScheduleOptions {
    workers: 2,
    cascade: true,
    pad_to: None,
    target: crate::paged::Target::Threads,
    kernels: crate::Kernels::Auto,
    schedule: crate::plan::Schedule::Invariant,
    processors: 1,
};

fn geometry(d: usize) -> Geometry {
    Geometry {
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: d,
        head_dim_vo: d,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    }
}

/// `[prefix | fresh]` of one head, `o` and `lse` a query.
fn run(
    d: usize,
    variant: Variant,
    cu: [&[i32]; 3],
    q: &[f32],
    keys: [&[f32]; 2],
    values: [&[f32]; 2],
) -> (Vec<f32>, Vec<f32>) {
    let [cu_q, cu_p, cu_k] = cu;
    let table = Table { cu_q, prefix: Prefix::Packed { cu_p }, cu_k };
    let mut work = WorkList::default();
    schedule(&geometry(d), &variant, &table, &OPTIONS, &mut work).unwrap();
    let t = q.len() / d;
    let (mut o, mut lse) = (vec![7f32; t * d + 128], vec![7f32; t + 128]);
    let mut workspace = vec![0u8; workspace_bytes(&work, 2)];
    let bytes = workspace.len();
    let of = |data| TensorRef::from_slice(data, &[<[f32]>::len(data) / d, 1, d]).unwrap();
    let params = AttendParams {
        work: &work,
        q: of(q),
        k_prefix: Some(of(keys[0])),
        v_prefix: Some(of(values[0])),
        k: of(keys[1]),
        v: of(values[1]),
        o: TensorMut::from_slice(&mut o[64..64 + t * d], &[t, 1, d]).unwrap(),
        lse: Some(TensorMut::from_slice(&mut lse[64..64 + t], &[t, 1]).unwrap()),
        workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
        workers: 2,
    };
    attend(&Stream::cpu(), params).unwrap();
    for guard in [&o[..64], &o[64 + t * d..], &lse[..64], &lse[64 + t..]] {
        assert!(guard.iter().all(|&x| x == 7.0), "a guard was written");
    }
    (o[64..64 + t * d].to_vec(), lse[64..64 + t].to_vec())
}

/// Values `0, 1, 2, ..` over zero keys: outputs are means, `lse` counts.
fn counted(causal: bool, q: usize, prefix: usize, fresh: usize) -> (Vec<f32>, Vec<f32>) {
    let values: Vec<f32> = (0..prefix + fresh).map(|j| j as f32).collect();
    let zeros = vec![0f32; prefix + fresh];
    let (p, f) = values.split_at(prefix);
    let variant = Variant { sm_scale: 1.0, causal, window_left: None, logits_soft_cap: None };
    run(
        1,
        variant,
        [&[0, q as i32], &[0, prefix as i32], &[0, fresh as i32]],
        &vec![1.0; q],
        [&zeros[..prefix], &zeros[..fresh]],
        [p, f],
    )
}

fn close(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!(got == want || (got - want).abs() <= 2e-6 * want.abs().max(1.0), "{got} for {want}");
    }
}

const EMPTY: f32 = f32::NEG_INFINITY;

#[test]
fn f01_queries_before_the_first_key_yield_zero_and_minus_infinity() {
    on_every_isa(|_| {
        let (o, lse) = counted(true, 5, 1, 1);
        close(&o, &[0.0, 0.0, 0.0, 0.0, 0.5]);
        close(&lse, &[EMPTY, EMPTY, EMPTY, 0.0, 2f32.ln()]);
    });
}

#[test]
fn f02_very_negative_scores_are_not_empty() {
    on_every_isa(|_| {
        let variant = Variant { sm_scale: 1.0, causal: false, window_left: None, logits_soft_cap: None };
        let keys = [-512.0, 0.0, -512.0, -1.0];
        let cu: [&[i32]; 3] = [&[0, 1], &[0, 1], &[0, 1]];
        let (o, lse) =
            run(2, variant, cu, &[1024.0, 1.0], [&keys[..2], &keys[2..]], [&[1.0, 1.0], &[0.0, 0.0]]);
        close(&o, &[0.731_059, 0.731_059]);
        assert_eq!(lse, [-524_287.7]);
        let cu: [&[i32]; 3] = [&[0, 1], &[0, 0], &[0, 1]];
        let (o, lse) = run(2, variant, cu, &[1024.0, 1.0], [&[], &keys[2..]], [&[], &[0.25, 3.0]]);
        close(&o, &[0.25, 3.0]);
        assert_eq!(lse, [-524_289.0]);
    });
}

#[test]
fn f05_zero_length_rows_and_empty_batches() {
    on_every_isa(|_| {
        let variant = Variant { sm_scale: 1.0, causal: false, window_left: None, logits_soft_cap: None };
        let cu: [&[i32]; 3] = [&[0, 2, 2, 5], &[0, 1, 3, 3], &[0, 2, 4, 4]];
        let values: Vec<f32> = (0..7).map(|j| j as f32).collect();
        let (o, lse) = run(1, variant, cu, &[1.0; 5], [&[0.0; 3], &[0.0; 4]], [&values[..3], &values[3..]]);
        close(&o, &[7.0 / 3.0, 7.0 / 3.0, 0.0, 0.0, 0.0]);
        close(&lse, &[3f32.ln(), 3f32.ln(), EMPTY, EMPTY, EMPTY]);
        for cu in [&[0][..], &[0, 0]] {
            let keys = if cu.len() == 1 { cu } else { &[0, 2][..] };
            let (o, _) = run(1, variant, [cu, cu, keys], &[], [&[], &[0.0; 2]], [&[], &[0.0; 2]]);
            assert!(o.is_empty());
        }
    });
}

#[test]
fn f06_causality_is_aligned_to_the_last_key() {
    on_every_isa(|_| {
        let (o, lse) = counted(true, 2, 3, 2);
        close(&o, &[1.5, 2.0]);
        close(&lse, &[4f32.ln(), 5f32.ln()]);
        close(&counted(true, 1, 4, 1).0, &[2.0]);
        close(&counted(true, 1, 5, 0).0, &[2.0]);
        close(&counted(true, 3, 0, 3).0, &[0.0, 0.5, 1.0]);
    });
}

#[test]
fn f07_a_window_counts_the_keys_before_the_querys_own() {
    on_every_isa(|_| {
        let values: Vec<f32> = (0..10).map(|j| j as f32).collect();
        let variant = Variant { sm_scale: 1.0, causal: true, window_left: Some(3), logits_soft_cap: None };
        let cu: [&[i32]; 3] = [&[0, 2], &[0, 8], &[0, 2]];
        let (o, lse) = run(1, variant, cu, &[1.0; 2], [&[0.0; 8], &[0.0; 2]], [&values[..8], &values[8..]]);
        close(&o, &[6.5, 7.5]);
        close(&lse, &[4f32.ln(), 4f32.ln()]);
    });
}

#[test]
fn f08_the_soft_cap_acts_before_the_mask() {
    on_every_isa(|_| {
        let capped = Variant { sm_scale: 1.0, causal: false, window_left: None, logits_soft_cap: Some(2.0) };
        let cu: [&[i32]; 3] = [&[0, 1], &[0, 1], &[0, 1]];
        let (o, lse) = run(1, capped, cu, &[1.0], [&[10.0], &[0.0]], [&[1.0], &[0.0]]);
        close(&o, &[0.880_778]);
        close(&lse, &[2.126_768]);
        let causal = Variant { causal: true, logits_soft_cap: Some(1.0), ..capped };
        let cu: [&[i32]; 3] = [&[0, 2], &[0, 0], &[0, 2]];
        let (o, _) = run(1, causal, cu, &[1.0; 2], [&[], &[0.5, 0.25]], [&[], &[3.0, 1e4]]);
        assert_eq!(o[0], 3.0);
    });
}

fn refused(table: Table<'_>) -> String {
    let mut work = WorkList::default();
    let good = Table { cu_q: &[0, 1], prefix: Prefix::None, cu_k: &[0, 2] };
    schedule(&geometry(2), &Variant::causal(2), &good, &OPTIONS, &mut work).unwrap();
    let said = schedule(&geometry(2), &Variant::causal(2), &table, &OPTIONS, &mut work).unwrap_err();
    assert!(is_for(&work, &geometry(2), &Variant::causal(2), &good), "the list is as it was");
    assert!(!is_for(&work, &geometry(2), &Variant::causal(2), &table));
    said.to_string()
}

#[test]
fn f11_hostile_tables_are_refused_with_array_and_value() {
    let none = Prefix::None;
    assert!(refused(Table { cu_q: &[], prefix: none, cu_k: &[] }).starts_with("cu_q"));
    assert!(refused(Table { cu_q: &[0, 1], prefix: none, cu_k: &[0] }).starts_with("cu_k"));
    assert!(refused(Table { cu_q: &[1, 2], prefix: none, cu_k: &[0, 1] }).starts_with("cu_q[0] = 1"));
    assert!(refused(Table { cu_q: &[0, -3], prefix: none, cu_k: &[0, 1] }).starts_with("cu_q[1] = -3"));
    assert!(refused(Table { cu_q: &[0, 1], prefix: none, cu_k: &[0, i32::MIN] }).starts_with("cu_k[1]"));
    let packed = Prefix::Packed { cu_p: &[0, i32::MAX] };
    assert!(refused(Table { cu_q: &[0, 1], prefix: packed, cu_k: &[0, i32::MAX] }).contains("last position"));
    let pages = |kv_indices, prefix_len, page_size, page_start| Table {
        cu_q: &[0, 1],
        prefix: Prefix::Pages {
            kv_indptr: &[0, 2],
            kv_indices,
            prefix_len,
            page_size,
            page_start,
            num_pages: 4,
        },
        cu_k: &[0, 1],
    };
    assert!(refused(pages(&[0, 4], &[5], 4, None)).starts_with("kv_indices[1] = 4"));
    assert!(refused(pages(&[0, -1], &[5], 4, None)).starts_with("kv_indices[1] = -1"));
    assert!(refused(pages(&[0], &[5], 4, None)).starts_with("kv_indptr[1] = 2"));
    assert!(refused(pages(&[0, 3], &[9], 4, None)).starts_with("prefix_len[0] = 9"));
    assert!(refused(pages(&[0, 3], &[-1], 4, None)).starts_with("prefix_len[0] = -1"));
    assert!(refused(pages(&[0, 3], &[6], 4, Some(&[3]))).starts_with("prefix_len[0] = 6"));
    assert!(refused(pages(&[0, 3], &[1], 4, Some(&[5]))).starts_with("page_start[0] = 5"));
    assert!(refused(pages(&[0, 3], &[1], 0, None)).starts_with("page_size"));
    assert!(refused(pages(&[0, 3], &[1, 1], 4, None)).starts_with("prefix_len: expected shape"));
}

#[test]
fn calls_that_do_not_fit_their_list_are_refused_and_write_nothing() {
    let table = Table { cu_q: &[0, 1], prefix: Prefix::Packed { cu_p: &[0, 2] }, cu_k: &[0, 1] };
    let mut work = WorkList::default();
    schedule(&geometry(2), &Variant::causal(2), &table, &OPTIONS, &mut work).unwrap();
    let numbers = [0.5f32; 8];
    let of = |rows| TensorRef::from_slice(&numbers, &[rows, 1, 2]).unwrap();
    let call = |prefix: Option<usize>, fresh: usize, scratch: usize, list: &WorkList| {
        let (mut o, mut workspace) = ([7f32; 2], vec![0u8; scratch]);
        let bytes = workspace.len();
        let params = AttendParams {
            work: list,
            q: of(1),
            k_prefix: prefix.map(of),
            v_prefix: prefix.map(of),
            k: of(fresh),
            v: of(fresh),
            o: TensorMut::from_slice(&mut o, &[1, 1, 2]).unwrap(),
            lse: None,
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers: 1,
        };
        let result = attend(&Stream::cpu(), params);
        assert!(result.is_ok() || o == [7.0; 2], "a refused call wrote");
        result
    };
    let bytes = workspace_bytes(&work, 1);
    assert!(call(Some(2), 1, bytes, &work).is_ok());
    assert!(call(Some(4), 4, bytes, &work).is_ok());
    assert!(matches!(call(None, 1, bytes, &work), Err(Error::Parameter { .. })));
    assert!(matches!(call(Some(1), 1, bytes, &work), Err(Error::Shape { tensor: "k_prefix", .. })));
    assert!(matches!(call(Some(2), 0, bytes, &work), Err(Error::Shape { tensor: "k", .. })));
    assert!(matches!(call(Some(2), 1, bytes - 1, &work), Err(Error::Workspace { .. })));
    assert!(matches!(
        call(Some(2), 1, bytes, &WorkList::default()),
        Err(Error::Parameter { name: "work", .. })
    ));
}
