//! How rows become dense plans: what lies before a row's own tokens is its prefix, they themselves are fresh.

use mstar_core::attend::pages::{Planner, Plans, RowTable};
use mstar_core::attend::{BuildContext, Softmax, Work};
use mstar_core::kv::KvLayout;
use mstar_core::spec::Schedule as SpecSchedule;
use mstar_core::{Error, Result};
use mstar_kernels::cpu::Isa;

use super::workspace_bound;
use crate::{
    Capacity, DensePlan, Device, Geometry, PlanOptions, Planned, Prefix, PrefixSource, Schedule, Stream,
    Table, Variant,
};

/// Makes plans of one layer's shapes and arithmetic, which follow from what a resource is built with.
#[derive(Debug)]
pub struct DensePlanner {
    pub(super) geometry: Geometry,
    pub(super) softmax: Softmax,
    pub(super) source: PrefixSource,
    page_size: usize,
    options: PlanOptions,
}

impl DensePlanner {
    /// For the geometry that a resource is built with.
    pub(super) fn new(cx: &BuildContext, source: PrefixSource) -> Result<DensePlanner> {
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
            q_dtype: attn.dtype,
            kv_dtype: attn.kv_dtype,
        };
        geometry.check()?;
        if let Some((parameter, why)) = super::factory::unsupported(&attn.softmax) {
            return Err(cx.refuse(parameter, why, &attn.softmax));
        }
        let schedule = match cx.schedule {
            SpecSchedule::Throughput => Schedule::Throughput,
            _ => Schedule::Invariant,
        };
        let options = PlanOptions {
            schedule,
            cascade: false,
            device: cx.device(),
            kernels: cx.kernels,
            ..PlanOptions::default()
        };
        let (softmax, page_size) = (attn.softmax.clone(), attn.page_size);
        let planner = DensePlanner { geometry, softmax, source, page_size, options };
        planner.variant(true).check()?;
        Ok(planner)
    }

    /// No plan yet, with workspaces for the largest step.
    pub(super) fn plans(self, cx: &BuildContext) -> Result<Plans<DensePlanner>> {
        let foreseen = match cx.largest {
            Some(largest) => workspace_bound(&cx.geometry, largest, self.options.workers, cx.device())
                .map_err(|error| Error::backend(cx.name.as_str(), error))?,
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
        }
    }

    fn table<'a>(&self, rows: &RowTable<'a>, split: &'a Split) -> Table<'a> {
        let prefix = match self.source {
            PrefixSource::Gathered => Prefix::Packed { cu_p: &split.cu_p },
            PrefixSource::Pages => Prefix::Pages {
                kv_indptr: rows.kv_indptr,
                kv_indices: rows.kv_indices,
                prefix_len: &split.prefix_len,
                page_size: self.page_size,
                page_start: None,
                num_pages: rows.num_pages,
            },
        };
        Table { cu_q: rows.qo_indptr, prefix, cu_k: &split.cu_k }
    }
}

/// Rows cut where their own tokens begin.
pub(super) struct Split {
    /// `[R + 1]`: each row's prefix, packed.
    pub(super) cu_p: Vec<i32>,
    /// `[R]`.
    pub(super) prefix_len: Vec<i32>,
    /// `[R + 1]`: each row's own tokens, in the order of its queries; a padded row has none.
    pub(super) cu_k: Vec<i32>,
}

impl Split {
    pub(super) fn of(rows: &RowTable<'_>) -> crate::Result<Split> {
        let mut split = Split { cu_p: vec![0], prefix_len: Vec::new(), cu_k: vec![0] };
        for (row, &kv_len) in rows.kv_len.iter().enumerate() {
            let fresh = (rows.qo_indptr[row + 1] - rows.qo_indptr[row]).min(kv_len);
            let prefix = kv_len - fresh;
            let end = split.cu_p[row].checked_add(prefix).ok_or_else(|| crate::Error::Overflow {
                shape: rows.kv_len.iter().map(|&len| len.max(0) as usize).collect(),
            })?;
            split.cu_p.push(end);
            split.prefix_len.push(prefix);
            split.cu_k.push(split.cu_k[row] + fresh);
        }
        Ok(split)
    }
}

impl Planner for DensePlanner {
    type Plan = DensePlan;

    fn make(&self, rows: &RowTable<'_>, capacity: Option<Capacity>) -> crate::Result<DensePlan> {
        let options = PlanOptions { capacity, ..self.options };
        let split = Split::of(rows)?;
        DensePlan::new(&self.geometry, &self.variant(rows.causal), &self.table(rows, &split), &options)
    }

    fn remake(
        &self,
        plan: &mut DensePlan,
        rows: &RowTable<'_>,
        capacity: Option<Capacity>,
    ) -> crate::Result<Planned> {
        let options = PlanOptions { capacity, ..self.options };
        let split = Split::of(rows)?;
        plan.replan(&self.geometry, &self.variant(rows.causal), &self.table(rows, &split), &options)
    }

    fn stage(&self, plan: &mut DensePlan, stream: &Stream) -> crate::Result<()> {
        plan.stage(stream)
    }

    fn workspace_bytes(&self, plan: &DensePlan) -> usize {
        plan.workspace_bytes()
    }

    fn capture_key(&self, plan: &DensePlan) -> Option<u64> {
        plan.capture_key()
    }

    fn plan_bytes(&self, plan: &DensePlan) -> usize {
        plan.plan_bytes()
    }

    fn last_tokens<'a>(&self, plan: &'a DensePlan) -> &'a [i64] {
        plan.last_tokens()
    }

    fn work(&self, rows: &RowTable<'_>) -> Work {
        let (geometry, seen) = (&self.geometry, rows.pairs(self.softmax.window_left));
        let (qo, kv) = (geometry.num_qo_heads as u64, geometry.num_kv_heads as u64);
        let widths = (geometry.head_dim_qk + geometry.head_dim_vo) as u64;
        let (q_size, kv_size) = (geometry.q_dtype.size() as u64, geometry.kv_dtype.size() as u64);
        let (q_bytes, o_bytes) = (geometry.head_dim_qk as u64 * q_size, geometry.head_dim_vo as u64 * q_size);
        Work {
            tokens: seen.tokens,
            bytes_read: seen.keys * kv * widths * kv_size + seen.tokens * qo * q_bytes,
            bytes_written: seen.tokens * qo * o_bytes,
            flops: 2 * seen.pairs * qo * widths,
        }
    }

    /// Instruction set, where prefixes are read from, and rows.
    fn kernel(&self, plan: &DensePlan) -> String {
        let from = match self.source {
            PrefixSource::Gathered => "prefix gathered",
            PrefixSource::Pages => "prefix in pages",
        };
        let runs = match self.options.device {
            Device::Cpu => format!("cpu dense, {}", Isa::current().name()),
            device => format!("{device} dense"),
        };
        format!("{runs}, {from}: {} rows", plan.segments().len())
    }
}
