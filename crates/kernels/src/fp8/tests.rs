//! Codes, and what the scatter stores, against the oracle's numbers.

use half::{bf16, f16};

use super::*;
use crate::{Error, Stream, TensorMut, TensorRef, reference};

/// Needs the helpers of the device's own tests.
#[cfg(all(feature = "cuda", feature = "paged", feature = "dense", feature = "flex", feature = "dsa"))]
pub(crate) mod device;

#[test]
fn e4m3_codes_are_their_own_nearest_numbers_and_order_as_they_do() {
    for code in 0..=255u8 {
        let x = e4m3_to_f32(code);
        assert_eq!(x.is_nan(), code & 0x7f == 0x7f);
        assert_eq!(f32_to_e4m3(x), code, "{x}");
        assert!(x.is_nan() || bf16::from_f32(x).to_f32() == x, "exact in bf16");
    }
    assert_eq!((e4m3_to_f32(0x7e), e4m3_to_f32(0x01), e4m3_to_f32(0x08)), (448.0, 1.0 / 512.0, 1.0 / 64.0));
}

#[test]
fn rounding_is_to_nearest_even_and_saturates() {
    for code in 0..0x7eu8 {
        let (low, high) = (e4m3_to_f32(code), e4m3_to_f32(code + 1));
        let middle = (low + high) / 2.0;
        assert_eq!(f32_to_e4m3(middle), code + (code & 1), "{low} {high}");
        assert_eq!(f32_to_e4m3(middle.next_down()), code);
        assert_eq!(f32_to_e4m3(-middle.next_up()), 0x80 | (code + 1));
    }
    for huge in [449.0, 1e30, f32::INFINITY] {
        assert_eq!((f32_to_e4m3(huge), f32_to_e4m3(-huge)), (0x7e, 0xfe));
    }
    assert_eq!((f32_to_e4m3(0.0), f32_to_e4m3(-0.0), f32_to_e4m3(1e-40)), (0, 0x80, 0));
}

#[test]
fn codes_round_as_the_nearest_of_all_numbers_does() {
    // By search over all codes, in f64, on numbers of every exponent that matters and beyond.
    let mut x = 0x9e37_79b9u32;
    for _ in 0..40_000 {
        x = x.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        let value = f32::from_bits((x & 0x807f_ffff) | (0x70 + (x >> 24) % 0x20) << 23);
        let nearest = (0..0x7fu8)
            .min_by(|&a, &b| {
                let far = |code: u8| (reference::fp8::e4m3(code) - f64::from(value.abs())).abs();
                far(a).total_cmp(&far(b)).then((a & 1).cmp(&(b & 1)))
            })
            .unwrap();
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        assert_eq!(f32_to_e4m3(value), sign | nearest, "{value}");
    }
}

#[test]
fn the_oracle_reads_the_same_numbers() {
    for code in 0..=255u8 {
        let (a, b) = (f64::from(e4m3_to_f32(code)), reference::fp8::e4m3(code));
        assert!(a == b && a.is_sign_negative() == b.is_sign_negative() || a.is_nan() && b.is_nan());
    }
}

#[test]
fn the_oracle_keeps_of_a_row_what_the_scatter_stores() {
    for (seed, size) in [(1u32, 1f32), (7, 1e-3), (9, 3e4), (11, 0.0)] {
        let entries: Vec<f32> =
            (0..8 * 64).map(|i| size * ((i * seed) as f32 * 0.713).sin().powi(3)).collect();
        let (codes, scales) =
            heads(&[0, 1, 2, 3, 4, 5, 6, 7], TensorRef::from_slice(&entries, &[8, 1, 64]).unwrap());
        let stored = reference::fp8::heads(&codes, &scales, 64);
        let mut kept = entries;
        kept.chunks_mut(64).for_each(reference::fp8::kept);
        assert!(stored.iter().zip(&kept).all(|(&a, &b)| a as f32 == b));
    }
}

/// Codes and scales of `[T, G, D]` stored into `[2, 4, G, D]` at `slots`, from junk.
fn heads(slots: &[i64], entries: TensorRef<'_>) -> (Vec<u8>, Vec<f32>) {
    let (g, d) = (entries.shape()[1], entries.shape()[2]);
    let (mut codes, mut scales) = (vec![0x7fu8; 8 * g * d], vec![f32::NAN; 8 * g]);
    let to = TensorMut::from_slice(&mut codes, &[2, 4, g, d]).unwrap().as_codes().unwrap();
    let beside = TensorMut::from_slice(&mut scales, &[2, 4, g]).unwrap();
    let slots = TensorRef::from_slice(slots, &[slots.len()]).unwrap();
    store_heads(&Stream::cpu(), slots, entries, to, beside).unwrap();
    (codes, scales)
}

#[test]
fn a_row_comes_back_within_half_a_step_under_its_own_scale() {
    let (g, d) = (3, 40);
    let entries: Vec<f32> =
        (0..2 * g * d).map(|i| (i as f32 * 0.7).sin() * 10f32.powi((i / d) as i32 * 9 - 25)).collect();
    let half: Vec<bf16> = entries.iter().map(|&x| bf16::from_f32(x)).collect();
    let (codes, scales) = heads(&[6, 1], TensorRef::from_slice(&half, &[2, g, d]).unwrap());
    let got = reference::fp8::heads(&codes, &scales, d);
    for (token, slot) in [6usize, 1].into_iter().enumerate() {
        for head in 0..g {
            let row = &half[(token * g + head) * d..][..d];
            let largest = row.iter().fold(0f32, |a, x| a.max(x.to_f32().abs()));
            assert_eq!(scales[slot * g + head], (largest / 448.0).max(f32::MIN_POSITIVE));
            for (lane, x) in row.iter().enumerate() {
                let error = (got[(slot * g + head) * d + lane] - x.to_f64()).abs();
                let step = f64::from(scales[slot * g + head]) / 1024.0;
                assert!(error <= x.to_f64().abs() / 16.0 * 1.000_001 + step, "{x} under {largest}");
            }
        }
    }
    assert!(codes[..g * d].iter().all(|&code| code == 0x7f) && scales[..g].iter().all(|x| x.is_nan()));
}

#[test]
fn zeros_denormals_nan_infinities_outliers_and_huge_rows_are_as_documented() {
    let tiny = f32::from_bits(3);
    let rows = [
        [0.0, -0.0, 0.0, 0.0],
        [tiny, -tiny, 0.0, 0.0],
        [f32::NAN, 448.0, 1.0, -1.0],
        [f32::INFINITY, 1.0, 0.0, -2.0],
        [f32::NAN; 4],
        [f32::MAX, 1.0, -f32::MAX, 1e30],
        [1.0, 1e6, 0.5, -1e6],
    ];
    let (codes, scales) =
        heads(&[0, 1, 2, 3, 4, 5, 6], TensorRef::from_slice(rows.as_flattened(), &[7, 1, 4]).unwrap());
    let row = |i: usize| [0, 1, 2, 3].map(|d| e4m3_to_f32(codes[4 * i + d]) * scales[i]);
    assert_eq!((row(0), scales[0]), ([0.0; 4], 1.0));
    assert!(row(1).iter().all(|x| x.is_finite()) && scales[1] == f32::MIN_POSITIVE);
    assert!(row(2)[0].is_nan());
    assert_eq!(row(2)[1..], [448.0, 1.0, -1.0]);
    assert!(row(3).iter().all(|x| x.is_nan()));
    assert!(row(4).iter().all(|x| x.is_nan()) && scales[4] == 1.0);
    assert_eq!((codes[20], codes[22]), (0x7e, 0xfe));
    assert!(row(5).iter().all(|x| x.is_finite()));
    // An outlier takes small neighbours to zero: what a scale a row costs.
    assert_eq!((codes[24], codes[26]), (0, 0));
    assert!((row(6)[1] - 1e6).abs() < 1.0);
    // Padding is nowhere, and the slot that nobody wrote is as it was.
    assert!(codes[28..].iter().all(|&code| code == 0x7f));
}

#[test]
fn every_type_and_stride_stores_what_its_numbers_are() {
    let (t, g, d) = (3, 2, 20);
    let numbers: Vec<f32> =
        (0..t * 3 * g * d).map(|i| f16::from_f32((i as f32 * 0.37).cos() * 3.0).to_f32()).collect();
    let halves: Vec<f16> = numbers.iter().map(|&x| f16::from_f32(x)).collect();
    let shape = [t, 3, g, d];
    let wide = TensorRef::from_slice(&numbers, &shape).unwrap().select(1, 1).unwrap();
    let narrow = TensorRef::from_slice(&halves, &shape).unwrap().select(1, 1).unwrap();
    let slots = [3, -1, 4];
    let (a, b) = (heads(&slots, wide), heads(&slots, narrow));
    assert_eq!(a.0, b.0);
    assert!(a.1.iter().zip(&b.1).all(|(x, y)| x.to_bits() == y.to_bits()));
    assert_eq!(a.1.iter().filter(|x| !x.is_nan()).count(), 2 * g);
}

#[test]
fn f14_a_repeated_slot_keeps_the_last_token_and_its_scale_however_many_threads_store() {
    for (g, d) in [(1, 4), (8, 512)] {
        let entries: Vec<f32> = (0..64 * g * d).map(|i| (i / (g * d)) as f32 + 1.0).collect();
        let slots: Vec<i64> = (0..64).map(|t| t % 8).collect();
        let (codes, scales) = heads(&slots, TensorRef::from_slice(&entries, &[64, g, d]).unwrap());
        for slot in 0..8 {
            let last = (57 + slot) as f32;
            assert!(scales[slot * g..(slot + 1) * g].iter().all(|&x| x == last / 448.0));
        }
        assert!(codes.iter().all(|&code| code == 0x7e));
    }
}

#[test]
fn f14_what_does_not_fit_is_refused_and_nothing_is_written() {
    let entries = [1f32; 16];
    let mut codes = [0x11u8; 32];
    let mut scales = [9f32; 8];
    let mut refused = |slots: &[i64], entries: TensorRef<'_>, scale_shape: &[usize]| {
        let to = TensorMut::from_slice(&mut codes, &[2, 2, 2, 4]).unwrap().as_codes().unwrap();
        let beside = TensorMut::from_slice(&mut scales, scale_shape).unwrap();
        let slots = TensorRef::from_slice(slots, &[slots.len()]).unwrap();
        let said = store_heads(&Stream::cpu(), slots, entries, to, beside).unwrap_err();
        assert!(codes.iter().all(|&x| x == 0x11) && scales.iter().all(|&x| x == 9.0));
        said
    };
    let fits = TensorRef::from_slice(&entries, &[2, 2, 4]).unwrap();
    for bad in [4, -2, i64::MAX, i64::MIN] {
        let said = refused(&[0, bad], fits, &[2, 2, 2]);
        assert!(matches!(said, Error::Index { array: "slots", index: 1, got, .. } if got == bad), "{said}");
    }
    let said = refused(&[0, 1], fits, &[2, 4, 1]).to_string();
    assert!(said.contains("scales: expected shape [P, S, G] = [2, 2, 2]"), "{said}");
    assert!(matches!(refused(&[0], fits, &[2, 2, 2]), Error::Shape { tensor: "slots", .. }));
    let ints = [1i32; 16];
    let said = refused(&[0, 1], TensorRef::from_slice(&ints, &[2, 2, 4]).unwrap(), &[2, 2, 2]).to_string();
    assert!(said.contains("f32, bf16 or f16"), "{said}");
}

/// Latents of `[T, C]` and `[T, E]` stored into `[2, 2, B]` at `slots`.
fn latents(slots: &[i64], ckv: &[f32], kpe: &[f32], c: usize, e: usize) -> crate::Result<Vec<u8>> {
    let (t, bytes) = (slots.len(), latent_bytes(c, e));
    let mut cache = vec![0x7fu8; 4 * bytes];
    store_latents(
        &Stream::cpu(),
        TensorRef::from_slice(slots, &[t])?,
        TensorRef::from_slice(ckv, &[t, c])?,
        TensorRef::from_slice(kpe, &[t, e])?,
        TensorMut::from_slice(&mut cache, &[2, 2, bytes])?,
    )?;
    Ok(cache)
}

#[test]
fn a_latent_has_a_scale_for_each_128_lanes_and_rotary_lanes_in_bf16() {
    assert_eq!(latent_bytes(512, 64), 656);
    for (c, e) in [(512, 64), (512, 0), (256, 32), (4, 2), (132, 6), (64, 16)] {
        let ckv: Vec<f32> =
            (0..3 * c).map(|i| (i as f32 * 0.9).sin() * 100f32.powi((i / 128 % 5) as i32 - 2)).collect();
        let kpe: Vec<f32> = (0..3 * e).map(|i| (i as f32).cos() * 1e4).collect();
        let cache = latents(&[3, -1, 0], &ckv, &kpe, c, e).unwrap();
        let numbers = reference::fp8::latents(&cache, c, e);
        let bytes = latent_bytes(c, e);
        for (token, slot) in [(0usize, 3usize), (2, 0)] {
            let got = &numbers[slot * (c + e)..][..c + e];
            for lane in 0..c {
                let group = lane / 128 * 128..((lane / 128 + 1) * 128).min(c);
                let row = &ckv[token * c..][..c];
                let largest = row[group].iter().fold(0f32, |a, x| a.max(x.abs()));
                let error = (got[lane] - f64::from(row[lane])).abs();
                let bound =
                    f64::from(row[lane].abs()) / 16.0 * 1.000_001 + f64::from(largest) / 448.0 / 1024.0;
                assert!(error <= bound, "lane {lane} of {c}: {error} over {bound}");
            }
            for lane in 0..e {
                assert_eq!(got[c + lane], bf16::from_f32(kpe[token * e + lane]).to_f64());
            }
            for (lane, &want) in got.iter().enumerate() {
                let stored = &cache[slot * bytes..][..bytes];
                let f32_of = dequantise_latent(stored, c, lane);
                assert!((f64::from(f32_of) - want).abs() <= want.abs() * 1e-7);
            }
        }
        assert!(cache[bytes..3 * bytes].iter().all(|&x| x == 0x7f), "nobody wrote these");
    }
}

#[test]
fn latents_whose_scales_would_not_be_aligned_are_refused() {
    for (c, e, name) in [(510, 64, "kv_lora_rank"), (512, 3, "qk_rope_head_dim")] {
        let said = latents(&[0], &vec![1.0; c], &vec![1.0; e], c, e).unwrap_err().to_string();
        assert!(said.starts_with(name), "{said}");
    }
    let said = latents(&[4], &[1.0; 4], &[1.0; 2], 4, 2).unwrap_err();
    assert!(matches!(said, Error::Index { array: "slots", index: 0, got: 4, .. }), "{said}");
}
