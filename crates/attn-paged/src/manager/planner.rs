//! How rows become plans over keys and values a head, and one layer of such a plan.

use std::sync::Arc;

use mstar_core::attend::pages::{Planner, Plans, RowTable};
use mstar_core::attend::{BuildContext, Softmax, Work};
use mstar_core::kv::{KvLayout, LayerView, PagedKv};
use mstar_core::spec::Schedule as SpecSchedule;
use mstar_core::{AttnOut, Error, Forward, Query, Result};
use mstar_kernels::cpu::Isa;
use mstar_kernels::{Buffer, DType, Device, copy};

use super::workspace_bound;
use crate::{
    Capacity, Family, Geometry, Inputs, Mask, MaskEntries, Outputs, PageTable, Plan, PlanOptions, Planned,
    Schedule, Stream, TensorRef, Variant, run, run_scaled_in,
};

/// Makes plans of one layer's shapes and arithmetic, which follow from what a resource is built with.
#[derive(Debug)]
pub struct PagedPlanner {
    pub(crate) geometry: Geometry,
    pub(crate) softmax: Softmax,
    sinks: Option<HeadValues>,
    slopes: Option<HeadValues>,
    options: PlanOptions,
}

impl PagedPlanner {
    /// For the geometry that a resource is built with.
    pub(crate) fn new(cx: &BuildContext, cascade: bool) -> Result<PagedPlanner> {
        let attn = &cx.geometry;
        let KvLayout::Nhd { num_kv_heads, head_dim } = attn.layout else {
            let why = "reads keys and values a head; for latents name backend: mla";
            return Err(cx.refuse("layout", why, &attn.layout));
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
                Err(cx.refuse(name, &format!("expected {expected} values"), &values.len()))
            }
            _ => Ok(()),
        };
        heads("sinks", &attn.softmax.sinks, attn.num_layers * attn.num_qo_heads)?;
        heads("alibi_slopes", &attn.softmax.alibi_slopes, attn.num_qo_heads)?;
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
        let softmax = attn.softmax.clone();
        let on = |values: &Option<Arc<[f32]>>| {
            values.as_deref().map(|values| HeadValues::on(&cx.stream, values)).transpose()
        };
        let (sinks, slopes) = (on(&softmax.sinks)?, on(&softmax.alibi_slopes)?);
        let planner = PagedPlanner { geometry, softmax, sinks, slopes, options };
        planner.variant(true).check()?;
        Ok(planner)
    }

    /// No plan yet, with workspaces for the largest step.
    pub(crate) fn plans(self, cx: &BuildContext) -> Result<Plans<PagedPlanner>> {
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
        Variant {
            sm_scale: self.softmax.sm_scale,
            causal,
            window_left: self.softmax.window_left,
            logits_soft_cap: self.softmax.logits_soft_cap,
            alibi: self.softmax.alibi_slopes.is_some(),
            sinks: self.softmax.sinks.is_some(),
        }
    }
}

impl Planner for PagedPlanner {
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

    fn work(&self, rows: &RowTable<'_>) -> Work {
        let (geometry, seen) = (&self.geometry, rows.pairs(self.softmax.window_left));
        let (qo, kv) = (geometry.num_qo_heads as u64, geometry.num_kv_heads as u64);
        let widths = (geometry.head_dim_qk + geometry.head_dim_vo) as u64;
        let (q_size, kv_size) = (geometry.q_dtype.size() as u64, geometry.kv_dtype.size() as u64);
        let (q_bytes, o_bytes) = (geometry.head_dim_qk as u64 * q_size, geometry.head_dim_vo as u64 * q_size);
        let scales = if geometry.kv_dtype == DType::E4m3 { 2 * size_of::<f32>() as u64 } else { 0 };
        Work {
            tokens: seen.tokens,
            bytes_read: seen.keys * kv * (widths * kv_size + scales) + seen.tokens * qo * q_bytes,
            bytes_written: seen.tokens * qo * o_bytes,
            flops: 2 * seen.pairs * qo * widths,
        }
    }

    /// Instruction set, and rows of each family.
    fn kernel(&self, plan: &Plan) -> String {
        let rows = plan.work().rows();
        let tiled = rows.iter().filter(|row| row.family == Family::Tile as u32).count();
        let runs = match self.options.device {
            Device::Cpu => format!("cpu paged, {}", Isa::current().name()),
            device => format!("{device} paged"),
        };
        format!("{runs}: {} decode rows, {tiled} tiled", rows.len() - tiled)
    }
}

/// Attends one layer of `kv`. Allocates nothing.
pub(crate) fn run_layer(
    plans: &Plans<PagedPlanner>,
    forward: &Forward<'_>,
    kv: &dyn PagedKv,
    q: Query<'_>,
    out: AttnOut<'_>,
) -> Result<()> {
    let stored = plans.get(forward.plan_id())?;
    let refuse = |why: String| Err(Error::Step { resource: plans.name().clone(), why });
    let Query::Heads(q) = q else {
        return refuse("takes queries a head, not absorbed ones; for latents name backend: mla".into());
    };
    let (k, v, scales) = match kv.layer(forward.layer())? {
        LayerView::Nhd { k, v } => (k, v, None),
        LayerView::Fp8 { k, v, scales } => (k, v, Some(scales)),
        _ => return refuse(format!("the layers of {} are not keys and values a head", kv.name())),
    };
    let PagedPlanner { geometry, sinks, slopes, .. } = plans.planner();
    let heads = geometry.num_qo_heads;
    // `kv.layer` has refused a layer that there is not.
    let sinks = sinks.as_ref().map(|sinks| sinks.entry(forward.layer(), heads)).transpose()?;
    let slopes = slopes.as_ref().map(|slopes| slopes.entry(0, heads)).transpose()?;
    let inputs = Inputs { q, k, v, sinks, alibi_slopes: slopes };
    let outputs = Outputs { o: out.o, lse: out.lse };
    let mut workspace = stored.workspace()?;
    let (plan, stream) = (stored.plan(), forward.stream());
    plans.said(match scales {
        None => run(plan, stream, &mut workspace, inputs, outputs),
        Some(scales) => run_scaled_in(plan, stream, workspace.view()?, inputs, scales, outputs),
    })
}

/// A number a head, `[n, H]` f32, where the layers run.
#[derive(Debug)]
struct HeadValues {
    values: Buffer,
}

impl HeadValues {
    /// A copy of `values` on `stream`'s device.
    fn on(stream: &Stream, values: &[f32]) -> Result<HeadValues> {
        let shape = [values.len()];
        let mut buffer = Buffer::for_tensor_on(stream.device(), DType::F32, &shape)?;
        copy(stream, TensorRef::from_slice(values, &shape)?, buffer.tensor_mut(0, DType::F32, &shape)?)?;
        Ok(HeadValues { values: buffer })
    }

    /// `[H]`: entry `index`.
    fn entry(&self, index: usize, heads: usize) -> Result<TensorRef<'_>> {
        Ok(self.values.tensor(index * heads * DType::F32.size(), DType::F32, &[heads])?)
    }
}

/// Rows as the wrapper level takes them.
pub(crate) fn page_table<'a>(rows: &RowTable<'a>) -> PageTable<'a> {
    let mask = (!rows.mask_indptr.is_empty())
        .then_some(Mask { entries: MaskEntries::Bytes(rows.mask), indptr: rows.mask_indptr });
    PageTable {
        qo_indptr: rows.qo_indptr,
        kv_indptr: rows.kv_indptr,
        kv_indices: rows.kv_indices,
        kv_last_page_len: rows.kv_last_page_len,
        kv_offset: (!rows.kv_offset.is_empty()).then_some(rows.kv_offset),
        page_start: (!rows.page_start.is_empty()).then_some(rows.page_start),
        mask,
        num_pages: rows.num_pages,
    }
}
