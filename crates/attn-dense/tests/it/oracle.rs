//! The wrapper level against the oracle: ragged rows of `[prefix | fresh]` in every type, any head width.

use half::{bf16, f16};
use mstar_attn_dense::{
    Capacity, DensePlan, Geometry, Inputs, Outputs, PlanOptions, Prefix, Stream, Table, TensorMut, TensorRef,
    Variant, Workspace, run,
};
use mstar_kernels::Element;
use mstar_kernels::reference::Real;
use mstar_kernels::reference::dense::{Dense, dense};
use proptest::prelude::*;

use crate::alloc::allocations;
use crate::rig::noise;

/// Heads and widths of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) h: usize,
    pub(crate) g: usize,
    pub(crate) d: usize,
    pub(crate) dv: usize,
}

/// A row: queries, prefix, fresh keys.
pub(crate) type RowLens = (usize, usize, usize);

pub(crate) trait Number: Element + Real + PartialEq + std::fmt::Debug {
    /// Relative L2 error that is let through.
    const ERROR: f64;
    fn of(value: f32) -> Self;
}

impl Number for f32 {
    const ERROR: f64 = 1e-6;
    fn of(value: f32) -> f32 {
        value
    }
}

impl Number for bf16 {
    const ERROR: f64 = 4e-3;
    fn of(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

impl Number for f16 {
    const ERROR: f64 = 5e-4;
    fn of(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

/// Packed tensors of a batch: prefixes, and fresh tokens; what lies past what the table counts is NaN.
#[derive(Debug)]
pub(crate) struct Batch<T> {
    pub(crate) shape: Shape,
    pub(crate) causal: bool,
    pub(crate) cu_q: Vec<i32>,
    pub(crate) cu_p: Vec<i32>,
    pub(crate) cu_k: Vec<i32>,
    q: Vec<T>,
    prefix: [Vec<T>; 2],
    fresh: [Vec<T>; 2],
}

/// Rows past the end of every packed tensor.
const SPARE: usize = 3;

impl<T: Number> Batch<T> {
    pub(crate) fn of(shape: Shape, causal: bool, rows: &[RowLens]) -> Batch<T> {
        let indptr = |len: fn(&RowLens) -> usize| -> Vec<i32> {
            let mut indptr = vec![0];
            rows.iter().for_each(|row| indptr.push(indptr[indptr.len() - 1] + len(row) as i32));
            indptr
        };
        let (cu_q, cu_p, cu_k) = (indptr(|r| r.0), indptr(|r| r.1), indptr(|r| r.2));
        let made = |tokens: i32, width: usize, kind: u64, spare: usize| -> Vec<T> {
            let lanes = tokens as usize * width;
            let mut values: Vec<T> = (0..lanes).map(|at| T::of(1.5 * noise(&[kind, at as u64]))).collect();
            values.resize(lanes + spare * width, T::of(f32::NAN));
            values
        };
        let Shape { h, g, d, dv } = shape;
        let [t, p, u] = [&cu_q, &cu_p, &cu_k].map(|indptr| indptr[rows.len()]);
        Batch {
            shape,
            causal,
            q: made(t, h * d, 0, 0),
            prefix: [made(p, g * d, 1, SPARE), made(p, g * dv, 2, SPARE)],
            fresh: [made(u, g * d, 3, SPARE), made(u, g * dv, 4, SPARE)],
            cu_q,
            cu_p,
            cu_k,
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        let Shape { h, g, d, dv } = self.shape;
        Geometry {
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            q_dtype: T::DTYPE,
            kv_dtype: T::DTYPE,
        }
    }

    pub(crate) fn variant(&self) -> Variant {
        Variant { causal: self.causal, ..Variant::causal(self.shape.d) }
    }

    pub(crate) fn table(&self) -> Table<'_> {
        Table { cu_q: &self.cu_q, prefix: Prefix::Packed { cu_p: &self.cu_p }, cu_k: &self.cu_k }
    }

    pub(crate) fn plan(&self, options: &PlanOptions) -> DensePlan {
        DensePlan::new(&self.geometry(), &self.variant(), &self.table(), options).unwrap()
    }

    /// Runs `plan`, whose padded tokens are fed NaN, into outputs of NaN.
    pub(crate) fn run(&self, plan: &DensePlan) -> (Vec<T>, Vec<f32>) {
        let mut workspace = Workspace::with_bytes(plan.workspace_bytes()).unwrap();
        let Shape { h, g, d, dv } = self.shape;
        let tokens = plan.num_tokens();
        let mut q = self.q.clone();
        q.resize(tokens * h * d, T::of(f32::NAN));
        let (mut o, mut lse) = (vec![T::of(f32::NAN); tokens * h * dv], vec![f32::NAN; tokens * h]);
        fn view<T: Number>(x: &[T], g: usize, width: usize) -> TensorRef<'_> {
            TensorRef::from_slice(x, &[x.len() / (g * width), g, width]).unwrap()
        }
        let inputs = Inputs {
            q: TensorRef::from_slice(&q, &[tokens, h, d]).unwrap(),
            k_prefix: Some(view(&self.prefix[0], g, d)),
            v_prefix: Some(view(&self.prefix[1], g, dv)),
            k: view(&self.fresh[0], g, d),
            v: view(&self.fresh[1], g, dv),
        };
        let outputs = Outputs {
            o: TensorMut::from_slice(&mut o, &[tokens, h, dv]).unwrap(),
            lse: Some(TensorMut::from_slice(&mut lse, &[tokens, h]).unwrap()),
        };
        let stream = Stream::cpu();
        let mut result = Ok(());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let counted =
            pool.install(|| allocations(|| result = run(plan, &stream, &mut workspace, inputs, outputs)));
        result.unwrap();
        assert_eq!(counted, 0, "a run allocates nothing");
        (o, lse)
    }

    /// The oracle over one array of keys, which no kernel here ever builds.
    pub(crate) fn want(&self) -> (Vec<f64>, Vec<f64>) {
        let Shape { h, g, d, dv } = self.shape;
        let joined = |which: usize, width: usize| -> Vec<T> {
            let mut joined = Vec::new();
            for row in 0..self.cu_q.len() - 1 {
                for (indptr, from) in [(&self.cu_p, &self.prefix[which]), (&self.cu_k, &self.fresh[which])] {
                    let of = |at: i32| at as usize * g * width;
                    joined.extend_from_slice(&from[of(indptr[row])..of(indptr[row + 1])]);
                }
            }
            joined
        };
        let cu_k: Vec<i32> = self.cu_p.iter().zip(&self.cu_k).map(|(p, k)| p + k).collect();
        let want = dense(&Dense {
            q: &self.q,
            k: &joined(0, d),
            v: &joined(1, dv),
            cu_q: &self.cu_q,
            cu_k: &cu_k,
            num_qo_heads: h,
            num_kv_heads: g,
            head_dim_qk: d,
            head_dim_vo: dv,
            sm_scale: self.variant().sm_scale.into(),
            causal: self.causal,
        })
        .unwrap();
        (want.o, want.lse)
    }

    pub(crate) fn agrees(&self) {
        let (o, lse) = self.run(&self.plan(&PlanOptions::default()));
        self.is_right(&o, &lse);
    }

    pub(crate) fn is_right(&self, o: &[T], lse: &[f32]) {
        let (want_o, want_lse) = self.want();
        let got: Vec<f64> = o.iter().map(|x| x.to_f64()).collect();
        within(&got, &want_o, T::ERROR, "o");
        let got: Vec<f64> = lse.iter().map(|&x| f64::from(x)).collect();
        within(&got, &want_lse, 1e-6, "lse");
    }
}

/// Relative L2 error over finite entries; infinities equal.
fn within(got: &[f64], want: &[f64], most: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    let (mut difference, mut norm) = (0f64, 0f64);
    for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
        if got.is_finite() && want.is_finite() {
            difference += (got - want).powi(2);
            norm += want * want;
        } else {
            assert!(got == want, "{what}[{at}] is {got}, not {want}");
        }
    }
    let (difference, norm) = (difference.sqrt(), norm.sqrt());
    assert!(difference <= most * norm, "{what}: {difference} of {norm}");
}

const RAGGED: [RowLens; 6] = [(3, 20, 3), (0, 5, 0), (70, 0, 70), (1, 300, 1), (5, 7, 5), (2, 0, 0)];

#[test]
fn ragged_rows_agree_in_every_type() {
    for (h, g, d, dv) in [(4, 2, 64, 64), (8, 1, 128, 128), (3, 3, 192, 128), (2, 1, 17, 5), (6, 2, 512, 512)]
    {
        let shape = Shape { h, g, d, dv };
        for causal in [true, false] {
            Batch::<f32>::of(shape, causal, &RAGGED).agrees();
            Batch::<bf16>::of(shape, causal, &RAGGED).agrees();
            Batch::<f16>::of(shape, causal, &RAGGED).agrees();
        }
    }
}

#[test]
fn prefixes_longer_than_a_leaf_agree() {
    let shape = Shape { h: 2, g: 1, d: 32, dv: 32 };
    for causal in [true, false] {
        Batch::<f32>::of(shape, causal, &[(4, 4094, 4), (9, 9000, 9), (300, 4500, 300)]).agrees();
    }
}

#[test]
fn a_capacity_changes_no_bit() {
    let shape = Shape { h: 4, g: 2, d: 32, dv: 32 };
    let batch = Batch::<f32>::of(shape, true, &RAGGED);
    let eager = batch.run(&batch.plan(&PlanOptions::default()));
    let capacity = Capacity { rows: 10, tokens: 100, pages: 0 };
    let padded = batch.run(&batch.plan(&PlanOptions { capacity: Some(capacity), ..PlanOptions::default() }));
    let (o, lse) = (eager.0.len(), eager.1.len());
    assert!(padded.0[..o] == eager.0 && padded.1[..lse] == eager.1);
    assert!(
        padded.0[o..].iter().all(|x| *x == 0.0) && padded.1[lse..].iter().all(|x| *x == f32::NEG_INFINITY)
    );
}

#[test]
fn a_table_without_prefixes_takes_none_and_one_with_prefixes_needs_them() {
    let geometry = Batch::<f32>::of(Shape { h: 1, g: 1, d: 4, dv: 4 }, false, &[]).geometry();
    let (data, mut o) = ([1f32; 8], [0f32; 8]);
    let view = TensorRef::from_slice(&data, &[2, 1, 4]).unwrap();
    let mut said = |prefix, k_prefix, v_prefix| {
        let table = Table { cu_q: &[0, 2], prefix, cu_k: &[0, 2] };
        let plan = DensePlan::new(&geometry, &Variant::full(4), &table, &PlanOptions::default()).unwrap();
        let mut workspace = Workspace::with_bytes(plan.workspace_bytes()).unwrap();
        let inputs = Inputs { q: view, k_prefix, v_prefix, k: view, v: view };
        let outputs = Outputs { o: TensorMut::from_slice(&mut o, &[2, 1, 4]).unwrap(), lse: None };
        run(&plan, &Stream::cpu(), &mut workspace, inputs, outputs).map_err(|error| error.to_string())
    };
    assert_eq!(said(Prefix::None, None, None), Ok(()));
    assert!(said(Prefix::None, Some(view), Some(view)).unwrap_err().contains("leave them out"));
    let packed = Prefix::Packed { cu_p: &[0, 2] };
    assert!(said(packed, None, None).unwrap_err().contains("k_prefix"));
    assert!(said(packed, Some(view), None).unwrap_err().contains("one"));
    assert_eq!(said(packed, Some(view), Some(view)), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn random_batches_agree(
        g in 1usize..4, group in 1usize..8, d in 1usize..80, dv in 1usize..80, causal: bool,
        rows in prop::collection::vec((0usize..40, 0usize..90, any::<bool>(), 0usize..40), 0..6),
    ) {
        let rows: Vec<RowLens> = rows
            .iter()
            .map(|&(q, prefix, own, fresh)| (q, prefix, if own || causal { q } else { fresh }))
            .collect();
        Batch::<f32>::of(Shape { h: g * group, g, d, dv }, causal, &rows).agrees();
    }
}
