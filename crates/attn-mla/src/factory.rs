//! The options a spec may give this backend, and the reason why it is not built.

use mstar_core::attend::Unbuilt;
use mstar_core::spec::{Faults, Fields, Node, Section};

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

/// The backend `mla`, which refuses every geometry: it is not built.
pub const MLA: Unbuilt<MlaOptions> = Unbuilt {
    name: "mla",
    about: "absorbed multi-head latent attention over paged latents",
    aliases: &["flashinfer_mla"],
    auto: true,
    why: WHY,
    read: MlaOptions::read,
};

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<MlaOptions, String> {
        let faults = Faults::new();
        let options = MlaOptions::read(&Node::flat("resources.attn", pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(options.expect("no fault was found"))
    }

    #[test]
    fn options_are_typed_and_unknown_keys_refused() {
        assert_eq!(read(&[]), Ok(MlaOptions {}));
        assert!(read(&[("causal", "true")]).unwrap_err().contains("resources.attn.causal"));
    }

    #[test]
    fn mla_supports_names_the_specialised_shapes() {
        assert!(mla_supports(512, 64) && mla_supports(512, 0));
        assert!(!mla_supports(512, 32) && !mla_supports(256, 64));
    }
}
