//! Paged attention's safe entry: geometry, variant, page tables, schedule, and one call that attends.
//!
//! A table is checked and cut into work once ([`schedule`]), then every layer attends with the same list
//! ([`attend`]). Rules of visibility and numbers: [`Variant`], [`PageTable`] and [`work`](crate::work).

#[cfg(feature = "paged")]
mod attend;
mod balance;
mod cascade;
mod cut_blocks;
mod family;
mod geometry;
#[cfg(any(feature = "paged", feature = "mla"))]
mod renew;
mod schedule;
mod table;
mod variant;

#[cfg(test)]
pub(crate) mod tests;

#[cfg(feature = "paged")]
pub use attend::{AttendParams, attend, workspace_bytes};
#[cfg(feature = "cuda")]
pub(crate) use balance::most_units;
#[cfg(feature = "cuda")]
pub(crate) use cut_blocks::cut_tokens;
#[cfg(all(test, feature = "cuda"))]
#[allow(unused_imports, reason = "trials are there with every feature alone")]
pub(crate) use cut_blocks::forced;
pub(crate) use family::Stored;
#[cfg(any(feature = "cuda", feature = "flex"))]
pub(crate) use family::blocks_leaf;
#[cfg(feature = "cuda")]
pub(crate) use family::latents_in_codes;
pub use family::{APPEND_LEAF, APPEND_QUERIES, DECODE_LANES, DECODE_LEAF, Family, LATENT_LANES, LATENT_LEAF};
#[cfg(feature = "cuda")]
pub(crate) use family::{
    LATENT_FEW_HEADS, LATENT_TREE_HEADS, LATENT_TREE_LEAF, latents_by_tasks, latents_in_tensors,
};
#[cfg(feature = "cuda")]
pub(crate) use family::{in_codes, in_halves};
pub use geometry::{Geometry, MAX_HEAD_DIM};
#[cfg(any(feature = "paged", feature = "mla"))]
pub(crate) use renew::renew;
#[cfg(any(feature = "paged", feature = "mla"))]
pub(crate) use schedule::PROCESSORS;
pub(crate) use schedule::Scratch;
#[cfg(feature = "paged")]
pub(crate) use schedule::most_heads;
#[cfg(feature = "dense")]
pub(crate) use schedule::padding;
#[cfg(any(feature = "paged", feature = "mla"))]
pub(crate) use schedule::visible;
pub use schedule::{ScheduleOptions, Target, schedule};
#[cfg(feature = "mla")]
pub(crate) use schedule::{is_for, schedule_as};
#[cfg(any(feature = "dense", feature = "flex"))]
pub(crate) use table::indptr as check_indptr;
pub use table::{MAX_POSITION, Mask, MaskEntries, PageTable};
pub use variant::Variant;
