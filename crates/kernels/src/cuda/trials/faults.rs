//! Faults of others that need a device to show, each named after its entry in the list of faults.

mod blocks;
mod far;
mod heads;
mod sparse;

use crate::cuda::{Context, Graph, capture};
use crate::paged::{AttendParams, Geometry, PageTable, Variant, attend};
use crate::plan::{Capacity, Heads, Plan, PlanOptions};
use crate::{Buffer, DType, Error, Result, Stream};

use super::memory::{Numbers, floats, put, take};
use super::{DEVICE, NAN, stream};

/// Numbers as elements of a dtype.
fn encoded(dtype: DType, numbers: &[f32]) -> Vec<u8> {
    let mut to = Numbers::filled(dtype, numbers.len(), 0);
    to.set_all(0, numbers.len(), |i| numbers[i]);
    to.bytes
}

fn is_emulated() -> bool {
    Context::of(DEVICE).is_ok_and(Context::is_emulated)
}

/// A layer over pages whose every number a test gives.
struct Paged {
    geometry: Geometry,
    variant: Variant,
    pages: usize,
    k: Buffer,
    v: Buffer,
}

/// A batch: `(q_len, kv_len)` and pages a row.
#[derive(Clone, Debug, Default)]
struct Rows {
    qo: Vec<i32>,
    indptr: Vec<i32>,
    indices: Vec<i32>,
    last: Vec<i32>,
}

impl Rows {
    fn of(page_size: usize, rows: &[(usize, usize, &[i32])]) -> Rows {
        let mut to = Rows { qo: vec![0], indptr: vec![0], ..Rows::default() };
        for &(q, kv, pages) in rows {
            to.qo.push(to.qo[to.qo.len() - 1] + q as i32);
            to.indices.extend(&pages[..kv.div_ceil(page_size)]);
            to.indptr.push(to.indices.len() as i32);
            to.last.push(if kv == 0 { 0 } else { ((kv - 1) % page_size + 1) as i32 });
        }
        to
    }

    fn table(&self, num_pages: usize) -> PageTable<'_> {
        PageTable {
            qo_indptr: &self.qo,
            kv_indptr: &self.indptr,
            kv_indices: &self.indices,
            kv_last_page_len: &self.last,
            num_pages,
            ..PageTable::default()
        }
    }
}

/// What a slot of a graph has: a plan, and buffers that stay.
struct Slot {
    plan: Plan<Heads>,
    q: Buffer,
    o: Buffer,
    lse: Buffer,
    workspace: Buffer,
    graph: Option<Graph>,
}

impl Paged {
    /// Keys and values `[P, S, G, D]` by page, slot, head and lane; `None` is NaN.
    fn new(
        stream: &Stream,
        geometry: Geometry,
        variant: Variant,
        pages: usize,
        number: impl Fn(bool, usize, usize, usize) -> Option<f32>,
    ) -> Paged {
        let Geometry { num_kv_heads: g, head_dim_qk: d, head_dim_vo: dv, page_size: s, .. } = geometry;
        let pool = |is_value: bool, width: usize| {
            let all: Vec<f32> = (0..pages * s * g * width)
                .map(|at| {
                    let (slot, head) = (at / width / g, at / width % g);
                    number(is_value, slot / s, slot % s, head).unwrap_or(f32::NAN)
                })
                .collect();
            put(stream, &encoded(geometry.kv_dtype, &all))
        };
        Paged { geometry, variant, pages, k: pool(false, d), v: pool(true, dv) }
    }

    fn slot(&self, stream: &Stream, rows: &Rows, capacity: Option<Capacity>) -> Result<Slot> {
        let options = PlanOptions { device: DEVICE, capacity, ..PlanOptions::default() };
        let plan = Plan::new(&self.geometry, &self.variant, &rows.table(self.pages), &options)?;
        let Geometry { num_qo_heads: h, head_dim_qk: d, head_dim_vo: dv, q_dtype, .. } = self.geometry;
        let (tokens, bytes) = (plan.num_tokens(), plan.workspace_bytes());
        let filled = |len: usize, byte| put(stream, &vec![byte; len.max(1)]);
        // Queries of ones: what keys say is each score.
        let ones = encoded(q_dtype, &vec![1.0; tokens * h * d]);
        Ok(Slot {
            plan,
            q: put(stream, &ones),
            o: filled(tokens * h * dv * q_dtype.size(), NAN),
            lse: filled(tokens * h * 4, NAN),
            workspace: filled(bytes, NAN),
            graph: None,
        })
    }

    fn launch(&self, stream: &Stream, slot: &mut Slot) -> Result<()> {
        let Geometry { num_qo_heads: h, num_kv_heads: g, head_dim_qk: d, head_dim_vo: dv, .. } =
            self.geometry;
        let Geometry { page_size: s, q_dtype, kv_dtype, .. } = self.geometry;
        let tokens = slot.plan.num_tokens();
        let bytes = slot.workspace.len();
        attend(
            stream,
            AttendParams {
                work: slot.plan.work(),
                q: slot.q.tensor(0, q_dtype, &[tokens, h, d])?,
                k: self.k.tensor(0, kv_dtype, &[self.pages, s, g, d])?,
                v: self.v.tensor(0, kv_dtype, &[self.pages, s, g, dv])?,
                kv_scales: None,
                sinks: None,
                alibi_slopes: None,
                o: slot.o.tensor_mut(0, q_dtype, &[tokens, h, dv])?,
                lse: Some(slot.lse.tensor_mut(0, DType::F32, &[tokens, h])?),
                workspace: slot.workspace.tensor_mut(0, DType::U8, &[bytes])?,
                workers: 1,
            },
        )
    }

    /// Outputs `[T, H, Dv]` and log-sum-exps `[T, H]` of a slot, padding included.
    fn results(&self, stream: &Stream, slot: &Slot) -> (Vec<f32>, Vec<f32>) {
        let o = take(stream, &slot.o, slot.o.len());
        let lse = take(stream, &slot.lse, slot.lse.len());
        (floats(self.geometry.q_dtype, &o), floats(DType::F32, &lse))
    }

    /// Attends a batch as it is.
    fn eager(&self, stream: &Stream, rows: &Rows) -> (Vec<f32>, Vec<f32>) {
        let mut slot = self.slot(stream, rows, None).unwrap();
        slot.plan.stage(stream).unwrap();
        self.launch(stream, &mut slot).unwrap();
        self.results(stream, &slot)
    }

    /// Attends a batch by a slot's graph, captured at the first; outputs are NaN before.
    fn replayed(&self, stream: &Stream, slot: &mut Slot, rows: &Rows) -> (Vec<f32>, Vec<f32>) {
        let options = *slot.plan.options();
        slot.plan.replan(&self.geometry, &self.variant, &rows.table(self.pages), &options).unwrap();
        slot.plan.stage(stream).unwrap();
        assert!(slot.plan.workspace_bytes() <= slot.workspace.len());
        if slot.graph.is_none() {
            slot.graph = Some(capture::<Error>(stream, || self.launch(stream, slot)).unwrap());
        }
        for buffer in [&mut slot.o, &mut slot.lse] {
            let len = buffer.len();
            crate::fill(stream, buffer.tensor_mut(0, DType::U8, &[len]).unwrap(), NAN).unwrap();
        }
        // SAFETY: the slot's buffers, the pool and the plan's image live, and nobody else uses them.
        unsafe { slot.graph.as_ref().expect("captured").launch(stream) }.unwrap();
        self.results(stream, slot)
    }
}

fn narrow(group: usize, page_size: usize, dtype: DType) -> Geometry {
    Geometry {
        num_qo_heads: group,
        num_kv_heads: 1,
        head_dim_qk: 64,
        head_dim_vo: 64,
        page_size,
        q_dtype: dtype,
        kv_dtype: dtype,
    }
}

fn near(got: f32, want: f32, bound: f32) -> bool {
    got == want || (got - want).abs() <= bound * (1.0 + want.abs())
}
