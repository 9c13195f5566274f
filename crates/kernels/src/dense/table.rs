//! A batch's rows and where their keys lie, as a caller hands them in, and what may be wrong with them.

use crate::paged::{Family, MAX_POSITION};
use crate::work::{NO_MASK, Row, Segment};
use crate::{Error, Result};

/// The packed rows of a batch. `R` rows, `T` query tokens.
///
/// Row `r` owns query tokens `cu_q[r]..cu_q[r + 1]`; its keys are its prefix and then fresh tokens `cu_k[r]..cu_k[r + 1]`. It may
/// have none of any of them. Arrays' last entries may be below what the tensors hold: the rest is never read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Table<'a> {
    /// `[R + 1]`: from 0, never decreasing, to `T`.
    pub cu_q: &'a [i32],
    /// Keys before the fresh ones.
    pub prefix: Prefix<'a>,
    /// `[R + 1]`: from 0, never decreasing: each row's fresh keys.
    pub cu_k: &'a [i32],
}

/// Where rows' frozen prefixes lie.
#[derive(Clone, Copy, Debug, Default)]
pub enum Prefix<'a> {
    /// No row has one.
    #[default]
    None,
    /// Packed, row after row.
    Packed {
        /// `[R + 1]`: from 0, never decreasing: each row's prefix.
        cu_p: &'a [i32],
    },
    /// In pages of a pool.
    Pages {
        /// `[R + 1]`: from 0, never decreasing: each row's pages.
        kv_indptr: &'a [i32],
        /// Page ids, each `0..num_pages`; those past `kv_indptr[R]` are never read.
        kv_indices: &'a [i32],
        /// `[R]`: keys of each row's prefix; they lie in the row's first pages, which may be more than it fills.
        prefix_len: &'a [i32],
        /// `S`: token slots a page, at least 1.
        page_size: usize,
        /// `[R]`: slots of each row's first page that lie before its prefix, `0..=S`; `None` is 0 for all.
        page_start: Option<&'a [i32]>,
        /// `P`: pages of the pool.
        num_pages: usize,
    },
}

fn refuse<T>(array: &'static str, index: usize, got: i64, why: String) -> Result<T> {
    Err(Error::Index { array, index, got, why })
}

fn length(name: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape { tensor: name, expected: format!("[{expected}]"), got: vec![got] })
}

fn indptr(name: &'static str, indptr: &[i32], limit: usize) -> Result<()> {
    crate::paged::check_indptr(name, indptr, limit)
}

impl Table<'_> {
    /// `R`.
    pub fn num_rows(&self) -> usize {
        self.cu_q.len().saturating_sub(1)
    }

    /// `T`.
    pub fn num_tokens(&self) -> usize {
        self.cu_q.last().map_or(0, |&t| t.max(0) as usize)
    }

    /// Refuses a table that names what is not there.
    ///
    /// # Errors
    /// [`Error::Shape`] for an array of the wrong length, [`Error::Index`] naming the array, the entry (which for per-row
    /// arrays is the row) and its value, [`Error::Parameter`] for a page size of 0.
    pub fn check(&self) -> Result<()> {
        let rows = self.num_rows();
        indptr("cu_q", self.cu_q, i32::MAX as usize)?;
        length("cu_k", self.cu_k.len(), rows + 1)?;
        indptr("cu_k", self.cu_k, i32::MAX as usize)?;
        match self.prefix {
            Prefix::None => {}
            Prefix::Packed { cu_p } => {
                length("cu_p", cu_p.len(), rows + 1)?;
                indptr("cu_p", cu_p, i32::MAX as usize)?;
            }
            Prefix::Pages { kv_indptr, kv_indices, prefix_len, page_size, page_start, num_pages } => {
                if page_size == 0 || page_size > i32::MAX as usize {
                    let (why, got) = ("must be 1..=2147483647".into(), page_size.to_string());
                    return Err(Error::Parameter { name: "page_size", why, got });
                }
                length("kv_indptr", kv_indptr.len(), rows + 1)?;
                indptr("kv_indptr", kv_indptr, kv_indices.len())?;
                length("prefix_len", prefix_len.len(), rows)?;
                if let Some(starts) = page_start {
                    length("page_start", starts.len(), rows)?;
                }
                let used = &kv_indices[..kv_indptr[rows] as usize];
                if let Some(at) = used.iter().position(|&page| page < 0 || page as usize >= num_pages) {
                    let why = format!("the pool has pages 0..{num_pages}");
                    return refuse("kv_indices", at, used[at].into(), why);
                }
                for row in 0..rows {
                    let start = page_start.map_or(0, |starts| i64::from(starts[row]));
                    if !(0..=page_size as i64).contains(&start) {
                        let why = format!("row {row}'s pages have {page_size} slots");
                        return refuse("page_start", row, start, why);
                    }
                    let pages = i64::from(kv_indptr[row + 1] - kv_indptr[row]);
                    let (len, room) = (i64::from(prefix_len[row]), (pages * page_size as i64 - start).max(0));
                    if !(0..=room).contains(&len) {
                        let why = format!(
                            "row {row} has {pages} pages of {page_size} slots, the first {start} of them not its own"
                        );
                        return refuse("prefix_len", row, len, why);
                    }
                }
            }
        }
        for row in 0..rows {
            let fresh = i64::from(self.cu_k[row + 1] - self.cu_k[row]);
            if self.prefix_len(row) + fresh > MAX_POSITION {
                let why = format!("row {row}'s last position is above {MAX_POSITION}");
                return refuse("cu_k", row + 1, self.cu_k[row + 1].into(), why);
            }
        }
        Ok(())
    }

    fn prefix_len(&self, row: usize) -> i64 {
        match self.prefix {
            Prefix::None => 0,
            Prefix::Packed { cu_p } => i64::from(cu_p[row + 1] - cu_p[row]),
            Prefix::Pages { prefix_len, .. } => prefix_len[row].into(),
        }
    }

    /// `S`, where there are pages.
    pub(super) fn page_size(&self) -> usize {
        if let Prefix::Pages { page_size, .. } = self.prefix { page_size } else { 1 }
    }

    /// `P`, where there are pages.
    pub(super) fn num_pages(&self) -> usize {
        if let Prefix::Pages { num_pages, .. } = self.prefix { num_pages } else { 0 }
    }

    /// The page ids that rows use.
    pub(super) fn pages(&self) -> &[i32] {
        match self.prefix {
            Prefix::Pages { kv_indptr, kv_indices, .. } => &kv_indices[..kv_indptr[self.num_rows()] as usize],
            _ => &[],
        }
    }

    /// Row `row` of a table that [`Table::check`] accepted.
    pub(super) fn row(&self, row: usize) -> (Row, Segment) {
        let q_len = (self.cu_q[row + 1] - self.cu_q[row]) as u32;
        let prefix_len = self.prefix_len(row) as u32;
        let (prefix_begin, page_begin, page_count) = match self.prefix {
            Prefix::None => (0, 0, 0),
            Prefix::Packed { cu_p } => (cu_p[row] as u32, 0, 0),
            Prefix::Pages { kv_indptr, page_start, .. } => {
                let count = (kv_indptr[row + 1] - kv_indptr[row]) as u32;
                (page_start.map_or(0, |starts| starts[row] as u32), kv_indptr[row] as u32, count)
            }
        };
        let fresh = (self.cu_k[row + 1] - self.cu_k[row]) as u32;
        let segment = Segment { prefix_len, prefix_begin, fresh_begin: self.cu_k[row] as u32, reserved: 0 };
        let row = Row {
            mask_begin: NO_MASK,
            mask_words: 0,
            q_begin: self.cu_q[row] as u32,
            q_len,
            kv_len: prefix_len + fresh,
            kv_begin: 0,
            kv_offset: 0,
            page_begin,
            page_count,
            family: Family::Tile as u32,
            leaf_keys: Family::Tile.leaf_keys(q_len as usize),
        };
        (row, segment)
    }
}
