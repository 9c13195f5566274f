//! What tests of several families share.

use half::{bf16, f16};

use crate::Element;
#[cfg(any(feature = "mla", feature = "dense", feature = "flex"))]
use crate::cpu::Isa;
use crate::reference::Real;

/// An element type of tests.
pub(crate) trait Number: Element + Real + PartialEq + std::fmt::Debug {
    /// The nearest number.
    fn of(value: f32) -> Self;
}

impl Number for f32 {
    fn of(value: f32) -> f32 {
        value
    }
}

impl Number for bf16 {
    fn of(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

impl Number for f16 {
    fn of(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

#[cfg(any(feature = "mla", feature = "dense", feature = "flex"))]
pub(crate) fn on_every_isa(mut test: impl FnMut(Isa)) {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        test(isa);
    }
}

/// A hash of integers.
pub(crate) fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15u64, |x, &part| {
        let x = (x ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^ (x >> 29)
    })
}

/// A hash of integers as a number in -1..1.
pub(crate) fn noise(parts: &[u64]) -> f32 {
    (hash(parts) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Holds numbers against the oracle's: infinities must match, the rest within a relative L2 error.
#[cfg(any(feature = "dense", feature = "flex"))]
pub(crate) fn judge(what: &str, got: impl Iterator<Item = f64>, want: &[f64], bound: f64) {
    let (mut error, mut norm, mut count) = (0.0, 0.0, 0);
    for (i, got) in got.enumerate() {
        let want = want[i];
        count += 1;
        assert!(!got.is_nan(), "{what}: NaN at {i}, {want} expected");
        if want.is_infinite() || got.is_infinite() {
            assert_eq!(got, want, "{what}: at {i}");
            continue;
        }
        error += (got - want).powi(2);
        norm += want.powi(2);
    }
    assert_eq!(count, want.len(), "{what}");
    let error = if norm == 0.0 { error.sqrt() } else { (error / norm).sqrt() };
    assert!(error < bound, "{what}: off by {error:e}, {bound:e} allowed");
}

/// The error that outputs of a type may have.
#[cfg(any(feature = "dense", feature = "flex"))]
pub(crate) fn bound(q: crate::DType, kv: crate::DType) -> f64 {
    use crate::DType;
    match (q, kv) {
        // Weights are rounded to bf16 where the machine multiplies such.
        (DType::Bf16, DType::Bf16) => 4e-3,
        (DType::Bf16, _) => 2.5e-3,
        (DType::F16, _) => 5e-4,
        _ => 2e-6,
    }
}
