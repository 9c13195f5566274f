//! The gate: what was computed against what was recorded.
//!
//! A case passes when both of these hold for every output:
//! 1. `|x - out| <= atol + rtol * |out|` at every entry;
//! 2. for a float output, the relative L2 error against `ref` is at most the larger of 1.1 times the source's
//!    own and 1.4 times that of `ref` rounded to the output's dtype; a float32 output also passes below 1e-6.
//!
//! NaN passes nowhere: every comparison is written so that it holds, not so that its opposite fails.
//! Infinities must be equal. Norms run over the entries that are finite in `ref`; a norm of 0 asks for
//! equality. Integers must be equal; a selection has a rule of its own ([`selection`](super::selection)).

use mstar_kernels::DType;
use mstar_kernels::mutant::planted;

use super::case::{Tolerance, coordinates};
use super::ops::rounded;

/// How far the source's own error may be exceeded.
const SOURCE_MARGIN: f64 = 1.1;
/// How far the rounding of the output's dtype may be exceeded.
const ROUNDING_MARGIN: f64 = 1.4;
/// A float32 output passes below this whatever its source did.
const F32_FLOOR: f64 = 1e-6;

/// The judgement of one output.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Judgement {
    /// The output's name.
    pub(super) name: &'static str,
    /// Its dtype.
    pub(super) dtype: DType,
    /// Rule 1.
    pub(super) within_tolerance: bool,
    /// Rule 2; `None` for integers.
    pub(super) accurate: Option<bool>,
    /// The first thing that is wrong, in words.
    pub(super) fault: Option<String>,
    /// Coordinates of the entry that is farthest from `out` for its tolerance; none when all are equal.
    pub(super) worst: Option<Vec<usize>>,
    /// Figures of a float output.
    pub(super) figures: Option<Figures>,
}

/// What is reported beside the verdicts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figures {
    /// Largest `|x - out|` over entries finite in both.
    pub(super) max_abs: f64,
    /// Largest `|x - out| / |out|` over such entries with `out` not 0.
    pub(super) max_rel: f64,
    /// `||x - ref|| / ||ref||`.
    pub(super) rel_l2: f64,
    /// The source's: `||out - ref|| / ||ref||`.
    pub(super) source_rel_l2: f64,
    /// That of `ref` rounded to the output's dtype.
    pub(super) rounding_rel_l2: f64,
    /// What `rel_l2` may be.
    pub(super) bound: f64,
    /// Cosine of the angle between `x` and `ref`; NaN when either is 0.
    pub(super) cosine: f64,
}

impl Judgement {
    /// Whether both rules hold.
    pub(super) fn passed(&self) -> bool {
        self.within_tolerance && self.accurate != Some(false)
    }

    /// An output that could not be compared at all.
    pub(super) fn failed(name: &'static str, dtype: DType, fault: String) -> Judgement {
        let accurate = dtype.is_float().then_some(false);
        Judgement {
            name,
            dtype,
            within_tolerance: false,
            accurate,
            fault: Some(fault),
            worst: None,
            figures: None,
        }
    }
}

/// Judges a float output: `x` computed, `out` recorded, `reference` in f64 stored as f32, all row-major.
pub(super) fn floats(
    name: &'static str,
    dtype: DType,
    shape: &[usize],
    tolerance: Tolerance,
    x: &[f32],
    out: &[f32],
    reference: &[f32],
) -> Judgement {
    if x.len() != out.len() || reference.len() != out.len() {
        let fault = format!("{name} has {} entries, {} were recorded", x.len(), out.len());
        return Judgement::failed(name, dtype, fault);
    }
    let mut fault = None;
    let mut say = |at: usize, what: &str| {
        let (x, out) = (x[at], out[at]);
        let index = coordinates(at, shape);
        fault.get_or_insert_with(|| format!("{name} at {index:?}: {what}; computed {x}, recorded {out}"));
    };

    let mut within_tolerance = true;
    let (mut max_abs, mut max_rel) = (0f64, 0f64);
    let mut worst: Option<(f64, usize)> = None;
    for at in 0..out.len() {
        let (value, recorded) = (f64::from(x[at]), f64::from(out[at]));
        let excess = if value.is_nan() || recorded.is_nan() {
            say(
                at,
                if value.is_nan() && recorded.is_nan() { "NaN on both sides" } else { "NaN on one side" },
            );
            f64::INFINITY
        } else if value.is_infinite() || recorded.is_infinite() {
            if value == recorded {
                continue;
            }
            say(at, "infinities must be equal");
            f64::INFINITY
        } else {
            let apart = (value - recorded).abs();
            max_abs = max_abs.max(apart);
            if recorded != 0.0 {
                max_rel = max_rel.max(apart / recorded.abs());
            }
            let allowed = tolerance.atol + tolerance.rtol * recorded.abs();
            if apart <= allowed {
                if apart == 0.0 {
                    continue;
                }
                // Above 0 and at most 1: how much of its tolerance the entry uses up.
                apart / allowed
            } else {
                say(at, "outside its tolerance");
                1.0 + (apart - allowed) / allowed.max(f64::MIN_POSITIVE)
            }
        };
        within_tolerance &= excess <= 1.0;
        if worst.is_none_or(|(most, _)| excess > most) {
            worst = Some((excess, at));
        }
    }

    // A reference is read without NaN.
    let unmatched = (0..reference.len()).find(|&at| reference[at].is_infinite() && x[at] != reference[at]);
    let (figures, close) = accuracy(dtype, x, out, reference);
    let accurate = unmatched.is_none() && close;
    if let Some(at) = unmatched {
        worst.get_or_insert((f64::INFINITY, at));
        let (index, expected) = (coordinates(at, shape), reference[at]);
        let ours = x[at];
        fault.get_or_insert_with(|| {
            format!("{name} at {index:?}: infinities must be equal; computed {ours}, reference {expected}")
        });
    } else if !accurate {
        let Figures { rel_l2, bound, .. } = figures;
        fault.get_or_insert_with(|| {
            format!("{name}: relative L2 error {rel_l2:.3e} is not within {bound:.3e}")
        });
    }
    Judgement {
        name,
        dtype,
        within_tolerance,
        accurate: Some(accurate),
        fault,
        worst: worst.map(|(_, at)| coordinates(at, shape)),
        figures: Some(Figures { max_abs, max_rel, ..figures }),
    }
}

/// Rule 2 over the entries that are finite in the reference, with its figures.
fn accuracy(dtype: DType, x: &[f32], out: &[f32], reference: &[f32]) -> (Figures, bool) {
    let exact: Vec<f64> = reference.iter().map(|&r| f64::from(r)).collect();
    let round = rounded(dtype, &exact);
    let (mut norm, mut ours_norm, mut product) = (0f64, 0f64, 0f64);
    let (mut ours, mut source, mut rounding) = (0f64, 0f64, 0f64);
    for (at, &r) in exact.iter().enumerate() {
        if !r.is_finite() {
            continue;
        }
        let value = f64::from(x[at]);
        norm += r * r;
        ours_norm += value * value;
        product += value * r;
        ours += (value - r).powi(2);
        source += (f64::from(out[at]) - r).powi(2);
        rounding += (f64::from(round[at]) - r).powi(2);
    }
    let relative = |error: f64| if error == 0.0 { 0.0 } else { (error / norm).sqrt() };
    let (rel_l2, source_rel_l2, rounding_rel_l2) = (relative(ours), relative(source), relative(rounding));
    // A source that is itself infinitely far from the reference earns nobody any slack.
    let own = if source_rel_l2.is_finite() { SOURCE_MARGIN * source_rel_l2 } else { 0.0 };
    let rounding_bound = if rounding_rel_l2.is_finite() { ROUNDING_MARGIN * rounding_rel_l2 } else { 0.0 };
    let floor = if dtype == DType::F32 { F32_FLOOR } else { 0.0 };
    // With a norm of 0 any difference at all is infinitely large, so only equality passes.
    let bound = if norm == 0.0 { 0.0 } else { own.max(rounding_bound).max(floor) };
    let cosine = product / (norm.sqrt() * ours_norm.sqrt());
    let figures =
        Figures { max_abs: 0.0, max_rel: 0.0, rel_l2, source_rel_l2, rounding_rel_l2, bound, cosine };
    (figures, rel_l2 <= bound || planted("gate-ignores-reference"))
}

/// Judges an integer output, which must be equal.
pub(super) fn integers(name: &'static str, shape: &[usize], x: &[i32], out: &[i32]) -> Judgement {
    if x.len() != out.len() {
        let fault = format!("{name} has {} entries, {} were recorded", x.len(), out.len());
        return Judgement::failed(name, DType::I32, fault);
    }
    let at = (0..out.len()).find(|&at| x[at] != out[at]);
    let worst = at.map(|at| coordinates(at, shape));
    Judgement {
        name,
        dtype: DType::I32,
        within_tolerance: at.is_none(),
        accurate: None,
        fault: at.map(|at| {
            let index = coordinates(at, shape);
            format!("{name} at {index:?}: computed {}, recorded {}", x[at], out[at])
        }),
        worst,
        figures: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOSE: Tolerance = Tolerance { atol: 1e-2, rtol: 1e-2 };

    fn judge(x: &[f32], out: &[f32], reference: &[f32]) -> Judgement {
        floats("out.o", DType::F32, &[out.len()], LOOSE, x, out, reference)
    }

    #[test]
    fn equal_outputs_pass_both_rules() {
        let values = [1.0, -2.0, 0.0, f32::NEG_INFINITY];
        let j = judge(&values, &values, &values);
        assert!(j.passed() && j.worst.is_none() && j.fault.is_none());
        let figures = j.figures.unwrap();
        assert_eq!((figures.rel_l2, figures.max_abs), (0.0, 0.0));
        assert!((figures.cosine - 1.0).abs() < 1e-15);
    }

    #[test]
    fn f39_nan_on_one_side_fails_and_names_the_first_index() {
        let good = [1.0, 2.0, 3.0, 4.0];
        for at in 0..4 {
            let mut bad = good;
            bad[at] = f32::NAN;
            bad[3] = f32::NAN;
            for j in [judge(&bad, &good, &good), judge(&good, &bad, &good)] {
                assert!(!j.passed() && !j.within_tolerance);
                assert_eq!(j.worst, Some(vec![at]));
                assert!(j.fault.unwrap().starts_with(&format!("out.o at [{at}]: NaN on one side")));
            }
        }
    }

    #[test]
    fn f39_nan_on_both_sides_is_reported_and_not_passed() {
        let nan = [1.0, f32::NAN];
        let j = judge(&nan, &nan, &[1.0, 2.0]);
        assert!(!j.passed());
        assert!(j.fault.unwrap().contains("NaN on both sides"));
    }

    #[test]
    fn f39_infinities_agree_only_when_they_are_equal() {
        let (plus, minus) = (f32::INFINITY, f32::NEG_INFINITY);
        assert!(judge(&[minus, 1.0], &[minus, 1.0], &[minus, 1.0]).passed());
        for (x, out) in [(plus, minus), (minus, plus), (minus, 0.0), (0.0, minus)] {
            let j = judge(&[x, 1.0], &[out, 1.0], &[out, 1.0]);
            assert!(!j.within_tolerance, "{x} {out}");
            assert_eq!(j.worst, Some(vec![0]));
        }
        // The reference's infinities count even where the source does not have them.
        let j = judge(&[1.0, 1.0], &[1.0, 1.0], &[minus, 1.0]);
        assert!(j.within_tolerance && j.accurate == Some(false));
        // The first of them is named by its index: row and head, for an lse.
        let (x, reference) = ([1.0, 1.0, plus, 1.0], [1.0, 1.0, minus, minus]);
        let j = floats("out.lse", DType::F32, &[2, 2], LOOSE, &x, &x, &reference);
        assert_eq!(j.worst, Some(vec![1, 0]));
        let said = "out.lse at [1, 0]: infinities must be equal; computed inf, reference -inf";
        assert_eq!(j.fault.as_deref(), Some(said));
        let nan = [1.0, f32::NAN, minus, minus];
        let j = floats("out.lse", DType::F32, &[2, 2], LOOSE, &nan, &x, &reference);
        assert!(j.fault.unwrap().starts_with("out.lse at [0, 1]: NaN on one side"));
        // An infinite source earns no slack.
        let j = judge(&[plus, 1.0], &[plus, 1.0], &[2.0, 1.0]);
        assert!(j.within_tolerance && j.accurate == Some(false));
    }

    #[test]
    fn f39_zero_tolerance_asks_for_equality() {
        let exact = Tolerance { atol: 0.0, rtol: 0.0 };
        let next = f32::from_bits(1f32.to_bits() + 1);
        let judge = |x: f32| floats("out.o", DType::F32, &[1], exact, &[x], &[1.0], &[1.0]);
        assert!(judge(1.0).passed());
        let j = judge(next);
        assert!(!j.within_tolerance && j.accurate == Some(true), "{j:?}");
    }

    #[test]
    fn f39_lengths_must_be_equal_and_empty_outputs_pass() {
        assert!(!judge(&[1.0], &[1.0, 1.0], &[1.0, 1.0]).passed());
        assert!(!judge(&[1.0, 1.0], &[1.0, 1.0], &[1.0]).passed());
        assert!(judge(&[], &[], &[]).passed());
        assert!(!integers("out.visible_blocks", &[2], &[1], &[1, 2]).passed());
    }

    #[test]
    fn the_bound_is_the_larger_of_source_and_rounding() {
        let reference: Vec<f32> = (0..64).map(|i| 1.0 + i as f32 / 77.0).collect();
        let exact: Vec<f64> = reference.iter().map(|&r| f64::from(r)).collect();
        let bf16 = rounded(DType::Bf16, &exact);
        let off = |by: f32| -> Vec<f32> { reference.iter().map(|r| r * (1.0 + by)).collect() };
        let judge = |dtype, x: &[f32], out: &[f32]| {
            let loose = Tolerance { atol: 1.0, rtol: 1.0 };
            floats("out.o", dtype, &[64], loose, x, out, &reference)
        };
        // Rounding of bf16 is about 1.6e-3 here: 1.4 times that is the bound when the source rounds well.
        let j = judge(DType::Bf16, &off(2e-3), &bf16);
        assert_eq!(j.accurate, Some(true));
        assert_eq!(judge(DType::Bf16, &off(3e-3), &bf16).accurate, Some(false));
        // A worse source allows 1.1 times its own error.
        assert_eq!(judge(DType::Bf16, &off(1.05e-2), &off(1e-2)).accurate, Some(true));
        assert_eq!(judge(DType::Bf16, &off(1.2e-2), &off(1e-2)).accurate, Some(false));
        // f32 passes below 1e-6.
        assert_eq!(judge(DType::F32, &off(8e-7), &reference).accurate, Some(true));
        let j = judge(DType::F32, &off(2e-6), &reference);
        assert_eq!(j.accurate, Some(false));
        assert!(j.fault.unwrap().contains("relative L2 error"));
    }

    #[test]
    fn a_zero_norm_asks_for_equality() {
        let zero = [0.0; 3];
        assert!(judge(&zero, &zero, &zero).passed());
        let j = judge(&[0.0, 1e-30, 0.0], &zero, &zero);
        assert!(j.within_tolerance && j.accurate == Some(false));
    }

    #[test]
    fn the_worst_entry_is_the_one_farthest_for_its_tolerance() {
        let x = [100.5, 0.02, 1.0];
        let out = [100.0, 0.0, 1.0];
        let j = judge(&x, &out, &out);
        assert_eq!(j.worst, Some(vec![1]));
        assert!(j.fault.unwrap().contains("out.o at [1]: outside its tolerance"));
        assert_eq!(j.figures.unwrap().max_abs, 0.5);
    }

    #[test]
    fn integers_must_be_equal() {
        assert!(integers("out.visible_blocks", &[3], &[1, 2, 3], &[1, 2, 3]).passed());
        let j = integers("out.visible_blocks", &[3], &[1, 2, 4], &[1, 2, 3]);
        assert_eq!(j.fault.unwrap(), "out.visible_blocks at [2]: computed 4, recorded 3");
    }
}
