//! Finding leaves that several rows share, so that their keys are read once for all of them.
//!
//! Rows share a leaf when the pages under it are the same and every query of every such row sees all of it.
//! Then one item may sum it for all their queries at once. It sums what the rows' own items would have
//! summed, in the same order, so a cascade changes no bit.

use crate::work::Row;

use super::{Family, Geometry, Variant};

/// Leaves `leaf_begin..leaf_end` of the rows `members[member_begin..member_end]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) member_begin: usize,
    pub(super) member_end: usize,
    pub(super) leaf_begin: u32,
    pub(super) leaf_end: u32,
}

/// What was found, and the memory to find it in.
#[derive(Clone, Debug, Default)]
pub(super) struct Cascade {
    pub(super) runs: Vec<Run>,
    pub(super) members: Vec<u32>,
    order: Vec<Entry>,
}

/// A row, and what it has in common with the next one in page order.
#[derive(Clone, Copy, Debug)]
struct Entry {
    row: u32,
    /// Leaves that every query of the row sees whole.
    whole: u32,
    /// Leaves that it shares with the next entry.
    common: u32,
}

impl Cascade {
    /// Forgets what was found, not the memory.
    pub(super) fn clear(&mut self) {
        self.runs.clear();
        self.members.clear();
        self.order.clear();
    }

    /// Finds the runs of a batch, deeper ones after the ones they extend.
    pub(super) fn find(&mut self, geometry: &Geometry, variant: &Variant, rows: &[Row], pages: &[i32]) {
        self.clear();
        if variant.window_left.is_some() || rows.len() < 2 {
            return;
        }
        for (index, row) in rows.iter().enumerate() {
            let plain = row.mask_words == 0 && row.kv_begin == 0 && row.kv_offset == 0;
            let few = row.family == Family::Decode as u32 || row.family == Family::Latent as u32;
            if !plain || !few || row.q_len == 0 {
                continue;
            }
            let seen = if variant.causal { (row.kv_len + 1).saturating_sub(row.q_len) } else { row.kv_len };
            let whole = seen.min(row.kv_len) / row.leaf_keys;
            if whole > 0 {
                self.order.push(Entry { row: index as u32, whole, common: 0 });
            }
        }
        let list = |entry: &Entry| {
            let row = &rows[entry.row as usize];
            &pages[row.page_begin as usize..(row.page_begin + row.page_count) as usize]
        };
        self.order.sort_unstable_by(|a, b| list(a).cmp(list(b)).then(a.row.cmp(&b.row)));
        for at in 1..self.order.len() {
            let (a, b) = (list(&self.order[at - 1]), list(&self.order[at]));
            let same = a.iter().zip(b).take_while(|(a, b)| a == b).count() as u64;
            let leaf = u64::from(rows[self.order[at].row as usize].leaf_keys);
            self.order[at - 1].common = (same * geometry.page_size as u64 / leaf) as u32;
        }
        let mut order = std::mem::take(&mut self.order);
        self.split(&mut order, 0);
        self.order = order;
    }

    fn split(&mut self, entries: &mut [Entry], from: u32) {
        let Some(last) = entries.len().checked_sub(1).filter(|&last| last > 0) else { return };
        let common = entries[..last].iter().map(|entry| entry.common).min().unwrap_or(0);
        let whole = entries.iter().map(|entry| entry.whole).min().unwrap_or(0);
        let upto = common.min(whole);
        if upto > from {
            let member_begin = self.members.len();
            self.members.extend(entries.iter().map(|entry| entry.row));
            let member_end = self.members.len();
            self.runs.push(Run { member_begin, member_end, leaf_begin: from, leaf_end: upto });
        }
        // Rows that see no further leave; their neighbours then meet with the smaller common run.
        let mut kept = 0;
        for at in 0..entries.len() {
            let entry = entries[at];
            if entry.whole > upto {
                entries[kept] = entry;
                kept += 1;
            } else if kept > 0 {
                entries[kept - 1].common = entries[kept - 1].common.min(entry.common);
            }
        }
        let mut begin = 0;
        for at in 0..kept {
            if at + 1 == kept || entries[at].common <= upto {
                self.split(&mut entries[begin..=at], upto);
                begin = at + 1;
            }
        }
    }
}
