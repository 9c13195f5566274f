//! What a spec may ask of cross-attention, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::Device;

use super::CrossAttention;
use crate::manager::supports;

static OPTIONS: Section = Section { name: "the cross backend", keys: &["cascade"] };

/// What a spec may ask of cross-attention beside the model's softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossOptions {
    /// `cascade`: whether a context that rows share is read once for all of them, which changes no bit; `true` unless said.
    pub cascade: bool,
}

impl Default for CrossOptions {
    fn default() -> CrossOptions {
        CrossOptions { cascade: true }
    }
}

impl BackendOptions for CrossOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        Ok(Arc::new(CrossAttention::new(cx, *self)?))
    }
}

/// The backend `cross`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossFactory;

impl BackendFactory for CrossFactory {
    fn name(&self) -> &'static str {
        "cross"
    }

    fn about(&self) -> &'static str {
        "queries of one sequence over a context written once, without a mask"
    }

    /// Only ever named: nothing in a geometry says that its queries come from elsewhere.
    fn auto(&self) -> bool {
        false
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        let mut f = Fields::open(options, &OPTIONS, faults);
        let cascade = f.flag_or("cascade", true);
        f.finish("here");
        Some(Box::new(CrossOptions { cascade }))
    }

    fn supports(&self, device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason> {
        supports(device, geometry)
    }
}
