//! What a backend over pages checks when it is built.

use std::fmt::Debug;
use std::sync::Arc;

use mstar_kernels::Device;

use crate::attend::BuildContext;
use crate::kv::PagedKv;
use crate::{Error, Result};

impl BuildContext {
    /// A refusal of one of the values that the resource is built with: what it is called, why, and what came.
    pub fn refuse(&self, parameter: &'static str, why: &str, got: &dyn Debug) -> Error {
        let got = format!("{got:?}");
        let refused = mstar_kernels::Error::Parameter { name: parameter, why: why.into(), got };
        Error::backend(self.name.as_str(), refused)
    }

    /// Where it runs.
    pub fn device(&self) -> Device {
        self.stream.device()
    }

    /// The cache of a resource that needs one.
    ///
    /// # Errors
    /// No cache.
    pub fn paged_cache(&self) -> Result<Arc<dyn PagedKv>> {
        match &self.kv_cache {
            Some(kv) => Ok(Arc::clone(kv)),
            None => Err(self.refuse("kv_cache", "name the cache whose pages are attended", &"nothing")),
        }
    }
}
