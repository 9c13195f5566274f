//! Requests of drawn lengths: the same seed draws the same requests on any machine.

use mstar_core::Label;
use mstar_core::spec::workload::{Arrivals, Lengths, SyntheticSpec};

use super::{Generation, MAX_TOKENS, RequestPlan};
use crate::run::content::{Run, Source, mix, unit};

/// What a draw is for; part of its hash, so that one kind of draw never shifts another.
#[derive(Clone, Copy)]
enum Draw {
    Gap = 1,
    Prompt = 2,
    Output = 3,
    Shares = 4,
    Prefix = 5,
    Context = 6,
}

/// The requests that `spec` describes.
pub(crate) fn requests(spec: &SyntheticSpec, seed: u64) -> Vec<RequestPlan> {
    let mut clock_ms = 0.0;
    let plans = (0..spec.requests).map(|index| {
        let ordinal = index as u64;
        let hash = |draw: Draw| mix(mix(mix(seed, 0x5eed), draw as u64), ordinal);
        if let Arrivals::Poisson { rate } = spec.arrivals {
            // Exponential gaps by inversion; `1 - u` is never 0.
            clock_ms += -(1.0 - unit(hash(Draw::Gap))).ln() / rate * 1e3;
        }
        let length = |lengths: &Lengths, draw| drawn(lengths, index, hash(draw));
        let prompt_len = length(&spec.prompt_len, Draw::Prompt);
        let own = Source::Prompt(ordinal);
        let prompt = match spec.shared_prefixes {
            Some(shared) if shared.count > 0 && unit(hash(Draw::Shares)) < shared.share => {
                let group = (unit(hash(Draw::Prefix)) * shared.count as f64) as u64;
                let prefix = shared.len.min(prompt_len - 1);
                vec![
                    Run { source: Source::Shared(group), len: prefix },
                    Run { source: own, len: prompt_len - prefix },
                ]
            }
            _ => vec![Run { source: own, len: prompt_len }],
        };
        let mut plan = RequestPlan::new(ordinal, clock_ms, prompt, length(&spec.output_len, Draw::Output));
        if let Some(forks) = &spec.forks {
            plan.forks = forks.labels.iter().map(|label| Label::new(label.as_str())).collect();
            plan.combined = forks.combined;
        }
        plan.generation = match (&spec.denoise, &spec.tree) {
            (Some(denoise), _) => Generation::Denoise { passes: denoise.steps, tokens: denoise.tokens },
            (None, Some(tree)) => Generation::Tree { branching: tree.branching.clone() },
            (None, None) => Generation::Decode,
        };
        plan.snapshot = spec.snapshot;
        plan.context_len = spec.context_len.as_ref().map_or(0, |lengths| length(lengths, Draw::Context));
        plan
    });
    plans.collect()
}

/// One draw of `lengths` for request `index`.
fn drawn(lengths: &Lengths, index: usize, hash: u64) -> usize {
    let length = match lengths {
        Lengths::Fixed(len) => *len,
        Lengths::Uniform { min, max } => {
            let width = (max.saturating_sub(*min) as f64) + 1.0;
            min + (unit(hash) * width) as usize
        }
        Lengths::LogNormal { median, sigma, min, max } => {
            // Box and Muller's transform of two uniform numbers.
            let (u, v) = (1.0 - unit(hash), unit(mix(hash, 1)));
            let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
            ((median * (sigma * normal).exp()) as usize).clamp(*min, (*max).max(*min))
        }
        Lengths::List(all) => all.get(index % all.len().max(1)).copied().unwrap_or(1),
    };
    // A spec's reader lets no length pass MAX_TOKENS; what a caller builds by hand is held to 1 at least.
    debug_assert!(length <= MAX_TOKENS, "{lengths:?} was checked when the spec was read");
    length.max(1)
}

#[cfg(test)]
mod tests {
    use mstar_core::spec::workload::{Denoise, Forks, SharedPrefixes};

    use super::*;

    fn spec() -> SyntheticSpec {
        SyntheticSpec {
            requests: 400,
            arrivals: Arrivals::AllAtOnce,
            prompt_len: Lengths::Uniform { min: 10, max: 20 },
            output_len: Lengths::Fixed(5),
            shared_prefixes: None,
            forks: None,
            denoise: None,
            tree: None,
            context_len: None,
            snapshot: None,
        }
    }

    #[test]
    fn seeds_repeat_and_differ() {
        assert_eq!(requests(&spec(), 1), requests(&spec(), 1));
        let lengths = |seed| requests(&spec(), seed).iter().map(RequestPlan::prompt_len).collect::<Vec<_>>();
        assert_ne!(lengths(1), lengths(2));
        assert!((10..=20).all(|len| lengths(1).contains(&len)));
        assert!(lengths(1).iter().all(|len| (10..=20).contains(len)));
    }

    #[test]
    fn lengths_follow_their_distribution() {
        let lognormal = Lengths::LogNormal { median: 100.0, sigma: 0.5, min: 20, max: 1000 };
        let mut all: Vec<_> = (0..4001).map(|i| drawn(&lognormal, i, mix(9, i as u64))).collect();
        all.sort_unstable();
        assert!((90..110).contains(&all[2000]), "median {}", all[2000]);
        // One standard deviation above the median: 100 * exp(0.5).
        assert!((150..180).contains(&all[3366]), "{}", all[3366]);
        assert!(all[0] >= 20 && all[4000] <= 1000);
        assert_eq!((0..4).map(|i| drawn(&Lengths::List(vec![3, 5]), i, 0)).collect::<Vec<_>>(), [3, 5, 3, 5]);
        assert_eq!(drawn(&Lengths::Fixed(0), 0, 0), 1);
    }

    #[test]
    fn poisson_gaps_have_the_rate() {
        let all = requests(&SyntheticSpec { arrivals: Arrivals::Poisson { rate: 50.0 }, ..spec() }, 3);
        assert!(all.windows(2).all(|pair| pair[0].arrival_ms <= pair[1].arrival_ms));
        let mean = all.last().unwrap().arrival_ms / 400.0;
        assert!((17.0..23.0).contains(&mean), "mean gap {mean} ms, 20 were asked");
    }

    #[test]
    fn shared_prefixes_are_shared_and_leave_a_token() {
        let shared_prefixes = Some(SharedPrefixes { count: 3, len: 15, share: 0.5 });
        let all = requests(&SyntheticSpec { shared_prefixes, ..spec() }, 3);
        let sharing = all.iter().filter(|plan| plan.prompt.len() == 2).count();
        assert!((150..250).contains(&sharing), "{sharing} of 400");
        for plan in &all {
            let own = plan.prompt.last().unwrap();
            assert!(own.len >= 1 && own.source == Source::Prompt(plan.ordinal));
        }
    }

    #[test]
    fn forks_and_denoise_reach_the_plan() {
        let forks = Some(Forks { labels: vec!["cond".into(), "uncond".into()], combined: true });
        let denoise = Some(Denoise { steps: 4, tokens: 16 });
        let plan = &requests(&SyntheticSpec { forks, denoise, ..spec() }, 3)[0];
        assert_eq!((plan.label(0), plan.label(2)), (Label::main(), Label::new("uncond")));
        assert_eq!((plan.generating(), plan.stored_output()), (2, 80));
    }
}
