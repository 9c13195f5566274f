//! Where a pass's tokens go, as a device reads it: for each plan label and slot one array a geometry of layers, at an address that
//! stays, so that a captured pass writes the worlds of whatever step it is replayed for.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use mstar_kernels::{DType, Device, Staged, Stream, TensorRef};

use super::{RingConfig, RingGroups, RingPlan};
use crate::{Label, Result, Slot};

type Arrays = Arc<Mutex<Vec<Staged>>>;

/// The places of planned tokens in a layer, `[T]` i64: token `i` of frame `f` of the layer, counted over all worlds, is
/// `f * F + i`; -1 for rows without a world. On the CPU there are none.
#[derive(Debug)]
pub(super) struct StagedFrames {
    stream: Stream,
    arrays: Mutex<HashMap<(Slot, Label), Arrays>>,
}

impl StagedFrames {
    /// None yet.
    pub(super) fn on(stream: Stream) -> StagedFrames {
        StagedFrames { stream, arrays: Mutex::default() }
    }

    /// Enqueues a plan's places. Never waits.
    ///
    /// # Errors
    /// Memory that cannot be had; what the device says.
    pub(super) fn stage(&self, plan: &RingPlan, config: &RingConfig, groups: &RingGroups) -> Result<()> {
        if self.stream.device() == Device::Cpu {
            return Ok(());
        }
        let key = (plan.id.slot, plan.id.label.clone());
        let arrays = {
            let mut all = self.arrays.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.entry(key).or_default())
        };
        let mut arrays = arrays.lock().unwrap_or_else(PoisonError::into_inner);
        let frame = config.tokens_per_frame;
        let bytes = plan.rows.len() * frame * DType::I64.size();
        while arrays.len() < groups.geometries.len() {
            arrays.push(Staged::with_capacity(&self.stream, bytes)?);
        }
        for (geometry, staged) in groups.geometries.iter().zip(arrays.iter_mut()) {
            staged.set_with(&self.stream, bytes, |bytes| {
                for (row, bytes) in plan.rows.iter().zip(bytes.chunks_exact_mut(frame * DType::I64.size())) {
                    let first = row.world.map(|world| {
                        let scratch = world * geometry.frames() + geometry.ring_frames;
                        (scratch * frame) as i64
                    });
                    for (token, place) in bytes.chunks_exact_mut(DType::I64.size()).enumerate() {
                        let at = first.map_or(-1, |first| first + token as i64);
                        place.copy_from_slice(&at.to_ne_bytes());
                    }
                }
            })?;
        }
        Ok(())
    }

    /// Calls `read` with the places that a plan's tokens have in layers of a group.
    ///
    /// # Errors
    /// What `read` says.
    pub(super) fn of<T>(
        &self,
        plan: &RingPlan,
        group: usize,
        read: impl FnOnce(TensorRef<'_>) -> Result<T>,
    ) -> Result<T> {
        let key = (plan.id.slot, plan.id.label.clone());
        let arrays = self.arrays.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let arrays = arrays.expect("a plan's places were staged when it was made");
        let arrays = arrays.lock().unwrap_or_else(PoisonError::into_inner);
        let staged = &arrays[group];
        read(staged.tensor(DType::I64, &[staged.len() / DType::I64.size()])?)
    }
}
