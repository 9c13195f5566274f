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
}

impl RingMask {
    /// The mask of a plan that does not exist yet, for layers of one geometry.
    pub(crate) fn new(config: &RingConfig, geometry: RingGeometry, rule: MaskRule, placed: bool) -> RingMask {
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
        RingMask { mask, geometry, tokens, placed }
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
        if matches!(self.mask.rule, MaskRule::Whole) {
            // One block of queries a row, and the ring's own lists.
            self.mask.indptr.extend_from_slice(plan.indptr(group));
            self.mask.indices.extend_from_slice(plan.blocks(group));
            return Ok(());
        }
        self.mask.indptr.push(0);
        for row in 0..plan.rows.len() {
            for first in (0..self.tokens).step_by(RING_BLOCK) {
                let first = row * self.tokens + first;
                for &block in plan.visible(group, row) {
                    self.list(first..first + RING_BLOCK, block);
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
        let (left, right) = match self.mask.rule {
            MaskRule::SlidingWindow { left, right } => (left.min(1 << 40) as i64, right.min(1 << 40) as i64),
            _ => (1 << 40, 0),
        };
        if high < first - left || low > last + right {
            return;
        }
        self.mask.indices.push(block);
        self.mask.partial.push(u8::from(low < last - left || high > first + right));
    }

    /// Numbers the visible blocks by the frames that they hold, each row's own frame at the place of its queries.
    fn place(&mut self, plan: &RingPlan, group: usize) -> Result<()> {
        let per = self.tokens / RING_BLOCK;
        let RingGeometry { ring_frames, ring_buckets, pinned_dilation } = self.geometry;
        // How far back a frame in a slot can lie.
        let back = ring_buckets.saturating_add(1).saturating_mul(pinned_dilation);
        let end = back.saturating_add(plan.rows.len()).saturating_mul(self.tokens);
        if end > i32::MAX as usize {
            let why = "positions of a ring's frames must fit 32-bit indices";
            return refuse("pinned_dilation", why, pinned_dilation);
        }
        self.mask.q_offset = (back * self.tokens) as i64;
        let blocks = self.mask.shape.kv_blocks();
        let positions = self.mask.positions.get_or_insert_default();
        positions.clear();
        positions.resize(blocks, 0);
        for (row, pass) in plan.rows.iter().enumerate() {
            let kept = pass.frame_pos.div_ceil(pinned_dilation as u64);
            for &block in plan.visible(group, row) {
                let (frame, lane) = (block as usize / per % self.geometry.frames(), block as usize % per);
                let ago = if frame == ring_frames || planted("ring-positions-stored") {
                    0
                } else {
                    // The last kept frame that went to this slot.
                    let since = (kept + ring_buckets as u64 - 1 - frame as u64) % ring_buckets as u64;
                    pass.frame_pos - (kept - 1 - since) * pinned_dilation as u64
                };
                positions[block as usize] = ((row + back - ago as usize) * per + lane) as i32;
            }
        }
        Ok(())
    }
}
