//! The fast CPU kernels, behind one run-time probe of the instruction set.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`address`] | where a token lies in a paged cache |
//! | [`isa`] | which instructions this machine has, and which the kernels shall use |
//! | `paged` | paged attention, and the executor of work lists |
//! | `mla` | latent attention, dense and over picked latents |
//! | `dsa` | index scores, and the pick of a row in linear time |
//! | `e4m3` | e4m3 codes widened under a scale |
//! | `arena`, `workers` | scratch cut from a workspace; numbered work shared among threads |
//! | [`peak`] | how fast a thread multiplies and adds |
//! | `merge` | partial results joined, for [`lse`](crate::lse) |
//! | `round` | to bf16, in operations that vectorise |
//! | [`scatter`], [`gather`], [`copy`] | appending to pages, reading them back, copying them |

pub mod address;
#[cfg(feature = "lists")]
pub(crate) mod arena;
pub mod copy;
#[cfg(feature = "dsa")]
pub(crate) mod dsa;
#[cfg(feature = "lists")]
pub(crate) mod e4m3;
pub mod gather;
pub mod isa;
pub(crate) mod merge;
#[cfg(feature = "mla")]
pub(crate) mod mla;
#[cfg(feature = "lists")]
pub(crate) mod paged;
pub mod peak;
pub(crate) mod round;
pub mod scatter;
pub(crate) mod tokens;
#[cfg(feature = "lists")]
pub(crate) mod workers;

pub use isa::Isa;

/// Asks which instructions the machine has and how many threads the caller's pool: the first such question of a process
/// reads the environment and starts threads. Plans ask it, so that no run allocates.
pub fn probe() {
    let _asked = (Isa::current(), rayon::current_num_threads());
}
