//! One image's attention as a plain loop, and the numbers it is made of.

use std::ops::Range;

use crate::{KEY_HEADS, QUERY_HEADS, WIDTH};

/// A number in -1..1 for each index.
pub fn noise(index: usize) -> f32 {
    let mut x = (index as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// One image under its text.
pub struct Row<'a> {
    /// `[T, heads, WIDTH]`: queries, keys, values of every image's tokens.
    pub fused: &'a [f32],
    /// Heads of a fused token.
    pub heads: usize,
    /// `[P, KEY_HEADS, WIDTH]`: keys of every text.
    pub k_prefix: &'a [f32],
    /// Their values.
    pub v_prefix: &'a [f32],
    /// This image's text.
    pub text: Range<usize>,
    /// Its own tokens.
    pub image: Range<usize>,
}

impl Row<'_> {
    fn own(&self, token: usize, head: usize) -> &[f32] {
        &self.fused[(token * self.heads + head) * WIDTH..][..WIDTH]
    }

    /// What a query head of `query` gets.
    pub fn attend(&self, query: usize, head: usize, key_head: usize) -> Vec<f32> {
        let mut pairs: Vec<(&[f32], &[f32])> = Vec::new();
        for token in self.text.clone() {
            let at = (token * KEY_HEADS + key_head) * WIDTH;
            pairs.push((&self.k_prefix[at..at + WIDTH], &self.v_prefix[at..at + WIDTH]));
        }
        for token in self.image.clone() {
            let value = QUERY_HEADS + KEY_HEADS + key_head;
            pairs.push((self.own(token, QUERY_HEADS + key_head), self.own(token, value)));
        }
        let q = self.own(query, head);
        let scale = 1.0 / (WIDTH as f64).sqrt();
        let score = |key: &[f32]| -> f64 {
            scale * q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
        };
        let weights: Vec<f64> = pairs.iter().map(|(key, _)| score(key).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let lane = |lane: usize| -> f64 {
            pairs.iter().zip(&weights).map(|((_, value), weight)| weight * f64::from(value[lane])).sum()
        };
        (0..WIDTH).map(|at| (lane(at) / sum) as f32).collect()
    }
}
