//! Which blocks of keys each block of queries sees, as a caller hands it in, and what may be wrong with it.

use crate::paged::{MAX_POSITION, check_indptr};
use crate::{Error, Result};

use super::Geometry;

/// Visible blocks, one list for each (mask batch, mask head, block of queries), in that order.
///
/// Queries and keys are cut into blocks from index 0; the last of either may be short, and nothing past `q_len` or `kv_len`
/// is ever attended. A block of queries without a visible block yields 0 and `-inf`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Blocks<'a> {
    /// `L`: queries of a batch.
    pub q_len: usize,
    /// `M`: keys of a batch.
    pub kv_len: usize,
    /// Queries a block, at least 1.
    pub block_q: usize,
    /// Keys a block, at least 1.
    pub block_kv: usize,
    /// Batches that the mask tells apart: `B`, or 1 for one mask that all share.
    pub batch: usize,
    /// Query heads that the mask tells apart: `H`, or 1 for one mask that all share.
    pub heads: usize,
    /// `[batch * heads * ceil(L / block_q) + 1]`: from 0, never decreasing: where each list starts in `indices`.
    pub indptr: &'a [i32],
    /// Visible blocks of keys, `0..ceil(M / block_kv)`, ascending within a list. Entries past the last list are never read.
    pub indices: &'a [i32],
    /// Beside `indices`: not 0 for a block of which the mask mods decide. Empty: every block is visible whole.
    pub partial: &'a [u8],
    /// `[ceil(M / block_kv)]`: which block of the sequence each stored block is, for mods; at least 0. `None`: the one it is
    /// stored as.
    pub positions: Option<&'a [i32]>,
}

fn refuse<T>(array: &'static str, index: usize, got: i64, why: String) -> Result<T> {
    Err(Error::Index { array, index, got, why })
}

impl Blocks<'_> {
    /// Blocks of queries.
    pub fn q_blocks(&self) -> usize {
        self.q_len.div_ceil(self.block_q.max(1))
    }

    /// Blocks of keys.
    pub fn kv_blocks(&self) -> usize {
        self.kv_len.div_ceil(self.block_kv.max(1))
    }

    /// Refuses what names blocks that are not there.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a size that is 0 or too large, [`Error::Shape`] for an array of the wrong length,
    /// [`Error::Index`] naming the array, the entry and its value.
    pub fn check(&self, geometry: &Geometry) -> Result<()> {
        let parameter =
            |name, why: String, got: usize| Err(Error::Parameter { name, why, got: got.to_string() });
        for (name, block) in [("block_q", self.block_q), ("block_kv", self.block_kv)] {
            if block == 0 || block > MAX_POSITION as usize {
                return parameter(name, format!("must be 1..={MAX_POSITION}"), block);
            }
        }
        if self.kv_len > MAX_POSITION as usize {
            return parameter("kv_len", format!("must be at most {MAX_POSITION}"), self.kv_len);
        }
        let tokens =
            geometry.batch.checked_mul(geometry.num_qo_heads).and_then(|n| n.checked_mul(self.q_len));
        if tokens.is_none_or(|tokens| tokens > MAX_POSITION as usize) {
            return parameter("q_len", format!("B * H * L must be at most {MAX_POSITION}"), self.q_len);
        }
        for (name, got, all) in
            [("batch", self.batch, geometry.batch), ("heads", self.heads, geometry.num_qo_heads)]
        {
            if got != 1 && got != all {
                return parameter(name, format!("the mask is for 1 or for {all}"), got);
            }
        }
        let lists = self.batch * self.heads * self.q_blocks();
        if self.indptr.len() != lists + 1 {
            let expected = format!("[batch * heads * ceil(L / block_q) + 1] = [{}]", lists + 1);
            return Err(Error::Shape { tensor: "indptr", expected, got: vec![self.indptr.len()] });
        }
        check_indptr("indptr", self.indptr, self.indices.len())?;
        if !self.partial.is_empty() && self.partial.len() < self.indptr[lists] as usize {
            let expected = format!("[{}], beside indices", self.indices.len());
            return Err(Error::Shape { tensor: "partial", expected, got: vec![self.partial.len()] });
        }
        let blocks = self.kv_blocks();
        for list in 0..lists {
            let mut before = -1;
            for at in self.indptr[list] as usize..self.indptr[list + 1] as usize {
                let block = self.indices[at];
                if block <= before || block as usize >= blocks {
                    let why = format!("the blocks of list {list} ascend within 0..{blocks}");
                    return refuse("indices", at, block.into(), why);
                }
                before = block;
            }
        }
        if let Some(positions) = self.positions {
            if positions.len() != blocks {
                let expected = format!("[ceil(M / block_kv)] = [{blocks}]");
                return Err(Error::Shape { tensor: "positions", expected, got: vec![positions.len()] });
            }
            let most = MAX_POSITION / self.block_kv as i64;
            if let Some(at) = positions.iter().position(|&p| p < 0 || i64::from(p) >= most.max(1)) {
                let why = format!("blocks of the sequence are 0..{}", most.max(1));
                return refuse("positions", at, positions[at].into(), why);
            }
        }
        Ok(())
    }

    /// One past the largest key index that a visible block can have.
    pub(super) fn key_bound(&self) -> usize {
        match self.positions {
            None => self.kv_len,
            Some(positions) => positions.iter().max().map_or(0, |&p| (p as usize + 1) * self.block_kv),
        }
    }

    /// Keys of the blocks `indices[from..to]`.
    pub(super) fn keys(&self, from: usize, to: usize) -> usize {
        let whole = (to - from) * self.block_kv;
        match self.indices[from..to].last() {
            Some(&last) if last as usize + 1 == self.kv_blocks() => {
                let past = self.kv_blocks() * self.block_kv - self.kv_len;
                if crate::mutant::planted("flex-padding-visible") { whole } else { whole - past }
            }
            _ => whole,
        }
    }
}
