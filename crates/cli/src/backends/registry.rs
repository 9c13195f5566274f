//! Which backends this build has: the only file that knows a backend's feature.

use mstar_core::attend::{AttnGeometry, Backends, StepShape};
use mstar_core::spec::Schedule;
use mstar_kernels::Device;
#[allow(unused_imports, reason = "a build may have no backend")]
use std::sync::Arc;

/// The compiled backends, and the names of those left out.
pub(crate) fn registry() -> Backends {
    let mut backends = Backends::new();
    #[cfg(feature = "paged")]
    backends
        .register(Arc::new(mstar_attn_paged::PagedFactory))
        .register(Arc::new(mstar_attn_paged::CrossFactory));
    #[cfg(not(feature = "paged"))]
    backends.absent("paged", "paged", &["flashinfer"]).absent("cross", "paged", &[]);
    #[cfg(feature = "mla")]
    backends.register(Arc::new(mstar_attn_mla::MlaFactory));
    #[cfg(not(feature = "mla"))]
    backends.absent("mla", "mla", &["flashinfer_mla"]);
    #[cfg(feature = "dense")]
    backends.register(Arc::new(mstar_attn_dense::DenseFactory));
    #[cfg(not(feature = "dense"))]
    backends.absent("dense", "dense", &[]);
    #[cfg(feature = "flex")]
    backends.register(Arc::new(mstar_attn_flex::FlexFactory));
    #[cfg(not(feature = "flex"))]
    backends.absent("flex", "flex", &[]);
    #[cfg(feature = "dsa")]
    backends.register_sparse(Arc::new(mstar_dsa::DsaFactory));
    #[cfg(not(feature = "dsa"))]
    backends.absent_sparse("dsa", "dsa");
    backends
}

/// Bytes of one workspace that `backend` makes, for each plan label and slot, when it is built for steps of up to
/// `largest`. `head_dim_vo` is the width of a value where that is not the geometry's own.
///
/// # Errors
/// A geometry that it does not serve.
pub(crate) fn workspace_bytes(
    backend: &str,
    geometry: &AttnGeometry,
    head_dim_vo: Option<usize>,
    largest: StepShape,
    device: Device,
    schedule: Schedule,
) -> anyhow::Result<usize> {
    match backend {
        #[cfg(feature = "paged")]
        "paged" | "cross" => {
            let schedule = match schedule {
                Schedule::Throughput => mstar_attn_paged::Schedule::Throughput,
                Schedule::Invariant => mstar_attn_paged::Schedule::Invariant,
            };
            Ok(mstar_attn_paged::workspace_bound(geometry, largest, 0, device, schedule)?)
        }
        #[cfg(feature = "mla")]
        "mla" => {
            let schedule = match schedule {
                Schedule::Throughput => mstar_attn_mla::Schedule::Throughput,
                Schedule::Invariant => mstar_attn_mla::Schedule::Invariant,
            };
            Ok(mstar_attn_mla::workspace_bound(geometry, largest, 0, device, schedule)?)
        }
        #[cfg(feature = "dense")]
        "dense" => Ok(mstar_attn_dense::workspace_bound(geometry, largest, 0, device)?),
        #[cfg(feature = "flex")]
        // Latents have no values of their own, and nothing here serves them.
        "flex" => {
            Ok(mstar_attn_flex::workspace_bound(geometry, head_dim_vo.unwrap_or(1), largest, 0, device)?)
        }
        _ => {
            let _ = (geometry, head_dim_vo, largest, device, schedule);
            Ok(0)
        }
    }
}
