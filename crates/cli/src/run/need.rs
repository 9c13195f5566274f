//! What a request needs of its cache to run to its end, known before its first step.

use mstar_core::RefusalReason;
use mstar_core::kv::KvConfig;
use mstar_core::{Label, RequestId};

use super::script::{Progress, Walk};
use super::workload::RequestPlan;

/// The most that a request ever holds in one cache, whoever else is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Tokens of its longest stream, those of a step that keeps nothing among them: drafts, blocks being denoised.
    pub(crate) tokens: usize,
    /// Pages of all its streams at once.
    pub(crate) pages: usize,
}

impl Need {
    /// Of `plan`'s own streams in the cache `config`, its prompt cut at multiples of `chunked_prefill`.
    ///
    /// Goes through the request's life turn by turn. A turn adds to what the one before left, and what falls out of
    /// the retention window is given back once it has committed. Forks share the prompt's whole pages; `main` keeps its
    /// partial last one, which each fork copies.
    pub(crate) fn of(plan: &RequestPlan, config: &KvConfig, chunked_prefill: usize) -> Need {
        let size = config.page_size.max(1);
        let first = |len: usize| config.retention.map_or(0, |kept| len.saturating_sub(kept) / size);
        let prompt_len = plan.prompt_len();
        let mains = prompt_len.div_ceil(size) - first(prompt_len);
        let mut need = Need { tokens: 0, pages: 0 };
        let mut progress = Progress::default();
        while let Some(turn) = progress.next(plan, chunked_prefill) {
            progress = progress.after(&turn);
            let own = turn.additions.first().filter(|_| turn.walk != Walk::Encode);
            let Some(addition) = own else { continue };
            let end = addition.start + addition.span;
            let pages = match addition.stream {
                0 => end.div_ceil(size) - first(addition.start),
                _ => {
                    let apart = first(addition.start).max(prompt_len / size);
                    mains + turn.additions.len() * (end.div_ceil(size) - apart)
                }
            };
            need = Need { tokens: need.tokens.max(end), pages: need.pages.max(pages) };
        }
        need
    }

    /// Of an encoder's context of `tokens`, which is written once and kept whole.
    pub(crate) fn of_context(tokens: usize, config: &KvConfig) -> Need {
        Need { tokens, pages: config.pages_for(tokens) }
    }

    /// Why the cache `config` can never meet it, whatever else leaves; `None` when it can.
    pub(crate) fn unmet(
        &self,
        config: &KvConfig,
        request: &RequestId,
        label: Label,
    ) -> Option<RefusalReason> {
        let (request, max_seq_len) = (request.clone(), config.max_seq_len);
        if self.tokens > max_seq_len {
            let tokens = self.tokens;
            return Some(RefusalReason::SequenceTooLong { request, label, tokens, max_seq_len });
        }
        let (pages_needed, pages_total) = (self.pages, config.usable_pages());
        (pages_needed > pages_total).then_some(RefusalReason::NeverFits {
            request,
            label,
            pages_needed,
            pages_total,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::content::{Run, Source};
    use crate::run::workload::Generation;
    use mstar_core::kv::KvLayout;
    use mstar_kernels::DType;

    fn plan(prompt: usize, output_len: usize) -> RequestPlan {
        RequestPlan::new(0, 0.0, vec![Run { source: Source::Prompt(0), len: prompt }], output_len)
    }

    fn cache(pages: usize, retention: Option<usize>) -> KvConfig {
        let layout = KvLayout::Nhd { num_kv_heads: 1, head_dim: 8 };
        KvConfig { retention, max_seq_len: 1000, ..KvConfig::new(layout, DType::F32, 4, pages) }
    }

    #[test]
    fn a_stream_needs_what_it_stores() {
        // The last token is never fed back.
        assert_eq!(Need::of(&plan(10, 4), &cache(9, None), 64), Need { tokens: 13, pages: 4 });
        assert_eq!(Need::of(&plan(10, 1), &cache(9, None), 3), Need { tokens: 10, pages: 3 });
    }

    #[test]
    fn drafts_of_a_tree_are_part_of_the_need() {
        let mut one = plan(10, 3);
        one.generation = Generation::Tree { branching: vec![3, 2, 1] };
        // 15 nodes over 10 tokens, then over 11 to 12: what stays is 12.
        let need = Need::of(&one, &cache(9, None), 64);
        assert!(need.tokens == 25 || need.tokens == 26, "{need:?}");
        assert_eq!(need.pages, 7);
        let unmet = |pages: usize| need.unmet(&cache(pages, None), &one.id, Label::main());
        assert_eq!(unmet(8), None);
        let said = unmet(7).expect("six pages beside the sink").to_string();
        assert_eq!(said, "request r0 (main) is 1 pages short of the 7 it needs at once; the pool has 6");
        let short = KvConfig { max_seq_len: 24, ..cache(9, None) };
        let said = need.unmet(&short, &one.id, Label::main()).expect("too long").to_string();
        assert!(said.contains(&format!("would hold {} tokens, max_seq_len is 24", need.tokens)), "{said}");
    }

    #[test]
    fn what_retention_gives_back_is_no_part_of_the_need() {
        // Cuts of 8 over the last 6 kept: tokens 16..24 come to 10..16, of which the first listed page begins at 8.
        let kept = Need::of(&plan(100, 50), &cache(99, Some(6)), 8);
        assert_eq!(kept, Need { tokens: 149, pages: 4 });
        assert_eq!(Need::of(&plan(100, 50), &cache(99, Some(6)), 100).pages, 25, "a prompt in one piece");
    }

    #[test]
    fn forks_share_whole_pages_of_the_prompt() {
        let mut one = plan(10, 2);
        one.forks = vec![Label::new("cond"), Label::new("uncond")];
        one.generation = Generation::Denoise { passes: 2, tokens: 5 };
        // Two whole pages are shared; main keeps the third, and each fork has 12 of its own from token 8 on.
        assert_eq!(Need::of(&one, &cache(99, None), 64), Need { tokens: 20, pages: 3 + 2 * 3 });
    }
}
