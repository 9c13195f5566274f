//! A cache as attention resources see it: layers to read, entries to write, plans to follow.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use mstar_kernels::{Stream, TensorRef};

use super::{KvConfig, KvPlan};
use crate::{Label, PlanId, Resource, Result, StepSerial};

/// One layer of a cache, as a kernel reads it.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant)] // Looked at once a layer, and `Copy`.
#[non_exhaustive]
pub enum LayerView<'a> {
    /// `k` and `v`, each `[P, S, G, D]`.
    Nhd {
        /// Keys.
        k: TensorRef<'a>,
        /// Values.
        v: TensorRef<'a>,
    },
    /// `k` and `v` as e4m3 codes, each `[P, S, G, D]`, and their scales, each `[P, S, G]` f32.
    Fp8 {
        /// Codes of keys.
        k: TensorRef<'a>,
        /// Codes of values.
        v: TensorRef<'a>,
        /// Scales of keys, and of values.
        scales: [TensorRef<'a>; 2],
    },
    /// `latent`, `[P, S, C + E]`; of a cache in e4m3 `[P, S, B]` u8, as [`mstar_kernels::fp8`] has it.
    Mla {
        /// Latents.
        latent: TensorRef<'a>,
    },
}

/// What a step writes into a cache.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KvEntries<'a> {
    /// `k` and `v`, each `[T, G, D]`.
    Nhd {
        /// Keys.
        k: TensorRef<'a>,
        /// Values.
        v: TensorRef<'a>,
    },
    /// `ckv` `[T, C]` and `kpe` `[T, E]`.
    Mla {
        /// Compressed latents.
        ckv: TensorRef<'a>,
        /// Rotary parts.
        kpe: TensorRef<'a>,
    },
}

/// A paged cache, as attention resources see it.
pub trait PagedKv: Resource {
    /// Its geometry.
    fn config(&self) -> &KvConfig;

    /// A plan made by [`Resource::plan`].
    ///
    /// # Errors
    /// When there is none, or it belongs to another step.
    fn kv_plan(&self, id: &PlanId) -> Result<Arc<KvPlan>>;

    /// The labels that a step was planned under.
    ///
    /// # Errors
    /// When the step was not planned.
    fn plan_labels(&self, serial: StepSerial) -> Result<Vec<Label>>;

    /// What a captured write of this plan takes for granted, as a number; `None` where it cannot be captured.
    fn capture_key(&self, id: &PlanId) -> Option<u64> {
        let _ = id;
        None
    }

    /// One layer's pages.
    ///
    /// # Errors
    /// A layer that the cache does not have.
    fn layer(&self, layer: usize) -> Result<LayerView<'_>>;

    /// A plane of one layer, `[P, S, width]`.
    ///
    /// # Errors
    /// A layer or plane that the cache does not have.
    fn plane(&self, name: &str, layer: usize) -> Result<TensorRef<'_>>;

    /// Writes the step's entries `[T, width]` of one layer of a plane to the planned slots.
    ///
    /// # Errors
    /// A layer or plane that the cache does not have; a shape or dtype that is not the plane's; nothing is written.
    fn write_plane(
        &self,
        id: &PlanId,
        name: &str,
        layer: usize,
        entries: TensorRef<'_>,
        stream: &Stream,
    ) -> Result<()>;

    /// Writes the step's entries of one layer to the planned slots.
    ///
    /// # Errors
    /// Shapes or dtypes that are not the cache's; nothing is written.
    fn write_kv(&self, id: &PlanId, layer: usize, entries: KvEntries<'_>, stream: &Stream) -> Result<()>;
}

/// By name: a cache's bookkeeping is long, and behind a lock.
impl fmt::Debug for dyn PagedKv + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PagedKv({})", self.name())
    }
}
