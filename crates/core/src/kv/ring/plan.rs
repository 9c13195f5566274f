//! Packing a step's passes: one row a world, one frame a row, and the blocks that each row sees.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use mstar_kernels::mutant::planted;

use super::{RingConfig, RingGroups};
use crate::resource::PaddedShape;
use crate::{Label, PlanId, RequestId, Slot, StepSerial};

/// One pass in a plan, in packed order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingRow {
    /// Whose world; a padded row has a dummy id.
    pub request: RequestId,
    /// The world; `None` for a padded row, which writes nothing and sees nothing.
    pub world: Option<usize>,
    /// The frame's number in its world.
    pub frame_pos: u64,
    /// Whether the frame is kept at the step's commit.
    pub commit: bool,
}

/// What the rows of a plan see in the layers of one group. Blocks are numbered over all worlds of a layer, 128 tokens
/// each: block `b` is tokens `128 * b..128 * (b + 1)` of [`RingLayer`](super::RingLayer)'s `k` and `v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RingBlocks {
    /// `[R + 1]`: where each row's blocks start.
    pub indptr: Vec<i32>,
    /// The visible blocks, row after row, ascending within a row. Every one is visible whole, to all of the row's queries.
    pub blocks: Vec<i32>,
}

/// The packed passes of one plan label: `R` rows of `F` query tokens each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingPlan {
    /// Which plan this is.
    pub id: PlanId,
    /// `[R]`.
    pub rows: Vec<RingRow>,
    /// Rows that are real; the others pad the plan to its bucket.
    pub real_rows: usize,
    /// `[R + 1]`: where each row's tokens start.
    pub qo_indptr: Vec<i32>,
    /// What the rows see, one for each of [`RingGroups::geometries`].
    pub groups: Vec<RingBlocks>,
}

/// One admitted pass.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    pub(super) request: RequestId,
    pub(super) label: Label,
    pub(super) world: usize,
    pub(super) frame_pos: u64,
    pub(super) commit: bool,
}

impl Pass {
    /// Whether the step's commit keeps the frame. A warm-up's dummy keeps nothing.
    pub(super) fn keeps(&self) -> bool {
        (self.commit || planted("ring-uncommitted-kept")) && !self.request.is_dummy()
    }
}

impl RingPlan {
    /// The blocks that row `row` sees in the layers of group `group`, ascending; none for a padded row.
    ///
    /// # Panics
    /// When the plan has no such row or group.
    #[track_caller]
    pub fn visible(&self, group: usize, row: usize) -> &[i32] {
        let RingBlocks { indptr, blocks } = &self.groups[group];
        &blocks[indptr[row] as usize..indptr[row + 1] as usize]
    }

    /// `[R + 1]`: where each row's blocks start in [`RingPlan::blocks`].
    ///
    /// # Panics
    /// When there is no such group.
    #[track_caller]
    pub fn indptr(&self, group: usize) -> &[i32] {
        &self.groups[group].indptr
    }

    /// The visible blocks of all rows in the layers of group `group`.
    ///
    /// # Panics
    /// When there is no such group.
    #[track_caller]
    pub fn blocks(&self, group: usize) -> &[i32] {
        &self.groups[group].blocks
    }

    fn empty(id: PlanId) -> RingPlan {
        RingPlan { id, rows: Vec::new(), real_rows: 0, qo_indptr: Vec::new(), groups: Vec::new() }
    }

    /// Fills the plan, from nothing, keeping only its memory. `most` rows have room from then on.
    fn pack<'a>(
        &mut self,
        id: PlanId,
        passes: impl Iterator<Item = &'a Pass>,
        (config, groups): (&RingConfig, &RingGroups),
        bucket: Option<PaddedShape>,
        most: usize,
    ) -> Result<(), String> {
        self.id = id;
        self.rows.clear();
        for Pass { request, world, frame_pos, commit, .. } in passes {
            let (request, world) = (request.clone(), Some(*world));
            self.rows.push(RingRow { request, world, frame_pos: *frame_pos, commit: *commit });
        }
        self.real_rows = self.rows.len();
        if let Some(shape) = bucket {
            self.pad(shape, config.tokens_per_frame)?;
        }
        let rows = self.rows.len().max(most);
        self.rows.reserve(rows - self.rows.len());
        self.qo_indptr.clear();
        self.qo_indptr.reserve(rows + 1);
        for row in 0..=self.rows.len() {
            self.qo_indptr.push(indptr(row * config.tokens_per_frame)?);
        }
        let bpf = config.blocks_per_frame();
        self.groups.resize_with(groups.geometries.len(), RingBlocks::default);
        for (geometry, list) in groups.geometries.iter().zip(&mut self.groups) {
            list.indptr.clear();
            list.blocks.clear();
            list.indptr.reserve(rows + 1);
            list.blocks.reserve(rows * geometry.most_visible() * bpf);
            list.indptr.push(0);
            for row in &self.rows {
                if let Some(world) = row.world {
                    let world = if planted("ring-world-of-another") {
                        (world + 1) % config.num_worlds
                    } else {
                        world
                    };
                    let first = world * geometry.frames() * bpf;
                    geometry.visible(row.frame_pos).push_blocks(first, bpf, &mut list.blocks);
                }
                list.indptr.push(indptr(list.blocks.len())?);
            }
        }
        Ok(())
    }

    /// Adds rows without a world until the plan has the bucket's shape.
    fn pad(&mut self, shape: PaddedShape, tokens_per_frame: usize) -> Result<(), String> {
        let PaddedShape { rows, tokens } = shape;
        let real = self.rows.len();
        if real > rows || rows.checked_mul(tokens_per_frame) != Some(tokens) {
            return Err(format!(
                "{real} frames of {tokens_per_frame} tokens do not fit a bucket of {rows} rows and {tokens} tokens: \
                 each of its rows is one frame"
            ));
        }
        let padded = (real..rows).map(RequestId::dummy);
        let world = planted("ring-padded-row-writes").then_some(0);
        self.rows.extend(padded.map(|request| RingRow { request, world, frame_pos: 0, commit: false }));
        Ok(())
    }
}

fn indptr(n: usize) -> Result<i32, String> {
    i32::try_from(n).map_err(|_| format!("{n} entries do not fit the 32-bit arrays of a plan"))
}

/// The plan of every (slot, label), made in the memory of the one before it: its arrays keep their addresses as long as
/// nobody holds the plan across the planning and they have room.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    plans: HashMap<(Slot, Label), Arc<RingPlan>>,
    served: HashMap<(Slot, Label), StepSerial>,
    /// Rows that every plan has room for.
    pub(super) most_rows: usize,
}

impl Shelf {
    /// Packs passes into the plan `id`; on an error no plan is served under its slot and label.
    pub(super) fn pack<'a>(
        &mut self,
        id: PlanId,
        passes: impl Iterator<Item = &'a Pass>,
        layout: (&RingConfig, &RingGroups),
        bucket: Option<PaddedShape>,
    ) -> Result<(), String> {
        let key = (id.slot, id.label.clone());
        self.served.remove(&key);
        let plan = self.plans.entry(key.clone()).or_insert_with(|| Arc::new(RingPlan::empty(id.clone())));
        if Arc::get_mut(plan).is_none() {
            *plan = Arc::new(RingPlan::empty(id.clone())); // who holds the old one keeps what it saw
        }
        let serial = id.serial;
        let unshared = Arc::get_mut(plan).expect("nobody else holds it");
        unshared.pack(id, passes, layout, bucket, self.most_rows)?;
        self.served.insert(key, serial);
        Ok(())
    }

    /// The plan of this very id.
    pub(super) fn get(&self, id: &PlanId) -> Option<&Arc<RingPlan>> {
        let plan = self.plans.iter().find(|((slot, label), _)| *slot == id.slot && *label == id.label)?.1;
        let served = self.served.iter().find(|((slot, label), _)| *slot == id.slot && *label == id.label);
        (served.is_some_and(|(_, serial)| *serial == id.serial)).then_some(plan)
    }

    /// Forgets that a step was planned; the memory stays.
    pub(super) fn forget(&mut self, serial: StepSerial) {
        self.served.retain(|_, served| *served != serial);
    }
}
