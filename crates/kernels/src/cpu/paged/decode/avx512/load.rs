//! Stored elements as sixteen f32, in the order of elements or in the one that is cheapest to load.

use std::arch::x86_64::*;

use half::{bf16, f16};

/// Elements that load as sixteen f32.
pub(super) trait Load: Copy + 'static {
    /// Sixteen elements from `at`.
    ///
    /// # Safety
    /// AVX-512 F and BW; sixteen readable elements.
    unsafe fn load(at: *const Self) -> __m512;

    /// Those of sixteen elements whose bit is set; 0 for the others, which are not read.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; the elements of set bits are readable.
    unsafe fn load_some(at: *const Self, mask: __mmask16) -> __m512;

    /// Thirty-two elements from `at`, in the order that is cheapest to load; [`Load::deal`] puts sums in that order.
    ///
    /// # Safety
    /// AVX-512 F and BW; thirty-two readable elements.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_pair(at: *const Self) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe { [Self::load(at), Self::load(at.add(16))] }
    }

    /// From the order of elements to that of [`Load::load_pair`].
    ///
    /// # Safety
    /// AVX-512 F.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn deal(sums: [__m512; 2]) -> [__m512; 2] {
        sums
    }

    /// Undoes [`Load::deal`].
    ///
    /// # Safety
    /// AVX-512 F.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn gather(sums: [__m512; 2]) -> [__m512; 2] {
        sums
    }
}

impl Load for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, at) }
    }
}

impl Load for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const bf16) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_loadu_si256(at.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const bf16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    // Elements of even index, then those of odd: a shift and a mask, where widening in order takes four operations.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_pair(at: *const bf16) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm512_loadu_si512(at.cast()) };
        let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(odd)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn deal([low, high]: [__m512; 2]) -> [__m512; 2] {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
        [_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn gather([even, odd]: [__m512; 2]) -> [__m512; 2] {
        let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let high = _mm512_or_si512(low, _mm512_set1_epi32(8));
        [_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)]
    }
}

impl Load for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const f16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const f16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) })
    }
}
