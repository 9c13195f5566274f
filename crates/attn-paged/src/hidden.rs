//! Which hidden states go on to the head: each row's last query token.

use mstar_kernels::cpu::gather::gather_rows;
use mstar_kernels::{Stream, TensorMut, TensorRef};

use crate::{Plan, Result};

/// Copies each row's last query token of `hidden` `[T, W]` to `out` `[R, W]`, both of one dtype. A row without
/// query tokens yields zeros; the padding's row is not among the `R`.
///
/// # Errors
/// Shapes or dtypes that do not fit each other or the plan; a device without a kernel. Nothing is then written.
pub fn select_last_hidden(
    plan: &Plan,
    stream: &Stream,
    hidden: TensorRef<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    Ok(gather_rows(stream, hidden, plan.last_tokens(), out)?)
}
