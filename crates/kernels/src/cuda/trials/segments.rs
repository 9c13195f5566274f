//! Two segments: a prefix, in pages or packed, and fresh keys.

use crate::dense::{AttendParams, Geometry, Prefix, Table, Variant, attend, schedule, workspace_bytes};
use crate::paged::{ScheduleOptions, Target};
use crate::testing::{bound, judge};
use crate::work::WorkList;
use crate::{DType, Kernels, Stream};

use super::memory::{Numbers, Outputs, Pages, floats, indptr, noise, queries, scratch};
use super::{Bits, Family, Row, Setting, ragged, row, stream};

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
    pub(super) causal: bool,
    pub(super) window_left: Option<usize>,
    pub(super) kernels: Kernels,
}

const PAGE: usize = 16;

impl OverSegments {
    pub(super) fn narrow(prefixes: Prefixes) -> OverSegments {
        OverSegments {
            g: 2,
            group: 2,
            d: 64,
            dv: 64,
            prefixes,
            soft_cap: None,
            causal: true,
            window_left: None,
            kernels: Kernels::Auto,
        }
    }

    fn variant(&self) -> Variant {
        let OverSegments { d, causal, soft_cap: logits_soft_cap, window_left, .. } = *self;
        Variant { logits_soft_cap, causal, window_left, ..Variant::causal(d) }
    }

    /// Outputs `[q, H, Dv]` and log-sum-exps `[q, H]` of a row, in plain loops.
    fn oracle(&self, dtype: DType, row: &Row) -> (Vec<f64>, Vec<f64>) {
        let OverSegments { g, group, d, dv, soft_cap, causal, window_left, .. } = *self;
        let h = g * group;
        let queries = numbers(dtype, row.q * h * d, |i| {
            1.5 * noise(&[3, row.id, (i / (h * d)) as u64, (i % (h * d)) as u64])
        });
        let of = |salt: u64, width: usize| {
            let each = g * width;
            numbers(dtype, row.kv * each, |i| noise(&[salt, row.id, (i / each) as u64, (i % each) as u64]))
        };
        let (keys, values) = (of(1, d), of(2, dv));
        let scale = f64::from(self.variant().sm_scale);
        let (mut o, mut lse) = (vec![0.0; row.q * h * dv], vec![f64::NEG_INFINITY; row.q * h]);
        for at in 0..row.q * h {
            let (head, position) = (at % h / group, row.kv as i64 - row.q as i64 + (at / h) as i64);
            let sees = |key: usize| {
                let key = key as i64;
                (!causal || key <= position) && window_left.is_none_or(|left| key >= position - left as i64)
            };
            let score = |key: usize| {
                let (q, k) = (&queries[at * d..][..d], &keys[(key * g + head) * d..][..d]);
                let s = scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                soft_cap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
            };
            let scores: Vec<_> = (0..row.kv).filter(|&key| sees(key)).map(|key| (key, score(key))).collect();
            let top = scores.iter().fold(f64::NEG_INFINITY, |top, of| top.max(of.1));
            if top == f64::NEG_INFINITY {
                continue;
            }
            let total: f64 = scores.iter().map(|of| (of.1 - top).exp()).sum();
            lse[at] = top + total.ln();
            for (key, score) in scores {
                let weight = (score - top).exp() / total;
                (0..dv).for_each(|i| o[at * dv + i] += weight * values[(key * g + head) * dv + i]);
            }
        }
        (o, lse)
    }

    /// Holds a batch against it.
    fn hold(&self, stream: &Stream, set: &Setting, rows: &[Row]) {
        for (row, Bits(bytes)) in rows.iter().zip(self.run(stream, set, rows)) {
            let (want, want_lse) = self.oracle(set.dtype, row);
            // A token's outputs, then its log-sum-exps.
            let (h, size) = (self.g * self.group, set.dtype.size());
            let (mut o, mut lse) = (Vec::new(), Vec::new());
            for token in bytes.chunks_exact(h * (self.dv * size + 4)) {
                let (of, lses) = token.split_at(h * self.dv * size);
                o.extend(floats(set.dtype, of).into_iter().map(f64::from));
                lse.extend(floats(DType::F32, lses).into_iter().map(f64::from));
            }
            let what = format!("{}, {}, {row:?}", self.name(), set.dtype);
            judge(&what, o.into_iter(), &want, bound(set.dtype, set.dtype));
            judge(&format!("lse of {what}"), lse.into_iter(), &want_lse, 2e-5);
        }
    }
}

/// Numbers as a dtype has them.
fn numbers(dtype: DType, len: usize, of: impl Fn(usize) -> f32) -> Vec<f64> {
    let mut all = Numbers::filled(dtype, len, 0);
    all.set_all(0, len, of);
    floats(dtype, &all.bytes).into_iter().map(f64::from).collect()
}

/// Rows around the ends of the Hopper's tiles of 128 queries and keys: of several tiles, of one key, of none; tiles of queries that see nothing; keys of which no query of
/// the row sees the first; queries that see nothing.
fn around_tiles() -> Vec<Row> {
    let some = [(130, 130), (3, 300), (1, 1), (257, 260), (5, 0), (20, 7), (64, 128), (300, 100), (2, 129)];
    some.into_iter().zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect()
}

/// Every prefix under every mask, in heads as wide as the Hopper's tiles and narrower, beside the other kernels, against plain loops.
#[test]
fn rows_around_tiles_agree_with_plain_loops() {
    let Some(owned) = stream("rows_around_tiles") else { return };
    let stream = owned.stream();
    let prefixes = [Prefixes::None, Prefixes::Packed, Prefixes::Pages];
    let masks = [(true, None), (false, None), (true, Some(140)), (false, Some(9))];
    for (at, (prefixes, (causal, window_left))) in
        prefixes.into_iter().flat_map(|of| masks.map(|mask| (of, mask))).enumerate()
    {
        let (d, dv) = [(128, 128), (120, 104), (65, 100), (64, 56), (200, 256)][(at + at / 4) % 5];
        let soft_cap = (at % 3 == 1).then_some(3.0);
        let of =
            OverSegments { g: 1, d, dv, soft_cap, causal, window_left, ..OverSegments::narrow(prefixes) };
        let dtype = [DType::Bf16, DType::F16][at % 2];
        let set = Setting { place: 7, ..Setting::of(dtype) };
        of.hold(&stream, &set, &around_tiles());
    }
}

/// Groups of heads that fill a tile's rows and that do not; a head alone; scales that turn scores around are `exact`'s matter.
#[test]
fn groups_of_heads_agree_with_plain_loops() {
    let Some(owned) = stream("groups_of_heads") else { return };
    let stream = owned.stream();
    for (g, group) in [(2, 1), (1, 3), (1, 64), (1, 128), (1, 129)] {
        let of = OverSegments { g, group, d: 128, dv: 128, ..OverSegments::narrow(Prefixes::None) };
        let rows = [row(0, 3, 131), row(1, 43, 43), row(2, 0, 5)];
        of.hold(&stream, &Setting::of(DType::Bf16), &rows);
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
        let OverSegments { g, group, d, dv, prefixes, kernels, .. } = *self;
        let (dtype, junk, h) = (set.dtype, set.junk, g * group);
        let geometry = Geometry {
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            q_dtype: dtype,
            kv_dtype: dtype,
        };
        let variant = self.variant();
        let fresh = |row: &Row| if prefixes == Prefixes::None { row.kv } else { row.q.min(row.kv) };
        let prefix = |row: &Row| row.kv - fresh(row);
        let batches = set.batches(rows);
        let tokens_of = |rows: &[Row]| rows.iter().map(|row| row.q).sum::<usize>();
        let most = batches.iter().map(|rows| tokens_of(rows)).max().unwrap_or(0) + set.pad;
        let options = ScheduleOptions {
            workers: 1,
            pad_to: set.is_fixed().then_some(most),
            target: Target::Blocks,
            kernels,
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
