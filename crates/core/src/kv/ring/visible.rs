//! Which frames of a world a pass sees.
//!
//! Kept frames fill the slots in order and then go round, so what is visible grows for `ring_buckets * pinned_dilation`
//! frames and repeats itself from then on; at any time it is at most three runs of neighbouring frames. So the tables
//! are closed forms: nothing is stored, however long the period, and staging a pass is counting up.
#![forbid(unsafe_code)]

use std::ops::Range;

use mstar_kernels::mutant::planted;

use super::RingGeometry;

/// Where a pass lies in the life of a ring. Passes of equal phases see the same frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Some slots were never written: the first `kept` are.
    Growing {
        /// Slots written.
        kept: usize,
    },
    /// All slots that frames go round are written; this repeats every `ring_buckets * pinned_dilation` frames.
    Periodic {
        /// The slot that the pass's own frame will take, which it does not see; `None` at a frame that is not kept.
        hidden: Option<usize>,
    },
}

/// The frames of one world that a pass sees, ascending: its committed slots, less the one it will overwrite, and the
/// scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VisibleFrames {
    /// Slots `0..kept` are written.
    kept: usize,
    hidden: Option<usize>,
    /// The scratch frame's index.
    scratch: usize,
}

impl RingGeometry {
    /// The slot that a commit of frame `frame_pos` writes; `None` for a frame that the layer does not keep.
    pub fn slot_of(&self, frame_pos: u64) -> Option<usize> {
        let dilation = self.pinned_dilation as u64;
        let off = usize::from(planted("ring-slot-off-by-one"));
        let kept = frame_pos.is_multiple_of(dilation) || planted("ring-dilation-ignored");
        kept.then(|| ((frame_pos / dilation + off as u64) % self.ring_buckets as u64) as usize)
    }

    /// Where the pass of frame `frame_pos` lies, once all frames before it were committed.
    pub fn phase(&self, frame_pos: u64) -> Phase {
        let kept = frame_pos.div_ceil(self.pinned_dilation as u64);
        match usize::try_from(kept) {
            Ok(kept) if kept < self.ring_buckets => Phase::Growing { kept },
            _ => Phase::Periodic { hidden: self.slot_of(frame_pos) },
        }
    }

    /// What the pass of frame `frame_pos` sees, once all frames before it were committed.
    pub fn visible(&self, frame_pos: u64) -> VisibleFrames {
        let (kept, hidden) = match self.phase(frame_pos) {
            // The slot that it would overwrite is the next one, which nobody wrote.
            Phase::Growing { kept } => (kept, None),
            Phase::Periodic { hidden } => (self.ring_buckets, hidden),
        };
        let hidden = hidden.filter(|_| !planted("ring-own-slot-visible"));
        VisibleFrames { kept, hidden, scratch: self.ring_frames }
    }

    /// The most frames that any pass sees, the scratch among them.
    pub fn most_visible(&self) -> usize {
        // Between kept frames all buckets are seen.
        self.ring_buckets + usize::from(self.pinned_dilation > 1)
    }
}

impl VisibleFrames {
    /// Frames seen.
    pub fn count(&self) -> usize {
        self.runs().iter().map(ExactSizeIterator::len).sum()
    }

    /// The frames as runs of neighbours, ascending; some may be empty. Frame `ring_frames` is the scratch.
    pub fn runs(&self) -> [Range<usize>; 3] {
        let hidden = self.hidden.unwrap_or(self.kept);
        let scratch = if planted("ring-scratch-hidden") { 0..0 } else { self.scratch..self.scratch + 1 };
        [0..hidden, (hidden + 1).min(self.kept)..self.kept, scratch]
    }

    /// The frames, ascending.
    pub fn frames(&self) -> impl Iterator<Item = usize> {
        self.runs().into_iter().flatten()
    }

    /// Appends the numbers of the visible blocks, ascending. `first` is the world's first block in its layer.
    pub fn push_blocks(&self, first: usize, blocks_per_frame: usize, to: &mut Vec<i32>) {
        for run in self.runs() {
            let run = first + run.start * blocks_per_frame..first + run.end * blocks_per_frame;
            // Block numbers fit: `RingConfig::check` holds a layer's count below 2^31.
            to.extend(run.start as i32..run.end as i32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule as the recorded cases state it, frame after frame.
    struct Plain {
        slots: Vec<Option<u64>>,
    }

    impl Plain {
        fn sees(&self, g: &RingGeometry, frame_pos: u64) -> Vec<usize> {
            let own = frame_pos
                .is_multiple_of(g.pinned_dilation as u64)
                .then(|| (frame_pos / g.pinned_dilation as u64) as usize % g.ring_buckets);
            let written = (0..g.ring_frames).filter(|&s| self.slots[s].is_some() && Some(s) != own);
            written.chain([g.ring_frames]).collect()
        }

        fn commit(&mut self, g: &RingGeometry, frame_pos: u64) {
            if frame_pos.is_multiple_of(g.pinned_dilation as u64) {
                let slot = (frame_pos / g.pinned_dilation as u64) as usize % g.ring_buckets;
                self.slots[slot] = Some(frame_pos);
            }
        }
    }

    fn geometries() -> impl Iterator<Item = RingGeometry> {
        (1..6).flat_map(|ring_frames| {
            (1..=ring_frames).flat_map(move |ring_buckets| {
                [1, 2, 3, 4].map(|pinned_dilation| RingGeometry {
                    ring_frames,
                    ring_buckets,
                    pinned_dilation,
                })
            })
        })
    }

    #[test]
    fn every_frame_through_three_wraps_sees_what_the_rule_says() {
        for g in geometries() {
            let mut plain = Plain { slots: vec![None; g.ring_frames] };
            for frame in 0..3 * (g.ring_buckets * g.pinned_dilation) as u64 + 2 {
                let visible = g.visible(frame);
                let frames: Vec<usize> = visible.frames().collect();
                assert_eq!(frames, plain.sees(&g, frame), "{g:?} frame {frame}");
                assert_eq!(visible.count(), frames.len());
                assert!(frames.len() <= g.most_visible(), "{g:?} frame {frame}");
                plain.commit(&g, frame);
            }
        }
    }

    #[test]
    fn what_is_visible_grows_and_then_repeats() {
        for g in geometries() {
            let period = (g.ring_buckets * g.pinned_dilation) as u64;
            for frame in period..4 * period {
                assert_eq!(g.visible(frame), g.visible(frame + period), "{g:?} frame {frame}");
                assert_eq!(g.phase(frame), g.phase(frame + 1000 * period));
            }
            assert_eq!(g.phase(0), Phase::Growing { kept: 0 }, "{g:?}");
            let last = u64::MAX - u64::MAX % period;
            assert_eq!(g.visible(last), g.visible(period), "{g:?}");
        }
    }

    #[test]
    fn blocks_count_over_all_worlds() {
        let g = RingGeometry { ring_frames: 3, ring_buckets: 2, pinned_dilation: 4 };
        let mut blocks = Vec::new();
        g.visible(8).push_blocks(g.frames() * 2, 2, &mut blocks); // world 1, frames of two blocks
        assert_eq!(blocks, [10, 11, 14, 15]);
    }
}
