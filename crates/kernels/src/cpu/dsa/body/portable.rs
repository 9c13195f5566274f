//! The multiplication in plain Rust.

use super::{BLOCK, Block, Planted};

pub(super) fn multiply(block: &Block<'_>, out: &mut [f32; BLOCK]) {
    out.fill(0.0);
    let planted = Planted::now();
    for (q, &weight) in block.q.chunks_exact(block.depth).zip(block.weights) {
        let mut sums = [0f32; BLOCK];
        for (&q, keys) in q.iter().zip(block.keys.chunks_exact(BLOCK)) {
            let q = f32::from_bits(q);
            for (sum, &key) in sums.iter_mut().zip(keys) {
                *sum += q * f32::from_bits(key);
            }
        }
        for (score, &sum) in out.iter_mut().zip(&sums) {
            // Not `max`, which would turn NaN into 0.
            let product = if sum <= 0.0 && !planted.relu_dropped { 0.0 } else { sum };
            *score += planted.sign * weight * product;
        }
    }
}
