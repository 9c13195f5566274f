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

use mstar_core::attend::BuildContext;
use mstar_core::attend::pages::{OverPages, Plans, capacity};
use mstar_core::kv::{KvPlan, PagedKv};
use mstar_core::resource::{Fingerprint, StepContext};
use mstar_core::step::AttentionStep;
use mstar_core::{AttnOut, Forward, PlanId, Query, Result};

pub use factory::{CrossFactory, CrossOptions};

use self::rows::{Contexts, QueryRow};
use crate::manager::planner::{PagedPlanner, run_layer};

/// Attention of a decoder's queries over the contexts of one cache.
#[derive(Debug)]
pub struct CrossAttention {
    kv: Arc<dyn PagedKv>,
    query_from: Option<Arc<dyn PagedKv>>,
    plans: Plans<PagedPlanner>,
}

impl CrossAttention {
    /// The resource over the contexts in the cache of `cx`.
    ///
    /// # Errors
    /// As [`PagedAttention::new`](crate::PagedAttention::new); a window or ALiBi, which count positions that queries and
    /// contexts do not share; queries packed from the very cache that is attended.
    pub fn new(cx: &BuildContext, options: CrossOptions) -> Result<CrossAttention> {
        let kv = cx.paged_cache()?;
        let planner = PagedPlanner::new(cx, options.cascade)?;
        let softmax = &planner.softmax;
        if let Some(window) = softmax.window_left {
            let why = "queries and contexts share no positions, so a window has no meaning";
            return Err(cx.refuse("window_left", why, &window));
        }
        if softmax.alibi_slopes.is_some() {
            let why = "queries and contexts share no positions, so ALiBi has no meaning";
            return Err(cx.refuse("alibi", why, &true));
        }
        let query_from = cx.query_from.clone();
        if let Some(from) = query_from.as_ref().filter(|from| from.name() == kv.name()) {
            let why = "packs its queries from the cache that it attends; backend: paged does that";
            return Err(cx.refuse("query_from", why, from.name()));
        }
        Ok(CrossAttention { kv, query_from, plans: planner.plans(cx)? })
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

impl OverPages for CrossAttention {
    type Planner = PagedPlanner;

    fn plans(&self) -> &Plans<PagedPlanner> {
        &self.plans
    }

    fn pages(&self) -> &Arc<dyn PagedKv> {
        &self.kv
    }

    fn queries_of(&self) -> Option<&Arc<dyn PagedKv>> {
        self.query_from.as_ref()
    }

    /// `None`: since a matched prefix may not skip this resource, no page is ever found under a key that lacks it.
    fn identity(&self) -> Option<Fingerprint> {
        None
    }

    /// The decoder's pages depend on the context, which is no part of their tokens: two requests with the same text and
    /// other contexts must not share them.
    fn skips_prefixes(&self) -> bool {
        false
    }

    /// The context is written once, through its cache, by whoever encodes it; a decoder's layer has nothing to write.
    fn reads_own_entries(&self) -> bool {
        false
    }

    fn refuses(&self, declared: &AttentionStep) -> Option<String> {
        if !declared.masks.is_empty() || declared.context_only {
            return Some("every query sees the whole context; masks and context_only do not apply".into());
        }
        let from = self.query_from.as_ref().filter(|_| declared.queries.is_some())?;
        Some(format!("its query rows are those of {}; leave `queries` out", from.name()))
    }

    fn plan_step(&self, cx: &StepContext, declared: &AttentionStep) -> Result<()> {
        let config = self.kv.config();
        let name = self.plans.name();
        let context_plans = CrossAttention::plans_of(&*self.kv, cx)?;
        let contexts = Contexts::new(&context_plans, name);
        let queries: Vec<(mstar_core::Label, Vec<QueryRow>)> = match &self.query_from {
            Some(from) => CrossAttention::plans_of(&**from, cx)?
                .iter()
                .map(|plan| (plan.id.label.clone(), rows::of_plan(plan)))
                .collect(),
            None => rows::of_step(declared.queries.as_deref().unwrap_or_default(), cx.bucket, name)?,
        };
        for (label, rows) in queries {
            let arrays = contexts.under(&rows)?;
            let id = PlanId { slot: cx.slot, label, serial: cx.serial };
            self.plans.plan(&id, &arrays.table(false, config.max_num_pages), capacity(cx, config))?;
        }
        Ok(())
    }

    fn run_planned(&self, forward: &Forward<'_>, q: Query<'_>, out: AttnOut<'_>) -> Result<()> {
        run_layer(&self.plans, forward, &*self.kv, q, out)
    }
}

#[cfg(test)]
mod tests;
