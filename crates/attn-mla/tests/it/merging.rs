//! Partial results joined by their log-sum-exp.

use half::bf16;
use mstar_attn_mla::{
    Merged, Partial, PlanOptions, TensorMut, TensorRef, Variant, merge, merge_all, merge_in_place,
};

use crate::harness::{Batch, Mixed, Number, Result, Shape, causal, on_every_isa, relative_error, row};

/// One state of one head: `(o, lse)`.
type State = (f32, f32);

fn with_parts<R>(parts: &[State], then: impl FnOnce(&[Partial<'_>]) -> R) -> R {
    let views: Vec<Partial<'_>> = parts
        .iter()
        .map(|(o, lse)| Partial {
            o: TensorRef::from_slice(std::slice::from_ref(o), &[1, 1, 1]).unwrap(),
            lse: TensorRef::from_slice(std::slice::from_ref(lse), &[1, 1]).unwrap(),
        })
        .collect();
    then(&views)
}

/// `then` merges into a state that starts as `from`.
fn into(from: State, then: impl FnOnce(&mut Merged<'_>)) -> State {
    let (mut o, mut lse) = ([from.0], [from.1]);
    then(&mut Merged {
        o: TensorMut::from_slice(&mut o, &[1, 1, 1]).unwrap(),
        lse: TensorMut::from_slice(&mut lse, &[1, 1]).unwrap(),
    });
    (o[0], lse[0])
}

/// By every road there is, which must agree to the bit.
fn merged(a: State, b: State) -> State {
    let unwritten = (f32::NAN, f32::NAN);
    let two = with_parts(&[a, b], |p| into(unwritten, |out| merge(&p[0], &p[1], out).unwrap()));
    let many = with_parts(&[a, b], |p| into(unwritten, |out| merge_all(p, out).unwrap()));
    let placed = with_parts(&[b], |p| into(a, |out| merge_in_place(out, &p[0]).unwrap()));
    let bits = |s: State| (s.0.to_bits(), s.1.to_bits());
    assert_eq!((bits(two), bits(two)), (bits(many), bits(placed)), "{a:?} {b:?}");
    two
}

const EMPTY: State = (0.0, f32::NEG_INFINITY);

#[test]
fn f04_empty_states_merge_as_the_identity() {
    assert_eq!(merged(EMPTY, EMPTY), EMPTY);
    for state in [(3.0, 0.5), (-1.0, -1e30), (2.0, 1e30), (1.5, f32::MIN_POSITIVE)] {
        assert_eq!(merged(EMPTY, state), state);
        assert_eq!(merged(state, EMPTY), state);
        // What an empty state's output holds is not read.
        assert_eq!(merged((f32::NAN, f32::NEG_INFINITY), state), state);
    }
    for empty in 0..=4 {
        let mut parts = vec![EMPTY; empty];
        parts.resize(4, (5.0, 1.0));
        let got = with_parts(&parts, |p| into((f32::NAN, f32::NAN), |out| merge_all(p, out).unwrap()));
        match 4 - empty {
            0 => assert_eq!(got, EMPTY),
            n => assert!(got.0 == 5.0 && (got.1 - (1.0 + (n as f32).ln())).abs() < 1e-6),
        }
    }
    assert_eq!(with_parts(&[], |p| into((f32::NAN, f32::NAN), |out| merge_all(p, out).unwrap())), EMPTY);
}

#[test]
fn f21_the_base_is_natural_and_very_large_and_small_lses_stay_finite() {
    let (o, lse) = merged((0.0, 2f32.ln()), (10.0, 8f32.ln()));
    assert!((o - 8.0).abs() < 1e-6 && (lse - 10f32.ln()).abs() < 1e-6, "{o} {lse}");
    assert_eq!(merged((1.0, 3e38), (2.0, -3e38)), (1.0, 3e38));
    assert_eq!(merged((1.0, -3e38), (2.0, -1e38)), (2.0, -1e38));
    let (o, lse) = merged((1.0, 3e38), (2.0, 3e38));
    assert!(o == 1.5 && lse == 3e38, "{o} {lse}");
    let (o, lse) = merged((1.0, -1e30), (2.0, -1e30));
    assert!(o == 1.5 && lse == -1e30, "a finite -1e30 is not empty: {o} {lse}");
}

/// Rounding to bf16 moves a result by 1.7e-3 of its norm; parts, their merge and the whole are each rounded once.
const ROUNDED: f64 = 2.1 * 1.7e-3;

fn joined<T: Number>(shape: Shape, parts: &[Result<T>]) -> Result<T> {
    let tokens = parts[0].lse.len() / shape.h;
    let (o_shape, lse_shape) = ([tokens, shape.h, shape.c], [tokens, shape.h]);
    let views: Vec<Partial<'_>> = parts
        .iter()
        .map(|part| Partial {
            o: TensorRef::from_slice(&part.o, &o_shape).unwrap(),
            lse: TensorRef::from_slice(&part.lse, &lse_shape).unwrap(),
        })
        .collect();
    let mut all = parts[0].clone();
    let mut out = Merged {
        o: TensorMut::from_slice(&mut all.o, &o_shape).unwrap(),
        lse: TensorMut::from_slice(&mut all.lse, &lse_shape).unwrap(),
    };
    merge_all(&views, &mut out).unwrap();
    all
}

/// The keys of a one-row batch's pages `from..to` alone.
fn cut<T: Number, K: Number>(
    whole: &Mixed<T, K>,
    from: usize,
    to: usize,
    last: i32,
    causal: bool,
) -> Result<T> {
    let mut part = whole.clone();
    part.kv_indices = whole.kv_indices[from..to].to_vec();
    part.kv_indptr = vec![0, (to - from) as i32];
    part.kv_last_page_len = vec![last];
    part.variant = Variant { causal, ..whole.variant };
    part.run_with(&PlanOptions::default())
}

fn parts_and_whole<T: Number>(o_bound: f64) {
    let shape = Shape { h: 4, c: 32, e: 8, s: 16 };
    let whole = Batch::<T>::of(shape, Variant { causal: false, ..causal(shape) }, &[row(1, 4096)]);
    let want = whole.run();
    for parts in [2usize, 3, 7] {
        let edges: Vec<usize> = (0..=parts).map(|part| 256 * part / parts).collect();
        let parts: Vec<_> = edges.windows(2).map(|edge| cut(&whole, edge[0], edge[1], 16, false)).collect();
        near(&joined(shape, &parts), &want, o_bound);
    }
}

fn near<T: Number>(got: &Result<T>, want: &Result<T>, o_bound: f64) {
    let floats = |x: &[T]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
    let lses = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let error = relative_error(floats(&got.o).into_iter(), &floats(&want.o), "o");
    assert!(error < o_bound, "o: {error:e}");
    assert!(relative_error(lses(&got.lse).into_iter(), &lses(&want.lse), "lse") < 1e-6);
}

#[test]
fn f21_parts_merged_agree_with_the_whole() {
    parts_and_whole::<f32>(1e-6);
    parts_and_whole::<bf16>(ROUNDED);
}

fn context_and_own<T: Number, K: Number>(o_bound: f64) {
    let shape = Shape { h: 4, c: 32, e: 8, s: 16 };
    for (q_len, context_pages, last) in [(1usize, 40usize, 1i32), (5, 3, 5), (70, 20, 6), (16, 1, 16)] {
        let own_pages = q_len.div_ceil(16);
        let whole = Mixed::<T, K>::of(shape, causal(shape), &[row(q_len, context_pages * 16 + q_len)]);
        let context = cut(&whole, 0, context_pages, 16, false);
        let own = cut(&whole, context_pages, context_pages + own_pages, last, true);
        near(&joined(shape, &[context, own]), &whole.run(), o_bound);
    }
}

#[test]
fn the_stored_context_and_the_steps_own_tokens_merge_to_the_causal_whole() {
    on_every_isa(|| {
        context_and_own::<f32, f32>(1e-6);
        context_and_own::<f32, bf16>(1e-3);
        context_and_own::<bf16, bf16>(ROUNDED);
    });
}
