//! Every body against the oracle, and what may not change a bit.

mod batch;
#[cfg(feature = "emulator")]
mod device;
mod faults;
pub(crate) mod fp8;
mod invariance;
mod oracle;

use batch::{Batch, RowSpec, Shape, on_every_isa, row, same_bits};
