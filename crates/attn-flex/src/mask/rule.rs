//! What decides about the keys of a block that is seen in part.

use std::sync::Arc;

use mstar_kernels::flex::{MaskMod, TileRow, UserMask};

/// Which keys of a partial block a query at position `p = q_idx + q_offset` sees. Full blocks are not asked about.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum MaskRule {
    /// All: a mask of this rule has no partial blocks.
    #[default]
    Whole,
    /// Keys `k <= p`.
    Causal,
    /// Keys `p - left <= k <= p + right`.
    SlidingWindow {
        /// Keys before its own position that a query sees.
        left: usize,
        /// Keys after it.
        right: usize,
    },
    /// Keys of the query's own document.
    Document {
        /// `[L]`: each query's.
        q_ids: Arc<[i32]>,
        /// `[M]`: each key's.
        kv_ids: Arc<[i32]>,
    },
    /// The caller's own.
    User(UserMask),
}

impl MaskRule {
    /// As kernels take it.
    pub(crate) fn mask_mod(&self) -> Option<MaskMod<'_>> {
        Some(match self {
            MaskRule::Whole => return None,
            MaskRule::Causal => MaskMod::Causal,
            MaskRule::SlidingWindow { left, right } => MaskMod::SlidingWindow { left: *left, right: *right },
            MaskRule::Document { q_ids, kv_ids } => MaskMod::Document { q_ids, kv_ids },
            MaskRule::User(user) => MaskMod::User(user),
        })
    }

    /// Whether the query `q_idx` sees the key `k_idx`. A user's rule without a CPU half sees nothing: no run takes it.
    pub(crate) fn sees(&self, batch: usize, head: usize, q_idx: usize, q_offset: i64, k_idx: usize) -> bool {
        let (p, k) = (q_idx as i128 + i128::from(q_offset), k_idx as i128);
        match self {
            MaskRule::Whole => true,
            MaskRule::Causal => k <= p,
            MaskRule::SlidingWindow { left, right } => k >= p - *left as i128 && k <= p + *right as i128,
            MaskRule::Document { q_ids, kv_ids } => q_ids.get(q_idx) == kv_ids.get(k_idx),
            MaskRule::User(user) => {
                let mut seen = [true];
                let row = TileRow { batch, head, q_idx, q_offset, k_idx: &[k_idx as i32] };
                user.cpu.as_ref().is_some_and(|cpu| {
                    cpu(&mut seen, &row);
                    seen[0]
                })
            }
        }
    }
}
