//! Kernels that only move memory: appending to pages, merging partial results.

use anyhow::Context;
use mstar_kernels::cpu::scatter::scatter;
use mstar_kernels::lse::{Merged, Partial, merge_natural};
use mstar_kernels::{Buffer, DType, Stream};

use super::{Case, Cost, Made, filled};

const D: usize = 128;
const S: usize = 16;

/// The cases of this family.
pub(super) fn list(quick: bool) -> Vec<Case> {
    let tokens = if quick { 256 } else { 2048 };
    let merges = [DType::F32, DType::Bf16].map(|dtype| merge_case(if quick { 64 } else { 4096 }, dtype));
    [scatter_case(tokens)].into_iter().chain(merges).collect()
}

fn scatter_case(tokens: usize) -> Case {
    let (g, dtype) = (8, DType::Bf16);
    let make = move || -> anyhow::Result<Made> {
        let pages = 2 * tokens.div_ceil(S);
        let entries = filled(dtype, tokens * g * D)?;
        let mut cache = Buffer::for_tensor(dtype, &[pages, S, g, D])?;
        let slots: Vec<i64> = (0..tokens).map(|t| (t / S * 2 * S + t % S) as i64).collect();
        Ok(Made::alone(move || {
            let from = entries.tensor(0, dtype, &[tokens, g, D])?;
            let to = cache.tensor_mut(0, dtype, &[pages, S, g, D])?;
            Ok(scatter(&Stream::cpu(), &slots, from, to)?)
        }))
    };
    let cost = Cost { bytes: (2 * tokens * g * D * dtype.size()) as f64, flops: 0.0 };
    Case {
        kernel: "scatter",
        shape: format!("{tokens} x {g} x {D}, {dtype}"),
        dtype,
        cost,
        make: Box::new(make),
    }
}

fn merge_case(tokens: usize, dtype: DType) -> Case {
    let h = 32;
    let make = move || -> anyhow::Result<Made> {
        let parts = [filled(dtype, tokens * h * D)?, filled(dtype, tokens * h * D)?];
        let lses = [filled(DType::F32, tokens * h)?, filled(DType::F32, tokens * h)?];
        let (mut o, mut lse) =
            (Buffer::for_tensor(dtype, &[tokens * h * D])?, Buffer::for_tensor(DType::F32, &[tokens * h])?);
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
    Case { kernel: "merge", shape, dtype, cost, make: Box::new(make) }
}
