//! Where a step's tokens go, as the device reads it: one array a plan label and slot, at an address that stays.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mstar_kernels::{DType, Device, Staged, Stream, TensorRef};

use super::KvPlan;
use crate::{Label, Result, Slot};

type Arrays = HashMap<(Slot, Label), Arc<Mutex<Staged>>>;

/// The cache slots of planned tokens, `[T]` i64, on a device. On the CPU a plan's own array is read.
#[derive(Debug)]
pub(super) struct StagedSlots {
    stream: Stream,
    arrays: Mutex<Arrays>,
}

impl StagedSlots {
    /// None yet.
    pub(super) fn on(stream: Stream) -> StagedSlots {
        StagedSlots { stream, arrays: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Arrays> {
        self.arrays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a plan's slots. Never waits.
    ///
    /// # Errors
    /// Memory that cannot be had; what the device says.
    pub(super) fn stage(&self, plan: &KvPlan) -> Result<()> {
        if self.stream.device() == Device::Cpu {
            return Ok(());
        }
        let bytes: &[u8] = bytemuck::cast_slice(&plan.slots);
        let mut arrays = self.lock();
        let key = (plan.id.slot, plan.id.label.clone());
        let staged = match arrays.get(&key) {
            Some(staged) => Arc::clone(staged),
            None => {
                let made = Arc::new(Mutex::new(Staged::with_capacity(&self.stream, bytes.len())?));
                arrays.insert(key, Arc::clone(&made));
                made
            }
        };
        drop(arrays);
        let mut staged = staged.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(staged.set(&self.stream, bytes)?)
    }

    /// Where the device reads a plan's slots; `None` on the CPU and for a plan that was not staged.
    pub(super) fn address(&self, slot: Slot, label: &Label) -> Option<usize> {
        let staged = self.lock().get(&(slot, label.clone())).cloned()?;
        let staged = staged.lock().unwrap_or_else(PoisonError::into_inner);
        Some(staged.address().addr())
    }

    /// Calls `read` with the slots of a plan.
    ///
    /// # Errors
    /// What `read` says.
    pub(super) fn of<T>(&self, plan: &KvPlan, read: impl FnOnce(TensorRef<'_>) -> Result<T>) -> Result<T> {
        let shape = [plan.slots.len()];
        if self.stream.device() == Device::Cpu {
            return read(TensorRef::from_slice(&plan.slots, &shape)?);
        }
        let staged = self.lock().get(&(plan.id.slot, plan.id.label.clone())).cloned();
        let staged = staged.expect("a plan's slots were staged when it was made");
        let staged = staged.lock().unwrap_or_else(PoisonError::into_inner);
        read(staged.tensor(DType::I64, &shape)?)
    }
}
