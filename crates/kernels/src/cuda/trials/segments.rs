//! Two segments: a prefix, in pages or packed, and fresh keys.

use crate::dense::{AttendParams, Geometry, Prefix, Table, Variant, attend, schedule, workspace_bytes};
use crate::paged::{ScheduleOptions, Target};
use crate::work::WorkList;
use crate::{DType, Stream};

use super::memory::{Numbers, Outputs, Pages, indptr, noise, queries, scratch};
use super::{Bits, Family, Row, Setting, ragged};

/// Where prefixes lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Prefixes {
    /// There is none: all keys are fresh.
    None,
    Packed,
    Pages,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct OverSegments {
    pub(super) g: usize,
    pub(super) group: usize,
    pub(super) d: usize,
    pub(super) dv: usize,
    pub(super) prefixes: Prefixes,
    pub(super) soft_cap: Option<f32>,
}

const PAGE: usize = 16;

impl OverSegments {
    pub(super) fn narrow(prefixes: Prefixes) -> OverSegments {
        OverSegments { g: 2, group: 2, d: 64, dv: 64, prefixes, soft_cap: None }
    }
}

impl Family for OverSegments {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn company(&self, rows: usize) -> Vec<Row> {
        ragged(rows)
    }

    fn run(&self, stream: &Stream, set: &Setting, rows: &[Row]) -> Vec<Bits> {
        let OverSegments { g, group, d, dv, prefixes, soft_cap } = *self;
        let (dtype, junk, h) = (set.dtype, set.junk, g * group);
        let geometry = Geometry {
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            q_dtype: dtype,
            kv_dtype: dtype,
        };
        let variant = Variant { logits_soft_cap: soft_cap, ..Variant::causal(d) };
        let fresh = |row: &Row| if prefixes == Prefixes::None { row.kv } else { row.q.min(row.kv) };
        let prefix = |row: &Row| row.kv - fresh(row);
        let batches = set.batches(rows);
        let tokens_of = |rows: &[Row]| rows.iter().map(|row| row.q).sum::<usize>();
        let most = batches.iter().map(|rows| tokens_of(rows)).max().unwrap_or(0) + set.pad;
        let options = ScheduleOptions {
            workers: 1,
            pad_to: set.is_fixed().then_some(most),
            target: Target::Blocks,
            ..ScheduleOptions::default()
        };
        let mut work = WorkList::default();
        let mut kept = None;
        for rows in batches {
            let pages = Pages::of(rows, prefix, PAGE, set.place);
            let (cu_q, cu_k, cu_p) = (indptr(rows, |row| row.q), indptr(rows, fresh), indptr(rows, prefix));
            let prefix_len: Vec<i32> = rows.iter().map(|row| prefix(row) as i32).collect();
            let table = Table {
                cu_q: &cu_q,
                prefix: match prefixes {
                    Prefixes::None => Prefix::None,
                    Prefixes::Packed => Prefix::Packed { cu_p: &cu_p },
                    Prefixes::Pages => Prefix::Pages {
                        kv_indptr: &pages.indptr,
                        kv_indices: &pages.indices,
                        prefix_len: &prefix_len,
                        page_size: PAGE,
                        page_start: None,
                        num_pages: pages.pool,
                    },
                },
                cu_k: &cu_k,
            };
            schedule(&geometry, &variant, &table, &options, &mut work).unwrap();
            work.stage(stream).unwrap();
            let (tokens, bytes) = (work.num_tokens(), workspace_bytes(&work, 1));
            let (outputs, workspace) = kept.get_or_insert_with(|| {
                let outputs = Outputs::new(stream, dtype, [tokens, h, dv], junk);
                (outputs, scratch(stream, bytes.max(4 << 20), junk))
            });
            let q = queries(dtype, rows, tokens, h * d, junk, 3).on(stream);
            // Keys by their position in the row, wherever they lie; junk behind the last.
            let packed = |span: &dyn Fn(&Row) -> std::ops::Range<usize>, width: usize, salt: u64| {
                let keys: usize = rows.iter().map(|row| span(row).len()).sum();
                let mut to = Numbers::filled(dtype, (keys + 9) * width, junk);
                let mut at = 0;
                for row in rows {
                    for key in span(row) {
                        to.set_all(at * width, width, |i| noise(&[salt, row.id, key as u64, i as u64]));
                        at += 1;
                    }
                }
                (to.on(stream), keys + 9)
            };
            let newest = |row: &Row| prefix(row)..row.kv;
            let ((k, keys), (v, _)) = (packed(&newest, g * d, 1), packed(&newest, g * dv, 2));
            let frozen = |width: usize, salt: u64| match prefixes {
                Prefixes::Pages => {
                    let pool = pages.fill(dtype, rows, prefix, g * width, junk, salt);
                    (pool.on(stream), pages.pool)
                }
                _ => packed(&|row: &Row| 0..prefix(row), g * width, salt),
            };
            let ((k_prefix, count), (v_prefix, _)) = (frozen(d, 1), frozen(dv, 2));
            let shape = |width: usize| match prefixes {
                Prefixes::Pages => vec![count, PAGE, g, width],
                _ => vec![count, g, width],
            };
            let two = prefixes != Prefixes::None;
            let (o, lse) = outputs.views(&[tokens, h, dv], &[tokens, h]);
            let available = workspace.len();
            let params = AttendParams {
                work: &work,
                q: q.tensor(0, dtype, &[tokens, h, d]).unwrap(),
                k_prefix: two.then(|| k_prefix.tensor(0, dtype, &shape(d)).unwrap()),
                v_prefix: two.then(|| v_prefix.tensor(0, dtype, &shape(dv)).unwrap()),
                k: k.tensor(0, dtype, &[keys, g, d]).unwrap(),
                v: v.tensor(0, dtype, &[keys, g, dv]).unwrap(),
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
