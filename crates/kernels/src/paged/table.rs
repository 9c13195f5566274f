//! A batch's rows and page tables, as a caller hands them in, and what may be wrong with them.

use crate::mutant::planted;
use crate::work::{NO_MASK, Row};
use crate::{Error, Kernels, Result};

use super::{Geometry, Stored, Target};

/// Positions are below this: they travel as 32-bit integers.
pub const MAX_POSITION: i64 = i32::MAX as i64;

/// The packed rows of a batch and the pages that hold their keys. `R` rows, `T` query tokens, `P` pages of
/// `S` slots.
///
/// Row `r` owns query tokens `qo_indptr[r]..qo_indptr[r + 1]` and pages
/// `kv_indices[kv_indptr[r]..kv_indptr[r + 1]]`. It may have no query token, no page, or neither, and rows may
/// share pages. Entries of `kv_indices` past `kv_indptr[R]` are never read.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageTable<'a> {
    /// `[R + 1]`: from 0, never decreasing, to `T`.
    pub qo_indptr: &'a [i32],
    /// `[R + 1]`: from 0, never decreasing, to at most the length of `kv_indices`.
    pub kv_indptr: &'a [i32],
    /// Page ids, each `0..num_pages`.
    pub kv_indices: &'a [i32],
    /// `[R]`: tokens in each row's last page, `1..=S`. A row without pages has length 0 whatever stands here.
    pub kv_last_page_len: &'a [i32],
    /// `[R]`: absolute position of slot 0 of each row's first listed page, for streams that gave their first
    /// pages back; `None` is 0 for all.
    pub kv_offset: Option<&'a [i64]>,
    /// `[R]`: slots of each row's first listed page that lie before its first kept token, `0..=S`; `None` is
    /// 0 for all.
    pub page_start: Option<&'a [i32]>,
    /// Keys that are hidden beyond what the variant hides.
    pub mask: Option<Mask<'a>>,
    /// `P`: pages of the pool.
    pub num_pages: usize,
}

/// A custom boolean mask per row: for trees of speculated tokens, documents, and whatever else the variant's
/// rules cannot say. It is joined with those rules: a key is seen when both allow it.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    /// The entries.
    pub entries: MaskEntries<'a>,
    /// `[R + 1]`: where each row's entries start, counted in entries. A row's run is `[q_len, kv_len]`, row-major,
    /// its columns absolute positions `0..kv_len`; or empty, for a row without a custom mask.
    pub indptr: &'a [i64],
}

/// How a mask's entries lie.
#[derive(Clone, Copy, Debug)]
pub enum MaskEntries<'a> {
    /// One byte an entry; 0 hides the key.
    Bytes(&'a [u8]),
    /// One bit an entry, the lowest bit of a byte first; 0 hides the key.
    Bits(&'a [u8]),
}

impl MaskEntries<'_> {
    fn len(&self) -> i64 {
        match self {
            MaskEntries::Bytes(bytes) => bytes.len() as i64,
            MaskEntries::Bits(bytes) => (bytes.len() as i64).saturating_mul(8),
        }
    }

    fn get(&self, entry: usize) -> bool {
        match self {
            MaskEntries::Bytes(bytes) => bytes[entry] != 0,
            MaskEntries::Bits(bytes) => bytes[entry / 8] >> (entry % 8) & 1 != 0,
        }
    }
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

impl PageTable<'_> {
    /// `R`.
    pub fn num_rows(&self) -> usize {
        self.qo_indptr.len().saturating_sub(1)
    }

    /// `T`.
    pub fn num_tokens(&self) -> usize {
        self.qo_indptr.last().map_or(0, |&t| t.max(0) as usize)
    }

    /// Refuses a table that names what is not there.
    ///
    /// # Errors
    /// [`Error::Shape`] for an array of the wrong length, [`Error::Index`] naming the array, the entry (which
    /// for per-row arrays is the row) and its value.
    pub fn check(&self, geometry: &Geometry) -> Result<()> {
        self.check_rows(geometry)?;
        self.check_pages()?;
        if let Some(mask) = &self.mask {
            self.check_mask(geometry, mask)?;
        }
        Ok(())
    }

    /// The page ids of a table whose rows were checked.
    pub(super) fn check_pages(&self) -> Result<()> {
        let rows = self.num_rows();
        let used = &self.kv_indices[..self.kv_indptr[rows] as usize];
        let top = used.iter().fold(0u32, |top, &page| top.max(page as u32));
        if top as usize >= self.num_pages && !used.is_empty() {
            let bad = |&page: &i32| page < 0 || page as usize >= self.num_pages;
            let index = used.iter().position(bad).expect("the largest entry is out of range");
            let row = self.kv_indptr.partition_point(|&start| start as usize <= index) - 1;
            let why = format!("page of row {row}; the pool has pages 0..{}", self.num_pages);
            return refuse("kv_indices", index, used[index].into(), why);
        }
        Ok(())
    }

    /// Everything but page ids and masks.
    pub(super) fn check_rows(&self, geometry: &Geometry) -> Result<()> {
        let rows = self.num_rows();
        indptr("qo_indptr", self.qo_indptr, i32::MAX as usize)?;
        length("kv_indptr", self.kv_indptr.len(), rows + 1)?;
        indptr("kv_indptr", self.kv_indptr, self.kv_indices.len())?;
        length("kv_last_page_len", self.kv_last_page_len.len(), rows)?;
        if let Some(offsets) = self.kv_offset {
            length("kv_offset", offsets.len(), rows)?;
        }
        if let Some(starts) = self.page_start {
            length("page_start", starts.len(), rows)?;
        }
        for row in 0..rows {
            self.check_row(geometry, row)?;
        }
        Ok(())
    }

    fn check_row(&self, geometry: &Geometry, row: usize) -> Result<()> {
        let pages = i64::from(self.kv_indptr[row + 1] - self.kv_indptr[row]);
        let size = geometry.page_size as i64;
        let offset = self.kv_offset.map_or(0, |offsets| offsets[row]);
        if !(0..=MAX_POSITION).contains(&offset) {
            return refuse("kv_offset", row, offset, format!("a row's positions are 0..={MAX_POSITION}"));
        }
        if pages == 0 {
            return Ok(());
        }
        let last = i64::from(self.kv_last_page_len[row]);
        if !(1..=size).contains(&last) {
            let why = format!("row {row} has {pages} pages of {size} slots; its last page holds 1..={size}");
            return refuse("kv_last_page_len", row, last, why);
        }
        let end = (pages - 1).checked_mul(size).and_then(|n| n.checked_add(last + offset));
        if end.is_none_or(|end| end > MAX_POSITION) {
            let why = format!("row {row}'s last position is above {MAX_POSITION}");
            return refuse("kv_indptr", row + 1, self.kv_indptr[row + 1].into(), why);
        }
        let start = self.page_start.map_or(0, |starts| i64::from(starts[row]));
        if !(0..=size).contains(&start) {
            return refuse("page_start", row, start, format!("row {row}'s pages have {size} slots"));
        }
        Ok(())
    }

    fn check_mask(&self, geometry: &Geometry, mask: &Mask<'_>) -> Result<()> {
        length("mask.indptr", mask.indptr.len(), self.num_rows() + 1)?;
        let mut before = 0;
        for (index, &start) in mask.indptr.iter().enumerate() {
            if start < before || start > mask.entries.len() || (index == 0 && start != 0) {
                let why = format!("starts at 0, never decreases, ends within {} entries", mask.entries.len());
                return refuse("mask.indptr", index, start, why);
            }
            before = start;
        }
        for row in 0..self.num_rows() {
            let entries = mask.indptr[row + 1] - mask.indptr[row];
            let parsed = self.row(geometry, Stored::Heads, Target::Threads, Kernels::Auto, row);
            let expected = i64::from(parsed.q_len) * i64::from(parsed.kv_len);
            if entries != 0 && entries != expected {
                let why = format!("row {row} has {entries} entries; q_len * kv_len is {expected}");
                return refuse("mask.indptr", row + 1, mask.indptr[row + 1], why);
            }
        }
        Ok(())
    }

    /// Row `row` of a table that [`PageTable::check`] accepted, all but its mask.
    pub(super) fn row(
        &self,
        geometry: &Geometry,
        stored: Stored,
        target: Target,
        kernels: Kernels,
        row: usize,
    ) -> Row {
        let (q_begin, q_end) = (self.qo_indptr[row], self.qo_indptr[row + 1]);
        let (page_begin, page_end) = (self.kv_indptr[row], self.kv_indptr[row + 1]);
        let page_count = (page_end - page_begin) as u32;
        let q_len = (q_end - q_begin) as u32;
        let offset = self.kv_offset.map_or(0, |offsets| offsets[row] as u32);
        let (kv_len, start) = match page_count {
            0 => (offset, 0),
            n => {
                let before = (n - 1) as u64 * geometry.page_size as u64;
                let start = self.page_start.map_or(0, |starts| starts[row] as u32);
                let last = self.kv_last_page_len[row] as u32;
                let room = (last as usize) < geometry.page_size;
                let last = if room && planted("last-page-len-plus-one") { last + 1 } else { last };
                ((u64::from(offset) + before) as u32 + last, start)
            }
        };
        let family = stored.family(geometry, q_len as usize);
        Row {
            mask_begin: NO_MASK,
            mask_words: 0,
            q_begin: q_begin as u32,
            q_len,
            kv_len,
            kv_begin: offset.saturating_add(start).min(kv_len),
            kv_offset: offset,
            page_begin: page_begin as u32,
            page_count,
            family: family as u32,
            leaf_keys: stored.leaf_keys(geometry, target, kernels, q_len as usize, kv_len),
        }
    }

    /// Appends a row's mask to `words` as whole 64-bit words a query token, and points the row at it.
    pub(super) fn pack_mask(&self, index: usize, row: &mut Row, words: &mut Vec<u64>) {
        let Some(mask) = &self.mask else { return };
        let first = mask.indptr[index];
        if mask.indptr[index + 1] == first {
            return;
        }
        row.mask_begin = words.len() as u64;
        row.mask_words = row.kv_len.div_ceil(64);
        let kv_len = row.kv_len as usize;
        for query in 0..row.q_len as usize {
            let begin = first as usize + query * kv_len;
            for word in 0..row.mask_words as usize {
                let keys = 64 * word..kv_len.min(64 * word + 64);
                let seen = keys.enumerate().map(|(bit, key)| (mask.entries.get(begin + key) as u64) << bit);
                words.push(seen.fold(0, |word, bit| word | bit));
            }
        }
    }
}

/// Refuses an indptr that does not rise from 0 to at most `limit`.
pub(crate) fn indptr(name: &'static str, indptr: &[i32], limit: usize) -> Result<()> {
    let Some(&first) = indptr.first() else {
        return Err(Error::Shape { tensor: name, expected: "[R + 1]".into(), got: vec![0] });
    };
    if first != 0 {
        return refuse(name, 0, first.into(), "the first entry is 0".into());
    }
    for (row, pair) in indptr.windows(2).enumerate() {
        if pair[1] < pair[0] {
            let why = format!("row {row} would start at {} and end before it", pair[0]);
            return refuse(name, row + 1, pair[1].into(), why);
        }
    }
    let last = indptr.len() - 1;
    if indptr[last] as usize > limit {
        return refuse(name, last, indptr[last].into(), format!("there are {limit} entries"));
    }
    Ok(())
}
