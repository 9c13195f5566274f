//! Every kernel body against the oracle, over ragged, empty and hostile shapes.

use half::{bf16, f16};
use mstar_attn_paged::Variant;
use mstar_kernels::cpu::Isa;
use proptest::prelude::*;

use crate::harness::{Batch, Number, RowSpec, Shape, relative_error, row};

const DECODE: Shape = Shape { h: 8, g: 2, d: 64, dv: 64, s: 16 };

fn on_every_isa(mut test: impl FnMut(Isa)) {
    for &isa in Isa::supported() {
        let _forced = Isa::force(isa).unwrap();
        test(isa);
    }
}

fn ragged() -> Vec<RowSpec> {
    let lengths =
        [(1, 1), (1, 15), (1, 16), (1, 17), (0, 5), (1, 0), (2, 64), (1, 65), (4, 513), (1, 1100), (3, 2)];
    lengths.into_iter().map(|(q, kv)| row(q, kv)).collect()
}

#[test]
fn ragged_decode_rows_agree_in_every_type_and_body() {
    on_every_isa(|_| {
        Batch::<f32>::of(DECODE, Variant::causal(64), &ragged()).check();
        Batch::<bf16>::of(DECODE, Variant::causal(64), &ragged()).check();
        Batch::<f16>::of(DECODE, Variant::causal(64), &ragged()).check();
    });
}

#[test]
fn ragged_prefill_and_append_rows_agree_in_every_type_and_body() {
    let lengths = [(37, 37), (100, 300), (17, 5), (64, 64), (1, 9), (130, 700)];
    let rows: Vec<RowSpec> = lengths.into_iter().map(|(q, kv)| row(q, kv)).collect();
    on_every_isa(|_| {
        Batch::<f32>::of(DECODE, Variant::causal(64), &rows).check();
        Batch::<bf16>::of(DECODE, Variant::full(64), &rows).check();
        Batch::<f16>::of(DECODE, Variant::causal(64), &rows).check();
    });
}

#[test]
fn append_rows_over_several_leaves_agree() {
    let shape = Shape { h: 4, g: 1, d: 32, dv: 32, s: 16 };
    let rows = [row(40, 9000), row(1, 9000), row(300, 5000)];
    // Zero-mean values over thousands of keys: the sum is a hundredth of its terms, so f32 keeps fewer digits.
    let batch = Batch::<f32>::of(shape, Variant::causal(32), &rows);
    let (got, want) = (batch.run(), batch.reference());
    assert!(relative_error(got.o.iter().map(|&x| x.into()), &want.o, "o") < 2e-6);
    Batch::<bf16>::of(shape, Variant { window_left: Some(4500), ..Variant::causal(32) }, &rows).check();
}

fn variants(d: usize) -> Vec<Variant> {
    let plain = Variant::causal(d);
    vec![
        Variant::full(d),
        Variant { window_left: Some(0), ..plain },
        Variant { window_left: Some(31), ..plain },
        Variant { window_left: Some(40), causal: false, ..plain },
        Variant { window_left: Some(usize::MAX), ..plain },
        Variant { logits_soft_cap: Some(2.0), ..plain },
        Variant { logits_soft_cap: Some(30.0), sinks: true, ..plain },
        Variant { sinks: true, window_left: Some(100), ..plain },
        Variant { alibi: true, ..plain },
        Variant { alibi: true, logits_soft_cap: Some(5.0), causal: false, ..plain },
        Variant { sm_scale: -0.1, ..plain },
        Variant { sm_scale: 0.0, ..plain },
    ]
}

#[test]
fn every_variant_agrees_in_both_families_and_every_body() {
    let rows = [row(1, 700), row(2, 90), row(1, 0), row(40, 150), row(9, 4)];
    on_every_isa(|_| {
        for variant in variants(64) {
            Batch::<f32>::of(DECODE, variant, &rows).check();
            Batch::<bf16>::of(DECODE, variant, &rows).check();
        }
    });
}

#[test]
fn f15_any_group_size_maps_heads_right() {
    for group in [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64] {
        let shape = Shape { h: 2 * group, g: 2, d: 32, dv: 32, s: 16 };
        let rows = [row(1, 100), row(20, 33), row(2, 40)];
        Batch::<f32>::of(shape, Variant::causal(32), &rows).check();
        Batch::<bf16>::of(shape, Variant::causal(32), &rows).check();
        let mut flat = Batch::<f32>::of(shape, Variant::causal(32), &rows);
        flat.k.fill(0.0);
        for (at, v) in flat.v.iter_mut().enumerate() {
            *v = (at / 32 % 2) as f32;
        }
        let got = flat.run();
        for (at, &o) in got.o.iter().enumerate() {
            assert_eq!(o, (at / 32 % (2 * group) / group) as f32, "group {group}");
        }
    }
}

#[test]
fn every_width_is_right_and_values_may_differ_from_keys() {
    let widths = [1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 80, 96, 100, 128, 192, 256, 511, 512];
    on_every_isa(|isa| {
        for (at, &d) in widths.iter().enumerate() {
            if isa != Isa::current() || (isa == Isa::Portable && d % 3 == 0) {
                continue;
            }
            let dv = widths[(at * 7 + 3) % widths.len()];
            let shape = Shape { h: 3, g: 1, d, dv, s: 5 };
            let rows = [row(1, 40), row(2, 70), row(11, 30)];
            Batch::<f32>::of(shape, Variant::causal(d), &rows).check();
            Batch::<bf16>::of(shape, Variant::full(d), &rows).check();
        }
    });
}

#[test]
fn custom_masks_narrow_what_a_query_sees() {
    let tree = RowSpec {
        // Four speculated tokens after 100: two branches of two.
        mask: Some(|query, key| key < 100 || (key - 100) % 2 == query % 2),
        ..row(4, 104)
    };
    let holes = RowSpec { mask: Some(|query, key| (query + key) % 3 != 0), ..row(30, 300) };
    let nothing = RowSpec { mask: Some(|_, _| false), ..row(2, 50) };
    let rows = [tree, holes.clone(), nothing, row(1, 20), RowSpec { q_len: 2, ..holes }];
    on_every_isa(|_| {
        for causal in [true, false] {
            let variant = Variant { causal, ..Variant::causal(64) };
            Batch::<f32>::of(DECODE, variant, &rows).check();
            Batch::<bf16>::of(DECODE, variant, &rows).check();
        }
    });
}

#[test]
fn streams_that_gave_pages_back_keep_their_positions() {
    let kept = |q_len, kv_len, dropped_pages, start| RowSpec { dropped_pages, start, ..row(q_len, kv_len) };
    let rows =
        [kept(1, 50, 3, 5), kept(2, 700, 40, 0), kept(40, 90, 7, 15), kept(1, 16, 1, 16), kept(3, 0, 4, 0)];
    for variant in
        [Variant::causal(64), Variant { window_left: Some(60), alibi: true, ..Variant::causal(64) }]
    {
        Batch::<f32>::of(DECODE, variant, &rows).check();
        Batch::<bf16>::of(DECODE, variant, &rows).check();
    }
}

/// One random batch.
fn batches() -> impl Strategy<Value = (Shape, Variant, Vec<RowSpec>)> {
    let shape = (1usize..5, 1usize..4, 1usize..70, 1usize..70, 1usize..20)
        .prop_map(|(group, g, d, dv, s)| Shape { h: group * g, g, d, dv, s });
    let variant = (any::<bool>(), proptest::option::of(0usize..80), any::<[bool; 3]>()).prop_map(
        |(causal, window_left, [cap, alibi, sinks])| Variant {
            sm_scale: 0.2,
            causal,
            window_left,
            logits_soft_cap: cap.then_some(3.0),
            alibi,
            sinks,
        },
    );
    let one = (0usize..30, 0usize..150, 0usize..3, 0usize..3, 0usize..4).prop_map(
        |(q_len, kv_len, dropped_pages, start, mask)| RowSpec {
            q_len,
            kv_len,
            dropped_pages,
            start: if kv_len > start { start } else { 0 },
            mask: [None, None, None, Some((|q, k| (q * 5 + k) % 4 != 1) as fn(usize, usize) -> bool)][mask],
            shares: None,
        },
    );
    (shape, variant, proptest::collection::vec(one, 0..6)).prop_map(|(shape, variant, mut rows)| {
        for row in &mut rows {
            row.start = row.start.min(shape.s - 1).min(row.kv_len.saturating_sub(1));
        }
        (shape, variant, rows)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_batch_agrees((shape, variant, rows) in batches(), isa in 0usize..8) {
        let supported = Isa::supported();
        let _forced = Isa::force(supported[isa % supported.len()]).unwrap();
        Batch::<f32>::of(shape, variant, &rows).check();
        loose::<bf16>(shape, variant, &rows);
    }
}

/// bf16 results of tiny batches may owe most of their error to rounding a weight: bound it by the value's size.
fn loose<T: Number>(shape: Shape, variant: Variant, rows: &[RowSpec]) {
    let batch = Batch::<T>::of(shape, variant, rows);
    let (got, want) = (batch.run(), batch.reference());
    for (at, (got, &want)) in got.o.iter().zip(&want.o).enumerate() {
        assert!((got.to_f64() - want).abs() <= 0.012, "{shape:?} {variant:?}: o[{at}] {got:?} for {want}");
    }
}
