//! What a spec may ask of paged attention, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason};
use mstar_core::kv::KvLayout;
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::{DType, Device};

use super::PagedAttention;
use crate::MAX_HEAD_DIM;

static OPTIONS: Section = Section { name: "the paged backend", keys: &["causal", "cascade"] };

/// What a spec may ask of paged attention beside the model's softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedOptions {
    /// `causal`: whether a query sees no later key; `true` unless said.
    pub causal: bool,
    /// `cascade`: whether pages that rows share are read once for all of them, which changes no bit; `true` unless said.
    pub cascade: bool,
}

impl Default for PagedOptions {
    fn default() -> PagedOptions {
        PagedOptions { causal: true, cascade: true }
    }
}

impl BackendOptions for PagedOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        Ok(Arc::new(PagedAttention::new(cx, *self)?))
    }
}

/// The backend `paged`.
#[derive(Clone, Copy, Debug, Default)]
pub struct PagedFactory;

impl BackendFactory for PagedFactory {
    fn name(&self) -> &'static str {
        "paged"
    }

    fn about(&self) -> &'static str {
        "attention over pages of keys and values: GQA, windows, soft cap, sinks, ALiBi, masks"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["flashinfer"]
    }

    fn parse(&self, options: &Node, faults: &Faults) -> Option<Box<dyn BackendOptions>> {
        let mut f = Fields::open(options, &OPTIONS, faults);
        let causal = f.flag_or("causal", true);
        let cascade = f.flag_or("cascade", true);
        f.finish("here");
        Some(Box::new(PagedOptions { causal, cascade }))
    }

    fn supports(&self, device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason> {
        supports(device, geometry)
    }
}

/// How well the paged kernels serve a geometry.
pub(crate) fn supports(device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason> {
    if device != Device::Cpu && !cfg!(feature = "cuda") {
        return Err(format!("was built without kernels for {device}; build with the feature cuda").into());
    }
    let KvLayout::Nhd { num_kv_heads, head_dim } = geometry.layout else {
        return Err("reads keys and values a head, not latents".into());
    };
    if num_kv_heads == 0 || !geometry.num_qo_heads.is_multiple_of(num_kv_heads) {
        let heads = geometry.num_qo_heads;
        return Err(format!("{heads} query heads are no multiple of {num_kv_heads} key heads").into());
    }
    if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
        return Err(format!("heads are 1 to {MAX_HEAD_DIM} wide, not {head_dim}").into());
    }
    if !geometry.dtype.is_float() {
        return Err(format!("attends with queries of f32, bf16 and f16, not {}", geometry.dtype).into());
    }
    match geometry.kv_dtype {
        dtype if dtype == DType::E4m3 || dtype.is_float() => {}
        dtype => return Err(format!("attends f32, bf16, f16 and fp8_e4m3, not {dtype}").into()),
    }
    Ok(if head_dim >= 32 && head_dim.is_multiple_of(16) { Rank::FAST } else { Rank::PORTABLE })
}
