//! The manager level: dense attention as a resource of a spec.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `planner` | rows to a wrapper-level plan |
//! | `prefixes` | prefixes gathered out of pages: kept, extended, dropped |
//! | `bound` | memory of the largest step |
//! | `factory` | options of a spec, and the factory that the program registers |

mod bound;
mod factory;
mod planner;
mod prefixes;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mstar_core::attend::pages::{Arrays, Plans, capacity, declared, key_of};
use mstar_core::attend::{BuildContext, IndexBuf, Work, write_kv};
use mstar_core::kv::{KvEntries, KvPlan, LayerView, PagedKv};
use mstar_core::resource::{Fingerprint, Ingest, Outcome, Override, PaddedShape, Promotion, StepContext};
use mstar_core::{
    Attention, AttnOut, Error, Forward, Fresh, PlanId, Query, RequestId, Resource, ResourceName, Result,
    Step, StepSerial,
};
use mstar_kernels::cpu::gather::gather_rows_at;
use mstar_kernels::cuda::{Moving, prepare_moves};
use mstar_kernels::mutant::planted;
use mstar_kernels::{TensorMut, TensorRef};

pub use bound::workspace_bound;
pub use factory::{DenseFactory, DenseOptions, PrefixSource};
pub use planner::DensePlanner;
pub use prefixes::GatherCounts;

use self::prefixes::Prefixes;
use crate::{Geometry, Inputs, Outputs, run};

/// Attention over `[stored prefix | the step's own tokens]`, the latter taken straight from the layer.
///
/// A step declares ordinary spans; a row's prefix is what was stored before it. A step of `commit: false` (a denoising
/// step) writes nothing to the cache, since nothing would ever read it. One that commits is read by later steps, so this
/// resource writes its entries itself: whatever a step declares, naming `paged` instead changes nothing but time.
#[derive(Debug)]
pub struct DenseAttention {
    kv: Arc<dyn PagedKv>,
    options: DenseOptions,
    plans: Plans<DensePlanner>,
    prefixes: Prefixes,
    state: Mutex<State>,
}

/// What is known of steps and requests.
#[derive(Debug, Default)]
struct State {
    /// Planned steps whose entries are to be kept.
    commits: Vec<StepSerial>,
    /// Requests that said otherwise than the spec whether their prefix is kept.
    keep: BTreeMap<RequestId, bool>,
}

impl DenseAttention {
    /// The resource over the cache of `cx`.
    ///
    /// # Errors
    /// No cache, or one of latents; a softmax with sinks or ALiBi; a device without kernels.
    pub fn new(cx: &BuildContext, options: DenseOptions) -> Result<DenseAttention> {
        let kv = cx.paged_cache()?;
        let planner = DensePlanner::new(cx, options.prefix)?;
        let foreseen = cx.largest.map_or(0, bound::prefix_tokens);
        if options.prefix == PrefixSource::Gathered {
            let Geometry { num_kv_heads: g, head_dim_qk: d, kv_dtype, .. } = planner.geometry;
            let runs = [d, g * d].map(|width| width * kv_dtype.size());
            prepare_moves(cx.stream.device(), &[Moving::Unpage], &runs)
                .map_err(|why| Error::backend(cx.name.as_str(), why))?;
        }
        let prefixes =
            Prefixes::new(cx.stream, cx.name.clone(), planner.geometry, cx.geometry.num_layers, foreseen);
        Ok(DenseAttention { kv, options, plans: planner.plans(cx)?, prefixes, state: Mutex::default() })
    }

    /// How many prefixes were gathered, and how many were there already.
    pub fn gather_counts(&self) -> GatherCounts {
        self.prefixes.counts()
    }

    /// Bytes of gathered prefixes, workspaces and plans.
    pub fn bytes(&self) -> usize {
        self.prefixes.bytes() + self.plans.bytes()
    }

    /// Bytes of gathered prefixes and workspaces, which is what was foreseen of the largest step for each label and slot.
    pub fn buffer_bytes(&self) -> usize {
        self.prefixes.bytes() + self.plans.workspace_bytes()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refuse<T>(&self, why: impl Into<String>) -> Result<T> {
        Err(Error::Step { resource: self.name().clone(), why: why.into() })
    }

    /// The step's plans of the cache, each under its label.
    fn cache_plans(&self, cx: &StepContext) -> Result<Vec<(PlanId, Arc<KvPlan>)>> {
        let labels = self.kv.plan_labels(cx.serial)?;
        let plan = |label| {
            let id = PlanId { slot: cx.slot, label, serial: cx.serial };
            Ok((id.clone(), self.kv.kv_plan(&id)?))
        };
        labels.into_iter().map(plan).collect()
    }

    /// Enqueues the gather of every layer of each prefix that is not there. The step's turn has come: nobody writes the
    /// pages of what it builds on any more.
    fn gather(&self, cx: &StepContext) -> Result<()> {
        if self.options.prefix == PrefixSource::Pages {
            return Ok(());
        }
        for (id, plan) in self.cache_plans(cx)? {
            let keep = |request: &RequestId| {
                self.lock().keep.get(request).copied().unwrap_or(self.options.keep_prefix)
            };
            self.prefixes.gather(&id, &plan, &*self.kv, keep)?;
        }
        Ok(())
    }

    /// The step's own entries of the forward's layer, `k` and `v`; empty ones for a plan without any.
    fn fresh<'a>(&'a self, fresh: Fresh<'a>, wanted: bool, layer: usize) -> Result<[TensorRef<'a>; 2]> {
        match fresh {
            Some(KvEntries::Nhd { k, v }) => Ok([k, v]),
            Some(_) => self.refuse("takes keys and values a head, not latents; name backend: mla for those"),
            None if wanted => self.refuse(
                "takes the step's keys and values straight from the layer: hand k and v to attend, written or not",
            ),
            None => {
                let LayerView::Nhd { k, v } = self.kv.layer(layer)? else {
                    return self.refuse(format!("the layers of {} are not keys and values", self.kv.name()));
                };
                let none = |pages: TensorRef<'a>| pages.select(0, 0)?.narrow(0, 0, 0);
                Ok([self.plans.said(none(k))?, self.plans.said(none(v))?])
            }
        }
    }
}

/// Refuses a row whose stream does not start at its first page.
fn starts_at_its_first_page(resource: &ResourceName, plan: &KvPlan) -> Result<()> {
    match plan.rows.iter().find(|row| row.kv_offset > 0 || row.page_start > 0) {
        None => Ok(()),
        Some(row) => {
            let why = format!(
                "stream {} ({}) starts at position {}: its first pages were given back, and a dense pass needs the \
                 whole prefix; leave retention out of the cache, or name backend: paged",
                row.request,
                row.label,
                row.kv_offset + row.page_start
            );
            Err(Error::Step { resource: resource.clone(), why })
        }
    }
}

impl Resource for DenseAttention {
    fn name(&self) -> &ResourceName {
        self.plans.name()
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        vec![self.kv.name().clone()]
    }

    /// Pages of the second layer on are projected from what this resource computed, so everything that changes its
    /// numbers is part of what they depend on.
    fn fingerprint(&self) -> Option<Fingerprint> {
        let DensePlanner { geometry, softmax, .. } = self.plans.planner();
        let text = format!(
            "dense {geometry:?} causal {} {:08x} {:?} {:?}",
            self.options.causal,
            softmax.sm_scale.to_bits(),
            softmax.window_left,
            softmax.logits_soft_cap.map(f32::to_bits)
        );
        Some(Fingerprint(text.into_bytes()))
    }

    fn takes_override(&self, wanted: &Override) -> bool {
        matches!(wanted, Override::Attention(_))
    }

    /// What lay there under the request's name is dropped: it may be another by now.
    fn ingest_request(&self, ingest: &Ingest) -> Result<()> {
        self.prefixes.forget(&ingest.request);
        let keep = ingest.attention_overrides(self.name()).keep_prefix;
        let mut state = self.lock();
        match keep {
            Some(keep) => state.keep.insert(ingest.request.clone(), keep),
            None => state.keep.remove(&ingest.request),
        };
        Ok(())
    }

    fn admit(&self, _: &StepContext, step: &Step) -> Result<Outcome> {
        let declared = declared(step, self.name())?;
        if declared.queries.is_some() {
            return self
                .refuse("its rows are those of its cache's plan; it takes no queries of another stream");
        }
        if declared.context_only {
            return self.refuse(
                "attends a prefix and the step's own tokens at once; for context_only name backend: paged",
            );
        }
        if !declared.masks.is_empty() {
            return self.refuse("takes no custom masks; for trees of drafts name backend: paged");
        }
        Ok(Outcome::Admitted)
    }

    fn rollback(&self, serial: StepSerial) {
        self.plans.forget(serial);
        self.prefixes.undo(serial);
        self.lock().commits.retain(|&other| other != serial);
    }

    fn plan(&self, cx: &StepContext, step: &Step) -> Result<()> {
        let config = self.kv.config();
        for (id, plan) in self.cache_plans(cx)? {
            starts_at_its_first_page(self.name(), &plan)?;
            let arrays = Arrays::of_plan(&plan);
            let rows = arrays.table(self.options.causal, config.max_num_pages);
            self.plans.plan(&id, &rows, capacity(cx, config))?;
        }
        if step.kv(self.kv.name()).is_none_or(|declared| declared.commit) {
            self.lock().commits.push(cx.serial);
        }
        // What the step before is still writing is gathered once it has: when this one is promoted.
        if cx.preplan && !planted("dense-gather-ahead") { Ok(()) } else { self.gather(cx) }
    }

    /// Gathers what was left. Should another resource find the step stale, it is rolled back, and so is this.
    fn promote(&self, cx: &StepContext, _: &Step) -> Result<Promotion> {
        if !self.plans.has(cx.serial) {
            return Ok(Promotion::Stale);
        }
        self.gather(cx)?;
        Ok(Promotion::Valid)
    }

    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.plans.forget(serial);
        self.lock().commits.retain(|&other| other != serial);
        Ok(())
    }

    fn reset_request(&self, request: &RequestId, _: bool) -> Result<()> {
        self.prefixes.forget(request);
        Ok(())
    }

    fn remove_request(&self, request: &RequestId) -> Result<()> {
        self.prefixes.forget(request);
        self.lock().keep.remove(request);
        Ok(())
    }

    fn build_accelerator_graph_buffers(&self, _: usize, shape: PaddedShape) -> Result<()> {
        self.plans.capture(shape);
        Ok(())
    }

    /// Those whose prefix is gathered, and those that said whether it is kept.
    fn tracked_requests(&self) -> Vec<RequestId> {
        let mut requests = self.prefixes.requests();
        requests.extend(self.lock().keep.keys().cloned());
        requests.sort();
        requests.dedup();
        requests
    }
}

impl Attention for DenseAttention {
    /// The layer hands its keys and values to [`Attention::run`].
    fn requires_kv_write(&self) -> bool {
        false
    }

    fn kv_cache(&self) -> Option<&dyn PagedKv> {
        Some(&*self.kv)
    }

    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, fresh: Fresh<'_>, out: AttnOut<'_>) -> Result<()> {
        let (id, layer) = (forward.plan_id().clone(), forward.layer());
        let stored = self.plans.get(&id)?;
        let Query::Heads(q) = q else {
            return self.refuse("takes queries a head, not absorbed ones; for latents name backend: mla");
        };
        if layer >= self.kv.config().num_layers {
            return self.refuse(format!("there is no layer {layer}, but 0..{}", self.kv.config().num_layers));
        }
        let plan = stored.plan();
        let wanted = plan.segments().iter().any(|segment| segment.fresh_len > 0);
        let [k, v] = self.fresh(fresh, wanted, layer)?;
        if let Some(entries) = fresh
            && self.lock().commits.contains(&id.serial)
            && !planted("dense-commit-unwritten")
        {
            write_kv(&*self.kv, forward, entries)?;
        }
        let mut workspace = stored.workspace()?;
        let attend = |[k_prefix, v_prefix]: [TensorRef<'_>; 2]| {
            let (k_prefix, v_prefix) = (Some(k_prefix), Some(v_prefix));
            let inputs = Inputs { q, k_prefix, v_prefix, k, v };
            let outputs = Outputs { o: out.o, lse: out.lse };
            self.plans.said(run(plan, forward.stream(), &mut workspace, inputs, outputs))
        };
        match self.options.prefix {
            PrefixSource::Gathered => {
                self.prefixes.with(&id, |memory| attend(self.plans.said(memory.layer(layer))?))
            }
            PrefixSource::Pages => match self.kv.layer(layer)? {
                LayerView::Nhd { k, v } => attend([k, v]),
                _ => self.refuse(format!("the layers of {} are not keys and values", self.kv.name())),
            },
        }
    }

    /// A plan's work, where its gathered prefixes lie, and whether its entries are kept, which the region then writes. Gathers are
    /// enqueued before: what a replay reads is what its own step gathered.
    fn capture_key(&self, plan: &PlanId) -> Option<u64> {
        let of_plan = self.plans.capture_key(plan)?;
        let keeps = self.lock().commits.contains(&plan.serial);
        let slots = if keeps { self.kv.capture_key(plan)? } else { 0 };
        let [at, tokens] = match self.options.prefix {
            PrefixSource::Gathered => self.prefixes.place(plan)?,
            PrefixSource::Pages => [0, 0],
        };
        Some(key_of(&[of_plan, u64::from(keeps), slots, at, tokens]))
    }

    fn work(&self, plan: &PlanId) -> Work {
        self.plans.get(plan).map(|stored| stored.work()).unwrap_or_default()
    }

    fn kernel(&self, plan: &PlanId) -> Option<String> {
        use mstar_core::attend::pages::Planner;
        self.plans.get(plan).ok().map(|stored| self.plans.planner().kernel(stored.plan()))
    }

    fn select_last_hidden(
        &self,
        forward: &Forward<'_>,
        hidden: TensorRef<'_>,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let stored = self.plans.get(forward.plan_id())?;
        self.plans.said(gather_rows_at(forward.stream(), hidden, stored.last_tokens()?, out))
    }

    fn qo_indptr_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        Ok(self.plans.get(plan)?.qo_indptr().clone())
    }

    fn kv_len_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        Ok(self.plans.get(plan)?.kv_len().clone())
    }
}
