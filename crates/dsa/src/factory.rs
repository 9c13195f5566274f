//! The options a spec may give this backend, and the reason why it is not built.

use mstar_core::attend::Unbuilt;
use mstar_core::spec::{Faults, Fields, Node, Section};

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

/// The backend `dsa`, which refuses every geometry: it is not built.
pub const DSA: Unbuilt<DsaOptions> = Unbuilt {
    name: "dsa",
    about: "sparse attention: an indexer picks topk keys, absorbed MLA attends them",
    aliases: &[],
    auto: false,
    why: WHY,
    read: DsaOptions::read,
};

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<DsaOptions, String> {
        let faults = Faults::new();
        let options = DsaOptions::read(&Node::flat("resources.attn", pairs), &faults);
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
}
