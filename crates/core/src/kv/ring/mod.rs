//! A cache that is overwritten in place: one request's last frames, a fixed number of them, for world models and long
//! video.
//!
//! A *world* is one request's span. In each layer it has `ring_frames` frame slots and, after them, one scratch frame.
//! A pass writes its frame's keys and values to the scratch, of every layer, and attends its world's committed slots
//! and the scratch. When a step commits a frame that the layer keeps, the scratch is copied to the frame's slot: so a
//! step that is aborted, or never commits (a denoise pass), leaves every slot as it was, and the next pass overwrites the
//! scratch. A committing pass does not see the slot that its frame will take, so copying at the end shows the pass
//! exactly what copying at the start would.
//!
//! Frames are committed one after another from 0, so what a pass may see follows from its frame number alone
//! ([`RingGeometry::visible`]). The rule is the one of the recorded cases' `ring` operation.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `config` | geometry by layer, its checks, bytes |
//! | `visible` | which slots a pass sees: growing, then periodic |
//! | `plan` | packed rows and their visible blocks |
//! | `slots` | where a pass's tokens go, as a device reads it |
//! | `memory` | keys and values of every layer; copies, zeros, snapshots; the unsafe lines |
//! | `ledger` | who owns which world, clocks, outstanding steps; under one lock |
//! | `cache`, `snapshot` | the resource; one world on the host |
//! | `view` | what backends see |

mod cache;
mod config;
mod ledger;
mod memory;
mod plan;
mod slots;
mod snapshot;
mod view;
mod visible;

pub use cache::RingCache;
pub use config::{RING_BLOCK, RingConfig, RingGeometry, RingGroups};
pub use plan::{RingBlocks, RingPlan, RingRow};
pub use snapshot::WorldSnapshot;
pub use view::{RingKv, RingLayer, RingView};
pub use visible::{Phase, VisibleFrames};
