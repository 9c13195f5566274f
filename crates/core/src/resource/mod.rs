//! What every resource does in a step's life, and the answers it may give.

mod engine;
mod ingest;
mod order;
mod outcome;
mod token;

pub use engine::{Abandoned, Engine, EngineOptions, PlanFailed, PromoteFailed};
pub use ingest::{AttentionOverrides, Ingest, KvOverrides, Override};
pub use order::dependency_order;
pub use outcome::{Admission, Outcome, Refusal, RefusalReason};
pub use token::{AdmittedStep, PlannedStep, PreplannedStep};

use crate::{RequestId, ResourceName, Result, Slot, Step, StepSerial};

/// Everything that a stored page depends on beyond its own tokens, from one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub Vec<u8>);

/// The step that a call is about.
#[derive(Clone, Copy, Debug)]
pub struct StepContext {
    /// The step's number.
    pub serial: StepSerial,
    /// The buffer set that its plans live in.
    pub slot: Slot,
    /// Whether an earlier step is still running: lengths are then those that its commit will leave.
    pub preplan: bool,
    /// Rows and tokens to pad to, when a captured graph (or its CPU twin) will run.
    pub bucket: Option<PaddedShape>,
}

/// The fixed shape of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PaddedShape {
    /// Rows, real and padded.
    pub rows: usize,
    /// Query tokens, real and padded.
    pub tokens: usize,
}

/// What became of a plan made ahead of its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promotion {
    /// Generations and lengths are those it was made for: it stands.
    Valid,
    /// Something moved: plan again.
    Stale,
}

/// A part of the model's attention state or work: a KV cache, an attention backend, an indexer.
///
/// Calls come in the order ingest, then for each step admit, plan, (run), commit or rollback. Calls take
/// `&self`: a resource locks its bookkeeping, never across a copy or a launch.
pub trait Resource: Send + Sync {
    /// Its name in the spec.
    fn name(&self) -> &ResourceName;

    /// Resources that must be admitted and planned before this one.
    fn depends_on(&self) -> Vec<ResourceName>;

    /// What a stored page depends on because of this resource; `None` says that nothing does, and the
    /// implementation's doc says why.
    fn fingerprint(&self) -> Option<Fingerprint>;

    /// Whether a matched prefix may skip this resource's work.
    fn prefix_skip_safe(&self) -> bool {
        true
    }

    /// Told once, when the engine is made: the fingerprints of all other resources, which its stored pages depend on too,
    /// and the names of those that do not let a matched prefix skip their work.
    ///
    /// # Errors
    /// When it cannot keep what its spec promised among these, such as a prefix index that nobody may use.
    fn bind(
        &self,
        others: &[(ResourceName, Option<Fingerprint>)],
        unskippable: &[ResourceName],
    ) -> Result<()> {
        let _ = (others, unskippable);
        Ok(())
    }

    /// Whether a request may ask this of it; what a resource does not take is refused before it is ingested.
    fn takes_override(&self, wanted: &Override) -> bool {
        let _ = wanted;
        false
    }

    /// Takes a request in. Idempotent.
    ///
    /// # Errors
    /// When the request cannot be taken.
    fn ingest_request(&self, ingest: &Ingest) -> Result<()>;

    /// Reserves what the step needs, or says why not and leaves everything as it was.
    ///
    /// # Errors
    /// A step that could never be admitted.
    fn admit(&self, cx: &StepContext, step: &Step) -> Result<Outcome>;

    /// Undoes [`Resource::admit`] and everything after it: lengths, pages, forks and labels are as before. A serial that
    /// it holds nothing for is ignored.
    fn rollback(&self, serial: StepSerial);

    /// Turns the admitted step into device work. Never waits for the device.
    ///
    /// # Errors
    /// When the work cannot be described to a kernel.
    fn plan(&self, cx: &StepContext, step: &Step) -> Result<()>;

    /// Whether a plan made ahead still stands, now that its turn has come.
    ///
    /// # Errors
    /// When there is no such plan.
    fn promote(&self, cx: &StepContext, step: &Step) -> Result<Promotion>;

    /// Keeps what the step did (or nothing, if it says `commit: false`) and clears its marks.
    ///
    /// # Errors
    /// A broken invariant only.
    fn commit(&self, serial: StepSerial, step: &Step) -> Result<()>;

    /// Empties a request's state; `free` gives its pages back too.
    ///
    /// # Errors
    /// An unknown request.
    fn reset_request(&self, request: &RequestId, free: bool) -> Result<()>;

    /// Forgets a request. Idempotent.
    ///
    /// # Errors
    /// When a step still holds it.
    fn remove_request(&self, request: &RequestId) -> Result<()>;

    /// Whether a step may be planned while the one before it runs.
    fn supports_preplan(&self) -> bool {
        true
    }

    /// Whether a slot must be fenced before it is planned again, since its staging memory may still be read.
    fn force_double_buffer(&self) -> bool {
        false
    }

    /// Sizes whatever captured replays will read. Called once per capturing runner: grows, never clobbers.
    ///
    /// # Errors
    /// When the memory cannot be had.
    fn build_accelerator_graph_buffers(&self, slots: usize, shape: PaddedShape) -> Result<()> {
        let _ = (slots, shape);
        Ok(())
    }

    /// Requests that this resource holds state for.
    fn tracked_requests(&self) -> Vec<RequestId>;
}
