//! Index scores and their pick on the CPU.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `exec` | blocks of rows: queries packed, keys scored chunk by chunk, then each row's pick |
//! | `pack` | queries and keys as the multiplication reads them |
//! | `body` | the multiplication: relu and head weights applied while products are in registers |
//! | `pick` | the largest of a row in linear time |

mod body;
mod exec;
mod pack;
mod pick;

pub(crate) use exec::{Call, Sink, run, workspace_bytes};
pub(crate) use pick::pick;
