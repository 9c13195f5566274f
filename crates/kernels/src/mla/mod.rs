//! Absorbed multi-head latent attention's safe entry: geometry, variant, schedule, and one call that attends.
//!
//! In multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) a token is stored as one latent `[ckv | kpe]`,
//! `C + E` lanes wide, that all heads share. With the up-projections absorbed into queries and outputs, a head's
//! score is `sm_scale * (q_nope . ckv + q_pe . kpe)` and its value is `ckv`: attention with one key head of width
//! `C + E` whose value is the key's first `C` lanes. Outputs stay in latent space, `[T, H, C]`; the layer applies `W_UV`.
//!
//! Tables, work lists and their rules are those of [`paged`](crate::paged): a batch is checked and cut once
//! ([`schedule`]), then every layer attends with the same list ([`attend`]).

mod attend;
mod geometry;
mod schedule;

pub use attend::{AttendParams, attend, workspace_bytes};
pub use geometry::{Geometry, MAX_LATENT_DIM, Variant};
pub use schedule::{is_for, schedule};

#[cfg(test)]
pub(crate) mod tests;
