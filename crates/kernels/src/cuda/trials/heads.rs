//! Keys and values a head, over pages: few queries, and tiles of them.

use crate::paged::{AttendParams, Geometry, PageTable, Variant, attend};
use crate::plan::{Capacity, Heads, Plan, PlanOptions};
use crate::{DType, Stream};

use super::memory::{Outputs, Pages, indptr, queries, scratch};
use super::{Bits, DEVICE, Family, Row, Setting, ragged};

#[derive(Clone, Copy, Debug)]
pub(super) struct OverHeads {
    pub(super) g: usize,
    pub(super) group: usize,
    pub(super) d: usize,
    pub(super) dv: usize,
    pub(super) page: usize,
    pub(super) variant: Variant,
}

impl OverHeads {
    pub(super) fn new(group: usize, d: usize, dv: usize) -> OverHeads {
        OverHeads { g: 1, group, d, dv, page: 16, variant: Variant::causal(d) }
    }

    pub(super) fn narrow() -> OverHeads {
        OverHeads { g: 2, ..OverHeads::new(4, 64, 64) }
    }

    pub(super) fn geometry(&self, dtype: DType) -> Geometry {
        Geometry {
            num_qo_heads: self.g * self.group,
            num_kv_heads: self.g,
            head_dim_qk: self.d,
            head_dim_vo: self.dv,
            page_size: self.page,
            q_dtype: dtype,
            kv_dtype: dtype,
        }
    }
}

impl Family for OverHeads {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn company(&self, rows: usize) -> Vec<Row> {
        ragged(rows)
    }

    fn run(&self, stream: &Stream, set: &Setting, rows: &[Row]) -> Vec<Bits> {
        let geometry = self.geometry(set.dtype);
        let (heads, dtype, junk) = (geometry.num_qo_heads, set.dtype, set.junk);
        let batches = set.batches(rows);
        let most = |of: &dyn Fn(&Row) -> usize| {
            batches.iter().map(|rows| rows.iter().map(of).sum::<usize>()).max().unwrap_or(0)
        };
        let capacity = set.is_fixed().then(|| Capacity {
            rows: batches.iter().map(|rows| rows.len()).max().unwrap_or(0) + 1,
            tokens: most(&|row| row.q) + set.pad,
            pages: most(&|row| row.kv.div_ceil(self.page)) + 5,
        });
        let options = PlanOptions { device: DEVICE, capacity, ..PlanOptions::default() };
        let mut plan: Option<Plan<Heads>> = None;
        let mut kept = None;
        for rows in batches {
            let pages = Pages::of(rows, |row| row.kv, self.page, set.place);
            let (qo, last) = (indptr(rows, |row| row.q), pages.last(rows));
            let table = PageTable {
                qo_indptr: &qo,
                kv_indptr: &pages.indptr,
                kv_indices: &pages.indices,
                kv_last_page_len: &last,
                num_pages: pages.pool,
                ..PageTable::default()
            };
            let plan = match &mut plan {
                Some(plan) => {
                    plan.replan(&geometry, &self.variant, &table, &options).unwrap();
                    plan
                }
                None => plan.insert(Plan::new(&geometry, &self.variant, &table, &options).unwrap()),
            };
            plan.stage(stream).unwrap();
            let (tokens, bytes) = (plan.num_tokens(), plan.workspace_bytes());
            let (outputs, workspace) = kept.get_or_insert_with(|| {
                // Room for either batch.
                let outputs = Outputs::new(stream, dtype, [tokens, heads, self.dv], junk);
                (outputs, scratch(stream, bytes.max(4 << 20), junk))
            });
            let q = queries(dtype, rows, tokens, heads * self.d, junk, 3).on(stream);
            let fill =
                |width, salt| pages.fill(dtype, rows, |row| row.kv, self.g * width, junk, salt).on(stream);
            let (k, v) = (fill(self.d, 1), fill(self.dv, 2));
            let numbers = |of: &dyn Fn(usize) -> f32| {
                let all: Vec<u8> = (0..heads).flat_map(|head| of(head).to_ne_bytes()).collect();
                super::memory::put(stream, &all)
            };
            let (sinks, slopes) =
                (numbers(&|head| head as f32 / 8.0 - 0.5), numbers(&|head| 0.01 * head as f32));
            let (o, lse) = outputs.views(&[tokens, heads, self.dv], &[tokens, heads]);
            let available = workspace.len();
            let params = AttendParams {
                work: plan.work(),
                q: q.tensor(0, dtype, &[tokens, heads, self.d]).unwrap(),
                k: k.tensor(0, dtype, &[pages.pool, self.page, self.g, self.d]).unwrap(),
                v: v.tensor(0, dtype, &[pages.pool, self.page, self.g, self.dv]).unwrap(),
                kv_scales: None,
                sinks: self.variant.sinks.then(|| sinks.tensor(0, DType::F32, &[heads]).unwrap()),
                alibi_slopes: self.variant.alibi.then(|| slopes.tensor(0, DType::F32, &[heads]).unwrap()),
                o,
                lse: Some(lse),
                workspace: workspace.tensor_mut(0, DType::U8, &[available]).unwrap(),
                workers: 1,
            };
            attend(stream, params).unwrap();
            stream.synchronize().unwrap();
        }
        kept.expect("a batch was run").0.rows(stream, rows)
    }
}
