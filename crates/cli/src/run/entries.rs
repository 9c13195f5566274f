//! How one token lies in a cache, as the program generates it and as the oracle rebuilds it.

use mstar_core::kv::{KvLayout, RingConfig};

/// A token's entries in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entries {
    /// A key and a value for each head.
    Heads {
        /// `G`.
        num_kv_heads: usize,
        /// `D`.
        head_dim: usize,
        /// `Dv`; in pages always `D`.
        head_dim_vo: usize,
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
            KvLayout::Nhd { num_kv_heads, head_dim } => {
                Some(Entries::Heads { num_kv_heads, head_dim, head_dim_vo: head_dim })
            }
            KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } => {
                Some(Entries::Latents { kv_lora_rank, qk_rope_head_dim })
            }
            _ => None,
        }
    }

    /// The entries of a ring's frames.
    pub(crate) fn of_ring(ring: &RingConfig) -> Entries {
        let RingConfig { num_kv_heads, head_dim, head_dim_vo, .. } = *ring;
        Entries::Heads { num_kv_heads, head_dim, head_dim_vo }
    }

    /// Lanes of one query head: `D`, or `C + E` of an absorbed query, `[q_nope | q_pe]`.
    pub(crate) fn query_width(self) -> usize {
        match self {
            Entries::Heads { head_dim, .. } => head_dim,
            Entries::Latents { kv_lora_rank, qk_rope_head_dim } => kv_lora_rank + qk_rope_head_dim,
        }
    }

    /// Lanes of one head's output: `Dv`, or `C`.
    pub(crate) fn out_width(self) -> usize {
        match self {
            Entries::Heads { head_dim_vo, .. } => head_dim_vo,
            Entries::Latents { kv_lora_rank, .. } => kv_lora_rank,
        }
    }

    /// Elements of one token's entries.
    pub(crate) fn token_width(self) -> usize {
        match self {
            Entries::Heads { num_kv_heads, head_dim, head_dim_vo } => num_kv_heads * (head_dim + head_dim_vo),
            Entries::Latents { kv_lora_rank, qk_rope_head_dim } => kv_lora_rank + qk_rope_head_dim,
        }
    }
}
