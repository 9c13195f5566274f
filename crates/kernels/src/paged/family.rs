//! Which kernel sums a row's keys, and how long its leaves are.
//!
//! Both follow from the geometry and the row's *own* query length alone, never from its neighbours: this is
//! what makes a row's bits independent of the batch it runs in.

use crate::work::ONE_LEAF;

use super::Geometry;

/// Keys a leaf of the decode family.
pub const DECODE_LEAF: u32 = 512;

/// Keys a leaf of the tile family, for rows of at most [`APPEND_QUERIES`] query tokens.
pub const APPEND_LEAF: u32 = 4096;

/// Query tokens up to which a tile row's keys are cut, so that few tiles over long keys fill all threads.
pub const APPEND_QUERIES: usize = 256;

/// Query vectors a key head (tokens times `H / G`) up to which a row is of the decode family.
pub const DECODE_LANES: usize = 16;

/// A kernel family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Family {
    /// Few query vectors a key head: keys and values are streamed once for all of them.
    Decode = 0,
    /// Many query vectors a key head: tiles of queries over tiles of keys.
    Tile = 1,
}

impl Family {
    /// The family of a row of `q_len` query tokens.
    pub fn of(geometry: &Geometry, q_len: usize) -> Family {
        let lanes = q_len.saturating_mul(geometry.group());
        if q_len <= 1 && lanes <= 4 * DECODE_LANES || lanes <= DECODE_LANES {
            Family::Decode
        } else {
            Family::Tile
        }
    }

    /// Keys a leaf of a row of `q_len` query tokens; [`ONE_LEAF`] when its keys are never cut.
    pub fn leaf_keys(self, q_len: usize) -> u32 {
        match self {
            Family::Decode => DECODE_LEAF,
            Family::Tile if q_len <= APPEND_QUERIES => APPEND_LEAF,
            Family::Tile => ONE_LEAF,
        }
    }
}
