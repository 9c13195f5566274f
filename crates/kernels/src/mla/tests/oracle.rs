//! Every body against the oracle, over ragged, empty and hostile shapes.

use half::{bf16, f16};
use proptest::prelude::*;

use super::batch::{Number, relative_error};
use super::{Batch, RowSpec, Shape, on_every_isa, row};
use crate::mla::Variant;

const SMALL: Shape = Shape { h: 4, c: 64, e: 16, s: 16 };
const CAUSAL: Variant = Variant { sm_scale: 0.11, causal: true };
const FULL: Variant = Variant { sm_scale: 0.11, causal: false };

fn ragged() -> Vec<RowSpec> {
    let lengths =
        [(1, 1), (1, 15), (1, 16), (1, 17), (0, 5), (1, 0), (2, 64), (1, 129), (4, 513), (1, 1100), (3, 2)];
    lengths.into_iter().map(|(q, kv)| row(q, kv)).collect()
}

#[test]
fn ragged_decode_rows_agree_in_every_type_and_body() {
    on_every_isa(|_| {
        Batch::<f32, f32>::of(SMALL, CAUSAL, &ragged()).check();
        Batch::<bf16, bf16>::of(SMALL, CAUSAL, &ragged()).check();
        Batch::<f16, f16>::of(SMALL, CAUSAL, &ragged()).check();
    });
}

#[test]
fn queries_and_latents_may_differ_in_type() {
    on_every_isa(|_| {
        Batch::<bf16, f32>::of(SMALL, CAUSAL, &ragged()).check();
        Batch::<f32, bf16>::of(SMALL, CAUSAL, &ragged()).check();
        Batch::<f16, bf16>::of(SMALL, CAUSAL, &ragged()).check();
    });
}

#[test]
fn prefill_and_append_rows_agree_in_every_type_and_body() {
    let lengths = [(37, 37), (100, 300), (17, 5), (64, 64), (1, 9), (130, 700)];
    let rows: Vec<RowSpec> = lengths.into_iter().map(|(q, kv)| row(q, kv)).collect();
    on_every_isa(|_| {
        Batch::<f32, f32>::of(SMALL, CAUSAL, &rows).check();
        Batch::<bf16, bf16>::of(SMALL, FULL, &rows).check();
        Batch::<f16, f16>::of(SMALL, CAUSAL, &rows).check();
    });
}

#[test]
fn rows_over_several_leaves_agree() {
    let shape = Shape { h: 2, c: 32, e: 8, s: 16 };
    let rows = [row(40, 9000), row(1, 9000), row(300, 5000)];
    on_every_isa(|_| {
        Batch::<bf16, bf16>::of(shape, CAUSAL, &rows).check();
    });
}

#[test]
fn the_shapes_of_models_agree() {
    for (c, e) in [(512, 64), (512, 0), (256, 32)] {
        let shape = Shape { h: 16, c, e, s: 64 };
        let rows = [row(1, 700), row(2, 131), row(6, 70)];
        on_every_isa(|_| {
            Batch::<bf16, bf16>::of(shape, CAUSAL, &rows).check();
            Batch::<f32, f32>::of(shape, CAUSAL, &rows).check();
        });
    }
}

#[test]
fn f15_any_number_of_heads_agrees() {
    on_every_isa(|_| {
        for h in [1, 2, 3, 5, 7, 15, 16, 17, 31, 40, 65, 128] {
            let shape = Shape { h, c: 64, e: 16, s: 8 };
            let rows = [row(1, 140), row(2, 33), row(5, 9)];
            Batch::<bf16, bf16>::of(shape, CAUSAL, &rows).check();
            Batch::<f32, f32>::of(shape, CAUSAL, &rows).check();
        }
    });
}

#[test]
fn any_widths_agree() {
    on_every_isa(|_| {
        for (c, e) in
            [(1, 0), (1, 1), (3, 2), (15, 1), (16, 16), (17, 0), (65, 5), (47, 18), (130, 3), (96, 64)]
        {
            let shape = Shape { h: 5, c, e, s: 3 };
            let rows = [row(1, 137), row(2, 5), row(20, 31)];
            Batch::<bf16, bf16>::of(shape, CAUSAL, &rows).check();
            Batch::<f16, f16>::of(shape, CAUSAL, &rows).check();
            Batch::<f32, f32>::of(shape, CAUSAL, &rows).check();
        }
    });
}

#[test]
fn scales_of_either_sign_and_none_agree() {
    on_every_isa(|_| {
        for sm_scale in [-0.2, 0.0, 1e-3, 2.0] {
            let rows = [row(1, 150), row(30, 40)];
            Batch::<f32, f32>::of(SMALL, Variant { sm_scale, causal: true }, &rows).check();
        }
    });
}

#[test]
fn scores_of_any_size_agree() {
    on_every_isa(|_| {
        // Between them, where many keys weigh and scores are large, f32 scores are what limits the result.
        for (size, bound) in [(1e-20, 1e-6), (1e3, 1e-4), (1e8, 1e-6)] {
            let mut batch = Batch::<f32, f32>::of(SMALL, CAUSAL, &[row(1, 300), row(20, 20)]);
            batch.q_nope.iter_mut().chain(&mut batch.q_pe).for_each(|x| *x *= size);
            let (got, want) = (batch.run(), batch.reference());
            let o = relative_error(got.o.iter().map(|&x| x.into()), &want.o, "o");
            let lse = relative_error(got.lse.iter().map(|&x| x.into()), &want.lse, "lse");
            assert!(o <= bound && lse <= 1e-6, "queries times {size}: {o:.3e}, {lse:.3e}");
        }
    });
}

fn random<Q: Number, K: Number>(shape: Shape, causal: bool, rows: &[(usize, usize)]) {
    let rows: Vec<RowSpec> = rows.iter().map(|&(q, kv)| row(q, kv)).collect();
    on_every_isa(|_| {
        Batch::<Q, K>::of(shape, Variant { sm_scale: 0.15, causal }, &rows).check();
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn random_batches_agree(
        h in 1usize..40, c in 1usize..130, e in 0usize..40, s in 1usize..40, causal: bool,
        rows in prop::collection::vec((0usize..20, 0usize..300), 1..5),
    ) {
        let shape = Shape { h, c, e, s };
        random::<f32, f32>(shape, causal, &rows);
        random::<bf16, bf16>(shape, causal, &rows);
    }
}
