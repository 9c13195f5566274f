//! Paged attention on the CPU: an executor of work lists over two kernel families.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `exec` | threads over items and merges |
//! | `decode` | few query vectors a key head: stream the keys once |
//! | `tile` | prefill and append: a tile of queries against the keys of its row |
//! | `tile_item` | items of that family |
//! | `state` | unfinished softmax states, and the fixed tree that joins them |
//! | `finish` | the root: sink, division, rounding |

mod call;
#[cfg(feature = "paged")]
mod decode;
mod exec;
mod finish;
mod state;
#[cfg(feature = "paged")]
pub(crate) mod tile;
#[cfg(feature = "paged")]
mod tile_item;

pub(crate) use call::{Call, Out};
#[cfg(feature = "paged")]
pub(crate) use decode::TILE;
pub(crate) use exec::{run, workspace_bytes};
#[cfg(feature = "dsa")]
pub(crate) use finish::{root, write_row};
pub(crate) use state::state_len;
#[cfg(feature = "mla")]
pub(crate) use state::{LINE, State, Tree, acc_stride};
