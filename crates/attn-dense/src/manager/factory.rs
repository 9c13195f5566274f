//! What a spec may ask of dense attention, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{
    AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason, Softmax, StepShape,
};
use mstar_core::kv::KvLayout;
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::Device;

use super::{DenseAttention, bound};

static OPTIONS: Section = Section { name: "the dense backend", keys: &["causal", "keep_prefix", "prefix"] };

/// The widest head that the kernels take.
const MAX_HEAD_DIM: usize = 512;

/// What a spec may ask of dense attention beside the model's softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseOptions {
    /// `causal`: whether a query sees no later key; `true` unless said.
    pub causal: bool,
    /// `keep_prefix`: whether a gathered prefix is kept between steps, for as long as its stream's generation stands;
    /// `true` unless said. A request may ask otherwise when it is ingested.
    pub keep_prefix: bool,
    /// `prefix`: where the frozen prefix is read from; `gathered` unless said.
    pub prefix: PrefixSource,
}

/// Where a frozen prefix is read from, which changes no bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixSource {
    /// `gathered`: a contiguous copy in the slot's own buffer.
    Gathered,
    /// `pages`: the cache's pages themselves.
    Pages,
}

impl Default for DenseOptions {
    fn default() -> DenseOptions {
        DenseOptions { causal: true, keep_prefix: true, prefix: PrefixSource::Gathered }
    }
}

impl BackendOptions for DenseOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        Ok(Arc::new(DenseAttention::new(cx, *self)?))
    }

    /// The gathered prefixes.
    fn beside_workspaces(&self, geometry: &AttnGeometry, largest: StepShape) -> usize {
        match self.prefix {
            PrefixSource::Gathered => {
                bound::prefix_tokens(largest).saturating_mul(bound::token_bytes(geometry))
            }
            PrefixSource::Pages => 0,
        }
    }
}

/// What of a softmax dense attention does not have: the parameter, and why not.
pub(super) fn unsupported(softmax: &Softmax) -> Option<(&'static str, &'static str)> {
    let Softmax { sm_scale: _, window_left: _, logits_soft_cap: _, sinks, alibi_slopes } = softmax;
    let asked = [
        (sinks.is_some(), "sinks", "dense attention has no sinks; leave them out, or name backend: paged"),
        (
            alibi_slopes.is_some(),
            "alibi",
            "dense attention has no ALiBi; leave it out, or name backend: paged",
        ),
    ];
    asked.into_iter().find(|(asked, ..)| *asked).map(|(_, parameter, why)| (parameter, why))
}

/// The backend `dense`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DenseFactory;

impl BackendFactory for DenseFactory {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn about(&self) -> &'static str {
        "one dense pass over a frozen prefix and the fresh tokens"
    }

    /// It pays where a workload computes its own tokens anew every step and keeps none, which no geometry says.
    fn auto(&self) -> bool {
        false
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        read(options, faults).map(|options| Box::new(options) as Box<dyn BackendOptions>)
    }

    fn supports(&self, device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason> {
        if device != Device::Cpu && !cfg!(feature = "cuda") {
            return Err(format!("was built without kernels for {device}; build with the feature cuda").into());
        }
        let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else {
            return Err("reads keys and values a head, not latents".into());
        };
        if let Some((_, why)) = unsupported(&geometry.softmax) {
            return Err(why.into());
        }
        if num_kv_heads == 0 || !geometry.num_qo_heads.is_multiple_of(num_kv_heads) {
            let heads = geometry.num_qo_heads;
            return Err(format!("{heads} query heads are no multiple of {num_kv_heads} key heads").into());
        }
        if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
            return Err(format!("heads are 1 to {MAX_HEAD_DIM} wide, not {head_dim}").into());
        }
        for dtype in [geometry.dtype, geometry.kv_dtype] {
            if !dtype.is_float() {
                return Err(format!("attends f32, bf16 and f16, not {dtype}").into());
            }
        }
        Ok(if head_dim >= 32 && head_dim.is_multiple_of(16) { Rank::FAST } else { Rank::PORTABLE })
    }
}

fn read(node: &Node, faults: &Faults) -> Option<DenseOptions> {
    let mut f = Fields::open(node, &OPTIONS, faults);
    let causal = f.flag_or("causal", true);
    let keep_prefix = f.flag_or("keep_prefix", true);
    let sources = [("gathered", PrefixSource::Gathered), ("pages", PrefixSource::Pages)];
    let prefix = f.word_or("prefix", PrefixSource::Gathered, &sources);
    f.finish("here");
    Some(DenseOptions { causal, keep_prefix, prefix })
}

#[cfg(test)]
mod tests {
    use mstar_core::kv::KvConfig;

    use super::*;
    use crate::DType;

    fn options(pairs: &[(&str, &str)]) -> Result<DenseOptions, String> {
        let faults = Faults::new();
        let options = read(&Node::flat("resources.attn", pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options.expect("no fault was found"))
    }

    #[test]
    fn f36_options_are_typed_and_unknown_keys_refused() {
        assert_eq!(options(&[]), Ok(DenseOptions::default()));
        let other = DenseOptions { causal: false, keep_prefix: false, prefix: PrefixSource::Pages };
        let pairs = [("causal", "false"), ("keep_prefix", "false"), ("prefix", "pages")];
        assert_eq!(options(&pairs), Ok(other));
        assert!(options(&[("prefix", "page")]).unwrap_err().contains("did you mean pages?"));
        assert!(options(&[("keep-prefix", "true")]).is_err());
    }

    fn geometry(layout: KvLayout, heads: usize, softmax: Softmax) -> AttnGeometry {
        AttnGeometry::over(&KvConfig::new(layout, DType::Bf16, 64, 8), heads, DType::Bf16, softmax)
    }

    const fn heads(num_kv_heads: usize, head_dim: usize) -> KvLayout {
        KvLayout::Nhd { num_kv_heads, head_dim }
    }

    #[test]
    fn every_head_is_served_and_auto_never_chooses_it() {
        let rank = |g, d| DenseFactory.supports(Device::Cpu, &geometry(heads(g, d), 8, Softmax::scaled(0.1)));
        assert_eq!((rank(8, 128), rank(2, 7)), (Ok(Rank::FAST), Ok(Rank::PORTABLE)));
        assert!(rank(3, 64).is_err() && rank(0, 64).is_err() && rank(8, 0).is_err() && rank(8, 513).is_err());
        assert!(!DenseFactory.auto());
    }

    #[test]
    fn a_refusal_names_its_reason() {
        let plain = Softmax::scaled(0.1);
        let said = |device, layout, softmax: &Softmax| {
            DenseFactory.supports(device, &geometry(layout, 8, softmax.clone())).unwrap_err().0
        };
        #[cfg(not(feature = "cuda"))]
        assert!(said(Device::Cuda(0), heads(2, 64), &plain).contains("cuda"));
        let latents = KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 };
        assert!(said(Device::Cpu, latents, &plain).contains("not latents"));
        let sinks = Softmax { sinks: Some([0.0; 8].into()), ..plain.clone() };
        assert!(said(Device::Cpu, heads(2, 64), &sinks).contains("sinks"));
        let alibi = Softmax { alibi_slopes: Some([0.0; 8].into()), ..plain };
        assert!(said(Device::Cpu, heads(2, 64), &alibi).contains("ALiBi"));
    }

    #[test]
    fn gathered_prefixes_are_counted_and_those_in_pages_take_nothing() {
        let geometry = geometry(heads(2, 64), 8, Softmax::scaled(0.1));
        let largest = StepShape { rows: 3, tokens: 48, kv_len: 100 };
        let gathered = DenseOptions::default();
        let bytes = 3 * 100 * 2 * geometry.num_layers * 2 * 64 * 2;
        assert_eq!(gathered.beside_workspaces(&geometry, largest), bytes);
        let pages = DenseOptions { prefix: PrefixSource::Pages, ..gathered };
        assert_eq!(pages.beside_workspaces(&geometry, largest), 0);
    }
}
