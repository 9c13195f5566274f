//! The plain kernel: any list, any dtype, any width, in f32.

use crate::cuda::Context;
use crate::cuda::jit::{Key, Unit};
use crate::paged::Stored;
use crate::work::WorkList;

use super::Choice;
use super::mods::Kinds;
use super::params::number;

const THREADS: usize = 128;
const TILE: usize = 64;
const CHUNK: usize = 32;

/// What the list is over, as `cu/gather.cuh` numbers it.
pub(super) fn source(work: &WorkList) -> i64 {
    match work.stored {
        Stored::Heads => 0,
        Stored::Segments => 1,
        Stored::Blocks => 2,
        Stored::Latents => 3,
    }
}

/// The variant for a list; `None` where a query vector does not fit into shared memory.
pub(super) fn choose(work: &WorkList, mods: &Kinds, context: &Context) -> Option<Choice> {
    let geometry = &work.geometry;
    let (depth, width) = (geometry.head_dim_qk, geometry.head_dim_vo);
    let columns = width.next_power_of_two().clamp(32, THREADS);
    let spans = width.div_ceil(columns);
    let rows = if spans <= 4 { 16 } else { 8 };
    // As `Room` in `cu/plain.cu`, and the queries behind it.
    let room = 2 * TILE * 8 + (rows * TILE + TILE * (CHUNK + 1) + rows + TILE) * 4;
    // Behind them, of codes a head, the scales of a tile's keys and values.
    let scales = if geometry.is_fp8() && work.stored == Stored::Heads { 2 * TILE * 4 } else { 0 };
    let shared = (room + rows * depth * 4 + scales) as u32;
    if spans > 8 || shared > context.shared_per_block_optin() {
        return None;
    }
    let key = Key::new(Unit::PLAIN, "plain")
        .with("SOURCE", source(work))
        .with("Q_TYPE", number(geometry.q_dtype))
        .with("KV_TYPE", number(geometry.kv_dtype))
        .with("ROWS", rows as i64)
        .with("COLUMNS", columns as i64)
        .with("SPANS", spans as i64);
    let key = if work.stored == Stored::Blocks { mods.compile_into(key) } else { key };
    Some(Choice { key, threads: THREADS as u32, shared })
}
