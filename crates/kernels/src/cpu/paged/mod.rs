//! Paged attention on the CPU: an executor of work lists over two kernel families.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `exec` | threads over items and merges |
//! | `decode` | few query vectors a key head: stream the keys once |
//! | `tile` | prefill and append: a tile of queries against the keys of its row |
//! | `tile_item` | items of that family |
//! | `source` | where such an item finds its queries and keys: pages, segments, blocks |
//! | `state` | unfinished softmax states, and the fixed tree that joins them |
//! | `finish` | the root: sink, division, rounding |

mod call;
#[cfg(feature = "paged")]
mod decode;
mod exec;
mod finish;
#[cfg(feature = "tiles")]
mod source;
mod state;
#[cfg(feature = "tiles")]
pub(crate) mod tile;
#[cfg(feature = "tiles")]
mod tile_item;

#[cfg(feature = "flex")]
pub(crate) use call::Planes;
pub(crate) use call::{Call, Extra, Out};
#[cfg(feature = "paged")]
pub(crate) use decode::TILE;
pub(crate) use exec::{run, workspace_bytes};
#[cfg(feature = "dsa")]
pub(crate) use finish::{root, write_row};
#[cfg(feature = "mla")]
pub(crate) use state::{LINE, State, Tree, acc_stride};
pub(crate) use state::{LINE as STATE_LINE, state_len};
#[cfg(feature = "flex")]
pub(crate) use tile::Mods;
