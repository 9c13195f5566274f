//! The manager level: paged attention as a resource of a spec.
//!
//! Rows, plans and their storage are those of every backend over pages (`mstar_core::attend::pages`); here is what is
//! paged attention's own.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `planner` | rows to a wrapper-level plan; one layer of it |
//! | `bound` | scratch of the largest step |
//! | `factory` | options of a spec, and the factory that the program registers |

mod bound;
mod factory;
pub(crate) mod planner;

use std::sync::Arc;

use mstar_core::attend::BuildContext;
use mstar_core::attend::pages::{OverPages, Plans};
use mstar_core::kv::PagedKv;
use mstar_core::resource::{Fingerprint, StepContext};
use mstar_core::step::AttentionStep;
use mstar_core::{AttnOut, Forward, Query, Result};

pub use bound::workspace_bound;
pub(crate) use factory::supports;
pub use factory::{PagedFactory, PagedOptions};
pub use planner::PagedPlanner;

use self::planner::run_layer;

/// Attention over the pages of one KV cache.
#[derive(Debug)]
pub struct PagedAttention {
    kv: Arc<dyn PagedKv>,
    options: PagedOptions,
    plans: Plans<PagedPlanner>,
}

impl PagedAttention {
    /// The resource over the cache of `cx`.
    ///
    /// # Errors
    /// No cache, or one of latents; heads that do not divide; sinks or slopes of another number; a window that reaches
    /// further than the cache keeps; a device without kernels.
    pub fn new(cx: &BuildContext, options: PagedOptions) -> Result<PagedAttention> {
        let kv = cx.paged_cache()?;
        let planner = PagedPlanner::new(cx, options.cascade)?;
        if let Some(kept) = kv.config().retention {
            let window = planner.softmax.window_left;
            if window.is_none_or(|left| left > kept) {
                let why = format!(
                    "the cache keeps the last {kept} tokens; a window_left of at most that is needed"
                );
                return Err(cx.refuse("window_left", &why, &window));
            }
        }
        Ok(PagedAttention { kv, options, plans: planner.plans(cx)? })
    }
}

impl OverPages for PagedAttention {
    type Planner = PagedPlanner;

    fn plans(&self) -> &Plans<PagedPlanner> {
        &self.plans
    }

    fn pages(&self) -> &Arc<dyn PagedKv> {
        &self.kv
    }

    /// Pages of the second layer on are projected from what this resource computed, so everything that changes its
    /// numbers is part of what they depend on.
    fn identity(&self) -> Option<Fingerprint> {
        let PagedPlanner { geometry, softmax, .. } = self.plans.planner();
        let causal = self.options.causal;
        let mut text = format!("paged {geometry:?} causal {causal} {:08x}", softmax.sm_scale.to_bits());
        text += &format!(" {:?} {:?}", softmax.window_left, softmax.logits_soft_cap.map(f32::to_bits));
        for values in [&softmax.sinks, &softmax.alibi_slopes] {
            let bits: Option<Vec<u32>> = values.as_ref().map(|v| v.iter().map(|x| x.to_bits()).collect());
            text += &format!(" {bits:?}");
        }
        Some(Fingerprint(text.into_bytes()))
    }

    fn refuses(&self, declared: &AttentionStep) -> Option<String> {
        if declared.queries.is_some() {
            return Some(
                "its rows are those of its cache's plan; to bring queries name backend: cross".into(),
            );
        }
        if declared.context_only && !declared.masks.is_empty() {
            return Some("a context-only plan has no keys of the step's own to mask".into());
        }
        let softmax = &self.plans.planner().softmax;
        let relative = softmax.window_left.is_some() || softmax.alibi_slopes.is_some();
        (declared.context_only && relative).then(|| {
            "windows and ALiBi count from the step's own tokens, which context_only leaves out".into()
        })
    }

    fn plan_step(&self, cx: &StepContext, declared: &AttentionStep) -> Result<()> {
        self.plans.plan_cache(&*self.kv, cx, declared, self.options.causal)
    }

    fn run_planned(&self, forward: &Forward<'_>, q: Query<'_>, out: AttnOut<'_>) -> Result<()> {
        run_layer(&self.plans, forward, &*self.kv, q, out)
    }
}

#[cfg(test)]
mod tests;
