//! A model of the prefix index that replays a run's event log and says what every request should have hit.
//!
//! It knows nothing of pages or tables: a page is the chained content key of its last token, a page is in the index
//! from the commit that fills it until its eviction is reported, and a request hits the longest run of its prompt's
//! whole pages that are there, less what would leave nothing to compute.

use std::collections::{HashMap, HashSet};

use mstar_core::Label;

use super::event::Event;
use super::script::Content;
use super::workload::RequestPlan;

/// A request whose hit is not what the log implies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// The request.
    pub(crate) request: String,
    /// Tokens it should have hit.
    pub(crate) expected: usize,
    /// Tokens it hit.
    pub(crate) got: usize,
}

/// What the replay found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Replayed {
    /// Requests whose hits were recomputed.
    pub(crate) requests: usize,
    /// Prompt tokens that they should have hit.
    pub(crate) hit_tokens: usize,
    /// Those that did not.
    pub(crate) mismatches: Vec<Mismatch>,
}

/// Recomputes every admitted request's hit from the log of a run over `plans`.
pub(crate) fn replay(plans: &[RequestPlan], events: &[Event], page_size: usize) -> Replayed {
    let by_id: HashMap<&str, &RequestPlan> = plans.iter().map(|plan| (plan.id.as_str(), plan)).collect();
    let mut contents: HashMap<&str, Content> = HashMap::new();
    // Whole pages that each stream has: a commit offers those that it fills, and none that it had before, which an
    // eviction may have taken from the index while the request was on the host.
    let mut filled: HashMap<(&str, usize), usize> = HashMap::new();
    let mut entries: HashMap<u64, u64> = HashMap::new();
    let mut index: HashSet<u64> = HashSet::new();
    let mut replayed = Replayed::default();
    for event in events {
        match event {
            Event::Admit { request, hit_tokens, .. } => {
                let Some((&id, plan)) = by_id.get_key_value(request.as_str()) else { continue };
                let content = contents.entry(id).or_insert_with(|| Content::of(plan));
                let keys = &content.streams[0].keys[..plan.prompt_len()];
                let whole = (keys.len() - 1) / page_size;
                let hit = (1..=whole).take_while(|page| index.contains(&keys[page * page_size - 1])).count();
                let expected = hit * page_size;
                filled.insert((id, 0), hit_tokens / page_size);
                replayed.requests += 1;
                replayed.hit_tokens += expected;
                if expected != *hit_tokens {
                    let request = request.to_string();
                    replayed.mismatches.push(Mismatch { request, expected, got: *hit_tokens });
                }
            }
            Event::Commit { request, streams, .. } => {
                let Some(content) = contents.get(request.as_str()) else { continue };
                let (&id, plan) = by_id.get_key_value(request.as_str()).expect("its content is known");
                for stored in streams {
                    let Some(stream) = stream_of(plan, &stored.label) else { continue };
                    let keys = &content.streams[stream].keys;
                    // A fork begins with the pages of the stream that it was made from.
                    let main = filled.get(&(id, 0)).copied().unwrap_or(0);
                    let had = filled.entry((id, stream)).or_insert(main);
                    let has = stored.tokens / page_size;
                    index.extend((*had + 1..=has).map(|page| keys[page * page_size - 1]));
                    *had = has;
                }
            }
            Event::Index { entry, request, label, ordinal, .. } => {
                let Some(content) = contents.get(request.as_str()) else { continue };
                let Some(stream) = stream_of(by_id[request.as_str()], label) else { continue };
                if let Some(&key) = content.streams[stream].keys.get((ordinal + 1) * page_size - 1) {
                    entries.insert(*entry, key);
                }
            }
            Event::Evict { entry, .. } => {
                if let Some(key) = entries.get(entry) {
                    index.remove(key);
                }
            }
            Event::Finish { request, .. } | Event::Restart { request, .. } => {
                contents.remove(request.as_str());
                filled.retain(|(id, _), _| *id != request.as_str());
            }
            Event::Offload { .. }
            | Event::Reload { .. }
            | Event::Refuse { .. }
            | Event::Save { .. }
            | Event::Restore { .. } => {}
        }
    }
    replayed
}

/// Which of `plan`'s streams `label` is; an encoder's context is none of them.
fn stream_of(plan: &RequestPlan, label: &Label) -> Option<usize> {
    (0..=plan.forks.len()).find(|&stream| plan.label(stream) == *label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::content::{Run, Source};
    use crate::run::event::Stored;
    use crate::run::script::Walk;

    fn plan(ordinal: u64, blocks: &[u64]) -> RequestPlan {
        let prompt = blocks.iter().map(|&id| Run { source: Source::Block(id), len: 4 }).collect();
        RequestPlan::new(ordinal, 0.0, prompt, 1)
    }

    fn admit(plan: &RequestPlan, hit_tokens: usize) -> Event {
        Event::Admit { step: 0, request: plan.id.clone(), prompt_tokens: plan.prompt_len(), hit_tokens }
    }

    fn commit(plan: &RequestPlan, tokens: usize) -> Event {
        let streams = vec![Stored { label: Label::main(), tokens }];
        Event::Commit { step: 0, request: plan.id.clone(), walk: Walk::Prefill, streams }
    }

    fn index(plan: &RequestPlan, entry: u64, ordinal: usize) -> Event {
        Event::Index { step: 0, entry, request: plan.id.clone(), label: Label::main(), ordinal }
    }

    #[test]
    fn hits_follow_commits_and_evictions() {
        let plans = [plan(0, &[1, 2, 3]), plan(1, &[1, 2, 4]), plan(2, &[1, 2, 3]), plan(3, &[1, 2, 3])];
        let log = [
            admit(&plans[0], 0),
            commit(&plans[0], 9), // two whole pages of four, one token more
            index(&plans[0], 7, 0),
            index(&plans[0], 8, 1),
            admit(&plans[1], 8),
            commit(&plans[0], 12),
            admit(&plans[2], 8), // all three are there, and one token is left to compute
            Event::Evict { step: 0, entry: 8 },
            admit(&plans[3], 4),
        ];
        let replayed = replay(&plans, &log, 4);
        assert_eq!(replayed.mismatches, []);
        assert_eq!((replayed.requests, replayed.hit_tokens), (4, 20));
    }

    #[test]
    fn a_page_evicted_while_its_request_was_away_is_not_offered_again() {
        let plans = [plan(0, &[1, 2, 3]), plan(1, &[1, 2, 4])];
        let log = [
            admit(&plans[0], 0),
            commit(&plans[0], 8),
            index(&plans[0], 7, 0),
            index(&plans[0], 8, 1),
            Event::Evict { step: 0, entry: 8 },
            commit(&plans[0], 12), // fills the third page alone
            admit(&plans[1], 4),
        ];
        assert_eq!(replay(&plans, &log, 4).mismatches, []);
    }

    #[test]
    fn f26_a_hit_that_the_log_does_not_explain_is_found() {
        let plans = [plan(0, &[1, 2]), plan(1, &[9, 2])];
        let log = [admit(&plans[0], 0), commit(&plans[0], 8), admit(&plans[1], 4)];
        let found = replay(&plans, &log, 4).mismatches;
        assert_eq!(found, [Mismatch { request: "r1".into(), expected: 0, got: 4 }]);
    }
}
