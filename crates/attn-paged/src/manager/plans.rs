//! The plans of one attention resource, in typed storage: a plan id leads to a plan of that very step or to an error.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use mstar_core::attend::{BuildContext, IndexBuf, Softmax, Work};
use mstar_core::kv::{KvLayout, LayerView, PagedKv};
use mstar_core::resource::PaddedShape;
use mstar_core::spec::Schedule as SpecSchedule;
use mstar_core::{AttnOut, Error, Forward, Label, PlanId, Query, ResourceName, Result, Slot, StepSerial};
use mstar_kernels::mutant::planted;

use super::table::RowTable;
use super::{WorkspacePool, work, workspace_bound};
use crate::{
    Capacity, Geometry, Inputs, Mask, MaskEntries, Outputs, PageTable, Plan, PlanOptions, Planned, Schedule,
    TensorRef, Variant, Workspace, run,
};

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
pub(crate) struct Stored {
    pub(crate) plan: Plan,
    pub(crate) workspace: Arc<Mutex<Workspace>>,
    qo_indptr: IndexBuf,
    kv_len: IndexBuf,
    /// Of one layer.
    pub(crate) work: Work,
}

/// A place that plans of one label and slot are made in, one after another.
#[derive(Debug)]
struct Place {
    /// Whose plan it holds now; `None` between steps.
    serial: Option<StepSerial>,
    stored: Arc<Stored>,
}

#[derive(Debug, Default)]
struct Places {
    by_key: HashMap<EagerSlotKey, Place>,
    counts: PlanCounts,
    /// The largest shape that a capture has asked room for.
    captured: Option<PaddedShape>,
}

/// The plans of one attention resource and what runs them.
#[derive(Debug)]
pub(crate) struct Plans {
    pub(crate) name: ResourceName,
    geometry: Geometry,
    softmax: Softmax,
    options: PlanOptions,
    places: Mutex<Places>,
    workspaces: WorkspacePool,
    /// Rows that index buffers have room for from the first.
    largest_rows: usize,
}

impl Plans {
    /// No plan yet, for the geometry that a resource is built with.
    pub(crate) fn new(cx: &BuildContext, cascade: bool) -> Result<Plans> {
        let attn = &cx.geometry;
        let KvLayout::Nhd { num_kv_heads, head_dim } = attn.layout else {
            return Err(refuse(
                &cx.name,
                "layout",
                "reads keys and values a head; for latents name backend: mla",
                &attn.layout,
            ));
        };
        let geometry = Geometry {
            num_qo_heads: attn.num_qo_heads,
            num_kv_heads,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
            page_size: attn.page_size,
            q_dtype: attn.dtype,
            kv_dtype: attn.kv_dtype,
        };
        geometry.check()?;
        let heads = |name, values: &Option<Arc<[f32]>>, expected: usize| match values {
            Some(values) if values.len() != expected => {
                Err(refuse(&cx.name, name, &format!("expected {expected} values"), &values.len()))
            }
            _ => Ok(()),
        };
        heads("sinks", &attn.softmax.sinks, attn.num_layers * attn.num_qo_heads)?;
        heads("alibi_slopes", &attn.softmax.alibi_slopes, attn.num_qo_heads)?;
        let schedule = match cx.schedule {
            SpecSchedule::Throughput => Schedule::Throughput,
            _ => Schedule::Invariant,
        };
        let options = PlanOptions { schedule, cascade, ..PlanOptions::default() };
        let foreseen = match cx.largest {
            Some(largest) => workspace_bound(attn, largest, options.workers)
                .map_err(|error| Error::backend(cx.name.as_str(), error))?,
            None => 0,
        };
        let largest_rows = cx.largest.map_or(0, |largest| largest.rows);
        let plans = Plans {
            name: cx.name.clone(),
            geometry,
            softmax: attn.softmax.clone(),
            options,
            places: Mutex::default(),
            workspaces: WorkspacePool::with_bound(foreseen),
            largest_rows,
        };
        plans.variant(true).check()?;
        Ok(plans)
    }

    pub(crate) fn softmax(&self) -> &Softmax {
        &self.softmax
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn counts(&self) -> PlanCounts {
        self.lock().counts
    }

    /// Bytes of workspaces and of plans.
    pub(crate) fn bytes(&self) -> usize {
        let plans: usize = self.lock().by_key.values().map(|place| place.stored.plan.plan_bytes()).sum();
        plans + self.workspaces.bytes()
    }

    /// Bytes of workspaces alone.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.workspaces.bytes()
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn variant(&self, causal: bool) -> Variant {
        Variant {
            sm_scale: self.softmax.sm_scale,
            causal,
            window_left: self.softmax.window_left,
            logits_soft_cap: self.softmax.logits_soft_cap,
            alibi: self.softmax.alibi_slopes.is_some(),
            sinks: self.softmax.sinks.is_some(),
        }
    }

    /// Notes the largest shape that will be asked for. Plans in a bucket then keep their memory from the first on.
    pub(crate) fn capture(&self, shape: PaddedShape) {
        let mut places = self.lock();
        let had = places.captured.unwrap_or(shape);
        let most = PaddedShape { rows: had.rows.max(shape.rows), tokens: had.tokens.max(shape.tokens) };
        places.captured = Some(most);
    }

    /// Makes the plan `id` of `table`, in the memory of the one before under its label and slot; nothing but the serial
    /// changes when the inputs are the same. `capacity` is the padded shape and its page ids, in a bucket.
    pub(crate) fn plan(&self, id: &PlanId, table: &RowTable<'_>, capacity: Option<Capacity>) -> Result<()> {
        let mut places = self.lock();
        let places = &mut *places;
        let options = PlanOptions { capacity, ..self.options };
        let variant = self.variant(table.causal);
        let pages = page_table(table);
        let key = EagerSlotKey::from(id);
        if let Some(mut place) = places.by_key.remove(&key) {
            // Out of the map while it is made anew: a refusal must leave no half-made plan to be taken for current.
            if let Some(stored) = Arc::get_mut(&mut place.stored) {
                let planned = if planted("skip-replan-on-changed-lengths")
                    && stored.plan.num_rows() == pages.num_rows()
                {
                    Planned::Unchanged
                } else {
                    self.said(stored.plan.replan(&self.geometry, &variant, &pages, &options))?
                };
                if planned == Planned::Changed {
                    stored.workspace = self.said(self.workspaces.reserve(&key, &stored.plan))?;
                    stored.qo_indptr.set(table.qo_indptr)?;
                    stored.kv_len.set(table.kv_len)?;
                    stored.work = work::of_layer(&self.geometry, &variant, table);
                    places.counts.made += 1;
                } else {
                    places.counts.unchanged += 1;
                }
                place.serial = Some(id.serial);
                places.by_key.insert(key, place);
                return Ok(());
            }
        }
        let plan = self.said(Plan::new(&self.geometry, &variant, &pages, &options))?;
        let workspace = self.said(self.workspaces.reserve(&key, &plan))?;
        let rows =
            self.largest_rows.max(capacity.map_or(0, |c| c.rows)).max(places.captured.map_or(0, |c| c.rows));
        let mut qo_indptr = IndexBuf::with_capacity((rows + 1).max(table.qo_indptr.len()))?;
        let mut kv_len = IndexBuf::with_capacity(rows.max(table.kv_len.len()))?;
        qo_indptr.set(table.qo_indptr)?;
        kv_len.set(table.kv_len)?;
        let work = work::of_layer(&self.geometry, &variant, table);
        let stored = Arc::new(Stored { plan, workspace, qo_indptr, kv_len, work });
        places.by_key.insert(key, Place { serial: Some(id.serial), stored });
        places.counts.made += 1;
        Ok(())
    }

    /// Forgets that a step was planned; memory and inputs stay, for the next.
    pub(crate) fn forget(&self, serial: StepSerial) {
        for place in self.lock().by_key.values_mut().filter(|place| place.serial == Some(serial)) {
            place.serial = None;
        }
    }

    /// Whether a step has plans here.
    pub(crate) fn has(&self, serial: StepSerial) -> bool {
        self.lock().by_key.values().any(|place| place.serial == Some(serial))
    }

    /// The plan of this very id.
    pub(crate) fn get(&self, id: &PlanId) -> Result<Arc<Stored>> {
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

    pub(crate) fn qo_indptr_buf(&self, id: &PlanId) -> Result<IndexBuf> {
        Ok(self.get(id)?.qo_indptr.clone())
    }

    pub(crate) fn kv_len_buf(&self, id: &PlanId) -> Result<IndexBuf> {
        Ok(self.get(id)?.kv_len.clone())
    }

    /// Attends one layer of `kv`. Allocates nothing.
    pub(crate) fn run(
        &self,
        forward: &Forward<'_>,
        kv: &dyn PagedKv,
        q: Query<'_>,
        out: AttnOut<'_>,
    ) -> Result<()> {
        let stored = self.get(forward.plan_id())?;
        let Query::Heads(q) = q else {
            let why = "takes queries a head, not absorbed ones; for latents name backend: mla".into();
            return Err(Error::Step { resource: self.name.clone(), why });
        };
        let LayerView::Nhd { k, v } = kv.layer(forward.layer())? else {
            let why = format!("the layers of {} are not keys and values a head", kv.name());
            return Err(Error::Step { resource: self.name.clone(), why });
        };
        let heads = self.geometry.num_qo_heads;
        // `kv.layer` has refused a layer that there is not.
        let sinks =
            self.softmax.sinks.as_deref().map(|sinks| per_head(sinks, forward.layer(), heads)).transpose()?;
        let slopes =
            self.softmax.alibi_slopes.as_deref().map(|slopes| per_head(slopes, 0, heads)).transpose()?;
        let inputs = Inputs { q, k, v, sinks, alibi_slopes: slopes };
        let outputs = Outputs { o: out.o, lse: out.lse };
        // Never wait here: the layer that holds the workspace may be waiting for this very thread.
        let mut workspace = match stored.workspace.try_lock() {
            Ok(workspace) => workspace,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let why = "another layer of this plan label is running; run one after the other".into();
                return Err(Error::Order { call: "Attention::run", why });
            }
        };
        self.said(run(&stored.plan, forward.stream(), &mut workspace, inputs, outputs))
    }

    fn said<T>(&self, result: crate::Result<T>) -> Result<T> {
        result.map_err(|error| Error::backend(self.name.as_str(), error))
    }
}

/// A refusal of one of the values that a resource is built with.
pub(crate) fn refuse(
    name: &ResourceName,
    parameter: &'static str,
    why: &str,
    got: &dyn std::fmt::Debug,
) -> Error {
    let got = format!("{got:?}");
    Error::backend(name.as_str(), mstar_kernels::Error::Parameter { name: parameter, why: why.into(), got })
}

/// `[H]`: the values of entry `index` of `[n, H]`.
fn per_head(values: &[f32], index: usize, heads: usize) -> Result<TensorRef<'_>> {
    Ok(TensorRef::from_slice(&values[index * heads..(index + 1) * heads], &[heads])?)
}

fn page_table<'a>(table: &RowTable<'a>) -> PageTable<'a> {
    let mask = (!table.mask_indptr.is_empty())
        .then_some(Mask { entries: MaskEntries::Bytes(table.mask), indptr: table.mask_indptr });
    PageTable {
        qo_indptr: table.qo_indptr,
        kv_indptr: table.kv_indptr,
        kv_indices: table.kv_indices,
        kv_last_page_len: table.kv_last_page_len,
        kv_offset: (!table.kv_offset.is_empty()).then_some(table.kv_offset),
        page_start: (!table.page_start.is_empty()).then_some(table.page_start),
        mask,
        num_pages: table.num_pages,
    }
}
