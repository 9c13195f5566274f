//! Which hidden states go on to the head: each row's last query token.

use crate::cpu::gather::gather_rows;
use crate::{Result, Stream, TensorMut, TensorRef};

use super::{Kernel, Plan};

/// Copies each row's last query token of `hidden` `[T, W]` to `out` `[R, W]`, both of one dtype. A row without
/// query tokens yields zeros; the padding's row is not among the `R`.
///
/// # Errors
/// Shapes or dtypes that do not fit each other or the plan; a device without a kernel. Nothing is then written.
pub fn select_last_hidden<K: Kernel>(
    plan: &Plan<K>,
    stream: &Stream,
    hidden: TensorRef<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    gather_rows(stream, hidden, plan.last_tokens(), out)
}
