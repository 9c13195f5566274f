//! Cross-attention: queries of one sequence over the keys of another, written once.
//!
//! An encoder's states (a context) are written to a cache of their own, once; then every query of the decoder sees all of
//! them: no mask, no growth. A step declares a zero-span read of each request's context in that cache. Its query rows
//! are those of another cache's plan (`query_from`, the decoder's own cache), or the step brings them
//! ([`AttentionStep::queries`](mstar_core::step::AttentionStep)). While neither rows nor contexts change, as in a decode
//! loop of a fixed batch, the plan of the step before is kept.

mod factory;
mod rows;

use std::sync::Arc;

use mstar_core::attend::{BuildContext, Fresh, IndexBuf, Work};
use mstar_core::kv::{KvPlan, PagedKv};
use mstar_core::resource::{Fingerprint, Ingest, Outcome, PaddedShape, Promotion, StepContext};
use mstar_core::{
    Attention, AttnOut, Error, Forward, PlanId, Query, RequestId, Resource, ResourceName, Result, Step,
    StepSerial,
};
use mstar_kernels::{TensorMut, TensorRef};

pub use factory::{CrossFactory, CrossOptions};

use self::rows::{Contexts, QueryRow};
use crate::manager::plans::{Plans, refuse};
use crate::manager::table::declared;
use crate::manager::{KvHandle, PlanCounts, capacity, kernel, kv_cache};
use crate::select_last_hidden;

/// Attention of a decoder's queries over the contexts of one cache.
#[derive(Debug)]
pub struct CrossAttention {
    kv: KvHandle,
    query_from: Option<KvHandle>,
    plans: Plans,
}

impl CrossAttention {
    /// The resource over the contexts in the cache of `cx`.
    ///
    /// # Errors
    /// As [`PagedAttention::new`](crate::PagedAttention::new); a window or ALiBi, which count positions that queries and
    /// contexts do not share; queries packed from the very cache that is attended.
    pub fn new(cx: &BuildContext, options: CrossOptions) -> Result<CrossAttention> {
        let kv = KvHandle(kv_cache(cx)?);
        let plans = Plans::new(cx, options.cascade)?;
        let softmax = plans.softmax();
        if let Some(window) = softmax.window_left {
            let why = "queries and contexts share no positions, so a window has no meaning";
            return Err(refuse(&cx.name, "window_left", why, &window));
        }
        if softmax.alibi_slopes.is_some() {
            let why = "queries and contexts share no positions, so ALiBi has no meaning";
            return Err(refuse(&cx.name, "alibi", why, &true));
        }
        let query_from = cx.query_from.clone().map(KvHandle);
        if let Some(from) = query_from.as_ref().filter(|from| from.0.name() == kv.0.name()) {
            let why = "packs its queries from the cache that it attends; backend: paged does that";
            return Err(refuse(&cx.name, "query_from", why, from.0.name()));
        }
        Ok(CrossAttention { kv, query_from, plans })
    }

    /// How often plans were made, and how often the one at hand was the right one already.
    pub fn plan_counts(&self) -> PlanCounts {
        self.plans.counts()
    }

    /// Bytes held by plans and workspaces.
    pub fn bytes(&self) -> usize {
        self.plans.bytes()
    }

    fn refuse<T>(&self, why: impl Into<String>) -> Result<T> {
        Err(Error::Step { resource: self.name().clone(), why: why.into() })
    }

    /// The plans of a cache in this step.
    fn plans_of(kv: &dyn PagedKv, cx: &StepContext) -> Result<Vec<Arc<KvPlan>>> {
        let labels = kv.plan_labels(cx.serial)?;
        labels
            .into_iter()
            .map(|label| kv.kv_plan(&PlanId { slot: cx.slot, label, serial: cx.serial }))
            .collect()
    }
}

impl Resource for CrossAttention {
    fn name(&self) -> &ResourceName {
        &self.plans.name
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        let from = self.query_from.iter().map(|from| from.0.name().clone());
        std::iter::once(self.kv.0.name().clone()).chain(from).collect()
    }

    /// `None`: since a matched prefix may not skip this resource, no page is ever found under a key that lacks it.
    fn fingerprint(&self) -> Option<Fingerprint> {
        None
    }

    /// The decoder's pages depend on the context, which is no part of their tokens: two requests with the same text and
    /// other contexts must not share them.
    fn prefix_skip_safe(&self) -> bool {
        false
    }

    /// Nothing is kept for a request.
    fn ingest_request(&self, _: &Ingest) -> Result<()> {
        Ok(())
    }

    fn admit(&self, _: &StepContext, step: &Step) -> Result<Outcome> {
        let declared = declared(step, self.name())?;
        if !declared.masks.is_empty() || declared.context_only {
            return self.refuse("every query sees the whole context; masks and context_only do not apply");
        }
        match (&self.query_from, &declared.queries) {
            (Some(from), Some(_)) => {
                self.refuse(format!("its query rows are those of {}; leave `queries` out", from.0.name()))
            }
            _ => Ok(Outcome::Admitted),
        }
    }

    fn rollback(&self, serial: StepSerial) {
        self.plans.forget(serial);
    }

    fn plan(&self, cx: &StepContext, step: &Step) -> Result<()> {
        let config = self.kv.0.config();
        let context_plans = CrossAttention::plans_of(&*self.kv.0, cx)?;
        let contexts = Contexts::new(&context_plans, self.name());
        let queries: Vec<(mstar_core::Label, Vec<QueryRow>)> = match &self.query_from {
            Some(from) => CrossAttention::plans_of(&*from.0, cx)?
                .iter()
                .map(|plan| (plan.id.label.clone(), rows::of_plan(plan)))
                .collect(),
            None => {
                let declared = declared(step, self.name())?;
                rows::of_step(declared.queries.as_deref().unwrap_or_default(), cx.bucket, self.name())?
            }
        };
        for (label, rows) in queries {
            let arrays = contexts.under(&rows)?;
            let id = PlanId { slot: cx.slot, label, serial: cx.serial };
            self.plans.plan(&id, &arrays.table(false, config.max_num_pages), capacity(cx, config))?;
        }
        Ok(())
    }

    fn promote(&self, cx: &StepContext, _: &Step) -> Result<Promotion> {
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

impl Attention for CrossAttention {
    /// The context is written once, through its cache, by whoever encodes it; a decoder's layer has nothing to write.
    fn requires_kv_write(&self) -> bool {
        false
    }

    fn kv_cache(&self) -> Option<&dyn PagedKv> {
        Some(&*self.kv.0)
    }

    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, fresh: Fresh<'_>, out: AttnOut<'_>) -> Result<()> {
        if fresh.is_some() {
            return self
                .refuse("attends a context written once through its cache; a layer brings queries alone");
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
