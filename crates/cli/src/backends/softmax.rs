//! What a spec's `model` makes of a score, with the sinks and slopes that `run` uses.

use std::sync::Arc;

use mstar_core::attend::Softmax;
use mstar_core::spec::Spec;
use mstar_kernels::synth::{Kind, element};

/// The position that sinks are drawn at: no content chains to it.
const SINK_KEY: u64 = u64::MAX;

/// The softmax of one rank's layers, `num_qo_heads` heads each. Sinks are synthetic logits, a pure function of the seed,
/// the layer and the head; slopes are those of the ALiBi paper.
pub(crate) fn softmax(spec: &Spec, num_qo_heads: usize) -> Softmax {
    let model = &spec.model;
    let sinks = model.sinks.then(|| {
        let of = |layer, head| element(spec.seed, Kind::Query, layer, SINK_KEY, head, 0);
        (0..model.layers).flat_map(|layer| (0..num_qo_heads).map(move |head| of(layer, head))).collect()
    });
    Softmax {
        sm_scale: model.sm_scale,
        window_left: model.window_left,
        logits_soft_cap: model.logits_soft_cap,
        sinks,
        alibi_slopes: model.alibi.then(|| alibi_slopes(num_qo_heads)),
    }
}

/// `[H]`: `2^(-8 i / n)` for the `i`-th of `n` heads, `n` a power of two; other counts take every second slope of the
/// next power for the heads left over (Press et al., arXiv:2108.12409, and their code).
fn alibi_slopes(heads: usize) -> Arc<[f32]> {
    let power = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    let slope = |i: usize, of: usize| (-8.0 * i as f64 / of as f64).exp2() as f32;
    let first = (1..=power).map(|i| slope(i, power));
    let rest = (0..heads - power).map(|i| slope(2 * i + 1, 2 * power));
    first.chain(rest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!(alibi_slopes(8)[..], [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]);
        let twelve = alibi_slopes(12);
        assert_eq!(twelve[..2], [0.5, 0.25]);
        assert_eq!(twelve[8..10], [(-0.5f32).exp2(), (-1.5f32).exp2()]);
        assert_eq!(alibi_slopes(1)[..], [0.00390625]);
    }
}
