//! The resource: everything that backends over pages do alike.

use std::fmt::Debug;
use std::sync::Arc;

use mstar_kernels::cpu::gather::gather_rows_at;
use mstar_kernels::{TensorMut, TensorRef};

use super::{Planner, Plans, declared, key_of};
use crate::attend::{Attention, AttnOut, Forward, Fresh, IndexBuf, Query, Work};
use crate::kv::PagedKv;
use crate::resource::{Fingerprint, Ingest, Outcome, PaddedShape, Promotion, StepContext};
use crate::step::AttentionStep;
use crate::{Error, PlanId, RequestId, Resource, ResourceName, Result, Step, StepSerial};

/// A backend that attends the pages of one cache, with a plan for each label of a step. Whatever implements this is a
/// [`Resource`] and an [`Attention`]: it keeps nothing of a request, so that a step leaves no trace but its plans, and
/// clearing one (a preplan among them) is forgetting its serial.
pub trait OverPages: Debug + Send + Sync {
    /// What makes its plans.
    type Planner: Planner;

    /// Its plans.
    fn plans(&self) -> &Plans<Self::Planner>;

    /// The cache that is attended.
    fn pages(&self) -> &Arc<dyn PagedKv>;

    /// The cache whose plan packs the queries, where that is another.
    fn queries_of(&self) -> Option<&Arc<dyn PagedKv>> {
        None
    }

    /// What a stored page depends on because of this resource, as [`Resource::fingerprint`].
    fn identity(&self) -> Option<Fingerprint>;

    /// As [`Resource::prefix_skip_safe`].
    fn skips_prefixes(&self) -> bool {
        true
    }

    /// As [`Attention::requires_kv_write`]. The step's entries never come through [`OverPages::run_planned`].
    fn reads_own_entries(&self) -> bool {
        true
    }

    /// Why a step that says this to it could never run; `None` when it can.
    fn refuses(&self, declared: &AttentionStep) -> Option<String>;

    /// Plans an admitted step.
    ///
    /// # Errors
    /// Rows that are refused.
    fn plan_step(&self, cx: &StepContext, declared: &AttentionStep) -> Result<()>;

    /// Attends one layer of a planned step. Allocates nothing.
    ///
    /// # Errors
    /// As [`Attention::run`].
    fn run_planned(&self, forward: &Forward<'_>, q: Query<'_>, out: AttnOut<'_>) -> Result<()>;
}

fn refuse<T>(resource: &ResourceName, why: impl Into<String>) -> Result<T> {
    Err(Error::Step { resource: resource.clone(), why: why.into() })
}

impl<B: OverPages> Resource for B {
    fn name(&self) -> &ResourceName {
        self.plans().name()
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        let queries = self.queries_of().map(|from| from.name().clone());
        std::iter::once(self.pages().name().clone()).chain(queries).collect()
    }

    fn fingerprint(&self) -> Option<Fingerprint> {
        self.identity()
    }

    fn prefix_skip_safe(&self) -> bool {
        self.skips_prefixes()
    }

    /// Nothing is kept for a request.
    fn ingest_request(&self, _: &Ingest) -> Result<()> {
        Ok(())
    }

    fn admit(&self, _: &StepContext, step: &Step) -> Result<Outcome> {
        match self.refuses(&declared(step, self.plans().name())?) {
            Some(why) => refuse(self.plans().name(), why),
            None => Ok(Outcome::Admitted),
        }
    }

    fn rollback(&self, serial: StepSerial) {
        self.plans().forget(serial);
    }

    fn plan(&self, cx: &StepContext, step: &Step) -> Result<()> {
        self.plan_step(cx, &declared(step, self.plans().name())?)
    }

    /// Whether the rows moved is for the cache to say; these plans are of the rows it had.
    fn promote(&self, cx: &StepContext, _: &Step) -> Result<Promotion> {
        Ok(if self.plans().has(cx.serial) { Promotion::Valid } else { Promotion::Stale })
    }

    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.plans().forget(serial);
        Ok(())
    }

    fn reset_request(&self, _: &RequestId, _: bool) -> Result<()> {
        Ok(())
    }

    fn remove_request(&self, _: &RequestId) -> Result<()> {
        Ok(())
    }

    /// A run on the CPU reads the plan itself and returns when it is done; on a device what is staged for a later step is
    /// enqueued behind the runs that read what was there. Nothing is overwritten while it is read.
    fn force_double_buffer(&self) -> bool {
        false
    }

    fn build_accelerator_graph_buffers(&self, _: usize, shape: PaddedShape) -> Result<()> {
        self.plans().capture(shape);
        Ok(())
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        Vec::new()
    }
}

impl<B: OverPages> Attention for B {
    fn requires_kv_write(&self) -> bool {
        self.reads_own_entries()
    }

    fn kv_cache(&self) -> Option<&dyn PagedKv> {
        Some(&**self.pages())
    }

    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, fresh: Fresh<'_>, out: AttnOut<'_>) -> Result<()> {
        if fresh.is_some() {
            let why = match self.reads_own_entries() {
                true => "reads the step's entries from the cache; write them there first",
                false => "attends a context written once through its cache; a layer brings queries alone",
            };
            return refuse(self.plans().name(), why);
        }
        self.run_planned(forward, q, out)
    }

    fn work(&self, plan: &PlanId) -> Work {
        self.plans().get(plan).map(|stored| stored.work()).unwrap_or_default()
    }

    fn kernel(&self, plan: &PlanId) -> Option<String> {
        self.plans().get(plan).ok().map(|stored| self.plans().planner().kernel(stored.plan()))
    }

    fn capture_key(&self, plan: &PlanId) -> Option<u64> {
        let of_plan = self.plans().capture_key(plan)?;
        let slots = if self.reads_own_entries() { self.pages().capture_key(plan)? } else { 0 };
        Some(key_of(&[of_plan, slots]))
    }

    fn select_last_hidden(
        &self,
        forward: &Forward<'_>,
        hidden: TensorRef<'_>,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let stored = self.plans().get(forward.plan_id())?;
        self.plans().said(gather_rows_at(forward.stream(), hidden, stored.last_tokens()?, out))
    }

    fn qo_indptr_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        Ok(self.plans().get(plan)?.qo_indptr().clone())
    }

    fn kv_len_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        Ok(self.plans().get(plan)?.kv_len().clone())
    }
}
