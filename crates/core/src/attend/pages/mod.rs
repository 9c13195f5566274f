//! Attention resources over the pages of a cache: what every backend of them shares.
//!
//! A step's rows come from the plans of a [`PagedKv`](crate::kv::PagedKv) ([`Arrays`]); a backend turns each of them, one for each plan label,
//! into its own kind of plan ([`Planner`]), which [`Plans`] keeps under its label and slot ([`EagerSlotKey`]). A plan whose
//! inputs did not change is kept as it is; one that did is made again in the memory of the one before. A backend that says
//! the rest in [`OverPages`] is a [`Resource`](crate::Resource) and
//! an [`Attention`](crate::Attention).
//!
//! | file | what is in it |
//! | --- | --- |
//! | `rows` | a cache's plan, masks and context-only rows as the arrays that kernels take |
//! | `plans` | typed plan storage |
//! | `workspaces`, `bound` | [`WorkspacePool`], and what the largest step needs of it |
//! | `build` | what is checked when a resource is built |
//! | `over` | the resource |

mod bound;
mod build;
mod over;
mod plans;
mod rows;
mod workspaces;

pub use bound::workspace_bound;
pub use over::OverPages;
pub use plans::{EagerSlotKey, PlanCounts, Planner, Plans, StoredPlan, capacity, key_of};
pub use rows::{Arrays, Pairs, RowTable, declared};
pub use workspaces::WorkspacePool;
