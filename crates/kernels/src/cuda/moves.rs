//! Whole entries from place to place on a device: tokens into pages, pages into tokens, rows by index, pages to pages.
//!
//! Where entries go is an array on the device, which a captured run reads anew each time, or a slice of the host's, which travels
//! with the launches, some hundred entries each: neither is copied, and nobody waits.

use std::collections::BTreeSet;

use bytemuck::{Pod, Zeroable};

use crate::cpu::tokens::Tokens;
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::launch::launch_next;
use crate::cuda::{Context, Launch, launch};
use crate::{Device, Result, Stream};

const WARPS: usize = 8;
const THREADS: u32 = WARPS as u32 * 32;
/// Numbers that a launch brings along.
const LISTED: usize = 480;
const COPY: &str = "copy_list";
const BOTH: &str = "scatter_both";

/// As in `cu/move.cu`; distances in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Array {
    at: u64,
    outer: i64,
    inner: i64,
    chunk: i64,
}

/// As in `cu/move.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Move {
    from: Array,
    to: Array,
    indices: u64,
    entries: u64,
    limit: u64,
    first: u64,
    page_size: u32,
    chunks: u32,
    chunk_bytes: u32,
    begin: u32,
}

/// As in `cu/move.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Both {
    of: [Move; 2],
}

/// As in `cu/move.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Listed {
    of: Move,
    list: [[i64; 32]; LISTED / 32],
}

const _: () =
    assert!(size_of::<Move>() == 112 && size_of::<Both>() == 224 && size_of::<Listed>() == 112 + 8 * LISTED);

/// Entries on their way between two arrays of a device, checked by the caller: equal entries, both arrays on the stream's
/// device and apart from each other.
pub(crate) struct Moves<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) from: Tokens,
    pub(crate) to: Tokens,
}

/// What a cache's entries will go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moving {
    /// Tokens into slots, by an array on the device.
    Scatter,
    /// Two sides of tokens into slots, by an array on the device.
    ScatterBoth,
    /// Tokens into slots, by a slice of the host's.
    ScatterListed,
    /// Pages to pages.
    Copy,
    /// Pages into tokens, by a slice of the host's.
    Unpage,
}

impl Moving {
    fn entry(self) -> &'static str {
        match self {
            Moving::Scatter => "scatter_at",
            Moving::ScatterBoth => BOTH,
            Moving::ScatterListed => "scatter_list",
            Moving::Copy => COPY,
            Moving::Unpage => "unpage_list",
        }
    }
}

/// Compiles and loads what moves runs of `bytes` bytes each, so that moving them compiles nothing: for entries and pages that
/// lie on multiples of their run's alignment. Others are compiled when they come. Nothing on the CPU.
///
/// # Errors
/// A kernel that cannot be built; a device that is not there.
pub fn prepare_moves(device: Device, moving: &[Moving], bytes: &[usize]) -> Result<()> {
    if device == Device::Cpu {
        return Ok(());
    }
    let units: BTreeSet<usize> =
        bytes.iter().filter(|&&run| run > 0).map(|&run| unit_of(run as u64)).collect();
    let keys: Vec<Key> =
        moving.iter().flat_map(|moving| units.iter().map(|&unit| key(moving.entry(), unit))).collect();
    jit::prepare(device, &keys)
}

/// The widest load that divides `all`.
fn unit_of(all: u64) -> usize {
    [16, 4, 2].into_iter().find(|unit| all.is_multiple_of(*unit)).unwrap_or(1) as usize
}

fn key(entry: &'static str, unit: usize) -> Key {
    Key::new(Unit::MOVE, entry).with("UNIT", unit as i64)
}

/// Which entries go where.
#[derive(Clone, Copy)]
pub(crate) enum Path {
    /// Token `e` to slot `index[e]` of pages; -1 goes nowhere.
    Scatter {
        /// Slots of a page.
        page_size: usize,
        /// Slots of all pages.
        slots: usize,
    },
    /// Row `index[e]` to row `e`; negative: zeros.
    Gather {
        /// Rows that there are.
        rows: usize,
    },
    /// Token `e` from offset `first + e` of the pages `index`.
    Unpage {
        /// Slots of a page.
        page_size: usize,
        /// Pages that there are.
        pages: usize,
        /// The offset of token 0.
        first: usize,
    },
}

impl Moves<'_> {
    fn describe(&self) -> (Move, usize) {
        let (chunks, bytes) = Tokens::finer(&self.from, &self.to);
        let array = |side: &Tokens| Array {
            at: side.at(0) as u64,
            outer: side.outer as i64,
            inner: side.inner as i64,
            chunk: side.chunk_step(chunks, bytes) as i64,
        };
        let (from, to) = (array(&self.from), array(&self.to));
        // What every run of bytes starts and ends on.
        let all = [from, to].into_iter().fold(bytes as u64, |all, array| {
            all | array.at
                | array.outer as u64
                | array.inner as u64
                | if chunks > 1 { array.chunk as u64 } else { 0 }
        });
        let of = Move { from, to, chunks: chunks as u32, chunk_bytes: bytes as u32, ..Move::default() };
        (of, unit_of(all))
    }

    /// A warp for each of `entries`; `next`: behind an earlier launch of the same call.
    fn go<P: Pod>(
        &self,
        entry: &'static str,
        unit: usize,
        entries: usize,
        params: &P,
        next: bool,
    ) -> Result<()> {
        let device = self.stream.device();
        let function = jit::function(device, &key(entry, unit))?;
        let most = 16 * Context::of(device)?.sm_count() as usize;
        let blocks = entries.div_ceil(WARPS).clamp(1, most) as u32;
        let how = Launch { grid: [blocks, 1, 1], block: THREADS, shared: 0 };
        // SAFETY: the caller checked both arrays and that they are on this device; kernels skip indices out of range. What is next
        // comes behind another launch of this call.
        unsafe {
            match next {
                true => launch_next(&function, self.stream, how, params),
                false => launch(&function, self.stream, how, params),
            }
        }
    }

    /// Moves `entries` entries by an index array on the device, `i64` (of pages: `i32`).
    ///
    /// # Errors
    /// A kernel that cannot be built; what a launch is refused with.
    pub(crate) fn by_array(&self, path: Path, indices: *const u8, entries: usize) -> Result<()> {
        let (of, unit) = self.describe();
        if entries == 0 || of.chunk_bytes == 0 || of.chunks == 0 {
            return Ok(());
        }
        let of = Move { indices: indices as u64, entries: entries as u64, ..path.fill(of) };
        self.go(path.entry(true), unit, entries, &of, false)
    }

    /// Moves entries of `both` into pages by one index array on the device, `i64`, at once.
    ///
    /// # Errors
    /// As [`Moves::by_array`].
    pub(crate) fn both_by_array(
        both: [Moves<'_>; 2],
        path: [Path; 2],
        indices: *const u8,
        entries: usize,
    ) -> Result<()> {
        let described = [both[0].describe(), both[1].describe()];
        let empty = |of: &Move| of.chunk_bytes == 0 || of.chunks == 0;
        if entries == 0 || described.iter().any(|(of, _)| empty(of)) {
            return both.iter().zip(path).try_for_each(|(side, path)| side.by_array(path, indices, entries));
        }
        let of = [0, 1].map(|side| Move {
            indices: indices as u64,
            entries: entries as u64,
            ..path[side].fill(described[side].0)
        });
        let unit = described[0].1.min(described[1].1);
        both[0].go(BOTH, unit, 2 * entries, &Both { of }, false)
    }

    /// Moves `entries` entries by a slice of the host's: one number an entry; of pages, as many as there are.
    ///
    /// # Errors
    /// As [`Moves::by_array`].
    pub(crate) fn by_list(&self, path: Path, index: impl Fn(usize) -> i64, entries: usize) -> Result<()> {
        let (of, unit) = self.describe();
        if of.chunk_bytes == 0 || of.chunks == 0 {
            return Ok(());
        }
        let of = path.fill(of);
        let mut begin = 0;
        while begin < entries {
            let mut params = Listed { of, list: [[0; 32]; LISTED / 32] };
            let (numbers, until) = match path {
                Path::Unpage { page_size, first, .. } => {
                    // Whole pages, up to the end of the last one that fits.
                    let page = (first + begin) / page_size;
                    let until = ((page + LISTED) * page_size - first).min(entries);
                    (page..(first + until).div_ceil(page_size), until)
                }
                _ => (begin..entries.min(begin + LISTED), entries.min(begin + LISTED)),
            };
            for (to, number) in params.list.as_flattened_mut().iter_mut().zip(numbers) {
                *to = index(number);
            }
            (params.of.begin, params.of.entries) = (begin as u32, (until - begin) as u64);
            self.go(path.entry(false), unit, until - begin, &params, begin > 0)?;
            begin = until;
        }
        Ok(())
    }

    /// Copies the first tokens of pages: `(from, to, tokens)` each.
    ///
    /// # Errors
    /// As [`Moves::by_array`].
    pub(crate) fn pages(&self, page_size: usize, copies: impl Iterator<Item = [i64; 3]>) -> Result<()> {
        let (mut of, unit) = self.describe();
        if of.chunk_bytes == 0 || of.chunks == 0 {
            return Ok(());
        }
        of.page_size = page_size as u32;
        let (mut copies, mut next) = (copies.peekable(), false);
        while copies.peek().is_some() {
            let mut params = Listed { of, list: [[0; 32]; LISTED / 32] };
            let mut count = 0;
            for (to, copy) in params.list.as_flattened_mut().chunks_exact_mut(3).zip(&mut copies) {
                to.copy_from_slice(&copy);
                count += 1;
            }
            params.of.entries = count as u64;
            self.go(COPY, unit, count * page_size, &params, next)?;
            next = true;
        }
        Ok(())
    }
}

impl Path {
    fn entry(self, array: bool) -> &'static str {
        match (self, array) {
            (Path::Scatter { .. }, true) => "scatter_at",
            (Path::Scatter { .. }, false) => "scatter_list",
            (Path::Gather { .. }, true) => "gather_at",
            (Path::Gather { .. }, false) => "gather_list",
            (Path::Unpage { .. }, true) => "unpage_at",
            (Path::Unpage { .. }, false) => "unpage_list",
        }
    }

    fn fill(self, of: Move) -> Move {
        match self {
            Path::Scatter { page_size, slots } => {
                Move { page_size: page_size as u32, limit: slots as u64, ..of }
            }
            Path::Gather { rows } => Move { limit: rows as u64, ..of },
            Path::Unpage { page_size, pages, first } => {
                Move { page_size: page_size as u32, limit: pages as u64, first: first as u64, ..of }
            }
        }
    }
}
