//! AVX2 with FMA: eight lanes.

use std::arch::x86_64::*;

use super::Simd;

/// Proof that AVX2 and FMA are there.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2 and FMA.
    #[inline(always)]
    pub(in super::super) unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

/// Calls an intrinsic whose only condition is that its instruction exists.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: the token proves that the machine has the instruction.
        unsafe { $call }
    };
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    type F = __m256;
    type Exponent = __m256i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn split(self, x: __m256) -> (__m256i, __m256) {
        op!({
            let n = _mm256_cvtps_epi32(x);
            (_mm256_slli_epi32::<23>(n), _mm256_sub_ps(x, _mm256_cvtepi32_ps(n)))
        })
    }
    #[inline(always)]
    fn scale2(self, a: __m256, n: __m256i) -> __m256 {
        op!(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n)))
    }
    #[inline(always)]
    fn select(self, bits: u32, a: __m256, b: __m256) -> __m256 {
        op!({
            let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), bit);
            _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)))
        })
    }
    #[inline(always)]
    fn less(self, a: __m256, b: __m256) -> u32 {
        op!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))) as u32
    }
    #[inline(always)]
    fn reduce_max(self, a: __m256) -> f32 {
        op!({
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        })
    }
    #[inline(always)]
    fn reduce_add(self, a: __m256) -> f32 {
        op!({
            let x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        })
    }
    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> __m256 {
        // SAFETY: the caller's promise, and the token's.
        unsafe { _mm256_loadu_ps(at) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, a: __m256) {
        // SAFETY: the caller's promise, and the token's.
        unsafe { _mm256_storeu_ps(at, a) }
    }
    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
    }
}
