//! The plans of one attention resource, in typed storage: a plan id leads to a plan of that very step or to an error.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use mstar_kernels::cuda::{Event, OwnedStream};
use mstar_kernels::mutant::planted;
use mstar_kernels::plan::{Capacity, Planned, Workspace};
use mstar_kernels::{DType, Device, Staged, Stream, TensorRef};

use super::{Arrays, RowTable, WorkspacePool};
use crate::attend::{IndexBuf, StepShape, Work};
use crate::graph::captured_page_capacity;
use crate::kv::{KvConfig, PagedKv};
use crate::resource::{PaddedShape, StepContext};
use crate::step::AttentionStep;
use crate::{Error, Label, PlanId, ResourceName, Result, Slot, StepSerial};

/// How a backend turns rows into its own kind of plan. Errors are the wrapper level's; [`Plans`] adds the resource's name.
pub trait Planner: Debug + Send + Sync {
    /// A plan. It owns all it needs, and running it reads nothing else of the host's.
    type Plan: Debug + Send + Sync;

    /// A plan of `rows`. `capacity` is the padded shape and its page ids, in a bucket.
    ///
    /// # Errors
    /// Rows that are refused.
    fn make(
        &self,
        rows: &RowTable<'_>,
        capacity: Option<Capacity>,
    ) -> Result<Self::Plan, mstar_kernels::Error>;

    /// Makes `plan` the plan of `rows`, in the memory that it has, unless it is that already.
    ///
    /// # Errors
    /// Rows that are refused.
    fn remake(
        &self,
        plan: &mut Self::Plan,
        rows: &RowTable<'_>,
        capacity: Option<Capacity>,
    ) -> Result<Planned, mstar_kernels::Error>;

    /// Enqueues what the device reads of a plan that was made or made anew; nothing on the CPU, which reads the plan itself.
    /// Never waits for the device.
    ///
    /// # Errors
    /// A kernel that cannot be built, memory that cannot be had, what the device says.
    fn stage(&self, plan: &mut Self::Plan, stream: &Stream) -> Result<(), mstar_kernels::Error>;

    /// Scratch that running the plan needs.
    fn workspace_bytes(&self, plan: &Self::Plan) -> usize;

    /// What a captured run of the plan takes for granted, as a number; `None` where it cannot be captured.
    fn capture_key(&self, plan: &Self::Plan) -> Option<u64> {
        let _ = plan;
        None
    }

    /// Host bytes of the plan itself.
    fn plan_bytes(&self, plan: &Self::Plan) -> usize;

    /// `[R]`: packed index of each row's last query token; -1 for a row without one.
    fn last_tokens<'a>(&self, plan: &'a Self::Plan) -> &'a [i64];

    /// The least work that one layer over `rows` stands for: each visible key read once a row, each query read and each
    /// output written once, a multiplication and an addition for each element of each visible pair.
    fn work(&self, rows: &RowTable<'_>) -> Work;

    /// What runs the plan, for reports.
    fn kernel(&self, plan: &Self::Plan) -> String;
}

/// Query tokens of the plans by which kernels are prepared: some kernels are built for how many query vectors of a row a block takes,
/// which doubles.
const PREPARED_TOKENS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Where a persistent plan and its workspace live: one for each label in each buffer set. One plan serves prefill and
/// decode, so that the kind of a row is no part of the key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EagerSlotKey {
    /// The plan label.
    pub label: Label,
    /// The buffer set.
    pub slot: Slot,
}

impl From<&PlanId> for EagerSlotKey {
    fn from(id: &PlanId) -> EagerSlotKey {
        EagerSlotKey { label: id.label.clone(), slot: id.slot }
    }
}

/// How often plans were made and how often the one at hand was the right one already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanCounts {
    /// Plans made.
    pub made: u64,
    /// Plans that nothing had changed for.
    pub unchanged: u64,
}

/// A plan, and what others read of it.
#[derive(Debug)]
pub struct StoredPlan<T> {
    plan: T,
    workspace: Arc<Mutex<Workspace>>,
    qo_indptr: IndexBuf,
    kv_len: IndexBuf,
    last_tokens: Staged,
    work: Work,
}

impl<T> StoredPlan<T> {
    /// The plan.
    pub fn plan(&self) -> &T {
        &self.plan
    }

    /// `[R + 1]`: where each row's queries start.
    pub fn qo_indptr(&self) -> &IndexBuf {
        &self.qo_indptr
    }

    /// `[R]`: the rows' planned key lengths.
    pub fn kv_len(&self) -> &IndexBuf {
        &self.kv_len
    }

    /// `[R]` i64, on the device: packed index of each row's last query token; -1 for a row without one.
    ///
    /// # Errors
    /// Never for a value in hand; the view is checked like any other.
    pub fn last_tokens(&self) -> Result<TensorRef<'_>> {
        Ok(self.last_tokens.tensor(DType::I64, &[self.last_tokens.len() / DType::I64.size()])?)
    }

    /// The least work of one layer.
    pub fn work(&self) -> Work {
        self.work
    }

    /// The scratch of a run.
    ///
    /// # Errors
    /// [`Error::Order`] while another layer of the plan runs.
    pub fn workspace(&self) -> Result<MutexGuard<'_, Workspace>> {
        // Never wait here: the layer that holds the workspace may be waiting for this very thread.
        match self.workspace.try_lock() {
            Ok(workspace) => Ok(workspace),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let why = "another layer of this plan label is running; run one after the other".into();
                Err(Error::Order { call: "Attention::run", why })
            }
        }
    }
}

/// A place that plans of one label and slot are made in, one after another.
#[derive(Debug)]
struct Place<T> {
    /// Whose plan it holds now; `None` between steps.
    serial: Option<StepSerial>,
    stored: Arc<StoredPlan<T>>,
    /// Passed when the layers of the last step here have run: what they read may be written again.
    read: Event,
    /// Whether `read` was put behind those layers.
    marked: bool,
    /// Passed when the plan is on the device.
    written: Event,
}

#[derive(Debug)]
struct Places<T> {
    by_key: HashMap<EagerSlotKey, Place<T>>,
    counts: PlanCounts,
    /// The largest shape that a capture has asked room for.
    captured: Option<PaddedShape>,
}

/// The plans of one attention resource, and the scratch that runs them.
#[derive(Debug)]
pub struct Plans<P: Planner> {
    stream: Stream,
    /// Plans go to the device on a queue of their own, so that one made ahead is there before the step that runs has ended.
    beside: OwnedStream,
    name: ResourceName,
    planner: P,
    places: Mutex<Places<P::Plan>>,
    workspaces: WorkspacePool,
    /// Rows that index buffers have room for from the first.
    largest_rows: usize,
}

impl<P: Planner> Plans<P> {
    /// No plan yet, for the resource `name`, whose layers run on `stream`. Each workspace has `foreseen` bytes from the first,
    /// and index buffers have room for the rows of `largest`.
    ///
    /// # Errors
    /// A device that gives no queue to put plans on it.
    pub fn new(
        stream: Stream,
        name: ResourceName,
        planner: P,
        largest: Option<StepShape>,
        foreseen: usize,
    ) -> Result<Plans<P>> {
        let beside =
            OwnedStream::new(stream.device()).map_err(|error| Error::backend(name.as_str(), error))?;
        Ok(Plans {
            stream,
            beside,
            name,
            planner,
            places: Mutex::new(Places {
                by_key: HashMap::new(),
                counts: PlanCounts::default(),
                captured: None,
            }),
            workspaces: WorkspacePool::on(stream.device(), foreseen),
            largest_rows: largest.map_or(0, |largest| largest.rows),
        })
    }

    /// Has all kernels of its plans built and loaded, so that planning compiles nothing: plans of one row for a bucket of one, whose
    /// run may be over rows of any kind, are made, staged and let go. Nothing on the CPU.
    ///
    /// # Errors
    /// A kernel that cannot be built.
    pub fn prepared(self) -> Result<Plans<P>> {
        if self.stream.device() == Device::Cpu {
            return Ok(self);
        }
        for tokens in PREPARED_TOKENS {
            let rows = Arrays::even(&[tokens], 1);
            let capacity = Some(Capacity { rows: 1, tokens, pages: 1 });
            let mut plan = self.said(self.planner.make(&rows.table(false, 1), capacity))?;
            self.said(self.planner.stage(&mut plan, &self.stream))?;
        }
        Ok(self)
    }

    /// The resource's name.
    pub fn name(&self) -> &ResourceName {
        &self.name
    }

    /// The queue that layers run on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What makes the plans.
    pub fn planner(&self) -> &P {
        &self.planner
    }

    /// How often plans were made, and how often the one at hand was the right one already.
    pub fn counts(&self) -> PlanCounts {
        self.lock().counts
    }

    /// Bytes of workspaces and of plans.
    pub fn bytes(&self) -> usize {
        let plans: usize =
            self.lock().by_key.values().map(|place| self.planner.plan_bytes(&place.stored.plan)).sum();
        plans + self.workspaces.bytes()
    }

    /// Bytes of workspaces alone.
    pub fn workspace_bytes(&self) -> usize {
        self.workspaces.bytes()
    }

    fn lock(&self) -> MutexGuard<'_, Places<P::Plan>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the largest shape that will be asked for. Plans in a bucket then keep their memory from the first on.
    pub fn capture(&self, shape: PaddedShape) {
        let mut places = self.lock();
        let had = places.captured.unwrap_or(shape);
        let most = PaddedShape { rows: had.rows.max(shape.rows), tokens: had.tokens.max(shape.tokens) };
        places.captured = Some(most);
    }

    /// Plans every label that the cache has planned in this step, with what the step says of its rows.
    ///
    /// # Errors
    /// A step that the cache has not planned; masks that do not fit their rows or find none; rows that are refused.
    pub fn plan_cache(
        &self,
        kv: &dyn PagedKv,
        cx: &StepContext,
        declared: &AttentionStep,
        causal: bool,
    ) -> Result<()> {
        let config = kv.config();
        let mut masked = 0;
        for label in kv.plan_labels(cx.serial)? {
            let id = PlanId { slot: cx.slot, label, serial: cx.serial };
            let plan = kv.kv_plan(&id)?;
            let mut arrays = match declared.context_only {
                true => Arrays::context_only(&plan, config.page_size),
                false => Arrays::of_plan(&plan),
            };
            masked += arrays.add_masks(&plan, &declared.masks, &self.name)?;
            // Every stored key lies before every query of the step.
            let rows = arrays.table(causal && !declared.context_only, config.max_num_pages);
            self.plan(&id, &rows, capacity(cx, config))?;
        }
        if masked < declared.masks.len() {
            let why = format!("{} masks were declared, {masked} rows have one", declared.masks.len());
            return Err(Error::Step { resource: self.name.clone(), why });
        }
        Ok(())
    }

    /// Makes the plan `id` of `rows`, in the memory of the one before under its label and slot; nothing but the serial
    /// changes when the inputs are the same. `capacity` is the padded shape and its page ids, in a bucket.
    ///
    /// # Errors
    /// Rows that are refused, memory that cannot be had; there is then no plan of this id.
    pub fn plan(&self, id: &PlanId, rows: &RowTable<'_>, capacity: Option<Capacity>) -> Result<()> {
        let mut places = self.lock();
        let places = &mut *places;
        let (key, beside) = (EagerSlotKey::from(id), self.beside.stream());
        if let Some(mut place) = places.by_key.remove(&key) {
            // Out of the map while it is made anew: a refusal must leave no half-made plan to be taken for current.
            if let Some(stored) = Arc::get_mut(&mut place.stored) {
                let stale =
                    planted("skip-replan-on-changed-lengths") && stored.kv_len.len() == rows.num_rows();
                let planned = match stale {
                    true => Planned::Unchanged,
                    false => self.said(self.planner.remake(&mut stored.plan, rows, capacity))?,
                };
                if planned == Planned::Changed {
                    stored.workspace = self.reserve(&key, &stored.plan)?;
                    if !place.marked {
                        place.read.record(&self.stream)?;
                    }
                    place.read.hold(&beside)?;
                    self.said(self.planner.stage(&mut stored.plan, &beside))?;
                    stored.qo_indptr.set(rows.qo_indptr)?;
                    stored.kv_len.set(rows.kv_len)?;
                    let last = bytemuck::cast_slice(self.planner.last_tokens(&stored.plan));
                    stored.last_tokens.set(&beside, last)?;
                    place.written.record(&beside)?;
                    place.written.hold(&self.stream)?;
                    stored.work = self.planner.work(rows);
                    places.counts.made += 1;
                } else {
                    places.counts.unchanged += 1;
                }
                (place.serial, place.marked) = (Some(id.serial), false);
                places.by_key.insert(key, place);
                return Ok(());
            }
        }
        let mut plan = self.said(self.planner.make(rows, capacity))?;
        self.said(self.planner.stage(&mut plan, &beside))?;
        let workspace = self.reserve(&key, &plan)?;
        let most =
            self.largest_rows.max(capacity.map_or(0, |c| c.rows)).max(places.captured.map_or(0, |c| c.rows));
        let mut qo_indptr = IndexBuf::with_capacity(&beside, (most + 1).max(rows.qo_indptr.len()))?;
        let mut kv_len = IndexBuf::with_capacity(&beside, most.max(rows.kv_len.len()))?;
        qo_indptr.set(rows.qo_indptr)?;
        kv_len.set(rows.kv_len)?;
        let last: &[u8] = bytemuck::cast_slice(self.planner.last_tokens(&plan));
        let room = most.max(rows.num_rows()) * DType::I64.size();
        let mut last_tokens = Staged::with_capacity(&beside, room)?;
        last_tokens.set(&beside, last)?;
        let device = self.stream.device();
        let [read, written] = [Event::new(device)?, Event::new(device)?];
        written.record(&beside)?;
        written.hold(&self.stream)?;
        let work = self.planner.work(rows);
        let stored = Arc::new(StoredPlan { plan, workspace, qo_indptr, kv_len, last_tokens, work });
        places.by_key.insert(key, Place { serial: Some(id.serial), stored, read, marked: false, written });
        places.counts.made += 1;
        Ok(())
    }

    fn reserve(&self, key: &EagerSlotKey, plan: &P::Plan) -> Result<Arc<Mutex<Workspace>>> {
        self.said(self.workspaces.reserve(key, self.planner.workspace_bytes(plan)))
    }

    /// Forgets that a step was planned, whose layers are all in the queue; memory and inputs stay, for the next.
    pub fn forget(&self, serial: StepSerial) {
        for place in self.lock().by_key.values_mut().filter(|place| place.serial == Some(serial)) {
            place.serial = None;
            place.marked = place.read.record(&self.stream).is_ok();
        }
    }

    /// Whether a step has plans here.
    pub fn has(&self, serial: StepSerial) -> bool {
        self.lock().by_key.values().any(|place| place.serial == Some(serial))
    }

    /// The plan of this very id.
    ///
    /// # Errors
    /// [`Error::UnknownPlan`] when there is none, or another step's.
    pub fn get(&self, id: &PlanId) -> Result<Arc<StoredPlan<P::Plan>>> {
        let places = self.lock();
        match places.by_key.get(&EagerSlotKey::from(id)) {
            Some(place) if place.serial == Some(id.serial) => Ok(Arc::clone(&place.stored)),
            _ => Err(Error::UnknownPlan {
                resource: self.name.clone(),
                label: id.label.clone(),
                serial: id.serial,
            }),
        }
    }

    /// What a captured run of the plan `id` takes for granted: what its planner says, and where its scratch lies.
    pub fn capture_key(&self, id: &PlanId) -> Option<u64> {
        let stored = self.get(id).ok()?;
        let of_plan = self.planner.capture_key(&stored.plan)?;
        let scratch = stored.workspace().ok()?.view().ok()?.as_mut_ptr().addr();
        Some(key_of(&[of_plan, scratch as u64]))
    }

    /// What the wrapper level said, under the resource's name.
    ///
    /// # Errors
    /// The refusal that it was.
    pub fn said<T>(&self, result: Result<T, mstar_kernels::Error>) -> Result<T> {
        result.map_err(|error| Error::backend(self.name.as_str(), error))
    }
}

/// One number of several, the same in every run of the program.
pub fn key_of(numbers: &[u64]) -> u64 {
    let mut hasher = DefaultHasher::new();
    numbers.hash(&mut hasher);
    hasher.finish()
}

/// A bucket's shape with the page ids that it must hold; `None` for an eager step.
pub fn capacity(cx: &StepContext, kv: &KvConfig) -> Option<Capacity> {
    cx.bucket.map(|shape @ PaddedShape { rows, tokens }| Capacity {
        rows,
        tokens,
        pages: captured_page_capacity(shape, kv),
    })
}
