//! The value tree with key paths, and the checked spec.
//!
//! A spec is read in two passes. What was written is a [`Node`] tree, where every value knows its key path, line and
//! column; what it means is a [`Spec`], checked once, which everything later takes and never checks again. A backend's
//! options are left as a [`Node`] until the backend is known, and read with the same [`Fields`].
//!
//! | file | what is in it |
//! | --- | --- |
//! | `node` | the value tree |
//! | `yaml`, `overrides` | YAML text and `--set key=value` into the tree (feature `yaml`) |
//! | `fields`, `scalar` | a map read key by key, every fault gathered |
//! | [`keys`] | every key of every section, and the nearest name for one that is not there |
//! | [`model`], [`resources`], [`workload`], `settled` | the sections as types |
//! | `cross` | checks between sections |
//! | `fault` | what a refusal says |

mod cross;
mod fault;
mod fields;
pub mod keys;
pub mod model;
mod node;
#[cfg(feature = "yaml")]
mod overrides;
pub mod resources;
mod scalar;
mod settled;
pub mod workload;
#[cfg(feature = "yaml")]
pub mod yaml;

pub use fault::{Faults, SpecError, SpecErrors};
pub use fields::Fields;
pub use keys::Section;
pub use model::{ModelSpec, RankHeads};
pub use node::{Entry, Node, Place, Scalar, Value};
#[cfg(feature = "yaml")]
pub use overrides::set;
pub use resources::{AttentionSpec, DsaSpec, KvSpec, ResourceKind, ResourceSpec, RingSpec};
pub use settled::{DeviceChoice, Fallback, GraphSpec, KernelFamily, Schedule, Spec};
pub use workload::WorkloadSpec;

#[cfg(all(test, feature = "yaml"))]
mod tests;
