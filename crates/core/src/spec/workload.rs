//! What is run: requests of given or drawn lengths, or a recorded trace of them.

/// The `workload` section.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkloadSpec {
    /// Where requests come from.
    pub kind: WorkloadKind,
    /// `max_batch`: requests that may be active at once.
    pub max_batch: usize,
    /// `chunked_prefill`: the longest piece of a prompt that one step computes; a prompt is cut at multiples of it.
    pub chunked_prefill: usize,
    /// `max_steps`: stop after so many steps; `None` runs to the end.
    pub max_steps: Option<u64>,
    /// `step_ms`: virtual milliseconds that one step takes. Arrivals are compared with this clock, never with the
    /// machine's, so that a run is the same run on any machine.
    pub step_ms: f64,
    /// `preplan`: whether step N+1 is planned into another slot while step N runs.
    pub preplan: bool,
}

/// Where requests come from.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum WorkloadKind {
    /// Drawn from distributions.
    Synthetic(SyntheticSpec),
    /// Read from a file.
    Trace(TraceSpec),
}

/// `kind: synthetic`.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticSpec {
    /// `requests`: how many.
    pub requests: usize,
    /// `arrivals`: when they come.
    pub arrivals: Arrivals,
    /// `prompt_len`: prompt tokens of a request, at least 1.
    pub prompt_len: Lengths,
    /// `output_len`: tokens (or frames, with `denoise`) that each request generates.
    pub output_len: Lengths,
    /// `shared_prefixes`: prompts that begin alike.
    pub shared_prefixes: Option<SharedPrefixes>,
    /// `forks`: streams that a request is forked into once its prompt is computed.
    pub forks: Option<Forks>,
    /// `denoise`: uncommitted passes over each block of output.
    pub denoise: Option<Denoise>,
    /// `tree`: speculative decoding, a tree of drafts verified in each step.
    pub tree: Option<Tree>,
    /// `context_len`: tokens of the encoder's context that each request attends through cross-attention.
    pub context_len: Option<Lengths>,
}

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// `all_at_once`: all are there when the run begins.
    AllAtOnce,
    /// `{ poisson: RATE }`: exponential gaps, `rate` requests a virtual second.
    Poisson {
        /// Requests a second of the virtual clock.
        rate: f64,
    },
}

/// A distribution of lengths; every draw is at least 1.
#[derive(Clone, Debug, PartialEq)]
pub enum Lengths {
    /// A plain number: every length is this.
    Fixed(usize),
    /// `{ uniform: [MIN, MAX] }`, both included.
    Uniform {
        /// Shortest.
        min: usize,
        /// Longest.
        max: usize,
    },
    /// `{ lognormal: { median, sigma, min, max } }`: `median * exp(sigma * z)`, clamped.
    LogNormal {
        /// The median length.
        median: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
        /// Shortest.
        min: usize,
        /// Longest.
        max: usize,
    },
    /// A list: request `i` takes entry `i` modulo its length.
    List(Vec<usize>),
}

impl Lengths {
    /// The longest length that can be drawn.
    pub fn max(&self) -> usize {
        match self {
            Lengths::Fixed(n) => *n,
            Lengths::Uniform { max, .. } | Lengths::LogNormal { max, .. } => *max,
            Lengths::List(all) => all.iter().copied().max().unwrap_or(0),
        }
    }

    /// The shortest length that can be drawn.
    pub fn min(&self) -> usize {
        match self {
            Lengths::Fixed(n) => *n,
            Lengths::Uniform { min, .. } | Lengths::LogNormal { min, .. } => *min,
            Lengths::List(all) => all.iter().copied().min().unwrap_or(0),
        }
    }
}

/// Prompts that begin alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedPrefixes {
    /// Different prefixes.
    pub count: usize,
    /// Tokens of each. A prompt no longer than this is a prefix of it and one token of its own.
    pub len: usize,
    /// Share of the requests that begin with one, 0 to 1.
    pub share: f64,
}

/// Streams that a request's `main` is forked into once its prompt is computed; they decode side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forks {
    /// `labels`: the streams, such as `[cond, uncond]`.
    pub labels: Vec<String>,
    /// `combined`: whether their rows are packed into one plan (batched classifier-free guidance).
    pub combined: bool,
}

/// Uncommitted passes: each block of output is attended `steps` times with `commit: false`, then once to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denoise {
    /// Passes that keep nothing.
    pub steps: usize,
    /// Tokens of a block; `output_len` counts blocks.
    pub tokens: usize,
}

/// Speculative decoding: every step verifies a tree of drafted tokens under a custom mask with `commit: false`, and then
/// commits the accepted path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    /// `branching`: children of each node, level by level: `[3, 2, 1]` has 3 + 6 + 6 nodes.
    pub branching: Vec<usize>,
}

impl Tree {
    /// Nodes of the tree, or `None` when they overflow.
    pub fn nodes(&self) -> Option<usize> {
        let mut level = 1usize;
        let mut all = 0usize;
        for &children in &self.branching {
            level = level.checked_mul(children)?;
            all = all.checked_add(level)?;
        }
        Some(all)
    }
}

/// `kind: trace`.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSpec {
    /// `file`: looked for as it is when it has a directory or exists, else in `$MSTAR_DATA`, else in `specs/data`.
    pub file: String,
    /// `format`: which columns it has.
    pub format: TraceFormat,
    /// `requests`: how many to take; `None` takes all.
    pub requests: Option<usize>,
    /// `skip`: how many to leave out at the beginning.
    pub skip: usize,
    /// `time_scale`: arrival times are multiplied by this; 0 brings all at once.
    pub time_scale: f64,
    /// `length_scale`: prompt and output lengths (and `block_tokens`) are multiplied by this, at least 1 token each.
    pub length_scale: f64,
    /// `block_tokens`: prompt tokens that one `hash_ids` entry stands for, before scaling.
    pub block_tokens: usize,
}

/// A trace file's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceFormat {
    /// `auto`: by the file's first line.
    Auto,
    /// `azure`: CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.
    Azure,
    /// `mooncake`: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
    Mooncake,
}
