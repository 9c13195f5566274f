//! Batches made from a few numbers, run through the call and through the oracle.

use crate::mla::{AttendParams, Geometry, Variant, attend, schedule, workspace_bytes};
use crate::paged::{PageTable, ScheduleOptions};
use crate::reference::{self, Attended};
pub(crate) use crate::testing::{Number, noise, on_every_isa};
use crate::work::WorkList;
use crate::{DType, Stream, TensorMut, TensorRef};

/// A row to make.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowSpec {
    pub(crate) q_len: usize,
    /// Keys in its pages, those before `start` included.
    pub(crate) kv_len: usize,
    /// Pages given back before the first listed one.
    pub(crate) dropped_pages: usize,
    /// Slots of the first page before the first kept token.
    pub(crate) start: usize,
    /// Another row whose first `n` pages it shares.
    pub(crate) shares: Option<(usize, usize)>,
}

/// `q_len` queries over `kv_len` keys.
pub(crate) fn row(q_len: usize, kv_len: usize) -> RowSpec {
    RowSpec { q_len, kv_len, ..RowSpec::default() }
}

/// Shapes of a layer, all but its types.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) h: usize,
    pub(crate) c: usize,
    pub(crate) e: usize,
    pub(crate) s: usize,
}

/// A batch: tables and tensors. Slots that no row holds are NaN.
#[derive(Clone, Debug)]
pub(crate) struct Batch<Q, K> {
    pub(crate) shape: Shape,
    pub(crate) variant: Variant,
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) kv_indptr: Vec<i32>,
    pub(crate) kv_indices: Vec<i32>,
    pub(crate) kv_last_page_len: Vec<i32>,
    pub(crate) kv_offset: Vec<i64>,
    pub(crate) page_start: Vec<i32>,
    pub(crate) num_pages: usize,
    pub(crate) q_nope: Vec<Q>,
    pub(crate) q_pe: Vec<Q>,
    pub(crate) latent: Vec<K>,
}

/// What a run wrote.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Result<Q> {
    pub(crate) o: Vec<Q>,
    pub(crate) lse: Vec<f32>,
}

impl<Q: Number, K: Number> Batch<Q, K> {
    /// Makes a batch whose tensors depend on each row's own id and content alone, wherever its pages lie.
    /// `placement` renumbers pages.
    pub(crate) fn make(
        shape: Shape,
        variant: Variant,
        rows: &[(u64, RowSpec)],
        placement: u64,
    ) -> Batch<Q, K> {
        let Shape { h, c, e, s } = shape;
        let d = c + e;
        let pages_of = |spec: &RowSpec| spec.kv_len.div_ceil(s);
        let num_pages = rows.iter().map(|(_, spec)| pages_of(spec)).sum::<usize>() + 3;
        let mut ids: Vec<i32> = (0..num_pages as i32).collect();
        ids.sort_by_key(|&id| noise(&[placement, id as u64, 77]).to_bits());
        let mut batch = Batch {
            shape,
            variant,
            qo_indptr: vec![0],
            kv_indptr: vec![0],
            kv_indices: Vec::new(),
            kv_last_page_len: Vec::new(),
            kv_offset: Vec::new(),
            page_start: Vec::new(),
            num_pages,
            q_nope: Vec::new(),
            q_pe: Vec::new(),
            latent: vec![K::of(f32::NAN); num_pages * s * d],
        };
        let mut next = ids.into_iter();
        let mut tables: Vec<Vec<i32>> = Vec::new();
        for (id, spec) in rows {
            let (shared, owner) = match spec.shares {
                Some((other, pages)) => (tables[other][..pages].to_vec(), rows[other].0),
                None => (Vec::new(), *id),
            };
            let own_from = shared.len() * s;
            let mut table = shared;
            table.extend(next.by_ref().take(pages_of(spec) - table.len()));
            let offset = spec.dropped_pages * s;
            for at in spec.start..spec.kv_len {
                let content = if at < own_from { owner } else { *id };
                let token = table[at / s] as usize * s + at % s;
                for lane in 0..d {
                    let x = noise(&[content, (offset + at) as u64, lane as u64, 1]);
                    batch.latent[token * d + lane] = K::of(x * 1.7);
                }
            }
            for i in 0..spec.q_len {
                for head in 0..h {
                    let q = |lane: usize| Q::of(1.7 * noise(&[*id, i as u64, head as u64, lane as u64, 3]));
                    batch.q_nope.extend((0..c).map(q));
                    batch.q_pe.extend((c..d).map(q));
                }
            }
            batch.qo_indptr.push(batch.qo_indptr.last().unwrap() + spec.q_len as i32);
            batch.kv_indices.extend(&table);
            batch.kv_indptr.push(batch.kv_indices.len() as i32);
            batch.kv_last_page_len.push(match spec.kv_len {
                0 => 0,
                n => (n - (pages_of(spec) - 1) * s) as i32,
            });
            batch.kv_offset.push(offset as i64);
            batch.page_start.push(spec.start as i32);
            tables.push(table);
        }
        batch
    }

    /// Rows numbered 0, 1, ..
    pub(crate) fn of(shape: Shape, variant: Variant, rows: &[RowSpec]) -> Batch<Q, K> {
        let rows: Vec<_> = rows.iter().enumerate().map(|(id, spec)| (id as u64, spec.clone())).collect();
        Batch::make(shape, variant, &rows, 1)
    }

    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            num_qo_heads: self.shape.h,
            kv_lora_rank: self.shape.c,
            qk_rope_head_dim: self.shape.e,
            page_size: self.shape.s,
            q_dtype: Q::DTYPE,
            kv_dtype: K::DTYPE,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        *self.qo_indptr.last().unwrap() as usize
    }

    pub(crate) fn table(&self) -> PageTable<'_> {
        PageTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            kv_offset: Some(&self.kv_offset),
            page_start: Some(&self.page_start),
            mask: None,
            num_pages: self.num_pages,
        }
    }

    pub(crate) fn run(&self) -> Result<Q> {
        self.run_with(&ScheduleOptions { workers: 2, ..ScheduleOptions::default() })
    }

    pub(crate) fn run_with(&self, options: &ScheduleOptions) -> Result<Q> {
        let mut work = WorkList::default();
        schedule(&self.geometry(), &self.variant, &self.table(), options, &mut work).unwrap();
        self.run_list(&work, options.workers)
    }

    /// Runs a list of this batch. Outputs have guards before and after, and hold NaN before the run.
    pub(crate) fn run_list(&self, work: &WorkList, workers: usize) -> Result<Q> {
        const GUARD: usize = 64;
        let Shape { h, c, e, s } = self.shape;
        let (real, t) = (self.tokens(), work.num_tokens());
        let (mut q_nope, mut q_pe) = (self.q_nope.clone(), self.q_pe.clone());
        q_nope.resize(t * h * c, Q::of(f32::NAN));
        q_pe.resize(t * h * e, Q::of(f32::NAN));
        let mut o = vec![Q::of(7.0); t * h * c + 2 * GUARD];
        let mut lse = vec![7f32; t * h + 2 * GUARD];
        o[GUARD..GUARD + t * h * c].fill(Q::of(f32::NAN));
        lse[GUARD..GUARD + t * h].fill(f32::NAN);
        let mut workspace = vec![0xffu8; workspace_bytes(work, workers)];
        let bytes = workspace.len();
        let params = AttendParams {
            work,
            q_nope: TensorRef::from_slice(&q_nope, &[t, h, c]).unwrap(),
            q_pe: TensorRef::from_slice(&q_pe, &[t, h, e]).unwrap(),
            latent: TensorRef::from_slice(&self.latent, &[self.num_pages, s, c + e]).unwrap(),
            o: TensorMut::from_slice(&mut o[GUARD..GUARD + t * h * c], &[t, h, c]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse[GUARD..GUARD + t * h], &[t, h]).unwrap()),
            workspace: TensorMut::from_slice(&mut workspace, &[bytes]).unwrap(),
            workers,
        };
        attend(&Stream::cpu(), params).unwrap();
        let guards = |len: usize| (0..GUARD).chain(len - GUARD..len);
        assert!(guards(o.len()).all(|i| o[i] == Q::of(7.0)), "o's guards were written");
        assert!(guards(lse.len()).all(|i| lse[i] == 7.0), "lse's guards were written");
        for token in real..t {
            let o = &o[GUARD + token * h * c..GUARD + (token + 1) * h * c];
            let lse = &lse[GUARD + token * h..GUARD + (token + 1) * h];
            assert!(o.iter().all(|x| x.to_f64() == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
        }
        Result { o: o[GUARD..GUARD + real * h * c].to_vec(), lse: lse[GUARD..GUARD + real * h].to_vec() }
    }

    /// The oracle's answer; it knows no offsets, so rows must start at position 0.
    pub(crate) fn reference(&self) -> Attended {
        let Shape { h, c, e, s } = self.shape;
        let rows = self.kv_last_page_len.len();
        let kv_len: Vec<i32> = (0..rows)
            .map(|r| match self.kv_indptr[r + 1] - self.kv_indptr[r] {
                0 => 0,
                pages => (pages - 1) * s as i32 + self.kv_last_page_len[r],
            })
            .collect();
        reference::mla(&reference::mla::Mla {
            q_nope: &self.q_nope,
            q_pe: &self.q_pe,
            latent: &self.latent,
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_len: &kv_len,
            num_qo_heads: h,
            kv_lora_rank: c,
            qk_rope_head_dim: e,
            page_size: s,
            sm_scale: self.variant.sm_scale.into(),
            causal: self.variant.causal,
        })
        .unwrap()
    }

    /// Runs and holds the result against the oracle.
    pub(crate) fn check(&self) -> Result<Q> {
        let got = self.run();
        let what = format!("{:?} {:?} {:?} {:?}", self.shape, self.variant, Q::DTYPE, K::DTYPE);
        agree(&got, &self.reference(), &what);
        got
    }
}

impl<Q: Clone> Result<Q> {
    /// The part of tokens `from..to`.
    pub(crate) fn tokens(&self, shape: &Shape, from: usize, to: usize) -> Result<Q> {
        let (o, lse) = (shape.h * shape.c, shape.h);
        Result { o: self.o[from * o..to * o].to_vec(), lse: self.lse[from * lse..to * lse].to_vec() }
    }
}

/// Relative L2 error over finite entries; infinities must match, NaN fails with its index.
pub(crate) fn relative_error(got: impl Iterator<Item = f64>, want: &[f64], what: &str) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (index, (got, &want)) in got.zip(want).enumerate() {
        assert!(!got.is_nan(), "{what}: NaN at {index}, expected {want}");
        if want.is_finite() {
            error += (got - want) * (got - want);
            norm += want * want;
        } else {
            assert_eq!(got, want, "{what}: at {index}");
        }
    }
    if norm == 0.0 { error } else { (error / norm).sqrt() }
}

pub(crate) fn agree<Q: Number>(got: &Result<Q>, want: &Attended, what: &str) {
    let bound = match Q::DTYPE {
        DType::F32 => 1e-6,
        DType::F16 => 6e-4,
        _ => 3.2e-3,
    };
    agree_within(got, want, [bound, 1e-6], what);
}

/// The same, within bounds of outputs and `lse`.
pub(crate) fn agree_within<Q: Number>(
    got: &Result<Q>,
    want: &Attended,
    [bound, of_lse]: [f64; 2],
    what: &str,
) {
    let o = relative_error(got.o.iter().map(|x| x.to_f64()), &want.o, &format!("o of {what}"));
    let lse = relative_error(got.lse.iter().map(|&x| x.into()), &want.lse, &format!("lse of {what}"));
    assert!(o <= bound, "o of {what}: relative error {o:.3e}");
    assert!(lse <= of_lse, "lse of {what}: relative error {lse:.3e}");
}

/// Asserts that two results have the same bits.
pub(crate) fn same_bits<Q: Number>(a: &Result<Q>, b: &Result<Q>, what: &str) {
    let bits = |r: &Result<Q>| -> (Vec<u8>, Vec<u32>) {
        (bytemuck::cast_slice(&r.o).to_vec(), r.lse.iter().map(|x| x.to_bits()).collect())
    };
    let ((ao, al), (bo, bl)) = (bits(a), bits(b));
    assert_eq!((ao.len(), al.len()), (bo.len(), bl.len()), "{what}: sizes");
    assert_eq!(ao.iter().zip(&bo).position(|(a, b)| a != b), None, "{what}: first different byte of o");
    assert_eq!(al.iter().zip(&bl).position(|(a, b)| a != b), None, "{what}: first different entry of lse");
}
