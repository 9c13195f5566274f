//! Batches made from a few numbers, run through the wrapper level and through the oracle.

use half::{bf16, f16};
use mstar_attn_paged::{
    DType, Geometry, Inputs, Mask, MaskEntries, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut,
    TensorRef, Variant, Workspace, run,
};
use mstar_kernels::Element;
use mstar_kernels::reference::paged::{Cache, Options, Paged};
use mstar_kernels::reference::{self, Attended, Real};

/// A row to make: query tokens, keys, and how its stream starts.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowSpec {
    pub(crate) q_len: usize,
    /// Keys in its pages, those before `start` included.
    pub(crate) kv_len: usize,
    /// Pages given back before the first listed one.
    pub(crate) dropped_pages: usize,
    /// Slots of the first page before the first kept token.
    pub(crate) start: usize,
    /// A custom mask, by (query, absolute position).
    pub(crate) mask: Option<fn(usize, usize) -> bool>,
    /// Another row whose first `n` pages it shares.
    pub(crate) shares: Option<(usize, usize)>,
}

/// `q_len` queries over `kv_len` keys.
pub(crate) fn row(q_len: usize, kv_len: usize) -> RowSpec {
    RowSpec { q_len, kv_len, ..RowSpec::default() }
}

/// An element type of tests.
pub(crate) trait Number: Element + Real + PartialEq + std::fmt::Debug {
    fn of(value: f32) -> Self;
    fn bits(self) -> u32;
}

impl Number for f32 {
    fn of(value: f32) -> f32 {
        value
    }
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Number for bf16 {
    fn of(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Number for f16 {
    fn of(value: f32) -> f16 {
        f16::from_f32(value)
    }
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

/// Shapes of a layer, all but its types.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) h: usize,
    pub(crate) g: usize,
    pub(crate) d: usize,
    pub(crate) dv: usize,
    pub(crate) s: usize,
}

/// A batch: tables, tensors and the layer's arithmetic.
#[derive(Clone, Debug)]
pub(crate) struct Batch<T> {
    pub(crate) shape: Shape,
    pub(crate) variant: Variant,
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) kv_indptr: Vec<i32>,
    pub(crate) kv_indices: Vec<i32>,
    pub(crate) kv_last_page_len: Vec<i32>,
    pub(crate) kv_offset: Vec<i64>,
    pub(crate) page_start: Vec<i32>,
    pub(crate) masks: Vec<Option<Vec<bool>>>,
    pub(crate) num_pages: usize,
    pub(crate) q: Vec<T>,
    pub(crate) k: Vec<T>,
    pub(crate) v: Vec<T>,
    pub(crate) sinks: Vec<f32>,
    pub(crate) slopes: Vec<f32>,
}

/// What a run wrote.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Result<T> {
    pub(crate) o: Vec<T>,
    pub(crate) lse: Vec<f32>,
}

/// A hash of integers as a number in -1..1.
fn noise(parts: &[u64]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for &part in parts {
        x = (x ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
    }
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

impl<T: Number> Batch<T> {
    /// Makes a batch whose tensors depend on `seed` and each row's own content alone: row `r`'s keys are a function of
    /// (`seed`, `ids[r]`, position), wherever its pages lie. `placement` renumbers pages.
    pub(crate) fn make(
        shape: Shape,
        variant: Variant,
        rows: &[(u64, RowSpec)],
        seed: u64,
        placement: u64,
    ) -> Batch<T> {
        let Shape { h, g, d, dv, s } = shape;
        let pages_of = |spec: &RowSpec| spec.kv_len.div_ceil(s);
        let needed: usize = rows.iter().map(|(_, spec)| pages_of(spec)).sum();
        let num_pages = needed + 3;
        // A permutation of the pool, one page of which nobody gets.
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
            masks: Vec::new(),
            num_pages,
            q: Vec::new(),
            k: vec![T::of(f32::NAN); num_pages * s * g * d],
            v: vec![T::of(f32::NAN); num_pages * s * g * dv],
            sinks: (0..h).map(|h| noise(&[seed, h as u64, 5]) * 2.0).collect(),
            slopes: (0..h).map(|h| 2f32.powf(-8.0 * (h + 1) as f32 / h.max(1) as f32 / 4.0)).collect(),
        };
        let mut next = ids.into_iter();
        let mut tables: Vec<Vec<i32>> = Vec::new();
        let mut streams: Vec<(u64, usize)> = Vec::new();
        for (id, spec) in rows {
            let (shared, owner) = match spec.shares {
                Some((other, pages)) => (tables[other][..pages].to_vec(), streams[other].0),
                None => (Vec::new(), *id),
            };
            let own_from = shared.len() * s;
            let mut table = shared;
            table.extend(next.by_ref().take(pages_of(spec) - table.len()));
            let offset = spec.dropped_pages * s;
            for at in 0..spec.kv_len {
                if at < spec.start {
                    continue;
                }
                let content = if at < own_from { owner } else { *id };
                let (page, slot, position) = (table[at / s] as usize, at % s, (offset + at) as u64);
                for head in 0..g {
                    let token = (page * s + slot) * g + head;
                    for lane in 0..d {
                        let x = noise(&[seed, content, position, head as u64, lane as u64, 1]);
                        batch.k[token * d + lane] = T::of(x * 1.7);
                    }
                    for lane in 0..dv {
                        let x = noise(&[seed, content, position, head as u64, lane as u64, 2]);
                        batch.v[token * dv + lane] = T::of(x);
                    }
                }
            }
            for i in 0..spec.q_len {
                for head in 0..h {
                    for lane in 0..d {
                        let x = noise(&[seed, *id, i as u64, head as u64, lane as u64, 3]);
                        batch.q.push(T::of(x * 1.7));
                    }
                }
            }
            let kv_end = offset + spec.kv_len;
            batch.masks.push(
                spec.mask
                    .map(|mask| (0..spec.q_len * kv_end).map(|at| mask(at / kv_end, at % kv_end)).collect()),
            );
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
            streams.push((*id, spec.kv_len));
        }
        batch
    }

    /// Rows numbered 0, 1, .. with seed 1.
    pub(crate) fn of(shape: Shape, variant: Variant, rows: &[RowSpec]) -> Batch<T> {
        let rows: Vec<_> = rows.iter().enumerate().map(|(id, spec)| (id as u64, spec.clone())).collect();
        Batch::make(shape, variant, &rows, 1, 1)
    }

    pub(crate) fn geometry(&self) -> Geometry {
        let Shape { h, g, d, dv, s } = self.shape;
        Geometry {
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            page_size: s,
            q_dtype: T::DTYPE,
            kv_dtype: T::DTYPE,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        *self.qo_indptr.last().unwrap() as usize
    }

    /// Calls `then` with the batch's table.
    pub(crate) fn with_table<R>(&self, then: impl FnOnce(&PageTable<'_>) -> R) -> R {
        let masked = self.masks.iter().any(Option::is_some);
        let mut bytes = Vec::new();
        let mut indptr = vec![0];
        for mask in &self.masks {
            bytes.extend(mask.iter().flatten().map(|&seen| u8::from(seen)));
            indptr.push(bytes.len() as i64);
        }
        let mask = masked.then_some(Mask { entries: MaskEntries::Bytes(&bytes), indptr: &indptr });
        then(&PageTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            kv_offset: Some(&self.kv_offset),
            page_start: Some(&self.page_start),
            mask,
            num_pages: self.num_pages,
        })
    }

    pub(crate) fn plan(&self, options: &PlanOptions) -> Plan {
        self.with_table(|table| Plan::new(&self.geometry(), &self.variant, table, options)).unwrap()
    }

    pub(crate) fn run(&self) -> Result<T> {
        self.run_with(&PlanOptions::default())
    }

    pub(crate) fn run_with(&self, options: &PlanOptions) -> Result<T> {
        let plan = self.plan(options);
        let mut workspace = Workspace::for_plan(&plan).unwrap();
        self.run_plan(&plan, &mut workspace)
    }

    /// Runs a plan of this batch. Outputs have guards before and after, and hold NaN before the run.
    pub(crate) fn run_plan(&self, plan: &Plan, workspace: &mut Workspace) -> Result<T> {
        const GUARD: usize = 64;
        let Shape { h, g, d, dv, s } = self.shape;
        let (real, t) = (self.tokens(), plan.num_tokens());
        let mut q = self.q.clone();
        q.resize(t * h * d, T::of(f32::NAN));
        let mut o = vec![T::of(7.0); t * h * dv + 2 * GUARD];
        let mut lse = vec![7f32; t * h + 2 * GUARD];
        o[GUARD..GUARD + t * h * dv].fill(T::of(f32::NAN));
        lse[GUARD..GUARD + t * h].fill(f32::NAN);
        let inputs = Inputs {
            q: TensorRef::from_slice(&q, &[t, h, d]).unwrap(),
            k: TensorRef::from_slice(&self.k, &[self.num_pages, s, g, d]).unwrap(),
            v: TensorRef::from_slice(&self.v, &[self.num_pages, s, g, dv]).unwrap(),
            sinks: self.variant.sinks.then(|| TensorRef::from_slice(&self.sinks, &[h]).unwrap()),
            alibi_slopes: self.variant.alibi.then(|| TensorRef::from_slice(&self.slopes, &[h]).unwrap()),
        };
        let outputs = Outputs {
            o: TensorMut::from_slice(&mut o[GUARD..GUARD + t * h * dv], &[t, h, dv]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse[GUARD..GUARD + t * h], &[t, h]).unwrap()),
        };
        run(plan, &Stream::cpu(), workspace, inputs, outputs).unwrap();
        let guards = |len: usize| (0..GUARD).chain(len - GUARD..len);
        assert!(guards(o.len()).all(|i| o[i] == T::of(7.0)), "o's guards were written");
        assert!(guards(lse.len()).all(|i| lse[i] == 7.0), "lse's guards were written");
        for token in real..t {
            let o = &o[GUARD + token * h * dv..GUARD + (token + 1) * h * dv];
            let lse = &lse[GUARD + token * h..GUARD + (token + 1) * h];
            assert!(o.iter().all(|x| x.to_f64() == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
        }
        Result { o: o[GUARD..GUARD + real * h * dv].to_vec(), lse: lse[GUARD..GUARD + real * h].to_vec() }
    }

    /// The oracle's answer.
    pub(crate) fn reference(&self) -> Attended {
        let Shape { h, g, d, dv, s } = self.shape;
        let masks: Vec<Option<&[bool]>> = self.masks.iter().map(|mask| mask.as_deref()).collect();
        let offsets: Vec<usize> = self.kv_offset.iter().map(|&x| x as usize).collect();
        let starts: Vec<usize> = self.page_start.iter().map(|&x| x as usize).collect();
        let options = Options {
            window_left: self.variant.window_left.map_or(-1, |left| left as i64),
            logits_soft_cap: self.variant.logits_soft_cap.map_or(0.0, f64::from),
            sinks: self.variant.sinks.then_some(&self.sinks[..]),
            alibi_slopes: self.variant.alibi.then_some(&self.slopes[..]),
            masks: &masks,
            kv_offset: &offsets,
            page_start: &starts,
        };
        reference::paged(&Paged {
            q: &self.q,
            cache: Cache::Split { k: &self.k, v: &self.v },
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            page_size: s,
            sm_scale: self.variant.sm_scale.into(),
            causal: self.variant.causal,
            options,
        })
        .unwrap()
    }

    /// Runs and holds the result against the oracle.
    pub(crate) fn check(&self) -> Result<T> {
        let got = self.run();
        agree(&got, &self.reference(), &format!("{:?} {:?} {:?}", self.shape, self.variant, T::DTYPE));
        got
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

pub(crate) fn agree<T: Number>(got: &Result<T>, want: &Attended, what: &str) {
    let bound = match T::DTYPE {
        DType::F32 => 1e-6,
        DType::F16 => 6e-4,
        _ => 3.2e-3,
    };
    let o = relative_error(got.o.iter().map(|x| x.to_f64()), &want.o, &format!("o of {what}"));
    let lse = relative_error(got.lse.iter().map(|&x| x.into()), &want.lse, &format!("lse of {what}"));
    assert!(o <= bound, "o of {what}: relative error {o:.3e}");
    assert!(lse <= 1e-6, "lse of {what}: relative error {lse:.3e}");
}

/// Asserts that two results, or parts of them, have the same bits.
pub(crate) fn same_bits<T: Number>(a: &Result<T>, b: &Result<T>, what: &str) {
    let differ = |a: &[u32], b: &[u32]| a.iter().zip(b).position(|(a, b)| a != b);
    let bits = |r: &Result<T>| -> (Vec<u32>, Vec<u32>) {
        (r.o.iter().map(|x| x.bits()).collect(), r.lse.iter().map(|x| x.to_bits()).collect())
    };
    let ((ao, al), (bo, bl)) = (bits(a), bits(b));
    assert_eq!((ao.len(), al.len()), (bo.len(), bl.len()), "{what}: sizes");
    assert_eq!(differ(&ao, &bo), None, "{what}: first different bit pattern of o");
    assert_eq!(differ(&al, &bl), None, "{what}: first different bit pattern of lse");
}

impl<T: Number> Result<T> {
    /// The part of tokens `from..to`.
    pub(crate) fn tokens(&self, shape: &Shape, from: usize, to: usize) -> Result<T> {
        let (o, lse) = (shape.h * shape.dv, shape.h);
        Result { o: self.o[from * o..to * o].to_vec(), lse: self.lse[from * lse..to * lse].to_vec() }
    }
}
