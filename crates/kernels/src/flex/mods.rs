//! What may happen to a score, and which keys of a block a query may see.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// What happens to the scaled score `s` of the query at position `p = q_idx + q_offset` and the key `k`; `d = k - p`. A list
/// of them is applied in its order.
#[derive(Clone, Copy, Debug, Default)]
pub enum ScoreMod<'a> {
    /// Nothing.
    #[default]
    None,
    /// Keys with `d > 0` are hidden, in whatever block they lie.
    Causal,
    /// `s + slopes[h] * d` (ALiBi, arXiv 2108.12409).
    Alibi {
        /// `[H]`, finite.
        slopes: &'a [f32],
    },
    /// `s + table[h, clamp(d, -W, W) + W]`.
    RelBias {
        /// `[H, 2 W + 1]`, row-major.
        table: &'a [f32],
        /// `W`.
        window: usize,
    },
    /// `c * tanh(s / c)` (Gemma 2, arXiv 2408.00118).
    SoftCap(
        /// `c`, finite and above 0.
        f32,
    ),
    /// The caller's own.
    User(&'a UserMod),
}

/// Which keys of a block that is visible *in part* a query at position `p = q_idx + q_offset` sees. Those of a list are joined: a
/// key is seen when all of them allow it. Blocks that are visible whole are not asked about.
#[derive(Clone, Copy, Debug, Default)]
pub enum MaskMod<'a> {
    /// All of them.
    #[default]
    None,
    /// Keys `k <= p`.
    Causal,
    /// Keys `p - left <= k <= p + right`.
    SlidingWindow {
        /// Keys before its own position that a query sees.
        left: usize,
        /// Keys after it.
        right: usize,
    },
    /// Keys of the query's own document: `kv_ids[k] == q_ids[q_idx]`.
    Document {
        /// `[L]`.
        q_ids: &'a [i32],
        /// `[M]`; with a position table, as many as it reaches.
        kv_ids: &'a [i32],
    },
    /// The caller's own.
    User(&'a UserMask),
}

/// One query under one head, and some keys: what a user's closure is called with.
#[derive(Clone, Copy, Debug)]
pub struct TileRow<'a> {
    /// The batch.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// Index of the query in its batch.
    pub q_idx: usize,
    /// What is added to `q_idx` to compare it with key indices.
    pub q_offset: i64,
    /// Indices of the keys, one beside each score.
    pub k_idx: &'a [i32],
}

/// Changes scaled scores in place, in natural-log units. It must be a function of its arguments alone, a score at a
/// time: which keys it is called with together is not said, some of them may be hidden, and threads call it at once.
pub type ScoreFn = dyn Fn(&mut [f32], &TileRow<'_>) + Send + Sync;

/// Clears the entries of keys that the query does not see; all are set before. As [`ScoreFn`] otherwise.
pub type MaskFn = dyn Fn(&mut [bool], &TileRow<'_>) + Send + Sync;

/// A score mod of the caller's.
///
/// A score that it makes `-inf` hides the key from the query. The key must be finite all the same.
#[derive(Clone)]
pub struct UserMod {
    /// What it is called in reports and errors.
    pub name: Cow<'static, str>,
    /// How it is done on a CPU.
    pub cpu: Option<Arc<ScoreFn>>,
    /// How it is done on a CUDA device.
    pub cuda: Option<CudaSnippet>,
}

/// A mask mod of the caller's.
#[derive(Clone)]
pub struct UserMask {
    /// What it is called in reports and errors.
    pub name: Cow<'static, str>,
    /// How it is done on a CPU.
    pub cpu: Option<Arc<MaskFn>>,
    /// How it is done on a CUDA device.
    pub cuda: Option<CudaSnippet>,
}

/// A mod's body for a device: a snippet that is compiled at run time, and the numbers it reads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CudaSnippet {
    /// The body of a CUDA C++ function that returns the new score (for a [`UserMod`]) or whether the key is seen (for a
    /// [`UserMask`]). It sees `float score` (a score mod's alone, scaled, in natural-log units), `u32 batch`, `u32 head`,
    /// `i32 q_idx`, `i32 k_idx`, `i64 q_offset`, `const float* floats` and `const i32* ints`, and no CUDA header.
    pub source: Cow<'static, str>,
    /// Floats that it may read.
    pub floats: Vec<f32>,
    /// Integers that it may read.
    pub ints: Vec<i32>,
}

impl UserMod {
    /// A mod for CPUs.
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        cpu: impl Fn(&mut [f32], &TileRow<'_>) + Send + Sync + 'static,
    ) -> UserMod {
        UserMod { name: name.into(), cpu: Some(Arc::new(cpu)), cuda: None }
    }
}

impl UserMask {
    /// A mask for CPUs.
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        cpu: impl Fn(&mut [bool], &TileRow<'_>) + Send + Sync + 'static,
    ) -> UserMask {
        UserMask { name: name.into(), cpu: Some(Arc::new(cpu)), cuda: None }
    }
}

fn describe(
    what: &str,
    name: &str,
    cpu: bool,
    cuda: &Option<CudaSnippet>,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    f.debug_struct(what).field("name", &name).field("cpu", &cpu).field("cuda", cuda).finish()
}

impl fmt::Debug for UserMod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe("UserMod", &self.name, self.cpu.is_some(), &self.cuda, f)
    }
}

impl fmt::Debug for UserMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        describe("UserMask", &self.name, self.cpu.is_some(), &self.cuda, f)
    }
}
