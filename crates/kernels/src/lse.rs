//! Merging partial attention results.
//!
//! Attention over a set of keys is `(o, lse)`: the normalised output and the log of the softmax's
//! denominator. Two disjoint sets merge exactly ("Online normalizer calculation for softmax",
//! arXiv:1805.02867; FlashInfer's attention states, arXiv:2501.01005):
//! `lse = ln(exp(lse_a) + exp(lse_b))`, `o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b`.
//!
//! The base is in every name: **`lse` is the natural logarithm here**. A source that returns base 2 is
//! converted once, with [`natural_from_base2`]. An empty set is `(0, -inf)` and merges as the identity, bit
//! for bit; what its `o` holds is not read. `-1e30` is not empty. `+inf` is not a state that attention can
//! reach: it gives NaN, never a plausible number. A sink is part of one side only.

#[cfg(feature = "cuda")]
use crate::Device;
use crate::cpu::merge::{Merge, Rows};
use crate::cpu::tokens::apart;
use crate::mutant::planted;
use crate::{DType, Error, Result, Stream, TensorMut, TensorRef};

/// One partial result.
#[derive(Clone, Copy, Debug)]
pub struct Partial<'a> {
    /// `[T, H, Dv]`, f32, bf16 or f16.
    pub o: TensorRef<'a>,
    /// `[T, H]` f32, natural; `-inf` where nothing was seen.
    pub lse: TensorRef<'a>,
}

/// Where a merged result goes.
#[derive(Debug)]
pub struct Merged<'a> {
    /// `[T, H, Dv]`, f32, bf16 or f16.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32, natural.
    pub lse: TensorMut<'a>,
}

/// The natural-log lse of a base-2 one.
pub fn natural_from_base2(lse: f32) -> f32 {
    (f64::from(lse) * std::f64::consts::LN_2) as f32
}

/// The base-2 lse of a natural one.
pub fn base2_from_natural(lse: f32) -> f32 {
    (f64::from(lse) * std::f64::consts::LOG2_E) as f32
}

/// Merges two partial results into `out`.
///
/// # Errors
/// Shapes, dtypes, devices or layouts that do not fit; nothing is written.
pub fn merge_natural(a: &Partial<'_>, b: &Partial<'_>, out: &mut Merged<'_>) -> Result<()> {
    merge_all_natural(&[*a, *b], out)
}

/// Merges `other` into the partial result that `acc` already holds.
///
/// # Errors
/// As [`merge_natural`].
pub fn merge_natural_in_place(acc: &mut Merged<'_>, other: &Partial<'_>) -> Result<()> {
    merge_rows(&Stream::cpu(), true, std::slice::from_ref(other), acc)
}

/// Merges any number of partial results into `out`, in order; none at all is `(0, -inf)`. The sum runs left
/// to right over the parts: for a result that does not depend on how keys were cut, cut them at fixed
/// positions.
///
/// # Errors
/// As [`merge_natural`].
pub fn merge_all_natural(parts: &[Partial<'_>], out: &mut Merged<'_>) -> Result<()> {
    merge_rows(&Stream::cpu(), false, parts, out)
}

/// As [`merge_all_natural`], in stream order where the stream is; on a device, up to 60 parts, with weights in f32.
///
/// # Errors
/// As [`merge_natural`]; too many parts for a device.
pub fn merge_all_natural_at(stream: &Stream, parts: &[Partial<'_>], out: &mut Merged<'_>) -> Result<()> {
    merge_rows(stream, false, parts, out)
}

/// As [`merge_natural_in_place`], in stream order where the stream is.
///
/// # Errors
/// As [`merge_natural`].
pub fn merge_natural_in_place_at(stream: &Stream, acc: &mut Merged<'_>, other: &Partial<'_>) -> Result<()> {
    merge_rows(stream, true, std::slice::from_ref(other), acc)
}

fn merge_rows(stream: &Stream, in_place: bool, parts: &[Partial<'_>], out: &mut Merged<'_>) -> Result<()> {
    let device = crate::device::supported("merging partial results", stream)?;
    let shape = out.o.shape().to_vec();
    let extents: Vec<Option<usize>> = shape.iter().copied().map(Some).collect();
    out.o.expect("out.o", "[T, H, Dv]", &[None, None, None], None, device)?;
    out.lse.expect("out.lse", "[T, H]", &extents[..2], Some(DType::F32), device)?;
    for part in parts {
        part.o.expect("o", "[T, H, Dv]", &extents, None, device)?;
        part.lse.expect("lse", "[T, H]", &extents[..2], Some(DType::F32), device)?;
    }
    let dtypes = parts.iter().map(|part| ("o", part.o.dtype())).chain([("out.o", out.o.dtype())]);
    for (tensor, got) in dtypes {
        if !got.is_float() {
            return Err(Error::DTypeMismatch { tensor, expected: "f32, bf16 or f16".into(), got });
        }
    }

    apart("out.o", &out.o)?;
    apart("out.lse", &out.lse)?;
    let mut inputs = Vec::with_capacity(parts.len() + 1);
    let (o, lse) = (out.o.as_mut_ptr(), out.lse.as_mut_ptr());
    let output = (rows(&out.o.as_ref(), o), rows(&out.lse.as_ref(), lse));
    inputs.extend(in_place.then_some(output));
    let of = |view: TensorRef<'_>| rows(&view, view.as_ptr().cast_mut());
    inputs.extend(parts.iter().map(|part| (of(part.o), of(part.lse))));
    let merge = Merge { inputs: &inputs, out: output, in_place, shape: [shape[0], shape[1], shape[2]] };
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::join::join(stream, merge.inputs, &merge.out, merge.shape);
    }
    // SAFETY: shapes, dtypes and contiguous rows were checked above, and that no two elements of an output share a place; the
    // parts are borrowed, so nothing but the accumulator itself is both read and written.
    unsafe { merge.run(weigh) };
    Ok(())
}

/// A checked view by its address.
fn rows(view: &TensorRef<'_>, ptr: *mut u8) -> Rows {
    Rows { ptr, dtype: view.dtype(), strides: [view.strides()[0], view.strides()[1]] }
}

/// Normalised weights of states with these natural lses, and the merged lse. An empty state weighs exactly
/// 0, one state alone exactly 1. `terms` has as many entries as the others.
fn weigh(lses: &[f32], weights: &mut [f32], terms: &mut [f64]) -> f32 {
    let max = lses.iter().fold(f32::NEG_INFINITY, |m, &l| if l > m || l.is_nan() { l } else { m });
    if max == f32::NEG_INFINITY && !planted("merge-empty-is-nan") {
        weights.fill(0.0);
        return max;
    }
    let term = |lse: f32| {
        let below = f64::from(lse) - f64::from(max);
        // The largest is 1 exactly, and needs no exponential.
        match below {
            0.0 => 1.0,
            _ if planted("merge-base-2") => below.exp2(),
            _ => below.exp(),
        }
    };
    terms.iter_mut().zip(lses).for_each(|(to, &lse)| *to = term(lse));
    let total: f64 = terms.iter().sum();
    for (weight, term) in weights.iter_mut().zip(terms) {
        *weight = (*term / total) as f32;
    }
    (f64::from(max) + total.ln()) as f32
}

#[cfg(test)]
mod tests;
