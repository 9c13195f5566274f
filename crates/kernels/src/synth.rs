//! Synthetic queries, keys and values that any row can be rebuilt from.
//!
//! An element is a pure function of (seed, kind, layer, content key of the position, head, lane): integer
//! hashing alone, no transcendental, so every device produces the same bits. A position's *content key*
//! chains the content up to it ([`chain`]): two requests with the same prefix have the same keys there and
//! the same K and V, and a fork diverges where its content does. Whoever knows a request's content can
//! therefore recompute any entry of any page, without the page table.
//!
//! **The values** are `± 1.m * 2^e` with a 7-bit mantissa and `e` 0, -1, -2 or -3 with weights 4, 2, 1, 1:
//! all but uniform on (-2, 2), with a floating-point number's resolution near 0. Why so:
//! - every value is exact in bf16 and in f16, and none is 0, infinite or subnormal;
//! - its variance is 1.33, so with `sm_scale = D^-0.5` scores have a standard deviation near 1.33 whatever
//!   `D`: over `n` keys the softmax weighs about `n / 6` of them. It is neither uniform (a mask or page
//!   error would only move a mean) nor one-hot (it would only show at one key), and since values have mean
//!   0 an output's norm shrinks as its error from one wrong key does: the *relative* error stays near
//!   `sqrt(6 / n)`, far above rounding;
//! - the spread of exponents makes long products inexact in f32, so the order of additions shows in the
//!   bits, as it does in a real model: a test of batch invariance would not see it over a coarse grid.

use half::{bf16, f16};

use crate::{DType, Element, Error, Result, Stream, TensorMut, TensorRef};

/// What an array holds; each kind draws from its own stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
#[non_exhaustive]
pub enum Kind {
    /// Queries.
    Query = 1,
    /// Keys.
    Key = 2,
    /// Values.
    Value = 3,
    /// MLA latents, `[ckv | kpe]`.
    Latent = 4,
    /// The indexer's queries (DSA).
    IndexQuery = 5,
    /// The indexer's keys (DSA).
    IndexKey = 6,
    /// The indexer's head weights (DSA).
    IndexWeight = 7,
}

/// The content key before a stream's first token.
pub const ROOT: u64 = 0;

/// The content key of a position: the key before it, and what its token is. Chained over a request's
/// tokens it names the whole content up to each. Not cryptographic: it names synthetic content, and
/// decides nothing about sharing.
pub const fn chain(prev_key: u64, token_content: u64) -> u64 {
    mix(prev_key.rotate_left(23).wrapping_mul(0xd6e8_feb8_6659_fd93)
        ^ mix(token_content.wrapping_add(GOLDEN)))
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection that spreads every bit.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The state that a (seed, kind, layer) starts from.
const fn stem(seed: u64, kind: Kind, layer: usize) -> u64 {
    mix(mix(seed.wrapping_add(GOLDEN)) ^ ((layer as u64) << 8 | kind as u64).wrapping_mul(GOLDEN))
}

/// The state of one (position, head).
const fn state(stem: u64, key: u64, head: usize) -> u64 {
    mix(mix(stem ^ key).wrapping_add((head as u64 + 1).wrapping_mul(GOLDEN)))
}

/// 32 bits for the lanes `2 * pair` and `2 * pair + 1` (Ellis's `lowbias32` over a Weyl sequence): 32-bit
/// multiplies and shifts alone, which vectorise.
#[inline(always)]
const fn word(state: u64, pair: u32) -> u32 {
    let mut x = (state as u32).wrapping_add(pair.wrapping_mul(0x9e37_79b9));
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d) ^ (state >> 32) as u32;
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// The bits of a bf16 from 11 bits of hash: sign, 7 of mantissa, 3 that choose the exponent.
#[inline(always)]
const fn value_bits(hash: u32) -> u16 {
    let (sign, mantissa, choice) = (hash & 0x8000, hash & 0x7f, (hash >> 7) & 7);
    // Bits set below the lowest clear one: 0 for xx0, 1 for x01, 2 for 011, 3 for 111.
    let down = (choice & 1) + ((choice & 3) == 3) as u32 + (choice == 7) as u32;
    (sign | ((127 - down) << 7) | mantissa) as u16
}

/// A scalar type that the synthetic values are exact in.
pub trait Exact: Element {
    /// The value of these bf16 bits.
    fn from_bf16_bits(bits: u16) -> Self;
}

impl Exact for bf16 {
    #[inline(always)]
    fn from_bf16_bits(bits: u16) -> Self {
        bf16::from_bits(bits)
    }
}

impl Exact for f32 {
    #[inline(always)]
    fn from_bf16_bits(bits: u16) -> Self {
        f32::from_bits(u32::from(bits) << 16)
    }
}

impl Exact for f16 {
    #[inline(always)]
    fn from_bf16_bits(bits: u16) -> Self {
        // Exponents here are 124..=127: in range of f16, whose bias is 112 lower.
        f16::from_bits((bits & 0x8000) | (((bits & 0x7fff) << 3).wrapping_sub(112 << 10)))
    }
}

/// One element, as [`fill`] writes it.
pub const fn element(seed: u64, kind: Kind, layer: usize, key: u64, head: usize, lane: usize) -> f32 {
    let word = word(state(stem(seed, kind, layer), key, head), (lane / 2) as u32);
    let bits = value_bits(word >> (16 * (lane as u32 & 1)));
    f32::from_bits((bits as u32) << 16)
}

/// One head's lanes at one position, `[D]`.
pub fn fill_lanes<T: Exact>(seed: u64, kind: Kind, layer: usize, key: u64, head: usize, out: &mut [T]) {
    lanes(state(stem(seed, kind, layer), key, head), out);
}

fn lanes<T: Exact>(state: u64, out: &mut [T]) {
    let last_pair = (out.len() / 2) as u32;
    let mut pairs = out.chunks_exact_mut(2);
    for (pair, lanes) in (&mut pairs).enumerate() {
        let word = word(state, pair as u32);
        lanes[0] = T::from_bf16_bits(value_bits(word));
        lanes[1] = T::from_bf16_bits(value_bits(word >> 16));
    }
    if let [last] = pairs.into_remainder() {
        *last = T::from_bf16_bits(value_bits(word(state, last_pair)));
    }
}

/// Fills `out` `[T, heads, D]` (or `[T, D]`, one head), f32, bf16 or f16, with the entries of the positions
/// whose content keys are `keys` `[T]`. Any stride but the innermost is free. One thread: a caller who wants
/// more splits `keys` and `out` alike.
///
/// # Errors
/// [`Error::Shape`], [`Error::DTypeMismatch`] or [`Error::Layout`] when `out` is not so; nothing is written.
pub fn fill(seed: u64, kind: Kind, layer: usize, keys: &[u64], out: &mut TensorMut<'_>) -> Result<()> {
    let shape = out.shape().to_vec();
    if !matches!(shape.len(), 2 | 3) || shape[0] != keys.len() {
        let expected = format!("[T, heads, D] or [T, D] with T = {}, the keys given", keys.len());
        return Err(Error::Shape { tensor: "out", expected, got: shape });
    }
    if !out.inner_contiguous() || out.device() != crate::Device::Cpu {
        let any: Vec<Option<usize>> = vec![None; shape.len()];
        return out.expect("out", "[T, heads, D]", &any, None, crate::Device::Cpu);
    }
    let stem = stem(seed, kind, layer);
    match out.dtype() {
        DType::F32 => fill_typed::<f32>(stem, keys, out),
        DType::Bf16 => fill_typed::<bf16>(stem, keys, out),
        DType::F16 => fill_typed::<f16>(stem, keys, out),
        got => Err(Error::DTypeMismatch { tensor: "out", expected: "f32, bf16 or f16".into(), got }),
    }
}

/// As [`fill`], by keys that lie on the stream's device as the bits of `[T]` i64, contiguous; `out` lies there too. The bits are the
/// same on every device.
///
/// # Errors
/// As [`fill`]; keys or `out` on another device than the stream's.
pub fn fill_at(
    stream: &Stream,
    seed: u64,
    kind: Kind,
    layer: usize,
    keys: TensorRef<'_>,
    out: &mut TensorMut<'_>,
) -> Result<()> {
    let device = crate::device::supported("synthetic values", stream)?;
    let shape = out.shape();
    if !matches!(shape.len(), 2 | 3) {
        return Err(Error::Shape {
            tensor: "out",
            expected: "[T, heads, D] or [T, D]".into(),
            got: shape.to_vec(),
        });
    }
    keys.expect("keys", "[T]", &[Some(shape[0])], Some(DType::I64), device)?;
    if let Some(keys) = keys.as_slice::<i64>() {
        return fill(seed, kind, layer, bytemuck::cast_slice(keys), out);
    }
    let extents = [None; 3];
    out.expect("out", "[T, heads, D]", &extents[..out.rank()], None, device)?;
    if !out.dtype().is_float() {
        let expected = "f32, bf16 or f16".into();
        return Err(Error::DTypeMismatch { tensor: "out", expected, got: out.dtype() });
    }
    crate::cpu::tokens::apart("out", out)?;
    if !keys.is_contiguous() {
        let (shape, strides) = (keys.shape().to_vec(), keys.strides().to_vec());
        return Err(Error::Layout { tensor: "keys", shape, strides });
    }
    #[cfg(feature = "cuda")]
    return crate::cuda::synth::fill(stream, stem(seed, kind, layer), &keys, out);
    #[cfg(not(feature = "cuda"))]
    Err(Error::Unsupported {
        operation: "synthetic values",
        device,
        why: "this build is without CUDA".into(),
    })
}

fn fill_typed<T: Exact>(stem: u64, keys: &[u64], out: &mut TensorMut<'_>) -> Result<()> {
    let (heads, width) = match *out.shape() {
        [_, heads, width] => (heads, width),
        _ => (1, out.shape()[1]),
    };
    if heads == 0 || width == 0 {
        return Ok(());
    }
    if let Some(all) = out.as_mut_slice::<T>() {
        for (key, token) in keys.iter().zip(all.chunks_exact_mut(heads * width)) {
            for (head, out) in token.chunks_exact_mut(width).enumerate() {
                lanes(state(stem, *key, head), out);
            }
        }
        return Ok(());
    }
    let ranked = out.rank() == 3;
    for (t, &key) in keys.iter().enumerate() {
        for head in 0..heads {
            let token = out.reborrow().select(0, t)?;
            let mut row = if ranked { token.select(0, head)? } else { token };
            let row =
                row.as_mut_slice::<T>().expect("the innermost axis is contiguous and the dtype was matched");
            lanes(state(stem, key, head), row);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(n: usize) -> Vec<f32> {
        let mut out = vec![0f32; n * 64];
        for (t, row) in out.chunks_exact_mut(64).enumerate() {
            fill_lanes(7, Kind::Key, 3, chain(ROOT, t as u64), 1, row);
        }
        out
    }

    #[test]
    fn an_array_and_its_elements_agree_in_every_dtype_and_layout() {
        let keys: Vec<u64> = (0..5).map(|t| chain(ROOT, t)).collect();
        let want = |t: usize, h: usize, lane: usize| element(9, Kind::Value, 2, keys[t], h, lane);
        for width in [1usize, 2, 7, 64] {
            let mut wide = vec![0f32; 5 * 3 * width * 2];
            let strides = [3 * width * 2, width * 2, 1];
            let mut view = TensorMut::from_slice_strided(&mut wide, &[5, 3, width], &strides).unwrap();
            fill(9, Kind::Value, 2, &keys, &mut view).unwrap();
            let (mut b, mut h) = (vec![bf16::ZERO; 15 * width], vec![f16::ZERO; 15 * width]);
            let shape = [5, 3, width];
            fill(9, Kind::Value, 2, &keys, &mut TensorMut::from_slice(&mut b, &shape).unwrap()).unwrap();
            fill(9, Kind::Value, 2, &keys, &mut TensorMut::from_slice(&mut h, &shape).unwrap()).unwrap();
            for (t, head, lane) in (0..5 * 3 * width).map(|i| (i / (3 * width), i / width % 3, i % width)) {
                let want = want(t, head, lane);
                let at = (t * 3 + head) * width + lane;
                assert_eq!(wide[t * strides[0] + head * strides[1] + lane], want);
                assert_eq!((b[at].to_f32(), h[at].to_f32()), (want, want));
            }
        }
    }

    #[test]
    fn values_are_exact_and_spread_as_the_module_says() {
        let values = sample(4096);
        assert!(values.iter().all(|&x| bf16::from_f32(x).to_f32() == x && f16::from_f32(x).to_f32() == x));
        assert!(values.iter().all(|x| (0.125..2.0).contains(&x.abs())));
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance - 1.33).abs() < 0.02, "{variance}");
    }

    #[test]
    fn scores_are_neither_uniform_nor_one_hot() {
        let (d, n) = (64, 512);
        let mut q = vec![0f32; d];
        fill_lanes(7, Kind::Query, 3, chain(ROOT, 511), 0, &mut q);
        let keys = sample(n);
        let score = |k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(a * b)).sum::<f64>() / 8.0;
        let weights: Vec<f64> = keys.chunks_exact(d).map(|k| score(k).exp()).collect();
        let total: f64 = weights.iter().sum();
        let effective = 1.0 / weights.iter().map(|w| (w / total).powi(2)).sum::<f64>();
        assert!(effective > 0.03 * n as f64 && effective < 0.5 * n as f64, "{effective} of {n} keys");
    }

    #[test]
    fn every_argument_changes_the_value() {
        let key = chain(chain(ROOT, 5), 6);
        let row = |seed, kind, layer, key, head| {
            let mut out = [0f32; 32];
            fill_lanes(seed, kind, layer, key, head, &mut out);
            out
        };
        let base = row(1, Kind::Key, 0, key, 0);
        let others = [
            row(2, Kind::Key, 0, key, 0),
            row(1, Kind::Value, 0, key, 0),
            row(1, Kind::Key, 1, key, 0),
            row(1, Kind::Key, 0, chain(chain(ROOT, 6), 5), 0),
            row(1, Kind::Key, 0, key, 1),
        ];
        for other in others {
            let same = base.iter().zip(other).filter(|(a, b)| **a == *b).count();
            assert!(same <= 3, "{same} of 32 lanes are equal");
        }
    }

    #[test]
    fn keys_chain_content_and_forks_diverge() {
        let run = |tokens: &[u64]| tokens.iter().fold(ROOT, |key, &token| chain(key, token));
        assert_eq!(run(&[1, 2, 3]), run(&[1, 2, 3]));
        assert_ne!(run(&[1, 2, 3]), run(&[1, 3, 2]));
        assert_ne!(run(&[1, 2]), run(&[1, 2, 0]));
        assert_ne!(run(&[0]), run(&[0, 0]));
        let mut all: Vec<u64> = (0..100_000).map(|t| chain(chain(ROOT, t / 300), t % 300)).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 100_000);
    }

    #[test]
    fn fixed_bits_hold_across_versions() {
        // Recorded from this implementation: a report's seed must mean the same run for ever.
        let got: Vec<f32> = (0..4).map(|lane| element(7, Kind::Query, 1, chain(ROOT, 42), 3, lane)).collect();
        assert_eq!(got, FIXED);
    }
    const FIXED: [f32; 4] = [0.72265625, 0.25390625, -1.4140625, 1.5390625];

    #[test]
    fn other_shapes_and_dtypes_are_refused() {
        let mut data = [0f32; 8];
        let mut view = TensorMut::from_slice(&mut data, &[2, 4]).unwrap();
        assert!(matches!(fill(0, Kind::Key, 0, &[1], &mut view), Err(Error::Shape { .. })));
        assert!(fill(0, Kind::Key, 0, &[1, 2], &mut view).is_ok());
        let mut turned = TensorMut::from_slice(&mut data, &[2, 4]).unwrap().transpose(0, 1);
        assert!(matches!(fill(0, Kind::Key, 0, &[1; 4], &mut turned), Err(Error::Layout { .. })));
        let mut ints = [0i32; 4];
        let mut view = TensorMut::from_slice(&mut ints, &[1, 4]).unwrap();
        assert!(matches!(fill(0, Kind::Key, 0, &[1], &mut view), Err(Error::DTypeMismatch { .. })));
    }
}
