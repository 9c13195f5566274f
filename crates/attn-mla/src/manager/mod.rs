//! The manager level: latent attention as a resource of a spec.
//!
//! Rows, plans and their storage are those of every backend over pages (`mstar_core::attend::pages`); here is what is
//! latent attention's own.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `planner` | rows to a wrapper-level plan; one layer of it |
//! | `bound` | scratch of the largest step |
//! | `factory` | options of a spec, and the factory that the program registers |

mod bound;
mod factory;
mod planner;

use std::sync::Arc;

use mstar_core::attend::BuildContext;
use mstar_core::attend::pages::{OverPages, Plans};
use mstar_core::kv::PagedKv;
use mstar_core::resource::{Fingerprint, StepContext};
use mstar_core::step::AttentionStep;
use mstar_core::{AttnOut, Forward, Query, Result};

pub use bound::workspace_bound;
pub use factory::{MlaFactory, MlaOptions, mla_supports};
pub use planner::MlaPlanner;

use self::planner::run_layer;

/// Attention of absorbed queries over the latents of one KV cache.
///
/// A layer writes the step's latents through the cache first (`requires_kv_write`), then brings
/// [`Query::Absorbed`]. A step that says `context_only` plans each row's queries, of the step's own segments, over what
/// was stored before it; `kv_len_buf` is then where the step's entries start, and [`merge`](crate::merge) joins the
/// result with attention over those.
#[derive(Debug)]
pub struct MlaAttention {
    kv: Arc<dyn PagedKv>,
    options: MlaOptions,
    plans: Plans<MlaPlanner>,
}

impl MlaAttention {
    /// The resource over the cache of `cx`.
    ///
    /// # Errors
    /// No cache, or one of keys and values a head; a softmax with a window, soft cap, sinks or ALiBi, which absorbed
    /// latents do not have; a cache that gives pages back; a device without kernels.
    pub fn new(cx: &BuildContext, options: MlaOptions) -> Result<MlaAttention> {
        let kv = cx.paged_cache()?;
        let planner = MlaPlanner::new(cx, options.cascade)?;
        if let Some(kept) = kv.config().retention {
            let why = "a query sees every key of its stream, so that the cache must keep them; leave it out";
            return Err(cx.refuse("retention", why, &kept));
        }
        Ok(MlaAttention { kv, options, plans: planner.plans(cx)? })
    }

    /// Whether a kernel specialised for the cache's shape serves the plans; any other shape is served by one that takes
    /// every shape, as right and slower. Either can be captured.
    pub fn uses_kernel(&self) -> bool {
        let geometry = &self.plans.planner().geometry;
        mla_supports(geometry.kv_lora_rank, geometry.qk_rope_head_dim)
    }
}

impl OverPages for MlaAttention {
    type Planner = MlaPlanner;

    fn plans(&self) -> &Plans<MlaPlanner> {
        &self.plans
    }

    fn pages(&self) -> &Arc<dyn PagedKv> {
        &self.kv
    }

    /// Pages of the second layer on are projected from what this resource computed, so everything that changes its
    /// numbers is part of what they depend on.
    fn identity(&self) -> Option<Fingerprint> {
        let MlaPlanner { geometry, sm_scale, options } = self.plans.planner();
        let kernels = options.kernels.name();
        let text =
            format!("mla {geometry:?} causal {} {:08x} {kernels}", self.options.causal, sm_scale.to_bits());
        Some(Fingerprint(text.into_bytes()))
    }

    fn refuses(&self, declared: &AttentionStep) -> Option<String> {
        if declared.queries.is_some() {
            return Some(
                "its rows are those of its cache's plan; it takes no queries of another stream".into(),
            );
        }
        let masked = !declared.masks.is_empty();
        masked
            .then(|| "latent attention takes no custom masks; for trees of drafts name backend: paged".into())
    }

    fn plan_step(&self, cx: &StepContext, declared: &AttentionStep) -> Result<()> {
        self.plans.plan_cache(&*self.kv, cx, declared, self.options.causal)
    }

    fn run_planned(&self, forward: &Forward<'_>, q: Query<'_>, out: AttnOut<'_>) -> Result<()> {
        run_layer(&self.plans, forward, &*self.kv, q, out)
    }
}
