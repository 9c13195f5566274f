//! Attending blocks where they lie in a ring gives the bits of attending them moved together.

use super::batch::{Batch, Shape};
use crate::flex::{MaskMod, ScoreMod};
use crate::testing::{Number, hash, on_every_isa};

/// `count` of `blocks`, ascending.
fn pick(blocks: usize, count: usize, seed: u64) -> Vec<usize> {
    let mut all: Vec<usize> = (0..blocks).collect();
    all.sort_by_key(|&block| hash(&[seed, block as u64]));
    all.truncate(count);
    all.sort_unstable();
    all
}

/// A ring that shows `blocks`, and its compacted twin; with `table`, mods see the ring's block numbers in both.
fn pair(shape: Shape, blocks: &[usize], table: bool) -> (Batch, Batch) {
    let size = shape.blocks[1];
    let ring = Batch { q_offset: 60, ..Batch::shared(shape, blocks) };
    let keys: Vec<usize> = blocks.iter().flat_map(|b| b * size..((b + 1) * size).min(shape.m)).collect();
    let all: Vec<usize> = (0..blocks.len()).collect();
    let mut compact = Batch { q_offset: 60, ..Batch::shared(Shape { m: keys.len(), ..shape }, &all) };
    compact.content = Some(keys.iter().map(|&key| key as u64).collect());
    if table {
        compact.positions = Some(blocks.iter().map(|&block| block as i32).collect());
    }
    (ring, compact)
}

fn hold<Q: Number, K: Number>(ring: &Batch, compact: &Batch, score: &[ScoreMod], what: &str) {
    on_every_isa(|isa| {
        for workers in [1, 2, 5] {
            let ring = Batch { workers, ..ring.clone() };
            let mask = [MaskMod::SlidingWindow { left: 100, right: 40 }];
            let (a, b) = (ring.run::<Q, K>(score, &mask), compact.run::<Q, K>(score, &mask));
            assert!(a == b, "{what}, {workers} threads on {isa}");
        }
    });
}

#[test]
fn f34_a_ring_has_the_bits_of_its_compacted_keys_for_mods_that_ask_for_no_index() {
    for trial in 0..12 {
        let size = [128, 32, 16, 5, 128, 200][trial % 6];
        let total = 3 + hash(&[trial as u64, 1]) as usize % 9;
        let shape = Shape { b: 1, h: 2, g: 1, l: 33, m: total * size, d: 16, dv: 8, blocks: [128, size] };
        let blocks = pick(total, 1 + hash(&[trial as u64, 2]) as usize % total, trial as u64);
        let (ring, compact) = pair(shape, &blocks, false);
        hold::<f32, f32>(&ring, &compact, &[], &format!("{blocks:?} of {total} x {size}"));
        hold::<half::bf16, half::bf16>(&ring, &compact, &[ScoreMod::SoftCap(1.5)], "capped");
    }
}

/// Blocks are attended in ascending order: as one block of the same keys is, key after key.
#[test]
fn f34_a_ring_has_the_bits_of_its_keys_in_one_block() {
    for trial in 0..6u64 {
        let (size, total) = ([128, 32, 16][trial as usize % 3], 4 + hash(&[trial, 1]) as usize % 9);
        let shape = Shape { b: 1, h: 2, g: 1, l: 33, m: total * size, d: 16, dv: 8, blocks: [128, size] };
        let (ring, compact) = pair(shape, &pick(total, 3 + trial as usize % 2, trial), false);
        let m = compact.shape.m;
        let mut one = Batch::shared(Shape { blocks: [128, m], ..compact.shape }, &[0]);
        (one.content, one.q_offset) = (compact.content, ring.q_offset);
        hold::<f32, f32>(&ring, &one, &[], &format!("{m} keys of {total} x {size}"));
        hold::<half::bf16, half::bf16>(&ring, &one, &[ScoreMod::SoftCap(1.5)], "capped");
    }
}

#[test]
fn f34_with_a_position_table_it_has_them_for_every_mod() {
    let slopes = [0.02, 0.01];
    let table: Vec<f32> = (0..2 * 101).map(|i| crate::testing::noise(&[8, i])).collect();
    for trial in 0..8u64 {
        let total = 3 + hash(&[trial, 1]) as usize % 9;
        let size = [128, 32, 48][trial as usize % 3];
        let shape = Shape { b: 1, h: 2, g: 1, l: 40, m: total * size - 3, d: 16, dv: 8, blocks: [20, size] };
        let blocks = pick(total, 1 + hash(&[trial, 2]) as usize % total, trial);
        let (mut ring, mut compact) = pair(shape, &blocks, true);
        for batch in [&mut ring, &mut compact] {
            batch.lists.lists.iter_mut().flatten().enumerate().for_each(|(i, block)| block.1 = i % 2 == 0);
        }
        let bias = ScoreMod::RelBias { table: &table, window: 50 };
        let mods = [ScoreMod::Alibi { slopes: &slopes }, bias, ScoreMod::Causal];
        hold::<f32, f32>(&ring, &compact, &mods, &format!("{blocks:?} of {total} x {size}"));
    }
}

#[test]
fn a_ring_longer_than_a_leaf_has_them_too() {
    let shape = Shape { b: 1, h: 1, g: 1, l: 8, m: 80 * 128, d: 8, dv: 8, blocks: [128, 128] };
    let blocks = pick(80, 60, 4);
    let (ring, compact) = pair(shape, &blocks, false);
    hold::<f32, f32>(&ring, &compact, &[], "60 of 80");
}
