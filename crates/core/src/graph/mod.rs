//! Buckets, slots and leases of captured forwards, and their CPU twin.
//!
//! A captured graph has a fixed shape: so many rows, so many query tokens. A step is padded to the smallest
//! [`Bucket`] of its walk that holds it, and runs in one of the bucket's buffer sets ([`Slot`](crate::Slot)); its
//! hold on that set is a [`Lease`], which the step's token carries and gives back when the step ends. Two
//! slots let a step be planned while the one before it still reads the other. On the CPU nothing is captured:
//! the same padded plans run as they are, so that padding and slots are exercised everywhere.

mod bucket;
mod capacity;
mod captured;
mod lease;
mod warmup;

pub use bucket::{Bucket, Buckets, padded_q_lens, step_shape};
pub use capacity::captured_page_capacity;
pub use captured::{Captured, Ran, Region};
pub use lease::{Fence, Lease, NoFence};
pub use warmup::warm_up;
