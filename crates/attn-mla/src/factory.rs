//! The options a spec may give this backend, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::{Device, Error};

/// Why nothing is built.
const WHY: &str =
    "the kernels of absorbed latent attention are not built yet; a cache of heads with backend: paged runs";

static OPTIONS: Section = Section { name: "the mla backend", keys: &[] };

/// The backend has no options of its own: scale and widths come from `model` and the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MlaOptions {}

/// Whether kernels specialised for a latent of `C` and a rotary part of `E` exist: DeepSeek's and Kimi's, 512 with 64 or 0.
/// Every other shape is a matter of speed, not of right or wrong.
pub fn mla_supports(kv_lora_rank: usize, qk_rope_head_dim: usize) -> bool {
    kv_lora_rank == 512 && matches!(qk_rope_head_dim, 0 | 64)
}

impl MlaOptions {
    fn read(node: &Node, faults: &Faults) -> Option<MlaOptions> {
        Fields::open(node, &OPTIONS, faults).finish("here");
        Some(MlaOptions {})
    }
}

impl BackendOptions for MlaOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        let unsupported = Error::Unsupported { operation: "mla", device: cx.device, why: WHY.into() };
        Err(mstar_core::Error::backend(cx.name.as_str(), unsupported))
    }
}

/// The backend `mla`.
#[derive(Clone, Copy, Debug, Default)]
pub struct MlaFactory;

impl BackendFactory for MlaFactory {
    fn name(&self) -> &'static str {
        "mla"
    }

    fn about(&self) -> &'static str {
        "absorbed multi-head latent attention over paged latents"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["flashinfer_mla"]
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        MlaOptions::read(options, faults).map(|options| Box::new(options) as Box<dyn BackendOptions>)
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

    fn read(pairs: &[(&str, &str)]) -> Result<MlaOptions, String> {
        let faults = Faults::new();
        let options = MlaOptions::read(&node(pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options.expect("no fault was found"))
    }

    #[test]
    fn options_are_typed_and_unknown_keys_refused() {
        assert_eq!(read(&[]), Ok(MlaOptions {}));
        assert!(read(&[("causal", "true")]).unwrap_err().contains("resources.attn.causal"));
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
        let reason = MlaFactory.supports(Device::Cpu, &geometry).unwrap_err();
        assert!(reason.0.contains("not built"), "{reason}");
    }

    #[test]
    fn mla_supports_names_the_specialised_shapes() {
        assert!(mla_supports(512, 64) && mla_supports(512, 0));
        assert!(!mla_supports(512, 32) && !mla_supports(256, 64));
    }
}
