//! The options a spec may give this backend, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::kv::KvLayout;
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::Device;

use super::FlexAttention;
use super::mods::MOST_SCORES;
use crate::{KernelOptions, MOST_RULES};

static OPTIONS: Section = Section {
    name: "the flex backend",
    keys: &["score_mod", "mask_mod", "rel_bias", "document_frames", "workers"],
};

/// Biases that a spec may list.
const MOST_BIASES: usize = 4097;

/// What a spec may ask of this backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FlexOptions {
    /// `score_mod`, a word or a list: what becomes of each score, one after another.
    pub score_mods: Vec<ScoreChoice>,
    /// `mask_mod`, a word or a list: which pairs are seen beside the ring's own visibility; a pair that all let be seen is.
    pub mask_mods: Vec<MaskChoice>,
    /// `rel_bias` `[2 W + 1]`: what [`ScoreChoice::RelBias`] adds, for all heads.
    pub rel_bias: Option<Arc<[f32]>>,
    /// `document_frames`: frames of a document, for [`MaskChoice::Document`].
    pub document_frames: Option<usize>,
    /// `workers`.
    pub kernel_options: KernelOptions,
}

/// What becomes of a score. `d` is the distance from the query to the key in tokens of their world, frame after frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreChoice {
    /// `none`: nothing.
    None,
    /// `causal`: keys with `d > 0` are hidden.
    Causal,
    /// `alibi`: the model's slope a head times `d` is added.
    Alibi,
    /// `rel_bias`: entry `clamp(d, -W, W) + W` of the listed biases is added.
    RelBias,
    /// `soft_cap`: `cap * tanh(s / cap)`, with the model's `logits_soft_cap`.
    SoftCap,
}

/// Which pairs of query and key are seen. Positions are those of the tokens in their world: frame after frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskChoice {
    /// `none`: all that the ring shows.
    None,
    /// `causal`: of those, keys up to the query's own position.
    Causal,
    /// `window`: of those, the model's `window_left` last and the query's own.
    Window,
    /// `document`: of those, the frames of the query's own document: a world's first `document_frames` frames, the next as
    /// many, and so on.
    Document,
}

impl FlexOptions {
    fn read(node: &Node, faults: &Faults) -> FlexOptions {
        let mut f = Fields::open(node, &OPTIONS, faults);
        let scores = [
            ("none", ScoreChoice::None),
            ("causal", ScoreChoice::Causal),
            ("alibi", ScoreChoice::Alibi),
            ("rel_bias", ScoreChoice::RelBias),
            ("soft_cap", ScoreChoice::SoftCap),
        ];
        let masks = [
            ("none", MaskChoice::None),
            ("causal", MaskChoice::Causal),
            ("window", MaskChoice::Window),
            ("document", MaskChoice::Document),
        ];
        let score_mods = f.words("score_mod", MOST_SCORES, &scores);
        let mask_mods = f.words("mask_mod", MOST_RULES, &masks);
        // Asked for when something reads them: else they are refused as keys that would do nothing.
        let rel_bias = if score_mods.contains(&ScoreChoice::RelBias) { biases(&mut f) } else { None };
        let documents = mask_mods.contains(&MaskChoice::Document);
        let document_frames = if documents { f.count("document_frames", 1..=i32::MAX as u64) } else { None };
        let workers = f.count_or("workers", 0, 0..=1024);
        f.finish("with these mods");
        let kernel_options = KernelOptions { workers, ..KernelOptions::default() };
        FlexOptions { score_mods, mask_mods, rel_bias, document_frames, kernel_options }
    }
}

/// `rel_bias`, of an odd number of entries.
fn biases(f: &mut Fields<'_>) -> Option<Arc<[f32]>> {
    let most = f64::from(f32::MAX);
    f.required("rel_bias")?;
    let biases = f.numbers_opt("rel_bias", -most..=most, MOST_BIASES)?;
    if biases.len() % 2 == 0 {
        let why = format!("an odd number of biases, the middle one of distance 0; got {}", biases.len());
        f.fault_at("rel_bias", why);
        return None;
    }
    Some(biases.into_iter().map(|bias| bias as f32).collect())
}

impl BackendOptions for FlexOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        Ok(Arc::new(FlexAttention::new(cx, self.clone())?))
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
        if device != Device::Cpu && !cfg!(feature = "cuda") {
            return Err(format!("was built without kernels for {device}; build with the feature cuda").into());
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
    use mstar_core::spec::{Entry, Place, Scalar, Value};

    use super::*;
    use crate::DType;

    fn read(pairs: &[(&str, &str)]) -> Result<FlexOptions, String> {
        read_node(&Node::flat("resources.attn", pairs))
    }

    fn read_node(node: &Node) -> Result<FlexOptions, String> {
        let faults = Faults::new();
        let options = FlexOptions::read(node, &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options)
    }

    /// Keys of lists.
    fn lists(pairs: &[(&str, &[&str])]) -> Result<FlexOptions, String> {
        let scalar = |text: &&str| Value::Scalar(Scalar { text: (*text).into(), quoted: false });
        let list =
            |items: &[&str]| items.iter().map(|item| Node::new(Place::default(), scalar(item))).collect();
        let entry = |(key, items): &(&str, &[&str])| Entry {
            key: (*key).into(),
            place: Place::default(),
            value: Node::new(Place::default(), Value::List(list(items))),
        };
        let map = Value::Map(pairs.iter().map(entry).collect());
        read_node(&Node::new(Place::default(), map).rooted("resources.attn"))
    }

    #[test]
    fn mods_are_composed_in_the_order_of_their_list() {
        let both =
            lists(&[("score_mod", &["alibi", "soft_cap"]), ("mask_mod", &["window", "causal"])]).unwrap();
        assert_eq!(both.score_mods, [ScoreChoice::Alibi, ScoreChoice::SoftCap]);
        assert_eq!(both.mask_mods, [MaskChoice::Window, MaskChoice::Causal]);
        let biased = lists(&[("score_mod", &["rel_bias"]), ("rel_bias", &["-1", "0.5", "2"])]).unwrap();
        assert_eq!(biased.rel_bias.as_deref(), Some(&[-1.0, 0.5, 2.0][..]));
        let said = |pairs: &[(&str, &[&str])]| lists(pairs).unwrap_err();
        assert!(said(&[("score_mod", &["rel_bias"])]).contains("rel_bias"));
        assert!(said(&[("score_mod", &["rel_bias"]), ("rel_bias", &["1", "2"])]).contains("odd"));
        assert!(said(&[("score_mod", &["rel_bias"]), ("rel_bias", &["1", "inf", "2"])]).contains("rel_bias"));
        assert!(said(&[("score_mod", &["alibi", "alibbi"])]).contains("did you mean alibi"));
        assert!(said(&[("score_mod", &[])]).contains("1 to 8 words"));
        assert!(said(&[("mask_mod", &["none"; 9])]).contains("1 to 8 words"));
    }

    #[test]
    fn f36_options_are_typed_and_unknown_keys_refused() {
        assert_eq!(read(&[]), Ok(FlexOptions::default()));
        let other = read(&[("score_mod", "soft_cap"), ("mask_mod", "causal"), ("workers", "2")]).unwrap();
        assert_eq!(
            (other.score_mods, other.mask_mods),
            (vec![ScoreChoice::SoftCap], vec![MaskChoice::Causal])
        );
        assert_eq!(other.kernel_options.workers, 2);
        assert!(read(&[("score_mood", "none")]).unwrap_err().contains("score_mod"));
        assert!(read(&[("mask_mod", "documents")]).unwrap_err().contains("document"));
        assert!(read(&[("mask_mod", "document")]).unwrap_err().contains("document_frames"));
        assert!(read(&[("mask_mod", "document"), ("document_frames", "0")]).is_err());
        let documents = read(&[("mask_mod", "document"), ("document_frames", "6")]).unwrap();
        assert_eq!((documents.mask_mods, documents.document_frames), (vec![MaskChoice::Document], Some(6)));
        assert!(read(&[("document_frames", "6")]).unwrap_err().contains("document_frames"));
        assert!(read(&[("rel_bias", "6")]).unwrap_err().contains("rel_bias"));
        assert!(read(&[("score_mod", "rel_bias"), ("rel_bias", "6")]).unwrap_err().contains("list"));
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
        #[cfg(not(feature = "cuda"))]
        assert!(rank(Device::Cuda(0), heads(64), &plain).unwrap_err().contains("cuda"));
        let latents = KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 };
        assert!(rank(Device::Cpu, latents, &plain).unwrap_err().contains("not latents"));
        let sinks = Softmax { sinks: Some([0.0; 4].into()), ..plain };
        assert!(rank(Device::Cpu, heads(64), &sinks).unwrap_err().contains("sinks"));
    }
}
