//! The device's kernels over latents against the CPU's, on the emulated device, and what may not change a bit there.

use half::{bf16, f16};

use super::batch::{Number, Result};
use super::{Batch, RowSpec, Shape, row};
use crate::cuda::{OwnedStream, emulate};
use crate::mla::{AttendParams, Variant, attend, schedule, workspace_bytes};
use crate::paged::{ScheduleOptions, Target};
use crate::plan::Schedule;
use crate::work::WorkList;
use crate::{Buffer, DType, Device, Element, Stream, TensorMut, TensorRef};

const CARD: Device = Device::Cuda(0);
const CAUSAL: Variant = Variant { sm_scale: 0.13, causal: true };

fn put<E: Element>(stream: &Stream, from: &[E], shape: &[usize]) -> Buffer {
    let mut to = Buffer::for_tensor_on(CARD, E::DTYPE, shape).unwrap();
    let from = TensorRef::from_slice(from, shape).unwrap();
    crate::copy(stream, from, to.tensor_mut(0, E::DTYPE, shape).unwrap()).unwrap();
    to
}

fn take<E: Element>(stream: &Stream, from: &Buffer, to: &mut [E]) {
    let shape = [to.len()];
    let from = from.tensor(0, E::DTYPE, &shape).unwrap();
    crate::copy(stream, from, TensorMut::from_slice(to, &shape).unwrap()).unwrap();
}

/// Runs a batch on the card, padded to so many query tokens; what padding holds is checked and left out.
fn on_card<N: Number>(batch: &Batch<N, N>, pad_to: Option<usize>) -> Result<N> {
    on_card_by(batch, pad_to, Schedule::Invariant)
}

fn on_card_by<N: Number>(batch: &Batch<N, N>, pad_to: Option<usize>, schedule_by: Schedule) -> Result<N> {
    assert!(emulate(), "another test chose the driver");
    let own = OwnedStream::new(CARD).unwrap();
    let stream = own.stream();
    let options = ScheduleOptions {
        workers: 1,
        pad_to,
        target: Target::Blocks,
        schedule: schedule_by,
        ..ScheduleOptions::default()
    };
    let mut work = WorkList::default();
    schedule(&batch.geometry(), &batch.variant, &batch.table(), &options, &mut work).unwrap();
    work.stage(&stream).unwrap();
    let Shape { h, c, e, s } = batch.shape;
    let (real, t) = (batch.tokens(), work.num_tokens());
    let (mut q_nope, mut q_pe) = (batch.q_nope.clone(), batch.q_pe.clone());
    q_nope.resize(t * h * c, N::of(f32::NAN));
    q_pe.resize(t * h * e, N::of(f32::NAN));
    let latent_shape = [batch.num_pages, s, c + e];
    let q_nope = put(&stream, &q_nope, &[t, h, c]);
    let q_pe = put(&stream, &q_pe, &[t, h, e]);
    let latent = put(&stream, &batch.latent, &latent_shape);
    let (mut o, mut lse) = (vec![N::of(f32::NAN); t * h * c], vec![f32::NAN; t * h]);
    let (mut o_on, mut lse_on) = (put(&stream, &o, &[t, h, c]), put(&stream, &lse, &[t, h]));
    let bytes = workspace_bytes(&work, 1);
    let mut workspace = Buffer::zeroed_on(CARD, bytes).unwrap();
    let params = AttendParams {
        work: &work,
        q_nope: q_nope.tensor(0, N::DTYPE, &[t, h, c]).unwrap(),
        q_pe: q_pe.tensor(0, N::DTYPE, &[t, h, e]).unwrap(),
        latent: latent.tensor(0, N::DTYPE, &latent_shape).unwrap(),
        o: o_on.tensor_mut(0, N::DTYPE, &[t, h, c]).unwrap(),
        lse: Some(lse_on.tensor_mut(0, DType::F32, &[t, h]).unwrap()),
        workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
        workers: 1,
    };
    attend(&stream, params).unwrap();
    take(&stream, &o_on, &mut o);
    take(&stream, &lse_on, &mut lse);
    assert!(o[real * h * c..].iter().all(|x| x.to_f64() == 0.0), "a padded token's output is 0");
    assert!(lse[real * h..].iter().all(|&x| x == f32::NEG_INFINITY), "and its log-sum-exp -inf");
    o.truncate(real * h * c);
    lse.truncate(real * h);
    Result { o, lse }
}

fn close<N: Number>(batch: &Batch<N, N>, bound: f64) {
    close_by(batch, bound, Schedule::Invariant);
}

fn close_by<N: Number>(batch: &Batch<N, N>, bound: f64, schedule_by: Schedule) {
    let (cpu, card) = (batch.run(), on_card_by(batch, None, schedule_by));
    for (index, (a, b)) in cpu.o.iter().zip(&card.o).enumerate() {
        let (a, b) = (a.to_f64(), b.to_f64());
        assert!((a - b).abs() <= bound, "{:?}: o {index} is {a} on the CPU, {b} on the card", batch.shape);
    }
    for (index, (a, b)) in cpu.lse.iter().zip(&card.lse).enumerate() {
        let same = a == b || (a - b).abs() <= 2e-3;
        assert!(same, "{:?}: lse {index} is {a} on the CPU, {b} on the card", batch.shape);
    }
}

/// Ragged rows: none, one and many keys, several leaves, queries before the first key, pages given back, shared pages.
fn ragged() -> Vec<RowSpec> {
    vec![
        row(1, 700),
        row(1, 0),
        row(3, 2),
        RowSpec { dropped_pages: 2, start: 3, ..row(2, 90) },
        row(5, 40),
        RowSpec { shares: Some((0, 4)), ..row(1, 530) },
        row(1, 1),
    ]
}

#[test]
fn latents_are_attended_as_on_the_cpu() {
    close(&Batch::<bf16, bf16>::of(Shape { h: 5, c: 64, e: 16, s: 16 }, CAUSAL, &ragged()), 0.03);
    close(&Batch::<f16, f16>::of(Shape { h: 17, c: 40, e: 0, s: 7 }, CAUSAL, &ragged()), 0.004);
    // Rows that start at odd addresses; more heads than a block takes; a scale below 0.
    let other = Variant { sm_scale: -0.2, causal: false };
    close(&Batch::<bf16, bf16>::of(Shape { h: 66, c: 33, e: 5, s: 4 }, other, &ragged()), 0.03);
    close(&Batch::<f32, f32>::of(Shape { h: 3, c: 24, e: 8, s: 16 }, CAUSAL, &ragged()), 1e-4);
}

#[test]
fn leaves_of_the_batch_are_attended_as_on_the_cpu() {
    let rows = [ragged(), vec![row(1, 1900), row(80, 300)]].concat();
    for h in [5, 17, 66] {
        let batch = Batch::<bf16, bf16>::of(Shape { h, c: 64, e: 16, s: 16 }, CAUSAL, &rows);
        close_by(&batch, 0.03, Schedule::Throughput);
    }
    let batch = Batch::<f32, f32>::of(Shape { h: 3, c: 24, e: 8, s: 16 }, CAUSAL, &rows);
    close_by(&batch, 1e-4, Schedule::Throughput);
}

#[test]
fn a_row_alone_has_the_bits_that_it_has_among_others_padded_and_elsewhere() {
    let shape = Shape { h: 6, c: 32, e: 16, s: 8 };
    let (long, short) = (row(1, 600), row(1, 37));
    let mut rows: Vec<(u64, RowSpec)> = (0..4).map(|id| (id, row(9, 50 + id as usize))).collect();
    rows.push((8, long.clone()));
    rows.push((9, short.clone()));
    let all = on_card(&Batch::<bf16, bf16>::make(shape, CAUSAL, &rows, 5), Some(40));
    for (index, (id, spec)) in [(8, long), (9, short)].into_iter().enumerate() {
        let alone = on_card(&Batch::<bf16, bf16>::make(shape, CAUSAL, &[(id, spec)], 77), None);
        let token = 36 + index;
        assert_eq!(alone.o, all.o[token * 6 * 32..(token + 1) * 6 * 32], "row {id}");
        assert_eq!(alone.lse, all.lse[token * 6..(token + 1) * 6], "row {id}");
    }
}
