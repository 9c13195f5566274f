//! Block-mask attention's safe entry (FlexAttention, arXiv 2412.05496): batches of queries over the blocks of keys that a
//! mask shows them, with mods of scores.
//!
//! What is visible is checked and cut once ([`schedule`]), then every layer attends with the same list ([`attend`]), each with
//! its own mods. A row's keys are its visible blocks in ascending order, and its leaves and key tiles count *visible* keys:
//! attending scattered blocks gives the bits of attending the same blocks moved together, for mods that do not ask which
//! key it is, or when [`Blocks::positions`] says which block of the sequence each one is.

mod attend;
mod blocks;
mod geometry;
mod mods;
mod schedule;

pub use attend::{AttendParams, attend, stage, workspace_bytes};
pub use blocks::Blocks;
pub use geometry::Geometry;
pub use mods::{CudaSnippet, MaskFn, MaskMod, ScoreFn, ScoreMod, TileRow, UserMask, UserMod};
pub use schedule::{is_for, schedule};

#[cfg(test)]
mod tests;
