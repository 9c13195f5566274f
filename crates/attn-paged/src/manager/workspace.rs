//! Scratch memory of plans: one workspace for each label and slot, as large as the plan needs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::EagerSlotKey;
use crate::{Plan, Result, Workspace};

/// The workspaces of one resource. Each outlives any single step, grows when a plan of its label and slot needs more,
/// and is never larger than the largest of those plans has needed, or than what was foreseen.
#[derive(Debug, Default)]
pub struct WorkspacePool {
    foreseen: usize,
    workspaces: Mutex<HashMap<EagerSlotKey, Arc<Mutex<Workspace>>>>,
}

impl WorkspacePool {
    /// None yet.
    pub fn new() -> WorkspacePool {
        WorkspacePool::default()
    }

    /// None yet; each will have `foreseen` bytes from the first, as [`workspace_bound`](super::workspace_bound) says of
    /// the largest step.
    pub fn with_bound(foreseen: usize) -> WorkspacePool {
        WorkspacePool { foreseen, ..WorkspacePool::default() }
    }

    /// The workspace of `key`, with room for `plan`.
    ///
    /// # Errors
    /// When the memory cannot be had; what was there stays.
    pub fn reserve(&self, key: &EagerSlotKey, plan: &Plan) -> Result<Arc<Mutex<Workspace>>> {
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(workspace) = workspaces.get(key) {
            workspace.lock().unwrap_or_else(PoisonError::into_inner).reserve(plan)?;
            return Ok(Arc::clone(workspace));
        }
        let workspace =
            Arc::new(Mutex::new(Workspace::with_bytes(plan.workspace_bytes().max(self.foreseen))?));
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
    use mstar_core::Slot;

    use super::*;
    use crate::{DType, Geometry, PageTable, PlanOptions, Variant};

    /// Rows of one token over `pages` pages of 64 slots each.
    fn plan(rows: usize, pages: usize) -> Plan {
        let geometry = Geometry {
            num_qo_heads: 32,
            num_kv_heads: 2,
            head_dim_qk: 256,
            head_dim_vo: 256,
            page_size: 64,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
        };
        let qo_indptr: Vec<i32> = (0..=rows as i32).collect();
        let kv_indptr: Vec<i32> = qo_indptr.iter().map(|row| row * pages as i32).collect();
        let table = PageTable {
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &vec![0; rows * pages],
            kv_last_page_len: &vec![64; rows],
            num_pages: 1,
            ..PageTable::default()
        };
        let options = PlanOptions { workers: 2, cascade: false, ..PlanOptions::default() };
        Plan::new(&geometry, &Variant::causal(256), &table, &options).unwrap()
    }

    #[test]
    fn workspaces_are_per_label_and_slot_grow_and_are_kept() {
        let pool = WorkspacePool::new();
        let key = |label: &str, slot| EagerSlotKey { label: label.into(), slot: Slot(slot) };
        let (small, large) = (plan(1, 1), plan(1, 256));
        assert!(small.workspace_bytes() < large.workspace_bytes());
        let first = pool.reserve(&key("main", 0), &small).unwrap();
        assert_eq!(pool.bytes(), small.workspace_bytes());
        assert!(!Arc::ptr_eq(&first, &pool.reserve(&key("main", 1), &small).unwrap()));
        assert!(!Arc::ptr_eq(&first, &pool.reserve(&key("cond", 0), &small).unwrap()));
        assert!(Arc::ptr_eq(&first, &pool.reserve(&key("main", 0), &large).unwrap()));
        assert_eq!(first.lock().unwrap().bytes(), large.workspace_bytes());
        pool.reserve(&key("main", 0), &small).unwrap();
        assert_eq!(pool.bytes(), large.workspace_bytes() + 2 * small.workspace_bytes(), "it never shrinks");
    }

    #[test]
    fn f18_the_workspace_of_many_short_rows_stays_small() {
        assert!(plan(512, 1).workspace_bytes() < 64 << 20);
    }
}
