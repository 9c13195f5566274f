//! The options a spec may give this backend, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::{Device, Error};

/// Why nothing is built.
const WHY: &str = "the dense pass is not built yet; backend: paged attends the same step";

static OPTIONS: Section = Section { name: "the dense backend", keys: &["keep_prefix", "prefix"] };

/// What a spec may ask of this backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseOptions {
    /// `keep_prefix`: whether a gathered prefix is kept between steps, for as long as its stream's generation stands.
    pub keep_prefix: bool,
    /// `prefix`: where the frozen prefix is read from.
    pub prefix: PrefixSource,
}

/// Where a frozen prefix is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixSource {
    /// `gathered`: a contiguous copy in the slot's own buffer.
    Gathered,
    /// `pages`: the cache's pages themselves.
    Pages,
}

impl DenseOptions {
    fn read(node: &Node, faults: &Faults) -> Option<DenseOptions> {
        let mut f = Fields::open(node, &OPTIONS, faults);
        let keep_prefix = f.flag_or("keep_prefix", true);
        let sources = [("gathered", PrefixSource::Gathered), ("pages", PrefixSource::Pages)];
        let prefix = f.word_or("prefix", PrefixSource::Gathered, &sources);
        f.finish("here");
        Some(DenseOptions { keep_prefix, prefix })
    }
}

impl BackendOptions for DenseOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        let unsupported = Error::Unsupported { operation: "dense", device: cx.device, why: WHY.into() };
        Err(mstar_core::Error::backend(cx.name.as_str(), unsupported))
    }
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

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        DenseOptions::read(options, faults).map(|options| Box::new(options) as Box<dyn BackendOptions>)
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

    fn read(pairs: &[(&str, &str)]) -> Result<DenseOptions, String> {
        let faults = Faults::new();
        let options = DenseOptions::read(&node(pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options.expect("no fault was found"))
    }

    #[test]
    fn options_are_typed_and_unknown_keys_refused() {
        let default = DenseOptions { keep_prefix: true, prefix: PrefixSource::Gathered };
        assert_eq!(read(&[]), Ok(default));
        let other = DenseOptions { keep_prefix: false, prefix: PrefixSource::Pages };
        assert_eq!(read(&[("keep_prefix", "false"), ("prefix", "pages")]), Ok(other));
        assert!(read(&[("prefix", "page")]).unwrap_err().contains("did you mean pages?"));
        assert!(read(&[("keep-prefix", "true")]).is_err());
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
        let reason = DenseFactory.supports(Device::Cpu, &geometry).unwrap_err();
        assert!(reason.0.contains("not built"), "{reason}");
    }
}
