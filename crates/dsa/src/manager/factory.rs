//! What is served, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{
    AttnGeometry, BuildContext, IndexGeometry, IndexStore, Rank, Reason, SparseAttention, SparseFactory,
    StepShape,
};
use mstar_core::kv::KvLayout;
use mstar_core::{Error, Result};
use mstar_kernels::Device;
use mstar_kernels::mla::Geometry;

use super::DsaManager;
use super::memory::Sizes;
use crate::encode::key_format;
use crate::{Indexer, Layer};

/// Builds resources of kind `dsa`.
#[derive(Clone, Copy, Debug, Default)]
pub struct DsaFactory;

impl SparseFactory for DsaFactory {
    fn name(&self) -> &'static str {
        "dsa"
    }

    fn about(&self) -> &'static str {
        "sparse attention: an indexer picks topk keys, absorbed MLA attends them"
    }

    fn supports(
        &self,
        device: Device,
        geometry: &AttnGeometry,
        index: &IndexGeometry,
    ) -> Result<Rank, Reason> {
        supports(device, geometry, index)
    }

    fn bytes(
        &self,
        device: Device,
        attn: &AttnGeometry,
        index: &IndexGeometry,
        largest: StepShape,
    ) -> Result<usize> {
        let refused = |reason: Reason| {
            let (name, got) = ("layout", format!("{:?}", attn.layout));
            Error::from(mstar_kernels::Error::Parameter { name, why: reason.0, got })
        };
        Ok(Sizes::foreseen(&layer(attn, index).map_err(refused)?, index, largest, device)?.total())
    }

    fn build(&self, cx: &BuildContext, index: &IndexGeometry) -> Result<Arc<dyn SparseAttention>> {
        Ok(Arc::new(DsaManager::build(cx, index)?))
    }
}

/// The latents' geometry; a cache of keys and values a head has none.
fn geometry(attn: &AttnGeometry) -> Result<Geometry, Reason> {
    let KvLayout::Mla { kv_lora_rank, qk_rope_head_dim } = attn.layout else {
        return Err("attends latents, not keys and values a head; give the cache layout: mla".into());
    };
    Ok(Geometry {
        num_qo_heads: attn.num_qo_heads,
        kv_lora_rank,
        qk_rope_head_dim,
        page_size: attn.page_size,
        q_dtype: attn.dtype,
        kv_dtype: attn.kv_dtype,
    })
}

/// The layer that plans are made for.
pub(super) fn layer(attn: &AttnGeometry, index: &IndexGeometry) -> Result<Layer, Reason> {
    let IndexGeometry { index_n_heads, index_head_dim, index_topk, .. } = *index;
    let format = key_format(index.format).map_err(|error| Reason(error.to_string()))?;
    let indexer = Indexer { index_n_heads, index_head_dim, index_topk, format };
    Ok(Layer { geometry: geometry(attn)?, sm_scale: attn.softmax.sm_scale, indexer })
}

/// How well sparse attention serves a geometry.
pub(crate) fn supports(device: Device, attn: &AttnGeometry, index: &IndexGeometry) -> Result<Rank, Reason> {
    if device != Device::Cpu && !cfg!(feature = "cuda") {
        return Err(format!("was built without kernels for {device}; build with the feature cuda").into());
    }
    if device != Device::Cpu && index.store == IndexStore::Buffers {
        return Err("keeps index keys in buffers on the CPU alone; on a device say index_store: pages".into());
    }
    let geometry = geometry(attn)?;
    geometry.check().map_err(|error| Reason(error.to_string()))?;
    let softmax = &attn.softmax;
    if !softmax.sm_scale.is_finite() {
        return Err(format!("sm_scale must be finite, got {}", softmax.sm_scale).into());
    }
    for (given, name) in [
        (softmax.window_left.is_some(), "window_left"),
        (softmax.logits_soft_cap.is_some(), "logits_soft_cap"),
        (softmax.sinks.is_some(), "sinks"),
        (softmax.alibi_slopes.is_some(), "alibi"),
    ] {
        if given {
            return Err(format!("attention over latents has no {name}; leave it out").into());
        }
    }
    if index.index_n_heads == 0 || index.index_head_dim == 0 {
        return Err("an indexer has at least one head of at least one lane".into());
    }
    if !(1..=i32::MAX as usize).contains(&index.index_topk) {
        return Err(format!("index_topk must be 1..=2147483647, got {}", index.index_topk).into());
    }
    key_format(index.format).map_err(|error| Reason(error.to_string()))?;
    if index.format == mstar_core::attend::IndexFormat::Fp8 && !index.index_head_dim.is_multiple_of(4) {
        return Err(format!("fp8 index keys have a multiple of 4 lanes, got {}", index.index_head_dim).into());
    }
    let full = &index.full_layers;
    let rising = full.windows(2).all(|pair| pair[0] < pair[1]);
    if full.first() != Some(&0) || !rising || full.last().is_some_and(|&last| last >= attn.num_layers) {
        let layers = attn.num_layers;
        let why =
            format!("full_layers must begin with 0, rise, and stay below {layers} layers; got {full:?}");
        return Err(why.into());
    }
    let wide = geometry.kv_lora_rank == 512 && [0, 64].contains(&geometry.qk_rope_head_dim);
    Ok(if wide && index.index_head_dim.is_multiple_of(32) { Rank::FAST } else { Rank::PORTABLE })
}
