//! What is run: requests of given or drawn lengths, or a recorded trace of them.

use super::node::clip;
use super::{Faults, Fields, Node, keys, scalar};

/// The most tokens of one prompt, context or output: the positions of both together are 32-bit.
pub const MAX_LEN: u64 = i32::MAX as u64 / 2;
/// Requests of a run.
const MAX_REQUESTS: u64 = 1_000_000;

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
    /// `snapshot`: worlds of a ring are saved and come back.
    pub snapshot: Option<Snapshot>,
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

/// Each request's world is copied to the host once it has committed `after` frames, and put back once it has committed
/// `frames` more: those come again, to the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Frames committed when the world is saved.
    pub after: usize,
    /// Frames committed from then on when it is put back.
    pub frames: usize,
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

#[derive(Clone, Copy)]
enum Kind {
    Synthetic,
    Trace,
}

impl WorkloadSpec {
    pub(super) fn read(node: &Node, faults: &Faults) -> Option<WorkloadSpec> {
        // The kind decides which keys there are, so it is read before the section is opened.
        let mut first = Fields::open(node, &keys::WORKLOAD, faults);
        if !first.is_map() {
            return None;
        }
        let kind = first.word("kind", &[("synthetic", Kind::Synthetic), ("trace", Kind::Trace)])?;
        let section = match kind {
            Kind::Synthetic => &keys::SYNTHETIC,
            Kind::Trace => &keys::TRACE,
        };
        let mut f = Fields::open(node, section, faults);
        f.value("kind");
        let max_batch = f.count_or("max_batch", 16, 1..=65_536);
        let chunked_prefill = f.count_or("chunked_prefill", 512, 1..=MAX_LEN);
        let max_steps = f.count_opt("max_steps", 1..=1 << 40).map(|steps| steps as u64);
        let step_ms = f.number_or("step_ms", 50.0, f64::MIN_POSITIVE..=3.6e6);
        let preplan = f.flag_or("preplan", false);
        let kind = match kind {
            Kind::Synthetic => read_synthetic(&mut f, faults).map(WorkloadKind::Synthetic),
            Kind::Trace => read_trace(&mut f).map(WorkloadKind::Trace),
        };
        f.finish("here");
        Some(WorkloadSpec { kind: kind?, max_batch, chunked_prefill, max_steps, step_ms, preplan })
    }
}

fn read_synthetic(f: &mut Fields<'_>, faults: &Faults) -> Option<SyntheticSpec> {
    let requests = f.count("requests", 1..=MAX_REQUESTS);
    let arrivals = f.value("arrivals").map_or(Some(Arrivals::AllAtOnce), |node| read_arrivals(node, faults));
    let prompt_len = f.required("prompt_len").and_then(|node| read_lengths(node, faults));
    let output_len = f.required("output_len").and_then(|node| read_lengths(node, faults));
    let shared_prefixes = f.section("shared_prefixes", &keys::SHARED_PREFIXES).and_then(|mut f| {
        let count = f.count_or("count", 1, 1..=MAX_REQUESTS);
        let len = f.count("len", 1..=MAX_LEN);
        let share = f.number_or("share", 1.0, 0.0..=1.0);
        f.finish("here");
        Some(SharedPrefixes { count, len: len?, share })
    });
    let forks = f.section("forks", &keys::FORKS).and_then(|f| read_forks(f, faults));
    let denoise = f.section("denoise", &keys::DENOISE).and_then(|mut f| {
        let (steps, tokens) = (f.count("steps", 1..=10_000), f.count("tokens", 1..=65_536));
        f.finish("here");
        Some(Denoise { steps: steps?, tokens: tokens? })
    });
    let tree = f.section("tree", &keys::TREE).and_then(|mut f| {
        f.required("branching")?;
        let branching = f.counts_opt("branching", 1..=64, 16);
        let tree = branching.map(|branching| Tree { branching });
        if tree.as_ref().is_some_and(|tree| tree.nodes().is_none_or(|nodes| nodes > 4096)) {
            f.fault_at("branching", "a tree of more than 4096 nodes; lower the counts");
        }
        f.finish("here");
        tree
    });
    let context_len = f.value("context_len").and_then(|node| read_lengths(node, faults));
    let snapshot = f.section("snapshot", &keys::SNAPSHOT).and_then(|mut f| {
        let (after, frames) = (f.count("after", 1..=MAX_LEN), f.count("frames", 1..=MAX_LEN));
        f.finish("here");
        Some(Snapshot { after: after?, frames: frames? })
    });
    if tree.is_some() {
        if denoise.is_some() {
            f.fault_at("denoise", "cannot be joined with tree; a block is denoised, a tree is verified");
        }
        if forks.is_some() {
            f.fault_at("forks", "cannot be joined with tree; remove one");
        }
    }
    Some(SyntheticSpec {
        requests: requests?,
        arrivals: arrivals?,
        prompt_len: prompt_len?,
        output_len: output_len?,
        shared_prefixes,
        forks,
        denoise,
        tree,
        context_len,
        snapshot,
    })
}

fn read_arrivals(node: &Node, faults: &Faults) -> Option<Arrivals> {
    if node.entries().is_none() {
        return match super::fields::word(node, &[("all_at_once", Arrivals::AllAtOnce)]) {
            Ok(arrivals) => Some(arrivals),
            Err(_) => {
                let why = format!("expected all_at_once or {{ poisson: RATE }}, got {}", node.describe());
                faults.push(node.error(why));
                None
            }
        };
    }
    let mut f = Fields::open(node, &keys::ARRIVALS, faults);
    let rate = f.number("poisson", 1e-6..=1e9);
    f.finish("here");
    Some(Arrivals::Poisson { rate: rate? })
}

fn read_lengths(node: &Node, faults: &Faults) -> Option<Lengths> {
    let range = 1..=MAX_LEN;
    let keep = |node: &Node| scalar::whole(node, &range).map_err(|why| faults.push(node.error(why))).ok();
    if let Some(items) = node.items() {
        if items.is_empty() || items.len() > 4096 {
            faults.push(node.error(format!("expected a list of 1 to 4096 lengths, got {}", node.describe())));
            return None;
        }
        return items
            .iter()
            .map(|item| keep(item).map(|n| n as usize))
            .collect::<Option<_>>()
            .map(Lengths::List);
    }
    if node.entries().is_none() {
        return keep(node).map(|n| Lengths::Fixed(n as usize));
    }
    let mut f = Fields::open(node, &keys::LENGTHS, faults);
    let uniform = f.counts_opt("uniform", range.clone(), 2);
    let lognormal = f.section("lognormal", &keys::LOGNORMAL).and_then(|mut f| {
        let median = f.number("median", 1.0..=MAX_LEN as f64);
        let sigma = f.number("sigma", 0.0..=10.0);
        let min = f.count_or("min", 1, range.clone());
        let max = f.count("max", range.clone());
        if let Some(max) = max.filter(|max| *max < min) {
            f.fault_at("max", format!("{max} is below min, which is {min}"));
        }
        f.finish("here");
        Some(Lengths::LogNormal { median: median?, sigma: sigma?, min, max: max? })
    });
    let keys = node.entries().map_or(0, |entries| entries.len());
    if keys != 1 {
        f.fault(format!("expected one of uniform and lognormal, got {keys} keys"));
    }
    let uniform = match (&uniform, node.get("uniform")) {
        (Some(pair), Some(at)) => match pair[..] {
            [min, max] if min <= max => Some(Lengths::Uniform { min, max }),
            _ => {
                faults.push(at.error("expected [MIN, MAX] with MIN no larger than MAX"));
                None
            }
        },
        _ => None,
    };
    f.finish("here");
    uniform.or(lognormal)
}

fn read_forks(mut f: Fields<'_>, faults: &Faults) -> Option<Forks> {
    f.required("labels")?;
    let labels = f.names_opt("labels", 16);
    let combined = f.flag_or("combined", true);
    let mut seen: Vec<String> = Vec::new();
    for (label, at) in labels.iter().flatten() {
        if *label == "main" || *label == "context" {
            faults.push(at.error(format!(
                "{label} is the name of a stream that every request may have; choose another"
            )));
        } else if seen.iter().any(|other| other == label) {
            faults.push(at.error(format!("{} is listed twice", clip(label))));
        }
        seen.push((*label).to_string());
    }
    f.finish("here");
    labels.map(|_| Forks { labels: seen, combined })
}

fn read_trace(f: &mut Fields<'_>) -> Option<TraceSpec> {
    let file = f.text("file");
    let formats =
        [("auto", TraceFormat::Auto), ("azure", TraceFormat::Azure), ("mooncake", TraceFormat::Mooncake)];
    let format = f.word_or("format", TraceFormat::Auto, &formats);
    let requests = f.count_opt("requests", 1..=MAX_REQUESTS);
    let skip = f.count_or("skip", 0, 0..=1 << 40);
    let time_scale = f.number_or("time_scale", 1.0, 0.0..=1e6);
    let length_scale = f.number_or("length_scale", 1.0, 1e-6..=1e3);
    let block_tokens = f.count_or("block_tokens", 512, 1..=65_536);
    Some(TraceSpec {
        file: file?.to_string(),
        format,
        requests,
        skip,
        time_scale,
        length_scale,
        block_tokens,
    })
}
