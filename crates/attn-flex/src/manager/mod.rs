//! The manager level: block-mask attention over a ring of frames, as a resource of a spec.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `mods` | the score and mask mods of a resource, owned |
//! | `staged` | a mask and its work for each (plan label, slot, geometry of layers), made again in place |
//! | `bound` | scratch of the largest step |
//! | `factory` | options of a spec, and the factory that the program registers |

mod bound;
mod factory;
mod mods;
mod staged;

use std::sync::Arc;

use mstar_core::attend::pages::declared;
use mstar_core::attend::{Attention, AttnOut, BuildContext, Forward, Fresh, IndexBuf, Query, Work};
use mstar_core::kv::{KvEntries, PagedKv, RING_BLOCK, RingKv, RingLayer};
use mstar_core::resource::{Fingerprint, Ingest, Outcome, PaddedShape, Promotion, StepContext};
use mstar_core::{Error, PlanId, RequestId, Resource, ResourceName, Result, Step, StepSerial};
use mstar_kernels::cpu::Isa;
use mstar_kernels::cpu::gather::gather_rows_at;
use mstar_kernels::{Device, Stream, TensorMut, TensorRef};

pub use self::bound::workspace_bound;
pub use self::factory::{FlexFactory, FlexOptions, MaskChoice, ScoreChoice};
use self::mods::{Score, Scores, rule};
use self::staged::{Recipe, Shelf};
use crate::{
    BlockMask, FlexArgs, Geometry, Inputs, KernelOptions, MaskRule, Outputs, UserMask, UserMod,
    flex_attention_masked, run,
};

/// Attention over the frames of a ring.
///
/// A layer brings its queries with the frame's keys and values: they go to the ring by its own `upsert`, which is the only
/// write there is ([`Attention::requires_kv_write`] is false), and then the layer attends what its row sees. A layer that
/// has called `upsert` itself brings queries alone.
///
/// Which blocks are seen is staged once a step, for each (plan label, slot) and each geometry of layers, from the ring's
/// closed forms: nothing of it is kept between steps but memory.
#[derive(Debug)]
pub struct FlexAttention {
    ring: Arc<dyn RingKv>,
    sm_scale: f32,
    scores: Scores,
    shelf: Shelf,
}

impl FlexAttention {
    /// The resource over the ring of `cx`.
    ///
    /// # Errors
    /// No ring; query heads that its key heads do not divide; a softmax whose soft cap, slopes or window the options do
    /// not name, or that has sinks; options that name what the model does not have; a device without kernels.
    pub fn new(cx: &BuildContext, options: FlexOptions) -> Result<FlexAttention> {
        let Some(ring) = &cx.ring else {
            let why = "attends a ring of frames; name a resource of kind ring";
            return Err(cx.refuse("kv_cache", why, &cx.kv_cache.as_ref().map(|kv| kv.name().clone())));
        };
        let config = ring.config();
        let geometry = Geometry {
            batch: 1,
            num_qo_heads: cx.geometry.num_qo_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim_qk: config.head_dim,
            head_dim_vo: config.head_dim_vo,
            q_dtype: cx.geometry.dtype,
            kv_dtype: config.dtype,
        };
        geometry.check().map_err(|error| Error::backend(cx.name.as_str(), error))?;
        let softmax = &cx.geometry.softmax;
        if !softmax.sm_scale.is_finite() {
            return Err(cx.refuse("sm_scale", "must be finite", &softmax.sm_scale));
        }
        let (scores, rule) = (Scores::new(cx, softmax, &options)?, rule(cx, softmax, &options)?);
        let recipe = Recipe {
            name: cx.name.clone(),
            geometry,
            rule,
            placed: scores.ask(),
            options: KernelOptions { device: cx.device(), ..options.kernel_options },
        };
        let rows = cx.largest.map_or(0, |largest| largest.rows);
        let foreseen = match cx.largest {
            Some(largest) => {
                let workers = options.kernel_options.workers;
                workspace_bound(&cx.geometry, config.head_dim_vo, largest, workers, cx.device())
                    .map_err(|error| Error::backend(cx.name.as_str(), error))?
            }
            None => 0,
        };
        let shelf = Shelf::new(cx.stream, recipe, rows, foreseen);
        scores.with(|score_mods| shelf.prepare((config, ring.groups()), score_mods))?;
        Ok(FlexAttention { ring: Arc::clone(ring), sm_scale: softmax.sm_scale, scores, shelf })
    }

    /// The same with a score mod of the caller's behind those of the spec, over keys numbered by the frames that hold them:
    /// of the arguments it is called with, only the distance `k_idx - (q_idx + q_offset)` means something, since rows of
    /// several worlds stand side by side.
    ///
    /// # Errors
    /// More score mods than one resource applies.
    pub fn with_score_mod(mut self, user: UserMod) -> Result<FlexAttention> {
        let scores = std::mem::take(&mut self.scores).and(Score::User(user));
        self.scores = self.said(scores)?;
        self.shelf = self.shelf.with(|recipe| recipe.placed = true);
        Ok(self)
    }

    /// The same with a mask mod of the caller's beside those of the spec: a key is seen when all of them let it be. Of its
    /// arguments, too, only the distance means something.
    ///
    /// # Errors
    /// More mask mods than hold together.
    pub fn with_mask_mod(mut self, user: UserMask) -> Result<FlexAttention> {
        let rule = MaskRule::all([self.shelf.recipe().rule.rule.clone(), MaskRule::User(user)]);
        let rule = self.said(rule)?;
        self.shelf = self.shelf.with(|recipe| recipe.rule.rule = rule);
        Ok(self)
    }

    /// Whether a call with this plan needs to be told, token by token, what is visible: when no mask is staged for it.
    /// [`FlexAttention::attend`] takes such calls.
    pub fn needs_token_visibility(&self, plan: &PlanId) -> bool {
        self.shelf.get(plan).is_err()
    }

    /// One layer's attention over a ring view outside any plan: `q` `[B, H, T, D]` over `k` `[B, G, M, D]` and `v`
    /// `[B, G, M, Dv]`, `M` being whole blocks, of which every query sees those where `visible` `[M]` is true, into `o`
    /// `[B, H, T, Dv]`. It plans and allocates; score mods see stored indices.
    ///
    /// # Errors
    /// A `visible` that is not block-aligned; what [`flex_attention_masked`] refuses.
    #[allow(clippy::too_many_arguments, reason = "the tensors of one attention call and its mask")]
    pub fn attend(
        &self,
        stream: &Stream,
        q: TensorRef<'_>,
        k: TensorRef<'_>,
        v: TensorRef<'_>,
        visible: &[bool],
        enable_gqa: bool,
        o: TensorMut<'_>,
    ) -> Result<()> {
        let q_len = q.shape().get(2).copied().unwrap_or(0);
        let mask = self.said(BlockMask::written(q_len, RING_BLOCK, visible))?;
        self.scores.with(|score_mods| {
            let args = FlexArgs {
                score_mods,
                block_mask: Some(&mask),
                scale: Some(self.sm_scale),
                enable_gqa,
                kernel_options: self.shelf.recipe().options,
                ..FlexArgs::default()
            };
            self.said(flex_attention_masked(stream, q, k, v, &args, o)).map(|_| ())
        })
    }

    /// Host bytes of plans and scratch.
    pub fn bytes(&self) -> usize {
        self.shelf.bytes()
    }

    fn refuse<T>(&self, why: impl Into<String>) -> Result<T> {
        Err(Error::Step { resource: self.name().clone(), why: why.into() })
    }

    fn said<T>(&self, result: mstar_kernels::Result<T>) -> Result<T> {
        result.map_err(|error| Error::backend(self.name().as_str(), error))
    }
}

impl Resource for FlexAttention {
    fn name(&self) -> &ResourceName {
        &self.shelf.recipe().name
    }

    fn depends_on(&self) -> Vec<ResourceName> {
        vec![self.ring.name().clone()]
    }

    /// What layers after the first store follows from what this resource computed, so everything that changes its numbers
    /// is part of it.
    fn fingerprint(&self) -> Option<Fingerprint> {
        let Recipe { geometry, rule, .. } = self.shelf.recipe();
        let text = format!("flex {geometry:?} {rule:?} {:?} {:08x}", self.scores, self.sm_scale.to_bits());
        Some(Fingerprint(text.into_bytes()))
    }

    /// Nothing is kept for a request.
    fn ingest_request(&self, _: &Ingest) -> Result<()> {
        Ok(())
    }

    fn admit(&self, _: &StepContext, step: &Step) -> Result<Outcome> {
        let declared = declared(step, self.name())?;
        if declared.queries.is_some() || declared.context_only || !declared.masks.is_empty() {
            return self.refuse("its rows are the ring's passes; it takes no queries, context_only or masks");
        }
        Ok(Outcome::Admitted)
    }

    fn rollback(&self, serial: StepSerial) {
        self.shelf.forget(serial);
    }

    fn plan(&self, cx: &StepContext, _: &Step) -> Result<()> {
        for label in self.ring.plan_labels(cx.serial)? {
            let plan = self.ring.ring_plan(&PlanId { slot: cx.slot, label, serial: cx.serial })?;
            let layers = (self.ring.config(), self.ring.groups());
            let captured = cx.bucket.is_some();
            self.scores.with(|score_mods| self.shelf.stage(&plan, layers, score_mods, captured))?;
        }
        Ok(())
    }

    /// Whether worlds moved is for the ring to say; these plans are of the passes it had.
    fn promote(&self, cx: &StepContext, _: &Step) -> Result<Promotion> {
        let planned = self.ring.plan_labels(cx.serial)?.is_empty() || self.shelf.has(cx.serial);
        Ok(if planned { Promotion::Valid } else { Promotion::Stale })
    }

    fn commit(&self, serial: StepSerial, _: &Step) -> Result<()> {
        self.shelf.forget(serial);
        Ok(())
    }

    fn reset_request(&self, _: &RequestId, _: bool) -> Result<()> {
        Ok(())
    }

    fn remove_request(&self, _: &RequestId) -> Result<()> {
        Ok(())
    }

    /// Plans made from then on have room for the rows of `shape`; what was made stays as it is. What a ring shows grows, and then
    /// changes from frame to frame: of that a captured region knows nothing.
    fn build_accelerator_graph_buffers(&self, _: usize, shape: PaddedShape) -> Result<()> {
        self.shelf.room_for(shape.rows);
        Ok(())
    }

    fn tracked_requests(&self) -> Vec<RequestId> {
        Vec::new()
    }
}

impl Attention for FlexAttention {
    /// The ring's `upsert` is the write.
    fn requires_kv_write(&self) -> bool {
        false
    }

    fn kv_cache(&self) -> Option<&dyn PagedKv> {
        None
    }

    /// Queries are `[T, H, D]` in the order of the ring plan's rows; `fresh` is the frames' keys and values, or `None` when
    /// the layer has called `upsert` itself.
    fn run(&self, forward: &mut Forward<'_>, q: Query<'_>, fresh: Fresh<'_>, out: AttnOut<'_>) -> Result<()> {
        let (id, layer) = (forward.plan_id(), forward.layer());
        let staged = self.shelf.get(id)?;
        let Query::Heads(q) = q else {
            return self.refuse("takes queries a head, not absorbed ones");
        };
        let groups = self.ring.groups();
        let Some(&group) = groups.of_layer.get(layer) else {
            return self.refuse(format!(
                "layer {layer}: {} has {} layers",
                self.ring.name(),
                groups.of_layer.len()
            ));
        };
        for (tensor, got, axes) in [("q", q.rank(), 3), ("o", out.o.rank(), 3)] {
            if got != axes {
                return self.refuse(format!("{tensor} has {got} axes; a packed batch of heads has {axes}"));
            }
        }
        if out.lse.as_ref().is_some_and(|lse| lse.rank() != 2) {
            return self.refuse("lse is [T, H]");
        }
        let RingLayer { k, v } = match fresh {
            None => self.ring.layer(layer)?,
            Some(KvEntries::Nhd { k, v }) => self.ring.upsert(id, layer, k, v, forward.stream())?.layer,
            Some(_) => return self.refuse("a ring holds keys and values a head, not latents"),
        };
        // Packed rows are one batch whose heads lie innermost.
        let outputs = Outputs {
            o: out.o.transpose(0, 1).insert_axis(0),
            lse: out.lse.map(|lse| lse.transpose(0, 1).insert_axis(0)),
            max_scores: None,
        };
        let mut workspace = staged.workspace()?;
        self.scores.with(|score_mods| {
            let inputs = Inputs {
                q: q.transpose(0, 1).insert_axis(0),
                k: k.transpose(0, 1).insert_axis(0),
                v: v.transpose(0, 1).insert_axis(0),
                scale: Some(self.sm_scale),
                score_mods,
            };
            self.said(run(staged.plan(group), forward.stream(), &mut workspace, inputs, outputs))
        })
    }

    /// Of the mean layer: those of one geometry see as much as each other, those of another do not.
    fn work(&self, plan: &PlanId) -> Work {
        self.shelf.get(plan).map(|staged| staged.work).unwrap_or_default()
    }

    fn capture_key(&self, plan: &PlanId) -> Option<u64> {
        self.shelf.get(plan).ok()?.capture_key()
    }

    /// The ring's `upsert`, whose bookkeeping a replay does not repeat.
    fn write_fresh(&self, forward: &Forward<'_>, fresh: KvEntries<'_>) -> Result<bool> {
        let KvEntries::Nhd { k, v } = fresh else {
            return self.refuse("a ring holds keys and values a head, not latents");
        };
        self.ring.upsert(forward.plan_id(), forward.layer(), k, v, forward.stream())?;
        Ok(true)
    }

    fn kernel(&self, plan: &PlanId) -> Option<String> {
        let staged = self.shelf.get(plan).ok()?;
        let groups = self.ring.groups().geometries.len();
        let rows = staged.plan(0).work().rows().len();
        let runs = match self.shelf.recipe().options.device {
            Device::Cpu => format!("cpu flex, {}", Isa::current().name()),
            device => format!("{device} flex"),
        };
        Some(format!("{runs}: {rows} rows under {groups} masks"))
    }

    fn select_last_hidden(
        &self,
        forward: &Forward<'_>,
        hidden: TensorRef<'_>,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let staged = self.shelf.get(forward.plan_id())?;
        self.said(gather_rows_at(forward.stream(), hidden, staged.last_tokens()?, out))
    }

    fn qo_indptr_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        Ok(self.shelf.get(plan)?.qo_indptr.clone())
    }

    /// Keys that each row sees in the ring's first layer.
    fn kv_len_buf(&self, plan: &PlanId) -> Result<IndexBuf> {
        Ok(self.shelf.get(plan)?.kv_len.clone())
    }
}
