//! The options a spec may give this backend, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::kv::KvLayout;
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::Device;

use super::FlexAttention;
use crate::KernelOptions;

static OPTIONS: Section = Section { name: "the flex backend", keys: &["score_mod", "mask_mod", "workers"] };

/// What a spec may ask of this backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlexOptions {
    /// `score_mod`: what becomes of each score.
    pub score_mod: ScoreChoice,
    /// `mask_mod`: which pairs are seen, beside the ring's own visibility.
    pub mask_mod: MaskChoice,
    /// `workers`.
    pub kernel_options: KernelOptions,
}

/// What becomes of a score.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScoreChoice {
    /// `none`: nothing.
    #[default]
    None,
    /// `alibi`: the model's slope a head times the distance of the frames' tokens is added.
    Alibi,
    /// `soft_cap`: `cap * tanh(s / cap)`, with the model's `logits_soft_cap`.
    SoftCap,
}

/// Which pairs of query and key are seen. Positions are those of the tokens in their world: frame after frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaskChoice {
    /// `none`: all that the ring shows.
    #[default]
    None,
    /// `causal`: of those, keys up to the query's own position.
    Causal,
    /// `window`: of those, the model's `window_left` last and the query's own.
    Window,
}

impl FlexOptions {
    fn read(node: &Node, faults: &Faults) -> FlexOptions {
        let mut f = Fields::open(node, &OPTIONS, faults);
        let scores =
            [("none", ScoreChoice::None), ("alibi", ScoreChoice::Alibi), ("soft_cap", ScoreChoice::SoftCap)];
        let masks =
            [("none", MaskChoice::None), ("causal", MaskChoice::Causal), ("window", MaskChoice::Window)];
        let score_mod = f.word_or("score_mod", ScoreChoice::None, &scores);
        let mask_mod = f.word_or("mask_mod", MaskChoice::None, &masks);
        let workers = f.count_or("workers", 0, 0..=1024);
        f.finish("here");
        FlexOptions { score_mod, mask_mod, kernel_options: KernelOptions { workers } }
    }
}

impl BackendOptions for FlexOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        Ok(Arc::new(FlexAttention::new(cx, *self)?))
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

    /// It attends rings, which a geometry does not tell from pages: it is named, never chosen.
    fn auto(&self) -> bool {
        false
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        Some(Box::new(FlexOptions::read(options, faults)))
    }

    fn supports(&self, device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason> {
        if device != Device::Cpu {
            return Err(format!("has no kernels for {device} yet; say device: cpu").into());
        }
        let KvLayout::Nhd { head_dim, .. } = geometry.layout else {
            return Err("reads keys and values a head, not latents".into());
        };
        if geometry.softmax.sinks.is_some() {
            return Err("has no sinks; leave them out".into());
        }
        for dtype in [geometry.dtype, geometry.kv_dtype] {
            if !dtype.is_float() {
                return Err(format!("attends f32, bf16 and f16, not {dtype}").into());
            }
        }
        match head_dim {
            0 | 513.. => Err(format!("heads are 1 to 512 wide, not {head_dim}").into()),
            _ if head_dim >= 32 && head_dim.is_multiple_of(16) => Ok(Rank::FAST),
            _ => Ok(Rank::PORTABLE),
        }
    }
}

#[cfg(test)]
mod tests {
    use mstar_core::attend::Softmax;
    use mstar_core::kv::KvConfig;

    use super::*;
    use crate::DType;

    fn read(pairs: &[(&str, &str)]) -> Result<FlexOptions, String> {
        let faults = Faults::new();
        let options = FlexOptions::read(&Node::flat("resources.attn", pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options)
    }

    #[test]
    fn f36_options_are_typed_and_unknown_keys_refused() {
        assert_eq!(read(&[]), Ok(FlexOptions::default()));
        let other = read(&[("score_mod", "soft_cap"), ("mask_mod", "causal"), ("workers", "2")]).unwrap();
        assert_eq!((other.score_mod, other.mask_mod), (ScoreChoice::SoftCap, MaskChoice::Causal));
        assert_eq!(other.kernel_options.workers, 2);
        assert!(read(&[("score_mood", "none")]).unwrap_err().contains("score_mod"));
        assert!(read(&[("mask_mod", "document")]).is_err());
    }

    #[test]
    fn a_refusal_names_its_reason() {
        let geometry = |layout, softmax| {
            AttnGeometry::over(&KvConfig::new(layout, DType::Bf16, 1, 1), 4, DType::Bf16, softmax)
        };
        let heads = |head_dim| KvLayout::Nhd { num_kv_heads: 2, head_dim };
        let plain = Softmax::scaled(0.1);
        let rank = |device, layout, softmax: &Softmax| {
            FlexFactory.supports(device, &geometry(layout, softmax.clone())).map_err(|reason| reason.0)
        };
        assert_eq!(rank(Device::Cpu, heads(64), &plain), Ok(Rank::FAST));
        assert_eq!(rank(Device::Cpu, heads(7), &plain), Ok(Rank::PORTABLE));
        assert!(rank(Device::Cpu, heads(513), &plain).unwrap_err().contains("513"));
        assert!(rank(Device::Cuda(0), heads(64), &plain).unwrap_err().contains("cuda"));
        let latents = KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 };
        assert!(rank(Device::Cpu, latents, &plain).unwrap_err().contains("not latents"));
        let sinks = Softmax { sinks: Some([0.0; 4].into()), ..plain };
        assert!(rank(Device::Cpu, heads(64), &sinks).unwrap_err().contains("sinks"));
    }
}
