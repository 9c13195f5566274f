//! The few vector operations that the tile kernel is written in, one implementation an instruction set.
//!
//! A [`Simd`] value is a token: it exists only where its instructions do, so arithmetic through it is safe.
//! Everything is `#[inline(always)]`; the bodies at the foot of [`super::body`] carry the target features,
//! and the operations are compiled inside them.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512, Bf16Pairs};
pub(super) use portable::Portable;

/// Vectors of f32, and what the kernel does with them.
pub(super) trait Simd: Copy {
    /// Elements of a vector.
    const LANES: usize;
    /// A vector.
    type F: Copy;
    /// A vector of powers of two.
    type Exponent: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`; fused wherever the machine can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b + c`, the product unrounded on every machine.
    #[inline(always)]
    fn mul_add_once(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.mul_add(a, b, c)
    }
    /// The larger; `b` when either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `x = n + f` with `n` integral and `|f| <= 1/2`, for `x` in -126..127; a NaN stays one in `f`.
    fn split(self, x: Self::F) -> (Self::Exponent, Self::F);
    /// `a * 2^n` for `a` in 0.5..2.
    fn scale2(self, a: Self::F, n: Self::Exponent) -> Self::F;
    /// Lane `i` is `a`'s where bit `i` is set, else `b`'s.
    fn select(self, bits: u32, a: Self::F, b: Self::F) -> Self::F;
    /// Bit `i` is set where `a < b`.
    fn less(self, a: Self::F, b: Self::F) -> u32;
    /// The largest lane, by a fixed tree.
    fn reduce_max(self, a: Self::F) -> f32;
    /// The sum of the lanes, by a fixed tree.
    fn reduce_add(self, a: Self::F) -> f32;

    /// # Safety
    /// `LANES` floats are readable at `at`.
    unsafe fn load(self, at: *const f32) -> Self::F;

    /// # Safety
    /// `LANES` floats are writable at `at`.
    unsafe fn store(self, at: *mut f32, a: Self::F);

    /// Asks for the cache line at `at` to be brought near; any address will do.
    fn prefetch(self, at: *const u8);

    /// Transposes a square of words: `to[c * stride + r] = rows[r][c]` for `r`, `c` below `LANES`, in
    /// ascending order of `c`.
    ///
    /// # Safety
    /// `rows` has `LANES` entries with `LANES` readable words each, and the words written are writable.
    #[inline(always)]
    unsafe fn transpose(self, rows: &[*const u32], to: *mut u32, stride: usize) {
        for c in 0..Self::LANES {
            for (r, &row) in rows.iter().enumerate().take(Self::LANES) {
                // SAFETY: the caller's promise; rows may be unaligned.
                unsafe { to.add(c * stride + r).write(row.add(c).read_unaligned()) };
            }
        }
    }
}

/// How the words of a packed operand multiply: one f32 a word, or a pair of bf16.
pub(super) trait Product<S: Simd> {
    /// Tensor elements in a packed word.
    const PER_WORD: usize;

    /// `acc + a * b`, `a` being one word that every lane shares; a pair adds both its products.
    ///
    /// # Safety
    /// A word is readable at `a`.
    unsafe fn multiply_add(s: S, acc: S::F, a: *const u32, b: S::F) -> S::F;

    /// Stores vector `index` of a row of softmax weights in the operand's element type.
    ///
    /// # Safety
    /// `(index + 1) * LANES` elements of that type are writable at `row`.
    unsafe fn store_weights(s: S, row: *mut f32, index: usize, weights: S::F);

    /// Interleaves two rows of values for the pairwise product: word `i` becomes `(even[i], odd[i])`.
    /// Only called where `PER_WORD` is 2.
    ///
    /// # Safety
    /// `2 * LANES` elements are readable at both, as many words writable at `to`.
    unsafe fn interleave(s: S, even: *const u16, odd: *const u16, to: *mut u32);
}

/// Words that are f32: the exact product, on any instruction set.
pub(super) struct Words;

impl<S: Simd> Product<S> for Words {
    const PER_WORD: usize = 1;

    #[inline(always)]
    unsafe fn multiply_add(s: S, acc: S::F, a: *const u32, b: S::F) -> S::F {
        // SAFETY: the caller's promise.
        let a = f32::from_bits(unsafe { a.read() });
        s.mul_add(s.splat(a), b, acc)
    }

    #[inline(always)]
    unsafe fn store_weights(s: S, row: *mut f32, index: usize, weights: S::F) {
        // SAFETY: the caller's promise.
        unsafe { s.store(row.add(index * S::LANES), weights) };
    }

    #[inline(always)]
    unsafe fn interleave(_: S, _: *const u16, _: *const u16, _: *mut u32) {
        unreachable!("f32 values are not interleaved");
    }
}
