//! A work list as bytes that a device reads: a header, then the records as they are.
//!
//! Kernels know the address alone, so that a captured graph runs over whatever list stands there.

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice};

use crate::paged::{
    APPEND_LEAF, APPEND_QUERIES, DECODE_LEAF, LATENT_LEAF, LATENT_TREE_LEAF, Stored, blocks_leaf, most_units,
};
use crate::plan::Schedule;
use crate::work::{Item, Member, Merge, Part, Row, Segment, Task, WorkList};
use crate::{Error, Result};

/// What the image starts with; `cu/list.cuh` has the same. Offsets are in bytes from its start, multiples of [`ALIGN`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct Header {
    pub(crate) rows: u32,
    pub(crate) items: u32,
    pub(crate) merges: u32,
    pub(crate) tokens: u32,
    pub(crate) row_at: u32,
    pub(crate) item_at: u32,
    pub(crate) member_at: u32,
    pub(crate) merge_at: u32,
    pub(crate) part_at: u32,
    pub(crate) page_at: u32,
    pub(crate) mask_at: u32,
    pub(crate) segment_at: u32,
    pub(crate) flag_at: u32,
    pub(crate) position_at: u32,
    pub(crate) table_at: u32,
    pub(crate) few: u32,
    pub(crate) fused: u32,
    pub(crate) lanes: u32,
    pub(crate) least: u32,
    pub(crate) reserved: u32,
}

/// A mod's numbers; see `cu/list.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct ModTable {
    pub(crate) floats_at: u32,
    pub(crate) ints_at: u32,
    pub(crate) a: i32,
    pub(crate) b: i32,
    pub(crate) value: f32,
    pub(crate) reserved: [u32; 3],
}

const _: () = assert!(size_of::<Header>() == 80 && size_of::<ModTable>() == 32);

/// Where arrays start.
const ALIGN: usize = 16;

/// Arrays behind each other, before they are written.
pub(crate) struct Layout {
    header: Header,
    bytes: usize,
}

impl Layout {
    /// Where everything of a list goes, with `extra` more arrays (of those bytes) behind it.
    ///
    /// # Errors
    /// [`Error::Overflow`] for a list of 4 GiB.
    pub(crate) fn of(work: &WorkList, tables: usize, extra: usize) -> Result<Layout> {
        let mut at = size_of::<Header>();
        let mut place = |bytes: usize| {
            let start = at;
            at = at.saturating_add(bytes).next_multiple_of(ALIGN);
            start as u32
        };
        // Tasks come first, so that a block finds its first one without reading the header.
        place(size_of_val(&work.tasks[..]));
        let header = Header {
            rows: work.rows.len() as u32,
            items: work.items.len() as u32,
            merges: work.merges.len() as u32,
            tokens: work.num_tokens as u32,
            row_at: place(size_of_val(&work.rows[..])),
            item_at: place(size_of_val(&work.items[..])),
            member_at: place(size_of_val(&work.members[..])),
            merge_at: place(size_of_val(&work.merges[..])),
            part_at: place(size_of_val(&work.parts[..])),
            page_at: place(size_of_val(&work.pages[..])),
            mask_at: place(size_of_val(&work.mask[..])),
            segment_at: place(size_of_val(&work.segments.rows[..])),
            flag_at: if work.blocks.partial.is_empty() { 0 } else { place(work.blocks.partial.len()) },
            position_at: match work.blocks.positions.len() {
                0 => 0,
                len => place(len * size_of::<i32>()),
            },
            table_at: place(tables * size_of::<ModTable>()),
            few: work.few as u32,
            fused: work.fused as u32,
            lanes: match work.stored {
                // Of items of few query vectors: what others have is not for the kernel that asks.
                Stored::Latents => work.tasks.iter().map(|task| task.q_count).max().unwrap_or(0),
                _ => 0,
            } * work.geometry.group() as u32,
            least: match work.stored {
                Stored::Latents => work.items.iter().map(|item| item.q_count).min().unwrap_or(0),
                _ => 0,
            } * work.geometry.group() as u32,
            reserved: 0,
        };
        let bytes = at.saturating_add(extra);
        if bytes > u32::MAX as usize {
            return Err(Error::Overflow { shape: vec![bytes] });
        }
        Ok(Layout { header, bytes: at })
    }

    /// Bytes from the start at which blocks may look for their first task, if `blocks` of them do, whether they have one or not.
    pub(crate) fn first_tasks(blocks: u32) -> usize {
        size_of::<Header>() + blocks as usize * size_of::<Task>()
    }

    /// Tickets that lists of this one's capacity never exceed, as [`Layout::bound`].
    pub(crate) fn most_tickets(work: &WorkList) -> usize {
        let leaves = match work.schedule {
            Schedule::Throughput => most_units(work, work.rows.capacity()) + work.rows.capacity(),
            Schedule::Invariant => {
                work.pages.capacity() * work.geometry.page_size / DECODE_LEAF as usize
                    + 3 * work.rows.capacity()
            }
        };
        // Two leaves may have three, if they have no parent in common; sixteen more leaves have no more than one or two more.
        leaves * work.geometry.num_kv_heads
    }

    /// Bytes that lists of this one's capacity never exceed, however often it is made again: what counts is how many rows and page
    /// ids it has room for, and its query tokens, of which a tile has `tile_tokens`.
    pub(crate) fn bound(work: &WorkList, tile_tokens: usize) -> usize {
        let (rows, pages, tokens) = (work.rows.capacity(), work.pages.capacity(), work.num_tokens);
        let keys = pages.saturating_mul(work.geometry.page_size);
        let heads = work.geometry.num_kv_heads;
        let leaves = |leaf: u32| keys / leaf as usize + 2 * rows;
        // Only rows of few queries have more than one leaf.
        let cut_tiles = tokens.min(APPEND_QUERIES).div_ceil(tile_tokens) + 1;
        let tiles = tokens.div_ceil(tile_tokens) + rows;
        let units = match work.stored {
            // Every row is cut into leaves, whatever its number of queries; rows are as long as they come.
            Stored::Blocks => {
                let longest = work.rows.iter().map(|row| row.q_len as usize).max().unwrap_or(0);
                (longest.div_ceil(tile_tokens) + 1) * leaves(blocks_leaf(work.blocks.num_qo_heads)) + tiles
            }
            _ if work.schedule == Schedule::Throughput => {
                most_units(work, rows) + cut_tiles * leaves(APPEND_LEAF) + tiles
            }
            _ => {
                leaves(DECODE_LEAF.min(LATENT_LEAF).min(LATENT_TREE_LEAF))
                    + cut_tiles * leaves(APPEND_LEAF)
                    + tiles
            }
        };
        // Only what lies in pages is decoded by tasks.
        let task = if matches!(work.stored, Stored::Heads | Stored::Latents) { size_of::<Task>() } else { 0 };
        let each = heads * (size_of::<Item>() + task) + size_of::<Member>() + size_of::<Part>();
        let merges = (tiles + rows) * heads * size_of::<Merge>();
        let places = if work.stored == Stored::Blocks { size_of::<i32>() + 1 } else { 0 };
        let others = pages * (size_of::<i32>() + places) + size_of_val(&work.mask[..]);
        size_of::<Header>()
            + rows * (size_of::<Row>() + size_of::<Segment>())
            + units.saturating_mul(each)
            + merges
            + others
            + 16 * ALIGN
    }

    /// Bytes of all that [`Layout::write`] writes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What tells the image of a list from that of one cut alike ([`Layout::write_rows`]): the header with tasks and rows; and, if
    /// page ids changed, all from them on.
    pub(crate) fn parts(&self, pages: bool) -> [std::ops::Range<usize>; 2] {
        let from = if pages { self.header.page_at as usize } else { self.bytes };
        [0..self.header.item_at as usize, from..self.bytes]
    }

    /// Writes [`Layout::parts`] of a list that has neither masks nor mods. `to` has [`Layout::bytes`] bytes, or more.
    pub(crate) fn write_rows(&self, work: &WorkList, pages: bool, to: &mut [u8]) {
        to[..size_of::<Header>()].copy_from_slice(bytes_of(&self.header));
        let mut put = |at: u32, bytes: &[u8]| to[at as usize..][..bytes.len()].copy_from_slice(bytes);
        put(size_of::<Header>() as u32, cast_slice(&work.tasks));
        put(self.header.row_at, cast_slice(&work.rows));
        if pages {
            put(self.header.page_at, cast_slice(&work.pages));
        }
    }

    /// Writes a list. `to` has [`Layout::bytes`] bytes, or more.
    pub(crate) fn write(&self, work: &WorkList, tables: impl Iterator<Item = ModTable>, to: &mut [u8]) {
        let header = &self.header;
        to[..size_of::<Header>()].copy_from_slice(bytes_of(header));
        let mut put = |at: u32, bytes: &[u8]| to[at as usize..][..bytes.len()].copy_from_slice(bytes);
        put(size_of::<Header>() as u32, cast_slice(&work.tasks));
        put(header.row_at, cast_slice(&work.rows));
        put(header.item_at, cast_slice(&work.items));
        put(header.member_at, cast_slice(&work.members));
        put(header.merge_at, cast_slice(&work.merges));
        put(header.part_at, cast_slice(&work.parts));
        put(header.page_at, cast_slice(&work.pages));
        put(header.mask_at, cast_slice(&work.mask));
        put(header.segment_at, cast_slice(&work.segments.rows));
        if header.flag_at != 0 {
            put(header.flag_at, &work.blocks.partial);
        }
        if header.position_at != 0 {
            put(header.position_at, cast_slice(&work.blocks.positions));
        }
        for (index, table) in tables.enumerate() {
            put(header.table_at + (index * size_of::<ModTable>()) as u32, bytes_of(&table));
        }
    }
}
