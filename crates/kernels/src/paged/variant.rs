//! What is done to a score between the dot product and the softmax.

use crate::{Error, Result};

/// The arithmetic of one attention layer's scores, fixed when a plan is made.
///
/// In order: `s = sm_scale * (q . k)`; with a soft cap `c`, `s = c * tanh(s / c)` (Gemma 2, arXiv 2408.00118);
/// with ALiBi, `s += slope[h] * (key_pos - query_pos)` (arXiv 2108.12409; after the cap, in FlashAttention's
/// order); then the mask: the row's own keys, `causal`, `window_left`, a custom mask. A sink (gpt-oss, arXiv
/// 2508.10925) adds `exp(sink[h])` to the softmax's denominator and nothing to its numerator; it is neither
/// scaled nor capped, and the log-sum-exp includes it. A query that sees no key yields 0 and `-inf`, sink or not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Variant {
    /// Factor of the dot product; finite.
    pub sm_scale: f32,
    /// Whether a query sees no key after its own position. Query `i` of a row is at `kv_len - q_len + i`.
    pub causal: bool,
    /// A query at position `p` sees no key before `p - window_left`: with `causal`, `window_left + 1` keys
    /// at most, its own included. `None` is no window. Holds without `causal` too.
    pub window_left: Option<usize>,
    /// Soft cap of the scores; finite and above 0.
    pub logits_soft_cap: Option<f32>,
    /// Whether `alibi_slopes` are given when it runs.
    pub alibi: bool,
    /// Whether `sinks` are given when it runs.
    pub sinks: bool,
}

impl Variant {
    /// Causal attention scaled by `1 / sqrt(head_dim_qk)` and nothing else.
    pub fn causal(head_dim_qk: usize) -> Variant {
        Variant {
            sm_scale: 1.0 / (head_dim_qk as f32).sqrt(),
            causal: true,
            window_left: None,
            logits_soft_cap: None,
            alibi: false,
            sinks: false,
        }
    }

    /// As [`Variant::causal`], but every query sees every key of its row.
    pub fn full(head_dim_qk: usize) -> Variant {
        Variant { causal: false, ..Variant::causal(head_dim_qk) }
    }

    /// Refuses what has no meaning.
    ///
    /// # Errors
    /// [`Error::Parameter`] for a scale that is not finite, or a cap that is not finite and above 0.
    pub fn check(&self) -> Result<()> {
        if !self.sm_scale.is_finite() {
            let (why, got) = ("must be finite".into(), self.sm_scale.to_string());
            return Err(Error::Parameter { name: "sm_scale", why, got });
        }
        match self.logits_soft_cap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                let why = "must be finite and above 0; leave it out for no cap".into();
                Err(Error::Parameter { name: "logits_soft_cap", why, got: cap.to_string() })
            }
            _ => Ok(()),
        }
    }
}
