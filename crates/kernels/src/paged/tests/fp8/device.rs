//! The same on whatever device there is: the oracle's numbers, and whose scale is whose.

use super::*;
use crate::Buffer;
use crate::cuda::trials::memory::{put, take_all};
use crate::cuda::trials::{DEVICE, stream, whole};
use crate::paged::Target;

/// How far outputs and `lse` of a type may be from the oracle's: a device may round weights to the queries' type.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 6e-4,
        _ => 4.2e-3,
    }
}

impl<Q: Number> Batch<Q> {
    /// The plan on a device, of `pad` tokens of nobody behind the batch's.
    fn on_device(&self, stream: &Stream, pad: usize) -> (Vec<Q>, Vec<f32>) {
        let Geometry { num_qo_heads: h, num_kv_heads: g, head_dim_qk: d, head_dim_vo: dv, .. } =
            self.geometry;
        let table = PageTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.last,
            num_pages: self.pages,
            ..PageTable::default()
        };
        let tokens = *self.qo_indptr.last().unwrap() as usize;
        let t = tokens + pad;
        let options =
            ScheduleOptions { target: Target::Blocks, pad_to: Some(t), ..ScheduleOptions::default() };
        let mut work = WorkList::default();
        schedule(&self.geometry, &self.variant, &table, &options, &mut work).unwrap();
        work.stage(stream).unwrap();
        let mut q = self.q.clone();
        q.resize(t * h * d, Q::of(f32::NAN));
        let upload = |bytes: &[u8]| put(stream, bytes);
        let q = upload(bytemuck::cast_slice(&q));
        let codes = [0, 1].map(|side| upload(&self.codes[side]));
        let scales = [0, 1].map(|side| upload(bytemuck::cast_slice(&self.scales[side])));
        let slopes: Vec<f32> = (0..h).map(|head| 0.03 * head as f32).collect();
        let slopes = upload(bytemuck::cast_slice(&slopes));
        let (mut o, mut lse) =
            (upload(&vec![0xff; t * h * dv * Q::DTYPE.size()]), upload(&vec![0xff; t * h * 4]));
        let bytes = workspace_bytes(&work, 1);
        let mut workspace = upload(&vec![0xff; bytes]);
        let (p, s) = (self.pages, self.geometry.page_size);
        let pool = |side: usize, d: usize| codes[side].tensor(0, DType::E4m3, &[p, s, g, d]).unwrap();
        let beside = |side: &Buffer| side.tensor(0, DType::F32, &[p, s, g]).unwrap().as_ptr();
        let beside = [0, 1].map(|side| {
            // SAFETY: of the same memory, while it is there.
            unsafe {
                TensorRef::from_raw_parts(
                    beside(&scales[side]),
                    DEVICE,
                    DType::F32,
                    &[p, s, g],
                    &[s * g, g, 1],
                )
            }
            .unwrap()
        });
        let params = AttendParams {
            work: &work,
            q: q.tensor(0, Q::DTYPE, &[t, h, d]).unwrap(),
            k: pool(0, d),
            v: pool(1, dv),
            kv_scales: Some(beside),
            sinks: None,
            alibi_slopes: self.variant.alibi.then(|| slopes.tensor(0, DType::F32, &[h]).unwrap()),
            o: o.tensor_mut(0, Q::DTYPE, &[t, h, dv]).unwrap(),
            lse: Some(lse.tensor_mut(0, DType::F32, &[t, h]).unwrap()),
            workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
            workers: 1,
        };
        attend(stream, params).unwrap();
        let mut numbers: Vec<Q> = take_all(stream, &o, t * h * dv);
        let mut lse: Vec<f32> = take_all(stream, &lse, t * h);
        assert!(numbers[tokens * h * dv..].iter().all(|x| x.to_f64() == 0.0), "a padded token's output is 0");
        assert!(lse[tokens * h..].iter().all(|&x| x == f32::NEG_INFINITY), "and its log-sum-exp -inf");
        numbers.truncate(tokens * h * dv);
        lse.truncate(tokens * h);
        (numbers, lse)
    }

    fn check_on(&self, stream: &Stream) {
        self.judge(&self.on_device(stream, 3), bound(Q::DTYPE));
    }
}

#[test]
fn rows_over_codes_have_the_oracles_numbers() {
    let Some(own) = stream("rows_over_codes") else { return };
    let stream = &own.stream();
    Batch::<bf16>::new((2, 4, 64, 64, 16), &DECODE, Variant::causal(64)).check_on(stream);
    Batch::<bf16>::new((2, 3, 64, 96, 16), &PREFILL[..4], Variant::full(64)).check_on(stream);
    Batch::<f16>::new((1, 7, 48, 80, 4), &DECODE, Variant::causal(48)).check_on(stream);
    Batch::<f32>::new((3, 2, 33, 21, 5), &DECODE, Variant::full(33)).check_on(stream);
    if !whole() {
        return;
    }
    Batch::<bf16>::new((8, 1, 128, 128, 1), &DECODE, Variant::causal(128)).check_on(stream);
    Batch::<bf16>::new((2, 20, 192, 128, 16), &DECODE[..7], Variant::causal(128)).check_on(stream);
    Batch::<bf16>::new((1, 40, 256, 256, 16), &DECODE[..7], Variant::causal(256)).check_on(stream);
    Batch::<f16>::new((1, 2, 33, 21, 7), &PREFILL, Variant::causal(33)).check_on(stream);
    Batch::<f32>::new((2, 3, 64, 64, 16), &PREFILL, Variant::causal(64)).check_on(stream);
}

#[test]
fn windows_caps_and_slopes_reach_codes_there() {
    let Some(own) = stream("windows_caps_and_slopes") else { return };
    let variant =
        Variant { window_left: Some(40), logits_soft_cap: Some(3.0), alibi: true, ..Variant::causal(32) };
    Batch::<bf16>::new((2, 2, 32, 32, 8), &DECODE, variant).check_on(&own.stream());
    Batch::<f32>::new((2, 2, 32, 32, 8), &PREFILL[..3], variant).check_on(&own.stream());
}

#[test]
fn rows_of_several_leaves_over_codes_are_right() {
    let Some(own) = stream("rows_of_several_leaves_over_codes") else { return };
    let rows = [(1, 1100), (1, 513), (2, 600)];
    Batch::<bf16>::new((1, 4, 64, 64, 16), &rows, Variant::causal(64)).check_on(&own.stream());
}

/// Keys under scales of every magnitude that an f32 has in reach: neither underflows under another's.
#[test]
fn f_fp8_scales_far_apart_lose_nothing_to_each_other() {
    let Some(own) = stream("scales_far_apart") else { return };
    for rows in [&[(1, 90), (1, 700)][..], &[(30, 90)][..]] {
        for by in [1e-12f32, 1e-6, 1.0, 1e6, 1e12] {
            let mut batch = Batch::<bf16>::new(
                (1, 2, 64, 64, 8),
                rows,
                Variant { sm_scale: 0.02, ..Variant::causal(64) },
            );
            for (at, scale) in batch.scales[1].iter_mut().enumerate() {
                *scale *= by * 10f32.powi(at as i32 % 7 - 3);
            }
            batch.check_on(&own.stream());
        }
    }
}

/// What changes with one scale is what that head's queries see of that token.
#[test]
fn f_fp8_a_scale_on_a_device_is_its_own_tokens_and_heads_alone() {
    let Some(own) = stream("a_scale_on_a_device") else { return };
    let stream = &own.stream();
    let (g, group, d) = (3, 2, 32);
    let flat = Variant { sm_scale: 0.01, ..Variant::causal(d) };
    for rows in [&[(1, 90), (1, 33)][..], &[(20, 50), (20, 33)][..]] {
        let batch = Batch::<bf16>::new((g, group, d, d, 8), rows, flat);
        let (before, _) = batch.on_device(stream, 0);
        for (side, position, head) in [(0, 0, 1), (1, 41, 2)] {
            let mut changed = batch.clone();
            changed.scales[side][batch.slots(0)[position] as usize * g + head] *= 300.0;
            changed.check_on(stream);
            let (after, _) = changed.on_device(stream, 0);
            let (mut seen, mut changed_of) = (0, 0);
            for token in 0..rows.iter().map(|row| row.0).sum::<usize>() {
                let first = rows[0].1 - rows[0].0;
                for h in 0..g * group {
                    let at = (token * g * group + h) * d..(token * g * group + h + 1) * d;
                    let sees = token < rows[0].0 && first + token >= position && h / group == head;
                    let moved = after[at.clone()] != before[at];
                    assert!(sees || !moved, "side {side} token {token} head {h}");
                    // Of those that see it, some round to what they were.
                    seen += usize::from(sees);
                    changed_of += usize::from(moved);
                }
            }
            assert!(2 * changed_of > seen, "side {side}: {changed_of} of {seen} vectors changed");
        }
    }
}

#[test]
fn f_fp8_nan_encodings_on_a_device_are_nan_where_they_are_seen_and_nowhere_else() {
    let Some(own) = stream("nan_encodings_on_a_device") else { return };
    let stream = &own.stream();
    let d = 32;
    for rows in [&[(1, 40), (1, 30)][..], &[(20, 40), (20, 30)][..]] {
        for side in 0..2 {
            for code in [0x7f, 0xff] {
                let mut batch = Batch::<bf16>::new((2, 1, d, d, 8), rows, Variant::causal(d));
                // Seen by every query of row 1, under head 1.
                let slot = batch.slots(1)[5] as usize;
                batch.codes[side][(slot * 2 + 1) * d + 7] = code;
                let (o, _) = batch.on_device(stream, 0);
                for (at, x) in o.iter().enumerate() {
                    let (token, head, lane) = (at / d / 2, at / d % 2, at % d);
                    let nan = token >= rows[0].0 && head == 1 && (side == 0 || lane == 7);
                    assert_eq!(x.to_f64().is_nan(), nan, "side {side} token {token} head {head} lane {lane}");
                }
            }
        }
    }
}

#[test]
fn a_row_over_codes_has_the_bits_that_it_has_alone_and_padded() {
    let Some(own) = stream("a_row_over_codes") else { return };
    let stream = &own.stream();
    let rows = [(1, 600), (20, 75), (1, 1), (3, 40)];
    let all = Batch::<bf16>::new((2, 2, 64, 64, 16), &rows, Variant::causal(64));
    let together = all.on_device(stream, 9);
    same(&together, &all.on_device(stream, 0), "no padding");
    let mut token = 0;
    for (row, &(q, kv)) in rows.iter().enumerate() {
        // The same row, from the same pool.
        let mut alone = all.clone();
        alone.rows = vec![(q, kv)];
        alone.qo_indptr = vec![0, q as i32];
        let pages = all.kv_indptr[row] as usize..all.kv_indptr[row + 1] as usize;
        alone.kv_indices = all.kv_indices[pages].to_vec();
        alone.kv_indptr = vec![0, alone.kv_indices.len() as i32];
        alone.last = vec![all.last[row]];
        alone.q = all.q[token * 4 * 64..(token + q) * 4 * 64].to_vec();
        let (o, lse) = alone.on_device(stream, 0);
        let of = (
            together.0[token * 4 * 64..(token + q) * 4 * 64].to_vec(),
            together.1[token * 4..(token + q) * 4].to_vec(),
        );
        same(&(o, lse), &of, "its company");
        token += q;
    }
}

/// A small ragged batch, for tools that watch memory.
pub(crate) fn run_small<Q: Number>(
    stream: &Stream,
    shape: (usize, usize, usize, usize, usize),
    capped: bool,
) {
    let plain = Variant::causal(shape.2);
    let variant = if capped { Variant { logits_soft_cap: Some(3.0), alibi: true, ..plain } } else { plain };
    Batch::<Q>::new(shape, &[(1, 300), (19, 45), (1, 0), (1, 17)], variant).on_device(stream, 0);
}
