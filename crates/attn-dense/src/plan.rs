//! A batch over `[prefix | fresh]`, checked once and cut into work.

use mstar_kernels::Stream;
use mstar_kernels::dense::{is_for, schedule, workspace_bytes};
use mstar_kernels::paged::{ScheduleOptions, Target};
use mstar_kernels::work::WorkList;

use crate::{Error, Geometry, PlanOptions, Planned, Prefix, Result, Table, Variant};

/// One row of a plan: where its queries and its keys lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DenseSegment {
    /// Packed index of its first query.
    pub q_start: usize,
    /// Its queries.
    pub q_len: usize,
    /// Keys of its frozen prefix; the row's first.
    pub prefix_len: usize,
    /// Packed index of its first fresh key.
    pub fresh_start: usize,
    /// Its fresh keys; the row's last.
    pub fresh_len: usize,
}

impl DenseSegment {
    /// Keys that the row attends, `prefix_len + fresh_len`.
    pub fn kv_len(&self) -> usize {
        self.prefix_len + self.fresh_len
    }
}

/// A checked batch, cut into work for one device. It owns what it needs: the table may go.
#[derive(Clone, Debug)]
pub struct DensePlan {
    geometry: Geometry,
    variant: Variant,
    options: PlanOptions,
    work: WorkList,
    workers: usize,
    workspace_bytes: usize,
    segments: Vec<DenseSegment>,
    cu_q: Vec<i32>,
    cu_k: Vec<i32>,
    max_q: usize,
    max_k: usize,
    last_tokens: Vec<i64>,
}

impl DensePlan {
    /// Checks and plans a batch. Of `options`, `cascade` has no meaning here, and a capacity's `pages` is read only for
    /// prefixes in pages.
    ///
    /// # Errors
    /// A geometry, variant or table that is refused, with the parameter, or the array, the row and the value; a batch
    /// larger than the capacity.
    pub fn new(
        geometry: &Geometry,
        variant: &Variant,
        table: &Table<'_>,
        options: &PlanOptions,
    ) -> Result<DensePlan> {
        let mut plan = DensePlan {
            geometry: *geometry,
            variant: *variant,
            options: *options,
            work: WorkList::default(),
            workers: 0,
            workspace_bytes: 0,
            segments: Vec::new(),
            cu_q: Vec::new(),
            cu_k: Vec::new(),
            max_q: 0,
            max_k: 0,
            last_tokens: Vec::new(),
        };
        if let Some(capacity) = &options.capacity {
            let largest = capacity.rows.max(capacity.tokens).max(capacity.pages);
            if largest >= i32::MAX as usize {
                let why = "index arrays are 32-bit: each of rows, tokens and pages stays below 2147483647";
                let got = largest.to_string();
                return Err(Error::Parameter { name: "capacity", why: why.into(), got });
            }
            plan.work.reserve(capacity.rows + 1, capacity.pages);
            plan.segments.reserve(capacity.rows);
            plan.cu_q.reserve(capacity.rows + 1);
            plan.cu_k.reserve(capacity.rows + 1);
            plan.last_tokens.reserve(capacity.rows);
        }
        plan.make(geometry, variant, table, options)?;
        Ok(plan)
    }

    /// Makes this the plan of another batch, in the memory it has; does nothing when nothing changed.
    ///
    /// # Errors
    /// As [`DensePlan::new`]; the plan is then as it was.
    pub fn replan(
        &mut self,
        geometry: &Geometry,
        variant: &Variant,
        table: &Table<'_>,
        options: &PlanOptions,
    ) -> Result<Planned> {
        if self.is_current(geometry, variant, table, options) {
            return Ok(Planned::Unchanged);
        }
        self.make(geometry, variant, table, options)?;
        Ok(Planned::Changed)
    }

    /// Whether this is the plan of these inputs, compared in full.
    pub fn is_current(
        &self,
        geometry: &Geometry,
        variant: &Variant,
        table: &Table<'_>,
        options: &PlanOptions,
    ) -> bool {
        options == &self.options && is_for(&self.work, geometry, variant, table)
    }

    fn make(
        &mut self,
        geometry: &Geometry,
        variant: &Variant,
        table: &Table<'_>,
        options: &PlanOptions,
    ) -> Result<()> {
        if let Some(capacity) = &options.capacity {
            let pages = match table.prefix {
                Prefix::Pages { kv_indptr, .. } => kv_indptr.last().map_or(0, |&end| end.max(0) as usize),
                _ => 0,
            };
            for (what, capacity, got) in [
                ("rows", capacity.rows, table.num_rows()),
                ("tokens", capacity.tokens, table.num_tokens()),
                ("pages", capacity.pages, pages),
            ] {
                if got > capacity {
                    return Err(Error::Capacity { what, capacity, got });
                }
            }
        }
        let workers = if options.workers == 0 { rayon::current_num_threads() } else { options.workers };
        let pad_to = options.capacity.map(|capacity| capacity.tokens);
        let target = Target::of(options.device);
        let kernels = options.kernels.on(options.device);
        let how = ScheduleOptions {
            workers,
            cascade: false,
            pad_to,
            target,
            kernels,
            ..ScheduleOptions::default()
        };
        schedule(geometry, variant, table, &how, &mut self.work)?;
        (self.geometry, self.variant, self.options) = (*geometry, *variant, *options);
        self.workers = workers;
        self.workspace_bytes = workspace_bytes(&self.work, workers);
        self.describe(table);
        Ok(())
    }

    /// Has the plan ready on the stream's device, in stream order. Belongs to planning; never waits for the device, but for
    /// kernels that have to be compiled. On the CPU there is nothing to do.
    ///
    /// # Errors
    /// A plan that was made for another device; a kernel that cannot be built; memory that cannot be had.
    pub fn stage(&mut self, stream: &Stream) -> Result<()> {
        if stream.device() != self.options.device {
            let why = "the stream is of another device than the plan's options".into();
            let got = format!("{}, planned for {}", stream.device(), self.options.device);
            return Err(Error::Parameter { name: "stream", why, got });
        }
        self.work.stage(stream)
    }

    /// What a captured run of the plan takes for granted, as a number: kernels, grids and where the list lies on the device, prefixes
    /// and fresh keys left to whoever hands them in. `None` for a plan that is not staged on a device.
    pub fn capture_key(&self) -> Option<u64> {
        self.work.capture_key()
    }

    /// Fills what others read of a plan; the table has been checked.
    fn describe(&mut self, table: &Table<'_>) {
        self.segments.clear();
        self.last_tokens.clear();
        self.cu_q.clear();
        self.cu_q.extend_from_slice(table.cu_q);
        self.cu_k.clear();
        self.cu_k.push(0);
        (self.max_q, self.max_k) = (0, 0);
        for (row, planned) in self.work.rows().iter().take(table.num_rows()).enumerate() {
            let fresh_len = (table.cu_k[row + 1] - table.cu_k[row]) as usize;
            let segment = DenseSegment {
                q_start: planned.q_begin as usize,
                q_len: planned.q_len as usize,
                prefix_len: planned.kv_len as usize - fresh_len,
                fresh_start: table.cu_k[row] as usize,
                fresh_len,
            };
            self.max_q = self.max_q.max(segment.q_len);
            self.max_k = self.max_k.max(segment.kv_len());
            self.cu_k.push(self.cu_k[row].saturating_add_unsigned(planned.kv_len));
            let end = (segment.q_start + segment.q_len) as i64;
            self.last_tokens.push(if segment.q_len == 0 { -1 } else { end - 1 });
            self.segments.push(segment);
        }
    }

    /// The shapes planned for.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The arithmetic planned for. There is no way to give a run another.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// The choices made.
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// `R` rows, in packed order, without the padding's.
    pub fn segments(&self) -> &[DenseSegment] {
        &self.segments
    }

    /// `[R + 1]`: where each row's queries start.
    pub fn cu_q(&self) -> &[i32] {
        &self.cu_q
    }

    /// `[R + 1]`: where each row's keys would start if every row's prefix and fresh keys lay packed.
    pub fn cu_k(&self) -> &[i32] {
        &self.cu_k
    }

    /// The most queries of a row.
    pub fn max_q(&self) -> usize {
        self.max_q
    }

    /// The most keys of a row.
    pub fn max_k(&self) -> usize {
        self.max_k
    }

    /// `T`: query tokens that a run takes, padding included.
    pub fn num_tokens(&self) -> usize {
        self.work.num_tokens()
    }

    /// Bytes that a run's workspace must have.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Host bytes of the plan itself.
    pub fn plan_bytes(&self) -> usize {
        self.work.capacity_bytes()
            + self.segments.capacity() * size_of::<DenseSegment>()
            + (self.cu_q.capacity() + self.cu_k.capacity()) * size_of::<i32>()
            + self.last_tokens.capacity() * size_of::<i64>()
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capacity, DType};

    const GEOMETRY: Geometry = Geometry {
        num_qo_heads: 4,
        num_kv_heads: 2,
        head_dim_qk: 16,
        head_dim_vo: 8,
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
    };

    #[test]
    fn a_plan_says_its_rows_in_packed_order() {
        let table = Table {
            cu_q: &[0, 3, 3, 8],
            prefix: Prefix::Packed { cu_p: &[0, 4, 6, 6] },
            cu_k: &[0, 3, 3, 9],
        };
        let plan = DensePlan::new(&GEOMETRY, &Variant::full(16), &table, &PlanOptions::default()).unwrap();
        assert_eq!((plan.cu_q(), plan.cu_k()), (&[0, 3, 3, 8][..], &[0, 7, 9, 15][..]));
        assert_eq!((plan.max_q(), plan.max_k(), plan.num_tokens()), (5, 7, 8));
        assert_eq!(plan.last_tokens(), [2, -1, 7]);
        let last = DenseSegment { q_start: 3, q_len: 5, prefix_len: 0, fresh_start: 3, fresh_len: 6 };
        assert_eq!((plan.segments()[2], plan.segments()[1].kv_len()), (last, 2));
    }

    #[test]
    fn replanning_does_nothing_for_the_same_batch_and_keeps_the_plan_when_it_refuses() {
        let options = PlanOptions::default();
        let variant = Variant::full(16);
        let first = Table { cu_q: &[0, 3], prefix: Prefix::Packed { cu_p: &[0, 4] }, cu_k: &[0, 3] };
        let mut plan = DensePlan::new(&GEOMETRY, &variant, &first, &options).unwrap();
        assert_eq!(plan.replan(&GEOMETRY, &variant, &first, &options).unwrap(), Planned::Unchanged);
        let longer = Table { prefix: Prefix::Packed { cu_p: &[0, 5] }, ..first };
        assert_eq!(plan.replan(&GEOMETRY, &variant, &longer, &options).unwrap(), Planned::Changed);
        assert_eq!(plan.max_k(), 8);
        let wrong = Table { cu_k: &[0, -1], ..first };
        assert!(plan.replan(&GEOMETRY, &variant, &wrong, &options).unwrap_err().to_string().contains("cu_k"));
        assert!(plan.is_current(&GEOMETRY, &variant, &longer, &options));
    }

    #[test]
    fn a_batch_larger_than_the_capacity_is_refused_with_both_sizes() {
        let capacity = Capacity { rows: 1, tokens: 4, pages: 0 };
        let options = PlanOptions { capacity: Some(capacity), ..PlanOptions::default() };
        let variant = Variant::full(16);
        let table = Table { cu_q: &[0, 3], cu_k: &[0, 3], ..Table::default() };
        let mut plan = DensePlan::new(&GEOMETRY, &variant, &table, &options).unwrap();
        assert_eq!((plan.num_tokens(), plan.segments().len()), (4, 1));
        for (cu_q, cu_k, what) in [(&[0, 5][..], &[0, 5][..], "tokens"), (&[0, 1, 2], &[0, 1, 2], "rows")] {
            let table = Table { cu_q, cu_k, ..Table::default() };
            let said = plan.replan(&GEOMETRY, &variant, &table, &options).unwrap_err();
            assert!(matches!(said, Error::Capacity { what: of, .. } if of == what), "{said}");
        }
        let long = Capacity { rows: usize::MAX, ..capacity };
        let options = PlanOptions { capacity: Some(long), ..options };
        assert!(DensePlan::new(&GEOMETRY, &variant, &table, &options).is_err());
    }
}
