//! Every kernel body against the oracle, over ragged, empty and hostile shapes.

use half::{bf16, f16};
use mstar_attn_mla::Variant;
use mstar_kernels::cpu::Isa;
use proptest::prelude::*;

use crate::harness::{Batch, Mixed, RowSpec, Shape, causal, on_every_isa, row};

const SMALL: Shape = Shape { h: 4, c: 32, e: 8, s: 16 };

fn ragged() -> Vec<RowSpec> {
    let lengths = [
        (1, 1),
        (1, 15),
        (1, 16),
        (1, 17),
        (0, 5),
        (1, 0),
        (2, 64),
        (4, 513),
        (1, 1100),
        (3, 2),
        (37, 37),
        (70, 300),
        (40, 5),
    ];
    lengths.into_iter().map(|(q, kv)| row(q, kv)).collect()
}

#[test]
fn one_plan_serves_ragged_decode_append_and_prefill_rows_in_every_type_and_body() {
    on_every_isa(|| {
        for variant in [causal(SMALL), Variant { causal: false, ..causal(SMALL) }] {
            Batch::<f32>::of(SMALL, variant, &ragged()).check();
            Batch::<bf16>::of(SMALL, variant, &ragged()).check();
            Batch::<f16>::of(SMALL, variant, &ragged()).check();
        }
    });
}

#[test]
fn latents_may_be_of_another_type_than_queries() {
    let rows = [row(1, 70), row(20, 33), row(2, 600)];
    on_every_isa(|| {
        Mixed::<f32, bf16>::of(SMALL, causal(SMALL), &rows).check();
        Mixed::<bf16, f32>::of(SMALL, causal(SMALL), &rows).check();
        Mixed::<f16, bf16>::of(SMALL, causal(SMALL), &rows).check();
    });
}

#[test]
fn the_specialised_shapes_agree_with_any_number_of_heads() {
    on_every_isa(|| {
        for (h, e) in [(1, 64), (16, 64), (16, 0), (20, 64), (128, 0)] {
            let shape = Shape { h, c: 512, e, s: 64 };
            let rows = [row(1, 130), row(3, 66)];
            Batch::<bf16>::of(shape, causal(shape), &rows).check();
            Batch::<f32>::of(shape, causal(shape), &rows[..1]).check();
        }
    });
}

#[test]
fn every_width_is_right_and_reads_nothing_beside_its_latents() {
    // The harness leaves NaN in every slot that no row owns, which a read out of bounds would meet.
    let widths = [(1, 0), (1, 1), (2, 3), (7, 0), (16, 16), (17, 5), (33, 31), (64, 64), (100, 28), (256, 0)];
    on_every_isa(|| {
        for (c, e) in widths {
            let shape = Shape { h: 3, c, e, s: 5 };
            let rows = [row(1, 40), row(2, 71), row(25, 30)];
            Batch::<f32>::of(shape, causal(shape), &rows).check();
            Batch::<bf16>::of(shape, Variant { causal: false, ..causal(shape) }, &rows).check();
        }
    });
}

#[test]
fn streams_that_gave_pages_back_keep_their_positions() {
    let kept = |q_len, kv_len, dropped_pages, start| RowSpec { dropped_pages, start, ..row(q_len, kv_len) };
    let rows =
        [kept(1, 50, 3, 5), kept(2, 700, 40, 0), kept(40, 90, 7, 15), kept(1, 16, 1, 16), kept(3, 0, 4, 0)];
    Batch::<f32>::of(SMALL, causal(SMALL), &rows).check();
    Batch::<bf16>::of(SMALL, causal(SMALL), &rows).check();
}

#[test]
fn scales_of_any_sign_and_size() {
    for sm_scale in [-0.3, 0.0, 1e-3, 2.0] {
        Batch::<f32>::of(SMALL, Variant { sm_scale, causal: true }, &[row(1, 90), row(20, 40)]).check();
    }
}

/// One random batch.
fn batches() -> impl Strategy<Value = (Shape, Variant, Vec<RowSpec>)> {
    let shape = (1usize..7, 1usize..70, 0usize..20, 1usize..20).prop_map(|(h, c, e, s)| Shape { h, c, e, s });
    let one =
        (0usize..40, 0usize..150, 0usize..3, 0usize..3).prop_map(|(q_len, kv_len, dropped_pages, start)| {
            RowSpec { dropped_pages, start, ..row(q_len, kv_len) }
        });
    (shape, any::<bool>(), proptest::collection::vec(one, 0..6)).prop_map(|(shape, causal, mut rows)| {
        for row in &mut rows {
            row.start = row.start.min(shape.s - 1).min(row.kv_len.saturating_sub(1));
        }
        (shape, Variant { sm_scale: 0.2, causal }, rows)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_batch_agrees((shape, variant, rows) in batches(), isa in 0usize..8) {
        let supported = Isa::supported();
        let _forced = Isa::force(supported[isa % supported.len()]).unwrap();
        Batch::<f32>::of(shape, variant, &rows).check();
        // bf16 results of tiny batches may owe most of their error to rounding one weight: bound it by the value's size.
        let batch = Batch::<bf16>::of(shape, variant, &rows);
        let (got, want) = (batch.run(), batch.reference());
        for (at, (got, &want)) in got.o.iter().zip(&want.o).enumerate() {
            prop_assert!((got.to_f64() - want).abs() <= 0.02, "{shape:?} {variant:?}: o[{at}] {got:?} for {want}");
        }
    }
}
