//! The options a spec may give this backend, and the reason why it is not built.

use mstar_core::attend::Unbuilt;
use mstar_core::spec::{Faults, Fields, Node, Section};

/// Why nothing is built.
const WHY: &str = "the block-mask kernels are not built yet, nor is the ring cache";

static OPTIONS: Section =
    Section { name: "the flex backend", keys: &["score_mod", "mask_mod", "block_q", "block_kv"] };

/// What a spec may ask of this backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlexOptions {
    /// `score_mod`: what becomes of each score.
    pub score_mod: ScoreMod,
    /// `mask_mod`: which pairs are seen, beside the ring's own visibility.
    pub mask_mod: MaskMod,
    /// `block_q` and `block_kv`.
    pub kernel_options: KernelOptions,
}

/// What becomes of a score `s(b, h, i, j)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScoreMod {
    /// `none`: nothing.
    None,
    /// `alibi`: a slope per head times the distance is added.
    Alibi,
    /// `soft_cap`: `cap * tanh(s / cap)`, with the model's `logits_soft_cap`.
    SoftCap,
}

/// Which pairs of query and key are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskMod {
    /// `none`: all.
    None,
    /// `causal`: keys up to the query's own position.
    Causal,
    /// `window`: of those, the model's `window_left` last and the query's own.
    Window,
}

/// Tile sizes of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelOptions {
    /// `block_q`: queries a tile.
    pub block_q: usize,
    /// `block_kv`: keys a tile, of which 128, the mask's block, is a multiple.
    pub block_kv: usize,
}

impl FlexOptions {
    fn read(node: &Node, faults: &Faults) -> Option<FlexOptions> {
        let mut f = Fields::open(node, &OPTIONS, faults);
        let scores = [("none", ScoreMod::None), ("alibi", ScoreMod::Alibi), ("soft_cap", ScoreMod::SoftCap)];
        let masks = [("none", MaskMod::None), ("causal", MaskMod::Causal), ("window", MaskMod::Window)];
        let score_mod = f.word_or("score_mod", ScoreMod::None, &scores);
        let mask_mod = f.word_or("mask_mod", MaskMod::None, &masks);
        let block_q = f.count_or("block_q", 128, 1..=1024);
        let block_kv = f.count_or("block_kv", 128, 1..=128);
        if !128usize.is_multiple_of(block_kv) {
            f.fault_at("block_kv", format!("expected a divisor of 128, the mask's block, got {block_kv}"));
        }
        f.finish("here");
        Some(FlexOptions { score_mod, mask_mod, kernel_options: KernelOptions { block_q, block_kv } })
    }
}

/// The backend `flex`, which refuses every geometry: it is not built.
pub const FLEX: Unbuilt<FlexOptions> = Unbuilt {
    name: "flex",
    about: "block masks and score mods over a ring cache",
    aliases: &[],
    auto: true,
    why: WHY,
    read: FlexOptions::read,
};

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<FlexOptions, String> {
        let faults = Faults::new();
        let options = FlexOptions::read(&Node::flat("resources.attn", pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options.expect("no fault was found"))
    }

    #[test]
    fn options_are_typed_and_unknown_keys_refused() {
        let kernel_options = KernelOptions { block_q: 128, block_kv: 128 };
        let default = FlexOptions { score_mod: ScoreMod::None, mask_mod: MaskMod::None, kernel_options };
        assert_eq!(read(&[]), Ok(default));
        let other = read(&[("score_mod", "soft_cap"), ("mask_mod", "causal"), ("block_kv", "64")]).unwrap();
        assert_eq!((other.score_mod, other.mask_mod), (ScoreMod::SoftCap, MaskMod::Causal));
        assert_eq!(other.kernel_options.block_kv, 64);
        assert!(read(&[("block_kv", "96")]).unwrap_err().contains("a divisor of 128"));
        assert!(read(&[("score_mood", "none")]).unwrap_err().contains("score_mod"));
    }
}
