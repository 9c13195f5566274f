//! The kernels that join what items left, and how many blocks a merge is for.

use crate::cuda::jit::{Key, Unit};
use crate::work::WorkList;

use super::Choice;
use super::params::number;

const WARPS: usize = 4;
/// Columns of a value that a warp has at once, where there are many query vectors: a slice.
pub(super) const SLICE: usize = 128;
/// As `NEAR_HEIGHTS` in `cu/near.cuh`: heights above a merge's parts at which they have one ancestor, and most parts.
const NEAR_HEIGHTS: u32 = 3;
/// As before.
#[cfg(feature = "dsa")]
pub(super) const NEAR: usize = 1 << NEAR_HEIGHTS;
/// Slices of query vectors from which on a warp each is enough for a device.
const MANY_SLICES: usize = 512;
/// Most pieces that a merge is cut into.
const MOST_PIECES: usize = 64;

/// Which kernel joins. A small one is fetched soon, which is most of what a short merge takes; which one it is changes no bit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Joiner {
    /// For few query vectors, whose columns several warps share.
    Few,
    /// For parts that are near each other.
    Near,
    /// For any.
    Many,
}

impl Joiner {
    /// All of them.
    pub(crate) const ALL: [Joiner; 3] = [Joiner::Few, Joiner::Near, Joiner::Many];

    /// For so many slices of query vectors, whose parts are near each other or not.
    pub(super) fn of(slices: usize, near: bool) -> Joiner {
        #[cfg(test)]
        if let Some(joiner) = forced::joiner() {
            return if near || !matches!(joiner, Joiner::Near) { joiner } else { Joiner::Many };
        }
        match near {
            _ if slices < MANY_SLICES => Joiner::Few,
            true => Joiner::Near,
            false => Joiner::Many,
        }
    }

    /// The kernel in `cu/merge.cu`.
    fn entry(self) -> &'static str {
        match self {
            Joiner::Few => "merge_few",
            Joiner::Near => "merge_near",
            Joiner::Many => "merge_many",
        }
    }
}

/// The variant for a list.
pub(super) fn choose(work: &WorkList) -> Choice {
    // Of those of a captured run, which goes over lists to come, as many as its tokens may have.
    let slices = match work.fixed {
        true => work.num_tokens * work.geometry.num_qo_heads * work.geometry.head_dim_vo.div_ceil(SLICE),
        false => work.merges.len() * pieces(work) as usize * WARPS,
    };
    Choice { key: key(work, Joiner::of(slices, is_near(work))), threads: WARPS as u32 * 32, shared: 0 }
}

/// The variants for lists of a layer.
pub(super) fn keys(work: &WorkList) -> [Key; 3] {
    Joiner::ALL.map(|joiner| key(work, joiner))
}

fn key(work: &WorkList, joiner: Joiner) -> Key {
    Key::new(Unit::MERGE, joiner.entry()).with("Q_TYPE", number(work.geometry.q_dtype))
}

/// Whether the parts of every merge are near each other, also of those that the decode kernel does where it can.
fn is_near(work: &WorkList) -> bool {
    work.merges.iter().filter(|merge| merge.part_count > 0).all(|merge| {
        let [first, last] = [merge.part_begin, merge.part_begin + merge.part_count - 1]
            .map(|part| work.parts[part as usize].index);
        first >> NEAR_HEIGHTS == last >> NEAR_HEIGHTS
    })
}

/// Into how many more pieces the kernel cuts where there are few query vectors; blocks for them change no bit.
pub(super) const MORE_PIECES: usize = 4;

/// Pieces that each merge is cut into, a block each, so that a warp has one or two query vectors' slices. Changes no bit.
pub(super) fn pieces(work: &WorkList) -> u32 {
    let units = work.max_lanes.max(1) * work.geometry.head_dim_vo.div_ceil(SLICE);
    units.div_ceil(WARPS).clamp(1, MOST_PIECES) as u32
}

/// For a test in which one of the kernels joins all that it can.
#[cfg(test)]
pub(crate) mod forced {
    use std::cell::Cell;

    use super::Joiner;

    thread_local! {
        static JOINER: Cell<Option<Joiner>> = const { Cell::new(None) };
    }

    pub(super) fn joiner() -> Option<Joiner> {
        JOINER.get()
    }

    /// What `run` stages or attends on this thread is joined by `joiner`.
    #[allow(dead_code, reason = "trials are there with every feature alone")]
    pub(crate) fn with_joiner<R>(joiner: Joiner, run: impl FnOnce() -> R) -> R {
        JOINER.set(Some(joiner));
        let result = run();
        JOINER.set(None);
        result
    }
}
