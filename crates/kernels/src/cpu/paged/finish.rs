//! The root of a row's tree: the sink joins, the sum divides, the result is rounded and written.

use half::f16;

use super::call::{Call, Out};
use super::state::{StateRef, acc_stride};
use crate::DType;
pub(crate) use crate::cpu::round::to_bf16;
use crate::mutant::planted;
use crate::work::Row;

/// Writes the result of query tokens `q_begin..` of a row under key head `kv_head`; `state` has `H / G` lanes
/// a token.
///
/// # Safety
/// The tokens and heads are the row's, and nobody else writes them.
pub(crate) unsafe fn write(call: &Call<'_>, row: &Row, q_begin: u32, kv_head: usize, state: &StateRef<'_>) {
    let group = call.geometry.group();
    let width = call.geometry.head_dim_vo;
    let unit = call.unit(row);
    for lane in 0..state.m.len() {
        let head = kv_head * group + lane % group;
        let token = row.q_begin as usize + q_begin as usize + lane / group;
        let sink = call.sinks.map(|sinks| f64::from(sinks[head]));
        let (factor, lse) = root(state.m[lane], state.l[lane], unit, sink);
        let lse = if planted("base-2-lse") { lse * std::f32::consts::LOG2_E } else { lse };
        let acc = &state.acc[lane * acc_stride(width)..][..width];
        // SAFETY: token and head are in range, so the row of `width` elements is inside `o`, and the entries inside
        // `lse` and `max_scores`; the caller promises that nobody else writes them.
        unsafe {
            write_row(&call.o, token, head, acc, factor);
            if let Some(out) = &call.lse {
                *out.ptr.cast::<f32>().add(out.at(token, head)) = lse;
            }
            if let Some(out) = &call.extra.max_scores {
                let most = if lse.is_nan() { f32::NAN } else { (f64::from(state.m[lane]) * unit) as f32 };
                *out.ptr.cast::<f32>().add(out.at(token, head)) = most;
            }
        }
    }
}

/// What the weighted sum is multiplied by, and the natural log-sum-exp.
pub(crate) fn root(m: f32, l: f32, unit: f64, sink: Option<f64>) -> (f32, f32) {
    if m == f32::NEG_INFINITY {
        // Nothing was seen, unless what was seen is NaN.
        return if l.is_nan() { (f32::NAN, f32::NAN) } else { (0.0, f32::NEG_INFINITY) };
    }
    let (m, l) = (f64::from(m) * unit, f64::from(l));
    match sink {
        None => ((1.0 / l) as f32, (m + l.ln()) as f32),
        Some(sink) => {
            let top = m.max(sink);
            let shrink = (m - top).exp();
            let sinks = if planted("sink-twice") { 2.0 } else { 1.0 };
            let total = l * shrink + sinks * (sink - top).exp();
            ((shrink / total) as f32, (top + total.ln()) as f32)
        }
    }
}

/// # Safety
/// `o` has `acc.len()` writable elements at (`token`, `head`).
pub(crate) unsafe fn write_row(o: &Out, token: usize, head: usize, acc: &[f32], factor: f32) {
    let at = o.at(token, head);
    // Adding +0 turns -0 into +0: whether a hidden key was skipped or weighed 0 must not show.
    // SAFETY: the caller's promise.
    unsafe {
        match o.dtype {
            DType::Bf16 => {
                let out = std::slice::from_raw_parts_mut(o.ptr.cast::<u16>().add(at), acc.len());
                for (out, value) in out.iter_mut().zip(acc) {
                    *out = to_bf16(value * factor + 0.0);
                }
            }
            DType::F16 => {
                let out = std::slice::from_raw_parts_mut(o.ptr.cast::<f16>().add(at), acc.len());
                for (out, value) in out.iter_mut().zip(acc) {
                    *out = f16::from_f32(value * factor + 0.0);
                }
            }
            _ => {
                let out = std::slice::from_raw_parts_mut(o.ptr.cast::<f32>().add(at), acc.len());
                for (out, value) in out.iter_mut().zip(acc) {
                    *out = value * factor + 0.0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sink_joins_once_and_an_empty_row_ignores_it() {
        assert_eq!(root(f32::NEG_INFINITY, 0.0, 1.0, Some(3.0)), (0.0, f32::NEG_INFINITY));
        let (factor, lse) = root(0.0, 1.0, 1.0, Some(0.0));
        assert_eq!((factor, lse), (0.5, 2f32.ln()));
        let (factor, lse) = root(-1e30, 1.0, 1.0, Some(500.0));
        assert_eq!((factor, lse), (0.0, 500.0));
        let (factor, lse) = root(2e4, 2.0, 1.0, Some(-500.0));
        assert_eq!((factor, lse), (0.5, (2e4 + 2f64.ln()) as f32));
    }
}
