//! From the turns of a step to its declaration: segments, forks, combined labels, masks.

use std::collections::BTreeMap;
use std::sync::Arc;

use mstar_core::step::{
    AttentionStep, Combined, Declaration, Fork, KvStep, MaskKeys, RingSegment, RingStep, RowMask,
};
use mstar_core::{Label, ResourceName, Segment, Step};

use super::scheduler::Work;
use super::script::{self, CONTEXT, Content, Turn, Walk, Written};
use super::workload::{Generation, RequestPlan};

/// The plan label that packs a request's forks into one plan.
pub(crate) const GUIDED: &str = "guided";

/// Which resources of the spec play which part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// The cache that requests' own streams live in.
    pub(crate) kv: ResourceName,
    /// The cache that encoders' contexts live in, where there is one.
    pub(crate) context: Option<ResourceName>,
    /// Attention resources over `kv`, which take draft masks.
    pub(crate) own: Vec<ResourceName>,
    /// Tokens of a frame, where `kv` is a ring.
    pub(crate) frame: Option<usize>,
}

/// The step of `works`; `content` gives each request's content.
pub(crate) fn step<'a>(
    works: &[Work],
    plans: &[RequestPlan],
    content: impl Fn(usize) -> &'a Content,
    parts: &Parts,
) -> Step {
    if let Some(frame) = parts.frame {
        let ring = Declaration::Ring(passes(works, plans, frame));
        return Step::new(walk(works)).with(parts.kv.clone(), ring);
    }
    let commit = works.first().is_none_or(|work| work.turn.walk.commits());
    let mut kv = KvStep { commit, ..KvStep::default() };
    let mut context = KvStep { commit, ..KvStep::default() };
    let mut masks = Vec::new();
    for work in works {
        let plan = &plans[work.request];
        for addition in &work.turn.additions {
            let (tokens, _) = content(work.request).added(plan, work.turn.walk, addition);
            // What is not kept is never indexed, so its content is nobody's business.
            let tokens: Arc<[u64]> = if commit { tokens.into() } else { Arc::new([]) };
            let label = work.turn.label(plan, addition.stream);
            let segment = Segment { request: plan.id.clone(), label, span: addition.span, tokens };
            if let Some(own) = draft_mask(plan, addition.written) {
                let (request, label) = (segment.request.clone(), segment.label.clone());
                masks.push(RowMask { request, label, visible: MaskKeys::Own(own.into()) });
            }
            let target = if work.turn.walk == Walk::Encode { &mut context } else { &mut kv };
            target.segments.push(segment);
        }
        if work.turn.walk != Walk::Encode && plan.context_len > 0 {
            // Reads without extending: the row that the request's queries attend.
            let (request, label) = (plan.id.clone(), Label::new(CONTEXT));
            context.segments.push(Segment { request, label, span: 0, tokens: Arc::new([]) });
        }
        if work.turn.forks {
            let fork = |to: &Label| Fork { request: plan.id.clone(), from: Label::main(), to: to.clone() };
            kv.post_forks.extend(plan.forks.iter().map(fork));
        }
    }
    // All rows of the first label, then all of the second: the order in which a group is packed.
    kv.segments.sort_by(|a, b| a.label.cmp(&b.label));
    kv.combined = combined(works, plans);
    let mut resources = BTreeMap::from([(parts.kv.clone(), Declaration::Kv(kv))]);
    if let Some(name) = &parts.context {
        resources.insert(name.clone(), Declaration::Kv(context));
    }
    if !masks.is_empty() {
        for name in &parts.own {
            let masks = masks.clone();
            resources.insert(
                name.clone(),
                Declaration::Attention(AttentionStep { masks, ..AttentionStep::default() }),
            );
        }
    }
    Step { walk: walk(works).to_owned(), resources }
}

/// The passes of `works` over a ring, a frame of `frame` tokens each.
fn passes(works: &[Work], plans: &[RequestPlan], frame: usize) -> RingStep {
    let mut segments = Vec::new();
    for work in works {
        let plan = &plans[work.request];
        segments.extend(work.turn.additions.iter().map(|addition| RingSegment {
            request: plan.id.clone(),
            label: work.turn.label(plan, addition.stream),
            span: addition.span,
            frame_pos: (addition.start / frame) as u64,
            commit: work.turn.walk.commits(),
        }));
    }
    RingStep { segments }
}

/// The walk that all turns share, or `mixed`.
pub(crate) fn walk(works: &[Work]) -> &'static str {
    let Some(first) = works.first() else { return "idle" };
    if works.iter().all(|work| work.turn.walk == first.turn.walk) { first.turn.walk.name() } else { "mixed" }
}

/// One group of all forks' labels, when the step generates on them.
fn combined(works: &[Work], plans: &[RequestPlan]) -> Vec<Combined> {
    let generates = |turn: &Turn| !matches!(turn.walk, Walk::Encode | Walk::Prefill);
    let first = works.iter().find(|work| generates(&work.turn) && plans[work.request].combined);
    let group = first.map(|work| {
        let mut parts = plans[work.request].forks.clone();
        parts.sort();
        Combined { label: Label::new(GUIDED), parts }
    });
    group.into_iter().collect()
}

/// `[nodes, nodes]`: a draft sees itself and its ancestors.
pub(crate) fn draft_mask(plan: &RequestPlan, written: Written) -> Option<Vec<bool>> {
    let (Written::Draft, Generation::Tree { branching }) = (written, &plan.generation) else { return None };
    let parents = script::parents(branching);
    let nodes = parents.len();
    let mut mask = vec![false; nodes * nodes];
    for node in 0..nodes {
        let mut above = Some(node);
        while let Some(at) = above {
            mask[node * nodes + at] = true;
            above = parents[at];
        }
    }
    Some(mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::content::{Run, Source};
    use crate::run::script::Progress;

    fn parts() -> Parts {
        let name = ResourceName::new;
        let own = vec![name("attn")];
        Parts { kv: name("kv"), context: Some(name("encoder")), own, frame: None }
    }

    fn plan(ordinal: u64) -> RequestPlan {
        RequestPlan::new(ordinal, 0.0, vec![Run { source: Source::Prompt(ordinal), len: 6 }], 3)
    }

    fn declared(plans: &[RequestPlan], progress: &[Progress]) -> Step {
        let contents: Vec<Content> = plans.iter().map(Content::of).collect();
        let works: Vec<Work> = progress
            .iter()
            .enumerate()
            .filter_map(|(request, p)| Some(Work { request, turn: p.next(&plans[request], 4)? }))
            .collect();
        step(&works, plans, |request| &contents[request], &parts())
    }

    #[test]
    fn prefill_and_decode_share_a_step_and_carry_their_content() {
        let plans = [plan(0), plan(1)];
        let decoding = Progress { prompt: 6, ..Progress::default() };
        let step = declared(&plans, &[decoding, Progress::default()]);
        assert_eq!(step.walk, "mixed");
        let kv = step.kv(&ResourceName::new("kv")).unwrap();
        assert!(kv.commit && kv.post_forks.is_empty() && kv.combined.is_empty());
        assert_eq!(
            kv.segments.iter().map(|s| (s.span, s.tokens.len())).collect::<Vec<_>>(),
            [(1, 1), (4, 4)]
        );
        assert_eq!(kv.segments[1].tokens[2], Source::Prompt(1).token(2));
    }

    #[test]
    fn forks_are_made_after_the_prompt_and_packed_label_by_label() {
        let mut plans = [plan(0), plan(1)];
        for plan in &mut plans {
            plan.forks = vec![Label::new("uncond"), Label::new("cond")];
            plan.combined = true;
            plan.generation = Generation::Denoise { passes: 2, tokens: 3 };
        }
        let cut = Progress { prompt: 4, ..Progress::default() };
        let step = declared(&plans, &[cut, cut]);
        let kv = step.kv(&ResourceName::new("kv")).unwrap();
        assert_eq!((kv.post_forks.len(), kv.combined.len()), (4, 0));
        let done = Progress { prompt: 6, ..Progress::default() };
        let step = declared(&plans, &[done, done]);
        let kv = step.kv(&ResourceName::new("kv")).unwrap();
        assert_eq!((step.walk.as_str(), kv.commit), ("denoise", false));
        let labels: Vec<_> = kv.segments.iter().map(|s| s.label.as_str().to_owned()).collect();
        assert_eq!(labels, ["cond", "cond", "uncond", "uncond"]);
        assert_eq!(kv.combined[0].parts, [Label::new("cond"), Label::new("uncond")]);
        assert!(kv.segments.iter().all(|s| s.tokens.is_empty()), "what is not kept is not indexed");
    }

    #[test]
    fn drafts_see_their_ancestors_alone() {
        let mut one = plan(0);
        one.generation = Generation::Tree { branching: vec![2, 1] };
        let mask = draft_mask(&one, Written::Draft).unwrap();
        #[rustfmt::skip]
        assert_eq!(mask, [
            true, false, false, false,
            false, true, false, false,
            true, false, true, false,
            false, true, false, true,
        ]);
        let step = declared(&[one], &[Progress { prompt: 6, ..Progress::default() }]);
        assert_eq!(step.attention(&ResourceName::new("attn")).unwrap().masks.len(), 1);
        assert!(!step.kv(&ResourceName::new("kv")).unwrap().commit);
    }

    #[test]
    fn a_context_is_written_once_and_then_read_by_every_step() {
        let mut one = plan(0);
        one.context_len = 9;
        let encoder = ResourceName::new("encoder");
        let first = declared(std::slice::from_ref(&one), &[Progress::default()]);
        assert_eq!(first.kv(&encoder).unwrap().segments[0].span, 9);
        assert!(first.kv(&ResourceName::new("kv")).unwrap().segments.is_empty());
        let after = declared(&[one], &[Progress { context: true, ..Progress::default() }]);
        let read = &after.kv(&encoder).unwrap().segments[0];
        assert_eq!((read.label.as_str(), read.span), (CONTEXT, 0));
        assert_eq!(after.kv(&ResourceName::new("kv")).unwrap().segments[0].span, 4);
    }
}
