//! Plans: a batch checked once and cut into work.

use mstar_kernels::paged::{ScheduleOptions, schedule, workspace_bytes};
use mstar_kernels::work::{DIRECT, WorkList};

use crate::{Error, Geometry, PageTable, Result, Variant};

/// How far the schedule may go for speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// A row's bits depend on the row alone.
    #[default]
    Invariant,
    /// A row's bits may depend on the batch, where that is faster. No CPU kernel gains by it, so that on the CPU
    /// this is the same schedule.
    Throughput,
}

/// The largest batch that a plan will hold, for captured graphs and their CPU twin: buffers then never move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Capacity {
    /// Rows.
    pub rows: usize,
    /// Query tokens. Batches with fewer are padded to it: `q` and the outputs always have this many, and the padded
    /// ones yield 0 and `-inf`.
    pub tokens: usize,
    /// Page-table entries.
    pub pages: usize,
}

/// Choices of a plan that change no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// How far the schedule may go for speed.
    pub schedule: Schedule,
    /// Threads that a run may use; 0 stands for the rayon pool that plans.
    pub workers: usize,
    /// Whether keys that rows share are read once for all of them.
    pub cascade: bool,
    /// A fixed shape to pad to; `None` plans each batch as it is.
    pub capacity: Option<Capacity>,
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        PlanOptions { schedule: Schedule::Invariant, workers: 0, cascade: true, capacity: None }
    }
}

/// Everything that a plan is made of. A plan whose key has not changed need not be made again.
#[derive(Clone, Copy, Debug)]
pub struct PlanCacheKey<'a> {
    /// The layer's shapes.
    pub geometry: &'a Geometry,
    /// The layer's arithmetic.
    pub variant: &'a Variant,
    /// The batch.
    pub table: &'a PageTable<'a>,
    /// The plan's choices.
    pub options: &'a PlanOptions,
}

/// What [`Plan::replan`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planned {
    /// Nothing: the plan was already that of these inputs.
    Unchanged,
    /// Made the plan of these inputs.
    Changed,
}

/// A checked batch, cut into work for one device. It owns what it needs: the table may go.
#[derive(Clone, Debug)]
pub struct Plan {
    work: WorkList,
    options: PlanOptions,
    workers: usize,
    workspace_bytes: usize,
    rows: usize,
    last_tokens: Vec<i64>,
}

impl Plan {
    /// Checks and plans a batch.
    ///
    /// # Errors
    /// What [`Geometry::check`], [`Variant::check`] and [`PageTable::check`] refuse, naming the array, the row and
    /// the value; a batch larger than the capacity.
    pub fn new(
        geometry: &Geometry,
        variant: &Variant,
        table: &PageTable<'_>,
        options: &PlanOptions,
    ) -> Result<Plan> {
        let mut plan = Plan {
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
                return Err(mstar_kernels::Error::Parameter { name: "capacity", why, got }.into());
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
        geometry: &Geometry,
        variant: &Variant,
        table: &PageTable<'_>,
        options: &PlanOptions,
    ) -> Result<Planned> {
        if self.is_current(&PlanCacheKey { geometry, variant, table, options }) {
            return Ok(Planned::Unchanged);
        }
        self.make(geometry, variant, table, options)?;
        Ok(Planned::Changed)
    }

    /// Whether this is the plan of these inputs. Compared in full, never by a hash; a table with a custom mask
    /// counts as changed.
    pub fn is_current(&self, key: &PlanCacheKey<'_>) -> bool {
        key.options == &self.options && self.work.is_for(key.geometry, key.variant, key.table)
    }

    fn make(
        &mut self,
        geometry: &Geometry,
        variant: &Variant,
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
        let pad_to = options.capacity.map(|capacity| capacity.tokens);
        let how = ScheduleOptions { workers, cascade: options.cascade, pad_to };
        schedule(geometry, variant, table, &how, &mut self.work)?;
        self.options = *options;
        self.workers = workers;
        self.workspace_bytes = workspace_bytes(&self.work, workers);
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

    /// The shapes planned for.
    pub fn geometry(&self) -> &Geometry {
        self.work.geometry()
    }

    /// The arithmetic planned for. There is no way to give a run another.
    pub fn variant(&self) -> &Variant {
        self.work.variant()
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
