//! The bottom of mstar: tensors as views, devices, streams, and the kernels that attend.
//!
//! Everything here works on borrowed memory that a caller describes with a [`TensorRef`] or a
//! [`TensorMut`]; nothing here knows a request, a page's owner or a YAML file. A kernel is one safe
//! function over a parameter struct of views: it checks shapes, dtypes and devices once and then runs.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`view`], [`dtype`] | pointer, device, dtype, shape and element strides in one value |
//! | [`buffer`] | owned, aligned, counted memory |
//! | [`staged`](mod@staged) | bytes that the host writes over and over, and a device reads at one address |
//! | [`device`], [`stream`] | where memory lives, and the caller's queue of work |
//! | [`copy`](mod@copy) | whole tensors between the host and devices |
//! | [`reference`](mod@reference) | the oracle: every operation in plain f64 loops over raw arrays |
//! | [`cpu`] | the fast CPU kernels, behind one run-time probe of the instruction set |
//! | [`cuda`], [`cards`] | the CUDA driver, asked what is there; refuses plainly in a build without it |
//! | `paged` | paged attention's safe entry: geometry, variant, tables, schedule, the call |
//! | [`plan`] | a batch checked once and cut into a work list, made again in place; workspaces |
//! | `mla` | absorbed latent attention's safe entry, over the same tables and work lists |
//! | `dense` | dense varlen attention's safe entry: rows over `[prefix \| fresh]` |
//! | `flex` | block-mask attention's safe entry: blocks, score mods and mask mods |
//! | `dsa` | sparse attention: index keys, scores and picks, attention over the pick |
//! | `work` | the flat work list that CPU and CUDA executors share |
//! | [`fp8`] | e4m3 codes under scales, and the scatter that quantises |
//! | [`lse`] | merging partial attention results |
//! | [`synth`] | the synthetic Q, K and V that any row can be rebuilt from |

pub mod buffer;
pub mod cards;
pub mod copy;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "cuda_off.rs"]
pub mod cuda;
#[cfg(feature = "dense")]
pub mod dense;
pub mod device;
#[cfg(feature = "lists")]
mod dispatch;
#[cfg(feature = "dsa")]
pub mod dsa;
pub mod dtype;
pub mod error;
#[cfg(feature = "flex")]
pub mod flex;
pub mod fp8;
pub mod kernels;
pub mod lse;
#[cfg(feature = "mla")]
pub mod mla;
pub mod mutant;
#[cfg(feature = "lists")]
pub mod paged;
pub mod plan;
pub mod reference;
pub mod staged;
pub mod stream;
pub mod synth;
#[cfg(test)]
mod testing;
pub mod view;
#[cfg(feature = "lists")]
pub mod work;

pub use buffer::Buffer;
pub use copy::{copy, copy_async, fill};
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use kernels::Kernels;
pub use staged::Staged;
pub use stream::Stream;
pub use view::{Dims, TensorMut, TensorRef};
