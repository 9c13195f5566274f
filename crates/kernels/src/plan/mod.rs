//! Plans: a batch checked once and cut into work, whatever a slot of its pages holds.
//!
//! A `Plan` owns a work list and what it was made of; what kind of pages it attends is its type (`Kernel`). It knows no
//! request and no step: those that do keep plans, and a [`Workspace`] for each.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `list` | `Plan`, its cache key, and the trait of its kinds |
//! | `options` | [`PlanOptions`], [`Capacity`], what making a plan again did |
//! | `heads`, `latents` | the kinds: over keys and values a head, over latents |
//! | `workspace` | [`Workspace`]: scratch sized by the plan's need |
//! | `hidden` | `select_last_hidden`: each row's last query token |

#[cfg(feature = "paged")]
mod heads;
#[cfg(any(feature = "paged", feature = "mla"))]
mod hidden;
#[cfg(feature = "mla")]
mod latents;
#[cfg(any(feature = "paged", feature = "mla"))]
mod list;
mod options;
mod workspace;

#[cfg(feature = "paged")]
pub use heads::Heads;
#[cfg(any(feature = "paged", feature = "mla"))]
pub use hidden::select_last_hidden;
#[cfg(feature = "mla")]
pub use latents::Latents;
#[cfg(any(feature = "paged", feature = "mla"))]
pub use list::{Kernel, Plan, PlanCacheKey};
pub use options::{Capacity, PlanOptions, Planned, Schedule};
pub use workspace::Workspace;
