//! Every family on whatever device there is, as rows of a batch in memory of which every byte is accounted for.
//!
//! A row's numbers follow from who it is, so that it can be run again alone, elsewhere, beside others, in a slot that held another
//! batch; whatever belongs to no row holds one byte over and over, which as any float is 0 or NaN. What comes back are bits.
//!
//! | room | what is in it |
//! | --- | --- |
//! | `heads`, `latents`, `segments`, `blocks`, `sparse` | the families |
//! | `memory` | numbers in memory of a dtype, on a device and back |
//! | `invariance`, `poison` | what changes no bit, for all of them |
//! | `faults` | faults of others that need a device |
//! | `killed` | processes that are killed, and the cache that they leave |
//! | `mods` | mods of the caller's and masks of documents, against the oracle |
//! | `sanitize` | one small ragged batch a kernel variant, for tools that watch memory |

mod blocks;
mod faults;
mod heads;
mod invariance;
mod killed;
mod latents;
pub(crate) mod memory;
mod mods;
mod poison;
mod sanitize;
mod segments;
mod sparse;

use crate::cuda::{Context, OwnedStream};
use crate::{DType, Device, Kernels, Stream};

use blocks::InBlocks;
use heads::OverHeads;
use latents::OverLatents;
use segments::{OverSegments, Prefixes};
use sparse::{OverPicks, Picked};

pub(crate) const DEVICE: Device = Device::Cuda(0);
const DTYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

/// A stream of the device to test on, if there is one; aloud where there is none.
pub(crate) fn stream(test: &str) -> Option<OwnedStream> {
    #[cfg(feature = "emulator")]
    assert!(crate::cuda::emulate(), "another test chose the driver");
    match Context::of(DEVICE).and_then(|_| OwnedStream::new(DEVICE)) {
        Ok(stream) => Some(stream),
        Err(why) => {
            println!("SKIPPED {test}: {why}");
            None
        }
    }
}

/// Whether all that a test has is run: on a card, and where `MSTAR_TRIALS` is `all`. The emulated device, on which a launch takes as
/// long as a thousand take a card, runs less by default: fewer rows, and of dtypes one a test.
pub(crate) fn whole() -> bool {
    !Context::of(DEVICE).is_ok_and(Context::is_emulated)
        || std::env::var_os("MSTAR_TRIALS").is_some_and(|all| all == "all")
}

/// The dtypes to run.
fn dtypes(all: &[DType]) -> Vec<DType> {
    all[..if whole() { all.len() } else { 1 }].to_vec()
}

/// A row: who it is, its queries, and its keys (over blocks: its visible blocks).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Row {
    id: u64,
    q: usize,
    kv: usize,
}

fn row(id: u64, q: usize, kv: usize) -> Row {
    Row { id, q, kv }
}

/// Where and beside what a batch runs: all that may change no bit of a row.
#[derive(Clone, Debug)]
struct Setting {
    dtype: DType,
    /// Which pages rows have.
    place: u64,
    /// Every byte that belongs to no row, before the run.
    junk: u8,
    /// Query tokens of nobody behind the rows'.
    pad: usize,
    /// What the same plan, workspace and outputs were used for before.
    before: Vec<Row>,
}

impl Setting {
    fn of(dtype: DType) -> Setting {
        Setting { dtype, place: 1, junk: NAN, pad: 0, before: Vec::new() }
    }

    /// Whether the plan is one for batches of one shape.
    fn is_fixed(&self) -> bool {
        self.pad > 0 || !self.before.is_empty()
    }

    /// The batches that are run one after another, of which the last counts.
    fn batches<'a>(&'a self, rows: &'a [Row]) -> Vec<&'a [Row]> {
        let before = (!self.before.is_empty()).then_some(&self.before[..]);
        before.into_iter().chain([rows]).collect()
    }
}

/// Every element 0.
const ZERO: u8 = 0;
/// Every element NaN, of any float.
const NAN: u8 = 0xff;

/// What a row's results are, as bytes.
#[derive(Clone, Debug, PartialEq)]
struct Bits(Vec<u8>);

trait Family: Send + Sync {
    /// Words for messages.
    fn name(&self) -> String;

    /// A ragged batch of so many rows.
    fn company(&self, rows: usize) -> Vec<Row>;

    /// The results of each row. Checks that rows of nobody yield nothing.
    fn run(&self, stream: &Stream, set: &Setting, rows: &[Row]) -> Vec<Bits>;
}

/// Ragged rows over pages: of no key, of one, at a page's end and past it, of two leaves, of few queries and of a tile's.
fn ragged(rows: usize) -> Vec<Row> {
    const SOME: [(usize, usize); 11] =
        [(1, 37), (20, 53), (1, 600), (1, 0), (3, 16), (1, 1), (2, 17), (1, 32), (5, 3), (1, 64), (7, 71)];
    (0..rows).map(|at| SOME[at % SOME.len()]).zip(0..).map(|((q, kv), id)| row(id, q, kv)).collect()
}

/// Every family in every dtype; where that is too much, each family in one, in turn.
fn trials() -> Vec<(Box<dyn Family>, DType)> {
    let all = families().into_iter().zip(DTYPES.into_iter().cycle());
    if !whole() {
        return all.collect();
    }
    DTYPES.into_iter().flat_map(|dtype| families().into_iter().map(move |family| (family, dtype))).collect()
}

/// Holds each trial to something: side by side on a card, whose host has work enough with their numbers, and one after another on
/// the emulated device, whose work is the host's.
fn each_trial(test: &str, hold: impl Fn(&dyn Family, &Stream, DType) + Sync) {
    let Some(owned) = stream(test) else { return };
    if !whole() || Context::of(DEVICE).is_ok_and(Context::is_emulated) {
        return trials().iter().for_each(|(family, dtype)| hold(family.as_ref(), &owned.stream(), *dtype));
    }
    std::thread::scope(|scope| {
        for (family, dtype) in trials() {
            let hold = &hold;
            scope.spawn(move || {
                let own = OwnedStream::new(DEVICE).unwrap();
                hold(family.as_ref(), &own.stream(), dtype);
            });
        }
    });
}

/// Every family, in narrow shapes.
fn families() -> Vec<Box<dyn Family>> {
    vec![
        Box::new(OverHeads::narrow()),
        Box::new(OverLatents::narrow()),
        Box::new(OverLatents { kernels: Kernels::Mma, ..OverLatents::narrow() }),
        Box::new(OverSegments::narrow(Prefixes::Pages)),
        Box::new(OverSegments::narrow(Prefixes::Packed)),
        Box::new(InBlocks::narrow()),
        Box::new(Picked::narrow()),
        Box::new(OverPicks::narrow()),
        Box::new(OverPicks { kernels: Kernels::Mma, ..OverPicks::narrow() }),
    ]
}
