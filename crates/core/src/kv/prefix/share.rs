//! Sharing of whole pages between requests: matched when a request comes in, offered when a step commits.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use mstar_kernels::mutant::planted;

use super::Chain;
use crate::kv::KvConfig;
use crate::kv::events::KvEvent;
use crate::kv::ledger::Ledger;
use crate::kv::plan::Row;
use crate::kv::stream::{Stream, StreamKey};
use crate::{Error, Label, RequestId, Result};

impl Ledger {
    /// A stream that begins with the longest run of indexed whole pages of `prompt`, at least one token short.
    pub(in crate::kv) fn attach(
        &mut self,
        config: &KvConfig,
        (request, label): (&RequestId, &Label),
        root: Option<Chain>,
        prompt: &[u64],
        max_seq_len: usize,
    ) -> Result<(Stream, usize)> {
        let mut stream = Stream::empty(self.next_generation(), root);
        // One token is left to compute, and a stream longer than is allowed is refused at admission.
        let left = usize::from(!planted("prefix-whole-prompt"));
        let most = prompt.len().min(max_seq_len).saturating_sub(left) / config.page_size;
        for tokens in prompt.chunks_exact(config.page_size).take(most) {
            let Some(chain) = stream.content.chain else { break };
            let Ok(Some((entry, page))) = self.index.find(chain, tokens) else { break };
            self.retain(page)?;
            stream.table.push(page);
            stream.len += config.page_size;
            stream.content.chain = Some(Chain::Entry(entry));
            stream.content.pages += 1;
        }
        let tokens = stream.len;
        let gone = stream.retire(config);
        self.release_all(gone.into_iter())?;
        self.counters.prompt_tokens += prompt.len() as u64;
        self.counters.hit_tokens += tokens as u64;
        self.events.push(|| KvEvent::Hit { request: request.clone(), label: label.clone(), tokens });
        Ok((stream, tokens))
    }

    /// Offers the pages that a row filled. A page that the index has already is given up for the index's copy,
    /// unless a step planned ahead lists it.
    pub(in crate::kv) fn offer(
        &mut self,
        config: &KvConfig,
        row: &Row,
        work: &mut HashMap<StreamKey, Stream>,
    ) -> Result<()> {
        let s = config.page_size;
        let key = (row.request.clone(), row.label.clone());
        let mut content = row.stream.content.clone();
        let mut generation = row.stream.generation;
        let mut used = 0;
        while let Some(chain) = content.chain
            && content.tail.len() - used >= s
        {
            let tokens = &content.tail[used..used + s];
            let ordinal = content.pages;
            let page = ordinal.checked_sub(row.stream.first_page).and_then(|i| row.stream.table.get(i));
            let named = || (row.request.clone(), row.label.clone());
            content.chain = match (self.index.find(chain, tokens), page) {
                (Ok(Some((entry, shared))), own) => {
                    // The stream's later self: gone when a fork replaced it, its front gone when retention took it.
                    let later = work.get_mut(&key).filter(|stream| stream.generation == generation);
                    let at = later.as_ref().and_then(|stream| ordinal.checked_sub(stream.first_page));
                    if let (Some(own), Some(later), Some(at)) = (own, later, at)
                        && own != shared
                    {
                        let repointed = self.steps.is_empty() && !self.pool.is_sealed(own)?;
                        if repointed {
                            generation = self.next_generation();
                            later.generation = generation;
                            if !planted("dedupe-keeps-own") {
                                later.table.replace(at, shared);
                            }
                            self.retain(shared)?;
                            self.release(own)?;
                            self.counters.repointed += 1;
                        }
                        let (entry, (request, label)) = (entry.number, named());
                        self.events.push(|| KvEvent::Duplicate { entry, request, label, ordinal, repointed });
                    }
                    Some(Chain::Entry(entry))
                }
                (Ok(None), Some(own)) if !self.pool.is_sealed(own)? => {
                    let entry = self.index.insert(chain, tokens, own);
                    self.pool.seal(own)?;
                    let (number, (request, label)) = (entry.number, named());
                    self.events.push(|| KvEvent::Indexed { entry: number, request, label, ordinal });
                    Some(Chain::Entry(entry))
                }
                // The parent was evicted, or retention took the page before its key was known.
                _ => None,
            };
            content.pages += 1;
            used += s;
        }
        content.tail.drain(..used);
        if content.chain.is_none() {
            content.tail.clear();
        }
        if let Some(later) = work.get_mut(&key).filter(|stream| stream.generation == generation) {
            later.content = content;
        }
        Ok(())
    }

    /// Empties the index of everything that no request uses; all cached pages are free again, save those that a
    /// used page chains from.
    pub(in crate::kv) fn evict_all(&mut self) -> Result<usize> {
        let mut evicted = 0;
        while let Some((entry, page)) = self.index.evict() {
            self.pool.evict(page)?;
            self.counters.evictions += 1;
            self.events.push(|| KvEvent::Evicted { entry });
            evicted += 1;
        }
        match self.index.evictable() {
            0 => Ok(evicted),
            left => Err(Error::Invariant(format!("{left} pages should be evictable and are not"))),
        }
    }
}
