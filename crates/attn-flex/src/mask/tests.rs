//! Masks against plain boolean tables.

use proptest::prelude::*;

use super::*;
use crate::{TileRow, UserMask};

/// The table that a mask stands for.
type Table<'a> = &'a dyn Fn(usize, usize, usize, usize) -> bool;

/// Holds every pair of a mask against a table, and each block against what its pairs say of it.
fn hold(mask: &BlockMask, batches: usize, heads: usize, table: Table<'_>) {
    let shape = *mask.shape();
    for batch in 0..batches {
        for head in 0..heads {
            for q_idx in 0..shape.q_len {
                for k_idx in 0..shape.kv_len {
                    let (got, want) =
                        (mask.sees(batch, head, q_idx, k_idx), table(batch, head, q_idx, k_idx));
                    assert_eq!(
                        got, want,
                        "batch {batch}, head {head}, query {q_idx}, key {k_idx} of {shape:?}"
                    );
                }
            }
            for q_block in 0..shape.q_blocks() {
                let mut before = None;
                for (block, partial) in mask.visible(batch, head, q_block) {
                    assert!(before < Some(block) && block < shape.kv_blocks(), "{block} after {before:?}");
                    before = Some(block);
                    let queries = q_block * shape.block_q..((q_block + 1) * shape.block_q).min(shape.q_len);
                    let keys = block * shape.block_kv..((block + 1) * shape.block_kv).min(shape.kv_len);
                    let mut pairs = queries.flat_map(|q| keys.clone().map(move |k| table(batch, head, q, k)));
                    let all = pairs.all(|seen| seen);
                    assert_eq!(partial, !all, "block {block} of block {q_block} of queries of {shape:?}");
                }
            }
        }
    }
    mask.blocks().check(&geometry(&shape)).unwrap();
}

fn geometry(shape: &MaskShape) -> crate::Geometry {
    crate::Geometry {
        batch: shape.batch,
        num_qo_heads: shape.heads,
        num_kv_heads: 1,
        head_dim_qk: 1,
        head_dim_vo: 1,
        q_dtype: crate::DType::F32,
        kv_dtype: crate::DType::F32,
    }
}

fn shapes() -> impl Strategy<Value = MaskShape> {
    (0..40usize, 0..50usize, 1..13usize, 1..17usize, 1..3usize, 1..3usize).prop_map(
        |(q_len, kv_len, block_q, block_kv, batch, heads)| MaskShape {
            q_len,
            kv_len,
            block_q,
            block_kv,
            batch,
            heads,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn causal_masks_and_windows_are_their_tables(
        shape in shapes(), offset in -30i64..60, left in 0..40usize, right in 0..20usize,
    ) {
        let d = |q: usize, k: usize| k as i64 - (q as i64 + offset);
        let causal = BlockMask::causal(shape, offset).unwrap();
        hold(&causal, shape.batch, shape.heads, &|_, _, q, k| d(q, k) <= 0);
        let window = BlockMask::sliding_window(shape, offset, left, right).unwrap();
        hold(&window, shape.batch, shape.heads, &|_, _, q, k| (-(left as i64)..=right as i64).contains(&d(q, k)));
        hold(&BlockMask::full(shape).unwrap(), shape.batch, shape.heads, &|_, _, _, _| true);
    }

    #[test]
    fn documents_are_their_tables(shape in shapes(), ids in prop::collection::vec(0..4i32, 90)) {
        let (q_ids, kv_ids) = (&ids[..shape.q_len], &ids[40..40 + shape.kv_len]);
        // Runs of equal ids, so that whole blocks are of one document.
        let runs = |ids: &[i32]| (0..ids.len()).map(|i| ids[i / 9 * 9]).collect::<Vec<i32>>();
        let (q_ids, kv_ids) = (runs(q_ids), runs(kv_ids));
        let mask = BlockMask::documents(shape, q_ids.clone(), kv_ids.clone()).unwrap();
        let parts = |q: usize, k: usize| q_ids[q] == kv_ids[k];
        for (q, k) in (0..shape.q_len).flat_map(|q| (0..shape.kv_len).map(move |k| (q, k))) {
            prop_assert_eq!(mask.sees(0, 0, q, k), parts(q, k));
        }
        prop_assert!(mask.blocks().check(&geometry(&shape)).is_ok());
    }

    #[test]
    fn rules_that_hold_together_are_their_tables(
        shape in shapes(), offset in -30i64..60, left in 0..40usize, run in 1..12usize, which in 0..8usize,
    ) {
        let d = move |q: usize, k: usize| k as i64 - (q as i64 + offset);
        let ids = |n: usize| -> std::sync::Arc<[i32]> { (0..n).map(|i| (i / run % 3) as i32).collect() };
        let odd = UserMask::new("odd", |seen, row: &TileRow<'_>| {
            for (seen, &k) in seen.iter_mut().zip(row.k_idx) {
                *seen &= (row.batch + row.head + row.q_idx + k as usize) % 7 < 4;
            }
        });
        let kinds = [MaskRule::Causal, MaskRule::SlidingWindow { left, right: 9 }, MaskRule::User(odd)];
        let mut rules = vec![MaskRule::Document { q_ids: ids(shape.q_len), kv_ids: ids(shape.kv_len) }];
        rules.extend(kinds.into_iter().enumerate().filter(|(i, _)| which >> i & 1 == 1).map(|(_, rule)| rule));
        let mask = BlockMask::from_rule(shape, MaskRule::all(rules).unwrap(), offset).unwrap();
        hold(&mask, shape.batch, shape.heads, &|batch, head, q, k| {
            q / run % 3 == k / run % 3
                && (which & 1 == 0 || d(q, k) <= 0)
                && (which & 2 == 0 || (-(left as i64)..=9).contains(&d(q, k)))
                && (which & 4 == 0 || (batch + head + q + k) % 7 < 4)
        });
        // No block is listed of which nothing is seen.
        for q_block in 0..shape.q_blocks() {
            for (block, _) in mask.visible(0, 0, q_block) {
                let queries = q_block * shape.block_q..((q_block + 1) * shape.block_q).min(shape.q_len);
                let keys = block * shape.block_kv..((block + 1) * shape.block_kv).min(shape.kv_len);
                prop_assert!(queries.clone().any(|q| keys.clone().any(|k| mask.sees(0, 0, q, k))));
            }
        }
    }

    #[test]
    fn predicates_are_their_tables(shape in shapes(), seed in any::<u64>()) {
        // Whole, empty and mixed blocks, another in each batch and head.
        let sees = move |batch: usize, head: usize, q: usize, k: usize| {
            let block = (q / shape.block_q * 31 + k / shape.block_kv * 17 + batch * 7 + head * 3) as u64;
            match seed.rotate_left((block % 64) as u32) % 3 {
                0 => false,
                1 => true,
                _ => !(q * 5 + k * 3 + batch + head).is_multiple_of(4),
            }
        };
        let mask = BlockMask::from_predicate(shape, sees).unwrap();
        hold(&mask, shape.batch, shape.heads, &sees);
    }

    #[test]
    fn listed_blocks_are_their_tables(shape in shapes(), seed in any::<u64>()) {
        let kind = |list: usize, block: usize| seed.rotate_left((list * 13 + block * 5) as u32 % 64) % 4;
        let lists = |wanted: u64| {
            let (mut indptr, mut indices) = (vec![0i32], Vec::<i32>::new());
            for list in 0..shape.lists() {
                let blocks = (0..shape.kv_blocks()).filter(|&block| kind(list, block) == wanted);
                indices.extend(blocks.map(|block| block as i32));
                indptr.push(indices.len() as i32);
            }
            (indptr, indices)
        };
        let (full, partial) = (lists(1), lists(2));
        let odd = UserMask::new("odd keys", |seen, row: &TileRow<'_>| {
            seen.iter_mut().zip(row.k_idx).for_each(|(seen, k)| *seen &= k % 2 == 1);
        });
        let mask = BlockMask::from_kv_blocks(
            shape,
            KvBlocks { indptr: &full.0, indices: &full.1 },
            KvBlocks { indptr: &partial.0, indices: &partial.1 },
            MaskRule::User(odd),
        ).unwrap();
        for (q, k) in (0..shape.q_len).flat_map(|q| (0..shape.kv_len).map(move |k| (q, k))) {
            for (batch, head) in (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h))) {
                let list = (batch * shape.heads + head) * shape.q_blocks() + q / shape.block_q;
                let want = match kind(list, k / shape.block_kv) {
                    1 => true,
                    2 => k % 2 == 1,
                    _ => false,
                };
                prop_assert_eq!(mask.sees(batch, head, q, k), want);
            }
        }
    }

    #[test]
    fn edits_in_place_are_masks_made_anew(
        shape in shapes(), seed in any::<u64>(), edits in prop::collection::vec((0..999usize, 0..9usize, 0..9usize, 0..9usize, 0..9usize), 1..6),
    ) {
        prop_assume!(shape.lists() > 0 && shape.kv_blocks() > 0);
        let blocks = shape.kv_blocks();
        let kind = |list: usize, block: usize| seed.rotate_left((list * 11 + block * 3) as u32 % 64) % 3;
        let mut table: Vec<Vec<u64>> =
            (0..shape.lists()).map(|list| (0..blocks).map(|block| kind(list, block)).collect()).collect();
        let make = |table: &[Vec<u64>]| {
            let lists = |wanted: u64| {
                let (mut indptr, mut indices) = (vec![0i32], Vec::<i32>::new());
                for list in table {
                    indices.extend((0..blocks).filter(|&b| list[b] == wanted).map(|b| b as i32));
                    indptr.push(indices.len() as i32);
                }
                (indptr, indices)
            };
            let (full, partial) = (lists(1), lists(2));
            let of = |(indptr, indices): &(Vec<i32>, Vec<i32>)| (indptr.clone(), indices.clone());
            let ((a, b), (c, d)) = (of(&full), of(&partial));
            let full = KvBlocks { indptr: &a, indices: &b };
            let partial = KvBlocks { indptr: &c, indices: &d };
            BlockMask::from_kv_blocks(shape, full, partial, MaskRule::Causal).unwrap()
        };
        let mut mask = make(&table);
        for (list, a, b, c, d) in edits {
            let list = list % shape.lists();
            let run = |from: usize, len: usize| {
                let from = from % (blocks + 1);
                from..(from + len).min(blocks)
            };
            let (hide, show) = (run(a, b), run(c, d));
            let before = mask.clone();
            let q_block = list % shape.q_blocks();
            let plane = list / shape.q_blocks();
            let at = [plane / shape.heads, plane % shape.heads, q_block];
            let edited = mask.update(at, hide.clone(), show.clone()).unwrap();
            let old = table[list].clone();
            hide.clone().for_each(|block| table[list][block] = 0);
            show.clone().for_each(|block| table[list][block] = 1);
            let anew = make(&table);
            prop_assert_eq!(&mask.indices, &anew.indices);
            prop_assert_eq!((&mask.indptr, &mask.partial), (&anew.indptr, &anew.partial));
            // As many shown as hidden: nothing else moves.
            let count = |list: &[u64]| list.iter().filter(|&&kind| kind > 0).count();
            if count(&old) == count(&table[list]) {
                let same = before.indices.iter().zip(&mask.indices).filter(|(a, b)| a == b).count();
                prop_assert_eq!(edited.moved, 0);
                prop_assert!(edited.written >= mask.indices.len() - same);
                prop_assert!(edited.written <= hide.len().max(show.len()) + before.num_visible() - same);
            }
        }
    }
}

#[test]
fn a_ring_that_moves_by_a_frame_writes_the_blocks_of_that_frame() {
    // 16 frames of four blocks and a scratch; the pass of frame f sees all slots but f % 16.
    let (frames, per) = (16usize, 4usize);
    let blocks = |frame: usize| frame * per..(frame + 1) * per;
    let shape = MaskShape { block_q: 512, ..MaskShape::new(512, (frames + 1) * per * BLOCK) };
    let mut mask = BlockMask::full(shape).unwrap();
    mask.update([0; 3], blocks(0), 0..0).unwrap();
    for f in 1..3 * frames {
        let edited = mask.update([0; 3], blocks(f % frames), blocks((f - 1) % frames)).unwrap();
        // The frame that comes back is written where the one that goes was; going round, all between shifts.
        let written = if f % frames == 0 { (frames - 1) * per } else { per };
        assert_eq!(edited, Edited { written, moved: 0 }, "frame {f}");
        let visible: Vec<usize> = mask.visible(0, 0, 0).map(|(block, _)| block).collect();
        let want: Vec<usize> = (0..(frames + 1) * per).filter(|b| !blocks(f % frames).contains(b)).collect();
        assert_eq!(visible, want, "frame {f}");
    }
}

#[test]
fn make_block_mask_shows_what_is_written_to_every_query() {
    let written: Vec<bool> =
        (0..5 * BLOCK).map(|key| [true, false, true, true, false][key / BLOCK]).collect();
    let mask = make_block_mask(256, 640, &written).unwrap();
    hold(&mask, 2, 2, &|_, _, _, k| written[k]);
    assert!(mask.blocks().partial.iter().all(|&partial| partial == 0), "no block is partial");
    assert_eq!((mask.num_visible(), mask.sparsity()), (3, 0.4));
}

#[test]
fn make_block_mask_says_which_length_or_block_is_wrong() {
    let said =
        |q_len, kv_len, written: &[bool]| make_block_mask(q_len, kv_len, written).unwrap_err().to_string();
    assert!(said(100, 128, &[true; 128]).starts_with("q_len: must be a multiple of 128"));
    assert!(said(128, 200, &[true; 200]).starts_with("kv_len: must be a multiple of 128"));
    assert!(said(128, 256, &[true; 128]).starts_with("written: expected shape [kv_len] = [256]"));
    let mut written = [false; 384];
    written[128..256].fill(true);
    written[200] = false;
    let said = said(128, 384, &written);
    assert!(said.starts_with("written[200] = 0: block 1 of 128"), "{said}");
    assert!(make_block_mask(0, 0, &[]).is_ok());
}

#[test]
fn f33_lengths_that_fill_no_block_are_padded_and_never_seen() {
    for (q_len, kv_len) in [(1, 1), (5, 64), (127, 127), (128, 129), (129, 200)] {
        let shape = MaskShape::new(q_len, kv_len);
        let mask = BlockMask::full(shape).unwrap();
        hold(&mask, 1, 1, &|_, _, _, _| true);
        let causal = BlockMask::causal(shape, kv_len as i64 - q_len as i64).unwrap();
        hold(&causal, 1, 1, &|_, _, q, k| k as i64 <= q as i64 + kv_len as i64 - q_len as i64);
        let written = BlockMask::written(q_len, BLOCK, &vec![true; kv_len]).unwrap();
        assert_eq!(written.num_visible(), kv_len.div_ceil(BLOCK));
    }
}

#[test]
fn lists_that_do_not_fit_are_refused_by_entry() {
    let shape = MaskShape::new(256, 512);
    let mask = |full: KvBlocks<'_>, partial: KvBlocks<'_>, rule| {
        BlockMask::from_kv_blocks(shape, full, partial, rule).map(drop).map_err(|e| e.to_string())
    };
    let lists = |indptr, indices| KvBlocks { indptr, indices };
    let none = KvBlocks::NONE;
    assert_eq!(mask(none, none, MaskRule::Whole), Ok(()));
    assert_eq!(mask(lists(&[0, 2, 4], &[0, 3, 1, 2]), none, MaskRule::Whole), Ok(()));
    let refused = |result: std::result::Result<(), String>, with: &str| {
        let said = result.unwrap_err();
        assert!(said.starts_with(with), "{said}");
    };
    refused(mask(lists(&[0, 2], &[0, 3]), none, MaskRule::Whole), "full.indptr: expected shape");
    refused(mask(lists(&[0, 2, 3], &[0, 3]), none, MaskRule::Whole), "full.indptr[2] = 3");
    refused(mask(lists(&[0, 3, 2], &[0, 3]), none, MaskRule::Whole), "full.indptr[2] = 2");
    refused(mask(lists(&[-1, 1, 2], &[0, 3]), none, MaskRule::Whole), "full.indptr[0] = -1");
    refused(mask(lists(&[0, 2, 2], &[3, 0]), none, MaskRule::Whole), "full.indices[1] = 0");
    refused(mask(lists(&[0, 1, 2], &[0, 4]), none, MaskRule::Whole), "full.indices[1] = 4");
    refused(mask(lists(&[0, 1, 1], &[-7]), none, MaskRule::Whole), "full.indices[0] = -7");
    let one = lists(&[0, 1, 1], &[2]);
    refused(mask(none, one, MaskRule::Whole), "rule: partial blocks need a rule");
    refused(
        mask(one, one, MaskRule::Causal),
        "partial.indices[0] = 2: block 2 of list 0 is listed as full too",
    );
    let short = MaskRule::Document { q_ids: [0; 256].into(), kv_ids: [0; 5].into() };
    refused(mask(none, one, short), "kv_ids: expected shape [M] = [512]");
    assert!(BlockMask::documents(shape, vec![0; 3], vec![0; 512]).is_err());
    for shape in [
        MaskShape { block_q: 0, ..shape },
        MaskShape { block_kv: usize::MAX, ..shape },
        MaskShape { q_len: usize::MAX, ..shape },
        MaskShape { heads: usize::MAX, batch: 2, q_len: 0, ..shape },
        MaskShape { kv_len: 1 << 40, ..shape },
    ] {
        assert!(BlockMask::causal(shape, 0).is_err(), "{shape:?}");
    }
}

#[test]
fn an_edit_of_what_is_not_there_changes_nothing() {
    let mut mask = BlockMask::full(MaskShape::new(256, 512)).unwrap();
    assert!(mask.update([0, 0, 2], 0..1, 0..0).is_err());
    assert!(mask.update([1, 0, 0], 0..1, 0..0).is_err());
    assert!(mask.update([0, 0, 0], 0..5, 0..0).is_err());
    assert_eq!(mask.num_visible(), 8);
    assert_eq!(mask.update([0, 0, 1], 0..0, 4..4).unwrap(), Edited::default());
    assert!(
        mask.clone().with_positions(vec![0; 3]).is_err() && mask.clone().with_positions(vec![-1; 4]).is_err()
    );
    let moved = mask.with_positions(vec![7, 6, 5, 4]).unwrap().with_q_offset(3);
    assert_eq!((moved.positions(), moved.q_offset()), (Some(&[7, 6, 5, 4][..]), 3));
}

#[test]
fn a_mask_with_positions_asks_about_the_sequence() {
    // Stored block 0 is block 1 of the sequence and the other way round: half a turn of a ring.
    let shape = MaskShape { block_q: 4, block_kv: 4, ..MaskShape::new(8, 8) };
    let part = KvBlocks { indptr: &[0, 2, 4], indices: &[0, 1, 0, 1] };
    let mask = BlockMask::from_kv_blocks(shape, KvBlocks::NONE, part, MaskRule::Causal).unwrap();
    let mask = mask.with_positions(vec![1, 0]).unwrap();
    for (q, k) in (0..8).flat_map(|q| (0..8).map(move |k| (q, k))) {
        assert_eq!(mask.sees(0, 0, q, k), (k + 4) % 8 <= q, "{q} {k}");
    }
}

#[test]
fn rules_are_joined_flat_and_only_so_many() {
    assert!(matches!(MaskRule::all([]).unwrap(), MaskRule::Whole));
    assert!(matches!(MaskRule::all([MaskRule::Whole, MaskRule::Causal]).unwrap(), MaskRule::Causal));
    let two = MaskRule::all([MaskRule::Causal, MaskRule::SlidingWindow { left: 3, right: 0 }]).unwrap();
    let four = MaskRule::all([two.clone(), MaskRule::Whole, two.clone()]).unwrap();
    assert_eq!((four.each().len(), four.mask_mods().len()), (4, 4));
    let eight = MaskRule::all([four.clone(), four]).unwrap();
    let said = MaskRule::all([eight, MaskRule::Causal]).unwrap_err().to_string();
    assert!(said.contains("at most 8") && said.contains('9'), "{said}");
}

#[test]
fn a_rule_that_this_machine_cannot_ask_decides_in_every_block() {
    let elsewhere = UserMask { name: "elsewhere".into(), cpu: None, cuda: Some(Default::default()) };
    let shape = MaskShape { block_q: 4, block_kv: 4, ..MaskShape::new(8, 8) };
    let alone = BlockMask::from_rule(shape, MaskRule::User(elsewhere.clone()), 0).unwrap();
    assert_eq!(alone.visible(0, 0, 0).collect::<Vec<_>>(), [(0, true), (1, true)]);
    let causal = MaskRule::all([MaskRule::Causal, MaskRule::User(elsewhere)]).unwrap();
    let mask = BlockMask::from_rule(shape, causal, 0).unwrap();
    assert_eq!(mask.visible(0, 0, 0).collect::<Vec<_>>(), [(0, true)]);
    assert_eq!(mask.visible(0, 0, 1).collect::<Vec<_>>(), [(0, true), (1, true)]);
}
