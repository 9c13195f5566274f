//! Attention over picks against the oracle, in every body, and what may not change a bit.

use half::{bf16, f16};
use proptest::prelude::*;

use super::{SparseParams, sparse_attend, sparse_workspace_bytes};
use crate::cpu::Isa;
use crate::mla::Geometry;
use crate::reference::{self, Attended};
use crate::testing::{Number, hash, noise};
use crate::{DType, Error, Result, Stream, TensorMut, TensorRef};

pub(crate) mod fp8;

fn on_every_isa(mut test: impl FnMut()) {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        test();
    }
}

/// A batch of rows over requests. Slots that no request stores are NaN.
#[derive(Clone)]
struct Batch<T> {
    geometry: Geometry,
    sm_scale: f32,
    topk: usize,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    page_start: Vec<i32>,
    kv_lens: Vec<i32>,
    num_pages: usize,
    latent: Vec<T>,
    q_nope: Vec<T>,
    q_pe: Vec<T>,
    row_request: Vec<i32>,
    selection: Vec<i32>,
}

#[derive(Clone, Debug, PartialEq)]
struct Got<T> {
    o: Vec<T>,
    lse: Vec<f32>,
}

/// `H`, `C`, `E`, `S`.
type Shape = (usize, usize, usize, usize);

impl<T: Number> Batch<T> {
    /// Requests of `(page_start, kv_len)`; rows of (request, picks), each pick a position. Rows' picks are shuffled and
    /// strewn with -1 up to `topk`.
    fn make(
        (h, c, e, s): Shape,
        requests: &[(usize, usize)],
        rows: &[(i32, Vec<i32>)],
        topk: usize,
        seed: u64,
    ) -> Batch<T> {
        let d = c + e;
        let geometry = Geometry {
            num_qo_heads: h,
            kv_lora_rank: c,
            qk_rope_head_dim: e,
            page_size: s,
            q_dtype: T::DTYPE,
            kv_dtype: T::DTYPE,
        };
        let pages_of = |&(start, len): &(usize, usize)| (start + len).div_ceil(s);
        let num_pages = requests.iter().map(pages_of).sum::<usize>() + 2;
        let mut ids: Vec<i32> = (0..num_pages as i32).collect();
        ids.sort_by_key(|&id| hash(&[seed, id as u64, 77]));
        let mut batch = Batch {
            geometry,
            sm_scale: 0.15,
            topk,
            kv_indptr: vec![0],
            kv_indices: Vec::new(),
            page_start: requests.iter().map(|&(start, _)| start as i32).collect(),
            kv_lens: requests.iter().map(|&(_, len)| len as i32).collect(),
            num_pages,
            latent: vec![T::of(f32::NAN); num_pages * s * d],
            q_nope: Vec::new(),
            q_pe: Vec::new(),
            row_request: rows.iter().map(|(request, _)| *request).collect(),
            selection: Vec::new(),
        };
        let mut next = ids.into_iter();
        for (request, spec) in requests.iter().enumerate() {
            let table: Vec<i32> = next.by_ref().take(pages_of(spec)).collect();
            for position in 0..spec.1 {
                let at = spec.0 + position;
                let token = table[at / s] as usize * s + at % s;
                for lane in 0..d {
                    let x = noise(&[request as u64, position as u64, lane as u64]);
                    batch.latent[token * d + lane] = T::of(1.7 * x);
                }
            }
            batch.kv_indices.extend(&table);
            batch.kv_indptr.push(batch.kv_indices.len() as i32);
        }
        for (t, (_, picks)) in rows.iter().enumerate() {
            for head in 0..h {
                let q = |lane: usize| T::of(1.7 * noise(&[9, t as u64, head as u64, lane as u64]));
                batch.q_nope.extend((0..c).map(q));
                batch.q_pe.extend((c..d).map(q));
            }
            let mut listed = picks.clone();
            listed.resize(topk, -1);
            let mut order: Vec<usize> = (0..topk).collect();
            order.sort_by_key(|&i| hash(&[seed, t as u64, i as u64]));
            batch.selection.extend(order.into_iter().map(|i| listed[i]));
        }
        batch
    }

    fn run(&self) -> Got<T> {
        self.run_with(2)
    }

    fn run_with(&self, workers: usize) -> Got<T> {
        self.attempt(workers).unwrap()
    }

    /// Runs over outputs of 7; a refused call must leave them.
    fn attempt(&self, workers: usize) -> Result<Got<T>> {
        let g = &self.geometry;
        let (t, h, c) = (self.row_request.len(), g.num_qo_heads, g.kv_lora_rank);
        let (mut o, mut lse) = (vec![T::of(7.0); t * h * c], vec![7f32; t * h]);
        let bytes = sparse_workspace_bytes(g, self.topk, workers);
        let mut workspace = vec![0xffu8; bytes];
        let done = sparse_attend(
            &Stream::cpu(),
            SparseParams {
                geometry: *g,
                sm_scale: self.sm_scale,
                q_nope: TensorRef::from_slice(&self.q_nope, &[t, h, c]).unwrap(),
                q_pe: TensorRef::from_slice(&self.q_pe, &[t, h, g.qk_rope_head_dim]).unwrap(),
                latent: TensorRef::from_slice(&self.latent, &[self.num_pages, g.page_size, g.latent_dim()])
                    .unwrap(),
                selection: TensorRef::from_slice(&self.selection, &[t, self.topk]).unwrap(),
                row_request: &self.row_request,
                kv_indptr: &self.kv_indptr,
                kv_indices: &self.kv_indices,
                page_start: &self.page_start,
                kv_lens: &self.kv_lens,
                o: TensorMut::from_slice(&mut o, &[t, h, c]).unwrap(),
                lse: Some(TensorMut::from_slice(&mut lse, &[t, h]).unwrap()),
                workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
                workers,
            },
        );
        if done.is_err() {
            assert!(o.iter().all(|x| *x == T::of(7.0)) && lse.iter().all(|&x| x == 7.0), "written");
        }
        done.map(|()| Got { o, lse })
    }

    /// The oracle's answer; rows without a request are given request 0 and nothing picked.
    fn reference(&self) -> Attended {
        let g = &self.geometry;
        let mut selection = self.selection.clone();
        let mut row_request = self.row_request.clone();
        for (row, request) in row_request.iter_mut().enumerate().filter(|(_, request)| **request < 0) {
            *request = 0;
            selection[row * self.topk..(row + 1) * self.topk].fill(-1);
        }
        reference::dsa_attend(&reference::dsa_attend::DsaAttend {
            q_nope: &self.q_nope,
            q_pe: &self.q_pe,
            latent: &self.latent,
            selection: &selection,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            row_request: &row_request,
            page_start: &self.page_start,
            num_qo_heads: g.num_qo_heads,
            kv_lora_rank: g.kv_lora_rank,
            qk_rope_head_dim: g.qk_rope_head_dim,
            page_size: g.page_size,
            sm_scale: self.sm_scale.into(),
        })
        .unwrap()
    }

    fn check(&self) -> Got<T> {
        let (got, want) = (self.run(), self.reference());
        let (h, c) = (self.geometry.num_qo_heads, self.geometry.kv_lora_rank);
        let bound = match T::DTYPE {
            DType::F32 => 1e-6,
            DType::F16 => 6e-4,
            _ => 3.2e-3,
        };
        let (mut error, mut norm, mut lse_error, mut lse_norm) = (0.0, 0.0, 0.0, 0.0);
        for (t, &request) in self.row_request.iter().enumerate() {
            for head in 0..h {
                let at = t * h + head;
                let o = at * c..(at + 1) * c;
                if request < 0 {
                    assert!(got.o[o].iter().all(|x| *x == T::of(7.0)) && got.lse[at] == 7.0, "row {t}");
                    continue;
                }
                for (x, y) in got.o[o.clone()].iter().zip(&want.o[o]) {
                    assert!(!x.to_f64().is_nan(), "row {t}, head {head}");
                    error += (x.to_f64() - y).powi(2);
                    norm += y * y;
                }
                let (x, y) = (f64::from(got.lse[at]), want.lse[at]);
                if y.is_finite() {
                    lse_error += (x - y).powi(2);
                    lse_norm += y * y;
                } else {
                    assert_eq!(x, y);
                }
            }
        }
        let relative = |error: f64, norm: f64| if norm == 0.0 { error } else { (error / norm).sqrt() };
        let (o, lse) = (relative(error, norm), relative(lse_error, lse_norm));
        assert!(o <= bound && lse <= 1e-6, "{:?}: o {o:.3e}, lse {lse:.3e}", self.geometry);
        got
    }
}

/// `count` positions below `len`, each once.
fn picks(count: usize, len: usize, seed: u64) -> Vec<i32> {
    let mut all: Vec<i32> = (0..len as i32).collect();
    all.sort_by_key(|&p| hash(&[seed, p as u64]));
    all.truncate(count);
    all
}

const SHAPE: Shape = (5, 64, 16, 8);

fn rows() -> Vec<(i32, Vec<i32>)> {
    vec![
        (2, picks(40, 300, 1)),
        (0, picks(9, 9, 2)),
        (-1, picks(9, 9, 3)),
        (2, Vec::new()),
        (2, picks(129, 300, 4)),
        (1, vec![0]),
        (2, vec![299, 0, 5]),
        (0, picks(1, 9, 5)),
        (2, picks(300, 300, 6)),
    ]
}

const REQUESTS: [(usize, usize); 4] = [(0, 9), (7, 30), (3, 300), (0, 0)];

fn all_types() {
    Batch::<f32>::make(SHAPE, &REQUESTS, &rows(), 300, 1).check();
    Batch::<bf16>::make(SHAPE, &REQUESTS, &rows(), 300, 2).check();
    Batch::<f16>::make(SHAPE, &REQUESTS, &rows(), 300, 3).check();
}

#[test]
fn picks_in_any_order_agree_in_every_type_and_body() {
    on_every_isa(all_types);
}

#[test]
fn the_shapes_of_models_agree() {
    on_every_isa(|| {
        for (h, c, e) in [(16, 512, 64), (64, 512, 0), (3, 17, 4), (20, 1, 0)] {
            let rows = [(0, picks(700, 900, 1)), (0, picks(31, 900, 2))];
            Batch::<bf16>::make((h, c, e, 64), &[(2, 900)], &rows, 1024, 1).check();
            Batch::<f32>::make((h, c, e, 1), &[(0, 900)], &rows, 1024, 1).check();
        }
    });
}

#[test]
fn f23_rows_that_pick_nothing_yield_zero_and_minus_infinity() {
    on_every_isa(|| {
        for topk in [0, 1, 40] {
            let rows = [(0, Vec::new()), (1, Vec::new()), (-1, Vec::new())];
            let got = Batch::<bf16>::make(SHAPE, &[(0, 9), (0, 0)], &rows, topk, 1).check();
            assert!(got.o[..2 * 5 * 64].iter().all(|x| x.to_bits() == 0));
            assert!(got.lse[..10].iter().all(|&x| x == f32::NEG_INFINITY));
        }
        Batch::<f32>::make(SHAPE, &[(0, 9)], &[], 40, 1).check();
        Batch::<f32>::make(SHAPE, &[], &[(-1, Vec::new())], 3, 1).run();
    });
}

#[test]
fn f23_minus_one_is_never_read_as_a_slot() {
    // Position 0 holds a latent that would outweigh all others.
    let mut batch = Batch::<f32>::make((2, 16, 0, 4), &[(0, 20)], &[(0, vec![7, 3, 9])], 8, 1);
    let clean = batch.run();
    let at = batch.kv_indices[0] as usize * 4 * 16;
    batch.latent[at..at + 16].fill(f32::NAN);
    assert_eq!(clean, batch.run());
    batch.check();
}

#[test]
fn positions_count_from_the_first_kept_token() {
    on_every_isa(|| {
        for start in [0, 1, 7] {
            Batch::<bf16>::make(SHAPE, &[(start, 50)], &[(0, picks(20, 50, 1))], 20, 1).check();
        }
    });
}

#[test]
fn a_position_listed_twice_counts_twice() {
    on_every_isa(|| {
        Batch::<f32>::make(SHAPE, &[(0, 50)], &[(0, vec![4, 4, 4, 17, 30, 30])], 9, 1).check();
    });
}

#[test]
fn the_order_of_a_selection_changes_no_bit() {
    on_every_isa(|| {
        let rows = [(0, picks(1500, 2000, 1)), (0, vec![5, 5, 2])];
        let run = |seed| {
            let mut batch = Batch::<bf16>::make(SHAPE, &[(0, 2000)], &rows, 1600, seed);
            // The same pages whatever the order of picks.
            let like = Batch::<bf16>::make(SHAPE, &[(0, 2000)], &rows, 1600, 1);
            (batch.kv_indices, batch.latent) = (like.kv_indices, like.latent);
            batch.run()
        };
        let first = run(1);
        for seed in 2..5 {
            assert_eq!(first, run(seed));
        }
        let mut sorted = Batch::<bf16>::make(SHAPE, &[(0, 2000)], &rows, 1600, 1);
        sorted.selection.chunks_mut(1600).for_each(<[i32]>::sort_unstable);
        assert_eq!(first, sorted.run());
    });
}

#[test]
fn threads_neighbours_and_the_width_of_the_selection_change_no_bit() {
    fn test<T: Number>() {
        let rows: Vec<_> = (0..11).map(|i| (0, picks(150 * i, 1700, i as u64))).collect();
        let batch = Batch::<T>::make(SHAPE, &[(0, 1700)], &rows, 1600, 1);
        let one = batch.run_with(1);
        for workers in [0, 2, 3, 7] {
            assert_eq!(one, batch.run_with(workers), "{workers} workers");
        }
        let (o, lse) = (5 * 64, 5);
        for (t, row) in rows.iter().enumerate() {
            for topk in [row.1.len(), 1700, 4000] {
                let mut alone =
                    Batch::<T>::make(SHAPE, &[(0, 1700)], std::slice::from_ref(row), topk, 1 + t as u64);
                alone.q_nope = batch.q_nope[t * o..(t + 1) * o].to_vec();
                alone.q_pe = batch.q_pe[t * 80..(t + 1) * 80].to_vec();
                let got = alone.run();
                assert_eq!(got.o, one.o[t * o..(t + 1) * o], "row {t} alone");
                assert_eq!(got.lse, one.lse[t * lse..(t + 1) * lse], "row {t} alone");
            }
        }
    }
    on_every_isa(|| {
        test::<bf16>();
        test::<f32>();
    });
}

#[test]
fn what_is_not_there_is_refused_and_nothing_is_written() {
    let good = Batch::<f32>::make(SHAPE, &[(3, 20), (0, 8)], &[(0, vec![19, 3]), (1, vec![7])], 4, 1);
    good.run();
    let refused = |change: &dyn Fn(&mut Batch<f32>), starts: &str| {
        let mut batch = good.clone();
        change(&mut batch);
        let said = batch.attempt(1).unwrap_err().to_string();
        assert!(said.starts_with(starts), "{said}");
    };
    let first = |batch: &Batch<f32>, pick: i32| batch.selection.iter().position(|&p| p == pick).unwrap();
    let at = first(&good, 19);
    for pick in [20, i32::MAX, -2, i32::MIN] {
        refused(&|batch| batch.selection[at] = pick, &format!("selection[{at}] = {pick}: row 0's request 0"));
    }
    refused(&|batch| batch.row_request[1] = 2, "row_request[1] = 2");
    refused(&|batch| batch.row_request[0] = -2, "row_request[0] = -2");
    refused(&|batch| batch.kv_indices[1] = batch.num_pages as i32, "kv_indices[1]");
    refused(&|batch| batch.kv_indices[0] = -1, "kv_indices[0] = -1");
    refused(&|batch| batch.kv_indptr[0] = 1, "kv_indptr[0] = 1");
    refused(&|batch| batch.kv_indptr = vec![0, 4, 3], "kv_indptr[2] = 3");
    refused(&|batch| batch.kv_indptr[2] = 50, "kv_indptr[2] = 50");
    refused(&|batch| batch.page_start[0] = 9, "page_start[0] = 9");
    refused(&|batch| batch.page_start[1] = -1, "page_start[1] = -1");
    refused(&|batch| batch.page_start[0] = 5, "kv_lens[0] = 20");
    refused(&|batch| batch.kv_lens[1] = 9, "kv_lens[1] = 9");
    refused(&|batch| batch.kv_lens[1] = -1, "kv_lens[1] = -1");
    refused(&|batch| batch.kv_lens.truncate(1), "kv_lens: expected");
    refused(&|batch| batch.kv_indptr.clear(), "kv_indptr: expected");
    refused(&|batch| batch.sm_scale = f32::INFINITY, "sm_scale: must be finite");
    let short = Batch { geometry: Geometry { num_qo_heads: 0, ..good.geometry }, ..good.clone() };
    assert!(short.geometry.check().is_err());
    let small = |bytes: usize| {
        let (mut o, mut workspace) = (vec![0f32; 2 * 5 * 64], vec![0u8; bytes]);
        sparse_attend(
            &Stream::cpu(),
            SparseParams {
                geometry: good.geometry,
                sm_scale: 1.0,
                q_nope: TensorRef::from_slice(&good.q_nope, &[2, 5, 64]).unwrap(),
                q_pe: TensorRef::from_slice(&good.q_pe, &[2, 5, 16]).unwrap(),
                latent: TensorRef::from_slice(&good.latent, &[good.num_pages, 8, 80]).unwrap(),
                selection: TensorRef::from_slice(&good.selection, &[2, 4]).unwrap(),
                row_request: &good.row_request,
                kv_indptr: &good.kv_indptr,
                kv_indices: &good.kv_indices,
                page_start: &good.page_start,
                kv_lens: &good.kv_lens,
                o: TensorMut::from_slice(&mut o, &[2, 5, 64]).unwrap(),
                lse: None,
                workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
                workers: 1,
            },
        )
    };
    let needed = sparse_workspace_bytes(&good.geometry, 4, 1);
    assert!(matches!(small(needed - 1), Err(Error::Workspace { .. })));
    small(needed).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn random_picks_agree(
        h in 1usize..40, c in 1usize..130, e in 0usize..40, s in 1usize..20, start in 0usize..20,
        len in 1usize..600, counts in prop::collection::vec(0usize..600, 1..5), seed: u64,
    ) {
        let start = start.min(s);
        let rows: Vec<_> = counts.iter().map(|&n| (0, picks(n.min(len), len, n as u64 ^ seed))).collect();
        on_every_isa(|| {
            let start = start.min(s.saturating_sub(1));
            Batch::<bf16>::make((h, c, e, s), &[(start, len)], &rows, 600, seed).check();
            Batch::<f32>::make((h, c, e, s), &[(start, len)], &rows, 600, seed).check();
        });
    }
}
