//! An attention resource of a running model, alone or under an indexer: one call a layer, whichever it is.

use std::sync::Arc;

use mstar_core::attend::{
    IndexGeometry, SparseAttention, SparseWork, Work, attend, attend_sparse, sparse_capture_key,
};
use mstar_core::{Attention, Forward, PlanId, ResourceName};

use super::buffers::Views;
use super::verify::Shape;

/// An attention resource, and its part in the model.
pub(crate) struct Room {
    /// Its name, in messages and reports.
    pub(crate) name: ResourceName,
    /// What attends.
    pub(crate) attends: Attends,
    /// Its mathematics, for the oracle.
    pub(crate) shape: Shape,
    /// Its place among the model's attention resources.
    pub(crate) index: usize,
    /// The backend that serves it.
    pub(crate) backend: String,
}

/// What attends in a room.
pub(crate) enum Attends {
    /// One resource, every key.
    Dense(Arc<dyn Attention>),
    /// An indexer's pick; `dense` is the resource over the same cache that runs plans without one.
    Sparse {
        /// The resource of kind `dsa`.
        sparse: Arc<dyn SparseAttention>,
        /// The resource of kind `attention`, where the spec has one.
        dense: Option<Arc<dyn Attention>>,
    },
}

impl Room {
    /// The indexer's geometry, where there is one.
    pub(crate) fn indexer(&self) -> Option<&IndexGeometry> {
        match &self.attends {
            Attends::Dense(_) => None,
            Attends::Sparse { sparse, .. } => Some(sparse.index()),
        }
    }

    /// Attends the forward's layer into `views.out`. `write` says whether this room sees to it that the step's entries
    /// are in the cache; the rooms after it find them there.
    ///
    /// # Errors
    /// As the resources say.
    pub(crate) fn attend(
        &self,
        forward: &mut Forward<'_>,
        views: Views<'_>,
        write: bool,
    ) -> mstar_core::Result<()> {
        let Views { q, entries, indexed, out } = views;
        match &self.attends {
            Attends::Dense(attention) => {
                let fresh = (write || !attention.requires_kv_write()).then_some(entries);
                attend(&**attention, forward, q, fresh, out)
            }
            Attends::Sparse { sparse, dense } => {
                let indexed = indexed.filter(|_| sparse.index().is_full(forward.layer()));
                let fresh = write.then_some(entries);
                attend_sparse(&**sparse, dense.as_deref(), forward, q, fresh, indexed, out)
            }
        }
    }

    /// The least that one layer of `plan` costs, selecting where it is full included.
    pub(crate) fn work(&self, plan: &PlanId, layer: usize) -> Work {
        match &self.attends {
            Attends::Dense(attention) => attention.work(plan),
            Attends::Sparse { sparse, .. } => {
                let (selecting, mut least) = sparse.work(plan);
                if sparse.index().is_full(layer) {
                    let Work { bytes_read, bytes_written, flops, .. } = selecting;
                    least += Work { tokens: 0, bytes_read, bytes_written, flops };
                }
                least
            }
        }
    }

    /// What capturing [`Room::attend`] over `plan` takes for granted; `None` where it cannot be captured.
    pub(crate) fn capture_key(&self, plan: &PlanId) -> Option<u64> {
        match &self.attends {
            Attends::Dense(attention) => attention.capture_key(plan),
            Attends::Sparse { sparse, dense } => sparse_capture_key(&**sparse, dense.as_deref(), plan),
        }
    }

    /// Brings about on the host what [`Room::attend`] does there, before a captured region of it runs again.
    ///
    /// # Errors
    /// As the resources say.
    pub(crate) fn replaying(&self, forward: &mut Forward<'_>) -> mstar_core::Result<()> {
        match &self.attends {
            Attends::Dense(_) => Ok(()),
            Attends::Sparse { sparse, .. } => sparse.replaying(forward),
        }
    }

    /// Writes the layer's entries beside a region that captures [`Room::attend`], where the resource's own run would write them.
    /// Returns whether it did.
    ///
    /// # Errors
    /// As the resource says.
    pub(crate) fn write_fresh(&self, forward: &Forward<'_>, views: &Views<'_>) -> mstar_core::Result<bool> {
        match &self.attends {
            Attends::Dense(attention) if !attention.requires_kv_write() => {
                attention.write_fresh(forward, views.entries)
            }
            _ => Ok(false),
        }
    }

    /// Attends what was written before, with the layer's queries alone.
    ///
    /// # Errors
    /// As the resource says.
    pub(crate) fn attend_context(
        &self,
        forward: &mut Forward<'_>,
        views: Views<'_>,
    ) -> mstar_core::Result<()> {
        let Attends::Dense(attention) = &self.attends else {
            unreachable!("an indexer picks among a request's own keys")
        };
        attend(&**attention, forward, views.q, None, views.out)
    }

    /// The resource of kind `dsa` when it picks for `plan`: where some query sees more than `index_topk` keys.
    ///
    /// # Errors
    /// A missing plan.
    pub(crate) fn selects(&self, plan: &PlanId) -> mstar_core::Result<Option<&Arc<dyn SparseAttention>>> {
        match &self.attends {
            Attends::Sparse { sparse, .. } if sparse.needs_selection(plan)? => Ok(Some(sparse)),
            _ => Ok(None),
        }
    }

    /// Who ran `plan`, and by which kernels.
    ///
    /// # Errors
    /// A missing plan.
    pub(crate) fn kernel(&self, plan: &PlanId) -> mstar_core::Result<String> {
        let (name, kernel) = match (&self.attends, self.selects(plan)?) {
            (Attends::Dense(attention), _) => (&self.name, attention.kernel(plan)),
            (Attends::Sparse { dense: Some(dense), .. }, None) => (dense.name(), dense.kernel(plan)),
            (Attends::Sparse { sparse, .. }, _) => (sparse.name(), sparse.kernel(plan)),
        };
        let kernel = kernel.unwrap_or_else(|| self.backend.clone());
        // What follows a colon counts this plan's rows; which kernels ran is what comes before it.
        Ok(format!("{name}: {}", kernel.split(": ").next().unwrap_or_default()))
    }

    /// Pairs of a query and a key over all `layers` of `plan`; `None` without an indexer.
    pub(crate) fn pairs(&self, plan: &PlanId, layers: usize) -> Option<SparseWork> {
        let Attends::Sparse { sparse, .. } = &self.attends else { return None };
        let SparseWork { scored, attended, dense } = sparse.sparse_work(plan);
        let (full, layers) = (sparse.index().full_layers.len() as u64, layers as u64);
        Some(SparseWork { scored: scored * full, attended: attended * layers, dense: dense * layers })
    }
}
