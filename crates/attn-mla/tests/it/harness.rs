//! Batches made from a few numbers, run through the wrapper level and through the oracle.

use half::{bf16, f16};
use mstar_attn_mla::{
    DType, Geometry, Inputs, Outputs, PageTable, Plan, PlanOptions, Stream, TensorMut, TensorRef, Variant,
    Workspace, run,
};
use mstar_kernels::Element;
use mstar_kernels::cpu::Isa;
use mstar_kernels::reference::mla::{Mla, mla};
use mstar_kernels::reference::{Attended, Real};

/// A row to make: query tokens, latents, and how its stream starts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowSpec {
    pub(crate) q_len: usize,
    /// Latents in its pages, those before `start` included.
    pub(crate) kv_len: usize,
    /// Pages given back before the first listed one.
    pub(crate) dropped_pages: usize,
    /// Slots of the first page before the first kept token.
    pub(crate) start: usize,
    /// Another row whose first `n` pages it shares.
    pub(crate) shares: Option<(usize, usize)>,
}

/// `q_len` queries over `kv_len` latents.
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
    pub(crate) c: usize,
    pub(crate) e: usize,
    pub(crate) s: usize,
}

/// A batch: tables, tensors and the layer's arithmetic. Queries and outputs are of `T`, latents of `K`.
#[derive(Clone, Debug)]
pub(crate) struct Mixed<T, K> {
    pub(crate) shape: Shape,
    pub(crate) variant: Variant,
    pub(crate) qo_indptr: Vec<i32>,
    pub(crate) kv_indptr: Vec<i32>,
    pub(crate) kv_indices: Vec<i32>,
    pub(crate) kv_last_page_len: Vec<i32>,
    pub(crate) kv_offset: Vec<i64>,
    pub(crate) page_start: Vec<i32>,
    pub(crate) num_pages: usize,
    pub(crate) q_nope: Vec<T>,
    pub(crate) q_pe: Vec<T>,
    pub(crate) latent: Vec<K>,
    rows: Vec<RowSpec>,
}

/// A batch of one type.
pub(crate) type Batch<T> = Mixed<T, T>;

/// What a run wrote.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Result<T> {
    pub(crate) o: Vec<T>,
    pub(crate) lse: Vec<f32>,
}

/// A hash of integers as a number in -1..1.
pub(crate) fn noise(parts: &[u64]) -> f32 {
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for &part in parts {
        x = (x ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
    }
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A causal layer whose scores have a real spread.
pub(crate) fn causal(shape: Shape) -> Variant {
    Variant { sm_scale: 1.0 / ((shape.c + shape.e) as f32).sqrt(), causal: true }
}

impl<T: Number, K: Number> Mixed<T, K> {
    /// Makes a batch whose tensors depend on `seed` and each row's own content alone: row `r`'s latents are a function of
    /// (`seed`, its id, position), wherever its pages lie. `placement` renumbers pages.
    pub(crate) fn make(
        shape: Shape,
        variant: Variant,
        rows: &[(u64, RowSpec)],
        seed: u64,
        placement: u64,
    ) -> Mixed<T, K> {
        let Shape { h, c, e, s } = shape;
        let width = c + e;
        let pages_of = |spec: &RowSpec| spec.kv_len.div_ceil(s);
        let needed: usize = rows.iter().map(|(_, spec)| pages_of(spec)).sum();
        let num_pages = needed + 3;
        // A permutation of the pool, some pages of which nobody gets.
        let mut ids: Vec<i32> = (0..num_pages as i32).collect();
        ids.sort_by_key(|&id| noise(&[placement, id as u64, 77]).to_bits());
        let mut batch = Mixed {
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
            latent: vec![K::of(f32::NAN); num_pages * s * width],
            rows: rows.iter().map(|(_, spec)| *spec).collect(),
        };
        let mut next = ids.into_iter();
        let mut tables: Vec<(u64, Vec<i32>)> = Vec::new();
        for (id, spec) in rows {
            let (owner, shared) = match spec.shares {
                Some((other, pages)) => (tables[other].0, tables[other].1[..pages].to_vec()),
                None => (*id, Vec::new()),
            };
            let own_from = shared.len() * s;
            let mut table = shared;
            table.extend(next.by_ref().take(pages_of(spec) - table.len()));
            let offset = spec.dropped_pages * s;
            for at in spec.start..spec.kv_len {
                let content = if at < own_from { owner } else { *id };
                let token = table[at / s] as usize * s + at % s;
                for lane in 0..width {
                    let x = noise(&[seed, content, (offset + at) as u64, lane as u64, 1]);
                    batch.latent[token * width + lane] = K::of(x * 1.7);
                }
            }
            for at in 0..spec.q_len * h {
                let lane = |lane: usize| T::of(noise(&[seed, *id, at as u64, lane as u64, 3]) * 1.7);
                batch.q_nope.extend((0..c).map(lane));
                batch.q_pe.extend((c..width).map(lane));
            }
            batch.qo_indptr.push(batch.qo_indptr.last().unwrap() + spec.q_len as i32);
            batch.kv_indices.extend(&table);
            batch.kv_indptr.push(batch.kv_indices.len() as i32);
            let full = pages_of(spec).saturating_sub(1) * s;
            batch.kv_last_page_len.push((spec.kv_len - full) as i32);
            batch.kv_offset.push(offset as i64);
            batch.page_start.push(spec.start as i32);
            tables.push((*id, table));
        }
        batch
    }

    /// Rows numbered 0, 1, .. with seed 1.
    pub(crate) fn of(shape: Shape, variant: Variant, rows: &[RowSpec]) -> Mixed<T, K> {
        let rows: Vec<_> = rows.iter().enumerate().map(|(id, spec)| (id as u64, *spec)).collect();
        Mixed::make(shape, variant, &rows, 1, 1)
    }

    pub(crate) fn geometry(&self) -> Geometry {
        let Shape { h, c, e, s } = self.shape;
        Geometry {
            num_qo_heads: h,
            kv_lora_rank: c,
            qk_rope_head_dim: e,
            page_size: s,
            q_dtype: T::DTYPE,
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

    pub(crate) fn plan(&self, options: &PlanOptions) -> Plan {
        Plan::new(&self.geometry(), &self.variant, &self.table(), options).unwrap()
    }

    pub(crate) fn run(&self) -> Result<T> {
        self.run_with(&PlanOptions::default())
    }

    pub(crate) fn run_with(&self, options: &PlanOptions) -> Result<T> {
        let plan = self.plan(options);
        self.run_plan(&plan, &mut Workspace::for_plan(&plan).unwrap())
    }

    /// Runs a plan of this batch. Outputs have guards before and after, and hold NaN before the run; padding is fed NaN.
    pub(crate) fn run_plan(&self, plan: &Plan, workspace: &mut Workspace) -> Result<T> {
        const GUARD: usize = 64;
        let Shape { h, c, e, s } = self.shape;
        let (real, t) = (self.tokens(), plan.num_tokens());
        let (mut q_nope, mut q_pe) = (self.q_nope.clone(), self.q_pe.clone());
        q_nope.resize(t * h * c, T::of(f32::NAN));
        q_pe.resize(t * h * e, T::of(f32::NAN));
        let mut o = vec![T::of(7.0); t * h * c + 2 * GUARD];
        let mut lse = vec![7f32; t * h + 2 * GUARD];
        o[GUARD..GUARD + t * h * c].fill(T::of(f32::NAN));
        lse[GUARD..GUARD + t * h].fill(f32::NAN);
        let inputs = Inputs {
            q_nope: TensorRef::from_slice(&q_nope, &[t, h, c]).unwrap(),
            q_pe: TensorRef::from_slice(&q_pe, &[t, h, e]).unwrap(),
            latent: TensorRef::from_slice(&self.latent, &[self.num_pages, s, c + e]).unwrap(),
        };
        let outputs = Outputs {
            o: TensorMut::from_slice(&mut o[GUARD..GUARD + t * h * c], &[t, h, c]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse[GUARD..GUARD + t * h], &[t, h]).unwrap()),
        };
        run(plan, &Stream::cpu(), workspace, inputs, outputs).unwrap();
        let guards = |len: usize| (0..GUARD).chain(len - GUARD..len);
        assert!(guards(o.len()).all(|i| o[i] == T::of(7.0)), "o's guards were written");
        assert!(guards(lse.len()).all(|i| lse[i] == 7.0), "lse's guards were written");
        for token in real..t {
            let o = &o[GUARD + token * h * c..GUARD + (token + 1) * h * c];
            let lse = &lse[GUARD + token * h..GUARD + (token + 1) * h];
            assert!(o.iter().all(|x| x.bits() == 0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
        }
        Result { o: o[GUARD..GUARD + real * h * c].to_vec(), lse: lse[GUARD..GUARD + real * h].to_vec() }
    }

    /// The oracle's answer: each row over its latents laid side by side.
    pub(crate) fn reference(&self) -> Attended {
        let Shape { h, c, e, s } = self.shape;
        let width = c + e;
        let mut all = Attended { o: vec![], lse: vec![] };
        for (r, spec) in self.rows.iter().enumerate() {
            let pages = &self.kv_indices[self.kv_indptr[r] as usize..self.kv_indptr[r + 1] as usize];
            let place = |at: usize| (pages[at / s] as usize * s + at % s) * width;
            let kept = spec.start.min(spec.kv_len)..spec.kv_len;
            let latent: Vec<K> =
                kept.clone().flat_map(|at| self.latent[place(at)..place(at) + width].to_vec()).collect();
            let tokens = self.qo_indptr[r] as usize..self.qo_indptr[r + 1] as usize;
            let listed = i32::from(!kept.is_empty());
            let got = mla(&Mla {
                q_nope: &self.q_nope[tokens.start * h * c..tokens.end * h * c],
                q_pe: &self.q_pe[tokens.start * h * e..tokens.end * h * e],
                latent: &latent,
                qo_indptr: &[0, spec.q_len as i32],
                kv_indptr: &[0, listed],
                kv_indices: &[0][..listed as usize],
                kv_len: &[kept.len() as i32],
                num_qo_heads: h,
                kv_lora_rank: c,
                qk_rope_head_dim: e,
                page_size: kept.len().max(1),
                sm_scale: self.variant.sm_scale.into(),
                causal: self.variant.causal,
            })
            .unwrap();
            all.o.extend(got.o);
            all.lse.extend(got.lse);
        }
        all
    }

    /// Runs and holds the result against the oracle.
    pub(crate) fn check(&self) -> Result<T> {
        let got = self.run();
        let coarse = [T::DTYPE, K::DTYPE].contains(&DType::Bf16);
        let what = format!("{:?} {:?} {:?} {:?}", self.shape, self.variant, T::DTYPE, self.rows);
        agree(&got, &self.reference(), coarse, &what);
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

pub(crate) fn agree<T: Number>(got: &Result<T>, want: &Attended, coarse: bool, what: &str) {
    assert_eq!((got.o.len(), got.lse.len()), (want.o.len(), want.lse.len()), "{what}");
    let bound = match T::DTYPE {
        _ if coarse => 3.2e-3,
        DType::F16 => 6e-4,
        _ => 1e-6,
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
        let (o, lse) = (shape.h * shape.c, shape.h);
        Result { o: self.o[from * o..to * o].to_vec(), lse: self.lse[from * lse..to * lse].to_vec() }
    }
}

/// Once with each instruction set that this machine has.
pub(crate) fn on_every_isa(mut test: impl FnMut()) {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        test();
    }
}
