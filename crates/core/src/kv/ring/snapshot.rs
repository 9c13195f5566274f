//! One world, copied to the host: a place to come back to.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use mstar_kernels::Buffer;

use super::RingConfig;

/// A world as it was: every frame of every layer, the scratch among them, and the clock, from which follows what is
/// written. It holds its own memory, and outlives the request and the ring it was taken of.
pub struct WorldSnapshot {
    config: Arc<RingConfig>,
    clock: u64,
    frames: Buffer,
}

impl WorldSnapshot {
    pub(super) fn new(config: Arc<RingConfig>, clock: u64, frames: Buffer) -> WorldSnapshot {
        WorldSnapshot { config, clock, frames }
    }

    /// Frames committed when it was taken.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Host bytes that it holds: [`RingConfig::world_bytes`].
    pub fn bytes(&self) -> usize {
        self.frames.len()
    }

    pub(super) fn frames(&self) -> &Buffer {
        &self.frames
    }

    /// Why a ring of the geometry `config` cannot take it; the number of worlds does not matter.
    pub(super) fn misfit(&self, config: &RingConfig) -> Option<String> {
        let one = |config: &RingConfig| RingConfig { num_worlds: 1, ..config.clone() };
        (one(&self.config) != one(config)).then(|| {
            format!(
                "the snapshot is of another ring: {:?}, and this one is {:?}",
                one(&self.config),
                one(config)
            )
        })
    }
}

/// Without the frames themselves.
impl fmt::Debug for WorldSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorldSnapshot")
            .field("clock", &self.clock)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
