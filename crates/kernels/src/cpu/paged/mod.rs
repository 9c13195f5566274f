//! Paged attention on processors.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `tile` | prefill and append: a tile of queries against the keys of its row |

#[allow(dead_code)] // The executor that calls it comes next.
pub(crate) mod tile;
