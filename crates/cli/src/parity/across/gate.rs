//! Whether two devices' outputs of one row in one layer are the same mathematics, rounded twice.
//!
//! **The bound.** A device passes DESIGN's accuracy gate when the relative L2 error of a row's outputs against the oracle is at
//! most `g`: 1.4 times the error of the oracle itself rounded to the output's dtype, and `sqrt 2` times that where probabilities
//! may be rounded to a 16-bit input type too (the gate of `mstar run --verify`); f32, and every `lse`, at least 1e-6. Of two
//! devices that both pass, by the triangle inequality,
//!
//! ```text
//! |a - b|  <=  |a - oracle| + |b - oracle|  <=  2 g |oracle|
//! ```
//!
//! So `2 g` is what a **row** is allowed: less would fail devices that are right. The oracle is not computed here; what rounding
//! it would add is taken from the numbers at hand, since a number that is rounded to the nearest of those `s` apart is off by
//! `s / sqrt 12` in the root mean square.
//!
//! A row's norm runs over all of its queries and heads, and would hide one that is wrong among thousands. So each **vector**, of
//! one query and head, has a bound of its own. A 16-bit number is off by at most a share `u` of itself (2^-8 for bf16, 2^-11
//! for f16), an output and a probability alike, and values of different keys stand at random angles to each other: a device's
//! vector is off by at most `u` for either rounding, two devices' by `4 u`. f32 and `lse` round in sums of many terms, which
//! have no such bound: theirs is four times a row's.
//!
//! One device against itself has no bound: the bits are the same.

use mstar_kernels::DType;
use mstar_kernels::mutant::planted;
use rayon::prelude::*;

use crate::run::verify::PROBABILITY_ROUNDING;

/// How far the rounding of the output's dtype may be exceeded.
const ROUNDING_MARGIN: f64 = 1.4;
/// What f32 and `lse` are allowed against the oracle whatever rounding comes to.
const F32_FLOOR: f64 = 1e-6;
/// Two devices may each be as far from the oracle.
const SIDES: f64 = 2.0;
/// How much farther one vector in f32, or one `lse`, may be than its row.
const ONE_OF_ROW: f64 = 4.0;

/// How outputs are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gate {
    /// Element type of `o`.
    pub(super) dtype: DType,
    /// Whether both sides are the same device.
    pub(super) exact: bool,
}

/// One row's outputs on one side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Side<'a> {
    /// `[q_len, H, Dv]`, as bytes.
    pub(super) o: &'a [u8],
    /// `[q_len, H]`.
    pub(super) lse: &'a [f32],
}

/// Which rule a row broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// A device gave other bits than itself.
    Bits,
    /// A NaN, or an infinity on one side.
    Finite,
    /// One vector is too far off.
    Vector,
    /// No vector is, and all of them together are.
    Row,
}

impl Rule {
    /// A word for it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Rule::Bits => "bits",
            Rule::Finite => "finite",
            Rule::Vector => "vector",
            Rule::Row => "row",
        }
    }
}

/// Where two sides are farthest apart for what is allowed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Apart {
    /// What was broken.
    pub(super) rule: Rule,
    /// Query of the row.
    pub(super) query: usize,
    /// Query head.
    pub(super) head: usize,
    /// Lane of `o`; `None` for `lse`.
    pub(super) lane: Option<usize>,
    /// Both values there.
    pub(super) values: [f64; 2],
    /// Relative error, by the rule.
    pub(super) error: f64,
    /// What is allowed of it.
    pub(super) allowed: f64,
}

/// An error beside what is allowed of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Error {
    /// Relative.
    pub(super) error: f64,
    /// The bound.
    pub(super) allowed: f64,
}

impl Error {
    /// The share of the bound that is used up; a NaN uses up all and more.
    pub(super) fn share(self) -> f64 {
        match self.error / self.allowed {
            _ if self.error == 0.0 => 0.0,
            share if share.is_nan() => f64::INFINITY,
            share => share,
        }
    }

    /// Keeps the one that uses up more of its bound.
    pub(super) fn keep_worse(&mut self, other: Error) {
        if other.share() > self.share() {
            *self = other;
        }
    }

    fn holds(self) -> bool {
        // Written so that a NaN fails.
        self.error <= self.allowed || planted("across-forgives")
    }
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Compared {
    /// Vectors of a query and a head.
    pub(super) vectors: u64,
    /// Those of the same bits on both sides, `lse` included.
    pub(super) same: u64,
    /// Of all `o`.
    pub(super) row: Error,
    /// Of the vector of `o` that is farthest off.
    pub(super) vector: Error,
    /// Of all `lse`.
    pub(super) lse: Error,
    /// The first rule that was broken, where it was broken most.
    pub(super) apart: Option<Apart>,
}

/// Sums over vectors.
#[derive(Clone, Debug, Default)]
struct Sums {
    same: u64,
    vectors: u64,
    difference: f64,
    /// Sums of squares of either side.
    norms: [f64; 2],
    rounding: f64,
    lse_difference: f64,
    lse_norm: f64,
    vector: Error,
    /// The worst of `o` and of `lse`, broken or not.
    worst: Option<Apart>,
    worst_lse: Option<Apart>,
    broken: Option<Apart>,
}

/// Compares a row of `[H, Dv]` vectors, but for the queries that `skip` names.
pub(super) fn compare(
    gate: Gate,
    [heads, width]: [usize; 2],
    a: Side<'_>,
    b: Side<'_>,
    skip: impl Fn(usize) -> bool + Sync,
) -> Compared {
    let q_len = a.lse.len().checked_div(heads).unwrap_or(0);
    let query = |query: usize| {
        let mut sums = Sums::default();
        if !skip(query) {
            (0..heads).for_each(|head| sums.vector(gate, query, head, heads, width, a, b));
        }
        sums
    };
    // Added in order, so that a report is the same one every time.
    let each: Vec<Sums> = (0..q_len).into_par_iter().map(query).collect();
    each.into_iter().fold(Sums::default(), Sums::and).judge(gate)
}

impl Sums {
    /// Adds one vector.
    fn vector(
        &mut self,
        gate: Gate,
        query: usize,
        head: usize,
        heads: usize,
        width: usize,
        a: Side<'_>,
        b: Side<'_>,
    ) {
        let at = query * heads + head;
        let bytes = width * gate.dtype.size();
        let (x, y) = (&a.o[at * bytes..][..bytes], &b.o[at * bytes..][..bytes]);
        let (lse_x, lse_y) = (f64::from(a.lse[at]), f64::from(b.lse[at]));
        let same = x == y && a.lse[at].to_bits() == b.lse[at].to_bits();
        self.vectors += 1;
        self.same += u64::from(same);

        let (mut difference, mut norms, mut most) = (0f64, [0f64; 2], (-1f64, 0, [0f64; 2]));
        each_lane(gate.dtype, x, y, |lane, x, y| {
            let off = f64::from(x) - f64::from(y);
            difference += off * off;
            norms[0] += f64::from(x).powi(2);
            norms[1] += f64::from(y).powi(2);
            self.rounding += spacing(x, gate.dtype).powi(2) / 12.0;
            let size = if off.is_nan() { f64::INFINITY } else { off.abs() };
            if size > most.0 {
                most = (size, lane, [f64::from(x), f64::from(y)]);
            }
        });
        let error = Error { error: relative(difference, norms[0].max(norms[1])), allowed: one(gate.dtype) };
        let (_, lane, values) = most;
        let place = |rule, lane, values, Error { error, allowed }: Error| Apart {
            rule,
            query,
            head,
            lane,
            values,
            error,
            allowed,
        };
        let finite = difference.is_finite();
        let rule = if finite { Rule::Vector } else { Rule::Finite };
        let farthest = place(rule, Some(lane), values, error);
        if !error.holds() {
            keep_worst(&mut self.broken, &farthest);
        }
        keep_worst(&mut self.worst, &farthest);
        self.vector.keep_worse(error);

        // Equal infinities agree; anything else with one in it is an infinity or a NaN here.
        let off = if lse_x == lse_y { 0.0 } else { lse_x - lse_y };
        let size = if lse_x.is_finite() { lse_x.abs().max(1.0) } else { 1.0 };
        let error = Error { error: off.abs() / size, allowed: ONE_OF_ROW * SIDES * F32_FLOOR };
        let rule = if off.is_finite() { Rule::Vector } else { Rule::Finite };
        let farthest = place(rule, None, [lse_x, lse_y], error);
        if !error.holds() {
            keep_worst(&mut self.broken, &farthest);
        }
        keep_worst(&mut self.worst_lse, &farthest);
        if gate.exact && !same && self.broken.is_none() {
            let (lane, values) = if x == y { (None, [lse_x, lse_y]) } else { (Some(lane), values) };
            self.broken =
                Some(place(Rule::Bits, lane, values, Error { error: difference.sqrt(), allowed: 0.0 }));
        }
        self.difference += difference;
        self.norms = [self.norms[0] + norms[0], self.norms[1] + norms[1]];
        self.lse_difference += off * off;
        self.lse_norm += size * size;
    }

    fn and(mut self, other: Sums) -> Sums {
        for (own, other) in [
            (&mut self.broken, &other.broken),
            (&mut self.worst, &other.worst),
            (&mut self.worst_lse, &other.worst_lse),
        ] {
            if let Some(other) = other {
                keep_worst(own, other);
            }
        }
        self.vector.keep_worse(other.vector);
        Sums {
            same: self.same + other.same,
            vectors: self.vectors + other.vectors,
            difference: self.difference + other.difference,
            norms: [self.norms[0] + other.norms[0], self.norms[1] + other.norms[1]],
            rounding: self.rounding + other.rounding,
            lse_difference: self.lse_difference + other.lse_difference,
            lse_norm: self.lse_norm + other.lse_norm,
            ..self
        }
    }

    fn judge(self, gate: Gate) -> Compared {
        let norm = self.norms[0].max(self.norms[1]);
        let rounding = ROUNDING_MARGIN * relative(self.rounding, norm);
        let side = match gate.dtype {
            DType::F32 => rounding.max(F32_FLOOR),
            _ => PROBABILITY_ROUNDING * rounding,
        };
        // With a norm of 0 any difference is infinitely large, so only equality passes.
        let allowed = if norm == 0.0 { 0.0 } else { SIDES * side };
        let row = Error { error: relative(self.difference, norm), allowed };
        let lse = Error { error: relative(self.lse_difference, self.lse_norm), allowed: SIDES * F32_FLOOR };
        let of_row = |worst: Option<Apart>, Error { error, allowed }: Error| {
            worst.map(|worst| Apart { rule: Rule::Row, error, allowed, ..worst })
        };
        let apart = match self.broken {
            Some(broken) => Some(broken),
            None if !row.holds() => of_row(self.worst, row),
            None if !lse.holds() => of_row(self.worst_lse, lse),
            None => None,
        };
        Compared { vectors: self.vectors, same: self.same, row, vector: self.vector, lse, apart }
    }
}

/// Keeps the one that uses up more of its bound; of equals the earlier.
fn keep_worst(own: &mut Option<Apart>, other: &Apart) {
    let share = |apart: &Apart| Error { error: apart.error, allowed: apart.allowed }.share();
    if own.as_ref().is_none_or(|own| share(other) > share(own)) {
        *own = Some(other.clone());
    }
}

/// What is allowed of one vector of `o`.
fn one(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => 4.0 * 2f64.powi(-8),
        DType::F16 => 4.0 * 2f64.powi(-11),
        _ => ONE_OF_ROW * SIDES * F32_FLOOR,
    }
}

fn relative(part: f64, whole: f64) -> f64 {
    if part == 0.0 { 0.0 } else { (part / whole).sqrt() }
}

/// The distance from `x` to the next number of `dtype`, away from 0.
fn spacing(x: f32, dtype: DType) -> f64 {
    let power = f64::from(f32::from_bits(x.to_bits() & 0x7f80_0000));
    match dtype {
        DType::Bf16 => power.max(2f64.powi(-126)) * 2f64.powi(-7),
        DType::F16 => power.max(2f64.powi(-14)) * 2f64.powi(-10),
        _ => power.max(2f64.powi(-126)) * 2f64.powi(-23),
    }
}

/// The lanes of both, as numbers.
fn each_lane(dtype: DType, x: &[u8], y: &[u8], mut see: impl FnMut(usize, f32, f32)) {
    let size = dtype.size();
    let number = |bytes: &[u8]| match dtype {
        DType::Bf16 => bytemuck::pod_read_unaligned::<half::bf16>(bytes).to_f32(),
        DType::F16 => bytemuck::pod_read_unaligned::<half::f16>(bytes).to_f32(),
        _ => bytemuck::pod_read_unaligned::<f32>(bytes),
    };
    for (lane, (x, y)) in x.chunks_exact(size).zip(y.chunks_exact(size)).enumerate() {
        see(lane, number(x), number(y));
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    const H: usize = 2;
    const D: usize = 64;

    /// A number in -1..1 by its place.
    fn noise(at: usize) -> f64 {
        let mixed = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    }

    struct Row {
        dtype: DType,
        o: Vec<u8>,
        lse: Vec<f32>,
    }

    impl Row {
        /// `q_len` queries of noise, each lane off by as much as `error` says.
        fn new(dtype: DType, q_len: usize, error: impl Fn(usize) -> f64) -> Row {
            let lanes = (0..q_len * H * D).map(|at| noise(at) * (1.0 + error(at)));
            let o = lanes.flat_map(|x| match dtype {
                DType::Bf16 => bf16::from_f64(x).to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f64(x).to_le_bytes().to_vec(),
                _ => (x as f32).to_le_bytes().to_vec(),
            });
            Row { dtype, o: o.collect(), lse: (0..q_len * H).map(|at| 3.0 + noise(at) as f32).collect() }
        }

        fn put(&mut self, at: usize, x: f32) {
            match self.dtype {
                DType::Bf16 => self.o[2 * at..][..2].copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
                DType::F16 => self.o[2 * at..][..2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes()),
                _ => self.o[4 * at..][..4].copy_from_slice(&x.to_le_bytes()),
            }
        }

        fn side(&self) -> Side<'_> {
            Side { o: &self.o, lse: &self.lse }
        }

        fn against(&self, other: &Row, exact: bool) -> Compared {
            compare(Gate { dtype: self.dtype, exact }, [H, D], self.side(), other.side(), |_| false)
        }
    }

    const DTYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

    #[test]
    fn two_roundings_of_the_same_numbers_agree_and_what_is_farther_does_not() {
        for dtype in DTYPES {
            let unit = match dtype {
                DType::Bf16 => 2f64.powi(-8),
                DType::F16 => 2f64.powi(-11),
                _ => 2f64.powi(-22),
            };
            let right = Row::new(dtype, 50, |_| 0.0);
            // Probabilities rounded as well: each side off by up to half a unit before it is rounded itself.
            let other = Row::new(dtype, 50, |at| unit * 0.5 * noise(at + 77));
            let found = right.against(&other, false);
            assert_eq!((found.apart.clone(), found.vectors), (None, 100), "{dtype}");
            assert!(found.row.error > 0.0 && found.same < 100, "{dtype}: {found:?}");
            // Thirty times as far on every lane is no rounding.
            let wrong = Row::new(dtype, 50, |at| 30.0 * unit * noise(at + 77));
            assert!(right.against(&wrong, false).apart.is_some(), "{dtype}");
        }
    }

    #[test]
    fn one_wrong_vector_of_thousands_is_found_where_it_is() {
        for dtype in DTYPES {
            let right = Row::new(dtype, 1500, |_| 0.0);
            let mut wrong = Row::new(dtype, 1500, |_| 0.0);
            let at = (700 * H + 1) * D + 9;
            wrong.put(at, noise(at) as f32 + 0.25);
            let found = right.against(&wrong, false).apart.expect("it is far off");
            assert_eq!((found.query, found.head, found.lane, found.rule), (700, 1, Some(9), Rule::Vector));
            assert!((found.values[1] - found.values[0] - 0.25).abs() < 1e-2, "{found:?}");
            // Not where that query is left out.
            let gate = Gate { dtype, exact: true };
            let skipped = compare(gate, [H, D], right.side(), wrong.side(), |query| query == 700);
            assert_eq!((skipped.apart, skipped.vectors, skipped.same), (None, 2998, 2998));
        }
    }

    #[test]
    fn a_small_error_on_every_lane_breaks_the_rows_bound() {
        let right = Row::new(DType::Bf16, 40, |_| 0.0);
        // 0.9 % each: under what one vector may be off, over what all of them may.
        let wrong = Row::new(DType::Bf16, 40, |_| 0.009);
        let found = right.against(&wrong, false);
        assert!(found.vector.share() < 1.0 && found.row.share() > 1.0, "{found:?}");
        assert_eq!(found.apart.map(|apart| apart.rule), Some(Rule::Row));
    }

    #[test]
    fn f39_nan_and_infinities_agree_with_nothing_but_equal_infinities_of_lse() {
        for dtype in DTYPES {
            let row = |x: f32, lse: f32| {
                let mut row = Row::new(dtype, 3, |_| 0.0);
                row.put(D, x);
                row.lse[4] = lse;
                row
            };
            let none = f32::NEG_INFINITY;
            for exact in [false, true] {
                assert_eq!(row(0.5, none).against(&row(0.5, none), exact).apart, None);
                for [a, b] in [
                    [row(f32::NAN, 1.0), row(0.5, 1.0)],
                    [row(0.5, 1.0), row(f32::NAN, 1.0)],
                    [row(f32::NAN, 1.0), row(f32::NAN, 1.0)],
                    [row(0.5, none), row(0.5, 1.0)],
                    [row(0.5, f32::NAN), row(0.5, f32::NAN)],
                    [row(f32::INFINITY, 1.0), row(f32::INFINITY, 1.0)],
                ] {
                    let found = a.against(&b, exact).apart.expect("no agreement");
                    assert_eq!(found.rule, Rule::Finite, "{dtype} {found:?}");
                }
            }
        }
    }

    #[test]
    fn one_device_gives_the_same_bits() {
        for dtype in DTYPES {
            let right = Row::new(dtype, 9, |_| 0.0);
            let mut other = Row::new(dtype, 9, |_| 0.0);
            assert_eq!(right.against(&other, true).apart, None);
            other.lse[7] = f32::from_bits(other.lse[7].to_bits() + 1);
            assert_eq!(right.against(&other, false).apart, None);
            let found = right.against(&other, true).apart.expect("one bit");
            assert_eq!((found.rule, found.query, found.head, found.lane), (Rule::Bits, 3, 1, None));
        }
    }

    #[test]
    fn nothing_seen_on_both_sides_agrees_and_on_one_does_not() {
        let zeros = || Row { dtype: DType::Bf16, o: vec![0; 2 * H * D], lse: vec![f32::NEG_INFINITY; H] };
        assert_eq!(zeros().against(&zeros(), false).apart, None);
        let mut other = zeros();
        other.put(5, 1e-30);
        assert!(zeros().against(&other, false).apart.is_some());
        assert!(other.against(&zeros(), false).apart.is_some());
    }

    #[test]
    fn what_rounding_adds_is_foreseen_from_the_rounded_numbers() {
        for (dtype, tolerance) in [(DType::Bf16, 0.05), (DType::F16, 0.05)] {
            let (mut known, mut foreseen) = (0f64, 0f64);
            for at in 0..20_000 {
                let x = noise(at);
                let rounded = match dtype {
                    DType::Bf16 => bf16::from_f64(x).to_f32(),
                    _ => half::f16::from_f64(x).to_f32(),
                };
                known += (f64::from(rounded) - x).powi(2);
                foreseen += spacing(rounded, dtype).powi(2) / 12.0;
            }
            let off = (known / foreseen).sqrt() - 1.0;
            assert!(off.abs() < tolerance, "{dtype}: {off}");
        }
    }
}
