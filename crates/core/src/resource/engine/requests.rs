//! Requests as they pass through every resource: in, emptied, out, and the dummies of a warm-up.

use std::sync::Arc;

use super::Engine;
use crate::graph::Bucket;
use crate::resource::Ingest;
use crate::{Error, RequestId, Resource, Result};

impl Engine {
    /// Takes a request into every resource. Idempotent: resources that hold it already are left as they are.
    ///
    /// # Errors
    /// An id of the namespace of dummy requests; an override that its resource does not take, or of no resource; else
    /// what a resource says, and the resources before it have forgotten the request again.
    pub fn ingest(&self, ingest: &Ingest) -> Result<()> {
        if ingest.request.is_dummy() {
            let why =
                format!("{} lies in the namespace reserved for warm-ups; choose another id", ingest.request);
            return Err(Error::Order { call: "Engine::ingest", why });
        }
        self.ingest_any(ingest)
    }

    fn ingest_any(&self, ingest: &Ingest) -> Result<()> {
        for (name, wanted) in &ingest.overrides {
            let resource = self.find(name).ok_or_else(|| Error::UnknownResource {
                resource: name.clone(),
                known: self.shared.known(),
            })?;
            if !resource.takes_override(wanted) {
                let why = format!("request {} overrides what it does not offer: {wanted:?}", ingest.request);
                return Err(Error::Step { resource: name.clone(), why });
            }
        }
        let mut fresh: Vec<&Arc<dyn Resource>> = Vec::new();
        for resource in &self.shared.resources {
            let known = resource.tracked_requests().contains(&ingest.request);
            if let Err(error) = resource.ingest_request(ingest) {
                for earlier in fresh.into_iter().rev() {
                    earlier.remove_request(&ingest.request)?;
                }
                return Err(error);
            }
            if !known {
                fresh.push(resource);
            }
        }
        Ok(())
    }

    /// Empties a request's state in every resource, dependents first; `free` gives its pages back too.
    ///
    /// # Errors
    /// What a resource says.
    pub fn reset(&self, request: &RequestId, free: bool) -> Result<()> {
        self.shared.resources.iter().rev().try_for_each(|r| r.reset_request(request, free))
    }

    /// Forgets a request in every resource, dependents first. Idempotent.
    ///
    /// # Errors
    /// [`Error::Order`] while a step that names it is outstanding; no resource has forgotten it then.
    pub fn remove(&self, request: &RequestId) -> Result<()> {
        if let Some(step) = self.shared.lock().iter().find(|step| step.step.names(request)) {
            let why =
                format!("step {} names request {request}; commit, abort or clear it first", step.serial);
            return Err(Error::Order { call: "Engine::remove", why });
        }
        self.shared.resources.iter().rev().try_for_each(|r| r.remove_request(request))
    }

    /// Takes the `n` dummy requests of a warm-up in, and says their ids.
    ///
    /// # Errors
    /// What a resource says; then none is left.
    pub fn ingest_dummies(&self, n: usize) -> Result<Vec<RequestId>> {
        let ids: Vec<RequestId> = (0..n).map(RequestId::dummy).collect();
        for (i, id) in ids.iter().enumerate() {
            if let Err(error) = self.ingest_any(&Ingest::new(id.clone())) {
                ids[..i].iter().try_for_each(|id| self.remove(id))?;
                return Err(error);
            }
        }
        Ok(ids)
    }

    /// Proves that a warm-up left no dummy request in any resource.
    ///
    /// # Errors
    /// [`Error::DummyRequestsLeft`].
    pub fn post_warmup_validate(&self) -> Result<()> {
        for resource in &self.shared.resources {
            let mut requests = resource.tracked_requests();
            requests.retain(RequestId::is_dummy);
            if !requests.is_empty() {
                requests.sort();
                return Err(Error::DummyRequestsLeft { resource: resource.name().clone(), requests });
            }
        }
        Ok(())
    }

    /// Sizes what padded forwards will read, for every bucket. Repeated calls grow and never clobber.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn build_accelerator_graph_buffers(&self, buckets: impl IntoIterator<Item = Bucket>) -> Result<()> {
        for bucket in buckets {
            for resource in &self.shared.resources {
                resource.build_accelerator_graph_buffers(self.shared.options.slots, bucket.shape)?;
            }
        }
        Ok(())
    }
}
