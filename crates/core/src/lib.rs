//! What an engine does between a request and a kernel: specs, resources, steps, plans and KV caches.
//!
//! A forward is a step. It goes through **declare, admit, plan, run (once a layer), commit**, in that order by
//! type. [`Step`] is plain data; each [`Resource`] reserves what it needs when the step is admitted, turns
//! it into device work when it is planned, and keeps or gives back when it is committed or aborted. This
//! crate names no attention backend: those implement [`Attention`] and register a factory.
//!
//! | room | what is in it |
//! | --- | --- |
//! | [`id`] | names of requests, labels and resources |
//! | [`step`] | segments, forks, declarations, serials, plan ids |
//! | [`resource`] | what every resource does; admission outcomes; the engine that runs them in order |
//! | [`kv`] | page pool, streams, prefix index, offload, the paged store and its plans |
//! | [`mod@attend`] | the one call a layer makes; backends and how one is chosen |
//! | [`graph`] | buckets, slots, leases and padded rows |
//! | [`spec`] | the value tree with key paths, and the checked spec |

pub mod attend;
pub mod error;
pub mod graph;
pub mod id;
pub mod kv;
pub mod resource;
pub mod spec;
pub mod step;

pub use attend::{Attention, AttnOut, Forward, Fresh, Query, attend};
pub use error::{Error, Result};
pub use id::{Label, RequestId, ResourceName};
pub use resource::{
    Admission, AdmittedStep, Engine, Ingest, Outcome, PlannedStep, PreplannedStep, Refusal, RefusalReason,
    Resource,
};
pub use step::{PlanId, Segment, Slot, Step, StepSerial};
