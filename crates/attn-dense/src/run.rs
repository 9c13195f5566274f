//! One layer.

use mstar_kernels::dense::{AttendParams, attend};
use mstar_kernels::{Stream, TensorMut, TensorRef};

use crate::{DensePlan, Result, Workspace};

/// What a layer reads. `T`, `H`, `G`, `D`, `Dv` are the plan's; with padding, `T` is the padded count. Innermost axes are
/// contiguous, outer strides are free, so that views of a fused projection do.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[T, H, D]`, of `q_dtype`.
    pub q: TensorRef<'a>,
    /// Keys of the prefixes, of `kv_dtype`: `[U, G, D]` when they are packed, `[P, S, G, D]` when they lie in pages; `None` for
    /// a table of none.
    pub k_prefix: Option<TensorRef<'a>>,
    /// Their values, `Dv` wide.
    pub v_prefix: Option<TensorRef<'a>>,
    /// `[U, G, D]`, of `kv_dtype`: fresh keys. More than the table counts are never read.
    pub k: TensorRef<'a>,
    /// `[U, G, Dv]`: their values.
    pub v: TensorRef<'a>,
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
/// Tensors that are not what was planned, a prefix missing or not asked for, a workspace that is too small (with both
/// sizes), a device without a kernel. Nothing is then written.
pub fn run(
    plan: &DensePlan,
    stream: &Stream,
    workspace: &mut Workspace,
    inputs: Inputs<'_>,
    outputs: Outputs<'_>,
) -> Result<()> {
    run_in(plan, stream, workspace.view()?, inputs, outputs)
}

/// As [`run`], in a workspace that somebody else owns: `[n]` u8, of at least [`DensePlan::workspace_bytes`].
///
/// # Errors
/// As [`run`].
pub fn run_in(
    plan: &DensePlan,
    stream: &Stream,
    workspace: TensorMut<'_>,
    inputs: Inputs<'_>,
    outputs: Outputs<'_>,
) -> Result<()> {
    let Inputs { q, k_prefix, v_prefix, k, v } = inputs;
    let Outputs { o, lse } = outputs;
    let (work, workers) = (plan.work(), plan.workers());
    attend(stream, AttendParams { work, q, k_prefix, v_prefix, k, v, o, lse, workspace, workers })
}
