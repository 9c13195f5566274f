//! The multiplication over the few vector operations that it needs.

use super::{BLOCK, Block, Planted};

/// Vectors of f32 lanes, a key each, and how a step of packed words is multiplied. A value is a token: it exists only
/// where its instructions do. Everything is `#[inline(always)]` into a function that carries the target features.
pub(super) trait Lanes: Copy {
    /// Keys of a vector.
    const LANES: usize;
    /// `LANES` numbers, or as many words of packed operands.
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    /// `a * b + c`, fused.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of `x` and 0; NaN stays NaN.
    fn relu(self, x: Self::V) -> Self::V;
    /// `sum` and the products of a step's words.
    fn dot(self, sum: Self::V, q: Self::V, keys: Self::V) -> Self::V;

    /// # Safety
    /// `LANES` words are readable at `at`.
    unsafe fn load(self, at: *const u32) -> Self::V;
    /// # Safety
    /// A word is readable at `at`.
    unsafe fn broadcast(self, at: *const u32) -> Self::V;
    /// Asks for the cache line at `at`; any address will do.
    fn prefetch(self, at: *const u8);
    /// # Safety
    /// `LANES` floats are writable at `at`.
    unsafe fn store(self, at: *mut f32, x: Self::V);
}

/// The scores of a block, `HEADS` heads by `VECTORS` vectors of keys at a time.
///
/// # Safety
/// The block's arrays have the lengths that its fields say.
#[inline(always)]
pub(super) unsafe fn multiply<S: Lanes, const HEADS: usize, const VECTORS: usize>(
    s: S,
    block: &Block<'_>,
    out: &mut [f32; BLOCK],
) {
    const { assert!(BLOCK.is_multiple_of(S::LANES * VECTORS)) };
    let planted = Planted::now();
    let heads = block.weights.len();
    for first in (0..BLOCK).step_by(S::LANES * VECTORS) {
        let mut totals = [s.splat(0.0); VECTORS];
        let mut head = 0;
        let turns = heads.div_ceil(HEADS);
        // SAFETY: heads `head..head + N` are below `heads`, and the vectors from `first` on lie in a block.
        unsafe {
            while head + HEADS <= heads {
                some_heads::<S, HEADS, VECTORS>(s, block, head, first, &mut totals, planted);
                if first == 0 {
                    block.ahead.bring(head / HEADS, turns, |at| s.prefetch(at));
                }
                head += HEADS;
            }
            if head + 2 <= heads && HEADS > 2 {
                some_heads::<S, 2, VECTORS>(s, block, head, first, &mut totals, planted);
                head += 2;
            }
            while head < heads {
                some_heads::<S, 1, VECTORS>(s, block, head, first, &mut totals, planted);
                head += 1;
            }
            for (v, total) in totals.into_iter().enumerate() {
                s.store(out.as_mut_ptr().add(first + v * S::LANES), total);
            }
        }
    }
}

/// Adds the weighted products of heads `head..head + HEADS` to `totals`, in order of heads.
#[inline(always)]
unsafe fn some_heads<S: Lanes, const HEADS: usize, const VECTORS: usize>(
    s: S,
    block: &Block<'_>,
    head: usize,
    first: usize,
    totals: &mut [S::V; VECTORS],
    planted: Planted,
) {
    let depth = block.depth;
    let mut sums = [[s.splat(0.0); VECTORS]; HEADS];
    // SAFETY: the caller's promise about lengths; steps stay below `depth`.
    unsafe {
        let q = block.q.as_ptr().add(head * depth);
        let keys = block.keys.as_ptr().add(first);
        for step in 0..depth {
            let mut k = [s.splat(0.0); VECTORS];
            for v in 0..VECTORS {
                k[v] = s.load(keys.add(step * BLOCK + v * S::LANES));
            }
            for h in 0..HEADS {
                let q = s.broadcast(q.add(h * depth + step));
                for v in 0..VECTORS {
                    sums[h][v] = s.dot(sums[h][v], q, k[v]);
                }
            }
        }
    }
    for h in 0..HEADS {
        let weight = s.splat(block.weights[head + h] * planted.sign);
        for v in 0..VECTORS {
            let product = if planted.relu_dropped { sums[h][v] } else { s.relu(sums[h][v]) };
            totals[v] = s.mul_add(weight, product, totals[v]);
        }
    }
}
