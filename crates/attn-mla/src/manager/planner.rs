//! How rows become plans over latents, and one layer of such a plan.

use mstar_core::attend::pages::{Planner, Plans, RowTable};
use mstar_core::attend::{BuildContext, Work};
use mstar_core::kv::{KvLayout, LayerView, PagedKv};
use mstar_core::spec::Schedule as SpecSchedule;
use mstar_core::{AttnOut, Error, Forward, Query, Result};
use mstar_kernels::cpu::Isa;

use super::workspace_bound;
use crate::{
    Capacity, Device, Family, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Planned, Schedule,
    Stream, Variant, mla_supports, run,
};

/// Makes plans of one layer's shapes and arithmetic, which follow from what a resource is built with.
#[derive(Debug)]
pub struct MlaPlanner {
    pub(super) geometry: Geometry,
    pub(super) sm_scale: f32,
    pub(super) options: PlanOptions,
}

impl MlaPlanner {
    /// For the geometry that a resource is built with.
    pub(super) fn new(cx: &BuildContext, cascade: bool) -> Result<MlaPlanner> {
        let attn = &cx.geometry;
        let KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } = attn.layout else {
            let why = "reads latents; for keys and values a head name backend: paged";
            return Err(cx.refuse("layout", why, &attn.layout));
        };
        let geometry = Geometry {
            num_qo_heads: attn.num_qo_heads,
            kv_lora_rank,
            qk_rope_head_dim,
            page_size: attn.page_size,
            q_dtype: attn.dtype,
            kv_dtype: attn.kv_dtype,
        };
        geometry.check()?;
        let softmax = &attn.softmax;
        if !softmax.sm_scale.is_finite() {
            let why = "must be finite; it follows from the width of a query before it was absorbed";
            return Err(cx.refuse("sm_scale", why, &softmax.sm_scale));
        }
        if let Some((parameter, why)) = super::factory::unsupported(softmax) {
            return Err(cx.refuse(parameter, why, softmax));
        }
        let schedule = match cx.schedule {
            SpecSchedule::Throughput => Schedule::Throughput,
            _ => Schedule::Invariant,
        };
        let options = PlanOptions {
            schedule,
            cascade,
            device: cx.device(),
            kernels: cx.kernels,
            ..PlanOptions::default()
        };
        Ok(MlaPlanner { geometry, sm_scale: softmax.sm_scale, options })
    }

    /// No plan yet, with workspaces for the largest step.
    pub(super) fn plans(self, cx: &BuildContext) -> Result<Plans<MlaPlanner>> {
        let foreseen = match cx.largest {
            Some(largest) => {
                let (workers, schedule) = (self.options.workers, self.options.schedule);
                workspace_bound(&cx.geometry, largest, workers, cx.device(), schedule)
                    .map_err(|error| Error::backend(cx.name.as_str(), error))?
            }
            None => 0,
        };
        Plans::new(cx.stream, cx.name.clone(), self, cx.largest, foreseen)?.prepared()
    }

    fn variant(&self, causal: bool) -> Variant {
        Variant { sm_scale: self.sm_scale, causal }
    }
}

impl Planner for MlaPlanner {
    type Plan = Plan;

    fn make(&self, rows: &RowTable<'_>, capacity: Option<Capacity>) -> crate::Result<Plan> {
        let options = PlanOptions { capacity, ..self.options };
        Plan::new(&self.geometry, &self.variant(rows.causal), &page_table(rows), &options)
    }

    fn remake(
        &self,
        plan: &mut Plan,
        rows: &RowTable<'_>,
        capacity: Option<Capacity>,
    ) -> crate::Result<Planned> {
        let options = PlanOptions { capacity, ..self.options };
        plan.replan(&self.geometry, &self.variant(rows.causal), &page_table(rows), &options)
    }

    fn stage(&self, plan: &mut Plan, stream: &Stream) -> crate::Result<()> {
        plan.stage(stream)
    }

    fn capture_key(&self, plan: &Plan) -> Option<u64> {
        plan.capture_key()
    }

    fn workspace_bytes(&self, plan: &Plan) -> usize {
        plan.workspace_bytes()
    }

    fn plan_bytes(&self, plan: &Plan) -> usize {
        plan.plan_bytes()
    }

    fn last_tokens<'a>(&self, plan: &'a Plan) -> &'a [i64] {
        plan.last_tokens()
    }

    /// A latent is read once for all heads, as key and as value.
    fn work(&self, rows: &RowTable<'_>) -> Work {
        let (geometry, seen) = (&self.geometry, rows.pairs(None));
        let (heads, latent) = (geometry.num_qo_heads as u64, geometry.latent_dim() as u64);
        let value = geometry.kv_lora_rank as u64;
        let q_size = geometry.q_dtype.size() as u64;
        let (slot, dtype) = geometry.slot();
        Work {
            tokens: seen.tokens,
            bytes_read: seen.keys * (slot * dtype.size()) as u64 + seen.tokens * heads * latent * q_size,
            bytes_written: seen.tokens * heads * value * q_size,
            flops: 2 * seen.pairs * heads * (latent + value),
        }
    }

    /// Instruction set, whether the shape is a specialised one, and rows of each family.
    fn kernel(&self, plan: &Plan) -> String {
        let rows = plan.work().rows();
        let spread = rows.iter().filter(|row| row.family == Family::LatentTile as u32).count();
        let Geometry { kv_lora_rank: c, qk_rope_head_dim: e, .. } = self.geometry;
        let shape = if mla_supports(c, e) { "" } else { ", any shape" };
        let runs = match self.options.device {
            Device::Cpu => format!("cpu mla, {}", Isa::current().name()),
            device => format!("{device} mla"),
        };
        format!("{runs}{shape}: {} rows of few queries, {spread} of many", rows.len() - spread)
    }
}

/// Attends one layer of `kv`. Allocates nothing.
pub(super) fn run_layer(
    plans: &Plans<MlaPlanner>,
    forward: &Forward<'_>,
    kv: &dyn PagedKv,
    q: Query<'_>,
    out: AttnOut<'_>,
) -> Result<()> {
    let stored = plans.get(forward.plan_id())?;
    let refuse = |why: String| Err(Error::Step { resource: plans.name().clone(), why });
    let Query::Absorbed { nope: q_nope, pe: q_pe } = q else {
        return refuse("takes absorbed queries, not those of a head; multiply them by W_UK first".into());
    };
    let LayerView::Mla { latent } = kv.layer(forward.layer())? else {
        return refuse(format!("the layers of {} are not latents", kv.name()));
    };
    let (inputs, outputs) = (Inputs { q_nope, q_pe, latent }, Outputs { o: out.o, lse: out.lse });
    let mut workspace = stored.workspace()?;
    plans.said(run(stored.plan(), forward.stream(), &mut workspace, inputs, outputs))
}

/// Rows as the wrapper level takes them. Masks never get here: a step that declares one is refused.
pub(super) fn page_table<'a>(rows: &RowTable<'a>) -> PageTable<'a> {
    PageTable {
        qo_indptr: rows.qo_indptr,
        kv_indptr: rows.kv_indptr,
        kv_indices: rows.kv_indices,
        kv_last_page_len: rows.kv_last_page_len,
        kv_offset: (!rows.kv_offset.is_empty()).then_some(rows.kv_offset),
        page_start: (!rows.page_start.is_empty()).then_some(rows.page_start),
        mask: None,
        num_pages: rows.num_pages,
    }
}
