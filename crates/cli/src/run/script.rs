//! What a request does next: its life as a sequence of turns, a pure function of its plan and of how far it is.
//!
//! A prompt is cut at multiples of `chunked_prefill` from its start, so a cut's shape depends on the request
//! alone, never on its neighbours. Over a ring a cut is a frame. After the prompt come output turns on every
//! generating stream.

use mstar_core::Label;
use mstar_kernels::mutant;

use super::content::{Source, StreamContent, chain, mix};
use super::workload::{Generation, RequestPlan};

/// The kind of forward that a turn belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Walk {
    /// Writes an encoder's context.
    Encode,
    /// Computes a cut of a prompt.
    Prefill,
    /// Generates.
    Decode,
    /// Attends a block of output without keeping it.
    Denoise,
    /// Attends a tree of drafts without keeping it.
    Verify,
}

impl Walk {
    /// The name in steps, graphs and reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Walk::Encode => "encode",
            Walk::Prefill => "prefill",
            Walk::Decode => "decode",
            Walk::Denoise => "denoise",
            Walk::Verify => "verify",
        }
    }

    /// Whether lengths grow when its step commits.
    pub(crate) const fn commits(self) -> bool {
        matches!(self, Walk::Encode | Walk::Prefill | Walk::Decode)
    }
}

/// What a segment's tokens are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// What the stream holds there for good.
    Kept,
    /// One uncommitted pass over a block, counted over the whole request.
    Noise(usize),
    /// The nodes of a drafted tree, level by level.
    Draft,
}

/// One stream's part of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addition {
    /// The stream: 0 is `main`, forks count from 1. An encoder's context has a cache of its own.
    pub(crate) stream: usize,
    /// Position of the first token.
    pub(crate) start: usize,
    /// Tokens.
    pub(crate) span: usize,
    /// What they are.
    pub(crate) written: Written,
}

/// What a request does in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// Which kind of forward.
    pub(crate) walk: Walk,
    /// Additions to its streams; to its context where the walk is [`Walk::Encode`].
    pub(crate) additions: Vec<Addition>,
    /// Whether `main` is forked when the step commits.
    pub(crate) forks: bool,
}

/// The label of an encoder's context, in the cache that holds contexts.
pub(crate) const CONTEXT: &str = "context";

impl Turn {
    /// The label of one of the turn's additions.
    pub(crate) fn label(&self, plan: &RequestPlan, stream: usize) -> Label {
        if self.walk == Walk::Encode { Label::new(CONTEXT) } else { plan.label(stream) }
    }

    /// Query tokens of the turn.
    pub(crate) fn tokens(&self) -> usize {
        self.additions.iter().map(|addition| addition.span).sum()
    }
}

/// How far a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Whether the encoder's context is written.
    pub(crate) context: bool,
    /// Prompt tokens stored on `main`.
    pub(crate) prompt: usize,
    /// Output tokens stored on each generating stream.
    pub(crate) output: usize,
    /// Uncommitted passes since the last commit.
    pub(crate) passes: usize,
    /// Uncommitted passes in all.
    pub(crate) all_passes: usize,
}

impl Progress {
    /// A request whose first `hit` prompt tokens came from the prefix index.
    pub(crate) fn after_hit(hit: usize) -> Progress {
        Progress { prompt: hit, ..Progress::default() }
    }

    /// What `plan` does next; `None` when it is done.
    pub(crate) fn next(&self, plan: &RequestPlan, chunked_prefill: usize) -> Option<Turn> {
        let prompt_len = plan.prompt_len();
        let one = |walk, addition| Some(Turn { walk, additions: vec![addition], forks: false });
        if plan.context_len > 0 && !self.context {
            let short = usize::from(mutant::planted("context-one-token-short"));
            let span = plan.context_len - short;
            let whole = Addition { stream: 0, start: 0, span, written: Written::Kept };
            return one(Walk::Encode, whole);
        }
        if self.prompt < prompt_len {
            let chunk = plan.frame.unwrap_or(chunked_prefill).max(1);
            let end = ((self.prompt / chunk + 1).saturating_mul(chunk)).min(prompt_len);
            let cut =
                Addition { stream: 0, start: self.prompt, span: end - self.prompt, written: Written::Kept };
            let forks = end == prompt_len && !plan.forks.is_empty() && plan.stored_output() > 0;
            return Some(Turn { walk: Walk::Prefill, additions: vec![cut], forks });
        }
        let left = plan.stored_output() - self.output;
        if left == 0 {
            return None;
        }
        let (walk, span, written) = match &plan.generation {
            Generation::Decode => (Walk::Decode, 1, Written::Kept),
            Generation::Denoise { passes, tokens } if self.passes < *passes => {
                (Walk::Denoise, *tokens, Written::Noise(self.all_passes))
            }
            Generation::Denoise { tokens, .. } => (Walk::Decode, *tokens, Written::Kept),
            Generation::Tree { branching } if self.passes == 0 => {
                (Walk::Verify, nodes(branching), Written::Draft)
            }
            Generation::Tree { branching } => {
                (Walk::Decode, accepted(plan, branching, self.output).min(left), Written::Kept)
            }
        };
        let first = usize::from(!plan.forks.is_empty());
        let additions = (first..first + plan.generating())
            .map(|stream| Addition { stream, start: prompt_len + self.output, span, written })
            .collect();
        Some(Turn { walk, additions, forks: false })
    }

    /// How far the request is once `turn` has run.
    pub(crate) fn after(mut self, turn: &Turn) -> Progress {
        let span = turn.additions.first().map_or(0, |addition| addition.span);
        match turn.walk {
            Walk::Encode => self.context = true,
            Walk::Prefill => self.prompt += span,
            Walk::Decode => {
                self.output += span;
                self.passes = 0;
            }
            Walk::Denoise | Walk::Verify => {
                self.passes += 1;
                self.all_passes += 1;
            }
        }
        self
    }
}

/// Nodes of a tree.
pub(crate) fn nodes(branching: &[usize]) -> usize {
    levels(branching).into_iter().sum()
}

/// Nodes of each level.
fn levels(branching: &[usize]) -> Vec<usize> {
    branching
        .iter()
        .scan(1usize, |level, &children| {
            *level = level.saturating_mul(children);
            Some(*level)
        })
        .collect()
}

/// The parent of each node, level by level; `None` for the first level, whose parent is the stored stream.
pub(crate) fn parents(branching: &[usize]) -> Vec<Option<usize>> {
    let mut parents = Vec::new();
    let mut above = 0; // where the level above begins
    for (depth, (count, &children)) in levels(branching).into_iter().zip(branching).enumerate() {
        let here = parents.len();
        parents.extend((0..count).map(|node| (depth > 0).then(|| above + node / children)));
        above = here;
    }
    parents
}

/// Levels of the tree drafted at `output` whose nodes on the true path are accepted: at least one.
fn accepted(plan: &RequestPlan, branching: &[usize], output: usize) -> usize {
    1 + (mix(mix(plan.ordinal, 0xacce97), output as u64) % branching.len().max(1) as u64) as usize
}

/// What a request's streams hold at every position, by the end of its life: rebuilt from the plan alone.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// `main`, then the forks, each from position 0.
    pub(crate) streams: Vec<StreamContent>,
    /// The encoder's context.
    pub(crate) context: StreamContent,
}

impl Content {
    /// The content of `plan`'s streams.
    pub(crate) fn of(plan: &RequestPlan) -> Content {
        let main = StreamContent::of(&plan.prompt);
        let mut streams = vec![main; 1 + plan.forks.len()];
        let first = usize::from(!plan.forks.is_empty());
        for (stream, held) in streams.iter_mut().enumerate().skip(first) {
            held.extend(output(plan, stream), 0, plan.stored_output());
        }
        let mut context = StreamContent::default();
        context.extend(Source::Context(plan.ordinal), 0, plan.context_len);
        Content { streams, context }
    }

    /// Tokens and chained keys of one addition.
    pub(crate) fn added(&self, plan: &RequestPlan, walk: Walk, addition: &Addition) -> (Vec<u64>, Vec<u64>) {
        let Addition { stream, start, span, written } = *addition;
        let held = if walk == Walk::Encode { &self.context } else { &self.streams[stream] };
        let before = start.checked_sub(1).map(|last| held.keys[last]);
        match written {
            Written::Kept => {
                (held.tokens[start..start + span].to_vec(), held.keys[start..start + span].to_vec())
            }
            Written::Noise(pass) => {
                let source =
                    Source::Noise { request: plan.ordinal, stream: stream as u64, pass: pass as u64 };
                let tokens: Vec<u64> = (0..span).map(|index| source.token(index)).collect();
                let mut parent = before;
                let keys = tokens.iter().map(|&token| *parent.insert(chain(parent, token))).collect();
                (tokens, keys)
            }
            Written::Draft => draft(plan, stream, start, before),
        }
    }
}

/// What `stream` generates.
fn output(plan: &RequestPlan, stream: usize) -> Source {
    Source::Output { request: plan.ordinal, stream: stream as u64 }
}

/// Tokens and keys of a drafted tree. The accepted nodes are those the stream will hold; the others are wrong guesses.
fn draft(plan: &RequestPlan, stream: usize, start: usize, before: Option<u64>) -> (Vec<u64>, Vec<u64>) {
    let Generation::Tree { branching } = &plan.generation else {
        return (Vec::new(), Vec::new());
    };
    let done = start - plan.prompt_len();
    let guess = Source::Draft { request: plan.ordinal, stream: stream as u64, position: start as u64 };
    let right = accepted(plan, branching, done);
    let parents = parents(branching);
    let mut depth = vec![0; parents.len()];
    let (mut tokens, mut keys) =
        (Vec::with_capacity(parents.len()), Vec::<u64>::with_capacity(parents.len()));
    // The true path goes through one child of each of its nodes, chosen by hash.
    let mut path: Option<usize> = None;
    let mut next_level = 0;
    for (node, parent) in parents.iter().enumerate() {
        depth[node] = parent.map_or(0, |parent| depth[parent] + 1);
        let level = depth[node];
        let chosen = level == next_level && level < right && *parent == path && {
            let siblings = branching[level];
            let first = parents.iter().position(|other| other == parent).unwrap_or(node);
            node - first == (mix(mix(plan.ordinal, start as u64), level as u64) % siblings as u64) as usize
        };
        if chosen {
            path = Some(node);
            next_level += 1;
        }
        let token = if chosen { output(plan, stream).token(done + level) } else { guess.token(node) };
        tokens.push(token);
        keys.push(chain(parent.map_or(before, |parent| Some(keys[parent])), token));
    }
    (tokens, keys)
}

#[cfg(test)]
mod tests {
    use super::super::content::Run;
    use super::*;
    use mstar_core::Label;

    fn plan(prompt_len: usize, output_len: usize) -> RequestPlan {
        RequestPlan::new(3, 0.0, vec![Run { source: Source::Prompt(3), len: prompt_len }], output_len)
    }

    fn turns(plan: &RequestPlan, chunk: usize, hit: usize) -> Vec<Turn> {
        let mut progress = Progress::after_hit(hit);
        let mut all = Vec::new();
        while let Some(turn) = progress.next(plan, chunk) {
            progress = progress.after(&turn);
            all.push(turn);
            assert!(all.len() < 1000, "no end");
        }
        all
    }

    fn spans(turns: &[Turn]) -> Vec<(usize, usize)> {
        turns.iter().map(|turn| (turn.additions[0].start, turn.additions[0].span)).collect()
    }

    #[test]
    fn cuts_lie_at_multiples_of_the_chunk_from_the_prompts_start() {
        assert_eq!(spans(&turns(&plan(10, 1), 4, 0)), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(spans(&turns(&plan(10, 1), 4, 6)), [(6, 2), (8, 2)]);
        assert_eq!(spans(&turns(&plan(8, 3), 4, 0)), [(0, 4), (4, 4), (8, 1), (9, 1)]);
        assert_eq!(spans(&turns(&plan(1, 0), usize::MAX, 0)), [(0, 1)]);
    }

    #[test]
    fn forks_are_made_when_the_prompt_is_complete_and_then_part() {
        let mut cfg = plan(6, 2);
        cfg.forks = vec![Label::new("cond"), Label::new("uncond")];
        cfg.generation = Generation::Denoise { passes: 2, tokens: 3 };
        let all = turns(&cfg, 4, 0);
        let walks: Vec<_> = all.iter().map(|turn| turn.walk).collect();
        use Walk::{Decode, Denoise, Prefill};
        assert_eq!(walks, [Prefill, Prefill, Denoise, Denoise, Decode, Denoise, Denoise, Decode]);
        assert_eq!(all.iter().map(|turn| turn.forks).collect::<Vec<_>>()[..3], [false, true, false]);
        assert_eq!(
            all[2].additions.iter().map(|a| (a.stream, a.start)).collect::<Vec<_>>(),
            [(1, 6), (2, 6)]
        );
        let content = Content::of(&cfg);
        assert_eq!(content.streams.iter().map(|stream| stream.tokens.len()).collect::<Vec<_>>(), [6, 12, 12]);
        assert_eq!(content.streams[1].keys[..6], content.streams[2].keys[..6]);
        assert!((6..12).all(|i| content.streams[1].keys[i] != content.streams[2].keys[i]));
        // Two passes over one block are different content; the pass that stays is the stream's own.
        let keys = |turn: &Turn| content.added(&cfg, turn.walk, &turn.additions[0]).1;
        assert_ne!(keys(&all[2]), keys(&all[3]));
        assert_eq!(keys(&all[4]), content.streams[1].keys[6..9]);
    }

    #[test]
    fn a_tree_is_laid_level_by_level() {
        assert_eq!(nodes(&[3, 2, 1]), 15);
        let parents = parents(&[2, 2, 1]);
        let some = |all: &[usize]| all.iter().map(|&p| Some(p)).collect::<Vec<_>>();
        assert_eq!(parents[..2], [None, None]);
        assert_eq!(parents[2..6], some(&[0, 0, 1, 1]));
        assert_eq!(parents[6..], some(&[2, 3, 4, 5]));
    }

    #[test]
    fn accepted_drafts_are_nodes_of_the_tree_that_was_verified() {
        let mut tree = plan(5, 30);
        tree.generation = Generation::Tree { branching: vec![3, 2, 1] };
        let content = Content::of(&tree);
        let all = turns(&tree, 8, 0);
        assert_eq!(all.last().map(|turn| turn.additions[0].start + turn.additions[0].span), Some(5 + 29));
        let mut several = 0;
        for pair in all.windows(2) {
            if pair[0].walk != Walk::Verify {
                continue;
            }
            let (drafted, _) = content.added(&tree, pair[0].walk, &pair[0].additions[0]);
            let (_, drafted_keys) = content.added(&tree, pair[0].walk, &pair[0].additions[0]);
            assert_eq!((drafted.len(), pair[1].walk), (15, Walk::Decode));
            let (_, kept) = content.added(&tree, pair[1].walk, &pair[1].additions[0]);
            assert!(kept.iter().all(|key| drafted_keys.contains(key)), "every kept key was verified");
            several += usize::from(kept.len() > 1);
        }
        assert!(several > 0, "some step accepts more than one token");
    }

    #[test]
    fn an_encoders_context_comes_first_and_whole() {
        let mut cross = plan(3, 2);
        cross.context_len = 1500;
        let all = turns(&cross, 2, 0);
        assert_eq!((all[0].walk, all[0].additions[0].span), (Walk::Encode, 1500));
        assert_eq!(Content::of(&cross).added(&cross, Walk::Encode, &all[0].additions[0]).1.len(), 1500);
        assert_eq!(spans(&all[1..]), [(0, 2), (2, 1), (3, 1)]);
    }
}
