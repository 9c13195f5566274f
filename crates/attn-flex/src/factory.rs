//! The options a spec may give this backend, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::{Device, Error};

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

impl BackendOptions for FlexOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        let unsupported = Error::Unsupported { operation: "flex", device: cx.device, why: WHY.into() };
        Err(mstar_core::Error::backend(cx.name.as_str(), unsupported))
    }
}

/// The backend `flex`.
#[derive(Clone, Copy, Debug, Default)]
pub struct FlexFactory;

impl BackendFactory for FlexFactory {
    fn name(&self) -> &'static str {
        "flex"
    }

    fn about(&self) -> &'static str {
        "block masks and score mods over a ring cache"
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        FlexOptions::read(options, faults).map(|options| Box::new(options) as Box<dyn BackendOptions>)
    }

    fn supports(&self, _: Device, _: &AttnGeometry) -> Result<Rank, Reason> {
        Err(WHY.into())
    }
}

#[cfg(test)]
mod tests {
    use mstar_core::attend::Softmax;
    use mstar_core::kv::KvLayout;
    use mstar_core::spec::{Entry, Place, Scalar, Value};
    use mstar_kernels::DType;

    use super::*;

    fn node(pairs: &[(&str, &str)]) -> Node {
        let scalar = |text: &str| {
            Node::new(Place::default(), Value::Scalar(Scalar { text: text.into(), quoted: false }))
        };
        let entries = pairs
            .iter()
            .map(|(key, text)| Entry { key: (*key).into(), place: Place::default(), value: scalar(text) })
            .collect();
        Node::new(Place::default(), Value::Map(entries)).rooted("resources.attn")
    }

    fn read(pairs: &[(&str, &str)]) -> Result<FlexOptions, String> {
        let faults = Faults::new();
        let options = FlexOptions::read(&node(pairs), &faults);
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

    #[test]
    fn every_geometry_is_refused_with_the_reason() {
        let geometry = AttnGeometry {
            num_qo_heads: 16,
            layout: KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 },
            page_size: 64,
            dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
            num_layers: 1,
            softmax: Softmax::scaled(1.0),
        };
        let reason = FlexFactory.supports(Device::Cpu, &geometry).unwrap_err();
        assert!(reason.0.contains("not built"), "{reason}");
    }
}
