//! Dense varlen attention's safe entry: packed rows over `[prefix | fresh]`, two segments that are never joined.
//!
//! A row's keys are those of a frozen prefix, packed or straight from pages, and its own fresh ones; absolute positions
//! run on from one to the other. A batch is checked and cut once ([`schedule`]), then every layer attends with the same
//! list ([`attend`]). Where a key lies changes no bit: a prefix in pages, a packed one, and one segment that holds
//! both give the same result.

mod attend;
mod geometry;
mod schedule;
mod table;

pub use attend::{AttendParams, attend, workspace_bytes};
pub use geometry::{Geometry, Variant};
pub use schedule::{is_for, schedule};
pub use table::{Prefix, Table};

#[cfg(test)]
mod tests;
