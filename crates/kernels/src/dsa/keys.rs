//! How index keys are stored.

use half::{bf16, f16};

use crate::cpu::tokens::apart;
use crate::fp8::{e4m3_to_f32, f32_to_e4m3, float, scale_of};
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

/// How a token's index key lies in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyFormat {
    /// `Di` f32.
    F32,
    /// `Di` bf16.
    Bf16,
    /// `Di` f16.
    F16,
    /// `Di` e4m3 bytes, then the key's scale as an f32 in the machine's byte order, as DeepSeek stores them
    /// (`[128 e4m3 | f32]`): lane `d` is `scale * e4m3[d]`. `Di` is a multiple of 4, and the scale is not negative: it
    /// multiplies the score, behind the relu.
    Fp8,
}

impl KeyFormat {
    /// Type of a slot's elements.
    pub const fn dtype(self) -> DType {
        match self {
            KeyFormat::F32 => DType::F32,
            KeyFormat::Bf16 => DType::Bf16,
            KeyFormat::F16 => DType::F16,
            KeyFormat::Fp8 => DType::U8,
        }
    }

    /// Elements of a slot for keys of width `index_head_dim`.
    pub const fn width(self, index_head_dim: usize) -> usize {
        match self {
            KeyFormat::Fp8 => index_head_dim.saturating_add(4),
            _ => index_head_dim,
        }
    }

    /// Bytes of a slot.
    pub const fn bytes(self, index_head_dim: usize) -> usize {
        self.width(index_head_dim) * self.dtype().size()
    }

    /// The format that stores keys of a dtype as they are.
    pub const fn of(dtype: DType) -> Option<KeyFormat> {
        match dtype {
            DType::F32 => Some(KeyFormat::F32),
            DType::Bf16 => Some(KeyFormat::Bf16),
            DType::F16 => Some(KeyFormat::F16),
            _ => None,
        }
    }

    /// Refuses a width `Di` that the format cannot hold.
    ///
    /// # Errors
    /// [`Error::Parameter`] of `index_head_dim`: 0 lanes, or in fp8 no multiple of 4.
    pub fn check(self, index_head_dim: usize) -> Result<()> {
        if index_head_dim == 0 {
            let why = "an index key has at least 1 lane".into();
            return Err(Error::Parameter { name: "index_head_dim", why, got: "0".into() });
        }
        if self == KeyFormat::Fp8 && !index_head_dim.is_multiple_of(4) {
            let why = "fp8 keys have a multiple of 4 lanes, so that the scale behind them is aligned".into();
            return Err(Error::Parameter { name: "index_head_dim", why, got: index_head_dim.to_string() });
        }
        Ok(())
    }
}

/// Lane `lane` of an fp8 key of `index_head_dim` lanes in its stored form, `[Di e4m3 | f32 scale]`.
///
/// # Panics
/// When `stored` is shorter than that.
pub fn dequantise_key(stored: &[u8], index_head_dim: usize, lane: usize) -> f32 {
    let scale: [u8; 4] = stored[index_head_dim..][..4].try_into().expect("four bytes");
    e4m3_to_f32(stored[..index_head_dim][lane]) * f32::from_ne_bytes(scale)
}

/// Stores keys `[T, Di]` (f32, bf16 or f16; any outer stride) as fp8, `[T, Di + 4]` u8: `[Di e4m3 | f32 scale]`.
///
/// A key's scale is its largest magnitude over 448, so that nothing saturates; 1 for a key of zeros, and never
/// below the smallest normal f32. A lane is rounded to the nearest e4m3 of `lane / scale`, ties to even. NaN lanes
/// stay NaN and do not count towards the scale; a key with an infinity has scale `inf`, 0 where it was finite and NaN
/// where it was not: it scores NaN and is never picked.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit; `Di` that is 0 or no multiple of 4. Nothing is then written.
pub fn quantise_keys(keys: TensorRef<'_>, mut out: TensorMut<'_>) -> Result<()> {
    check_quantise(&keys, &out, Device::Cpu)?;
    let (tokens, di, width) = (keys.shape()[0], keys.shape()[1], out.shape()[1]);
    let (from_stride, to_stride) = (keys.strides()[0] * keys.dtype().size(), out.strides()[0]);
    let (from, to) = (keys.as_ptr(), out.as_mut_ptr());
    for token in 0..tokens {
        let row = from.wrapping_add(token * from_stride);
        // SAFETY: `expect` found `[T, Di]` with contiguous lanes; `lane` stays below `Di`.
        let lane = |lane: usize| unsafe { float(keys.dtype(), row, lane) };
        // `max` passes over NaN.
        let largest = (0..di).map(|d| lane(d).abs()).fold(0f32, f32::max);
        let scale = scale_of(largest);
        // SAFETY: row `token` of `out` has `Di + 4` contiguous bytes, and `&mut` makes them ours.
        let stored = unsafe { std::slice::from_raw_parts_mut(to.wrapping_add(token * to_stride), width) };
        for (d, code) in stored[..di].iter_mut().enumerate() {
            *code = f32_to_e4m3(lane(d) / scale);
        }
        stored[di..].copy_from_slice(&scale.to_ne_bytes());
    }
    Ok(())
}

fn check_quantise(keys: &TensorRef<'_>, out: &TensorMut<'_>, device: Device) -> Result<()> {
    keys.expect("keys", "[T, Di]", &[None, None], None, device)?;
    let (tokens, di) = (keys.shape()[0], keys.shape()[1]);
    KeyFormat::Fp8.check(di)?;
    let width = KeyFormat::Fp8.width(di);
    out.expect("out", "[T, Di + 4]", &[Some(tokens), Some(width)], Some(DType::U8), device)?;
    apart("out", out)?;
    if !keys.dtype().is_float() {
        let expected = "f32, bf16 or f16".into();
        return Err(Error::DTypeMismatch { tensor: "keys", expected, got: keys.dtype() });
    }
    Ok(())
}

/// Stores keys `[T, Di]` (f32, bf16 or f16; any outer stride) in a format, `[T, W]`, in stream order on the stream's device: of
/// another float type rounded to the nearest, ties to even, where a NaN stays one; as fp8 the bytes of [`quantise_keys`].
///
/// # Errors
/// As [`quantise_keys`]; a device without a kernel.
pub fn store_keys_at(
    stream: &Stream,
    keys: TensorRef<'_>,
    format: KeyFormat,
    mut out: TensorMut<'_>,
) -> Result<()> {
    let device = crate::device::supported("storing index keys", stream)?;
    if format == KeyFormat::Fp8 {
        check_quantise(&keys, &out, device)?;
    } else {
        keys.expect("keys", "[T, Di]", &[None, None], None, device)?;
        let shape = [Some(keys.shape()[0]), Some(keys.shape()[1])];
        out.expect("out", "[T, W]", &shape, Some(format.dtype()), device)?;
        apart("out", &out)?;
        if !keys.dtype().is_float() {
            let expected = "f32, bf16 or f16".into();
            return Err(Error::DTypeMismatch { tensor: "keys", expected, got: keys.dtype() });
        }
    }
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::store_keys(stream, keys, format, &mut out);
    }
    if format == KeyFormat::Fp8 {
        return quantise_keys(keys, out);
    }
    let (from_stride, to_stride) = (keys.strides()[0] * keys.dtype().size(), out.strides()[0]);
    let (from, to) = (keys.as_ptr(), out.as_mut_ptr());
    for token in 0..keys.shape()[0] {
        for lane in 0..keys.shape()[1] {
            let at = token * to_stride + lane;
            // SAFETY: `expect` found both `[T, Di]` with contiguous lanes, and `&mut` makes `out` ours.
            unsafe {
                let x = float(keys.dtype(), from.wrapping_add(token * from_stride), lane);
                match format {
                    KeyFormat::Bf16 => to.cast::<bf16>().wrapping_add(at).write(bf16::from_f32(x)),
                    KeyFormat::F16 => to.cast::<f16>().wrapping_add(at).write(f16::from_f32(x)),
                    _ => to.cast::<f32>().wrapping_add(at).write(x),
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(keys: &[f32], di: usize) -> Vec<u8> {
        let mut out = vec![0xaau8; keys.len() / di * (di + 4)];
        let shape = [keys.len() / di, di];
        let view = TensorRef::from_slice(keys, &shape).unwrap();
        quantise_keys(view, TensorMut::from_slice(&mut out, &[shape[0], di + 4]).unwrap()).unwrap();
        out
    }

    #[test]
    fn a_key_comes_back_within_half_a_step_of_its_scale() {
        let keys: Vec<f32> = (0..5 * 8).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i / 8 * 3 - 6)).collect();
        for (key, stored) in keys.chunks(8).zip(stored(&keys, 8).chunks(12)) {
            let largest = key.iter().fold(0f32, |a, x| a.max(x.abs()));
            assert_eq!(f32::from_ne_bytes(stored[8..].try_into().unwrap()), largest / 448.0);
            for (lane, &x) in key.iter().enumerate() {
                let error = (dequantise_key(stored, 8, lane) - x).abs();
                assert!(error <= x.abs() / 16.0 + largest / 448.0 / 1024.0, "{x}");
            }
        }
    }

    #[test]
    fn zeros_subnormals_nan_and_infinities_are_as_documented() {
        let tiny = 3.0 * f32::from_bits(1);
        let keys = [
            [0.0; 4],
            [tiny, -tiny, 0.0, 0.0],
            [f32::NAN, 448.0, 1.0, -1.0],
            [f32::INFINITY, 1.0, 0.0, -2.0],
        ];
        let out = stored(keys.as_flattened(), 4);
        let key = |i: usize| [0, 1, 2, 3].map(|d| dequantise_key(&out[i * 8..], 4, d));
        assert_eq!(key(0), [0.0; 4]);
        assert_eq!(out[4..8], 1f32.to_ne_bytes());
        assert!(key(1).iter().all(|x| x.is_finite()));
        assert!(key(2)[0].is_nan());
        assert_eq!(key(2)[1..], [448.0, 1.0, -1.0]);
        assert!(key(3).iter().all(|x| x.is_nan()), "{:?}", key(3));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut out = [0u8; 64];
        let keys = [0f32; 12];
        let mut to = |keys: TensorRef<'_>, shape: &[usize]| {
            quantise_keys(keys, TensorMut::from_slice(&mut out, shape).unwrap()).unwrap_err().to_string()
        };
        let said = to(TensorRef::from_slice(&keys, &[2, 6]).unwrap(), &[2, 10]);
        assert!(said.contains("index_head_dim") && said.contains('6'), "{said}");
        let said = to(TensorRef::from_slice(&keys, &[3, 4]).unwrap(), &[3, 4]);
        assert!(said.contains("out: expected shape [T, Di + 4] = [3, 8]"), "{said}");
        let said = to(TensorRef::from_slice(&[0i32; 8], &[2, 4]).unwrap(), &[2, 8]);
        assert!(said.contains("f32, bf16 or f16"), "{said}");
    }
}
