//! A backend that a spec can name and this version does not build: its options are read and checked like any other's,
//! and every geometry is refused with its reason.

use std::fmt;
use std::sync::Arc;

use mstar_kernels::{Device, Error};

use super::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use crate::spec::{Faults, Node};
use crate::{Attention, Result};

/// The factory of a backend with options `O` that is not built.
pub struct Unbuilt<O> {
    /// Its name in specs.
    pub name: &'static str,
    /// One line on what it will be.
    pub about: &'static str,
    /// Names that other systems give it.
    pub aliases: &'static [&'static str],
    /// Whether `auto` asks it, and so quotes its reason where nothing serves.
    pub auto: bool,
    /// Why it serves nothing, and what would.
    pub why: &'static str,
    /// Reads its options; faults go to the second argument.
    pub read: fn(&Node, &Faults) -> Option<O>,
}

impl<O: fmt::Debug + Send + Sync + 'static> BackendFactory for Unbuilt<O> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn aliases(&self) -> &'static [&'static str] {
        self.aliases
    }

    fn auto(&self) -> bool {
        self.auto
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        let options = (self.read)(options, faults)?;
        Some(Box::new(Refused { backend: self.name, why: self.why, options }))
    }

    fn supports(&self, _: Device, _: &AttnGeometry) -> Result<Rank, Reason> {
        Err(self.why.into())
    }
}

/// Options that were read, of a backend that builds nothing from them.
#[derive(Debug)]
struct Refused<O> {
    backend: &'static str,
    why: &'static str,
    #[allow(dead_code, reason = "shown by Debug, as every backend's options are")]
    options: O,
}

impl<O: fmt::Debug + Send + Sync> BackendOptions for Refused<O> {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        let why = self.why.into();
        let unsupported = Error::Unsupported { operation: self.backend, device: cx.device, why };
        Err(crate::Error::backend(cx.name.as_str(), unsupported))
    }
}

#[cfg(test)]
mod tests {
    use mstar_kernels::DType;

    use super::*;
    use crate::ResourceName;
    use crate::attend::Softmax;
    use crate::kv::KvLayout;
    use crate::spec::{Fallback, Fields, Schedule, Section};

    static OPTIONS: Section = Section { name: "the later backend", keys: &["tile"] };

    fn read(node: &Node, faults: &Faults) -> Option<usize> {
        let mut f = Fields::open(node, &OPTIONS, faults);
        let tile = f.count_or("tile", 64, 1..=128);
        f.finish("here");
        Some(tile)
    }

    const LATER: Unbuilt<usize> = Unbuilt {
        name: "later",
        about: "a backend to come",
        aliases: &["soon"],
        auto: false,
        why: "its kernels are not built yet; backend: paged runs",
        read,
    };

    fn geometry() -> AttnGeometry {
        AttnGeometry {
            num_qo_heads: 16,
            layout: KvLayout::Mla { kv_lora_rank: 512, qk_rope_head_dim: 64 },
            page_size: 64,
            dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
            num_layers: 1,
            softmax: Softmax::scaled(1.0),
        }
    }

    #[test]
    fn every_geometry_is_refused_with_the_reason() {
        assert_eq!(LATER.supports(Device::Cpu, &geometry()).unwrap_err().0, LATER.why);
        assert_eq!((LATER.name(), LATER.aliases(), LATER.auto()), ("later", &["soon"][..], false));
    }

    #[test]
    fn options_are_checked_and_building_says_which_resource_and_why() {
        let faults = Faults::new();
        LATER.parse(&Node::flat("resources.attn", &[("tiles", "8")]), &faults);
        let said = faults.settle("spec.yaml").unwrap_err().to_string();
        assert!(said.contains("resources.attn.tiles") && said.contains("did you mean tile?"), "{said}");

        let faults = Faults::new();
        let options = LATER.parse(&Node::flat("resources.attn", &[("tile", "8")]), &faults).unwrap();
        faults.settle("spec.yaml").unwrap();
        assert!(format!("{options:?}").contains("options: 8"), "{options:?}");
        let cx = BuildContext {
            name: ResourceName::new("attn"),
            geometry: geometry(),
            device: Device::Cpu,
            kv_cache: None,
            ring: None,
            query_from: None,
            slots: 1,
            largest: None,
            schedule: Schedule::Invariant,
            fallback: Fallback::Reference,
        };
        let said = options.build(&cx).map(|_| ()).unwrap_err().to_string();
        assert!(said.contains("attn") && said.contains("later") && said.contains(LATER.why), "{said}");
    }
}
