//! Plans in typed storage: a plan id leads to the plan of that very step, or to an error.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use mstar_core::attend::Work;
use mstar_core::attend::pages::EagerSlotKey;
use mstar_core::resource::PaddedShape;
use mstar_core::{Error, PlanId, RequestId, ResourceName, Result, StepSerial};

use super::memory::Memory;
use crate::Plan;

/// What layers read of a planned label.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) plan: Plan,
    pub(crate) memory: Arc<Mutex<Memory>>,
    /// Of selecting in one full layer, and of attending one layer.
    pub(crate) work: (Work, Work),
}

impl Stored {
    /// The memory, for one call.
    ///
    /// # Errors
    /// [`Error::Order`] when another call has it. Never waits: the layer that has it may be waiting for this very thread.
    pub(crate) fn lock(&self, call: &'static str) -> Result<MutexGuard<'_, Memory>> {
        match self.memory.try_lock() {
            Ok(memory) => Ok(memory),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let why = "another layer of this plan label is running; run one after the other".into();
                Err(Error::Order { call, why })
            }
        }
    }
}

/// Plans of one label and slot, made one after another in the same memory.
#[derive(Debug)]
struct Place {
    /// Whose plan it holds now; `None` between steps.
    serial: Option<StepSerial>,
    stored: Arc<Stored>,
}

/// The plans of one resource.
#[derive(Debug, Default)]
pub(crate) struct Places {
    by_key: Mutex<HashMap<EagerSlotKey, Place>>,
    captured: Mutex<Option<PaddedShape>>,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, HashMap<EagerSlotKey, Place>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the plan `id` by `make`, from the one before under its label and slot where nobody holds that any more, else
    /// from its memory. A refusal leaves no plan there.
    ///
    /// # Errors
    /// What `make` says.
    pub(crate) fn plan(
        &self,
        id: &PlanId,
        make: impl FnOnce(Option<Arc<Stored>>) -> Result<Arc<Stored>>,
    ) -> Result<()> {
        let key = EagerSlotKey::from(id);
        let mut places = self.lock();
        let before = places.remove(&key).map(|place| place.stored);
        let stored = make(before)?;
        places.insert(key, Place { serial: Some(id.serial), stored });
        Ok(())
    }

    /// The plan of this very id.
    ///
    /// # Errors
    /// [`Error::UnknownPlan`].
    pub(crate) fn get(&self, name: &ResourceName, id: &PlanId) -> Result<Arc<Stored>> {
        match self.lock().get(&EagerSlotKey::from(id)) {
            Some(place) if place.serial == Some(id.serial) => Ok(Arc::clone(&place.stored)),
            _ => {
                Err(Error::UnknownPlan { resource: name.clone(), label: id.label.clone(), serial: id.serial })
            }
        }
    }

    /// Whether a step has plans here.
    pub(crate) fn has(&self, serial: StepSerial) -> bool {
        self.lock().values().any(|place| place.serial == Some(serial))
    }

    /// Whether a planned step has rows of a request.
    pub(crate) fn names(&self, request: &RequestId) -> bool {
        let planned = |place: &&Place| place.serial.is_some();
        let names =
            |place: &Place| place.stored.plan.rows().spans.iter().any(|span| span.request_id == *request);
        self.lock().values().filter(planned).any(names)
    }

    /// Forgets that a step was planned; memory stays, for the next.
    pub(crate) fn forget(&self, serial: StepSerial) {
        for place in self.lock().values_mut().filter(|place| place.serial == Some(serial)) {
            place.serial = None;
        }
    }

    /// Notes the largest shape that will be asked for.
    pub(crate) fn capture(&self, shape: PaddedShape) {
        let mut captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        let had = captured.unwrap_or(shape);
        let most = PaddedShape { rows: had.rows.max(shape.rows), tokens: had.tokens.max(shape.tokens) };
        *captured = Some(most);
    }

    /// The largest shape that was asked for.
    pub(crate) fn captured(&self) -> Option<PaddedShape> {
        *self.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of memory that plans hold.
    pub(crate) fn bytes(&self) -> usize {
        let bytes =
            |place: &Place| place.stored.memory.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        self.lock().values().map(bytes).sum()
    }
}
