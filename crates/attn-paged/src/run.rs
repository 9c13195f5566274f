//! One layer.

use mstar_kernels::paged::{AttendParams, attend};
use mstar_kernels::{Stream, TensorMut, TensorRef};

use crate::{Plan, Result, Workspace};

/// What a layer reads. `T`, `H`, `D`, `P`, `S`, `G`, `Dv` are the plan's; with padding, `T` is the padded count.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[T, H, D]`, of `q_dtype`. The innermost axis is contiguous, outer strides are free.
    pub q: TensorRef<'a>,
    /// `[P, S, G, D]`, of `kv_dtype`; e4m3 goes by [`run_scaled_in`]. Outer strides are free: an interleaved or head-major pool is a view.
    pub k: TensorRef<'a>,
    /// `[P, S, G, Dv]`, of `kv_dtype`, with `k`'s `P`.
    pub v: TensorRef<'a>,
    /// `[H]` f32, natural-log units; exactly when the variant has sinks.
    pub sinks: Option<TensorRef<'a>>,
    /// `[H]` f32; exactly when the variant has ALiBi.
    pub alibi_slopes: Option<TensorRef<'a>>,
}

/// What a layer writes: every element, the padded tokens' included.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// `[T, H, Dv]`, of `q_dtype`. Rows may be strided, never overlapping.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32, natural logarithm; `-inf` where a query sees nothing.
    pub lse: Option<TensorMut<'a>>,
}

/// Attends one layer as planned. Allocates nothing and reads nothing of the host's but the plan. On the CPU it
/// runs in the caller's rayon pool and returns when done.
///
/// # Errors
/// Tensors that are not what was planned, sinks or slopes that the variant does not have (or lacks), a
/// workspace that is too small (with both sizes), a device without a kernel. Nothing is then written.
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
    attend_in(plan, stream, workspace, inputs, None, outputs)
}

/// As [`run_in`], over keys and values that are e4m3 codes: `kv_scales` are those of keys and of values, each `[P, S, G]` f32 of any
/// strides. A lane is its code times the scale of its token and head.
///
/// # Errors
/// As [`run`]; a plan whose `kv_dtype` is not e4m3.
pub fn run_scaled_in(
    plan: &Plan,
    stream: &Stream,
    workspace: TensorMut<'_>,
    inputs: Inputs<'_>,
    kv_scales: [TensorRef<'_>; 2],
    outputs: Outputs<'_>,
) -> Result<()> {
    attend_in(plan, stream, workspace, inputs, Some(kv_scales), outputs)
}

fn attend_in(
    plan: &Plan,
    stream: &Stream,
    workspace: TensorMut<'_>,
    inputs: Inputs<'_>,
    kv_scales: Option<[TensorRef<'_>; 2]>,
    outputs: Outputs<'_>,
) -> Result<()> {
    let Inputs { q, k, v, sinks, alibi_slopes } = inputs;
    let Outputs { o, lse } = outputs;
    let (work, workers) = (plan.work(), plan.workers());
    let params = AttendParams { work, q, k, v, kv_scales, sinks, alibi_slopes, o, lse, workspace, workers };
    attend(stream, params)
}
