//! A checked batch with its work list, and the kind of pages that it is for.

use std::fmt::Debug;

use crate::paged::{PROCESSORS, PageTable, ScheduleOptions, Target};
use crate::work::{DIRECT, WorkList};
use crate::{Error, Result, Stream};

use super::{PlanOptions, Planned, Schedule, Workspace};

/// What a slot of the pages holds, and so what a layer's shapes and arithmetic are and how its batches are cut.
pub trait Kernel: Copy + Debug {
    /// The layer's shapes and element types.
    type Geometry: Copy + PartialEq + Debug;
    /// The layer's arithmetic.
    type Variant: Copy + PartialEq + Debug;

    /// Checks a batch and writes its work into `list`, whose memory is used again.
    ///
    /// # Errors
    /// A geometry, variant or table that is refused; `list` is then as it was.
    fn schedule(
        geometry: &Self::Geometry,
        variant: &Self::Variant,
        table: &PageTable<'_>,
        options: &ScheduleOptions,
        list: &mut WorkList,
    ) -> Result<()>;

    /// Whether `list` is that of this batch, compared in full. A custom mask counts as another batch, and so does a table
    /// that would be refused.
    fn is_for(
        list: &WorkList,
        geometry: &Self::Geometry,
        variant: &Self::Variant,
        table: &PageTable<'_>,
    ) -> bool;

    /// Makes `list`, which was cut with `options`, that of a batch, if only rows that grew within their last leaves and page ids
    /// tell the two apart; whether it is the batch's now, and whether it was before.
    fn renew(
        list: &mut WorkList,
        geometry: &Self::Geometry,
        variant: &Self::Variant,
        table: &PageTable<'_>,
        options: &ScheduleOptions,
    ) -> Option<Planned>;

    /// Bytes of scratch that attending a list needs with up to `workers` threads.
    fn workspace_bytes(list: &WorkList, workers: usize) -> usize;
}

/// Everything that a plan is made of. A plan whose key has not changed need not be made again.
#[derive(Clone, Copy, Debug)]
pub struct PlanCacheKey<'a, K: Kernel> {
    /// The layer's shapes.
    pub geometry: &'a K::Geometry,
    /// The layer's arithmetic.
    pub variant: &'a K::Variant,
    /// The batch.
    pub table: &'a PageTable<'a>,
    /// The plan's choices.
    pub options: &'a PlanOptions,
}

/// A checked batch, cut into work for one device. It owns what it needs: the table may go.
#[derive(Clone, Debug)]
pub struct Plan<K: Kernel> {
    geometry: K::Geometry,
    variant: K::Variant,
    work: WorkList,
    options: PlanOptions,
    workers: usize,
    workspace_bytes: usize,
    rows: usize,
    last_tokens: Vec<i64>,
}

impl<K: Kernel> Plan<K> {
    /// Checks and plans a batch.
    ///
    /// # Errors
    /// A geometry, variant or table that is refused, with the parameter, or the array, the row and the value; a batch
    /// larger than the capacity.
    pub fn new(
        geometry: &K::Geometry,
        variant: &K::Variant,
        table: &PageTable<'_>,
        options: &PlanOptions,
    ) -> Result<Plan<K>> {
        let mut plan = Plan {
            geometry: *geometry,
            variant: *variant,
            work: WorkList::default(),
            options: *options,
            workers: 0,
            workspace_bytes: 0,
            rows: 0,
            last_tokens: Vec::new(),
        };
        if let Some(capacity) = &options.capacity {
            let largest = capacity.rows.max(capacity.tokens).max(capacity.pages);
            if largest >= i32::MAX as usize {
                let why =
                    "index arrays are 32-bit: each of rows, tokens and pages stays below 2147483647".into();
                let got = largest.to_string();
                return Err(Error::Parameter { name: "capacity", why, got });
            }
            plan.work.reserve(capacity.rows + 1, capacity.pages);
            plan.last_tokens.reserve(capacity.rows);
        }
        plan.make(geometry, variant, table, options)?;
        Ok(plan)
    }

    /// Makes this the plan of another batch, in the memory it has; does nothing when nothing changed. Allocates
    /// only what the new batch needs beyond any before it.
    ///
    /// # Errors
    /// As [`Plan::new`]; the plan is then as it was.
    pub fn replan(
        &mut self,
        geometry: &K::Geometry,
        variant: &K::Variant,
        table: &PageTable<'_>,
        options: &PlanOptions,
    ) -> Result<Planned> {
        let entries = table.kv_indptr.last().map_or(0, |&end| end.max(0) as usize);
        let fits = options.capacity.is_none_or(|capacity| entries <= capacity.pages);
        if options == &self.options && fits {
            let how = self.how(self.workers, options);
            if let Some(planned) = K::renew(&mut self.work, geometry, variant, table, &how) {
                return Ok(planned);
            }
        }
        self.make(geometry, variant, table, options)?;
        Ok(Planned::Changed)
    }

    /// Whether this is the plan of these inputs. Compared in full, never by a hash; a table with a custom mask
    /// counts as changed.
    pub fn is_current(&self, key: &PlanCacheKey<'_, K>) -> bool {
        key.options == &self.options && K::is_for(&self.work, key.geometry, key.variant, key.table)
    }

    fn make(
        &mut self,
        geometry: &K::Geometry,
        variant: &K::Variant,
        table: &PageTable<'_>,
        options: &PlanOptions,
    ) -> Result<()> {
        let (rows, tokens) = (table.num_rows(), table.num_tokens());
        if let Some(capacity) = &options.capacity {
            let pages = table.kv_indptr.last().map_or(0, |&end| end.max(0) as usize);
            let checks = [
                ("rows", capacity.rows, rows),
                ("tokens", capacity.tokens, tokens),
                ("pages", capacity.pages, pages),
            ];
            for (what, capacity, got) in checks {
                if got > capacity {
                    return Err(Error::Capacity { what, capacity, got });
                }
            }
        }
        let workers = if options.workers == 0 { rayon::current_num_threads() } else { options.workers };
        let how = self.how(workers, options);
        K::schedule(geometry, variant, table, &how, &mut self.work)?;
        (self.geometry, self.variant) = (*geometry, *variant);
        self.options = *options;
        self.workers = workers;
        self.workspace_bytes = K::workspace_bytes(&self.work, workers);
        self.rows = rows;
        self.last_tokens.clear();
        self.last_tokens.extend(
            table.qo_indptr.windows(2).map(
                |pair| {
                    if pair[1] > pair[0] { i64::from(pair[1]) - 1 } else { -1 }
                },
            ),
        );
        Ok(())
    }

    fn how(&self, workers: usize, options: &PlanOptions) -> ScheduleOptions {
        let pad_to = options.capacity.map(|capacity| capacity.tokens);
        let (target, kernels) = (Target::of(options.device), options.kernels.on(options.device));
        let schedule = options.schedule;
        let processors = match schedule {
            Schedule::Throughput => crate::device::processors(options.device),
            Schedule::Invariant => PROCESSORS,
        };
        ScheduleOptions { workers, cascade: options.cascade, pad_to, target, kernels, schedule, processors }
    }

    /// Has the plan ready on the stream's device: kernels built, the work on its way, in stream order. Belongs to planning; never
    /// waits for the device, but for kernels that have to be compiled. On the CPU, and for a plan that is staged as it is, there
    /// is nothing to do.
    ///
    /// # Errors
    /// A plan that was made for another device; a kernel that cannot be built; memory that cannot be had.
    pub fn stage(&mut self, stream: &Stream) -> Result<()> {
        if stream.device() != self.options.device {
            let why = "the stream is of another device than the plan's options";
            let got = format!("{}, planned for {}", stream.device(), self.options.device);
            return Err(Error::Parameter { name: "stream", why: why.into(), got });
        }
        self.work.stage(stream)
    }

    /// What a captured run of the plan takes for granted, as a number: kernels, grids and where the list lies on the device. A
    /// graph that was captured under another number is captured anew. `None` for a plan that is not staged on a device.
    pub fn capture_key(&self) -> Option<u64> {
        self.work.capture_key()
    }

    /// The shapes planned for.
    pub fn geometry(&self) -> &K::Geometry {
        &self.geometry
    }

    /// The arithmetic planned for. There is no way to give a run another.
    pub fn variant(&self) -> &K::Variant {
        &self.variant
    }

    /// The choices made.
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// `R`: rows of the batch, without the padding's.
    pub fn num_rows(&self) -> usize {
        self.rows
    }

    /// `T`: query tokens that a run takes, padding included.
    pub fn num_tokens(&self) -> usize {
        self.work.num_tokens()
    }

    /// Absolute position one past the last key of each of the `R` rows.
    pub fn kv_lens(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.work.rows()[..self.rows].iter().map(|row| row.kv_len as usize)
    }

    /// Bytes that a run's workspace must have.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Host bytes of the plan itself.
    pub fn plan_bytes(&self) -> usize {
        self.work.capacity_bytes() + self.last_tokens.capacity() * size_of::<i64>()
    }

    /// Threads that a run may use.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// The work, as executors see it.
    pub fn work(&self) -> &WorkList {
        &self.work
    }

    /// `[R]`: packed index of each row's last query token; -1 for a row without one.
    pub fn last_tokens(&self) -> &[i64] {
        &self.last_tokens
    }

    /// Items whose keys are read for several rows at once.
    pub fn shared_items(&self) -> usize {
        self.work.items().iter().filter(|item| item.member_count > 1).count()
    }

    /// Items that write a final result without a merge.
    pub fn direct_items(&self) -> usize {
        let members = self.work.members();
        self.work.items().iter().filter(|item| members[item.member_begin as usize].partial == DIRECT).count()
    }
}

impl Workspace {
    /// A workspace just large enough for `plan`.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn for_plan<K: Kernel>(plan: &Plan<K>) -> Result<Workspace> {
        Workspace::with_bytes(plan.workspace_bytes())
    }

    /// Grows to what `plan` needs; a workspace that is large enough stays where it is. Belongs to planning, never
    /// to a run. Returns whether it moved.
    ///
    /// # Errors
    /// When the memory cannot be had; the workspace is then as it was.
    pub fn reserve<K: Kernel>(&mut self, plan: &Plan<K>) -> Result<bool> {
        self.reserve_bytes(plan.workspace_bytes())
    }
}
