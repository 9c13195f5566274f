//! What a spec may ask of latent attention, and the factory that the program registers.

use std::sync::Arc;

use mstar_core::attend::{AttnGeometry, BackendFactory, BackendOptions, BuildContext, Rank, Reason, Softmax};
use mstar_core::kv::KvLayout;
use mstar_core::spec::{Faults, Fields, Node, Section};
use mstar_core::{Attention, Result};
use mstar_kernels::mla::MAX_LATENT_DIM;
use mstar_kernels::{DType, Device, fp8};

use super::MlaAttention;

static OPTIONS: Section = Section { name: "the mla backend", keys: &["causal", "cascade"] };

/// What a spec may ask of latent attention beside the model's scale and widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaOptions {
    /// `causal`: whether a query sees no later key; `true` unless said.
    pub causal: bool,
    /// `cascade`: whether pages that rows share are read once for all of them, which changes no bit; `true` unless said.
    pub cascade: bool,
}

impl Default for MlaOptions {
    fn default() -> MlaOptions {
        MlaOptions { causal: true, cascade: true }
    }
}

impl BackendOptions for MlaOptions {
    fn build(&self, cx: &BuildContext) -> Result<Arc<dyn Attention>> {
        Ok(Arc::new(MlaAttention::new(cx, *self)?))
    }
}

/// Whether kernels specialised for a latent of `C` and a rotary part of `E` exist: DeepSeek's and Kimi's, 512 with 64 or 0.
/// Every other shape is a matter of speed, not of right or wrong.
pub fn mla_supports(kv_lora_rank: usize, qk_rope_head_dim: usize) -> bool {
    kv_lora_rank == 512 && matches!(qk_rope_head_dim, 0 | 64)
}

/// What of a softmax latent attention does not have: the parameter, and why not.
pub(super) fn unsupported(softmax: &Softmax) -> Option<(&'static str, &'static str)> {
    let Softmax { sm_scale: _, window_left, logits_soft_cap, sinks, alibi_slopes } = softmax;
    let asked = [
        (window_left.is_some(), "window_left", "latent attention has no window; leave it out"),
        (logits_soft_cap.is_some(), "logits_soft_cap", "latent attention has no soft cap; leave it out"),
        (sinks.is_some(), "sinks", "latent attention has no sinks; leave them out"),
        (alibi_slopes.is_some(), "alibi", "latent attention has no ALiBi; leave it out"),
    ];
    asked.into_iter().find(|(asked, ..)| *asked).map(|(_, parameter, why)| (parameter, why))
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
        let mut f = Fields::open(options, &OPTIONS, faults);
        let causal = f.flag_or("causal", true);
        let cascade = f.flag_or("cascade", true);
        f.finish("here");
        Some(Box::new(MlaOptions { causal, cascade }))
    }

    fn supports(&self, device: Device, geometry: &AttnGeometry) -> Result<Rank, Reason> {
        if device != Device::Cpu && !cfg!(feature = "cuda") {
            return Err(format!("was built without kernels for {device}; build with the feature cuda").into());
        }
        let KvLayout::Mla { kv_lora_rank: c, qk_rope_head_dim: e } = geometry.layout else {
            return Err("reads latents, not keys and values a head".into());
        };
        if let Some((_, why)) = unsupported(&geometry.softmax) {
            return Err(why.into());
        }
        if c == 0 || c.saturating_add(e) > MAX_LATENT_DIM {
            return Err(format!("latents are 1 to {MAX_LATENT_DIM} wide, not {c} + {e}").into());
        }
        if !geometry.dtype.is_float() {
            return Err(format!("attends with queries of f32, bf16 and f16, not {}", geometry.dtype).into());
        }
        match geometry.kv_dtype {
            DType::E4m3 => {
                fp8::check_latent(c, e).map_err(|why| why.to_string())?;
            }
            dtype if dtype.is_float() => {}
            dtype => return Err(format!("attends f32, bf16, f16 and fp8_e4m3, not {dtype}").into()),
        }
        Ok(if mla_supports(c, e) { Rank::FAST } else { Rank::PORTABLE })
    }
}

#[cfg(test)]
mod tests {
    use mstar_core::kv::KvConfig;

    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<String, String> {
        let faults = Faults::new();
        let options = MlaFactory.parse(&Node::flat("resources.attn", pairs), &faults);
        faults.settle("spec.yaml").map_err(|errors| errors.to_string())?;
        Ok(format!("{:?}", options.expect("no fault was found")))
    }

    #[test]
    fn f36_options_are_typed_and_unknown_keys_refused() {
        assert_eq!(read(&[]).unwrap(), format!("{:?}", MlaOptions::default()));
        let off = MlaOptions { causal: false, cascade: false };
        assert_eq!(read(&[("causal", "false"), ("cascade", "false")]).unwrap(), format!("{off:?}"));
        let said = read(&[("casual", "true")]).unwrap_err();
        assert!(said.contains("resources.attn.casual") && said.contains("did you mean causal?"), "{said}");
        assert!(read(&[("causal", "perhaps")]).is_err());
    }

    #[test]
    fn mla_supports_names_the_specialised_shapes() {
        assert!(mla_supports(512, 64) && mla_supports(512, 0));
        assert!(!mla_supports(512, 32) && !mla_supports(256, 64));
    }

    fn geometry(layout: KvLayout, softmax: Softmax) -> AttnGeometry {
        AttnGeometry::over(&KvConfig::new(layout, DType::Bf16, 64, 8), 16, DType::Bf16, softmax)
    }

    const fn latents(kv_lora_rank: usize, qk_rope_head_dim: usize) -> KvLayout {
        KvLayout::Mla { kv_lora_rank, qk_rope_head_dim }
    }

    #[test]
    fn every_shape_is_served_and_the_specialised_ones_best() {
        let rank = |c, e| MlaFactory.supports(Device::Cpu, &geometry(latents(c, e), Softmax::scaled(0.1)));
        assert_eq!((rank(512, 64), rank(512, 0)), (Ok(Rank::FAST), Ok(Rank::FAST)));
        assert_eq!((rank(64, 16), rank(7, 0)), (Ok(Rank::PORTABLE), Ok(Rank::PORTABLE)));
        assert!(rank(0, 64).is_err() && rank(usize::MAX, 1).is_err());
    }

    #[test]
    fn a_refusal_names_its_reason() {
        let plain = Softmax::scaled(0.1);
        let said = |device, layout, softmax: &Softmax| {
            MlaFactory.supports(device, &geometry(layout, softmax.clone())).unwrap_err().0
        };
        let c512 = latents(512, 64);
        #[cfg(not(feature = "cuda"))]
        assert!(said(Device::Cuda(0), c512, &plain).contains("cuda"));
        let heads = KvLayout::Nhd { num_kv_heads: 2, head_dim: 64 };
        assert!(said(Device::Cpu, heads, &plain).contains("not keys and values"));
        for (softmax, name) in [
            (Softmax { window_left: Some(4), ..plain.clone() }, "window"),
            (Softmax { logits_soft_cap: Some(4.0), ..plain.clone() }, "soft cap"),
            (Softmax { sinks: Some([0.0; 16].into()), ..plain.clone() }, "sinks"),
            (Softmax { alibi_slopes: Some([0.0; 16].into()), ..plain.clone() }, "ALiBi"),
        ] {
            assert!(said(Device::Cpu, c512, &softmax).contains(name), "{name}");
        }
        let mut other = geometry(c512, plain);
        other.kv_dtype = DType::U8;
        assert!(MlaFactory.supports(Device::Cpu, &other).unwrap_err().0.contains("u8"));
    }
}
