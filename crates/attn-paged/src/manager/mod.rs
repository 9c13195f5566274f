//! The manager level: paged attention as a resource of a spec.
//!
//! A step's rows come from the plans of the KV cache that the resource names; each of them, one for each plan label, is
//! turned into a wrapper-level [`Plan`](crate::Plan) kept under its label and slot ([`EagerSlotKey`]). A plan whose
//! inputs did not change is kept as it is; one that did is made again in the memory of the one before.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `table` | a cache's plan, masks and context-only rows as the wrapper's arrays |
//! | `plans` | typed plan storage, and running one layer of a plan |
//! | `workspace`, `bound` | [`WorkspacePool`], and what the largest step needs of it |
//! | `work` | bytes and operations of a plan, for reports |
//! | `factory` | options of a spec, and the factory that the program registers |

mod bound;
mod factory;
pub(crate) mod plans;
pub(crate) mod table;
mod work;
mod workspace;

use std::sync::Arc;

use mstar_core::attend::{BuildContext, Fresh, IndexBuf, Work};
use mstar_core::graph::captured_page_capacity;
use mstar_core::kv::{KvConfig, PagedKv};
use mstar_core::resource::{Fingerprint, Ingest, Outcome, PaddedShape, Promotion, StepContext};
use mstar_core::{
    Attention, AttnOut, Error, Forward, PlanId, Query, RequestId, Resource, ResourceName, Result, Step,
    StepSerial,
};
use mstar_kernels::cpu::Isa;
use mstar_kernels::{Device, TensorMut, TensorRef};

pub use bound::workspace_bound;
pub(crate) use factory::supports;
pub use factory::{PagedFactory, PagedOptions};
pub use plans::{EagerSlotKey, PlanCounts};
pub use workspace::WorkspacePool;

use self::plans::{Plans, Stored, refuse};
use self::table::{Arrays, declared};
use crate::{Capacity, Family, select_last_hidden};

/// Attention over the pages of one KV cache.
#[derive(Debug)]
pub struct PagedAttention {
    kv: KvHandle,
    options: PagedOptions,
    plans: Plans,
}

/// A cache, shown in debug output by name.
pub(crate) struct KvHandle(pub(crate) Arc<dyn PagedKv>);

impl std::fmt::Debug for KvHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvHandle({})", self.0.name())
    }
}

impl PagedAttention {
    /// The resource over the cache of `cx`.
    ///
    /// # Errors
    /// No cache, or one of latents; heads that do not divide; sinks or slopes of another number; a window that reaches
    /// further than the cache keeps; a device without kernels.
    pub fn new(cx: &BuildContext, options: PagedOptions) -> Result<PagedAttention> {
        let kv = KvHandle(kv_cache(cx)?);
        let plans = Plans::new(cx, options.cascade)?;
        if let Some(kept) = kv.0.config().retention {
            let window = plans.softmax().window_left;
            if window.is_none_or(|left| left > kept) {
                let why = format!(
                    "the cache keeps the last {kept} tokens; a window_left of at most that is needed"
                );
                return Err(refuse(&cx.name, "window_left", &why, &window));
            }
        }
        Ok(PagedAttention { kv, options, plans })
    }

    /// How often plans were made, and how often the one at hand was the right one already.
    pub fn plan_counts(&self) -> PlanCounts {
        self.plans.counts()
    }

    /// Bytes held by plans and workspaces.
    pub fn bytes(&self) -> usize {
        self.plans.bytes()
    }

    /// Bytes held by workspaces alone.
    pub fn workspace_bytes(&self) -> usize {
        self.plans.workspace_bytes()
    }
}

/// The cache of a resource that needs one, on a device that has kernels.
pub(crate) fn kv_cache(cx: &BuildContext) -> Result<Arc<dyn PagedKv>> {
    if cx.device != Device::Cpu {
        let why = "this build attends paged caches on the CPU only; say device: cpu".into();
        let error =
            mstar_kernels::Error::Unsupported { operation: "paged attention", device: cx.device, why };
        return Err(Error::backend(cx.name.as_str(), error));
    }
    let Some(kv) = &cx.kv_cache else {
        return Err(refuse(&cx.name, "kv_cache", "name the cache whose pages are attended", &"nothing"));
    };
    Ok(Arc::clone(kv))
}

/// A bucket's shape with the page ids that it must hold.
pub(crate) fn capacity(cx: &StepContext, kv: &KvConfig) -> Option<Capacity> {
    cx.bucket.map(|PaddedShape { rows, tokens }| Capacity {
        rows,
        tokens,
        pages: captured_page_capacity(PaddedShape { rows, tokens }, kv),
    })
}

/// What runs a plan, for reports: instruction set, and rows of each family.
pub(crate) fn kernel(stored: &Stored) -> String {
    let rows = stored.plan.work().rows();
    let tiled = rows.iter().filter(|row| row.family == Family::Tile as u32).count();
    format!("cpu paged, {}: {} decode rows, {tiled} tiled", Isa::current().name(), rows.len() - tiled)
}

impl Resource for PagedAttention {
    fn name(&self) -> &ResourceName {
        &self.plans.name
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        vec![self.kv.0.name().clone()]
    }

    /// Pages of the second layer on are projected from what this resource computed, so everything that changes its
    /// numbers is part of what they depend on.
    fn fingerprint(&self) -> Option<Fingerprint> {
        let (geometry, softmax, causal) = (self.plans.geometry(), self.plans.softmax(), self.options.causal);
        let mut text = format!("paged {geometry:?} causal {causal} {:08x}", softmax.sm_scale.to_bits());
        text += &format!(" {:?} {:?}", softmax.window_left, softmax.logits_soft_cap.map(f32::to_bits));
        for values in [&softmax.sinks, &softmax.alibi_slopes] {
            let bits: Option<Vec<u32>> = values.as_ref().map(|v| v.iter().map(|x| x.to_bits()).collect());
            text += &format!(" {bits:?}");
        }
        Some(Fingerprint(text.into_bytes()))
    }

    /// Nothing is kept for a request.
    fn ingest_request(&self, _: &Ingest) -> Result<()> {
        Ok(())
    }

    fn admit(&self, _: &StepContext, step: &Step) -> Result<Outcome> {
        let declared = declared(step, self.name())?;
        let refuse = |why: &str| Err(Error::Step { resource: self.name().clone(), why: why.into() });
        if declared.queries.is_some() {
            return refuse("its rows are those of its cache's plan; to bring queries name backend: cross");
        }
        if declared.context_only && !declared.masks.is_empty() {
            return refuse("a context-only plan has no keys of the step's own to mask");
        }
        let softmax = self.plans.softmax();
        if declared.context_only && (softmax.window_left.is_some() || softmax.alibi_slopes.is_some()) {
            return refuse(
                "windows and ALiBi count from the step's own tokens, which context_only leaves out",
            );
        }
        Ok(Outcome::Admitted)
    }

    fn rollback(&self, serial: StepSerial) {
        self.plans.forget(serial);
    }

    fn plan(&self, cx: &StepContext, step: &Step) -> Result<()> {
        let declared = declared(step, self.name())?;
        let config = self.kv.0.config();
        let capacity = capacity(cx, config);
        let mut masked = 0;
        for label in self.kv.0.plan_labels(cx.serial)? {
            let id = PlanId { slot: cx.slot, label, serial: cx.serial };
            let plan = self.kv.0.kv_plan(&id)?;
            let mut arrays = match declared.context_only {
                true => Arrays::context_only(&plan, config.page_size),
                false => Arrays::of_plan(&plan),
            };
            masked += arrays.add_masks(&plan, &declared.masks, self.name())?;
            let causal = self.options.causal && !declared.context_only;
            self.plans.plan(&id, &arrays.table(causal, config.max_num_pages), capacity)?;
        }
        if masked < declared.masks.len() {
            let why = format!("{} masks were declared, {masked} rows have one", declared.masks.len());
            return Err(Error::Step { resource: self.name().clone(), why });
        }
        Ok(())
    }

    fn promote(&self, cx: &StepContext, _: &Step) -> Result<Promotion> {
        // Whether the rows moved is for the cache to say; these plans are of the rows it had.
        Ok(if self.plans.has(cx.serial) { Promotion::Valid } else { Promotion::Stale })
    }

    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.plans.forget(serial);
        Ok(())
    }

    fn reset_request(&self, _: &RequestId, _: bool) -> Result<()> {
        Ok(())
    }

    fn remove_request(&self, _: &RequestId) -> Result<()> {
        Ok(())
    }

    fn build_accelerator_graph_buffers(&self, _: usize, shape: PaddedShape) -> Result<()> {
        self.plans.capture(shape);
        Ok(())
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        Vec::new()
    }
}

impl Attention for PagedAttention {
    fn requires_kv_write(&self) -> bool {
        true
    }

    fn kv_cache(&self) -> Option<&dyn PagedKv> {
        Some(&*self.kv.0)
    }

    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, fresh: Fresh<'_>, out: AttnOut<'_>) -> Result<()> {
        if fresh.is_some() {
            let why = "reads the step's keys and values from the cache; write them there first".into();
            return Err(Error::Step { resource: self.name().clone(), why });
        }
        self.plans.run(forward, &*self.kv.0, q, out)
    }

    fn work(&self, plan: &PlanId) -> Work {
        self.plans.get(plan).map(|stored| stored.work).unwrap_or_default()
    }

    fn kernel(&self, plan: &PlanId) -> Option<String> {
        self.plans.get(plan).ok().map(|stored| kernel(&stored))
    }

    fn select_last_hidden(
        &self,
        forward: &Forward<'_>,
        hidden: TensorRef<'_>,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let stored = self.plans.get(forward.plan_id())?;
        select_last_hidden(&stored.plan, forward.stream(), hidden, out)
            .map_err(|error| Error::backend(self.name().as_str(), error))
    }

    fn qo_indptr_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        self.plans.qo_indptr_buf(plan)
    }

    fn kv_len_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        self.plans.kv_len_buf(plan)
    }
}

#[cfg(test)]
mod tests;
