//! Changing one list of a mask in place: a ring that moves on by a frame hides a few blocks and shows a few others.

use std::ops::Range;

use mstar_kernels::mutant::planted;
use mstar_kernels::{Error, Result};

use super::BlockMask;

/// What an edit did to the mask's arrays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edited {
    /// Entries that hold another block than before, or are new.
    pub written: usize,
    /// Entries behind them that moved, since the list is longer or shorter now. 0 when as many blocks were shown as hidden.
    pub moved: usize,
}

impl BlockMask {
    /// In the list of block `q_block` of the queries of a batch and head, hides the blocks `hide` and then shows the blocks
    /// `show` whole. Blocks that are hidden already, or shown already, stay so; all entries outside what changed stay where
    /// they are.
    ///
    /// # Errors
    /// A list or a block that the mask does not have; the mask is as it was.
    pub fn update(
        &mut self,
        [batch, head, q_block]: [usize; 3],
        hide: Range<usize>,
        show: Range<usize>,
    ) -> Result<Edited> {
        let shape = self.shape;
        for (axis, (at, extent)) in
            [(batch, shape.batch), (head, shape.heads), (q_block, shape.q_blocks())].into_iter().enumerate()
        {
            if at >= extent {
                return Err(Error::Range { axis, start: at, end: at + 1, extent });
            }
        }
        let blocks = shape.kv_blocks();
        for range in [&hide, &show] {
            if range.start > range.end || range.end > blocks {
                return Err(Error::Range { axis: 3, start: range.start, end: range.end, extent: blocks });
            }
        }
        let list = self.list(batch, head, q_block);
        let entries = self.range(list);
        let at = |block: usize| {
            entries.start + self.indices[entries.clone()].partition_point(|&b| (b as usize) < block)
        };
        // Every entry that may change lies in this window.
        let touched = [&hide, &show].into_iter().filter(|range| !range.is_empty());
        let (mut from, mut to) = (entries.end, entries.start);
        for range in touched {
            (from, to) = (from.min(at(range.start)), to.max(at(range.end)));
        }
        if from > to {
            return Ok(Edited::default()); // neither hides nor shows anything
        }
        let mut window: Vec<(i32, u8)> = (from..to)
            .map(|at| (self.indices[at], self.partial.get(at).copied().unwrap_or(0)))
            .filter(|(block, _)| !hide.contains(&(*block as usize)) || planted("mask-update-keeps-hidden"))
            .filter(|(block, _)| !show.contains(&(*block as usize)))
            .collect();
        let into = window.partition_point(|(block, _)| (*block as usize) < show.start);
        window.splice(into..into, show.map(|block| (block as i32, 0)));

        let written = window
            .iter()
            .enumerate()
            .filter(|(i, entry)| {
                let old = from + i;
                old >= to
                    || self.indices[old] != entry.0
                    || self.partial.get(old).copied().unwrap_or(0) != entry.1
            })
            .count();
        let same_length = window.len() == to - from;
        let moved = if same_length { 0 } else { self.indices.len() - to };
        let delta = window.len() as i64 - (to - from) as i64;
        if self.partial.len() == self.indices.len() {
            self.partial.splice(from..to, window.iter().map(|entry| entry.1));
        }
        self.indices.splice(from..to, window.iter().map(|entry| entry.0));
        if delta != 0 {
            for end in &mut self.indptr[list + 1..] {
                // Lists only ever hold blocks that are there, whose count fits.
                *end = (i64::from(*end) + delta) as i32;
            }
        }
        Ok(Edited { written, moved })
    }
}
