//! From a spec's `workload` section to a list of requests.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`synthetic`] | requests of drawn lengths |
//! | [`trace`] | finding a trace file, telling its format, naming what is wrong with it |
//! | [`azure`], [`mooncake`] | the two formats |
//!
//! Bringing a trace of your own: write either format (their modules say which columns mean what) and point
//! `workload.file` at it.

pub(crate) mod azure;
pub(crate) mod mooncake;
pub(crate) mod synthetic;
pub(crate) mod trace;

use std::path::Path;

use anyhow::Context;
use mstar_core::spec::workload::{Snapshot, WorkloadKind, WorkloadSpec};
use mstar_core::{Label, RequestId};

use super::content::Run;

/// The longest prompt or output of one request, as a spec's reader has it.
pub(crate) const MAX_TOKENS: usize = mstar_core::spec::workload::MAX_LEN as usize;

/// What comes after the prompt, step by step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    /// One token a step. The prompt's last position yields the first, so `output_len - 1` are fed back.
    Decode,
    /// `output_len` blocks of `tokens`, each attended `passes` times uncommitted and then once to stay.
    Denoise {
        /// Uncommitted passes over a block.
        passes: usize,
        /// Tokens of a block.
        tokens: usize,
    },
    /// Trees of drafts verified uncommitted under a mask, then the accepted path committed.
    Tree {
        /// Children of each node, level by level.
        branching: Vec<usize>,
    },
}

/// One request before it runs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestPlan {
    /// Its id: `r` and its place in the workload.
    pub(crate) id: RequestId,
    /// Its place in the workload, from which its content derives.
    pub(crate) ordinal: u64,
    /// When it comes, in milliseconds of the run's virtual clock.
    pub(crate) arrival_ms: f64,
    /// Its prompt.
    pub(crate) prompt: Vec<Run>,
    /// Tokens (or blocks, with [`Generation::Denoise`]) that it generates.
    pub(crate) output_len: usize,
    /// How it generates.
    pub(crate) generation: Generation,
    /// Streams that `main` is forked into once the prompt is computed; none generates on `main` itself.
    pub(crate) forks: Vec<Label>,
    /// Whether the forks' rows are packed into one plan.
    pub(crate) combined: bool,
    /// Tokens of the encoder context that it attends, 0 for none.
    pub(crate) context_len: usize,
    /// Tokens of a frame, over a ring: prompts are cut there, whatever `chunked_prefill` says.
    pub(crate) frame: Option<usize>,
    /// When its world is saved, and when that comes back.
    pub(crate) snapshot: Option<Snapshot>,
}

impl RequestPlan {
    /// A request that decodes on `main`.
    pub(crate) fn new(ordinal: u64, arrival_ms: f64, prompt: Vec<Run>, output_len: usize) -> RequestPlan {
        RequestPlan {
            id: RequestId::new(format!("r{ordinal}")),
            ordinal,
            arrival_ms,
            prompt,
            output_len,
            generation: Generation::Decode,
            forks: Vec::new(),
            combined: false,
            context_len: 0,
            frame: None,
            snapshot: None,
        }
    }

    /// Prompt tokens.
    pub(crate) fn prompt_len(&self) -> usize {
        self.prompt.iter().map(|run| run.len).sum()
    }

    /// Tokens of output that each generating stream stores by the end.
    pub(crate) fn stored_output(&self) -> usize {
        match self.generation {
            Generation::Denoise { tokens, .. } => self.output_len.saturating_mul(tokens),
            Generation::Decode | Generation::Tree { .. } => self.output_len.saturating_sub(1),
        }
    }

    /// Tokens that its longest stream stores by the end.
    pub(crate) fn final_len(&self) -> usize {
        self.prompt_len().saturating_add(self.stored_output())
    }

    /// Streams that generate: the forks, or `main` alone.
    pub(crate) fn generating(&self) -> usize {
        self.forks.len().max(1)
    }

    /// The label of stream `index`: 0 is `main`, forks count from 1.
    pub(crate) fn label(&self, index: usize) -> Label {
        match index.checked_sub(1).and_then(|fork| self.forks.get(fork)) {
            Some(label) => label.clone(),
            None => Label::main(),
        }
    }
}

/// The trace that a workload is read from, found; `None` for requests that are drawn.
///
/// # Errors
/// No such file, and where it was looked for.
pub(crate) fn locate(spec: &WorkloadSpec, spec_path: &Path) -> anyhow::Result<Option<trace::Located>> {
    match &spec.kind {
        WorkloadKind::Trace(recorded) => trace::locate(&recorded.file, spec_path).map(Some),
        _ => Ok(None),
    }
}

/// The requests of a workload, in the order in which they arrive; `located` is what [`locate`] found.
///
/// # Errors
/// A trace that cannot be read: the message names file, line and column.
pub(crate) fn load(
    spec: &WorkloadSpec,
    seed: u64,
    located: Option<&trace::Located>,
) -> anyhow::Result<Vec<RequestPlan>> {
    let mut requests = match &spec.kind {
        WorkloadKind::Synthetic(synthetic) => synthetic::requests(synthetic, seed),
        WorkloadKind::Trace(recorded) => {
            let located = located.context("the trace was not looked for")?;
            trace::requests(recorded, &located.path)?
        }
        other => anyhow::bail!("workload.kind: this program cannot run {other:?}"),
    };
    // A stable sort: requests of one instant keep the order of their file.
    requests.sort_by(|a, b| a.arrival_ms.total_cmp(&b.arrival_ms));
    Ok(requests)
}
