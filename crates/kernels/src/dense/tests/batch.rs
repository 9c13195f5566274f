//! Batches made from a few numbers, with their keys stored one way or another, and what is due for them.

use crate::dense::{AttendParams, Geometry, Prefix, Table, Variant, attend, schedule, workspace_bytes};
use crate::paged::ScheduleOptions;
use crate::reference::{self, Attended};
use crate::testing::{Number, hash, noise};
use crate::work::WorkList;
use crate::{Stream, TensorMut, TensorRef};

/// Shapes of a layer, all but its types.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) h: usize,
    pub(super) g: usize,
    pub(super) d: usize,
    pub(super) dv: usize,
    /// Slots a page, where prefixes lie in pages.
    pub(super) s: usize,
}

/// A row: who it is, its queries, the keys before the fresh ones, and those.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) id: u64,
    pub(super) q: usize,
    pub(super) prefix: usize,
    pub(super) fresh: usize,
}

pub(super) fn row(q: usize, prefix: usize, fresh: usize) -> Row {
    Row { id: (q * 1000 + prefix * 100 + fresh) as u64, q, prefix, fresh }
}

/// Where the prefixes' keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Store {
    /// In one segment with the fresh ones.
    One,
    Packed,
    Pages,
}

pub(super) const STORES: [Store; 3] = [Store::One, Store::Packed, Store::Pages];

/// What a run wrote.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Output<Q> {
    pub(super) o: Vec<Q>,
    pub(super) lse: Vec<f32>,
}

#[derive(Clone, Debug)]
pub(super) struct Batch {
    pub(super) shape: Shape,
    pub(super) variant: Variant,
    pub(super) rows: Vec<Row>,
    pub(super) workers: usize,
    pub(super) pad_to: Option<usize>,
    /// Renumbers pages.
    pub(super) placement: u64,
    /// What stands wherever no key is.
    pub(super) junk: f32,
}

impl Batch {
    pub(super) fn new(shape: Shape, causal: bool, rows: &[Row]) -> Batch {
        let variant = Variant { causal, ..Variant::causal(shape.d) };
        let rows = rows.to_vec();
        Batch { shape, variant, rows, workers: 2, pad_to: None, placement: 3, junk: f32::NAN }
    }

    fn geometry<Q: Number, K: Number>(&self) -> Geometry {
        Geometry {
            num_qo_heads: self.shape.h,
            num_kv_heads: self.shape.g,
            head_dim_qk: self.shape.d,
            head_dim_vo: self.shape.dv,
            q_dtype: Q::DTYPE,
            kv_dtype: K::DTYPE,
        }
    }

    pub(super) fn queries<Q: Number>(&self) -> Vec<Q> {
        let width = self.shape.h * self.shape.d;
        let of = |row: &Row, t: usize, i: usize| Q::of(1.5 * noise(&[1, row.id, t as u64, i as u64]));
        let rows = self.rows.iter();
        rows.flat_map(|row| (0..row.q * width).map(move |i| of(row, i / width, i % width))).collect()
    }

    /// Element `i` of the key (`side` 2) or value (3) at a position of a row.
    fn element<K: Number>(row: &Row, side: u64, position: usize, i: usize) -> K {
        K::of(noise(&[side, row.id, position as u64, i as u64]))
    }

    /// All keys or values of all rows, `[U, G, width]`.
    pub(super) fn all<K: Number>(&self, side: u64, width: usize) -> Vec<K> {
        self.packed(side, width, |row| 0..row.prefix + row.fresh)
    }

    fn packed<K: Number>(
        &self,
        side: u64,
        width: usize,
        span: impl Fn(&Row) -> std::ops::Range<usize>,
    ) -> Vec<K> {
        let width = self.shape.g * width;
        let mut out = Vec::new();
        for row in &self.rows {
            for position in span(row) {
                out.extend((0..width).map(|i| Batch::element::<K>(row, side, position, i)));
            }
        }
        out
    }

    pub(super) fn run<Q: Number, K: Number>(&self, store: Store) -> Output<Q> {
        let Shape { h, g, d, dv, s } = self.shape;
        let indptr = |count: &dyn Fn(&Row) -> usize| {
            let mut indptr = vec![0i32];
            self.rows.iter().for_each(|row| indptr.push(indptr[indptr.len() - 1] + count(row) as i32));
            indptr
        };
        // Every other row's prefix starts within its first page, and has a page to spare.
        let start = |row: &Row| if row.id.is_multiple_of(2) { (row.id as usize / 2) % s } else { 0 };
        let pages_of = |row: &Row| {
            if row.prefix == 0 { 0 } else { (start(row) + row.prefix).div_ceil(s) + row.id as usize % 2 }
        };
        let num_pages = self.rows.iter().map(pages_of).sum::<usize>() + 2;
        let mut ids: Vec<i32> = (0..num_pages as i32).collect();
        ids.sort_by_key(|&id| hash(&[self.placement, id as u64]));
        let (cu_q, cu_p) = (indptr(&|row| row.q), indptr(&|row| row.prefix));
        let kv_indptr = indptr(&pages_of);
        let prefix_len: Vec<i32> = self.rows.iter().map(|row| row.prefix as i32).collect();
        let page_start: Vec<i32> = self.rows.iter().map(|row| start(row) as i32).collect();
        let cu_k = match store {
            Store::One => indptr(&|row| row.prefix + row.fresh),
            _ => indptr(&|row| row.fresh),
        };
        let prefix = match store {
            Store::One => Prefix::None,
            Store::Packed => Prefix::Packed { cu_p: &cu_p },
            Store::Pages => Prefix::Pages {
                kv_indptr: &kv_indptr,
                kv_indices: &ids,
                prefix_len: &prefix_len,
                page_size: s,
                page_start: Some(&page_start),
                num_pages,
            },
        };
        let table = Table { cu_q: &cu_q, prefix, cu_k: &cu_k };
        let options =
            ScheduleOptions { workers: self.workers, pad_to: self.pad_to, ..ScheduleOptions::default() };
        let mut work = WorkList::default();
        schedule(&self.geometry::<Q, K>(), &self.variant, &table, &options, &mut work).unwrap();
        assert!(crate::dense::is_for(&work, &self.geometry::<Q, K>(), &self.variant, &table));

        let tokens = work.num_tokens();
        let mut q = self.queries::<Q>();
        q.resize(tokens * h * d, Q::of(self.junk));
        // Rows of keys stand apart, junk between them and past the last.
        let spread = |packed: Vec<K>, width: usize| {
            let rows = packed.len() / (g * width);
            let mut out = vec![K::of(self.junk); (rows + 2) * g * (width + 3)];
            for (i, row) in packed.chunks(width).enumerate() {
                out[i * (width + 3)..][..width].copy_from_slice(row);
            }
            out
        };
        let span = |row: &Row| match store {
            Store::One => 0..row.prefix + row.fresh,
            _ => row.prefix..row.prefix + row.fresh,
        };
        let fresh = [(2, d), (3, dv)].map(|(side, width)| spread(self.packed::<K>(side, width, span), width));
        let frozen = [(2, d), (3, dv)].map(|(side, width)| match store {
            Store::One => Vec::new(),
            Store::Packed => spread(self.packed::<K>(side, width, |row| 0..row.prefix), width),
            Store::Pages => {
                let mut pool = vec![K::of(self.junk); num_pages * s * g * (width + 3)];
                for (r, row) in self.rows.iter().enumerate() {
                    for position in 0..row.prefix {
                        let at = start(row) + position;
                        let slot = ids[kv_indptr[r] as usize + at / s] as usize * s + at % s;
                        for i in 0..g * width {
                            pool[(slot * g + i / width) * (width + 3) + i % width] =
                                Batch::element::<K>(row, side, position, i);
                        }
                    }
                }
                pool
            }
        });
        let two = store != Store::One;
        let paged = store == Store::Pages;
        let (mut o, mut lse) = (vec![Q::of(7.0); tokens * h * dv], vec![7f32; tokens * h]);
        let mut workspace = vec![0xa5u8; workspace_bytes(&work, self.workers)];
        let params = AttendParams {
            work: &work,
            q: TensorRef::from_slice(&q, &[tokens, h, d]).unwrap(),
            k_prefix: two.then(|| view(&frozen[0], [num_pages, s, g, d], paged)),
            v_prefix: two.then(|| view(&frozen[1], [num_pages, s, g, dv], paged)),
            k: view(&fresh[0], [num_pages, s, g, d], false),
            v: view(&fresh[1], [num_pages, s, g, dv], false),
            o: TensorMut::from_slice(&mut o, &[tokens, h, dv]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[tokens, h]).unwrap()),
            workspace: TensorMut::from_slice(&mut workspace, &[workspace_bytes(&work, self.workers)])
                .unwrap(),
            workers: self.workers,
        };
        attend(&Stream::cpu(), params).unwrap();
        Output { o, lse }
    }

    /// What the f64 loops make of it.
    pub(super) fn oracle<Q: Number, K: Number>(&self) -> Attended {
        let Variant { window_left, logits_soft_cap, .. } = self.variant;
        let cu = |count: &dyn Fn(&Row) -> usize| {
            let mut at = 0;
            let ends = self.rows.iter().map(|row| {
                at += count(row) as i32;
                at
            });
            std::iter::once(0).chain(ends).collect::<Vec<i32>>()
        };
        let (cu_q, cu_k) = (cu(&|row| row.q), cu(&|row| row.prefix + row.fresh));
        let (q, k, v) =
            (self.queries::<Q>(), self.all::<K>(2, self.shape.d), self.all::<K>(3, self.shape.dv));
        if window_left.is_some() || logits_soft_cap.is_some() {
            // The loops over packed keys know neither; those over pages do, here of one key each.
            let ids: Vec<i32> = (0..cu_k[cu_k.len() - 1]).collect();
            let last: Vec<i32> = cu_k.windows(2).map(|pair| i32::from(pair[0] < pair[1])).collect();
            return reference::paged(&reference::paged::Paged {
                q: &q,
                cache: reference::paged::Cache::Split { k: &k, v: &v },
                qo_indptr: &cu_q,
                kv_indptr: &cu_k,
                kv_indices: &ids,
                kv_last_page_len: &last,
                num_qo_heads: self.shape.h,
                num_kv_heads: self.shape.g,
                head_dim_qk: self.shape.d,
                head_dim_vo: self.shape.dv,
                page_size: 1,
                sm_scale: self.variant.sm_scale.into(),
                causal: self.variant.causal,
                options: reference::paged::Options {
                    window_left: window_left.map_or(-1, |left| left as i64),
                    logits_soft_cap: logits_soft_cap.map_or(0.0, f64::from),
                    ..Default::default()
                },
            })
            .unwrap();
        }
        reference::dense(&reference::dense::Dense {
            q: &q,
            k: &k,
            v: &v,
            cu_q: &cu_q,
            cu_k: &cu_k,
            num_qo_heads: self.shape.h,
            num_kv_heads: self.shape.g,
            head_dim_qk: self.shape.d,
            head_dim_vo: self.shape.dv,
            sm_scale: self.variant.sm_scale.into(),
            causal: self.variant.causal,
        })
        .unwrap()
    }
}

/// Keys whose heads stand three elements apart: pages, or as many packed ones as there are.
fn view<K: Number>(data: &[K], [p, s, g, width]: [usize; 4], paged: bool) -> TensorRef<'_> {
    let (head, slots) = (width + 3, data.len() / (g * (width + 3)));
    if paged {
        let strides = [s * g * head, g * head, head, 1];
        TensorRef::from_slice_strided(data, &[p, s, g, width], &strides).unwrap()
    } else {
        TensorRef::from_slice_strided(data, &[slots, g, width], &[g * head, head, 1]).unwrap()
    }
}
