//! Which blocks of keys each block of queries sees, owned: full blocks, partial blocks, and the rule that decides inside the
//! partial ones.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `build` | masks from lists of blocks, from what is written, from causality, windows, documents, any predicate |
//! | `rule` | what decides about the keys of a partial block |
//! | `edit` | changing the blocks of one list in place |
//! | `stage` | a ring's pass as a mask, made again in the memory of the one before |

mod build;
mod edit;
mod rule;
mod stage;
#[cfg(test)]
mod tests;

pub use build::{KvBlocks, make_block_mask};
pub use edit::Edited;
pub use rule::{MOST_RULES, MaskMods, MaskRule, Rules};
pub(crate) use stage::{RingMask, RingRule};

use mstar_kernels::flex::Blocks;
use mstar_kernels::{Error, Result};

/// Queries and keys of one block, unless a caller says otherwise.
pub const BLOCK: usize = 128;

/// The extents of a mask. Queries and keys are cut into blocks from index 0; the last block of either may be short, and
/// what would fill it up is never seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskShape {
    /// `L`: queries of a batch.
    pub q_len: usize,
    /// `M`: keys of a batch.
    pub kv_len: usize,
    /// Queries a block, at least 1.
    pub block_q: usize,
    /// Keys a block, at least 1.
    pub block_kv: usize,
    /// Batches that the mask tells apart, or 1 for one that all share.
    pub batch: usize,
    /// Query heads that the mask tells apart, or 1 for one that all share.
    pub heads: usize,
}

impl MaskShape {
    /// `L` queries over `M` keys in blocks of [`BLOCK`], shared by batches and heads.
    pub fn new(q_len: usize, kv_len: usize) -> MaskShape {
        MaskShape { q_len, kv_len, block_q: BLOCK, block_kv: BLOCK, batch: 1, heads: 1 }
    }

    /// Blocks of queries.
    pub fn q_blocks(&self) -> usize {
        self.q_len.div_ceil(self.block_q.max(1))
    }

    /// Blocks of keys.
    pub fn kv_blocks(&self) -> usize {
        self.kv_len.div_ceil(self.block_kv.max(1))
    }

    /// Lists of blocks: one for each batch, head and block of queries, in that order.
    pub fn lists(&self) -> usize {
        self.batch * self.heads * self.q_blocks()
    }

    /// Refuses what cannot be numbered by 32-bit integers.
    fn check(&self) -> Result<()> {
        let most = i32::MAX as usize - 1;
        for (name, extent) in [
            ("block_q", self.block_q),
            ("block_kv", self.block_kv),
            ("batch", self.batch),
            ("heads", self.heads),
        ] {
            if extent == 0 || extent > most {
                return refuse(name, format!("must be 1..={most}"), extent);
            }
        }
        if self.kv_len > most {
            return refuse("kv_len", format!("must be at most {most}"), self.kv_len);
        }
        let queries = self.batch.checked_mul(self.heads).and_then(|planes| planes.checked_mul(self.q_len));
        if queries.is_none_or(|queries| queries > most) {
            return refuse("q_len", format!("batch * heads * L must be at most {most}"), self.q_len);
        }
        Ok(())
    }
}

fn refuse<T>(name: &'static str, why: impl Into<String>, got: impl ToString) -> Result<T> {
    Err(Error::Parameter { name, why: why.into(), got: got.to_string() })
}

/// The visible blocks of a batch of queries. A block that no list names is never loaded, whatever its keys hold.
///
/// The mask says which keys are seen however it is run: a [`Plan`](crate::Plan) takes the rule of its partial blocks along.
#[derive(Clone, Debug)]
pub struct BlockMask {
    shape: MaskShape,
    indptr: Vec<i32>,
    indices: Vec<i32>,
    partial: Vec<u8>,
    positions: Option<Vec<i32>>,
    rule: MaskRule,
    q_offset: i64,
}

impl BlockMask {
    /// Its extents.
    pub fn shape(&self) -> &MaskShape {
        &self.shape
    }

    /// What decides about the keys of its partial blocks.
    pub fn rule(&self) -> &MaskRule {
        &self.rule
    }

    /// What is added to a query's index to compare it with the indices of keys, in rules and score mods.
    pub fn q_offset(&self) -> i64 {
        self.q_offset
    }

    /// `[ceil(M / block_kv)]`: which block of the sequence each stored block is, for rules and score mods.
    pub fn positions(&self) -> Option<&[i32]> {
        self.positions.as_deref()
    }

    /// The mask with queries that stand `q_offset` after the first key. It moves nothing: which blocks are listed was decided
    /// when the mask was made, so that a constructor which asks for an offset has set this already.
    #[must_use]
    pub fn with_q_offset(mut self, q_offset: i64) -> BlockMask {
        self.q_offset = q_offset;
        self
    }

    /// The mask with a table that says which block of the sequence each stored block is. Rules and score mods are then
    /// asked about the sequence, and attending scattered blocks gives the bits of attending them in a row.
    ///
    /// # Errors
    /// A table of another length than there are blocks, or with a block that cannot be.
    pub fn with_positions(mut self, positions: Vec<i32>) -> Result<BlockMask> {
        let blocks = self.shape.kv_blocks();
        if positions.len() != blocks {
            let expected = format!("[ceil(M / block_kv)] = [{blocks}]");
            return Err(Error::Shape { tensor: "positions", expected, got: vec![positions.len()] });
        }
        let most = (i32::MAX as usize / self.shape.block_kv) as i32;
        if let Some(index) = positions.iter().position(|&block| block < 0 || block >= most) {
            let (got, why) = (positions[index].into(), format!("blocks of the sequence are 0..{most}"));
            return Err(Error::Index { array: "positions", index, got, why });
        }
        self.positions = Some(positions);
        Ok(self)
    }

    /// The blocks that block `q_block` of the queries of a batch and head sees, ascending, each with whether it is seen in
    /// part. Indices past those of a shared mask stand for the shared one.
    ///
    /// # Panics
    /// When there is no such block of queries.
    #[track_caller]
    pub fn visible(
        &self,
        batch: usize,
        head: usize,
        q_block: usize,
    ) -> impl ExactSizeIterator<Item = (usize, bool)> + '_ {
        let range = self.range(self.list(batch, head, q_block));
        range.map(|at| {
            let partial = self.partial.get(at).is_some_and(|&partial| partial != 0);
            (self.indices[at] as usize, partial)
        })
    }

    /// Whether a query sees a key: the mask as the plain table that it stands for. Slow; for tests and reports.
    ///
    /// # Panics
    /// As [`BlockMask::visible`], or past the last key.
    #[track_caller]
    pub fn sees(&self, batch: usize, head: usize, q_idx: usize, k_idx: usize) -> bool {
        assert!(q_idx < self.shape.q_len && k_idx < self.shape.kv_len, "no query {q_idx} or key {k_idx}");
        let (block_q, block_kv) = (self.shape.block_q, self.shape.block_kv);
        let block = k_idx / block_kv;
        let logical = match &self.positions {
            Some(positions) => positions[block] as usize * block_kv + k_idx % block_kv,
            None => k_idx,
        };
        let asked = || self.rule.sees(batch, head, q_idx, self.q_offset, logical);
        self.visible(batch, head, q_idx / block_q).any(|(b, partial)| b == block && (!partial || asked()))
    }

    /// Blocks listed, over all lists.
    pub fn num_visible(&self) -> usize {
        self.indices.len()
    }

    /// The share of blocks that no list names, 0 to 1; 0 for a mask without blocks.
    pub fn sparsity(&self) -> f64 {
        let all = self.shape.lists() * self.shape.kv_blocks();
        if all == 0 { 0.0 } else { 1.0 - self.num_visible() as f64 / all as f64 }
    }

    /// The lists as kernels take them.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks {
            q_len: self.shape.q_len,
            kv_len: self.shape.kv_len,
            block_q: self.shape.block_q,
            block_kv: self.shape.block_kv,
            batch: self.shape.batch,
            heads: self.shape.heads,
            indptr: &self.indptr,
            indices: &self.indices,
            partial: &self.partial,
            positions: self.positions.as_deref(),
        }
    }

    /// The rule as kernels take it.
    pub fn mask_mods(&self) -> MaskMods<'_> {
        self.rule.mask_mods()
    }

    fn list(&self, batch: usize, head: usize, q_block: usize) -> usize {
        let q_blocks = self.shape.q_blocks();
        assert!(q_block < q_blocks, "block {q_block} of {q_blocks} blocks of queries");
        let of = |n: usize, at: usize| if n == 1 { 0 } else { at };
        let plane = of(self.shape.batch, batch) * self.shape.heads + of(self.shape.heads, head);
        plane * q_blocks + q_block
    }

    fn range(&self, list: usize) -> std::ops::Range<usize> {
        self.indptr[list] as usize..self.indptr[list + 1] as usize
    }
}
