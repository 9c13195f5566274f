//! A mask checked once and cut into work, for as many layers as see it.

use mstar_kernels::flex::{Geometry, ScoreMod, is_for, schedule, stage, workspace_bytes};
use mstar_kernels::paged::{ScheduleOptions, Target};
use mstar_kernels::plan::{Planned, Workspace};
use mstar_kernels::work::WorkList;
use mstar_kernels::{Error, Result, Stream};

use crate::{BlockMask, KernelOptions, MaskRule};

/// A mask cut into work for layers of one geometry. It owns what it needs: the mask may change or go.
#[derive(Clone, Debug)]
pub struct Plan {
    geometry: Geometry,
    work: WorkList,
    rule: MaskRule,
    q_offset: i64,
    options: KernelOptions,
    /// Whether plans are to be for capture, and whether this one is.
    captured: [bool; 2],
    workers: usize,
    workspace_bytes: usize,
}

impl Plan {
    /// Checks a mask against a geometry and plans it.
    ///
    /// # Errors
    /// A geometry that no kernel takes, query heads that are no multiple of the key heads among them; a mask for other
    /// batches or heads.
    pub fn new(geometry: &Geometry, mask: &BlockMask, options: &KernelOptions) -> Result<Plan> {
        let mut plan = Plan {
            geometry: *geometry,
            work: WorkList::default(),
            rule: MaskRule::Whole,
            q_offset: 0,
            options: *options,
            captured: [false; 2],
            workers: 0,
            workspace_bytes: 0,
        };
        plan.make(geometry, mask, options)?;
        Ok(plan)
    }

    /// Makes this the plan of another mask, in the memory it has. Does nothing when its blocks are the same ones: then
    /// only the rule is taken over.
    ///
    /// # Errors
    /// As [`Plan::new`]; the plan is then as it was.
    pub fn replan(
        &mut self,
        geometry: &Geometry,
        mask: &BlockMask,
        options: &KernelOptions,
    ) -> Result<Planned> {
        let [captured, is_captured] = self.captured;
        if *options == self.options && captured == is_captured && is_for(&self.work, geometry, &mask.blocks())
        {
            (self.rule, self.q_offset) = (mask.rule().clone(), mask.q_offset());
            return Ok(Planned::Unchanged);
        }
        self.make(geometry, mask, options)?;
        Ok(Planned::Changed)
    }

    fn make(&mut self, geometry: &Geometry, mask: &BlockMask, options: &KernelOptions) -> Result<()> {
        let workers = options.threads();
        let target = Target::of(options.device);
        let pad_to = self.captured[0].then_some(mask.blocks().q_len);
        let how = ScheduleOptions { workers, cascade: false, pad_to, target, ..ScheduleOptions::default() };
        schedule(geometry, &mask.blocks(), &how, &mut self.work)?;
        self.geometry = *geometry;
        (self.rule, self.q_offset) = (mask.rule().clone(), mask.q_offset());
        (self.options, self.workers) = (*options, workers);
        self.captured[1] = self.captured[0];
        self.workspace_bytes = workspace_bytes(&self.work, workers);
        Ok(())
    }

    /// Says whether runs are to be captured on a device, and to go over the masks of plans to come: launches are then as large as the
    /// device holds, whatever a mask shows. Holds from the next [`Plan::replan`] on; changes no bit.
    pub fn capture(&mut self, captured: bool) {
        self.captured[0] = captured;
    }

    /// What a captured run of the plan takes for granted, as a number: kernels, grids, where the list lies on the device, and what
    /// mods count queries from. `None` for a plan that is not staged on a device.
    pub fn capture_key(&self) -> Option<u64> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (self.work.capture_key()?, self.q_offset, self.geometry).hash(&mut hasher);
        Some(hasher.finish())
    }

    /// Has the plan ready on the stream's device, for calls with these score mods: in stream order. Belongs to planning; never waits
    /// for the device, but for kernels that have to be compiled. On the CPU there is nothing to do.
    ///
    /// # Errors
    /// A plan that was made for another device; mods that a call would refuse, or that have no CUDA half; a kernel that cannot be
    /// built; memory that cannot be had.
    pub fn stage(&mut self, stream: &Stream, score_mods: &[ScoreMod<'_>]) -> Result<()> {
        if stream.device() != self.options.device {
            let why = "the stream is of another device than the plan's options".into();
            let got = format!("{}, planned for {}", stream.device(), self.options.device);
            return Err(Error::Parameter { name: "stream", why, got });
        }
        stage(stream, &mut self.work, score_mods, &self.rule.mask_mods())
    }

    /// Room for masks of so many blocks of queries and listed blocks, so that planning them allocates little or nothing.
    pub fn reserve(&mut self, q_blocks: usize, blocks: usize) {
        self.work.reserve(q_blocks, blocks);
    }

    /// The shapes planned for.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The work.
    pub fn work(&self) -> &WorkList {
        &self.work
    }

    /// What decides about the keys of partial blocks.
    pub fn rule(&self) -> &MaskRule {
        &self.rule
    }

    /// What is added to a query's index to compare it with those of keys.
    pub fn q_offset(&self) -> i64 {
        self.q_offset
    }

    /// Threads that a run uses at most.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Scratch that a run needs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Host bytes of the plan itself.
    pub fn plan_bytes(&self) -> usize {
        self.work.capacity_bytes()
    }

    /// A workspace of the size that a run needs, where the plan runs.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn workspace(&self) -> Result<Workspace> {
        Workspace::on(self.options.device, self.workspace_bytes)
    }
}
