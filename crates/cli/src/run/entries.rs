//! How one token lies in a cache, as the program generates it and as the oracle rebuilds it.

use mstar_core::kv::KvLayout;

/// A token's entries in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entries {
    /// A key and a value for each head.
    Heads {
        /// `G`.
        num_kv_heads: usize,
        /// `D`, of keys and of values.
        head_dim: usize,
    },
    /// One latent for all heads, `[ckv | kpe]`, whose first `C` lanes are the value.
    Latents {
        /// `C`.
        kv_lora_rank: usize,
        /// `E`; may be 0.
        qk_rope_head_dim: usize,
    },
}

impl Entries {
    /// The entries of a cache's layout; `None` for a layout that the program does not drive.
    pub(crate) fn of(layout: KvLayout) -> Option<Entries> {
        match layout {
            KvLayout::Nhd { num_kv_heads, head_dim } => Some(Entries::Heads { num_kv_heads, head_dim }),
            KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } => {
                Some(Entries::Latents { kv_lora_rank, qk_rope_head_dim })
            }
            _ => None,
        }
    }

    /// Lanes of one query head: `D`, or `C + E` of an absorbed query, `[q_nope | q_pe]`.
    pub(crate) fn query_width(self) -> usize {
        match self {
            Entries::Heads { head_dim, .. } => head_dim,
            Entries::Latents { kv_lora_rank, qk_rope_head_dim } => kv_lora_rank + qk_rope_head_dim,
        }
    }

    /// Lanes of one head's output: `D`, or `C`.
    pub(crate) fn out_width(self) -> usize {
        match self {
            Entries::Heads { head_dim, .. } => head_dim,
            Entries::Latents { kv_lora_rank, .. } => kv_lora_rank,
        }
    }

    /// Elements of one token's entries.
    pub(crate) fn token_width(self) -> usize {
        match self {
            Entries::Heads { num_kv_heads, head_dim } => 2 * num_kv_heads * head_dim,
            Entries::Latents { kv_lora_rank, qk_rope_head_dim } => kv_lora_rank + qk_rope_head_dim,
        }
    }
}
