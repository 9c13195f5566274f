//! The indexer of DeepSeek sparse attention: which keys a query will attend (DeepSeek-V3.2-Exp technical report).
//!
//! With `Hi` index heads of width `Di`, index queries `q` `[T, Hi, Di]`, head weights `w` `[T, Hi]` (scale factors folded
//! in) and one index key a token,
//!
//! ```text
//! I[t, j]  = sum_h w[t, h] * relu(q[t, h] . k[j])     in f32, j <= position of t
//! pick[t]  = the topk positions of largest I[t, .]    of equal scores the earlier; ascending; -1 padded
//! ```
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`KeyFormat`], [`quantise_keys`] | how index keys are stored, fp8 with a scale a key among them |
//! | [`scores`] | `I`, for those who want to see it |
//! | [`topk`], [`select_topk_causal`] | the pick of given scores: in linear time, and by a plain stable sort |
//! | [`select`], [`index_topk`] | both at once: keys in pages, or one request's keys in one tensor |
//! | [`sparse_attend`] | attention over the pick |
//! | [`DeviceTable`], [`select_at`], [`scores_at`], [`sparse_attend_at`], [`store_keys_at`] | the same where a stream is |
//!
//! # What is picked
//!
//! Exactly `min(topk, visible keys whose score is not NaN)` positions a row. NaN, whatever it came from, is never picked;
//! `-inf` is a score like any other; 0 and -0 are equal. Positions are integers throughout.
//!
//! # Equal keys have equal scores
//!
//! A score's bits follow from the row's query and weights, the key's bytes and the instruction set alone: products are
//! summed over `Di` in order (in pairs where bf16 dot products are used), then over heads in order, each key in a
//! lane of its own. Neither the key's position, page or neighbours nor threads or the batch show. bf16 keys under bf16
//! queries count subnormals as 0 where the machine has bf16 dot products.

pub(crate) mod attend;
mod device;
mod keys;
mod scores;
mod select;
mod table;
mod topk;

pub(crate) use crate::fp8::float;
pub use crate::fp8::{e4m3_to_f32, f32_to_e4m3};
pub use attend::{
    SparseParams, prepare_sparse, sparse_attend, sparse_attend_at, sparse_workspace_bytes,
    sparse_workspace_bytes_on,
};
pub use device::DeviceTable;
#[cfg(feature = "cuda")]
pub(crate) use device::FEW_QUERIES;
pub use keys::{KeyFormat, dequantise_key, quantise_keys, store_keys_at};
pub use scores::{ScoresParams, scores, scores_at, scores_workspace_bytes};
pub use select::{
    SelectParams, index_topk, prepare_select, select, select_at, select_workspace_bytes,
    select_workspace_bytes_on,
};
pub use table::Table;
pub use topk::{TopkParams, prepare_topk, select_topk_causal, topk, topk_at, topk_workspace_bytes_on};

#[cfg(test)]
mod tests;
