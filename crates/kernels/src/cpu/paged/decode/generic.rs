//! Plain Rust bodies: once for any machine, once compiled for AVX2 with FMA.
//!
//! Sums run over sixteen partial sums, one a lane of a register, folded in a fixed order at the end.

use half::{bf16, f16};

use super::body::{Body, Scores, TILE, Transform, VALUE_KEYS, Values};

const WIDTH: usize = 16;

/// A stored element that widens to f32.
pub(super) trait Widen: Copy + 'static {
    fn widen(self) -> f32;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Widen for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adds sixteen partial sums, halves first.
#[inline(always)]
fn fold(mut sums: [f32; WIDTH]) -> f32 {
    let mut half = WIDTH / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// `2^x` for `x <= 0`; 0 below the smallest normal number. Coefficients: Cephes `exp2f`.
#[inline(always)]
fn exp2<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    let clamped = x.max(-126.0);
    let shifted = clamped + ROUND;
    let f = clamped - (shifted - ROUND);
    let mut p = EXP2[0];
    for &coefficient in &EXP2[1..] {
        p = mul_add::<FMA>(p, f, coefficient);
    }
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -126.0 { 0.0 } else { p * power }
}

/// Coefficients of `2^f` for `|f| <= 1/2`, highest power first.
pub(super) const EXP2: [f32; 7] = [
    1.535_336_2e-4,
    1.339_887_4e-3,
    9.618_437e-3,
    5.550_332_6e-2,
    2.402_264_8e-1,
    std::f32::consts::LN_2,
    1.0,
];

/// Rational minimax approximation of `tanh` on `[-TANH_LIMIT, TANH_LIMIT]`, as in Eigen's `ptanh`: odd numerator
/// and even denominator, highest power first.
pub(super) const TANH_P: [f32; 7] = [
    -2.760_768_5e-16,
    2.000_188e-13,
    -8.604_672e-11,
    5.122_297e-8,
    1.485_722_4e-5,
    6.372_619_3e-4,
    4.893_525e-3,
];
/// Denominator of [`TANH_P`].
pub(super) const TANH_Q: [f32; 4] = [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3];
/// Where `tanh` rounds to 1.
pub(super) const TANH_LIMIT: f32 = 7.905_311;

#[inline(always)]
fn tanh<const FMA: bool>(x: f32) -> f32 {
    let x = x.clamp(-TANH_LIMIT, TANH_LIMIT);
    let square = x * x;
    let (mut p, mut q) = (TANH_P[0], TANH_Q[0]);
    for &coefficient in &TANH_P[1..] {
        p = mul_add::<FMA>(p, square, coefficient);
    }
    for &coefficient in &TANH_Q[1..] {
        q = mul_add::<FMA>(q, square, coefficient);
    }
    x * p / q
}

#[inline(always)]
unsafe fn scores<K: Widen, const FMA: bool>(job: &Scores<'_>) {
    for (key, &row) in job.keys.iter().enumerate() {
        for head in 0..job.heads {
            let row = row.wrapping_add(head * job.key_head).cast::<K>();
            for lane in 0..job.lanes {
                // SAFETY: the caller packed `lanes` queries a head of `q_stride >= head_dim` floats, and `row` names
                // `head_dim` readable elements.
                let sum = unsafe {
                    let q = job.q.add(head * job.q_head).cast::<f32>().add(lane * job.q_stride);
                    let mut sums = [0f32; WIDTH];
                    let whole = job.head_dim / WIDTH * WIDTH;
                    for at in (0..whole).step_by(WIDTH) {
                        for i in 0..WIDTH {
                            sums[i] = mul_add::<FMA>(*q.add(at + i), (*row.add(at + i)).widen(), sums[i]);
                        }
                    }
                    for at in whole..job.head_dim {
                        let (q, key) = (*q.add(at), (*row.add(at)).widen());
                        sums[at - whole] = mul_add::<FMA>(q, key, sums[at - whole]);
                    }
                    fold(sums)
                };
                // SAFETY: scores have room for TILE keys a lane, the run's among them.
                unsafe { *job.scores.add((head * job.lanes + lane) * TILE + key) = sum };
            }
        }
    }
}

#[inline(always)]
unsafe fn values<K: Widen, const FMA: bool>(job: &Values<'_>) {
    for (block, rows) in job.values.chunks(VALUE_KEYS).enumerate() {
        for head in 0..job.heads {
            for lane in 0..job.lanes {
                // SAFETY: the accumulators have `acc_stride >= head_dim` floats a lane, heads `acc_head` apart.
                let acc = unsafe {
                    let acc = job.acc.add(head * job.acc_head + lane * job.acc_stride);
                    std::slice::from_raw_parts_mut(acc, job.head_dim)
                };
                for (key, &row) in rows.iter().enumerate() {
                    // SAFETY: weights have room for TILE keys a lane, and `row` names `head_dim` readable elements.
                    let (weight, row) = unsafe {
                        let row = row.add(head * job.value_head).cast::<K>();
                        let at = (head * job.lanes + lane) * TILE + block * VALUE_KEYS + key;
                        (*job.weights.add(at), std::slice::from_raw_parts(row, job.head_dim))
                    };
                    for (sum, &value) in acc.iter_mut().zip(row) {
                        *sum = mul_add::<FMA>(weight, value.widen(), *sum);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn transform<const FMA: bool>(scores: &mut [f32; TILE], by: &Transform) {
    for score in scores.iter_mut() {
        *score *= by.sm_scale;
    }
    if by.cap > 0.0 {
        let inverse = 1.0 / by.cap;
        for score in scores.iter_mut() {
            *score = by.cap * tanh::<FMA>(*score * inverse);
        }
    }
    if by.slope != 0.0 {
        for (key, score) in scores.iter_mut().enumerate() {
            *score = mul_add::<FMA>(by.slope, by.distance + key as f32, *score);
        }
    }
}

#[inline(always)]
fn softmax<const FMA: bool>(scores: &mut [f32; TILE], seen: u64, m: &mut f32, l: &mut f32, c: f32) -> f32 {
    let mut top = f32::NEG_INFINITY;
    let mut nan = false;
    for (key, &score) in scores.iter().enumerate() {
        let seen = seen >> key & 1 != 0;
        top = if seen && score > top { score } else { top };
        nan |= seen & score.is_nan();
    }
    let before = *m;
    let now = if top > before { top } else { before };
    if nan {
        return undefined(scores, m, l, now);
    }
    if now == f32::NEG_INFINITY {
        scores.fill(0.0);
        return 1.0;
    }
    let mut sums = [0f32; WIDTH];
    for (key, score) in scores.iter_mut().enumerate() {
        let weight = exp2::<FMA>((*score - now) * c);
        let weight = if seen >> key & 1 != 0 { weight } else { 0.0 };
        *score = weight;
        sums[key % WIDTH] += weight;
    }
    let alpha = if before == f32::NEG_INFINITY { 1.0 } else { exp2::<FMA>((before - now) * c) };
    *m = now;
    *l = mul_add::<FMA>(*l, alpha, fold(sums));
    alpha
}

/// A seen score is NaN: so is the row, and it must not look like one that sees nothing.
#[inline(always)]
pub(super) fn undefined(scores: &mut [f32; TILE], m: &mut f32, l: &mut f32, now: f32) -> f32 {
    scores.fill(0.0);
    (*m, *l) = (if now == f32::NEG_INFINITY { 0.0 } else { now }, f32::NAN);
    1.0
}

#[inline(always)]
fn rescale(acc: &mut [f32], alpha: f32) {
    for value in acc {
        *value *= alpha;
    }
}

unsafe fn scores_portable<K: Widen>(job: &Scores<'_>) {
    // SAFETY: the caller's promise is passed on.
    unsafe { scores::<K, false>(job) }
}

unsafe fn values_portable<K: Widen>(job: &Values<'_>) {
    // SAFETY: the caller's promise is passed on.
    unsafe { values::<K, false>(job) }
}

/// The body for any machine.
pub(super) fn portable_body<K: Widen>() -> Body {
    Body {
        q_bf16: false,
        scores: scores_portable::<K>,
        values: values_portable::<K>,
        transform: transform::<false>,
        softmax: softmax::<false>,
        rescale,
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn scores_avx2<K: Widen>(job: &Scores<'_>) {
        // SAFETY: the caller's promise is passed on.
        unsafe { scores::<K, true>(job) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn values_avx2<K: Widen>(job: &Values<'_>) {
        // SAFETY: the caller's promise is passed on.
        unsafe { values::<K, true>(job) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn transform_avx2(scores: &mut [f32; TILE], by: &Transform) {
        transform::<true>(scores, by)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn softmax_avx2(
        scores: &mut [f32; TILE],
        seen: u64,
        m: &mut f32,
        l: &mut f32,
        c: f32,
    ) -> f32 {
        softmax::<true>(scores, seen, m, l, c)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn rescale_avx2(acc: &mut [f32], alpha: f32) {
        rescale(acc, alpha)
    }
}

/// The body for AVX2 with FMA.
#[cfg(target_arch = "x86_64")]
pub(super) fn avx2_body<K: Widen>() -> Body {
    Body {
        q_bf16: false,
        scores: avx2::scores_avx2::<K>,
        values: avx2::values_avx2::<K>,
        transform: avx2::transform_avx2,
        softmax: avx2::softmax_avx2,
        rescale: avx2::rescale_avx2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_right_to_two_units_and_exact_at_whole_numbers() {
        for i in 0..=126_000 {
            let x = -(i as f32) / 1000.0;
            let (got, want) = (f64::from(exp2::<true>(x)), f64::from(x).exp2());
            assert!((got / want - 1.0).abs() < 2.4e-7, "2^{x}: {got} for {want}");
        }
        for n in 0..126 {
            assert_eq!(exp2::<false>(-(n as f32)), (-n as f32).exp2());
        }
        assert_eq!(exp2::<true>(-1e30), 0.0);
        assert_eq!(exp2::<true>(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn tanh_is_right_to_a_few_units_everywhere() {
        for i in -100_000..=100_000 {
            let x = i as f32 / 10_000.0;
            let (got, want) = (f64::from(tanh::<true>(x)), f64::from(x).tanh());
            assert!((got - want).abs() <= 5e-7 * want.abs(), "tanh({x}): {got} for {want}");
        }
        assert_eq!(tanh::<true>(1e30), tanh::<true>(TANH_LIMIT));
        assert_eq!(tanh::<true>(0.0), 0.0);
    }
}
