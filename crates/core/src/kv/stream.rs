//! One (request, label) sequence: its pages, its length, where its kept tokens start, its generation.
#![forbid(unsafe_code)]

use std::sync::Arc;

use mstar_kernels::mutant::planted;

use super::page_table::PageTable;
use super::prefix::Chain;
use super::{KvConfig, PageId};
use crate::{Label, RequestId};

/// Whose stream, and which.
pub(super) type StreamKey = (RequestId, Label);

/// One stream. A copy is cheap, so that a step works on copies and a rollback has nothing to repair.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stream {
    /// Pages from the first kept one on; those past the last token are spare, and the stream's alone.
    pub(super) table: PageTable,
    /// Index in the whole stream of the first listed page.
    pub(super) first_page: usize,
    /// Position of the first kept token.
    pub(super) first_kept: usize,
    /// Tokens stored, the given-back ones counted.
    pub(super) len: usize,
    /// Raised whenever pages or content change other than by growing.
    pub(super) generation: u64,
    /// What the prefix index knows of it.
    pub(super) content: Content,
}

/// The content of a stream, as far as page keys are concerned.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Content {
    /// The key that the next page's key chains from; `None` once content is unknown, or is not indexed.
    pub(super) chain: Option<Chain>,
    /// Pages before `chain`.
    pub(super) pages: usize,
    /// Content keys of the tokens since.
    pub(super) tail: Vec<u64>,
}

impl Content {
    /// Nothing yet, under a root; `None` never keys a page.
    pub(super) fn new(root: Option<Chain>) -> Content {
        Content { chain: root, pages: 0, tail: Vec::new() }
    }

    /// Adds `span` tokens; without their content no later page can be keyed.
    pub(super) fn append(&mut self, span: usize, tokens: &Arc<[u64]>) {
        if self.chain.is_some() && tokens.len() == span {
            self.tail.extend_from_slice(tokens);
        } else if span > 0 {
            *self = Content::new(None);
        }
    }
}

impl Stream {
    /// An empty stream.
    pub(super) fn empty(generation: u64, root: Option<Chain>) -> Stream {
        let content = Content::new(root);
        Stream { table: PageTable::default(), first_page: 0, first_kept: 0, len: 0, generation, content }
    }

    /// Position of slot 0 of the first listed page.
    pub(super) fn kv_offset(&self, page_size: usize) -> usize {
        self.first_page * page_size
    }

    /// Slots of the first listed page before the first kept token.
    pub(super) fn page_start(&self, page_size: usize) -> usize {
        self.first_kept - self.kv_offset(page_size)
    }

    /// Listed pages that a stream of `len` tokens uses.
    pub(super) fn used_pages(&self, len: usize, page_size: usize) -> usize {
        len.div_ceil(page_size).saturating_sub(self.first_page)
    }

    /// Pages to add for `span` more tokens.
    pub(super) fn pages_to_grow(&self, span: usize, page_size: usize) -> usize {
        self.used_pages(self.len + span, page_size).saturating_sub(self.table.len())
    }

    /// Listed pages that the next `span` tokens would write into: those that must be the stream's alone.
    pub(super) fn written_pages(&self, span: usize, page_size: usize) -> std::ops::Range<usize> {
        if span == 0 {
            return 0..0;
        }
        let first = (self.len / page_size).saturating_sub(self.first_page);
        first..self.used_pages(self.len + span, page_size).min(self.table.len())
    }

    /// The page and slot of a position that the table lists.
    pub(super) fn slot(&self, position: usize, page_size: usize) -> Option<i64> {
        let page = self.table.get((position / page_size).checked_sub(self.first_page)?)?;
        Some(i64::from(page) * page_size as i64 + (position % page_size) as i64)
    }

    /// Gives back the whole pages that fell out of the retention window, and returns them.
    pub(super) fn retire(&mut self, config: &KvConfig) -> Vec<PageId> {
        let Some(kept) = config.retention else { return Vec::new() };
        self.first_kept = self.first_kept.max(self.len.saturating_sub(kept));
        let first_page =
            self.first_kept / config.page_size + usize::from(planted("retention-one-page-too-many"));
        let gone = self.table.take_front(first_page - self.first_page);
        self.first_page = first_page;
        gone
    }

    /// What a fork starts with: the same tokens on the same pages, without the spare ones.
    pub(super) fn forked(&self, generation: u64, page_size: usize) -> Stream {
        let mut fork = Stream { generation, ..self.clone() };
        fork.table.truncate(self.used_pages(self.len, page_size));
        fork
    }
}

#[cfg(test)]
mod tests {
    use mstar_kernels::DType;

    use super::*;
    use crate::kv::KvLayout;

    fn stream(len: usize) -> (Stream, KvConfig) {
        let layout = KvLayout::Mla { kv_lora_rank: 1, qk_rope_head_dim: 0 };
        let config = KvConfig { retention: Some(5), ..KvConfig::new(layout, DType::F32, 4, 64) };
        let mut stream = Stream::empty(1, None);
        (1..=len.div_ceil(4)).for_each(|page| stream.table.push(page as PageId));
        stream.len = len;
        (stream, config)
    }

    #[test]
    fn f12_a_full_page_asks_for_no_page_until_a_token_needs_it() {
        let (eight, _) = stream(8);
        assert_eq!(eight.used_pages(8, 4), 2);
        assert_eq!(
            (eight.pages_to_grow(0, 4), eight.pages_to_grow(1, 4), eight.pages_to_grow(5, 4)),
            (0, 1, 2)
        );
        assert_eq!((eight.written_pages(0, 4), eight.written_pages(9, 4)), (0..0, 2..2));
        assert_eq!(stream(7).0.written_pages(1, 4), 1..2);
    }

    #[test]
    fn retention_gives_back_whole_pages_and_keeps_addresses() {
        let (mut s, config) = stream(12);
        assert_eq!(s.retire(&config), [1]); // keeps positions 7..12
        assert_eq!((s.first_kept, s.kv_offset(4), s.page_start(4)), (7, 4, 3));
        assert_eq!(
            (s.slot(3, 4), s.slot(7, 4), s.slot(11, 4), s.slot(12, 4)),
            (None, Some(11), Some(15), None)
        );
        assert!(s.retire(&config).is_empty());
        assert_eq!(s.used_pages(s.len, 4), 2);
        let (mut long, _) = stream(30);
        assert_eq!(long.retire(&config).len(), 6); // keeps 25..30, on pages 24..
        let (mut short, _) = stream(5);
        assert!(short.retire(&config).is_empty());
    }
}
