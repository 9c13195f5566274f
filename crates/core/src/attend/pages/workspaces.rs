//! Scratch memory of plans: one workspace for each label and slot, as large as the plan needs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use mstar_kernels::plan::Workspace;
use mstar_kernels::{Device, Result};

use super::EagerSlotKey;

/// The workspaces of one resource. Each outlives any single step, grows when a plan of its label and slot needs more,
/// and is never larger than the largest of those plans has needed, or than what was foreseen.
#[derive(Debug)]
pub struct WorkspacePool {
    device: Device,
    foreseen: usize,
    workspaces: Mutex<HashMap<EagerSlotKey, Arc<Mutex<Workspace>>>>,
}

impl WorkspacePool {
    /// None yet. Each will be on `device`, and have `foreseen` bytes from the first, as
    /// [`workspace_bound`](super::workspace_bound) says of the largest step.
    pub fn on(device: Device, foreseen: usize) -> WorkspacePool {
        WorkspacePool { device, foreseen, workspaces: Mutex::default() }
    }

    /// The workspace of `key`, of at least `bytes` bytes.
    ///
    /// # Errors
    /// When the memory cannot be had; what was there stays.
    pub fn reserve(&self, key: &EagerSlotKey, bytes: usize) -> Result<Arc<Mutex<Workspace>>> {
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(workspace) = workspaces.get(key) {
            workspace.lock().unwrap_or_else(PoisonError::into_inner).reserve_bytes(bytes)?;
            return Ok(Arc::clone(workspace));
        }
        let workspace = Arc::new(Mutex::new(Workspace::on(self.device, bytes.max(self.foreseen))?));
        workspaces.insert(key.clone(), Arc::clone(&workspace));
        Ok(workspace)
    }

    /// Bytes held in all.
    pub fn bytes(&self) -> usize {
        let workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        workspaces.values().map(|w| w.lock().unwrap_or_else(PoisonError::into_inner).bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Slot;

    #[test]
    fn workspaces_are_per_label_and_slot_grow_and_are_kept() {
        let pool = WorkspacePool::on(Device::Cpu, 0);
        let key = |label: &str, slot| EagerSlotKey { label: label.into(), slot: Slot(slot) };
        let (small, large) = (640, 64_000);
        let first = pool.reserve(&key("main", 0), small).unwrap();
        assert_eq!(pool.bytes(), small);
        assert!(!Arc::ptr_eq(&first, &pool.reserve(&key("main", 1), small).unwrap()));
        assert!(!Arc::ptr_eq(&first, &pool.reserve(&key("cond", 0), small).unwrap()));
        assert!(Arc::ptr_eq(&first, &pool.reserve(&key("main", 0), large).unwrap()));
        assert_eq!(first.lock().unwrap().bytes(), large);
        pool.reserve(&key("main", 0), small).unwrap();
        assert_eq!(pool.bytes(), large + 2 * small, "it never shrinks");
    }

    #[test]
    fn what_was_foreseen_is_there_from_the_first() {
        let pool = WorkspacePool::on(Device::Cpu, 4096);
        let key = EagerSlotKey { label: "main".into(), slot: Slot(0) };
        pool.reserve(&key, 10).unwrap();
        assert_eq!(pool.bytes(), 4096);
    }
}
