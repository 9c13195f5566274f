//! The same on whatever device there is.

use super::*;
use crate::cuda::trials::memory::{put, take_all};
use crate::cuda::trials::{stream, whole};
use crate::mla::tests::batch::agree_within;
use crate::paged::Target;

impl<Q: Number> Stored<Q> {
    fn on_device(&self, stream: &Stream) -> batch::Result<Q> {
        let Shape { h, c, e, s } = self.batch.shape;
        let mut work = WorkList::default();
        let real = *self.batch.qo_indptr.last().unwrap() as usize;
        let options =
            ScheduleOptions { target: Target::Blocks, pad_to: Some(real + 2), ..ScheduleOptions::default() };
        schedule(&self.geometry(), &self.batch.variant, &self.batch.table(), &options, &mut work).unwrap();
        work.stage(stream).unwrap();
        let (t, size) = (work.num_tokens(), Q::DTYPE.size());
        let upload = |numbers: &[Q], len: usize| {
            let mut numbers = numbers.to_vec();
            numbers.resize(len, Q::of(f32::NAN));
            put(stream, bytemuck::cast_slice(&numbers))
        };
        let (q_nope, q_pe) = (upload(&self.batch.q_nope, t * h * c), upload(&self.batch.q_pe, t * h * e));
        let latent = put(stream, &self.bytes);
        let (mut o, mut lse) =
            (put(stream, &vec![0xff; t * h * c * size]), put(stream, &vec![0xff; t * h * 4]));
        let bytes = workspace_bytes(&work, 1);
        let mut workspace = put(stream, &vec![0xff; bytes]);
        let pool = [self.batch.num_pages, s, fp8::latent_bytes(c, e)];
        let params = AttendParams {
            work: &work,
            q_nope: q_nope.tensor(0, Q::DTYPE, &[t, h, c]).unwrap(),
            q_pe: q_pe.tensor(0, Q::DTYPE, &[t, h, e]).unwrap(),
            latent: latent.tensor(0, DType::U8, &pool).unwrap(),
            o: o.tensor_mut(0, Q::DTYPE, &[t, h, c]).unwrap(),
            lse: Some(lse.tensor_mut(0, DType::F32, &[t, h]).unwrap()),
            workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
            workers: 1,
        };
        attend(stream, params).unwrap();
        let mut o: Vec<Q> = take_all(stream, &o, t * h * c);
        let mut lse: Vec<f32> = take_all(stream, &lse, t * h);
        assert!(o[real * h * c..].iter().all(|x| x.to_f64() == 0.0), "a padded token's output is 0");
        assert!(lse[real * h..].iter().all(|&x| x == f32::NEG_INFINITY), "and its log-sum-exp -inf");
        o.truncate(real * h * c);
        lse.truncate(real * h);
        batch::Result { o, lse }
    }

    fn check_on(&self, stream: &Stream) {
        let bound = match Q::DTYPE {
            DType::F32 => 2e-6,
            DType::F16 => 6e-4,
            _ => 4.2e-3,
        };
        let what = format!("{:?} {:?} on a device", self.batch.shape, Q::DTYPE);
        agree_within(&self.on_device(stream), &self.oracle(), [bound, 2e-6], &what);
    }
}

#[test]
fn latents_in_codes_have_the_oracles_numbers_on_a_device() {
    let Some(own) = stream("latents_in_codes") else { return };
    let stream = &own.stream();
    let some = rows();
    let some = if whole() { &some[..] } else { &some[..8] };
    Stored::<bf16>::new(Shape { h: 4, c: 64, e: 16, s: 16 }, CAUSAL, some).check_on(stream);
    Stored::<bf16>::new(Shape { h: 18, c: 256, e: 64, s: 64 }, CAUSAL, &some[..7]).check_on(stream);
    Stored::<f16>::new(Shape { h: 3, c: 132, e: 6, s: 8 }, Variant { causal: false, ..CAUSAL }, some)
        .check_on(stream);
    Stored::<f32>::new(Shape { h: 2, c: 64, e: 0, s: 16 }, CAUSAL, some).check_on(stream);
    Stored::<bf16>::new(Shape { h: 16, c: 512, e: 64, s: 64 }, CAUSAL, &[row(1, 150), row(2, 67)])
        .check_on(stream);
    // A negative scale, and more heads than a block of 64 takes.
    let turned = Variant { sm_scale: -0.2, causal: false };
    Stored::<bf16>::new(Shape { h: 66, c: 128, e: 64, s: 4 }, turned, &[row(1, 90), row(3, 40), row(1, 0)])
        .check_on(stream);
    Stored::<bf16>::new(Shape { h: 66, c: 512, e: 64, s: 4 }, CAUSAL, &[row(1, 90), row(1, 600)])
        .check_on(stream);
}

/// More rows than there are blocks, each of less than a tile: what a block looks one up by is not yet read when it comes to the next.
#[test]
fn rows_of_few_latents_in_codes_follow_each_other_in_a_block() {
    let Some(own) = stream("rows_of_few_latents_in_codes") else { return };
    let short: Vec<_> = (0..11).map(|i| row(1, [20, 64, 0][i % 3])).collect();
    for h in [16, 64] {
        Stored::<bf16>::new(Shape { h, c: 512, e: 64, s: 64 }, CAUSAL, &short).check_on(&own.stream());
    }
}

#[test]
fn f_fp8_a_scale_on_a_device_is_its_own_groups_and_tokens_alone() {
    let Some(own) = stream("a_scale_on_a_device") else { return };
    let stream = &own.stream();
    for (h, c, e) in [(2, 256, 2), (16, 512, 64)] {
        let shape = Shape { h, c, e, s: 8 };
        let stored = Stored::<bf16>::new(shape, CAUSAL, &[row(1, 40), row(1, 30)]);
        let before = stored.on_device(stream);
        let bytes = fp8::latent_bytes(c, e);
        for group in 0..c / 128 {
            let mut changed = Stored { batch: stored.batch.clone(), bytes: stored.bytes.clone() };
            let at = stored.slot(0, 11) * bytes + c + 4 * group;
            let scale = f32::from_ne_bytes(changed.bytes[at..at + 4].try_into().unwrap());
            changed.bytes[at..at + 4].copy_from_slice(&(3.0 * scale).to_ne_bytes());
            let after = changed.on_device(stream);
            changed.check_on(stream);
            assert!(after.o[..h * c] != before.o[..h * c]);
            assert_eq!(after.o[h * c..], before.o[h * c..]);
        }
    }
}

/// Tokens and groups under scales of every magnitude: none underflows under another's.
#[test]
fn f_fp8_scales_of_latents_far_apart_lose_nothing_to_each_other() {
    let Some(own) = stream("scales_of_latents_far_apart") else { return };
    for (h, c, e, by) in [
        (2, 256, 2, 1e-10f32),
        (40, 512, 0, 1e-10),
        (2, 256, 2, 1e10),
        (5, 512, 64, 1e10),
        (40, 512, 64, 1.0),
    ] {
        let variant = Variant { sm_scale: 0.01 / by.max(1.0), ..CAUSAL };
        let mut stored = Stored::<bf16>::new(Shape { h, c, e, s: 8 }, variant, &[row(1, 90), row(2, 33)]);
        let bytes = fp8::latent_bytes(c, e);
        for (slot, token) in stored.bytes.chunks_exact_mut(bytes).enumerate() {
            for group in 0..c / 128 {
                let at = c + 4 * group;
                let scale = f32::from_ne_bytes(token[at..at + 4].try_into().unwrap());
                let scale = scale * by * 10f32.powi((slot + 3 * group) as i32 % 7 - 3);
                token[at..at + 4].copy_from_slice(&scale.to_ne_bytes());
            }
        }
        stored.check_on(&own.stream());
    }
}

#[test]
fn f_fp8_nan_encodings_on_a_device_are_nan_where_they_are_seen() {
    let Some(own) = stream("nan_encodings_on_a_device") else { return };
    for (h, c, e) in [(2, 64, 2), (5, 512, 64)] {
        for code in [0x7f, 0xff] {
            let mut stored = Stored::<bf16>::new(Shape { h, c, e, s: 8 }, CAUSAL, &[row(1, 40), row(1, 30)]);
            let slot = stored.slot(1, 5);
            stored.bytes[slot * fp8::latent_bytes(c, e) + 9] = code;
            let got = stored.on_device(&own.stream());
            assert!(got.o[..h * c].iter().all(|x| x.to_f32().is_finite()));
            assert!(got.o[h * c..].iter().all(|x| x.to_f32().is_nan()));
        }
    }
}

/// Tokens that start at any address, and a row's bits whoever it is beside.
#[test]
fn latents_in_codes_have_the_bits_of_their_rows_alone() {
    let Some(own) = stream("bits_of_rows_alone") else { return };
    let stream = &own.stream();
    let shape = Shape { h: 18, c: 512, e: 64, s: 16 };
    let all = Stored::<bf16>::new(shape, CAUSAL, &[row(1, 600), row(3, 75), row(1, 64)]);
    let together = all.on_device(stream);
    for (at, first, tokens) in [(0, 0, 1), (1, 1, 3), (2, 4, 1)] {
        let mut alone = Stored { batch: all.batch.clone(), bytes: all.bytes.clone() };
        let batch = &mut alone.batch;
        let pages = batch.kv_indptr[at] as usize..batch.kv_indptr[at + 1] as usize;
        batch.kv_indices = batch.kv_indices[pages].to_vec();
        batch.kv_indptr = vec![0, batch.kv_indices.len() as i32];
        batch.qo_indptr = vec![0, tokens as i32];
        batch.kv_last_page_len = vec![batch.kv_last_page_len[at]];
        batch.kv_offset = vec![batch.kv_offset[at]];
        batch.page_start = vec![batch.page_start[at]];
        let of = |numbers: &[bf16], width: usize| {
            numbers[first * 18 * width..(first + tokens) * 18 * width].to_vec()
        };
        (batch.q_nope, batch.q_pe) = (of(&batch.q_nope, 512), of(&batch.q_pe, 64));
        let want = batch::Result {
            o: of(&together.o, 512),
            lse: together.lse[first * 18..(first + tokens) * 18].to_vec(),
        };
        same_bits(&alone.on_device(stream), &want, "its company");
    }
}

/// A small ragged batch, for tools that watch memory.
pub(crate) fn run_small<Q: Number>(stream: &Stream, h: usize, c: usize, e: usize) {
    let shape = Shape { h, c, e, s: 16 };
    Stored::<Q>::new(shape, CAUSAL, &[row(1, 300), row(1, 0), row(1, 17)]).on_device(stream);
}
