//! How fast one thread multiplies and adds: the compute side of a roofline, measured where it is used.

use std::time::{Duration, Instant};

use super::Isa;
use crate::DType;

/// Multiply-adds between two looks at the clock.
const ROUNDS: usize = 4096;

/// Floating-point operations a second of the calling thread, by independent multiply-adds in registers with the
/// instructions that kernels of `isa` use for operands of `dtype` (for bf16 dot products where there are any). Two
/// operations a multiply-add. Takes about `time`; the best of many short runs counts, so that an interruption does not
/// show. Run it on every thread at once for a machine's peak.
///
/// An `isa` that this machine lacks is measured as [`Isa::Portable`].
pub fn peak_flops(isa: Isa, dtype: DType, time: Duration) -> f64 {
    let isa = if isa.is_supported() { isa } else { Isa::Portable };
    let started = Instant::now();
    let mut best = 0f64;
    loop {
        let begun = Instant::now();
        let operations = run(isa, dtype);
        best = best.max(operations / begun.elapsed().as_secs_f64().max(1e-9));
        if started.elapsed() >= time {
            return best;
        }
    }
}

/// One short run; the operations that it did.
fn run(isa: Isa, dtype: DType) -> f64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller found the instruction set supported.
        Isa::Avx512Bf16 if dtype == DType::Bf16 => unsafe { x86::bf16() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above; both have AVX-512 F.
        Isa::Avx512Bf16 | Isa::Avx512 => unsafe { x86::avx512() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2Fma => unsafe { x86::avx2() },
        _ => {
            let _ = dtype;
            portable()
        }
    }
}

fn portable() -> f64 {
    let mut sums = [[0f32; 8]; 8];
    let (a, b) = (std::hint::black_box(0.999f32), std::hint::black_box(1e-3f32));
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            for x in sum {
                *x = *x * a + b;
            }
        }
    }
    std::hint::black_box(sums);
    (ROUNDS * 64 * 2) as f64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::ROUNDS;

    /// Enough accumulators to cover the latency of a multiply-add.
    const CHAINS: usize = 12;

    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512() -> f64 {
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(1e-3)));
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        (ROUNDS * CHAINS * 16 * 2) as f64
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16() -> f64 {
        let one = _mm512_set1_ps(black_box(0.5));
        let pairs = _mm512_cvtne2ps_pbh(one, one);
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, pairs, pairs);
            }
        }
        black_box(sums);
        (ROUNDS * CHAINS * 32 * 2) as f64
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2() -> f64 {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(1e-3)));
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
        (ROUNDS * CHAINS * 8 * 2) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_body_counts_its_operations() {
        for &isa in Isa::supported() {
            for dtype in [DType::F32, DType::Bf16] {
                assert!(peak_flops(isa, dtype, Duration::from_millis(1)) > 1e6, "{isa} {dtype}");
            }
        }
    }
}
