//! Latent attention on the CPU: every head of a query against the same latents, each read once.
//!
//! A latent serves all query vectors (*lanes*: a token's heads, and a few tokens' where there are few heads) and serves
//! twice, as the key and, its first `C` lanes, as the value. So scores are a matrix product of a tile of latents with
//! all lanes, transposed: `[keys, lanes]`, sixteen lanes a register. A softmax over keys then runs down registers
//! with no sum across lanes, and the weights come out as the value product wants them.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `item` | items of work lists: leaves of a row's own keys |
//! | `sparse` | rows over picked latents, by the order of their positions |
//! | `engine` | one tile: scores, softmax, weighted values, for whatever latents the caller points at |
//! | `body` | the primitives of a tile, as each instruction set implements them |

#[cfg(target_arch = "x86_64")]
mod avx512;
mod body;
mod engine;
mod generic;
mod item;
#[cfg(feature = "dsa")]
mod sparse;

pub(crate) use item::{run, scratch_bytes};
#[cfg(feature = "dsa")]
pub(crate) use sparse::{Picks, run as picks_run, workspace_bytes as picks_workspace_bytes};
