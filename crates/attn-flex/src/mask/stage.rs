//! A ring's pass as a mask, made again in the memory of the one before.

use std::ops::Range;

use mstar_core::kv::{RING_BLOCK, RingConfig, RingGeometry, RingPlan};
use mstar_kernels::Result;
use mstar_kernels::mutant::planted;

use super::{BlockMask, MaskRule, MaskShape, refuse};

/// The mask of the passes of one plan label in the layers of one geometry.
#[derive(Debug)]
pub(crate) struct RingMask {
    mask: BlockMask,
    geometry: RingGeometry,
    tokens: usize,
    /// Whether rules or score mods ask which frame a block holds.
    placed: bool,
    /// Frames a document: a pass sees those of its own document alone.
    document: Option<usize>,
    /// Keys before a query's own and after it that rules leave.
    reach: [i64; 2],
    /// Whether some rule is a user's, which is asked about every key.
    asked: bool,
}

/// Farther than any key of a ring can lie.
const ANYWHERE: i64 = 1 << 40;

/// Which keys a pass sees beside what its ring shows.
#[derive(Clone, Debug, Default)]
pub(crate) struct RingRule {
    /// Of keys numbered by the frames that hold them: causality, windows and rules of the caller's.
    pub(crate) rule: MaskRule,
    /// Frames a document.
    pub(crate) document: Option<usize>,
}

impl RingMask {
    /// The mask of a plan that does not exist yet, for layers of one geometry.
    pub(crate) fn new(config: &RingConfig, geometry: RingGeometry, rule: RingRule, placed: bool) -> RingMask {
        let RingRule { rule, document } = rule;
        let (mut reach, mut asked) = ([ANYWHERE; 2], false);
        for rule in rule.each() {
            let [left, right] = match rule {
                MaskRule::Causal => [ANYWHERE, 0],
                MaskRule::SlidingWindow { left, right } => {
                    [left, right].map(|&keys| i64::try_from(keys).map_or(ANYWHERE, |n| n.min(ANYWHERE)))
                }
                _ => {
                    asked = true;
                    [ANYWHERE; 2]
                }
            };
            reach = [reach[0].min(left), reach[1].min(right)];
        }
        let tokens = config.tokens_per_frame;
        let placed = placed || !matches!(rule, MaskRule::Whole);
        let kv_len = config.layer_tokens(&geometry);
        let block_q = if matches!(rule, MaskRule::Whole) { tokens } else { RING_BLOCK };
        let shape = MaskShape { block_q, ..MaskShape::new(0, kv_len) };
        let mask = BlockMask {
            shape,
            indptr: vec![0],
            indices: Vec::new(),
            partial: Vec::new(),
            positions: None,
            rule,
            q_offset: 0,
        };
        RingMask { mask, geometry, tokens, placed, document, reach, asked }
    }

    /// The mask.
    pub(crate) fn mask(&self) -> &BlockMask {
        &self.mask
    }

    /// Makes this the mask of a plan's rows: query `q_idx` is token `q_idx` of the packed rows.
    ///
    /// # Errors
    /// Rows whose positions do not fit 32-bit indices; the mask is then of no use.
    pub(crate) fn stage(&mut self, plan: &RingPlan, group: usize) -> Result<()> {
        let mask = &mut self.mask;
        mask.shape.q_len = plan.rows.len() * self.tokens;
        mask.indptr.clear();
        mask.indices.clear();
        mask.partial.clear();
        if self.placed {
            self.place(plan, group)?;
        }
        let whole = matches!(self.mask.rule, MaskRule::Whole);
        if whole && self.document.is_none() {
            // One block of queries a row, and the ring's own lists.
            self.mask.indptr.extend_from_slice(plan.indptr(group));
            self.mask.indices.extend_from_slice(plan.blocks(group));
            return Ok(());
        }
        self.mask.indptr.push(0);
        for (row, pass) in plan.rows.iter().enumerate() {
            let frame_pos = pass.frame_pos;
            for first in (0..self.tokens).step_by(self.mask.shape.block_q) {
                let first = row * self.tokens + first;
                for &block in plan.visible(group, row) {
                    if !self.of_document(frame_pos, block) {
                        continue;
                    }
                    if whole {
                        self.mask.indices.push(block);
                    } else {
                        self.list(first..first + RING_BLOCK, block);
                    }
                }
                self.mask.end_list()?;
            }
        }
        Ok(())
    }

    /// Lists a block for some queries, where the rule lets them see any of it.
    fn list(&mut self, queries: Range<usize>, block: i32) {
        let positions = self.mask.positions.as_deref().unwrap_or_default();
        let low = i64::from(positions[block as usize]) * RING_BLOCK as i64;
        let high = low + RING_BLOCK as i64 - 1;
        let at = |q_idx: usize| q_idx as i64 + self.mask.q_offset;
        let (first, last) = (at(queries.start), at(queries.end - 1));
        let [left, right] = self.reach;
        if high < first - left || low > last + right {
            return;
        }
        self.mask.indices.push(block);
        let cut = self.asked || low < last - left || high > first + right;
        self.mask.partial.push(u8::from(cut));
    }

    /// Whether a block that a pass over `frame_pos` sees holds a frame of the pass's own document.
    fn of_document(&self, frame_pos: u64, block: i32) -> bool {
        let Some(frames) = self.document.map(|frames| frames as u64) else { return true };
        planted("ring-document-ignored")
            || (frame_pos - self.ago(frame_pos, block).0) / frames == frame_pos / frames
    }

    /// How many frames before its own a pass over `frame_pos` finds what a block holds, and which of its frame's it is.
    fn ago(&self, frame_pos: u64, block: i32) -> (u64, usize) {
        let per = self.tokens / RING_BLOCK;
        let RingGeometry { ring_frames, ring_buckets, pinned_dilation } = self.geometry;
        let (frame, lane) = (block as usize / per % self.geometry.frames(), block as usize % per);
        if frame == ring_frames || planted("ring-positions-stored") {
            return (0, lane);
        }
        // The last kept frame that went to this slot.
        let kept = frame_pos.div_ceil(pinned_dilation as u64);
        let since = (kept + ring_buckets as u64 - 1 - frame as u64) % ring_buckets as u64;
        (frame_pos - (kept - 1 - since) * pinned_dilation as u64, lane)
    }

    /// Numbers the visible blocks by the frames that they hold, each row's own frame at the place of its queries.
    fn place(&mut self, plan: &RingPlan, group: usize) -> Result<()> {
        let per = self.tokens / RING_BLOCK;
        let RingGeometry { ring_buckets, pinned_dilation, .. } = self.geometry;
        // How far back a frame in a slot can lie.
        let back = ring_buckets.saturating_add(1).saturating_mul(pinned_dilation);
        let end = back.saturating_add(plan.rows.len()).saturating_mul(self.tokens);
        if end > i32::MAX as usize {
            let why = "positions of a ring's frames must fit 32-bit indices";
            return refuse("pinned_dilation", why, pinned_dilation);
        }
        self.mask.q_offset = (back * self.tokens) as i64;
        let blocks = self.mask.shape.kv_blocks();
        let mut positions = self.mask.positions.take().unwrap_or_default();
        positions.clear();
        positions.resize(blocks, 0);
        for (row, pass) in plan.rows.iter().enumerate() {
            for &block in plan.visible(group, row) {
                let (ago, lane) = self.ago(pass.frame_pos, block);
                positions[block as usize] = ((row + back - ago as usize) * per + lane) as i32;
            }
        }
        self.mask.positions = Some(positions);
        Ok(())
    }
}
