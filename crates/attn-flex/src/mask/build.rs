//! Masks from lists of blocks, and from rules: blocks are classified once, when the mask is made.

use std::sync::Arc;

use mstar_kernels::flex::UserMask;
use mstar_kernels::mutant::planted;
use mstar_kernels::{Error, Result};

use super::rule::Seen;
use super::{BLOCK, BlockMask, MaskRule, MaskShape, refuse};

/// Lists of blocks, borrowed: one for each (batch, head, block of queries) of a [`MaskShape`], in that order.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvBlocks<'a> {
    /// `[lists + 1]`: from 0, never decreasing: where each list starts in `indices`.
    pub indptr: &'a [i32],
    /// Blocks of keys, ascending within a list.
    pub indices: &'a [i32],
}

impl<'a> KvBlocks<'a> {
    /// No blocks at all, for a mask of any shape.
    pub const NONE: KvBlocks<'static> = KvBlocks { indptr: &[], indices: &[] };

    fn check(&self, name: [&'static str; 2], shape: &MaskShape) -> Result<()> {
        let [indptr, indices] = name;
        if self.indptr.is_empty() && self.indices.is_empty() {
            return Ok(());
        }
        let lists = shape.lists();
        if self.indptr.len() != lists + 1 {
            let expected = format!("[batch * heads * ceil(L / block_q) + 1] = [{}]", lists + 1);
            return Err(Error::Shape { tensor: indptr, expected, got: vec![self.indptr.len()] });
        }
        let mut before = 0;
        for (index, &at) in self.indptr.iter().enumerate() {
            let ends_elsewhere = index == lists && at as usize != self.indices.len();
            if at < before || (index == 0 && at != 0) || ends_elsewhere {
                let why = format!("lists start at 0, follow each other and end at {}", self.indices.len());
                return Err(Error::Index { array: indptr, index, got: at.into(), why });
            }
            before = at;
        }
        let blocks = shape.kv_blocks();
        for list in 0..lists {
            let mut before = -1;
            for index in self.indptr[list] as usize..self.indptr[list + 1] as usize {
                let block = self.indices[index];
                if block <= before || block as usize >= blocks {
                    let why = format!("the blocks of list {list} ascend within 0..{blocks}");
                    return Err(Error::Index { array: indices, index, got: block.into(), why });
                }
                before = block;
            }
        }
        Ok(())
    }

    fn list(&self, list: usize) -> &'a [i32] {
        if self.indptr.is_empty() {
            return &[];
        }
        &self.indices[self.indptr[list] as usize..self.indptr[list + 1] as usize]
    }
}

impl BlockMask {
    fn empty(shape: MaskShape, rule: MaskRule, q_offset: i64) -> Result<BlockMask> {
        shape.check()?;
        let indptr = vec![0];
        Ok(BlockMask { shape, indptr, indices: vec![], partial: vec![], positions: None, rule, q_offset })
    }

    /// Ends a list.
    pub(super) fn end_list(&mut self) -> Result<()> {
        match i32::try_from(self.indices.len()) {
            Ok(end) => self.indptr.push(end),
            Err(_) => return refuse("block_kv", "the mask lists more than 2^31 blocks", self.shape.block_kv),
        }
        Ok(())
    }

    /// Makes a list for each block of queries out of what `classify` says of batch, head, queries and keys of a block.
    fn classified(
        shape: MaskShape,
        rule: MaskRule,
        q_offset: i64,
        mut classify: impl FnMut(usize, usize, std::ops::Range<usize>, std::ops::Range<usize>) -> Seen,
    ) -> Result<BlockMask> {
        let mut mask = BlockMask::empty(shape, rule, q_offset)?;
        for list in 0..shape.lists() {
            let (plane, q_block) = (list / shape.q_blocks(), list % shape.q_blocks());
            let (batch, head) = (plane / shape.heads, plane % shape.heads);
            let queries = q_block * shape.block_q..((q_block + 1) * shape.block_q).min(shape.q_len);
            for block in 0..shape.kv_blocks() {
                let keys = block * shape.block_kv..((block + 1) * shape.block_kv).min(shape.kv_len);
                let mut seen = classify(batch, head, queries.clone(), keys);
                if planted("mask-partial-as-full") && seen == Seen::Part {
                    seen = Seen::Whole;
                }
                if seen != Seen::Nothing {
                    mask.indices.push(block as i32);
                    mask.partial.push(u8::from(seen == Seen::Part));
                }
            }
            mask.end_list()?;
        }
        Ok(mask)
    }

    /// A mask of listed blocks: `full` ones are seen whole, of `partial` ones `rule` decides. Either may be
    /// [`KvBlocks::NONE`].
    ///
    /// # Errors
    /// Lists that do not fit the shape, that do not ascend, a block in both; partial blocks under [`MaskRule::Whole`], or
    /// document ids of other lengths: which array, which entry, what it was.
    pub fn from_kv_blocks(
        shape: MaskShape,
        full: KvBlocks<'_>,
        partial: KvBlocks<'_>,
        rule: MaskRule,
    ) -> Result<BlockMask> {
        let mut mask = BlockMask::empty(shape, rule, 0)?;
        full.check(["full.indptr", "full.indices"], &shape)?;
        partial.check(["partial.indptr", "partial.indices"], &shape)?;
        if matches!(mask.rule, MaskRule::Whole) && !partial.indices.is_empty() {
            let why = "partial blocks need a rule that says which of their keys are seen";
            return refuse("rule", why, "MaskRule::Whole");
        }
        mask.rule.fits(&shape)?;
        for list in 0..shape.lists() {
            let (mut whole, mut part) =
                (full.list(list).iter().peekable(), partial.list(list).iter().peekable());
            loop {
                let (block, in_part) = match (whole.peek(), part.peek()) {
                    (Some(&&a), Some(&&b)) if a == b => {
                        let index = partial.list(list).iter().position(|&block| block == a).unwrap_or(0);
                        let why = format!("block {a} of list {list} is listed as full too");
                        return Err(Error::Index { array: "partial.indices", index, got: a.into(), why });
                    }
                    (Some(&&a), Some(&&b)) if a > b => (b, true),
                    (None, Some(&&b)) => (b, true),
                    (Some(&&a), _) => (a, false),
                    (None, None) => break,
                };
                if in_part {
                    part.next()
                } else {
                    whole.next()
                };
                mask.indices.push(block);
                mask.partial.push(u8::from(in_part));
            }
            mask.end_list()?;
        }
        Ok(mask)
    }

    /// Every query sees every key.
    ///
    /// # Errors
    /// Extents that no mask can have.
    pub fn full(shape: MaskShape) -> Result<BlockMask> {
        BlockMask::from_rule(shape, MaskRule::Whole, 0)
    }

    /// A query at position `q_idx + q_offset` sees the keys that a rule says, such as several of [`MaskRule::all`]. Blocks
    /// are classified by it here, and it decides in those that are seen in part.
    ///
    /// # Errors
    /// Extents that no mask can have; document ids of other lengths than the shape says.
    pub fn from_rule(shape: MaskShape, rule: MaskRule, q_offset: i64) -> Result<BlockMask> {
        rule.fits(&shape)?;
        BlockMask::classified(shape, rule.clone(), q_offset, |batch, head, queries, keys| {
            rule.over([batch, head], queries, q_offset, keys)
        })
    }

    /// A query at position `q_idx + q_offset` sees the keys up to its own position.
    ///
    /// # Errors
    /// Extents that no mask can have.
    pub fn causal(shape: MaskShape, q_offset: i64) -> Result<BlockMask> {
        BlockMask::from_rule(shape, MaskRule::Causal, q_offset)
    }

    /// A query at position `p = q_idx + q_offset` sees the keys `p - left ..= p + right`.
    ///
    /// # Errors
    /// Extents that no mask can have.
    pub fn sliding_window(shape: MaskShape, q_offset: i64, left: usize, right: usize) -> Result<BlockMask> {
        BlockMask::from_rule(shape, MaskRule::SlidingWindow { left, right }, q_offset)
    }

    /// A query sees the keys of its own document, wherever they lie: `q_ids` `[L]`, `kv_ids` `[M]`.
    ///
    /// # Errors
    /// Ids of other lengths than the shape says.
    pub fn documents(
        shape: MaskShape,
        q_ids: impl Into<Arc<[i32]>>,
        kv_ids: impl Into<Arc<[i32]>>,
    ) -> Result<BlockMask> {
        let rule = MaskRule::Document { q_ids: q_ids.into(), kv_ids: kv_ids.into() };
        BlockMask::from_rule(shape, rule, 0)
    }

    /// A query sees the keys that `sees(batch, head, q_idx, k_idx)` says. Every pair is asked about once, here: blocks are
    /// classified by it, and what partial blocks show is kept as bits.
    ///
    /// # Errors
    /// Extents that no mask can have.
    pub fn from_predicate(
        shape: MaskShape,
        sees: impl Fn(usize, usize, usize, usize) -> bool,
    ) -> Result<BlockMask> {
        shape.check()?;
        // Bits of the partial blocks, row after row of queries; `first` says where a block's begin.
        let (mut bits, mut first) = (Vec::<u64>::new(), vec![0usize; shape.lists() * shape.kv_blocks()]);
        let words = shape.block_kv.div_ceil(64);
        let mut block = Vec::new();
        let mut mask = BlockMask::classified(shape, MaskRule::Whole, 0, |batch, head, queries, keys| {
            let (mut any, mut all) = (false, true);
            block.clear();
            block.resize(queries.len() * words, 0u64);
            for (row, q_idx) in queries.clone().enumerate() {
                for (lane, k_idx) in keys.clone().enumerate() {
                    let seen = sees(batch, head, q_idx, k_idx);
                    (any, all) = (any || seen, all && seen);
                    block[row * words + lane / 64] |= u64::from(seen) << (lane % 64);
                }
            }
            match (any, all) {
                (false, _) => Seen::Nothing,
                (_, true) => Seen::Whole,
                _ => {
                    let plane = batch * shape.heads + head;
                    let list = plane * shape.q_blocks() + queries.start / shape.block_q;
                    first[list * shape.kv_blocks() + keys.start / shape.block_kv] = bits.len();
                    bits.extend_from_slice(&block);
                    Seen::Part
                }
            }
        })?;
        if !bits.is_empty() {
            mask.rule = MaskRule::User(kept(shape, bits, first, words));
        }
        Ok(mask)
    }

    /// Every query sees the keys that are written: `written` `[M]`, whole blocks of it. One list serves all queries, and no
    /// block is partial, but for a last one that is short.
    ///
    /// # Errors
    /// A `written` of another length; a block that is written in part, with the entry that differs from the block's first.
    pub fn written(q_len: usize, block_kv: usize, written: &[bool]) -> Result<BlockMask> {
        let shape = MaskShape { block_q: q_len.max(1), block_kv, ..MaskShape::new(q_len, written.len()) };
        shape.check()?;
        for (block, keys) in written.chunks(block_kv).enumerate() {
            if let Some(lane) = keys.iter().position(|&key| key != keys[0]) {
                let why = format!("block {block} of {block_kv} keys must be written whole or not at all");
                let (index, got) = (block * block_kv + lane, i64::from(keys[lane]));
                return Err(Error::Index { array: "written", index, got, why });
            }
        }
        BlockMask::classified(shape, MaskRule::Whole, 0, |_, _, _, keys| {
            if written[keys.start] { Seen::Whole } else { Seen::Nothing }
        })
    }
}

/// The query-uniform mask of full blocks over what of a ring is written: every one of `q_len` queries sees every written
/// key of `written` `[kv_len]`, in blocks of [`BLOCK`].
///
/// # Errors
/// A length that is no multiple of [`BLOCK`], by its name; a `written` of another length than `kv_len`; a block that is
/// written in part, with its number and the entry that differs.
pub fn make_block_mask(q_len: usize, kv_len: usize, written: &[bool]) -> Result<BlockMask> {
    for (name, len) in [("q_len", q_len), ("kv_len", kv_len)] {
        if !len.is_multiple_of(BLOCK) {
            return refuse(name, format!("must be a multiple of {BLOCK}, the mask's block"), len);
        }
    }
    if written.len() != kv_len {
        let expected = format!("[kv_len] = [{kv_len}]");
        return Err(Error::Shape { tensor: "written", expected, got: vec![written.len()] });
    }
    BlockMask::written(q_len, BLOCK, written)
}

/// The rule of a mask that was made of single pairs.
fn kept(shape: MaskShape, bits: Vec<u64>, first: Vec<usize>, words: usize) -> UserMask {
    UserMask::new("the mask's own pairs", move |seen, row| {
        let of = |n: usize, at: usize| if n == 1 { 0 } else { at };
        let plane = of(shape.batch, row.batch) * shape.heads + of(shape.heads, row.head);
        let list = plane * shape.q_blocks() + row.q_idx / shape.block_q;
        for (seen, &k_idx) in seen.iter_mut().zip(row.k_idx) {
            let (block, lane) = (k_idx as usize / shape.block_kv, k_idx as usize % shape.block_kv);
            let at = first[list * shape.kv_blocks() + block] + row.q_idx % shape.block_q * words + lane / 64;
            *seen &= bits.get(at).is_some_and(|word| word >> (lane % 64) & 1 == 1);
        }
    })
}
