//! Index scores and their pick, and attention over picks.

use crate::dsa::{
    self, DeviceTable, KeyFormat, ScoresParams, SelectParams, SparseParams, Table, f32_to_e4m3,
};
use crate::mla::Geometry;
use crate::{DType, Kernels, Stream};

use super::memory::{Numbers, Outputs, Pages, indptr, noise, put, queries, scratch, take};
use super::{Bits, DEVICE, Family, Row, Setting, ragged};

/// An indexer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Picked {
    pub(super) heads: usize,
    pub(super) width: usize,
    pub(super) topk: usize,
    /// How keys are stored, where not as the queries are.
    pub(super) format: Option<KeyFormat>,
    /// Elements between slots beyond a key's own.
    pub(super) gap: usize,
}

/// Attention over picks.
#[derive(Clone, Copy, Debug)]
pub(super) struct OverPicks {
    pub(super) h: usize,
    pub(super) c: usize,
    pub(super) e: usize,
    pub(super) topk: usize,
    pub(super) kernels: Kernels,
}

const PAGE: usize = 16;

/// Rows of `[rows' queries]`, then rows of nobody.
fn row_arrays(rows: &[Row], pad: usize) -> (Vec<i32>, Vec<i32>) {
    let own = rows.iter().enumerate().flat_map(|(at, row)| {
        // A row of more queries than keys has the first ones see nothing.
        (0..row.q).map(move |t| (at as i32, (row.kv + t) as i32 - row.q as i32))
    });
    let seeing = own.map(|(at, position)| if position < 0 { (-1, 0) } else { (at, position) });
    seeing.chain(std::iter::repeat_n((-1, 0), pad)).unzip()
}

impl Picked {
    pub(super) fn narrow() -> Picked {
        Picked { heads: 8, width: 64, topk: 24, format: None, gap: 0 }
    }

    fn format(&self, dtype: DType) -> KeyFormat {
        self.format.unwrap_or_else(|| KeyFormat::of(dtype).expect("a float"))
    }

    /// Keys in pages, as bytes.
    fn keys(&self, set: &Setting, rows: &[Row], pages: &Pages) -> Vec<u8> {
        let (format, width) = (self.format(set.dtype), self.width);
        let element = format.dtype();
        let slot = (format.width(width) + self.gap) * element.size();
        if format != KeyFormat::Fp8 {
            let mut all = Numbers::filled(element, pages.pool * PAGE * (width + self.gap), set.junk);
            for (at, row) in rows.iter().enumerate() {
                for key in 0..row.kv {
                    let to = pages.slot(at, key) * (width + self.gap);
                    all.set_all(to, width, |i| noise(&[1, row.id, key as u64, i as u64]));
                }
            }
            return all.bytes;
        }
        let mut all = vec![set.junk; pages.pool * PAGE * slot];
        for (at, row) in rows.iter().enumerate() {
            for key in 0..row.kv {
                let to = &mut all[pages.slot(at, key) * slot..][..width + 4];
                for (i, code) in to[..width].iter_mut().enumerate() {
                    *code = f32_to_e4m3(100.0 * noise(&[1, row.id, key as u64, i as u64]));
                }
                to[width..].copy_from_slice(&0.01f32.to_ne_bytes());
            }
        }
        all
    }
}

impl Family for Picked {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn company(&self, rows: usize) -> Vec<Row> {
        ragged(rows)
    }

    fn run(&self, stream: &Stream, set: &Setting, rows: &[Row]) -> Vec<Bits> {
        let Picked { heads: h, width: d, topk: k, .. } = *self;
        let (dtype, junk, format) = (set.dtype, set.junk, self.format(set.dtype));
        dsa::prepare_select(stream, dtype, format, h, d, Kernels::Auto).unwrap();
        let mut on = DeviceTable::with_capacity(stream, 0, 0, 0, 0).unwrap();
        let mut results = Vec::new();
        for rows in set.batches(rows) {
            let pages = Pages::of(rows, |row| row.kv, PAGE, set.place);
            let (row_request, positions) = row_arrays(rows, set.pad);
            let kv_lens: Vec<i32> = rows.iter().map(|row| row.kv as i32).collect();
            let page_start = vec![0; rows.len()];
            let table = Table {
                row_request: &row_request,
                positions: &positions,
                kv_indptr: &pages.indptr,
                kv_indices: &pages.indices,
                page_start: &page_start,
                kv_lens: &kv_lens,
            };
            on.set(stream, &table).unwrap();
            let (t, n) = (row_request.len(), kv_lens.iter().copied().max().unwrap_or(0) as usize + 1);
            let q = queries(dtype, rows, t, h * d, junk, 3).on(stream);
            let weights = queries(DType::F32, rows, t, h, junk, 4).on(stream);
            let keys = put(stream, &self.keys(set, rows, &pages));
            let w = format.width(d);
            let keys = keys.tensor(0, format.dtype(), &[pages.pool, PAGE, w + self.gap]).unwrap();
            let keys = keys.narrow(2, 0, w).unwrap();
            let (q, weights) =
                (q.tensor(0, dtype, &[t, h, d]).unwrap(), weights.tensor(0, DType::F32, &[t, h]).unwrap());
            let mut picks = scratch(stream, 4 * t * k, junk);
            let mut scores = scratch(stream, 4 * t * n, junk);
            // Panels of a few rows.
            let bytes = dsa::select_workspace_bytes_on(DEVICE, t.min(5), on.max_keys(), h, d, k, 1);
            let mut workspace = scratch(stream, bytes, junk);
            let params = ScoresParams {
                q,
                weights,
                keys,
                format,
                row_request: &row_request,
                positions: &positions,
                kv_indptr: &pages.indptr,
                kv_indices: &pages.indices,
                page_start: &page_start,
                kv_lens: &kv_lens,
                scores: scores.tensor_mut(0, DType::F32, &[t, n]).unwrap(),
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
                workers: 1,
            };
            dsa::scores_at(stream, &on, params).unwrap();
            let params = SelectParams {
                q,
                weights,
                keys,
                format,
                row_request: &row_request,
                positions: &positions,
                kv_indptr: &pages.indptr,
                kv_indices: &pages.indices,
                page_start: &page_start,
                kv_lens: &kv_lens,
                topk: k,
                selection: picks.tensor_mut(0, DType::I32, &[t, k]).unwrap(),
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
                workers: 1,
            };
            dsa::select_at(stream, &on, params).unwrap();
            let picks = take(stream, &picks, 4 * t * k);
            let scores = super::memory::floats(DType::F32, &take(stream, &scores, 4 * t * n));
            results.clear();
            let mut token = 0;
            for row in rows {
                let mut own = Vec::new();
                for _ in 0..row.q {
                    let sees = if row_request[token] < 0 { 0 } else { positions[token] as usize + 1 };
                    let (seen, hidden) = scores[token * n..][..n].split_at(sees);
                    assert!(seen.iter().all(|x| !x.is_nan()), "NaN among the scores of {row:?}");
                    assert!(
                        hidden.iter().all(|&x| x == f32::NEG_INFINITY),
                        "{row:?} scores what it cannot see"
                    );
                    own.extend(&picks[4 * token * k..][..4 * k]);
                    own.extend(seen.iter().flat_map(|x| x.to_ne_bytes()));
                    token += 1;
                }
                results.push(Bits(own));
            }
            assert!(picks[4 * token * k..].iter().all(|&byte| byte == 0xff), "a row of nobody picks");
        }
        results
    }
}

impl OverPicks {
    pub(super) fn narrow() -> OverPicks {
        // More than a leaf of 512 picks, so that states are joined.
        OverPicks { h: 6, c: 48, e: 16, topk: 600, kernels: Kernels::Auto }
    }

    pub(super) fn geometry(&self, dtype: DType) -> Geometry {
        Geometry {
            num_qo_heads: self.h,
            kv_lora_rank: self.c,
            qk_rope_head_dim: self.e,
            page_size: PAGE,
            q_dtype: dtype,
            kv_dtype: dtype,
        }
    }
}

impl Family for OverPicks {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn company(&self, rows: usize) -> Vec<Row> {
        ragged(rows)
    }

    fn run(&self, stream: &Stream, set: &Setting, rows: &[Row]) -> Vec<Bits> {
        let OverPicks { h, c, e, topk: k, kernels } = *self;
        let (geometry, dtype, junk) = (self.geometry(set.dtype), set.dtype, set.junk);
        dsa::prepare_sparse(stream, &geometry, kernels).unwrap();
        let mut on = DeviceTable::with_capacity(stream, 0, 0, 0, 0).unwrap().with_kernels(kernels);
        let mut last = None;
        for rows in set.batches(rows) {
            let pages = Pages::of(rows, |row| row.kv, PAGE, set.place);
            let qo = indptr(rows, |row| row.q);
            let own = rows.iter().enumerate().flat_map(|(at, row)| std::iter::repeat_n(at as i32, row.q));
            let row_request: Vec<i32> = own.chain(std::iter::repeat_n(-1, set.pad)).collect();
            let kv_lens: Vec<i32> = rows.iter().map(|row| row.kv as i32).collect();
            let (page_start, t) = (vec![0; rows.len()], row_request.len());
            let table = Table {
                row_request: &row_request,
                positions: &vec![0; t],
                kv_indptr: &pages.indptr,
                kv_indices: &pages.indices,
                page_start: &page_start,
                kv_lens: &kv_lens,
            };
            on.set(stream, &table).unwrap();
            // Each query picks all keys but some of its own choice, and has -1 behind them.
            let mut selection = vec![-1i32; t * k];
            let mut picked = vec![0u8; rows.iter().map(|row| row.kv).sum()];
            let mut first_key = 0;
            for (at, row) in rows.iter().enumerate() {
                for token in qo[at] as usize..qo[at + 1] as usize {
                    let choice = (token - qo[at] as usize) as u64;
                    let keys = (0..row.kv)
                        .filter(|&key| key == 0 || noise(&[8, row.id, choice, key as u64]) < 0.8)
                        .take(k);
                    for (to, key) in selection[token * k..].iter_mut().zip(keys) {
                        (*to, picked[first_key + key]) = (key as i32, 1);
                    }
                }
                first_key += row.kv;
            }
            let q_nope = queries(dtype, rows, t, h * c, junk, 3).on(stream);
            let q_pe = queries(dtype, rows, t, h * e, junk, 4).on(stream);
            // What no query of its row picks is junk too.
            let width = c + e;
            let mut latent = Numbers::filled(dtype, pages.pool * PAGE * width, junk);
            let mut first_key = 0;
            for (at, row) in rows.iter().enumerate() {
                for key in (0..row.kv).filter(|key| picked[first_key + key] != 0) {
                    let to = pages.slot(at, key) * width;
                    latent.set_all(to, width, |i| noise(&[1, row.id, key as u64, i as u64]));
                }
                first_key += row.kv;
            }
            let latent = latent.on(stream);
            let selection: Vec<u8> = selection.iter().flat_map(|pick| pick.to_ne_bytes()).collect();
            let selection = put(stream, &selection);
            let mut outputs = Outputs::new(stream, dtype, [t, h, c], junk);
            let bytes =
                dsa::sparse_workspace_bytes_on(DEVICE, &geometry, t.min(3), k, 1) + t * (k + 1) * 4 + 128;
            let mut workspace = scratch(stream, bytes, junk);
            let (o, lse) = outputs.views(&[t, h, c], &[t, h]);
            let params = SparseParams {
                geometry,
                sm_scale: 0.11,
                q_nope: q_nope.tensor(0, dtype, &[t, h, c]).unwrap(),
                q_pe: q_pe.tensor(0, dtype, &[t, h, e]).unwrap(),
                latent: latent.tensor(0, dtype, &[pages.pool, PAGE, width]).unwrap(),
                selection: selection.tensor(0, DType::I32, &[t, k]).unwrap(),
                row_request: &row_request,
                kv_indptr: &pages.indptr,
                kv_indices: &pages.indices,
                page_start: &page_start,
                kv_lens: &kv_lens,
                o,
                lse: Some(lse),
                workspace: workspace.tensor_mut(0, DType::U8, &[bytes]).unwrap(),
                workers: 1,
            };
            dsa::sparse_attend_at(stream, &on, params).unwrap();
            last = Some((outputs, set.pad));
        }
        let (outputs, pad) = last.expect("a batch was run");
        // Rows of no request are left alone.
        let mut tokens = outputs.tokens(stream);
        let nobody = tokens.split_off(tokens.len() - pad);
        assert!(nobody.iter().flatten().all(|&byte| byte == junk), "a row of no request was written");
        let mut tokens = tokens.into_iter();
        rows.iter()
            .map(|row| {
                let own: Vec<Vec<u8>> = tokens.by_ref().take(row.q).collect();
                assert!(own.iter().all(|token| outputs.is_sane(token)), "NaN in {row:?}");
                assert!(row.kv > 0 || own.iter().all(|token| outputs.is_nothing(token)), "{row:?}");
                Bits(own.concat())
            })
            .collect()
    }
}
