//! Masks per batch, per head and per block of queries, blocks visible in part, mods composed and mods of users, against plain
//! loops.

use half::bf16;

use super::batch::{Batch, Lists, Shape};
use crate::flex::{MaskMod, ScoreMod, UserMask, UserMod};
use crate::testing::{hash, noise};

const SHAPE: Shape = Shape { b: 2, h: 6, g: 2, l: 75, m: 260, d: 16, dv: 24, blocks: [20, 48] };

/// Random lists: about half of the blocks, about half of those in part.
fn random(shape: Shape, batch: usize, heads: usize, seed: u64) -> Lists {
    let blocks = shape.m.div_ceil(shape.blocks[1]);
    let list = |n: usize| {
        let roll = |block: usize| hash(&[seed, n as u64, block as u64]) >> 20;
        (0..blocks).filter(|&b| roll(b) % 2 == 0).map(|b| (b, roll(b) % 4 == 0)).collect()
    };
    let lists = batch * heads * shape.l.div_ceil(shape.blocks[0]);
    Lists { batch, heads, lists: (0..lists).map(list).collect() }
}

fn partial(batch: &Batch, b: usize, h: usize, i: usize, j: usize) -> bool {
    let of = |n: usize, at: usize| if n == 1 { 0 } else { at };
    let plane = of(batch.lists.batch, b) * batch.lists.heads + of(batch.lists.heads, h);
    let at = plane * batch.shape.l.div_ceil(batch.shape.blocks[0]) + i / batch.shape.blocks[0];
    batch.lists.lists[at].iter().any(|&(block, part)| part && block == j / batch.shape.blocks[1])
}

#[test]
fn lists_of_any_batch_head_and_block_of_queries_agree_under_every_mask() {
    let documents: Vec<i32> = (0..260).map(|j| j / 37).collect();
    let q_ids: Vec<i32> = (0..75).map(|i| (i + 100) / 37).collect();
    let user = UserMask::new("checkers", |seen, row| {
        for (seen, &k) in seen.iter_mut().zip(row.k_idx) {
            *seen = !(row.batch + row.head + row.q_idx + k as usize).is_multiple_of(3);
        }
    });
    let window = MaskMod::SlidingWindow { left: 30, right: 5 };
    let document = MaskMod::Document { q_ids: &q_ids, kv_ids: &documents };
    let masks: [(&str, &[MaskMod]); 6] = [
        ("none", &[MaskMod::None]),
        ("causal", &[MaskMod::Causal]),
        ("window", &[window]),
        ("document", &[document]),
        ("user", &[MaskMod::User(&user)]),
        ("all", &[MaskMod::Causal, document, MaskMod::User(&user), window]),
    ];
    let seen = |mask: &MaskMod, b: usize, h: usize, i: usize, j: usize| {
        let d = j as i64 - (i as i64 + 90);
        match mask {
            MaskMod::None => true,
            MaskMod::Causal => d <= 0,
            MaskMod::SlidingWindow { .. } => (-30..=5).contains(&d),
            MaskMod::Document { .. } => documents[j] == q_ids[i],
            MaskMod::User(_) => !(b + h + i + j).is_multiple_of(3),
        }
    };
    for (n, (name, masks)) in masks.into_iter().enumerate() {
        for (batch, heads) in [(1, 1), (2, 1), (1, 6), (2, 6)] {
            let lists = random(SHAPE, batch, heads, n as u64);
            let batch = Batch { q_offset: 90, ..Batch::new(SHAPE, lists) };
            // Keys hidden by masks from all queries stay finite here; `faults` gives them junk.
            let change = |s: f64, b: usize, h: usize, i: usize, j: usize| {
                let asked = partial(&batch, b, h, i, j);
                (!asked || masks.iter().all(|mask| seen(mask, b, h, i, j))).then_some(s)
            };
            batch.hold::<f32, f32>(&[], masks, &change, name);
        }
    }
}

#[test]
fn mods_are_applied_in_their_order() {
    let slopes: Vec<f32> = (0..6).map(|h| 0.05 * (h + 1) as f32).collect();
    let table: Vec<f32> = (0..6 * 41).map(|i| noise(&[4, i])).collect();
    let cap = |s: f64| 0.8 * (s / f64::from(0.8f32)).tanh();
    let alibi = ScoreMod::Alibi { slopes: &slopes };
    let bias = ScoreMod::RelBias { table: &table, window: 20 };
    let user = UserMod::new("halve the even keys and hide each fifth", |scores, row| {
        for (score, &k) in scores.iter_mut().zip(row.k_idx) {
            if k % 2 == 0 {
                *score *= 0.5;
            }
            if k % 5 == 0 {
                *score = f32::NEG_INFINITY;
            }
        }
    });
    let halved = |s: f64, j: usize| if j.is_multiple_of(2) { s * 0.5 } else { s };
    let batch = Batch { q_offset: 90, ..Batch::new(SHAPE, random(SHAPE, 2, 1, 77)) };
    let d = |i: usize, j: usize| j as f64 - (i as f64 + 90.0);
    let slope = |s: f64, h: usize, i: usize, j: usize| s + f64::from(slopes[h]) * d(i, j);
    let biased = |s: f64, h: usize, i: usize, j: usize| {
        s + f64::from(table[h * 41 + (d(i, j).clamp(-20.0, 20.0) + 20.0) as usize])
    };
    batch.hold::<f32, f32>(
        &[ScoreMod::SoftCap(0.8), alibi],
        &[MaskMod::None],
        &|s, _, h, i, j| Some(slope(cap(s), h, i, j)),
        "cap, then slope",
    );
    batch.hold::<f32, f32>(
        &[alibi, ScoreMod::SoftCap(0.8), ScoreMod::Causal],
        &[MaskMod::None],
        &|s, _, h, i, j| (d(i, j) <= 0.0).then(|| cap(slope(s, h, i, j))),
        "slope, then cap",
    );
    batch.hold::<bf16, bf16>(
        &[bias, ScoreMod::User(&user), ScoreMod::SoftCap(0.8)],
        &[MaskMod::None],
        &|s, _, h, i, j| (j % 5 != 0).then(|| cap(halved(biased(s, h, i, j), j))),
        "bias, user, cap",
    );
}

#[test]
fn a_users_mod_is_told_which_query_and_key_it_is() {
    let user = UserMod::new("by place", |scores, row| {
        assert_eq!(scores.len(), row.k_idx.len());
        for (score, &k) in scores.iter_mut().zip(row.k_idx) {
            *score += 0.01 * (3 * row.batch + 2 * row.head) as f32
                - 0.02 * (k as i64 - row.q_idx as i64 - row.q_offset).abs() as f32;
        }
    });
    let change = |s: f64, b: usize, h: usize, i: usize, j: usize| {
        Some(s + 0.01 * (3 * b + 2 * h) as f64 - 0.02 * (j as f64 - i as f64 - 90.0).abs())
    };
    for heads in [1, 6] {
        let batch = Batch { q_offset: 90, ..Batch::new(SHAPE, random(SHAPE, 2, heads, 5)) };
        batch.hold::<f32, f32>(&[ScoreMod::User(&user)], &[MaskMod::None], &change, "by place");
    }
}

#[test]
fn a_list_is_that_of_its_own_blocks_alone() {
    for (batch, heads) in [(1, 1), (2, 1), (1, 6), (2, 6)] {
        for positions in [None, Some((0..6).rev().collect::<Vec<i32>>())] {
            let base = Batch { positions, ..Batch::new(SHAPE, random(SHAPE, batch, heads, 3)) };
            let work = base.work::<bf16, bf16>();
            assert!(base.owns::<bf16, bf16>(&work) && !base.owns::<f32, bf16>(&work));
            let at = base.lists.lists.iter().rposition(|list| list.len() > 1).unwrap();
            let change = |change: &dyn Fn(&mut Batch)| {
                let mut other = base.clone();
                change(&mut other);
                other
            };
            for (what, other) in [
                ("a block less", change(&|b| b.lists.lists[at].truncate(1))),
                ("a block whole or in part", change(&|b| b.lists.lists[at][0].1 ^= true)),
                ("a query less", change(&|b| b.shape.l -= 1)),
                ("a key less", change(&|b| b.shape.m -= 1)),
                ("other places", change(&|b| b.positions = Some(vec![7, 1, 2, 3, 4, 5]))),
            ] {
                assert!(!other.owns::<bf16, bf16>(&work), "{what}, {batch} x {heads}");
                assert!(other.owns::<bf16, bf16>(&other.work::<bf16, bf16>()), "{what}, {batch} x {heads}");
            }
        }
    }
}
