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

use crate::mutant::planted;
use crate::{DType, Device, Error, Result, TensorMut, TensorRef};

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
    merge_rows(true, std::slice::from_ref(other), acc)
}

/// Merges any number of partial results into `out`, in order; none at all is `(0, -inf)`. The sum runs left
/// to right over the parts: for a result that does not depend on how keys were cut, cut them at fixed
/// positions.
///
/// # Errors
/// As [`merge_natural`].
pub fn merge_all_natural(parts: &[Partial<'_>], out: &mut Merged<'_>) -> Result<()> {
    merge_rows(false, parts, out)
}

fn merge_rows(in_place: bool, parts: &[Partial<'_>], out: &mut Merged<'_>) -> Result<()> {
    let shape = out.o.shape().to_vec();
    let extents: Vec<Option<usize>> = shape.iter().copied().map(Some).collect();
    out.o.expect("out.o", "[T, H, Dv]", &[None, None, None], None, Device::Cpu)?;
    out.lse.expect("out.lse", "[T, H]", &extents[..2], Some(DType::F32), Device::Cpu)?;
    for part in parts {
        part.o.expect("o", "[T, H, Dv]", &extents, None, Device::Cpu)?;
        part.lse.expect("lse", "[T, H]", &extents[..2], Some(DType::F32), Device::Cpu)?;
    }
    let dtypes = parts.iter().map(|part| ("o", part.o.dtype())).chain([("out.o", out.o.dtype())]);
    for (tensor, got) in dtypes {
        if !got.is_float() {
            return Err(Error::DTypeMismatch { tensor, expected: "f32, bf16 or f16".into(), got });
        }
    }

    let (tokens, heads, width) = (shape[0], shape[1], shape[2]);
    let inputs = parts.len() + usize::from(in_place);
    let mut lses = vec![0f32; inputs];
    let mut weights = vec![0f32; inputs];
    let (mut row, mut sum) = (vec![0f32; width], vec![0f32; width]);
    for t in 0..tokens {
        for h in 0..heads {
            let scalar = |view: TensorRef<'_>| -> Result<f32> { Ok(read(view.select(0, t)?.select(0, h)?)) };
            let offset = usize::from(in_place);
            if in_place {
                lses[0] = scalar(out.lse.as_ref())?;
            }
            for (lse, part) in lses[offset..].iter_mut().zip(parts) {
                *lse = scalar(part.lse)?;
            }
            let lse = weigh(&lses, &mut weights);
            let mut first = true;
            for (input, &weight) in weights.iter().enumerate() {
                if weight == 0.0 {
                    continue;
                }
                let view = if in_place && input == 0 { out.o.as_ref() } else { parts[input - offset].o };
                read_row(view.select(0, t)?.select(0, h)?, &mut row);
                if std::mem::take(&mut first) {
                    sum.iter_mut().zip(&row).for_each(|(s, x)| *s = weight * x);
                } else {
                    sum.iter_mut().zip(&row).for_each(|(s, x)| *s += weight * x);
                }
            }
            if first {
                sum.fill(0.0);
            }
            write_row(&sum, &mut out.o.reborrow().select(0, t)?.select(0, h)?);
            write_row(&[lse], &mut out.lse.reborrow().select(0, t)?.select(0, h)?);
        }
    }
    Ok(())
}

/// Normalised weights of states with these natural lses, and the merged lse. An empty state weighs exactly
/// 0, one state alone exactly 1.
fn weigh(lses: &[f32], weights: &mut [f32]) -> f32 {
    let max = lses.iter().fold(f32::NEG_INFINITY, |m, &l| if l > m || l.is_nan() { l } else { m });
    if max == f32::NEG_INFINITY && !planted("merge-empty-is-nan") {
        weights.fill(0.0);
        return max;
    }
    let term = |lse: f32| {
        let below = f64::from(lse) - f64::from(max);
        if planted("merge-base-2") { below.exp2() } else { below.exp() }
    };
    let total: f64 = lses.iter().map(|&lse| term(lse)).sum();
    for (weight, &lse) in weights.iter_mut().zip(lses) {
        *weight = (term(lse) / total) as f32;
    }
    (f64::from(max) + total.ln()) as f32
}

fn read(view: TensorRef<'_>) -> f32 {
    let mut out = [0.0];
    read_row(view, &mut out);
    out[0]
}

/// Copies a contiguous row of floats.
fn read_row(view: TensorRef<'_>, out: &mut [f32]) {
    if let Some(row) = view.as_slice::<f32>() {
        out.copy_from_slice(row);
    } else if let Some(row) = view.as_slice::<half::bf16>() {
        out.iter_mut().zip(row).for_each(|(o, x)| *o = x.to_f32());
    } else if let Some(row) = view.as_slice::<half::f16>() {
        out.iter_mut().zip(row).for_each(|(o, x)| *o = x.to_f32());
    } else {
        unreachable!("{view:?} was checked to be a contiguous row of floats on the CPU");
    }
}

fn write_row(row: &[f32], view: &mut TensorMut<'_>) {
    if let Some(out) = view.as_mut_slice::<f32>() {
        out.copy_from_slice(row);
    } else if let Some(out) = view.as_mut_slice::<half::bf16>() {
        out.iter_mut().zip(row).for_each(|(o, &x)| *o = half::bf16::from_f32(x));
    } else if let Some(out) = view.as_mut_slice::<half::f16>() {
        out.iter_mut().zip(row).for_each(|(o, &x)| *o = half::f16::from_f32(x));
    } else {
        unreachable!("{view:?} was checked to be a contiguous row of floats on the CPU");
    }
}

#[cfg(test)]
mod tests;
