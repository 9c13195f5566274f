//! The multiplication eight keys a register.

use std::arch::x86_64::*;

use super::lanes::{self, Lanes};
use super::{BLOCK, Block};

/// Heads and registers of keys that are multiplied at once: eight sums cover the latency of two multiply-adds a cycle.
const HEADS: usize = 4;
const VECTORS: usize = 2;

/// Proof that AVX2 and FMA are there.
#[derive(Clone, Copy)]
struct Avx2(());

impl Lanes for Avx2 {
    const LANES: usize = 8;
    type V = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: the token proves that the machine has the instruction; so below.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn relu(self, x: __m256) -> __m256 {
        // SAFETY: as above. Of a NaN and a number, `vmaxps` returns the second operand.
        unsafe { _mm256_max_ps(_mm256_setzero_ps(), x) }
    }
    #[inline(always)]
    fn dot(self, sum: __m256, q: __m256, keys: __m256) -> __m256 {
        self.mul_add(q, keys, sum)
    }
    #[inline(always)]
    unsafe fn load(self, at: *const u32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(self, at: *const u32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_set1_ps(*at.cast()) }
    }
    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint, which reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(at, x) }
    }
}

/// # Safety
/// The machine has AVX2 and FMA; the block's arrays have the lengths that its fields say.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn multiply(block: &Block<'_>, out: &mut [f32; BLOCK]) {
    // SAFETY: the caller's promise.
    unsafe { lanes::multiply::<_, HEADS, VECTORS>(Avx2(()), block, out) }
}
