//! What a device stores has the bits of what the CPU stores.

use super::*;
use crate::Element;
use crate::cuda::trials::memory::{put, take, take_all};
use crate::cuda::trials::stream;
use crate::testing::noise;

/// Numbers of every kind: ordinary ones of rows far apart, zeros, the smallest, the largest, NaN of either sign, infinities.
fn numbers<T: Element>(rows: usize, width: usize, of: impl Fn(f32) -> T) -> Vec<T> {
    let mut all: Vec<f32> = (0..rows * width)
        .map(|at| noise(&[at as u64, 3]) * 10f32.powi((at / width) as i32 % 12 - 6))
        .collect();
    let row = |at: usize| at * width..(at + 1) * width;
    all[row(0)].fill(0.0);
    all[0] = -0.0;
    (all[width], all[width + 1]) = (f32::NAN, -f32::NAN);
    (all[2 * width], all[2 * width + 1]) = (f32::INFINITY, f32::NEG_INFINITY);
    all[row(3)].fill(1e-42);
    all[row(4)].fill(-3e38);
    all[row(5)].fill(f32::NAN);
    all[6 * width] = 65504.0;
    all.into_iter().map(of).collect()
}

fn heads_of<T: Element>(of: impl Fn(f32) -> T) {
    let Some(own) = stream("heads_as_codes") else { return };
    let stream = &own.stream();
    for (g, d) in [(1, 4), (3, 40), (2, 128), (1, 33)] {
        let t = 9;
        // Of entries three wide the middle one, so that tokens lie apart.
        let entries = numbers(t * 3 * g, d, &of);
        let slots: [i64; 9] = [6, 1, -1, 4, 5, 0, 7, 2, -1];
        let (codes, scales) =
            heads(&slots, TensorRef::from_slice(&entries, &[t, 3, g, d]).unwrap().select(1, 1).unwrap());
        let from = put(stream, bytemuck::cast_slice(&entries));
        let from = from.tensor(0, T::DTYPE, &[t, 3, g, d]).unwrap();
        let on_slots = put(stream, bytemuck::cast_slice(&slots));
        let (mut to, mut beside) = (put(stream, &vec![0x7f; 8 * g * d]), put(stream, &vec![0xff; 8 * g * 4]));
        store_heads(
            stream,
            on_slots.tensor(0, DType::I64, &[t]).unwrap(),
            from.select(1, 1).unwrap(),
            to.tensor_mut(0, DType::E4m3, &[2, 4, g, d]).unwrap(),
            beside.tensor_mut(0, DType::F32, &[2, 4, g]).unwrap(),
        )
        .unwrap();
        assert_eq!(take(stream, &to, 8 * g * d), codes, "{g} heads of {d}");
        let got: Vec<u32> = take_all(stream, &beside, 8 * g);
        for (at, (&got, want)) in got.iter().zip(&scales).enumerate() {
            let same = got == want.to_bits() || f32::from_bits(got).is_nan() && want.is_nan();
            assert!(same, "scale {at} of {g} heads of {d}: {} for {want}", f32::from_bits(got));
        }
        // At once with another side of another width.
        let others = numbers(t * g, d + 3, &of);
        let (other_codes, other_scales) =
            heads(&slots, TensorRef::from_slice(&others, &[t, g, d + 3]).unwrap());
        let other = put(stream, bytemuck::cast_slice(&others));
        let mut pools =
            [d, d + 3].map(|d| (put(stream, &vec![0x7f; 8 * g * d]), put(stream, &vec![0xff; 8 * g * 4])));
        let [first, second] = &mut pools;
        let both = [
            HeadsInCodes {
                entries: from.select(1, 1).unwrap(),
                codes: first.0.tensor_mut(0, DType::E4m3, &[2, 4, g, d]).unwrap(),
                scales: first.1.tensor_mut(0, DType::F32, &[2, 4, g]).unwrap(),
            },
            HeadsInCodes {
                entries: other.tensor(0, T::DTYPE, &[t, g, d + 3]).unwrap(),
                codes: second.0.tensor_mut(0, DType::E4m3, &[2, 4, g, d + 3]).unwrap(),
                scales: second.1.tensor_mut(0, DType::F32, &[2, 4, g]).unwrap(),
            },
        ];
        store_both_heads(stream, on_slots.tensor(0, DType::I64, &[t]).unwrap(), both).unwrap();
        for ((codes, scales), (want, of)) in
            pools.iter().zip([(&codes, &scales), (&other_codes, &other_scales)])
        {
            assert_eq!(take(stream, codes, want.len()), *want, "{g} heads of {d}, both");
            let got: Vec<u32> = take_all(stream, scales, 8 * g);
            let same = |(got, want): (&u32, &f32)| {
                *got == want.to_bits() || f32::from_bits(*got).is_nan() && want.is_nan()
            };
            assert!(got.iter().zip(of).all(same), "scales of {g} heads of {d}, both");
        }
    }
}

#[test]
fn keys_and_values_of_every_type_are_stored_on_a_device_to_the_bit() {
    heads_of(|x| x);
    heads_of(bf16::from_f32);
    heads_of(f16::from_f32);
}

fn latents_of<T: Element>(of: impl Fn(f32) -> T) {
    let Some(own) = stream("latents_as_codes") else { return };
    let stream = &own.stream();
    for (c, e) in [(512, 64), (132, 6), (64, 0), (4, 2)] {
        let t = 9;
        let entries = numbers(t, c + e, &of);
        let slots: [i64; 9] = [3, 5, 0, -1, 7, 1, 2, 6, -1];
        let bytes = latent_bytes(c, e);
        let all = TensorRef::from_slice(&entries, &[t, c + e]).unwrap();
        let mut wanted = vec![0x7fu8; 8 * bytes];
        store_latents(
            &Stream::cpu(),
            TensorRef::from_slice(&slots, &[t]).unwrap(),
            all.narrow(1, 0, c).unwrap(),
            all.narrow(1, c, e).unwrap(),
            TensorMut::from_slice(&mut wanted, &[2, 4, bytes]).unwrap(),
        )
        .unwrap();
        let from = put(stream, bytemuck::cast_slice(&entries));
        let from = from.tensor(0, T::DTYPE, &[t, c + e]).unwrap();
        let on_slots = put(stream, bytemuck::cast_slice(&slots));
        let mut to = put(stream, &vec![0x7f; 8 * bytes]);
        store_latents(
            stream,
            on_slots.tensor(0, DType::I64, &[t]).unwrap(),
            from.narrow(1, 0, c).unwrap(),
            from.narrow(1, c, e).unwrap(),
            to.tensor_mut(0, DType::U8, &[2, 4, bytes]).unwrap(),
        )
        .unwrap();
        let got = take(stream, &to, 8 * bytes);
        let first = got.iter().zip(&wanted).position(|(a, b)| a != b);
        assert_eq!(
            first,
            None,
            "{c} + {e}: byte {:?} of token {:?}",
            first.map(|at| at % bytes),
            first.map(|at| at / bytes)
        );
    }
}

#[test]
fn latents_of_every_type_are_stored_on_a_device_to_the_bit() {
    latents_of(|x| x);
    latents_of(bf16::from_f32);
    latents_of(f16::from_f32);
}

#[test]
fn f14_a_slot_out_of_range_writes_nothing_on_a_device() {
    let Some(own) = stream("a_slot_out_of_range") else { return };
    let stream = &own.stream();
    let entries = [1f32; 6 * 8];
    let slots = [4i64, -2, i64::MAX, i64::MIN, -1, 1];
    let (from, slots) =
        (put(stream, bytemuck::cast_slice(&entries)), put(stream, bytemuck::cast_slice(&slots)));
    let (mut to, mut beside) = (put(stream, &[0x11; 4 * 8]), put(stream, &[0x11; 4 * 2 * 4]));
    store_heads(
        stream,
        slots.tensor(0, DType::I64, &[6]).unwrap(),
        from.tensor(0, DType::F32, &[6, 2, 4]).unwrap(),
        to.tensor_mut(0, DType::E4m3, &[2, 2, 2, 4]).unwrap(),
        beside.tensor_mut(0, DType::F32, &[2, 2, 2]).unwrap(),
    )
    .unwrap();
    let mut wanted = [0x11u8; 32];
    wanted[8..16].fill(0x7e);
    assert_eq!(take(stream, &to, 32), wanted);
    let mut wanted = [0x11u8; 32];
    wanted[8..12].copy_from_slice(&(1f32 / 448.0).to_ne_bytes());
    wanted[12..16].copy_from_slice(&(1f32 / 448.0).to_ne_bytes());
    assert_eq!(take(stream, &beside, 32), wanted);
}

/// A few tokens, for tools that watch memory.
pub(crate) fn run_small(stream: &Stream, latents: bool) {
    let numbers = vec![1.5f32; 3 * 2 * 132];
    let (from, slots) =
        (put(stream, bytemuck::cast_slice(&numbers)), put(stream, bytemuck::cast_slice(&[3i64, -1, 0])));
    let slots = slots.tensor(0, DType::I64, &[3]).unwrap();
    if latents {
        let bytes = latent_bytes(132, 6);
        let from = from.tensor(0, DType::F32, &[3, 138]).unwrap();
        let mut to = put(stream, &vec![0xff; 4 * bytes]);
        let to = to.tensor_mut(0, DType::U8, &[2, 2, bytes]).unwrap();
        return store_latents(
            stream,
            slots,
            from.narrow(1, 0, 132).unwrap(),
            from.narrow(1, 132, 6).unwrap(),
            to,
        )
        .unwrap();
    }
    let from = from.tensor(0, DType::F32, &[3, 2, 132]).unwrap();
    let (mut to, mut beside) = (put(stream, &[0xff; 4 * 2 * 132]), put(stream, &[0xff; 4 * 2 * 4]));
    let to = to.tensor_mut(0, DType::E4m3, &[2, 2, 2, 132]).unwrap();
    store_heads(stream, slots, from, to, beside.tensor_mut(0, DType::F32, &[2, 2, 2]).unwrap()).unwrap();
}
