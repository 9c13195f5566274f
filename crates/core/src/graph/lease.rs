//! A step's hold on a bucket's buffer set, and what has to pass before the set is used again.

use std::fmt;

use super::Bucket;
use crate::resource::PaddedShape;
use crate::{Result, Slot};

/// A step's hold on one buffer set of one bucket. Every region of a forward that was captured in pieces runs under the
/// same lease. It ends with the step's token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    bucket: Bucket,
    slot: Slot,
}

impl Lease {
    pub(crate) fn new(bucket: Bucket, slot: Slot) -> Lease {
        Lease { bucket, slot }
    }

    /// The bucket.
    pub fn bucket(&self) -> &Bucket {
        &self.bucket
    }

    /// Rows and tokens that the step is padded to.
    pub fn shape(&self) -> PaddedShape {
        self.bucket.shape
    }

    /// The buffer set.
    pub fn slot(&self) -> Slot {
        self.slot
    }
}

impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in slot {}", self.bucket, self.slot.0)
    }
}

/// Waits until the device has read everything that was staged for a slot. The engine asks for it before a slot is
/// planned again, when a resource reports [`force_double_buffer`](crate::Resource::force_double_buffer) and no
/// preplan alternates the slots.
pub trait Fence: Send + Sync {
    /// Returns once nothing in flight reads `slot`'s staging memory.
    ///
    /// # Errors
    /// When the device reports a failure of the work waited for.
    fn wait(&self, slot: Slot) -> Result<()>;
}

/// The CPU's fence: work has ended when its call returns.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoFence;

impl Fence for NoFence {
    fn wait(&self, _: Slot) -> Result<()> {
        Ok(())
    }
}
