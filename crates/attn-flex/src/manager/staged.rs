//! Plans over a ring, staged for each plan label and slot: a mask and its work for every geometry of layers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use mstar_core::attend::pages::{EagerSlotKey, WorkspacePool, key_of};
use mstar_core::attend::{IndexBuf, Work};
use mstar_core::kv::{RingBlocks, RingConfig, RingGroups, RingPlan, RingRow};
use mstar_core::{Error, Label, PlanId, RequestId, ResourceName, Result, Slot, StepSerial};
use mstar_kernels::mutant::planted;
use mstar_kernels::{DType, Device, Staged as OnDevice, Stream, TensorRef};

use crate::mask::{RingMask, RingRule};
use crate::{Geometry, KernelOptions, Plan, ScoreMod, Workspace};

/// What every plan of a resource is made with.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) name: ResourceName,
    pub(super) geometry: Geometry,
    pub(super) rule: RingRule,
    /// Whether score mods ask for positions.
    pub(super) placed: bool,
    pub(super) options: KernelOptions,
}

/// A planned label: one mask and plan for each geometry of layers.
#[derive(Debug)]
pub(super) struct Staged {
    groups: Vec<(RingMask, Option<Plan>)>,
    workspace: Arc<Mutex<Workspace>>,
    pub(super) qo_indptr: IndexBuf,
    pub(super) kv_len: IndexBuf,
    /// `[R]` i64: packed index of each real row's last token.
    last_tokens: OnDevice,
    pub(super) work: Work,
}

impl Staged {
    /// The plan of the layers of one group.
    pub(super) fn plan(&self, group: usize) -> &Plan {
        let group = if planted("flex-wrong-geometry") { 0 } else { group };
        self.groups[group].1.as_ref().expect("a stored label has planned every group")
    }

    /// What captured runs take for granted: of every group its kernels, grids and list, and where the scratch lies.
    pub(super) fn capture_key(&self) -> Option<u64> {
        let scratch = self.workspace().ok()?.view().ok()?.as_mut_ptr().addr() as u64;
        let plans = self.groups.iter().map(|(_, plan)| plan.as_ref()?.capture_key());
        Some(key_of(&plans.chain([Some(scratch)]).collect::<Option<Vec<u64>>>()?))
    }

    /// `[R]` i64: packed index of each real row's last token, where layers run.
    pub(super) fn last_tokens(&self) -> Result<TensorRef<'_>> {
        let rows = self.last_tokens.len() / DType::I64.size();
        Ok(self.last_tokens.tensor(DType::I64, &[rows])?)
    }

    /// The scratch of a run.
    pub(super) fn workspace(&self) -> Result<MutexGuard<'_, Workspace>> {
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

#[derive(Debug)]
struct Place {
    /// Whose plan it holds now; `None` between steps.
    serial: Option<StepSerial>,
    staged: Arc<Staged>,
}

/// The plans of one resource over a ring.
#[derive(Debug)]
pub(super) struct Shelf {
    stream: Stream,
    recipe: Recipe,
    workspaces: WorkspacePool,
    places: Mutex<HashMap<EagerSlotKey, Place>>,
    /// Rows that every plan has room for.
    most_rows: Mutex<usize>,
}

impl Shelf {
    /// No plan yet; plans are staged on `stream`, workspaces have `foreseen` bytes from the first, plans room for `rows` rows.
    pub(super) fn new(stream: Stream, recipe: Recipe, rows: usize, foreseen: usize) -> Shelf {
        Shelf {
            stream,
            recipe,
            workspaces: WorkspacePool::on(stream.device(), foreseen),
            places: Mutex::default(),
            most_rows: Mutex::new(rows),
        }
    }

    /// Has the kernels of its plans built and loaded, so that planning compiles nothing: a plan of one row without a world is made,
    /// staged and let go. Nothing on the CPU.
    ///
    /// # Errors
    /// A kernel that cannot be built.
    pub(super) fn prepare(
        &self,
        (config, groups): (&RingConfig, &RingGroups),
        score_mods: &[ScoreMod<'_>],
    ) -> Result<()> {
        if self.stream.device() == Device::Cpu {
            return Ok(());
        }
        let row = RingRow { request: RequestId::new("nobody"), world: None, frame_pos: 0, commit: false };
        let nothing = RingBlocks { indptr: vec![0, 0], blocks: Vec::new() };
        let plan = RingPlan {
            id: PlanId { slot: Slot(0), label: Label::main(), serial: StepSerial(0) },
            rows: vec![row],
            real_rows: 0,
            qo_indptr: vec![0, config.tokens_per_frame as i32],
            groups: vec![nothing; groups.geometries.len()],
        };
        let key = EagerSlotKey::from(&plan.id);
        let mut staged = self.empty(&key, config, groups, 1)?;
        self.fill(&mut staged, &key, &plan, (config, groups), score_mods, (1, false))
    }

    /// The same by a changed recipe, and no plan yet.
    pub(super) fn with(mut self, change: impl FnOnce(&mut Recipe)) -> Shelf {
        change(&mut self.recipe);
        self.places = Mutex::default();
        self
    }

    pub(super) fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<EagerSlotKey, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the most rows that a plan will have.
    pub(super) fn room_for(&self, rows: usize) {
        let mut most = self.most_rows.lock().unwrap_or_else(PoisonError::into_inner);
        *most = rows.max(*most);
    }

    /// Bytes of plans and workspaces.
    pub(super) fn bytes(&self) -> usize {
        let groups = |place: &Place| -> usize {
            place.staged.groups.iter().filter_map(|(_, plan)| plan.as_ref()).map(Plan::plan_bytes).sum()
        };
        self.lock().values().map(groups).sum::<usize>() + self.workspaces.bytes()
    }

    fn said<T>(&self, result: mstar_kernels::Result<T>) -> Result<T> {
        result.map_err(|error| Error::backend(self.recipe.name.as_str(), error))
    }

    /// Plans the label `ring_plan`, for layers with these score mods, in the memory of the one before under its label and slot.
    ///
    /// # Errors
    /// A mask or geometry that is refused, memory that cannot be had; there is then no plan of this id.
    pub(super) fn stage(
        &self,
        ring_plan: &RingPlan,
        (config, groups): (&RingConfig, &RingGroups),
        score_mods: &[ScoreMod<'_>],
        captured: bool,
    ) -> Result<()> {
        let most = *self.most_rows.lock().unwrap_or_else(PoisonError::into_inner);
        let key = EagerSlotKey::from(&ring_plan.id);
        let mut places = self.lock();
        // Out of the map while it is made anew: a refusal must leave no half-made plan to be taken for current.
        let had = places.remove(&key).and_then(|place| Arc::into_inner(place.staged));
        let mut staged = match had {
            Some(staged) => staged,
            None => self.empty(&key, config, groups, most.max(ring_plan.rows.len()))?,
        };
        self.fill(&mut staged, &key, ring_plan, (config, groups), score_mods, (most, captured))?;
        let place = Place { serial: Some(ring_plan.id.serial), staged: Arc::new(staged) };
        places.insert(key, place);
        Ok(())
    }

    fn empty(
        &self,
        key: &EagerSlotKey,
        config: &RingConfig,
        groups: &RingGroups,
        rows: usize,
    ) -> Result<Staged> {
        let mask = |geometry| RingMask::new(config, geometry, self.recipe.rule.clone(), self.recipe.placed);
        Ok(Staged {
            groups: groups.geometries.iter().map(|&geometry| (mask(geometry), None)).collect(),
            workspace: self.said(self.workspaces.reserve(key, 0))?,
            qo_indptr: IndexBuf::with_capacity(&self.stream, rows + 1)?,
            kv_len: IndexBuf::with_capacity(&self.stream, rows)?,
            last_tokens: self.said(OnDevice::with_capacity(&self.stream, rows * DType::I64.size()))?,
            work: Work::default(),
        })
    }

    fn fill(
        &self,
        staged: &mut Staged,
        key: &EagerSlotKey,
        ring_plan: &RingPlan,
        (config, groups): (&RingConfig, &RingGroups),
        score_mods: &[ScoreMod<'_>],
        (most, captured): (usize, bool),
    ) -> Result<()> {
        let Recipe { geometry, options, .. } = &self.recipe;
        let mut bytes = 0;
        for (group, (mask, plan)) in staged.groups.iter_mut().enumerate() {
            self.said(mask.stage(ring_plan, group))?;
            let plan = match plan {
                Some(plan) => plan,
                None => {
                    let made = plan.insert(self.said(Plan::new(geometry, mask.mask(), options))?);
                    // A row's queries come in blocks, and each of them lists what it sees.
                    let lists = most * (config.tokens_per_frame / mask.mask().blocks().block_q).max(1);
                    let seen = groups.geometries[group].most_visible() * config.blocks_per_frame();
                    made.reserve(lists, lists * seen);
                    made
                }
            };
            plan.capture(captured);
            self.said(plan.replan(geometry, mask.mask(), options))?;
            self.said(plan.stage(&self.stream, score_mods))?;
            bytes = bytes.max(plan.workspace_bytes());
        }
        staged.workspace = self.said(self.workspaces.reserve(key, bytes))?;
        staged.qo_indptr.set(&ring_plan.qo_indptr)?;
        let first = ring_plan.indptr(0);
        let block = (config.tokens_per_frame / config.blocks_per_frame().max(1)) as i32;
        let kv_len: Vec<i32> = first.windows(2).map(|pair| (pair[1] - pair[0]) * block).collect();
        staged.kv_len.set(&kv_len)?;
        let last = ring_plan.qo_indptr[1..].iter().take(ring_plan.real_rows);
        let written = staged.last_tokens.set_with(&self.stream, last.len() * DType::I64.size(), |bytes| {
            for (&end, bytes) in last.zip(bytes.chunks_exact_mut(DType::I64.size())) {
                bytes.copy_from_slice(&(i64::from(end) - 1).to_ne_bytes());
            }
        });
        self.said(written)?;
        staged.work = least_work(geometry, ring_plan, config, groups);
        Ok(())
    }

    /// Forgets that a step was planned; the memory stays.
    pub(super) fn forget(&self, serial: StepSerial) {
        for place in self.lock().values_mut().filter(|place| place.serial == Some(serial)) {
            place.serial = None;
        }
    }

    /// Whether a step has plans here.
    pub(super) fn has(&self, serial: StepSerial) -> bool {
        self.lock().values().any(|place| place.serial == Some(serial))
    }

    /// The plan of this very id.
    pub(super) fn get(&self, id: &PlanId) -> Result<Arc<Staged>> {
        match self.lock().get(&EagerSlotKey::from(id)) {
            Some(place) if place.serial == Some(id.serial) || planted("flex-stale-mask") => {
                Ok(Arc::clone(&place.staged))
            }
            _ => Err(Error::UnknownPlan {
                resource: self.recipe.name.clone(),
                label: id.label.clone(),
                serial: id.serial,
            }),
        }
    }
}

/// The least work of a layer, of the mean layer: each visible key read once a row, each query read and each output
/// written once, a multiplication and an addition for each element of each visible pair.
fn least_work(geometry: &Geometry, plan: &RingPlan, config: &RingConfig, groups: &RingGroups) -> Work {
    let block = config.tokens_per_frame / config.blocks_per_frame().max(1);
    let visible = |group: usize| plan.blocks(group).len() * block;
    let keys: usize = groups.of_layer.iter().map(|&group| visible(group)).sum();
    let keys = (keys / groups.of_layer.len().max(1)) as u64;
    let tokens = (plan.real_rows * config.tokens_per_frame) as u64;
    let (d, dv) = (geometry.head_dim_qk as u64, geometry.head_dim_vo as u64);
    let (h, g) = (geometry.num_qo_heads as u64, geometry.num_kv_heads as u64);
    let (q_size, kv_size) = (geometry.q_dtype.size() as u64, geometry.kv_dtype.size() as u64);
    Work {
        tokens,
        bytes_read: keys * g * (d + dv) * kv_size + tokens * h * d * q_size,
        bytes_written: tokens * h * dv * q_size,
        flops: 2 * keys * config.tokens_per_frame as u64 * h * (d + dv),
    }
}
