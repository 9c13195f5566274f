//! e4m3 latents: the bits of an f32 cache of what they stand for, the oracle's numbers, and whose scale is whose.

use half::{bf16, f16};

use super::batch::{self, Number, agree};
use super::{Batch, RowSpec, Shape, on_every_isa, row, same_bits};
use crate::mla::{AttendParams, Geometry, Variant, attend, schedule, workspace_bytes};
use crate::paged::ScheduleOptions;
use crate::work::WorkList;
use crate::{DType, Stream, TensorMut, TensorRef, fp8, reference};

const CAUSAL: Variant = Variant { sm_scale: 0.11, causal: true };

fn rows() -> Vec<RowSpec> {
    let lengths = [(1, 1), (1, 17), (0, 5), (1, 0), (2, 64), (1, 129), (4, 513), (1, 1100), (70, 90)];
    lengths.into_iter().map(|(q, kv)| row(q, kv)).collect()
}

/// A batch and its latents as bytes; those that no row holds are NaN under NaN.
struct Stored<Q> {
    batch: Batch<Q, f32>,
    bytes: Vec<u8>,
}

impl<Q: Number> Stored<Q> {
    /// Latents are stored by the scatter that quantises, each group of lanes of a magnitude of its own.
    fn new(shape: Shape, variant: Variant, rows: &[RowSpec]) -> Stored<Q> {
        let mut batch = Batch::<Q, f32>::of(shape, variant, rows);
        let Shape { c, e, .. } = shape;
        let held: Vec<usize> =
            (0..batch.latent.len() / (c + e)).filter(|slot| !batch.latent[slot * (c + e)].is_nan()).collect();
        for &slot in &held {
            for lane in 0..c {
                let size = batch::noise(&[slot as u64, (lane / 128) as u64, 4]);
                batch.latent[slot * (c + e) + lane] *= 10f32.powf(size);
            }
        }
        let mut stored =
            Stored { bytes: vec![0xff; batch.latent.len() / (c + e) * fp8::latent_bytes(c, e)], batch };
        stored.store(&held);
        // What the codes stand for is what the f32 batch is over.
        let lanes = c + e;
        for slot in held {
            let token = &stored.bytes[slot * fp8::latent_bytes(c, e)..][..fp8::latent_bytes(c, e)];
            for lane in 0..lanes {
                stored.batch.latent[slot * lanes + lane] = fp8::dequantise_latent(token, c, lane);
            }
        }
        stored
    }

    fn store(&mut self, held: &[usize]) {
        let Shape { c, e, s, .. } = self.batch.shape;
        let slots: Vec<i64> = held.iter().map(|&slot| slot as i64).collect();
        let tokens: Vec<f32> =
            held.iter().flat_map(|slot| &self.batch.latent[slot * (c + e)..][..c + e]).copied().collect();
        let all = TensorRef::from_slice(&tokens, &[held.len(), c + e]).unwrap();
        let shape = [self.batch.num_pages, s, fp8::latent_bytes(c, e)];
        fp8::store_latents(
            &Stream::cpu(),
            TensorRef::from_slice(&slots, &[slots.len()]).unwrap(),
            all.narrow(1, 0, c).unwrap(),
            all.narrow(1, c, e).unwrap(),
            TensorMut::from_slice(&mut self.bytes, &shape).unwrap(),
        )
        .unwrap();
    }

    fn geometry(&self) -> Geometry {
        Geometry { kv_dtype: DType::E4m3, ..self.batch.geometry() }
    }

    fn run(&self) -> batch::Result<Q> {
        let Shape { h, c, e, s } = self.batch.shape;
        let mut work = WorkList::default();
        let options = ScheduleOptions { workers: 2, ..ScheduleOptions::default() };
        schedule(&self.geometry(), &self.batch.variant, &self.batch.table(), &options, &mut work).unwrap();
        let t = work.num_tokens();
        let (mut o, mut lse) = (vec![Q::of(7.0); t * h * c], vec![7f32; t * h]);
        let mut workspace = vec![0xffu8; workspace_bytes(&work, 2)];
        let bytes = workspace.len();
        let pool = [self.batch.num_pages, s, fp8::latent_bytes(c, e)];
        let params = AttendParams {
            work: &work,
            q_nope: TensorRef::from_slice(&self.batch.q_nope, &[t, h, c]).unwrap(),
            q_pe: TensorRef::from_slice(&self.batch.q_pe, &[t, h, e]).unwrap(),
            latent: TensorRef::from_slice(&self.bytes, &pool).unwrap(),
            o: TensorMut::from_slice(&mut o, &[t, h, c]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[t, h]).unwrap()),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers: 2,
        };
        attend(&Stream::cpu(), params).unwrap();
        batch::Result { o, lse }
    }

    fn check(&self) {
        let got = self.run();
        same_bits(&got, &self.batch.run(), "an f32 cache of the same numbers");
        agree(&got, &self.oracle(), &format!("{:?} {:?} over bytes", self.batch.shape, Q::DTYPE));
    }

    /// What the bytes stand for, attended in f64.
    fn oracle(&self) -> reference::Attended {
        let Shape { c, e, .. } = self.batch.shape;
        // The oracle decodes the bytes by itself; it is over f32 alone, which holds what they stand for but for a rounding.
        let numbers = reference::fp8::latents(&self.bytes, c, e);
        let mut oracle = self.batch.clone();
        oracle.latent = numbers.iter().map(|&x| x as f32).collect();
        oracle.reference()
    }

    /// The position of slot `at` of a row.
    fn slot(&self, row: usize, at: usize) -> usize {
        let s = self.batch.shape.s;
        self.batch.kv_indices[self.batch.kv_indptr[row] as usize + at / s] as usize * s + at % s
    }
}

/// Needs the helpers of the device's own tests.
#[cfg(all(feature = "cuda", feature = "paged", feature = "dense", feature = "flex", feature = "dsa"))]
pub(crate) mod device;

#[test]
fn rows_have_the_bits_of_an_f32_cache_and_the_oracles_numbers() {
    on_every_isa(|_| {
        for (h, c, e, s) in [(4, 64, 16, 16), (3, 132, 6, 8), (16, 256, 64, 64)] {
            let shape = Shape { h, c, e, s };
            Stored::<f32>::new(shape, CAUSAL, &rows()).check();
            Stored::<bf16>::new(shape, CAUSAL, &rows()).check();
            Stored::<f16>::new(shape, Variant { causal: false, ..CAUSAL }, &rows()).check();
        }
        let shape = Shape { h: 16, c: 512, e: 64, s: 64 };
        Stored::<bf16>::new(shape, CAUSAL, &[row(1, 300), row(3, 131)]).check();
        Stored::<f32>::new(Shape { e: 0, ..shape }, CAUSAL, &[row(1, 300)]).check();
    });
}

#[test]
fn f_fp8_a_scale_is_its_own_groups_and_tokens_alone() {
    let shape = Shape { h: 2, c: 256, e: 2, s: 8 };
    on_every_isa(|_| {
        let stored = Stored::<f32>::new(shape, CAUSAL, &[row(1, 40), row(1, 30)]);
        let before = stored.run();
        let bytes = fp8::latent_bytes(256, 2);
        for group in 0..2 {
            let mut changed = Stored { batch: stored.batch.clone(), bytes: stored.bytes.clone() };
            let slot = stored.slot(0, 11);
            let at = slot * bytes + 256 + 4 * group;
            let scale = f32::from_ne_bytes(changed.bytes[at..at + 4].try_into().unwrap());
            changed.bytes[at..at + 4].copy_from_slice(&(3.0 * scale).to_ne_bytes());
            for lane in 128 * group..128 * (group + 1) {
                changed.batch.latent[slot * 258 + lane] =
                    fp8::dequantise_latent(&changed.bytes[slot * bytes..][..bytes], 256, lane);
            }
            let after = changed.run();
            changed.check();
            assert!(after.o[..512] != before.o[..512]);
            assert_eq!(after.o[512..], before.o[512..]);
        }
    });
}

#[test]
fn f_fp8_both_nan_encodings_are_nan_where_they_are_seen() {
    let shape = Shape { h: 2, c: 64, e: 2, s: 8 };
    on_every_isa(|_| {
        for code in [0x7f, 0xff] {
            let mut stored = Stored::<f32>::new(shape, CAUSAL, &[row(1, 40), row(1, 30)]);
            let slot = stored.slot(1, 5);
            stored.bytes[slot * fp8::latent_bytes(64, 2) + 9] = code;
            let got = stored.run();
            assert!(got.o[..128].iter().all(|x| x.is_finite()));
            assert!(got.o[128..].iter().all(|x| x.is_nan()));
        }
    });
}

#[test]
fn f_fp8_a_slot_that_is_used_again_has_nothing_of_its_former_scales() {
    let shape = Shape { h: 2, c: 256, e: 2, s: 8 };
    let fresh = Stored::<f32>::new(shape, CAUSAL, &[row(1, 40)]);
    let held: Vec<usize> = (0..40).map(|at| fresh.slot(0, at)).collect();
    let mut reused = Stored { batch: fresh.batch.clone(), bytes: fresh.bytes.clone() };
    let numbers = reused.batch.latent.clone();
    reused.batch.latent.iter_mut().for_each(|x| *x *= 1e20);
    reused.store(&held);
    assert_ne!(fresh.bytes, reused.bytes);
    reused.batch.latent = numbers;
    reused.store(&held);
    same_bits(&fresh.run(), &reused.run(), "a fresh pool");
}

#[test]
fn widths_that_codes_do_not_have_are_refused() {
    let stored = Stored::<f32>::new(Shape { h: 2, c: 64, e: 2, s: 8 }, CAUSAL, &[row(1, 4)]);
    let geometry = stored.geometry();
    for (c, e, name) in [(62, 2, "kv_lora_rank"), (64, 3, "qk_rope_head_dim")] {
        let said = Geometry { kv_lora_rank: c, qk_rope_head_dim: e, ..geometry }.check().unwrap_err();
        assert!(said.to_string().starts_with(name), "{said}");
    }
}
