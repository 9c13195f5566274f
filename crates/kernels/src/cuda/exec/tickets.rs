//! Tickets by which the last block to arrive knows that it is the last: zeros on a device, which every run leaves as zeros.
//!
//! Runs of one list may be under way at once only where each has a workspace of its own, so that a workspace is what tells their
//! tickets apart. A run whose workspace came too late has none, and merges are launched behind it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Buffer, Device, Result};

/// Workspaces that have tickets.
const SETS: usize = 8;

/// The tickets of a list.
#[derive(Default)]
pub(super) struct Tickets {
    zeros: Option<Buffer>,
    /// Tickets of each set.
    each: usize,
    /// Which workspace has which set; 0: nobody's.
    of: [AtomicU64; SETS],
    /// Outgrown ones, which runs under way may still take. Their sizes double.
    outgrown: Vec<Buffer>,
}

impl Tickets {
    /// Room for so many tickets. Belongs to planning.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub(super) fn reserve(&mut self, device: Device, tickets: usize) -> Result<()> {
        if tickets <= self.each {
            return Ok(());
        }
        let each = tickets.max(2 * self.each);
        let zeros = Buffer::zeroed_on(device, SETS * each * size_of::<u32>())?;
        self.outgrown.extend(self.zeros.replace(zeros));
        self.each = each;
        Ok(())
    }

    /// Nobody has a set any more. Not for lists over which captured runs go: these know their tickets' address.
    pub(super) fn release(&mut self) {
        for of in &mut self.of {
            *of.get_mut() = 0;
        }
    }

    /// Where the first set lies.
    pub(super) fn address(&self) -> usize {
        self.zeros.as_ref().map_or(0, |zeros| zeros.as_ptr().addr())
    }

    /// Where the tickets of a run with the workspace at this address lie; 0 when there are none.
    pub(super) fn of(&self, workspace: u64) -> u64 {
        let Some(zeros) = &self.zeros else { return 0 };
        let mine = |of: &AtomicU64| {
            let taken = of.compare_exchange(0, workspace, Ordering::Relaxed, Ordering::Relaxed);
            taken.is_ok() || taken == Err(workspace)
        };
        let set = self.of.iter().position(mine);
        set.map_or(0, |set| zeros.as_ptr() as u64 + (set * self.each * size_of::<u32>()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_keeps_its_set_and_one_too_many_has_none() {
        let mut tickets = Tickets::default();
        assert_eq!(tickets.of(64), 0, "no tickets are needed");
        tickets.reserve(Device::Cpu, 3).unwrap();
        let sets: Vec<u64> = (1..=SETS as u64).map(|workspace| tickets.of(64 * workspace)).collect();
        assert!(sets.windows(2).all(|pair| pair[0] + 12 == pair[1]));
        assert_eq!(tickets.of(128), sets[1]);
        assert_eq!(tickets.of(1 << 20), 0);
        tickets.release();
        assert_eq!(tickets.of(1 << 20), sets[0]);
    }
}
