//! Kernels that only move memory: appending to pages, merging partial results.

use anyhow::Context;
use mstar_kernels::cpu::scatter::scatter_at;
use mstar_kernels::lse::{Merged, Partial, merge_natural};
use mstar_kernels::{Buffer, DType};

use super::{Case, Cost, Made, Place};

const D: usize = 128;
const S: usize = 16;

/// The cases of this family.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let tokens = if quick { 256 } else { 2048 };
    let merges = [DType::F32, DType::Bf16].map(|dtype| merge_case(if quick { 64 } else { 4096 }, dtype));
    [scatter_case(tokens)].into_iter().chain(merges).collect()
}

/// Those of a device.
pub(super) fn list_on_device(quick: bool) -> Vec<Case> {
    vec![scatter_case(if quick { 64 } else { 8192 })]
}

fn scatter_case(tokens: usize) -> Case {
    let (g, dtype) = (8, DType::Bf16);
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let stream = place.stream();
        let pages = 2 * tokens.div_ceil(S);
        let entries = place.filled(dtype, tokens * g * D)?;
        let mut cache = place.room(dtype, &[pages, S, g, D])?;
        let mut slots = Buffer::for_tensor(DType::I64, &[tokens])?;
        let mut view = slots.tensor_mut(0, DType::I64, &[tokens])?;
        for (t, slot) in view.as_mut_slice::<i64>().unwrap_or_default().iter_mut().enumerate() {
            *slot = (t / S * 2 * S + t % S) as i64;
        }
        let slots = place.moved(slots)?;
        Ok(Made::alone(move || {
            let from = entries.tensor(0, dtype, &[tokens, g, D])?;
            let to = cache.tensor_mut(0, dtype, &[pages, S, g, D])?;
            Ok(scatter_at(&stream, slots.tensor(0, DType::I64, &[tokens])?, from, to)?)
        }))
    };
    let cost = Cost { bytes: (2 * tokens * g * D * dtype.size()) as f64, flops: 0.0 };
    Case {
        kernel: "scatter",
        shape: format!("{tokens} x {g} x {D}, {dtype}"),
        dtype,
        cost,
        beside: None,
        make: Box::new(make),
    }
}

fn merge_case(tokens: usize, dtype: DType) -> Case {
    let h = 32;
    let make = move |place: &Place| -> anyhow::Result<Made> {
        let parts = [place.filled(dtype, tokens * h * D)?, place.filled(dtype, tokens * h * D)?];
        let lses = [place.filled(DType::F32, tokens * h)?, place.filled(DType::F32, tokens * h)?];
        let (mut o, mut lse) =
            (place.room(dtype, &[tokens * h * D])?, place.room(DType::F32, &[tokens * h])?);
        Ok(Made::alone(move || {
            let part = |i: usize| -> anyhow::Result<Partial<'_>> {
                Ok(Partial {
                    o: parts[i].tensor(0, dtype, &[tokens, h, D])?,
                    lse: lses[i].tensor(0, DType::F32, &[tokens, h])?,
                })
            };
            let mut out = Merged {
                o: o.tensor_mut(0, dtype, &[tokens, h, D])?,
                lse: lse.tensor_mut(0, DType::F32, &[tokens, h])?,
            };
            merge_natural(&part(0)?, &part(1)?, &mut out).context("merging")
        }))
    };
    let bytes = 3 * tokens * h * (D * dtype.size() + 4);
    // Bound by memory: its few multiplications are no matrix's.
    let cost = Cost { bytes: bytes as f64, flops: 0.0 };
    let shape = format!("2 of {tokens} x {h} x {D}, {dtype}");
    Case { kernel: "merge", shape, dtype, cost, beside: None, make: Box::new(make) }
}
