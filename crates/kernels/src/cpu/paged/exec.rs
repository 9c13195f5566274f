//! Walking a work list with the caller's threads.
//!
//! Items are taken from a shared counter, largest first; a barrier; then merges. Which worker runs an item
//! never shows in a result. Nothing is allocated: a worker's scratch is cut from the workspace.

use super::call::Call;
use super::finish;
use super::state::{State, Tree, state_len};
use crate::cpu::arena::{Arena, arena_bytes};
use crate::cpu::workers::{MAX_WORKERS, each};
#[cfg(feature = "paged")]
use crate::paged::Family;
use crate::paged::{Stored, Target};
use crate::work::{Item, Merge, WorkList};

/// Multiply-adds below which starting other workers costs more than it gives.
const SERIAL_WORK: u64 = 1 << 18;

/// Bytes of one worker's scratch.
fn scratch_bytes(work: &WorkList) -> usize {
    let bytes = match work.stored {
        #[cfg(feature = "paged")]
        Stored::Heads => super::decode::scratch_bytes(work).max(super::tile_item::scratch_bytes(work)),
        #[cfg(feature = "mla")]
        Stored::Latents => crate::cpu::mla::scratch_bytes(work),
        #[cfg(any(feature = "dense", feature = "flex"))]
        Stored::Segments | Stored::Blocks => super::tile_item::scratch_bytes(work),
        #[allow(unreachable_patterns)] // A family that is not compiled makes no list.
        _ => 0,
    };
    bytes.next_multiple_of(64)
}

/// Bytes that [`run`] needs with up to `workers` workers; [`usize::MAX`], which no workspace has, past that.
pub(crate) fn workspace_bytes(work: &WorkList, workers: usize) -> usize {
    if work.target == Target::Blocks {
        // A device has scratch of its own.
        return arena_bytes::<f32>(work.partial_len as usize);
    }
    let scratch = workers.clamp(1, MAX_WORKERS).saturating_mul(scratch_bytes(work));
    arena_bytes::<f32>(work.partial_len as usize).saturating_add(scratch)
}

/// The workspace, cut into partial states and one scratch a worker.
struct Memory {
    partials: *mut f32,
    scratch: *mut u8,
    scratch_bytes: usize,
}

// SAFETY: items and merges write disjoint partial states (see `WorkList`), and each worker has its own scratch.
unsafe impl Sync for Memory {}

/// Attends. `workspace` starts on a cache line and has `workspace_bytes(work, workers)` bytes.
pub(crate) fn run(call: &Call<'_>, workspace: &mut [u8], workers: usize) {
    let work = call.work;
    let needed = workspace_bytes(work, workers);
    assert!(
        workspace.len() >= needed && (workspace.as_ptr() as usize).is_multiple_of(64),
        "checked by the caller"
    );
    let scratch_bytes = scratch_bytes(work);
    let base = workspace.as_mut_ptr();
    let partials = arena_bytes::<f32>(work.partial_len as usize);
    let memory = Memory { partials: base.cast(), scratch: base.wrapping_add(partials), scratch_bytes };
    let width = (call.geometry.head_dim_qk + call.geometry.head_dim_vo) as u64;
    let serial = work.total_cost.saturating_mul(width) < SERIAL_WORK;
    let workers = if serial { 1 } else { workers.clamp(1, MAX_WORKERS) };
    each(workers, work.items.len(), &|worker, index| {
        // SAFETY: `worker` is below `workers`, for which the workspace has room; a worker runs one item at a time.
        let scratch = unsafe {
            let start = memory.scratch.add(worker * memory.scratch_bytes);
            std::slice::from_raw_parts_mut(start, memory.scratch_bytes)
        };
        item(call, &work.items[index], &memory, scratch);
    });
    each(workers, work.merges.len(), &|_, index| merge(call, &work.merges[index], &memory));
}

/// The partial state that starts at `partial`, for one key head.
///
/// # Safety
/// `partial` is one of the list's, reserved for `lanes` query vectors; nobody else uses that head's part now.
unsafe fn partial<'a>(
    call: &Call<'_>,
    memory: &'a Memory,
    partial: u64,
    kv_head: usize,
    lanes: usize,
) -> State<'a> {
    let width = call.geometry.head_dim_vo;
    let len = state_len(lanes, width);
    // SAFETY: the list reserved `G * state_len` floats there, below `partial_len`, which the workspace holds.
    let floats = unsafe {
        let start = memory.partials.add(partial as usize + kv_head * len);
        std::slice::from_raw_parts_mut(start, len)
    };
    State::new(floats, lanes, width)
}

/// Sums one item's leaves and hands the states on.
fn item(call: &Call<'_>, item: &Item, memory: &Memory, scratch: &mut [u8]) {
    let work = call.work;
    let group = call.geometry.group();
    let members = &work.members[item.member_begin as usize..][..item.member_count as usize];
    #[cfg(feature = "paged")]
    let family = work.rows[members[0].row as usize].family;
    let mut emit = |kv_head: usize, state: &State<'_>| {
        let mut lane = 0;
        for member in members {
            let row = &work.rows[member.row as usize];
            let tokens = if item.q_count == 0 { row.q_len } else { item.q_count };
            let lanes = tokens as usize * group;
            let part = state.lanes(lane, lanes);
            // SAFETY: the list gives each (member, head) to one item; its tokens are the row's.
            unsafe {
                if member.partial == crate::work::DIRECT {
                    finish::write(call, row, item.q_begin, kv_head, &part);
                } else {
                    partial(call, memory, member.partial, kv_head, lanes).copy_from(&part);
                }
            }
            lane += lanes;
        }
    };
    let arena = Arena::new(scratch);
    match work.stored {
        #[cfg(feature = "paged")]
        Stored::Heads if family == Family::Decode as u32 => {
            super::decode::run(call, item, members, arena, &mut emit);
        }
        #[cfg(feature = "paged")]
        Stored::Heads => super::tile_item::run(call, item, members, arena, &mut emit),
        #[cfg(any(feature = "dense", feature = "flex"))]
        Stored::Segments | Stored::Blocks => super::tile_item::run(call, item, members, arena, &mut emit),
        #[cfg(feature = "mla")]
        Stored::Latents => crate::cpu::mla::run(call, item, members, arena, &mut emit),
        #[allow(unreachable_patterns)] // A family that is not compiled makes no list.
        _ => unreachable!("no list is made of what is not compiled"),
    }
}

/// Joins the states of a row's parts, in their own memory, and finishes.
fn merge(call: &Call<'_>, merge: &Merge, memory: &Memory) {
    let work = call.work;
    let row = &work.rows[merge.row as usize];
    let lanes = merge.q_count as usize * call.geometry.group();
    let parts = &work.parts[merge.part_begin as usize..][..merge.part_count as usize];
    let c = call.exponent(row);
    for head in merge.kv_head_begin..merge.kv_head_begin + merge.kv_head_count {
        let head = head as usize;
        // SAFETY: items are done, and this head of these parts belongs to this merge alone; two parts never
        // overlap, so that a left and a right state are disjoint.
        let state = |at: u64| unsafe { partial(call, memory, at, head, lanes) };
        let mut at = [0u64; 34];
        let mut tree = Tree::new();
        for part in parts {
            at[tree.len()] = part.partial;
            tree.push(part.level, part.index, |left| state(at[left]).join(&state(at[left + 1]), c));
        }
        tree.finish(|left| state(at[left]).join(&state(at[left + 1]), c));
        // SAFETY: the merge's tokens are the row's, and no item writes them.
        unsafe { finish::write(call, row, merge.q_begin, head, &state(at[0]).lanes(0, lanes)) };
    }
}
