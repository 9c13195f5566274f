//! What the requests' own keys and values lie in: pages or a ring of frames. Either packs a step's rows into plans.

use std::ops::Range;
use std::sync::Arc;

use mstar_core::kv::{KvPlan, PagedKv, PagedKvCache, RingCache, RingKv, RingPlan};
use mstar_core::{Label, PlanId, RequestId, StepSerial};

/// The cache of the requests' own streams.
pub(crate) enum OwnCache {
    /// Streams that grow page by page.
    Pages(Arc<PagedKvCache>),
    /// Worlds of frames, overwritten in place.
    Ring(Arc<RingCache>),
}

/// The packed rows of one plan label.
pub(crate) struct PackedPlan {
    /// Which plan it is.
    pub(crate) id: PlanId,
    /// Query tokens, padding among them.
    pub(crate) tokens: usize,
    /// The rows, padding left out.
    pub(crate) rows: Vec<PackedRow>,
}

/// One row of a plan.
pub(crate) struct PackedRow {
    /// Whose.
    pub(crate) request: RequestId,
    /// Its stream.
    pub(crate) label: Label,
    /// Position of its first query in the stream.
    pub(crate) start: usize,
    /// Its tokens in the plan.
    pub(crate) tokens: Range<usize>,
}

impl OwnCache {
    /// The pages, where it has any.
    pub(crate) fn pages(&self) -> Option<&Arc<PagedKvCache>> {
        match self {
            OwnCache::Pages(pages) => Some(pages),
            OwnCache::Ring(_) => None,
        }
    }

    /// The ring, where it is one.
    pub(crate) fn ring(&self) -> Option<&Arc<RingCache>> {
        match self {
            OwnCache::Pages(_) => None,
            OwnCache::Ring(ring) => Some(ring),
        }
    }

    /// The labels that a step was planned under.
    ///
    /// # Errors
    /// When the step was not planned.
    pub(crate) fn plan_labels(&self, serial: StepSerial) -> mstar_core::Result<Vec<Label>> {
        match self {
            OwnCache::Pages(pages) => pages.plan_labels(serial),
            OwnCache::Ring(ring) => ring.plan_labels(serial),
        }
    }

    /// The rows of one plan.
    ///
    /// # Errors
    /// A missing plan.
    pub(crate) fn packed(&self, id: &PlanId) -> mstar_core::Result<PackedPlan> {
        Ok(match self {
            OwnCache::Pages(pages) => PackedPlan::of_pages(&*pages.kv_plan(id)?),
            OwnCache::Ring(ring) => {
                PackedPlan::of_ring(&*ring.ring_plan(id)?, ring.config().tokens_per_frame)
            }
        })
    }
}

impl PackedPlan {
    /// The rows of a plan over pages.
    pub(crate) fn of_pages(plan: &KvPlan) -> PackedPlan {
        let rows =
            plan.rows[..plan.real_rows].iter().zip(plan.qo_indptr.windows(2)).map(|(row, ends)| PackedRow {
                request: row.request.clone(),
                label: row.label.clone(),
                start: row.kv_len - row.q_len,
                tokens: ends[0] as usize..ends[1] as usize,
            });
        PackedPlan { id: plan.id.clone(), tokens: plan.slots.len(), rows: rows.collect() }
    }

    /// The rows of a plan over a ring, a frame each; frames count from the beginning of their world.
    fn of_ring(plan: &RingPlan, tokens_per_frame: usize) -> PackedPlan {
        let rows =
            plan.rows[..plan.real_rows].iter().zip(plan.qo_indptr.windows(2)).map(|(row, ends)| PackedRow {
                request: row.request.clone(),
                label: plan.id.label.clone(),
                start: row.frame_pos as usize * tokens_per_frame,
                tokens: ends[0] as usize..ends[1] as usize,
            });
        let tokens = plan.qo_indptr.last().map_or(0, |&end| end as usize);
        PackedPlan { id: plan.id.clone(), tokens, rows: rows.collect() }
    }
}
