//! Plain Rust over arrays of four: SSE2 on x86-64, Advanced SIMD on AArch64, whatever the compiler finds.

use super::Simd;

/// Needs nothing of the machine.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable;

const LANES: usize = 4;

/// `1.5 * 2^23`: adding and subtracting it rounds to the nearest integer.
const ROUNDER: f32 = 12_582_912.0;

#[inline(always)]
fn map(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

impl Simd for Portable {
    const LANES: usize = LANES;
    type F = [f32; LANES];
    type Exponent = [f32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Without the instruction a fused product is a library call an element.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            map(|i| a[i].mul_add(b[i], c[i]))
        } else {
            map(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn mul_add_once(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // The product of two f32 is exact in f64.
        map(|i| (f64::from(a[i]) * f64::from(b[i]) + f64::from(c[i])) as f32)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        map(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn split(self, x: Self::F) -> (Self::F, Self::F) {
        let n = map(|i| (x[i] + ROUNDER) - ROUNDER);
        (n, self.sub(x, n))
    }
    #[inline(always)]
    fn scale2(self, a: Self::F, n: Self::F) -> Self::F {
        map(|i| a[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn select(self, bits: u32, a: Self::F, b: Self::F) -> Self::F {
        map(|i| if bits >> i & 1 == 1 { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn less(self, a: Self::F, b: Self::F) -> u32 {
        (0..LANES).fold(0, |bits, i| bits | u32::from(a[i] < b[i]) << i)
    }
    #[inline(always)]
    fn reduce_max(self, a: Self::F) -> f32 {
        a[0].max(a[2]).max(a[1].max(a[3]))
    }
    #[inline(always)]
    fn reduce_add(self, a: Self::F) -> f32 {
        (a[0] + a[2]) + (a[1] + a[3])
    }
    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, a: Self::F) {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<[f32; LANES]>().write_unaligned(a) }
    }
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
