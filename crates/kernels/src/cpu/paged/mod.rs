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
mod decode;
mod exec;
mod finish;
mod state;
pub(crate) mod tile;
mod tile_item;

pub(crate) use call::{Call, Out};
pub(crate) use decode::TILE;
pub(crate) use exec::{run, workspace_bytes};
pub(crate) use state::state_len;
