//! Faults that users met, each with its test.

use half::bf16;

use super::batch::Number;
use super::{Batch, Shape, on_every_isa, row, same_bits};
use crate::mla::{
    AttendParams, Geometry, MAX_LATENT_DIM, Variant, attend, is_for, schedule, workspace_bytes,
};
use crate::paged::{Mask, MaskEntries, PageTable, ScheduleOptions};
use crate::work::WorkList;
use crate::{DType, Error, Stream, TensorMut, TensorRef};

const SHAPE: Shape = Shape { h: 3, c: 32, e: 8, s: 16 };
const CAUSAL: Variant = Variant { sm_scale: 0.2, causal: true };

#[test]
fn f01_a_fully_masked_query_is_zero_and_minus_infinity() {
    on_every_isa(|_| {
        let got = Batch::<bf16, bf16>::of(SHAPE, CAUSAL, &[row(9, 4), row(40, 3)]).check();
        assert!(got.o[..5 * 3 * 32].iter().all(|x| x.to_bits() == 0));
        assert!(got.lse[..15].iter().all(|&x| x == f32::NEG_INFINITY) && got.lse[15].is_finite());
    });
}

#[test]
fn f02_empty_rows_and_empty_batches_are_served() {
    on_every_isa(|_| {
        Batch::<f32, f32>::of(SHAPE, CAUSAL, &[]).check();
        Batch::<f32, f32>::of(SHAPE, CAUSAL, &[row(0, 0), row(0, 9), row(1, 0), row(0, 0)]).check();
        Batch::<bf16, bf16>::of(SHAPE, CAUSAL, &[row(0, 40)]).check();
    });
}

#[test]
fn f03_slots_that_nobody_sees_may_hold_anything() {
    fn run<T: Number>() {
        // Every slot outside the rows is NaN already; the kept part of a first page starts at slot 3.
        let spec = super::RowSpec { start: 3, ..row(2, 150) };
        let batch = Batch::<T, T>::of(Shape { c: 80, ..SHAPE }, CAUSAL, &[spec, row(1, 17), row(1, 1)]);
        let clean = batch.run();
        assert!(clean.o.iter().all(|x| !x.to_f64().is_nan()) && clean.lse.iter().all(|x| x.is_finite()));
        let mut infinite = batch.clone();
        for (x, was) in infinite.latent.iter_mut().zip(&batch.latent) {
            if was.to_f64().is_nan() {
                *x = T::of(f32::INFINITY);
            }
        }
        same_bits(&clean, &infinite.run(), "infinities in slots that nobody sees");
    }
    on_every_isa(|_| {
        run::<bf16>();
        run::<f32>();
    });
}

#[test]
fn a_latent_of_nan_that_is_seen_makes_its_queries_nan_and_no_others() {
    on_every_isa(|_| {
        let mut batch = Batch::<bf16, bf16>::of(SHAPE, CAUSAL, &[row(1, 300), row(1, 300)]);
        let page = batch.kv_indices[3] as usize;
        batch.latent[page * 16 * 40 + 5] = bf16::NAN;
        let got = batch.run();
        let (o, lse) = (3 * 32, 3);
        assert!(got.o[..o].iter().all(|x| x.is_nan()) && got.lse[..lse].iter().all(|x| x.is_nan()));
        assert!(got.o[o..].iter().all(|x| !x.is_nan()) && got.lse[lse..].iter().all(|x| x.is_finite()));
    });
}

#[test]
fn f06_causality_is_aligned_to_the_last_key() {
    on_every_isa(|_| {
        for kv_len in [1, 2, 63, 64, 127, 128, 129, 513] {
            let wide = Shape { c: 64, ..SHAPE };
            Batch::<bf16, bf16>::of(wide, CAUSAL, &[row(2, kv_len), row(30, kv_len)]).check();
        }
    });
}

#[test]
fn f09_latents_past_2_32_elements_are_addressed() {
    // Memory that is never touched costs nothing, so pages may lie 2^31 elements apart.
    let (shape, apart) = (Shape { h: 2, c: 32, e: 8, s: 4 }, 1usize << 31);
    let mut batch = Batch::<bf16, bf16>::of(shape, CAUSAL, &[row(1, 12)]);
    let (want, token) = (batch.run(), 40);
    let mut bits = vec![0u16; 2 * apart + 4 * token];
    for (to, page) in batch.kv_indices.iter_mut().enumerate() {
        let from = *page as usize * 4 * token;
        for (i, x) in batch.latent[from..from + 4 * token].iter().enumerate() {
            bits[to * apart + i] = x.to_bits();
        }
        *page = to as i32;
    }
    let mut work = WorkList::default();
    let options = ScheduleOptions { workers: 1, ..ScheduleOptions::default() };
    let table = PageTable { num_pages: 3, ..batch.table() };
    schedule(&batch.geometry(), &batch.variant, &table, &options, &mut work).unwrap();
    let bytes = workspace_bytes(&work, 1);
    let (mut o, mut lse, mut workspace) = (vec![bf16::NAN; 64], vec![0f32; 2], vec![0u8; bytes]);
    let params = AttendParams {
        work: &work,
        q_nope: TensorRef::from_slice(&batch.q_nope, &[1, 2, 32]).unwrap(),
        q_pe: TensorRef::from_slice(&batch.q_pe, &[1, 2, 8]).unwrap(),
        latent: TensorRef::from_slice_strided::<bf16>(
            bytemuck::cast_slice(&bits),
            &[3, 4, token],
            &[apart, token, 1],
        )
        .unwrap(),
        o: TensorMut::from_slice(&mut o, &[1, 2, 32]).unwrap(),
        lse: Some(TensorMut::from_slice(&mut lse, &[1, 2]).unwrap()),
        workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
        workers: 1,
    };
    attend(&Stream::cpu(), params).unwrap();
    assert_eq!((o, lse), (want.o, want.lse));
}

#[test]
fn any_outer_strides_are_taken() {
    let shape = Shape { h: 3, c: 32, e: 8, s: 4 };
    let batch = Batch::<bf16, bf16>::of(shape, CAUSAL, &[row(2, 30), row(20, 25), row(1, 7)]);
    let want = batch.run();
    let (t, d, p) = (batch.tokens(), 40, batch.num_pages);
    // Queries as one `[T, H, C + E]`, latents with a gap after each token and page.
    let mut q = vec![bf16::NAN; t * 3 * d];
    for i in 0..t * 3 {
        q[i * d..i * d + 32].copy_from_slice(&batch.q_nope[i * 32..][..32]);
        q[i * d + 32..(i + 1) * d].copy_from_slice(&batch.q_pe[i * 8..][..8]);
    }
    let mut latent = vec![bf16::NAN; p * 200];
    for token in 0..p * 4 {
        latent[token / 4 * 200 + token % 4 * 45..][..d].copy_from_slice(&batch.latent[token * d..][..d]);
    }
    let mut work = WorkList::default();
    let options = ScheduleOptions { workers: 2, ..ScheduleOptions::default() };
    schedule(&batch.geometry(), &batch.variant, &batch.table(), &options, &mut work).unwrap();
    let bytes = workspace_bytes(&work, 2);
    let (mut workspace, mut o, mut lse) = (vec![0u8; bytes], vec![bf16::NAN; t * 150], vec![0f32; t * 3]);
    let q = TensorRef::from_slice(&q, &[t, 3, d]).unwrap();
    let params = AttendParams {
        work: &work,
        q_nope: q.narrow(2, 0, 32).unwrap(),
        q_pe: q.narrow(2, 32, 8).unwrap(),
        latent: TensorRef::from_slice_strided(&latent, &[p, 4, d], &[200, 45, 1]).unwrap(),
        o: TensorMut::from_slice_strided(&mut o, &[t, 3, 32], &[150, 40, 1]).unwrap(),
        lse: Some(TensorMut::from_slice(&mut lse, &[t, 3]).unwrap()),
        workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
        workers: 2,
    };
    attend(&Stream::cpu(), params).unwrap();
    for i in 0..t * 3 {
        let got = &o[i / 3 * 150 + i % 3 * 40..][..32];
        assert_eq!(got, &want.o[i * 32..(i + 1) * 32]);
    }
    assert_eq!(lse, want.lse);
}

#[test]
fn what_no_kernel_takes_is_refused_by_name() {
    let good = Geometry {
        num_qo_heads: 2,
        kv_lora_rank: 32,
        qk_rope_head_dim: 0,
        page_size: 1,
        q_dtype: DType::Bf16,
        kv_dtype: DType::Bf16,
    };
    good.check().unwrap();
    let bad = |geometry: Geometry, name: &str| {
        let said = geometry.check().unwrap_err().to_string();
        assert!(said.starts_with(name), "{said}");
    };
    bad(Geometry { num_qo_heads: 0, ..good }, "num_qo_heads");
    bad(Geometry { kv_lora_rank: 0, ..good }, "kv_lora_rank");
    bad(Geometry { kv_lora_rank: MAX_LATENT_DIM + 1, ..good }, "kv_lora_rank");
    bad(Geometry { qk_rope_head_dim: usize::MAX, ..good }, "qk_rope_head_dim");
    bad(Geometry { page_size: 0, ..good }, "page_size");
    bad(Geometry { kv_dtype: DType::I32, ..good }, "kv_dtype");
    let mut list = WorkList::default();
    let table = PageTable {
        qo_indptr: &[0, 1],
        kv_indptr: &[0, 1],
        kv_indices: &[0],
        kv_last_page_len: &[1],
        num_pages: 1,
        ..PageTable::default()
    };
    let options = ScheduleOptions::default();
    let masked =
        PageTable { mask: Some(Mask { entries: MaskEntries::Bytes(&[1]), indptr: &[0, 1] }), ..table };
    assert!(schedule(&good, &CAUSAL, &masked, &options, &mut list).is_err());
    let scale = Variant { sm_scale: f32::NAN, causal: true };
    assert!(schedule(&good, &scale, &table, &options, &mut list).is_err());
    assert!(list.rows().is_empty());
    schedule(&good, &CAUSAL, &table, &options, &mut list).unwrap();
    assert!(is_for(&list, &good, &CAUSAL, &table));
    assert!(!is_for(&list, &Geometry { kv_lora_rank: 16, qk_rope_head_dim: 16, ..good }, &CAUSAL, &table));
    assert!(!is_for(&list, &good, &Variant { causal: false, ..CAUSAL }, &table));
    assert!(
        !list.is_for(list.geometry(), list.variant(), &table),
        "a list over latents is not one over heads"
    );
}

#[test]
fn a_refused_call_writes_nothing() {
    let batch = Batch::<f32, f32>::of(SHAPE, CAUSAL, &[row(1, 20)]);
    let mut work = WorkList::default();
    let options = ScheduleOptions { workers: 1, ..ScheduleOptions::default() };
    schedule(&batch.geometry(), &batch.variant, &batch.table(), &options, &mut work).unwrap();
    let empty = WorkList::default();
    let p = batch.num_pages;
    let refused = |work: &WorkList, pages: usize, width: usize, bytes: usize| -> Error {
        let (mut o, mut lse, mut workspace) = (vec![7f32; 96], vec![7f32; 3], vec![0u8; bytes]);
        let params = AttendParams {
            work,
            q_nope: TensorRef::from_slice(&batch.q_nope, &[1, 3, 32]).unwrap(),
            q_pe: TensorRef::from_slice(&batch.q_pe, &[1, 3, 8]).unwrap(),
            latent: TensorRef::from_slice(&batch.latent, &[pages, 16, width]).unwrap(),
            o: TensorMut::from_slice(&mut o, &[1, 3, 32]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[1, 3]).unwrap()),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers: 1,
        };
        let error = attend(&Stream::cpu(), params).unwrap_err();
        assert!(o.iter().chain(&lse).all(|&x| x == 7.0));
        error
    };
    let bytes = workspace_bytes(&work, 1);
    assert!(matches!(refused(&work, p, 40, bytes - 1), Error::Workspace { .. }));
    assert!(matches!(refused(&work, p - 1, 40, bytes), Error::Shape { tensor: "latent", .. }));
    assert!(matches!(refused(&work, p, 39, bytes), Error::Shape { tensor: "latent", .. }));
    assert!(matches!(refused(&empty, p, 40, bytes), Error::Parameter { name: "work", .. }));
}
