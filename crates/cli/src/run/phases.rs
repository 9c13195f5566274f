//! What each phase of a run cost: an observer that sums, and clocks for the phases that are the program's own.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mstar_core::attend::{Event, Observer, Work};

/// One phase of one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Cost {
    /// Calls.
    pub(crate) calls: u64,
    /// Wall time.
    pub(crate) elapsed: Duration,
    /// The least work that they stood for.
    pub(crate) work: Work,
}

/// Phases in the order of a step; those of the program itself come last.
const ORDER: [&str; 13] = [
    "admit",
    "plan",
    "kv write",
    "select",
    "attend",
    "replay",
    "merge",
    "commit",
    "offload",
    "reload",
    "synthesize",
    "digest",
    "verify",
];

/// Costs by phase and resource.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    costs: Mutex<BTreeMap<(usize, &'static str, String), Cost>>,
}

impl Phases {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(usize, &'static str, String), Cost>> {
        self.costs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one call.
    pub(crate) fn add(&self, phase: &'static str, resource: &str, elapsed: Duration, work: Work) {
        let rank = ORDER.iter().position(|name| *name == phase).unwrap_or(ORDER.len());
        let mut costs = self.lock();
        let cost = costs.entry((rank, phase, resource.to_owned())).or_default();
        cost.calls += 1;
        cost.elapsed += elapsed;
        cost.work += work;
    }

    /// Runs `f` as one call of the program's own `phase`.
    pub(crate) fn timed<T>(&self, phase: &'static str, work: Work, f: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let value = f();
        self.add(phase, "", started.elapsed(), work);
        value
    }

    /// Forgets everything: what a warm-up cost is not the run's.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// Phase, resource and cost, in the order of a step.
    pub(crate) fn all(&self) -> Vec<(&'static str, String, Cost)> {
        self.lock().iter().map(|((_, phase, resource), cost)| (*phase, resource.clone(), *cost)).collect()
    }

    /// Seconds of `phase` so far, over all resources.
    pub(crate) fn seconds(&self, phase: &str) -> f64 {
        let costs = self.lock();
        costs.iter().filter(|((_, name, _), _)| *name == phase).map(|(_, c)| c.elapsed.as_secs_f64()).sum()
    }
}

impl Observer for Phases {
    fn record(&self, event: &Event<'_>) {
        self.add(event.phase.name(), event.resource.as_str(), event.elapsed, event.work);
    }
}

#[cfg(test)]
mod tests {
    use mstar_core::ResourceName;
    use mstar_core::attend::Phase;

    use super::*;

    #[test]
    fn costs_are_summed_by_phase_and_resource_in_the_order_of_a_step() {
        let phases = Phases::default();
        let (kv, attn) = (ResourceName::new("kv"), ResourceName::new("attn"));
        let work = Work { tokens: 3, ..Work::default() };
        for (phase, resource) in [(Phase::Attend, &attn), (Phase::Plan, &kv), (Phase::Attend, &attn)] {
            let elapsed = Duration::from_millis(2);
            phases.record(&Event { phase, resource, layer: None, elapsed, work });
        }
        assert_eq!(phases.timed("verify", Work::default(), || 5), 5);
        let all = phases.all();
        let names: Vec<_> = all.iter().map(|(phase, resource, _)| (*phase, resource.as_str())).collect();
        assert_eq!(names, [("plan", "kv"), ("attend", "attn"), ("verify", "")]);
        assert_eq!((all[1].2.calls, all[1].2.work.tokens), (2, 6));
        assert!((phases.seconds("attend") - 0.004).abs() < 1e-9);
    }
}
