//! Names: of a request, of a request's stream, of a resource. Cheap to clone, compared as text.

use std::fmt;
use std::sync::Arc;

macro_rules! name {
    ($(#[$doc:meta])* $t:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $t(Arc<str>);

        impl $t {
            /// The name `text`.
            pub fn new(text: impl Into<Arc<str>>) -> $t {
                $t(text.into())
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $t {
            fn from(text: &str) -> $t {
                $t::new(text)
            }
        }

        impl From<String> for $t {
            fn from(text: String) -> $t {
                $t::new(text)
            }
        }

        impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    };
}

name! {
    /// One user's sequence of work.
    RequestId
}
name! {
    /// One of a request's streams: `main`, `cond`, `uncond`, `context`; or a group of them packed into one plan.
    Label
}
name! {
    /// A resource, as the spec's `resources` map calls it.
    ResourceName
}

/// Ids under this prefix belong to the dummy requests of a graph capture.
const DUMMY_PREFIX: &str = "__mstar_dummy/";

impl RequestId {
    /// The `index`-th dummy request of a capture.
    pub fn dummy(index: usize) -> RequestId {
        RequestId::new(format!("{DUMMY_PREFIX}{index}"))
    }

    /// Whether the id lies in the namespace reserved for captures; users' requests may not.
    pub fn is_dummy(&self) -> bool {
        self.0.starts_with(DUMMY_PREFIX)
    }
}

impl Label {
    /// The label of a request with one stream.
    pub fn main() -> Label {
        Label::new("main")
    }
}
