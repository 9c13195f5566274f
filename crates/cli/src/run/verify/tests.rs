//! The check against a plain f32 attention over the same content, right and made wrong.

use mstar_kernels::synth::{self, Kind};

use super::*;
use crate::run::content::{Run, Source, StreamContent};

fn shape() -> Shape {
    Shape {
        num_qo_heads: 4,
        entries: Entries::Heads { num_kv_heads: 2, head_dim: 16, head_dim_vo: 16 },
        sm_scale: 0.25,
        causal: true,
        window_left: -1,
        fp8: false,
        logits_soft_cap: 0.0,
        sinks: None,
        alibi_slopes: None,
        frames: None,
    }
}

/// Attention of whole rows by the book: `keep(query position, key)` says what is seen.
fn attend(
    shape: &Shape,
    keys: &[u64],
    queries: &[u64],
    layer: usize,
    keep: impl Fn(usize, usize) -> bool,
) -> (Vec<f32>, Vec<f32>) {
    let Entries::Heads { num_kv_heads, head_dim: dv, .. } = shape.entries else { panic!("heads") };
    let h = shape.num_qo_heads;
    let lanes = |kind, key, head, width| {
        let mut out = vec![0f32; width];
        synth::fill_lanes(9, kind, layer, key, head, &mut out);
        out
    };
    let (mut o, mut lse) = (vec![0f32; queries.len() * h * dv], vec![0f32; queries.len() * h]);
    for (i, &query) in queries.iter().enumerate() {
        let position = keys.len() - queries.len() + i;
        for head in 0..h {
            let kv_head = head / (h / num_kv_heads);
            let q = lanes(Kind::Query, query, head, dv);
            let (mut total, mut sum) = (0f64, vec![0f64; dv]);
            for (j, &key) in keys.iter().enumerate().filter(|(j, _)| keep(position, *j)) {
                let k = lanes(Kind::Key, key, kv_head, dv);
                let dot: f64 = q.iter().zip(&k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let mut score = dot * shape.sm_scale;
                if let Some(slopes) = &shape.alibi_slopes {
                    score += f64::from(slopes[head]) * (j as f64 - position as f64);
                }
                let weight = score.exp();
                total += weight;
                let v = lanes(Kind::Value, key, kv_head, dv);
                sum.iter_mut().zip(v).for_each(|(s, v)| *s += weight * f64::from(v));
            }
            let at = i * h + head;
            lse[at] = total.ln() as f32;
            if total > 0.0 {
                o[at * dv..][..dv].iter_mut().zip(sum).for_each(|(o, s)| *o = (s / total) as f32);
            }
        }
    }
    (o, lse)
}

struct Case {
    shape: Shape,
    stream: StreamContent,
    q_len: usize,
    own_mask: Option<Vec<bool>>,
}

impl Case {
    fn new(shape: Shape, kv_len: usize, q_len: usize) -> Case {
        let stream = StreamContent::of(&[Run { source: Source::Prompt(3), len: kv_len }]);
        Case { shape, stream, q_len, own_mask: None }
    }

    fn judge(&self, o: &[f32], lse: &[f32]) -> Verdict {
        let keys = &self.stream.keys[..];
        let row = Row {
            attention: &ResourceName::new("attn"),
            shape: &self.shape,
            request: &RequestId::new("r3"),
            label: &Label::main(),
            step: 17,
            index: 0,
            keys,
            queries: &keys[keys.len() - self.q_len..],
            own_mask: self.own_mask.as_deref(),
            first_position: keys.len() - self.q_len,
            pick: None,
        };
        let sample = Sample::of(&self.shape, None, 2, self.q_len, keys.len(), 5);
        assert_eq!(sample.heads.len(), 4, "this case is small enough for all heads");
        check(&row, &sample, 9, Layers { own: 1, query: 1 }, DType::F32, o, lse)
    }

    fn attended(&self, keep: impl Fn(usize, usize) -> bool) -> (Vec<f32>, Vec<f32>) {
        let keys = &self.stream.keys[..];
        attend(&self.shape, keys, &keys[keys.len() - self.q_len..], 1, keep)
    }
}

#[test]
fn right_rows_pass_whatever_their_mask() {
    let causal = |i: usize, j: usize| j <= i;
    let case = Case::new(shape(), 40, 7);
    let (o, lse) = case.attended(causal);
    let verdict = case.judge(&o, &lse);
    assert_eq!((verdict.failure, verdict.vectors), (None, 28));

    let window = Case::new(Shape { window_left: 5, ..shape() }, 40, 7);
    let (o, lse) = window.attended(|i, j| j <= i && j + 5 >= i);
    assert_eq!(window.judge(&o, &lse).failure, None);

    let both_ways = Case::new(Shape { causal: false, window_left: 5, ..shape() }, 40, 7);
    let (o, lse) = both_ways.attended(|i, j| j + 5 >= i);
    assert_eq!(both_ways.judge(&o, &lse).failure, None);

    let slopes = Some(vec![0.5, 0.25, 0.125, 0.0625]);
    let alibi = Case::new(Shape { alibi_slopes: slopes, ..shape() }, 40, 7);
    let (o, lse) = alibi.attended(causal);
    assert_eq!(alibi.judge(&o, &lse).failure, None);

    let own: Vec<bool> = (0..9).map(|at| at % 3 == at / 3).collect();
    let tree = Case { own_mask: Some(own), ..Case::new(shape(), 12, 3) };
    let (o, lse) = tree.attended(|i, j| j < 9 || j == i);
    assert_eq!(tree.judge(&o, &lse).failure, None);
}

#[test]
fn wrong_masks_fail_and_say_where() {
    let case = Case::new(shape(), 40, 7);
    for (what, wrong) in [
        ("one key too few", case.attended(|i, j| j < i)),
        ("one key too many", case.attended(|i, j| j <= i + 1)),
        ("the first key lost", case.attended(|i, j| j > 0 && j <= i)),
    ] {
        let failure = case.judge(&wrong.0, &wrong.1).failure.expect(what);
        for part in ["step 17", "attn row 0", "request r3 (main)", "layer 1", "kv_len 40"] {
            assert!(failure.contains(part), "{what}: {failure}");
        }
    }
}

#[test]
fn one_wrong_key_of_many_fails() {
    let case = Case::new(shape(), 3000, 1);
    let mut other = Case::new(shape(), 3000, 1);
    other.stream.keys[1234] ^= 1;
    let (o, lse) = other.attended(|_, _| true);
    assert!(case.judge(&o, &lse).failure.is_some());
}

#[test]
fn f39_a_nan_never_passes() {
    let case = Case::new(shape(), 40, 7);
    let (o, lse) = case.attended(|i, j| j <= i);
    let mut broken = o.clone();
    broken[13] = f32::NAN;
    assert!(case.judge(&broken, &lse).failure.unwrap().contains("got NaN"));
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut broken = lse.clone();
        broken[0] = wrong;
        assert!(case.judge(&o, &broken).failure.is_some(), "{wrong}");
    }
}

#[test]
fn lse_in_base_two_fails() {
    let case = Case::new(shape(), 40, 7);
    let (o, lse) = case.attended(|i, j| j <= i);
    let base2: Vec<f32> = lse.iter().map(|x| x * std::f32::consts::LOG2_E).collect();
    assert!(case.judge(&o, &base2).failure.unwrap().contains("lse"));
}

#[test]
fn samples_stay_in_budget_and_keep_both_ends() {
    let shape = Shape {
        num_qo_heads: 32,
        entries: Entries::Heads { num_kv_heads: 8, head_dim: 128, head_dim_vo: 128 },
        ..shape()
    };
    let sample = Sample::of(&shape, None, 32, 2048, 100_000, 7);
    assert_eq!((sample.queries.first(), sample.queries.last()), (Some(&0), Some(&2047)));
    assert!(!sample.layers.is_empty() && !sample.heads.is_empty());
    let small = Sample::of(&shape, None, 2, 1, 10, 7);
    assert_eq!((small.layers.len(), small.heads.len(), small.queries.len()), (2, 32, 1));
    let spread: std::collections::HashSet<_> =
        (0..200).flat_map(|salt| Sample::of(&shape, None, 32, 2048, 100_000, salt).layers).collect();
    assert_eq!(spread.len(), 32, "every layer is checked sooner or later");
}

#[test]
fn the_rate_is_the_share_of_rows() {
    let share = |rate: f64| (0..10_000).filter(|&step| chosen(rate, 1, step, 5, 0)).count();
    assert_eq!((share(0.0), share(1.0)), (0, 10_000));
    assert!((420..580).contains(&share(0.05)), "{}", share(0.05));
}
