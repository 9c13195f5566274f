//! What must hold to the last bit: threads, neighbours, how queries are blocked, per-head masks that say the same, junk.

use half::bf16;

use super::batch::{Batch, Lists, Output, Shape};
use crate::flex::{MaskMod, ScoreMod};
use crate::testing::on_every_isa;

const SHAPE: Shape = Shape { b: 2, h: 4, g: 2, l: 100, m: 330, d: 24, dv: 24, blocks: [16, 32] };
const BLOCKS: [usize; 6] = [0, 2, 3, 5, 8, 10];

fn same(a: &Output<bf16>, b: &Output<bf16>, what: &str) {
    assert!(a == b, "{what}");
}

fn mods(slopes: &[f32]) -> [ScoreMod<'_>; 3] {
    [ScoreMod::SoftCap(2.0), ScoreMod::Alibi { slopes }, ScoreMod::Causal]
}

#[test]
fn f40_threads_and_blocks_of_queries_change_no_bit() {
    let slopes = [0.1, 0.2, 0.3, 0.4];
    let base = Batch { q_offset: 200, ..Batch::shared(SHAPE, &BLOCKS) };
    on_every_isa(|isa| {
        let want = base.run::<bf16, bf16>(&mods(&slopes), &[]);
        for workers in [1, 3] {
            let batch = Batch { workers, ..base.clone() };
            same(
                &want,
                &batch.run::<bf16, bf16>(&mods(&slopes), &[]),
                &format!("{workers} threads on {isa}"),
            );
        }
        for block_q in [1, 7, 100, 4096] {
            let shape = Shape { blocks: [block_q, 32], ..SHAPE };
            let batch = Batch { q_offset: 200, ..Batch::shared(shape, &BLOCKS) };
            same(
                &want,
                &batch.run::<bf16, bf16>(&mods(&slopes), &[]),
                &format!("blocks of {block_q} on {isa}"),
            );
        }
        let block = Shape { blocks: [16, 16], ..SHAPE };
        let halves: Vec<usize> =
            BLOCKS.iter().flat_map(|&b| [2 * b, 2 * b + 1]).filter(|&b| b < 330usize.div_ceil(16)).collect();
        let batch = Batch { q_offset: 200, ..Batch::shared(block, &halves) };
        same(&want, &batch.run::<bf16, bf16>(&mods(&slopes), &[]), &format!("blocks of 16 keys on {isa}"));
    });
}

#[test]
fn a_mask_per_head_or_batch_that_says_the_same_gives_the_same_bits() {
    let slopes = [0.1, 0.2, 0.3, 0.4];
    let base = Batch { q_offset: 200, ..Batch::shared(SHAPE, &BLOCKS) };
    on_every_isa(|isa| {
        let want = base.run::<bf16, bf16>(&mods(&slopes), &[]);
        for (batch, heads) in [(2, 1), (1, 4), (2, 4)] {
            let mut other = base.clone();
            let lists = vec![base.lists.lists.clone(); batch * heads].concat();
            other.lists = Lists { batch, heads, lists };
            same(
                &want,
                &other.run::<bf16, bf16>(&mods(&slopes), &[]),
                &format!("{batch} x {heads} masks on {isa}"),
            );
        }
    });
}

#[test]
fn f40_streams_side_by_side_along_l_give_the_bits_of_each_alone() {
    // Two streams of different lengths, the queries of one after those of the other.
    let shape = Shape { b: 1, l: 32, m: 4224, blocks: [16, 128], ..SHAPE };
    let first: Vec<(usize, bool)> = (0..33).filter(|b| b % 5 != 0).map(|b| (b, false)).collect();
    let second = vec![(0, false), (5, false), (32, false)];
    let alone = |list: &Vec<(usize, bool)>, from: u64| {
        let lists = Lists { batch: 1, heads: 1, lists: vec![list.clone(); 2] };
        Batch { queries: Some((from..from + 32).collect()), junk: 0.5, ..Batch::new(shape, lists) }
    };
    let lists = [first.clone(), first.clone(), second.clone(), second.clone()];
    let wide = Shape { l: 64, ..shape };
    let beside = Batch::new(wide, Lists { batch: 1, heads: 1, lists: lists.to_vec() });
    let beside = Batch { content: Some((0..4224).collect()), ..beside };
    on_every_isa(|isa| {
        let both = beside.run::<f32, f32>(&[], &[]);
        for (list, from) in [(&first, 0usize), (&second, 32)] {
            let one = alone(list, from as u64).run::<f32, f32>(&[], &[]);
            for h in 0..shape.h {
                let (a, b) = ((h * 64 + from) * shape.dv, h * 32 * shape.dv);
                let n = 32 * shape.dv;
                assert_eq!(both.o[a..a + n], one.o[b..b + n], "head {h} from {from} on {isa}");
            }
        }
    });
}

#[test]
fn f03_blocks_that_nobody_sees_may_hold_anything() {
    let mut base = Batch { junk: 0.0, ..Batch::shared(SHAPE, &BLOCKS) };
    base.lists.lists[2] = vec![(3, true), (10, false)];
    on_every_isa(|isa| {
        let want = base.run::<bf16, bf16>(&[], &[MaskMod::Causal]);
        for junk in [f32::NAN, f32::INFINITY, -1e30] {
            let dirty = Batch { junk, ..base.clone() };
            same(&want, &dirty.run::<bf16, bf16>(&[], &[MaskMod::Causal]), &format!("{junk} on {isa}"));
        }
    });
}

#[test]
fn a_mask_that_hides_nothing_gives_the_bits_of_whole_blocks() {
    let whole = Batch::shared(SHAPE, &BLOCKS);
    let mut parts = whole.clone();
    parts.lists.lists.iter_mut().flatten().for_each(|block| block.1 = true);
    on_every_isa(|isa| {
        let want = whole.run::<bf16, bf16>(&[], &[]);
        let window = MaskMod::SlidingWindow { left: 1000, right: usize::MAX };
        same(&want, &parts.run::<bf16, bf16>(&[], &[MaskMod::None, window]), &format!("on {isa}"));
    });
}
