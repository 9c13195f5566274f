//! The flat work list: what an executor does, as plain data.
//!
//! A plan is five arrays of `repr(C)` records and the page ids they refer to. The CPU's executor walks them with
//! threads, a CUDA executor with thread blocks; a captured graph copies one buffer. Nothing in them depends
//! on who executes: a record says *what* is summed (rows, heads, leaves), never *how*.
//!
//! A row's keys are cut into **leaves**, fixed numbers of keys at absolute positions. Leaves are merged along a
//! fixed binary tree over their indices (aligned powers of two, missing right children skipped). An [`Item`]
//! covers an aligned run of leaves and merges them itself; where a row has several items, a [`Merge`] joins
//! their results along the upper levels of the same tree. So cutting work differently changes no bit.
//!
//! Lists are made by the families' `schedule` only, which keep two promises that executors rely on: every index is in range, and no two items write the same place.

use bytemuck::{Pod, Zeroable};

use crate::Kernels;
use crate::Result;
use crate::Stream;
use crate::paged::{Geometry, Stored, Target, Variant};
use crate::plan::Schedule;

/// [`Member::partial`] of an item that writes the row's final result.
pub const DIRECT: u64 = u64::MAX;

/// [`Row::mask_begin`] of a row without a custom mask.
pub const NO_MASK: u64 = u64::MAX;

/// [`Row::leaf_keys`] of a row that is one leaf.
pub const ONE_LEAF: u32 = 1 << 31;

/// One row of a batch: its queries, its keys and where its pages are listed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Row {
    /// First word of the row's custom mask, or [`NO_MASK`].
    pub mask_begin: u64,
    /// Words of the custom mask a query token has.
    pub mask_words: u32,
    /// First query token.
    pub q_begin: u32,
    /// Query tokens.
    pub q_len: u32,
    /// Absolute position one past the last key.
    pub kv_len: u32,
    /// Absolute position of the first key; keys before it were given back.
    pub kv_begin: u32,
    /// Absolute position of slot 0 of the first listed page.
    pub kv_offset: u32,
    /// Where the row's page ids start in the list's pages.
    pub page_begin: u32,
    /// Page ids of the row.
    pub page_count: u32,
    /// Which kernel sums the row's keys: a [`Family`](crate::paged::Family) as a number.
    pub family: u32,
    /// Keys a leaf; [`ONE_LEAF`] for a row that is never cut.
    pub leaf_keys: u32,
}

/// A unit of work: some rows' query tokens, some key heads, a run of leaves.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Item {
    /// Estimated cost, in query-key pairs of one head; items are listed largest first, those of many query vectors on a device within rows
    /// that it caches together.
    pub cost: u64,
    /// First of the item's members. Several members share the item's keys (a cascade).
    pub member_begin: u32,
    /// Members.
    pub member_count: u32,
    /// First key head.
    pub kv_head_begin: u32,
    /// Key heads.
    pub kv_head_count: u32,
    /// First query token within each member's row.
    pub q_begin: u32,
    /// Query tokens; 0 stands for each member's whole row.
    pub q_count: u32,
    /// First leaf.
    pub leaf_begin: u32,
    /// One past the last leaf.
    pub leaf_end: u32,
}

/// A row that an item works for.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Member {
    /// Where the unfinished state goes, in f32 elements from the start of the workspace; or [`DIRECT`].
    pub partial: u64,
    /// The row.
    pub row: u32,
    /// Where nodes of the row's tree wait for a sibling while an item of several leaves over latents is worked on, in lines of 16
    /// f32 elements from the start of the workspace.
    pub waits: u32,
}

/// Unfinished states of one row's query tokens, joined and finished.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Merge {
    /// The row.
    pub row: u32,
    /// First query token within the row.
    pub q_begin: u32,
    /// Query tokens.
    pub q_count: u32,
    /// First key head.
    pub kv_head_begin: u32,
    /// Key heads.
    pub kv_head_count: u32,
    /// First of its parts.
    pub part_begin: u32,
    /// Parts, in the order of their leaves.
    pub part_count: u32,
    /// Nothing; keeps the record free of padding.
    pub reserved: u32,
}

/// The state of an aligned run of leaves.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Part {
    /// Where the state lies, in f32 elements from the start of the workspace.
    pub partial: u64,
    /// Which node of the tree it is: the run starts at leaf `index << level`.
    pub index: u32,
    /// Height of the node: the run holds up to `1 << level` leaves.
    pub level: u32,
}

/// An item of few query vectors over pages, for a device: all that its block needs to know, in one read. Every index that is not
/// of keys was looked up when it was made.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Task {
    /// Absolute positions `lo..hi` of the keys that some query of the item sees; never empty.
    pub(crate) lo: u32,
    pub(crate) hi: u32,
    /// Where the row's page ids start in the list's pages.
    pub(crate) page_begin: u32,
    /// Absolute position of slot 0 of the first listed page.
    pub(crate) kv_offset: u32,
    /// Key head.
    pub(crate) head: u32,
    /// Words of the row's custom mask a query token has; 0 for a row without one.
    pub(crate) mask_words: u32,
    /// Keys a leaf.
    pub(crate) leaf_keys: u32,
    /// The row's leaves (of its visible keys): the first one.
    pub(crate) leaf_first: u32,
    /// One past the last.
    pub(crate) leaf_end: u32,
    /// Where the head's tickets start; see `cu/arrive.cuh`.
    pub(crate) ticket: u32,
    /// First query token, in the batch.
    pub(crate) token: u32,
    /// The same, in the row.
    pub(crate) q_begin: u32,
    /// Query tokens.
    pub(crate) q_count: u32,
    /// Height of the node of the tree that an item is: up to `1 << level` leaves.
    pub(crate) level: u32,
    /// First word of the row's custom mask.
    pub(crate) mask_begin: u64,
    /// Where the states of the row's leaves start, of the first key head, in f32 elements from the start of the workspace.
    pub(crate) state: u64,
    /// Absolute position of the first query token.
    pub(crate) first: i64,
}

/// Where the keys of a row over segments lie: absolute positions `0..prefix_len` in the prefix, the others fresh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// Keys of the prefix.
    pub prefix_len: u32,
    /// Its first key: a packed token, or a slot of the row's first page.
    pub prefix_begin: u32,
    /// The first fresh key, a packed token.
    pub fresh_begin: u32,
    /// Nothing; keeps the record's size a power of two.
    pub reserved: u32,
}

/// What a list over segments was made of, beside its rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segments {
    /// One a row.
    pub(crate) rows: Vec<Segment>,
    /// Whether the table spoke of prefixes.
    pub(crate) prefixed: bool,
    /// Whether prefixes lie in pages.
    pub(crate) paged: bool,
    /// Keys that packed prefixes have in all.
    pub(crate) packed: usize,
    /// Fresh keys in all.
    pub(crate) fresh: usize,
}

/// What a list over blocks was made of, beside its rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// `B`.
    pub(crate) batch: usize,
    /// `H`.
    pub(crate) num_qo_heads: usize,
    /// `G`.
    pub(crate) num_kv_heads: usize,
    /// `L`.
    pub(crate) q_len: usize,
    /// `M`.
    pub(crate) kv_len: usize,
    /// Whether rows are of one query head each.
    pub(crate) per_head: bool,
    /// Whether some block is visible in part.
    pub(crate) any_partial: bool,
    /// One past the largest key index.
    pub(crate) key_bound: usize,
    /// Beside the list's pages: not 0 for a block of which a mask decides.
    pub(crate) partial: Vec<u8>,
    /// Beside the list's pages: which block of the sequence a stored block is. Empty: the one it is stored as.
    pub(crate) positions: Vec<i32>,
}

const _: () = {
    // The CUDA side asserts the same numbers.
    assert!(size_of::<Row>() == 48 && size_of::<Item>() == 40 && size_of::<Member>() == 16);
    assert!(size_of::<Merge>() == 32 && size_of::<Part>() == 16);
    assert!(size_of::<Segment>() == 16 && size_of::<Task>() == 80);
};

/// A batch's work. Made by the families' `schedule`, read by executors.
#[derive(Clone, Debug)]
pub struct WorkList {
    pub(crate) rows: Vec<Row>,
    pub(crate) items: Vec<Item>,
    pub(crate) members: Vec<Member>,
    pub(crate) merges: Vec<Merge>,
    pub(crate) parts: Vec<Part>,
    pub(crate) pages: Vec<i32>,
    pub(crate) mask: Vec<u64>,
    pub(crate) num_tokens: usize,
    pub(crate) num_pages: usize,
    /// Whether the last row is padding.
    pub(crate) padded: bool,
    pub(crate) stored: Stored,
    pub(crate) geometry: Geometry,
    pub(crate) variant: Variant,
    pub(crate) partial_len: u64,
    pub(crate) total_cost: u64,
    /// Most query vectors of one key head in an item.
    pub(crate) max_lanes: usize,
    /// Most query vectors in an item.
    pub(crate) max_vectors: usize,
    /// Most floats of the states of an item's heads.
    pub(crate) max_state_len: usize,
    /// Most states that wait in an item's tree.
    pub(crate) max_depth: usize,
    pub(crate) scratch: crate::paged::Scratch,
    pub(crate) segments: Segments,
    pub(crate) blocks: Blocks,
    /// For whom it was cut.
    pub(crate) target: Target,
    /// Which kernels are to run it, on a device.
    pub(crate) kernels: Kernels,
    /// Whether its rows' leaves came of the batch, and of how many multiprocessors.
    pub(crate) schedule: Schedule,
    pub(crate) processors: u32,
    /// Of a list cut for a device: items of few query vectors, which come first.
    pub(crate) few: usize,
    /// Those items for the decode kernel; empty where another kernel takes them.
    pub(crate) tasks: Vec<Task>,
    /// Of the merges, the last ones, which the decode kernel does itself as soon as their parts are there.
    pub(crate) fused: usize,
    /// Tickets that its blocks take.
    pub(crate) tickets: usize,
    /// Whether it is made again for batches of the same shape, over which a captured run goes.
    pub(crate) fixed: bool,
    /// What a device has of it.
    pub(crate) staged: crate::cuda::StagedList,
}

impl Default for WorkList {
    /// No row, for a layer of one head of width 1.
    fn default() -> WorkList {
        let dtype = crate::DType::F32;
        let geometry = Geometry {
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 1,
            head_dim_vo: 1,
            page_size: 1,
            q_dtype: dtype,
            kv_dtype: dtype,
        };
        WorkList {
            rows: Vec::new(),
            items: Vec::new(),
            members: Vec::new(),
            merges: Vec::new(),
            parts: Vec::new(),
            pages: Vec::new(),
            mask: Vec::new(),
            num_tokens: 0,
            num_pages: 0,
            padded: false,
            stored: Stored::Heads,
            geometry,
            variant: Variant::causal(1),
            partial_len: 0,
            total_cost: 0,
            max_lanes: 0,
            max_vectors: 0,
            max_state_len: 0,
            max_depth: 0,
            scratch: Default::default(),
            segments: Segments::default(),
            blocks: Blocks::default(),
            target: Target::Threads,
            kernels: Kernels::Auto,
            schedule: Schedule::Invariant,
            processors: 0,
            few: 0,
            tasks: Vec::new(),
            fused: 0,
            tickets: 0,
            fixed: false,
            staged: Default::default(),
        }
    }
}

impl WorkList {
    /// Has the list ready on the stream's device: kernels built, the records on their way, in stream order. Belongs to planning.
    /// On the CPU, and for a list that is staged as it is, there is nothing to do. A list over blocks whose calls have mods is staged by
    /// `flex::stage`.
    ///
    /// # Errors
    /// A list that was not cut for a device; a kernel that cannot be built; memory that cannot be had.
    pub fn stage(&mut self, stream: &Stream) -> Result<()> {
        let _device = crate::device::supported("a work list", stream)?;
        #[cfg(feature = "cuda")]
        if _device != crate::Device::Cpu {
            return crate::cuda::exec::stage(self, stream);
        }
        Ok(())
    }

    /// What a captured run over the list takes for granted, as a number: kernels, grids and where the list lies on the device.
    /// `None` for a list that is not staged on a device.
    pub fn capture_key(&self) -> Option<u64> {
        #[cfg(feature = "cuda")]
        return self.staged.capture_key();
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// The geometry that the list was made for; over latents, one key head whose value is part of its key.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The variant that the list was made for; there is no other way to give one to a run.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// The batch's rows, in packed order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Units of work, largest first.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Rows that items work for.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Joins that run after all items.
    pub fn merges(&self) -> &[Merge] {
        &self.merges
    }

    /// States that joins read.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Page ids, row after row; all are below [`WorkList::num_pages`].
    pub fn pages(&self) -> &[i32] {
        &self.pages
    }

    /// Where rows' keys lie, one a row; empty unless the list is over segments.
    pub fn segments(&self) -> &[Segment] {
        &self.segments.rows
    }

    /// Custom masks, one bit a key: bit `j` of word `w` of a query token is the key at position `64 w + j`.
    pub fn mask(&self) -> &[u64] {
        &self.mask
    }

    /// `T`: query tokens of the batch.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// `P`: pages that the pool must have at least.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Bytes of unfinished states that items hand to merges.
    pub fn partial_bytes(&self) -> usize {
        self.partial_len as usize * size_of::<f32>()
    }

    /// Bytes of host memory that the list's arrays hold, spare capacity included.
    pub fn capacity_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Row>()
            + self.items.capacity() * size_of::<Item>()
            + self.members.capacity() * size_of::<Member>()
            + self.merges.capacity() * size_of::<Merge>()
            + self.parts.capacity() * size_of::<Part>()
            + self.tasks.capacity() * size_of::<Task>()
            + self.pages.capacity() * size_of::<i32>()
            + self.mask.capacity() * size_of::<u64>()
            + self.segments.rows.capacity() * size_of::<Segment>()
            + self.blocks.partial.capacity()
            + self.blocks.positions.capacity() * size_of::<i32>()
    }
}
