//! AVX-512: sixteen lanes, and bf16 pairs through `vdpbf16ps`.

use std::arch::x86_64::*;

use super::{Product, Simd};

/// Proof that AVX-512 F, BW, DQ and VL are there.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub(in super::super) unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

/// Calls an intrinsic whose only condition is that its instruction exists.
macro_rules! op {
    ($call:expr) => {
        // SAFETY: the token proves that the machine has the instruction.
        unsafe { $call }
    };
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    type F = __m512;
    type Exponent = __m512i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn split(self, x: __m512) -> (__m512i, __m512) {
        // `vscalefps` and `vreduceps` would say it in two instructions, at twice the cost.
        op!({
            let n = _mm512_cvtps_epi32(x);
            (_mm512_slli_epi32::<23>(n), _mm512_sub_ps(x, _mm512_cvtepi32_ps(n)))
        })
    }
    #[inline(always)]
    fn scale2(self, a: __m512, n: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), n)))
    }
    #[inline(always)]
    fn select(self, bits: u32, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mask_blend_ps(bits as u16, b, a))
    }
    #[inline(always)]
    fn less(self, a: __m512, b: __m512) -> u32 {
        u32::from(op!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b)))
    }
    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        op!(_mm512_reduce_max_ps(a))
    }
    #[inline(always)]
    fn reduce_add(self, a: __m512) -> f32 {
        op!(_mm512_reduce_add_ps(a))
    }
    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> __m512 {
        // SAFETY: the caller's promise, and the token's.
        unsafe { _mm512_loadu_ps(at) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, a: __m512) {
        // SAFETY: the caller's promise, and the token's.
        unsafe { _mm512_storeu_ps(at, a) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
    }

    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const u32], to: *mut u32, stride: usize) {
        assert!(rows.len() == 16);
        // SAFETY: the caller promises sixteen readable words a row and room for the result; the token, the
        // instructions.
        unsafe {
            // `quads[4 * g + c]`: in its 128-bit lane L, column 4 L + c of rows 4 g .. 4 g + 4.
            let mut quads = [_mm512_setzero_ps(); 16];
            for g in 0..4 {
                let (a, b) = (_mm512_loadu_ps(rows[4 * g].cast()), _mm512_loadu_ps(rows[4 * g + 1].cast()));
                let (c, d) =
                    (_mm512_loadu_ps(rows[4 * g + 2].cast()), _mm512_loadu_ps(rows[4 * g + 3].cast()));
                let (ab, cd) =
                    (_mm512_castps_pd(_mm512_unpacklo_ps(a, b)), _mm512_castps_pd(_mm512_unpacklo_ps(c, d)));
                quads[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                quads[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                let (ab, cd) =
                    (_mm512_castps_pd(_mm512_unpackhi_ps(a, b)), _mm512_castps_pd(_mm512_unpackhi_ps(c, d)));
                quads[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                quads[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
            }
            let mut columns = [_mm512_setzero_ps(); 16];
            for c in 0..4 {
                let (a, b, e, f) = (quads[c], quads[4 + c], quads[8 + c], quads[12 + c]);
                let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
                let (even_high, odd_high) =
                    (_mm512_shuffle_f32x4::<0x88>(e, f), _mm512_shuffle_f32x4::<0xdd>(e, f));
                columns[c] = _mm512_shuffle_f32x4::<0x88>(even, even_high);
                columns[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even, even_high);
                columns[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd, odd_high);
                columns[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd, odd_high);
            }
            for (c, &column) in columns.iter().enumerate() {
                _mm512_storeu_ps(to.add(c * stride).cast(), column);
            }
        }
    }
}

/// Words that are pairs of bf16, multiplied by `vdpbf16ps`: exact products, f32 sums, subnormals as zero.
/// Only used where the machine has AVX512-BF16.
pub(in super::super) struct Bf16Pairs;

impl Product<Avx512> for Bf16Pairs {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn multiply_add(_: Avx512, acc: __m512, a: *const u32, b: __m512) -> __m512 {
        // SAFETY: the caller's promise; the types are the same 64 bytes; the bodies that use this product
        // are entered only on machines with AVX512-BF16.
        unsafe {
            let a: __m512bh = std::mem::transmute(_mm512_set1_epi32(a.cast::<i32>().read()));
            _mm512_dpbf16_ps(acc, a, std::mem::transmute::<__m512, __m512bh>(b))
        }
    }

    #[inline(always)]
    unsafe fn store_weights(_: Avx512, row: *mut f32, index: usize, weights: __m512) {
        // SAFETY: the caller's promise; sixteen bf16 are 32 bytes.
        unsafe {
            let rounded: __m256i = std::mem::transmute(_mm512_cvtneps_pbh(weights));
            _mm256_storeu_si256(row.cast::<u16>().add(index * 16).cast(), rounded);
        }
    }

    #[inline(always)]
    unsafe fn interleave(_: Avx512, even: *const u16, odd: *const u16, to: *mut u32) {
        // SAFETY: the caller promises 32 elements at each, and 32 words at `to`.
        unsafe {
            let (even, odd) = (_mm512_loadu_si512(even.cast()), _mm512_loadu_si512(odd.cast()));
            let (low, high) = (
                _mm512_loadu_si512(PAIRS.as_ptr().cast()),
                _mm512_loadu_si512(PAIRS.as_ptr().add(16).cast()),
            );
            _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(to.add(16).cast(), _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}

/// Word `i` takes element `i` of the first row and element `i` of the second (indices from 32 on).
static PAIRS: [u32; 32] = {
    let mut words = [0; 32];
    let mut i = 0;
    while i < 32 {
        words[i] = (i | (32 + i) << 16) as u32;
        i += 1;
    }
    words
};
