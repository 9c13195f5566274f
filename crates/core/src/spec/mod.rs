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
//!
//! # Abuses considered
//!
//! A spec is text from anywhere. What was tried against the reader, and what becomes of it:
//!
//! | abuse | what becomes of it |
//! | --- | --- |
//! | a file without end (`/dev/zero`, a pipe), or a huge one | no more than 1 MiB + 1 byte is read; refused |
//! | a directory, a missing file, an empty one, bytes that are not UTF-8 | one line each, with line and column where there is one |
//! | aliases that multiply (a billion laughs), or repeat one long text | a copy is paid for before it is made: 10,000 values, 2 MiB of text |
//! | an alias inside its own value | refused; the tree has no cycles |
//! | nesting to exhaust the stack, in brackets, by indent or through aliases | 16 levels, however they are reached |
//! | keys that shadow: given twice, merged (`<<`), tagged, other than words | refused; nothing is merged, no tag is read |
//! | two documents, of which a reader may take either | refused |
//! | a key that does nothing: misspelt, in the wrong section, with hyphens, or without effect under the choices made | refused, with the key that was meant |
//! | values that one reader takes as numbers and another as text: `1e9`, `0x10`, `1_000`, `"16"`, `yes`, `.nan` | refused, with how to write them |
//! | numbers whose product overflows, or asks for memory no machine has | each has a range; products are made in 128 bits and refused |
//! | control characters, colour codes and bidirectional overrides in keys and values | escaped in messages, which stay on one line |
//! | keys and values of a megabyte | a key has at most 64 bytes; a message quotes at most 60 characters |
//! | names that reach outside: a resource called `../x`, a label called `main` | letters, digits, `_` and `-`; reserved labels are refused |
//! | resources that wait for one another | the cycle is named |
//! | a thousand faults in one file | the first ten, and how many more |
//!
//! Each line is a test in `tests` or beside the reader it is about; `tests/fuzz.rs` holds that bytes and mutations never
//! panic and that a refusal is always lines that name the file.

mod cross;
mod fault;
mod fields;
pub mod keys;
pub mod model;
mod node;
#[cfg(feature = "yaml")]
mod overrides;
pub mod resources;
mod ring;
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
pub use resources::{AttentionSpec, DsaSpec, KvSpec, ResourceKind, ResourceSpec};
pub use ring::RingSpec;
pub use settled::{DeviceChoice, Fallback, GraphSpec, KernelFamily, Schedule, Spec};
pub use workload::WorkloadSpec;

#[cfg(all(test, feature = "yaml"))]
mod tests;
