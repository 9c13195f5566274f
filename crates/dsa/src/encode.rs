//! Index keys on their way into a store: from the dtype they were computed in to the format they are kept in.

use half::{bf16, f16};
use mstar_core::attend::IndexFormat;
use mstar_kernels::dsa::{KeyFormat, quantise_keys};
use mstar_kernels::{DType, Device, Element, Error, TensorMut, TensorRef};

type Result<T> = std::result::Result<T, Error>;

/// The kernels' word for a stored format.
///
/// # Errors
/// A format that the kernels do not read.
pub(crate) fn key_format(format: IndexFormat) -> Result<KeyFormat> {
    match format {
        IndexFormat::F32 => Ok(KeyFormat::F32),
        IndexFormat::Bf16 => Ok(KeyFormat::Bf16),
        IndexFormat::F16 => Ok(KeyFormat::F16),
        IndexFormat::Fp8 => Ok(KeyFormat::Fp8),
        other => {
            let why = "no kernel reads index keys of this format; say f32, bf16, f16 or fp8".into();
            Err(Error::Parameter { name: "index_dtype", why, got: other.to_string() })
        }
    }
}

/// Whether keys of `dtype` are kept in `format` as they are.
pub(crate) fn as_is(dtype: DType, format: IndexFormat) -> bool {
    IndexFormat::of(dtype) == Some(format)
}

/// Refuses keys that are not `[T, Di]` floats on a device; `T` of `None` fits any.
///
/// # Errors
/// The mismatch, with what was expected.
pub(crate) fn expect_keys(
    keys: &TensorRef<'_>,
    tokens: Option<usize>,
    index_head_dim: usize,
    device: Device,
) -> Result<()> {
    keys.expect("keys", "[T, Di]", &[tokens, Some(index_head_dim)], None, device)?;
    if !keys.dtype().is_float() {
        let expected = "f32, bf16 or f16".into();
        return Err(Error::DTypeMismatch { tensor: "keys", expected, got: keys.dtype() });
    }
    Ok(())
}

/// Writes keys `[T, Di]` (f32, bf16 or f16, any outer stride) into `out`, contiguous `[T, W]` of `format`. Keys of another
/// float type are rounded to the nearest, ties to even; for fp8 see [`quantise_keys`]. A NaN stays one.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit; nothing is then written.
pub(crate) fn encode(keys: TensorRef<'_>, format: IndexFormat, mut out: TensorMut<'_>) -> Result<()> {
    if format == IndexFormat::Fp8 {
        return quantise_keys(keys, out);
    }
    let shape = [Some(keys.shape()[0]), Some(keys.shape()[1])];
    out.expect("out", "[T, W]", &shape, Some(format.dtype()), Device::Cpu)?;
    match keys.dtype() {
        DType::F32 => into::<f32>(keys, &mut out, |x| x),
        DType::Bf16 => into::<bf16>(keys, &mut out, bf16::to_f32),
        DType::F16 => into::<f16>(keys, &mut out, f16::to_f32),
        got => Err(Error::DTypeMismatch { tensor: "keys", expected: "f32, bf16 or f16".into(), got }),
    }
}

fn into<E: Element>(keys: TensorRef<'_>, out: &mut TensorMut<'_>, widen: fn(E) -> f32) -> Result<()> {
    match out.dtype() {
        DType::F32 => rows::<E, f32>(keys, out, widen),
        DType::Bf16 => rows::<E, bf16>(keys, out, |x| bf16::from_f32(widen(x))),
        _ => rows::<E, f16>(keys, out, |x| f16::from_f32(widen(x))),
    }
}

fn rows<E: Element, F: Element>(
    keys: TensorRef<'_>,
    out: &mut TensorMut<'_>,
    convert: impl Fn(E) -> F,
) -> Result<()> {
    for token in 0..keys.shape()[0] {
        let from = keys.select(0, token)?;
        let mut to = out.reborrow().select(0, token)?;
        let (from, to) =
            from.as_slice::<E>().zip(to.as_mut_slice::<F>()).expect("rows were found contiguous");
        to.iter_mut().zip(from).for_each(|(to, &from)| *to = convert(from));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_keys_are_converted_row_by_row() {
        let keys: Vec<f32> = (0..12).map(|i| i as f32 + 1.0 / 512.0).collect();
        let strided = TensorRef::from_slice_strided(&keys, &[3, 2], &[4, 1]).unwrap();
        let mut out = [bf16::NAN; 6];
        encode(strided, IndexFormat::Bf16, TensorMut::from_slice(&mut out, &[3, 2]).unwrap()).unwrap();
        assert_eq!(out, [0, 1, 4, 5, 8, 9].map(|i| bf16::from_f32(keys[i])));
        let wide = TensorRef::from_slice(&out, &[3, 2]).unwrap();
        let mut back = [0f32; 6];
        encode(wide, IndexFormat::F32, TensorMut::from_slice(&mut back, &[3, 2]).unwrap()).unwrap();
        assert_eq!(back, out.map(bf16::to_f32));
    }

    #[test]
    fn keys_that_are_no_floats_or_of_another_width_are_refused() {
        let said = |keys: TensorRef<'_>| expect_keys(&keys, Some(2), 3, Device::Cpu).unwrap_err().to_string();
        assert!(said(TensorRef::from_slice(&[0i32; 6], &[2, 3]).unwrap()).contains("f32, bf16 or f16"));
        let said = said(TensorRef::from_slice(&[0f32; 8], &[2, 4]).unwrap());
        assert!(said.contains("keys: expected shape [T, Di] = [2, 3]"), "{said}");
    }
}
