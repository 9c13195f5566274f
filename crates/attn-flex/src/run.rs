//! One layer.

use mstar_kernels::flex::{AttendParams, ScoreMod, attend};
use mstar_kernels::plan::Workspace;
use mstar_kernels::{Result, Stream, TensorMut, TensorRef};

use crate::Plan;

/// What a layer reads, and what becomes of its scores. `B`, `H`, `G`, `L`, `M`, `D`, `Dv` are the plan's.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[B, H, L, D]`, of `q_dtype`; the innermost axis is contiguous, outer strides are free.
    pub q: TensorRef<'a>,
    /// `[B, G, M, D]`, of `kv_dtype`; as `q`.
    pub k: TensorRef<'a>,
    /// `[B, G, M, Dv]`, of `kv_dtype`; as `q`.
    pub v: TensorRef<'a>,
    /// Factor of the dot product, finite; `None`: `D^-0.5`.
    pub scale: Option<f32>,
    /// What happens to the scaled scores, in this order.
    pub score_mods: &'a [ScoreMod<'a>],
}

/// What a layer writes: every element.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// `[B, H, L, Dv]`, of `q_dtype`. Rows may be strided, never overlapping.
    pub o: TensorMut<'a>,
    /// `[B, H, L]` f32: the natural log-sum-exp; `-inf` where a query sees nothing.
    pub lse: Option<TensorMut<'a>>,
    /// `[B, H, L]` f32: the largest score after the mods; `-inf` where a query sees nothing.
    pub max_scores: Option<TensorMut<'a>>,
}

/// Attends one layer as planned. Allocates nothing and reads nothing of the host's but the plan. On the CPU it runs in
/// the caller's rayon pool and returns when done.
///
/// A key that some query of a block sees and another does not must be finite. Blocks that no query sees may hold
/// anything, NaN included.
///
/// # Errors
/// Tensors that are not what was planned, mods whose tables have another size or that have no CPU half, a workspace that
/// is too small, a device without a kernel. Nothing is then written.
pub fn run(
    plan: &Plan,
    stream: &Stream,
    workspace: &mut Workspace,
    inputs: Inputs<'_>,
    outputs: Outputs<'_>,
) -> Result<()> {
    run_in(plan, stream, workspace.view()?, inputs, outputs)
}

/// As [`run`], in a workspace that somebody else owns: `[n]` u8, of at least [`Plan::workspace_bytes`].
///
/// # Errors
/// As [`run`].
pub fn run_in(
    plan: &Plan,
    stream: &Stream,
    workspace: TensorMut<'_>,
    inputs: Inputs<'_>,
    outputs: Outputs<'_>,
) -> Result<()> {
    let Inputs { q, k, v, scale, score_mods } = inputs;
    let Outputs { o, lse, max_scores } = outputs;
    let rule = plan.rule().mask_mods();
    let params = AttendParams {
        work: plan.work(),
        q,
        k,
        v,
        sm_scale: scale.unwrap_or_else(|| (plan.geometry().head_dim_qk as f32).sqrt().recip()),
        q_offset: plan.q_offset(),
        score_mods,
        mask_mods: &rule,
        o,
        lse,
        max_scores,
        workspace,
        workers: plan.workers(),
    };
    attend(stream, params)
}
