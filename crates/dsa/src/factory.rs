//! The options a spec may give this backend, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::{Device, Error};

/// Why nothing is built.
const WHY: &str = "the indexer, the selection and sparse attention are not built yet";

static OPTIONS: Section = Section {
    name: "the dsa backend",
    keys: &["index_n_heads", "index_head_dim", "index_topk", "full_layers"],
};

/// What a spec must say of the indexer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DsaOptions {
    /// `index_n_heads`: `Hi`.
    pub index_n_heads: usize,
    /// `index_head_dim`: `Di`.
    pub index_head_dim: usize,
    /// `index_topk`: keys that a query attends at the most.
    pub index_topk: usize,
    /// `full_layers`: layers that select, in rising order from 0; `None` for all.
    pub full_layers: Option<Vec<usize>>,
}

impl DsaOptions {
    fn read(node: &Node, faults: &Faults) -> Option<DsaOptions> {
        let mut f = Fields::open(node, &OPTIONS, faults);
        let index_n_heads = f.count("index_n_heads", 1..=4096);
        let index_head_dim = f.count("index_head_dim", 1..=512);
        let index_topk = f.count("index_topk", 1..=i32::MAX as u64);
        let full_layers = f.counts_opt("full_layers", 0..=1023, 1024);
        if let Some(full) = &full_layers {
            if full.windows(2).any(|pair| pair[0] >= pair[1]) {
                f.fault_at("full_layers", "expected layers in rising order, none twice");
            }
            if full.first() != Some(&0) {
                f.fault_at("full_layers", "layer 0 has no selection to share; begin with 0");
            }
        }
        f.finish("here");
        Some(DsaOptions {
            index_n_heads: index_n_heads?,
            index_head_dim: index_head_dim?,
            index_topk: index_topk?,
            full_layers,
        })
    }
}

impl BackendOptions for DsaOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        let unsupported = Error::Unsupported { operation: "dsa", device: cx.device, why: WHY.into() };
        Err(mstar_core::Error::backend(cx.name.as_str(), unsupported))
    }
}

/// The backend `dsa`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DsaFactory;

impl BackendFactory for DsaFactory {
    fn name(&self) -> &'static str {
        "dsa"
    }

    fn about(&self) -> &'static str {
        "sparse attention: an indexer picks topk keys, absorbed MLA attends them"
    }

    fn auto(&self) -> bool {
        false
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        DsaOptions::read(options, faults).map(|options| Box::new(options) as Box<dyn BackendOptions>)
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

    fn read(pairs: &[(&str, &str)]) -> Result<DsaOptions, String> {
        let faults = Faults::new();
        let options = DsaOptions::read(&node(pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options.expect("no fault was found"))
    }

    #[test]
    fn options_are_typed_and_unknown_keys_refused() {
        let given = [("index_n_heads", "64"), ("index_head_dim", "128"), ("index_topk", "2048")];
        let options = read(&given).unwrap();
        assert_eq!((options.index_n_heads, options.index_head_dim, options.index_topk), (64, 128, 2048));
        assert_eq!(options.full_layers, None);
        assert!(read(&given[1..]).unwrap_err().contains("resources.attn.index_n_heads"));
        assert!(read(&[given[0], given[1], given[2], ("topk", "1")]).is_err());
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
        let reason = DsaFactory.supports(Device::Cpu, &geometry).unwrap_err();
        assert!(reason.0.contains("not built"), "{reason}");
    }
}
