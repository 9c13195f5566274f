//! Block-mask attention with score mods, over a ring cache.
//!
//! Which keys a query sees is given by blocks rather than by a length (FlexAttention, arXiv:2412.05496): a `BlockMask` over
//! tiles of 128 queries by 128 keys names, for each row of tiles, those that are *full* (every pair is seen) and those
//! that are *partial* (a mask mod decides pair by pair); all others are never loaded. With a score mod `f` and a mask
//! mod `m`:
//!
//! ```text
//! s[b, h, i, j] = f(scale * q[b, h, i] . k[b, g(h), j], b, h, i, j)     where m(b, h, i, j), else -inf
//! o[b, h, i]    = sum_j softmax_j(s[b, h, i, j]) * v[b, g(h), j]
//! ```
//!
//! A ring overwrites itself frame by frame, so what a step may read is a set of frames and no prefix. Since frames are
//! multiples of 128 tokens, "a token of the block is written" and "all of them are" coincide, the mask is the same for
//! every query, and no block is partial. Leaves of the sum are counted by *visible* block, so attending a ring is
//! bit-identical to attending its visible keys laid side by side.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `mask` | [`BlockMask`]: its constructors, its edits in place |
//! | `plan`, `run` | [`Plan`]: a mask cut into work once; [`run`]: one layer of it; [`run_in`]: in a foreign workspace |
//! | `call` | [`flex_attention_masked`]: the whole operation in one call |
//! | `manager` | [`FlexAttention`]: attention over a ring of frames, as a resource of a spec |

#![forbid(unsafe_code)]

mod call;
mod manager;
mod mask;
mod options;
mod plan;
mod run;

pub use call::{FlexArgs, flex_attention_masked};
pub use manager::{FlexAttention, FlexFactory, FlexOptions, MaskChoice, ScoreChoice, workspace_bound};
pub use mask::{
    BLOCK, BlockMask, Edited, KvBlocks, MOST_RULES, MaskMods, MaskRule, MaskShape, Rules, make_block_mask,
};
pub use mstar_kernels::flex::{CudaSnippet, Geometry, MaskFn, ScoreFn, ScoreMod, TileRow, UserMask, UserMod};
pub use mstar_kernels::plan::{Planned, Workspace};
pub use mstar_kernels::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};
pub use options::{AuxOutput, AuxRequest, KernelOptions};
pub use plan::Plan;
pub use run::{Inputs, Outputs, run, run_in};
