//! The multiplication sixteen keys a register: in f32, and of bf16 pairs through `vdpbf16ps`.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::lanes::{self, Lanes};
use super::{BLOCK, Block};

/// Heads and registers of keys that are multiplied at once: enough sums to cover the latency of a multiply-add, and few
/// enough loads a sum.
const HEADS: usize = 4;
const VECTORS: usize = 4;

/// Proof that AVX-512 F is there, and, with `PAIRS`, BF16.
#[derive(Clone, Copy)]
struct Avx512<const PAIRS: bool>(());

impl<const PAIRS: bool> Lanes for Avx512<PAIRS> {
    const LANES: usize = 16;
    type V = __m512;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: the token proves that the machine has the instruction; so below.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn relu(self, x: __m512) -> __m512 {
        // SAFETY: as above. Of a NaN and a number, `vmaxps` returns the second operand.
        unsafe { _mm512_max_ps(_mm512_setzero_ps(), x) }
    }
    #[inline(always)]
    fn dot(self, sum: __m512, q: __m512, keys: __m512) -> __m512 {
        // SAFETY: as above; a register of pairs is any 64 bytes.
        unsafe {
            if PAIRS {
                _mm512_dpbf16_ps(sum, transmute::<__m512, __m512bh>(q), transmute::<__m512, __m512bh>(keys))
            } else {
                _mm512_fmadd_ps(q, keys, sum)
            }
        }
    }
    #[inline(always)]
    unsafe fn load(self, at: *const u32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
    #[inline(always)]
    unsafe fn broadcast(self, at: *const u32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_ps(*at.cast()) }
    }
    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint, which reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(at, x) }
    }
}

/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; the block's arrays have the lengths that its fields say.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn multiply(block: &Block<'_>, out: &mut [f32; BLOCK]) {
    // SAFETY: the caller's promise.
    unsafe { lanes::multiply::<_, HEADS, VECTORS>(Avx512::<false>(()), block, out) }
}

/// # Safety
/// As [`multiply`], and the machine has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_pairs(block: &Block<'_>, out: &mut [f32; BLOCK]) {
    // SAFETY: the caller's promise.
    unsafe { lanes::multiply::<_, HEADS, VECTORS>(Avx512::<true>(()), block, out) }
}
