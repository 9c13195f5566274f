//! One query's softmax over the keys that it sees.

/// Writes `sum_j softmax(scores)_j * value(j)` to `out` and returns the natural log of the denominator.
///
/// `scores` holds one entry a visible key. A `sink` adds `exp(sink)` to the denominator and nothing to the
/// numerator ("Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453, as learned
/// logits). Without a visible key `out` is 0 and the answer `-inf`.
pub(super) fn attend(
    scores: &[f64],
    sink: Option<f64>,
    out: &mut [f64],
    mut value: impl FnMut(usize, usize) -> f64,
) -> f64 {
    out.fill(0.0);
    let largest = scores.iter().fold(f64::NEG_INFINITY, |m, &s| if s > m || s.is_nan() { s } else { m });
    if largest == f64::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    let top = sink.map_or(largest, |sink| if sink > largest { sink } else { largest });
    let weights: Vec<f64> = scores.iter().map(|&s| (s - top).exp()).collect();
    let denominator = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - top).exp());
    for (key, weight) in weights.iter().enumerate() {
        for (lane, o) in out.iter_mut().enumerate() {
            *o += weight / denominator * value(key, lane);
        }
    }
    top + denominator.ln()
}

#[cfg(test)]
mod tests {
    use super::attend;

    #[test]
    fn a_sink_joins_the_denominator_alone() {
        let mut o = [0.0];
        let lse = attend(&[0.0, 0.0], Some(2f64.ln()), &mut o, |key, _| key as f64 * 4.0);
        assert!((o[0] - 1.0).abs() < 1e-15 && (lse - 4f64.ln()).abs() < 1e-15);
        assert_eq!(attend(&[], Some(3.0), &mut o, |_, _| f64::NAN), f64::NEG_INFINITY);
        assert_eq!(o, [0.0]);
    }

    #[test]
    fn nan_scores_are_not_hidden() {
        let mut o = [0.0];
        assert!(attend(&[0.0, f64::NAN, 1.0], None, &mut o, |_, _| 1.0).is_nan());
        assert!(o[0].is_nan());
    }
}
