//! One layer.

use mstar_kernels::mla::{AttendParams, attend};
use mstar_kernels::{Stream, TensorMut, TensorRef};

use crate::{Plan, Result, Workspace};

/// What a layer reads. `T`, `H`, `C`, `E`, `P`, `S` are the plan's; with padding, `T` is the padded count.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[T, H, C]`, of `q_dtype`: queries multiplied into latent space by `W_UK`. The innermost axis is contiguous, outer
    /// strides are free.
    pub q_nope: TensorRef<'a>,
    /// `[T, H, E]`, of `q_dtype`: their rotary part; empty when `E` is 0. It may be a view of the same rows as `q_nope`.
    pub q_pe: TensorRef<'a>,
    /// `[P, S, C + E]`, of `kv_dtype`: `[ckv | kpe]` a token. Outer strides are free.
    pub latent: TensorRef<'a>,
}

/// What a layer writes: every element, the padded tokens' included.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// `[T, H, C]`, of `q_dtype`, in latent space: the layer applies `W_UV`. Rows may be strided, never overlapping.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32, natural logarithm; `-inf` where a query sees nothing.
    pub lse: Option<TensorMut<'a>>,
}

/// Attends one layer as planned. Allocates nothing and reads nothing of the host's but the plan. On the CPU it
/// runs in the caller's rayon pool and returns when done.
///
/// # Errors
/// Tensors that are not what was planned, a workspace that is too small (with both sizes), a device without a kernel.
/// Nothing is then written.
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
    let Inputs { q_nope, q_pe, latent } = inputs;
    let Outputs { o, lse } = outputs;
    let (work, workers) = (plan.work(), plan.workers());
    attend(stream, AttendParams { work, q_nope, q_pe, latent, o, lse, workspace, workers })
}
