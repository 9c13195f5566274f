//! What can be wrong with a spec, a step or a call. "No pages left" is not here: it is an
//! [`Outcome`](crate::Outcome).

use crate::{Label, RequestId, ResourceName, StepSerial};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A misuse or a failure; the state is as it was before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] mstar_kernels::Error),
    /// A page operation that would have given a page two owners; nothing was changed.
    #[error(transparent)]
    Pages(#[from] crate::kv::PageError),
    /// An attention backend refused or failed.
    #[error("{name}: {said}")]
    Backend {
        /// The resource or backend.
        name: String,
        /// What it said. It is part of this message, so it is no `source`: whoever prints a chain of causes would print
        /// it twice.
        said: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A spec was refused.
    #[error(transparent)]
    Spec(#[from] crate::spec::SpecError),
    /// Two resources of one name.
    #[error("two resources are called {resource}; names must be unique")]
    DuplicateResource {
        /// The name.
        resource: ResourceName,
    },
    /// A resource that depends on one that does not exist.
    #[error("{resource} depends on {missing}, which does not exist; there are: {}", listed(known))]
    MissingDependency {
        /// The resource that depends.
        resource: ResourceName,
        /// What it names.
        missing: ResourceName,
        /// The names that there are.
        known: Vec<ResourceName>,
    },
    /// Resources that depend on each other.
    #[error("resources depend on each other in a circle: {}", joined(path, " -> "))]
    DependencyCycle {
        /// The circle, its first name repeated at the end.
        path: Vec<ResourceName>,
    },
    /// A name that no resource has, in a step or a request's overrides.
    #[error("no resource is called {resource}; there are: {}", listed(known))]
    UnknownResource {
        /// The name.
        resource: ResourceName,
        /// The names that there are.
        known: Vec<ResourceName>,
    },
    /// Dummy requests of a warm-up that a resource still holds.
    #[error("{resource}: dummy requests are left after the warm-up: {}", joined(requests, ", "))]
    DummyRequestsLeft {
        /// The resource.
        resource: ResourceName,
        /// The requests.
        requests: Vec<RequestId>,
    },
    /// A request that was never ingested, or already removed.
    #[error("{resource}: no request {request}; ingest it first")]
    UnknownRequest {
        /// The resource asked.
        resource: ResourceName,
        /// The request.
        request: RequestId,
    },
    /// A stream that the request does not have.
    #[error("{resource}: request {request} has no stream {label}")]
    UnknownStream {
        /// The resource asked.
        resource: ResourceName,
        /// The request.
        request: RequestId,
        /// The label.
        label: Label,
    },
    /// A plan that does not exist, or belongs to an earlier step.
    #[error("{resource}: no plan for label {label} of step {serial}; plan before run")]
    UnknownPlan {
        /// The resource asked.
        resource: ResourceName,
        /// The plan label.
        label: Label,
        /// The step.
        serial: StepSerial,
    },
    /// A step that cannot be, such as the same stream twice.
    #[error("{resource}: {why}")]
    Step {
        /// The resource that refused it.
        resource: ResourceName,
        /// What is wrong and what would be right.
        why: String,
    },
    /// A call out of order, such as a third outstanding step.
    #[error("{call}: {why}")]
    Order {
        /// The call.
        call: &'static str,
        /// Why not now.
        why: String,
    },
    /// An invariant of the bookkeeping does not hold: a bug of ours that names itself.
    #[error("broken invariant: {0}")]
    Invariant(String),
}

impl Error {
    /// What an attention backend said, under the name of the resource or backend that said it.
    pub fn backend(name: impl Into<String>, said: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Backend { name: name.into(), said: Box::new(said) }
    }
}

fn joined<T: std::fmt::Display>(items: &[T], separator: &str) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(separator)
}

fn listed(known: &[ResourceName]) -> String {
    if known.is_empty() { "none".to_owned() } else { joined(known, ", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_of_causes_says_what_a_backend_said_once() {
        let why = "no tiles are that wide".to_owned();
        let said = mstar_kernels::Error::Parameter { name: "head_dim", why, got: "7".into() };
        let error = Error::backend("attn", said);
        let mut chain = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(next) = cause {
            chain += &format!(": {next}");
            cause = next.source();
        }
        assert_eq!(chain, "attn: head_dim: no tiles are that wide, got 7");
    }
}
