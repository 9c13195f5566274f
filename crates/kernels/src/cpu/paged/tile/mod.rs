//! Prefill and append: a tile of queries against the keys of its row, as FlashAttention does it (Dao et al.,
//! 2022; Dao, 2023), for processors.
//!
//! [`accumulate`] walks the key tiles in ascending order. It gathers a tile's keys and values from their
//! pages into panels, once for all query rows, then takes the rows in blocks: scores, one step of the running
//! softmax, weighted values. Key tiles lie at multiples of [`KEY_TILE`] from absolute position 0 and a tile
//! that a row does not see leaves the row's state as it was, bit for bit; so causal and window skipping,
//! retention, page placement and whatever shares the tile change no bit of a row.
//!
//! bf16 tensors are multiplied as bf16 where the machine can (weights rounded to bf16 before the value
//! product, every sum in f32); otherwise everything is widened to f32 when it is packed.

mod body;
mod job;
mod keys;
#[cfg(feature = "flex")]
mod mods;
#[cfg(not(feature = "flex"))]
#[path = "mods_off.rs"]
mod mods;
mod pack;
mod simd;
mod softmax;
#[cfg(test)]
mod tests;

use std::f32::consts::LOG2_E;
use std::ops::Range;

pub(crate) use body::KEY_TILE;
use body::{Block, Body, Logits, MAX_ROWS, PAD, PortableBody};
pub(crate) use job::{RowMask, TileJob, TileState};
pub(crate) use keys::{KeyRun, Slots};
use keys::{Side, rows_of};
#[cfg(feature = "flex")]
pub(crate) use mods::Mods;
use mods::Places;
pub(crate) use mods::TileMods;

use crate::DType;
use crate::cpu::Isa;
use crate::cpu::e4m3::widen_on;
use crate::mutant::planted;

/// Query tokens of a tile, for a row of `q_len` queries of which `group` heads share a KV head: long rows
/// take about 192 query rows a tile, which pays for packing the keys, short ones 96, which gives each
/// processor something to do. Tiles lie at multiples of it from the row's first query.
pub(crate) fn tile_tokens(q_len: usize, group: usize) -> usize {
    let rows = if q_len.saturating_mul(group) >= 768 { 192 } else { 96 };
    (rows / group.max(1)).max(1)
}

/// Query tokens of a tile of a row over blocks: as [`tile_tokens`] of a long row, shared out so that a row of a few
/// tiles has them of one size.
pub(crate) fn even_tokens(q_len: usize, group: usize) -> usize {
    let most = (192 / group.max(1)).max(1);
    q_len.div_ceil(q_len.div_ceil(most).max(1)).max(1)
}

/// Words of scratch that [`accumulate`] needs for a tile of `rows` (tokens times group) query rows of width
/// `head_dim_qk` and values of width `head_dim_vo`, whatever the instruction set and dtype.
pub(crate) fn scratch_words(rows: usize, head_dim_qk: usize, head_dim_vo: usize) -> usize {
    let (dk, dv) = (head_dim_qk.next_multiple_of(PAD), head_dim_vo.next_multiple_of(2 * PAD));
    let queries = rows.next_multiple_of(MAX_ROWS) * dk + PAD;
    let stage = PAD * dk.max(dv);
    // Every area begins at a multiple of 16 words, after the first 64-byte boundary.
    queries + KEY_TILE * (dk + dv) + MAX_ROWS * KEY_TILE + stage + 6 * PAD
}

/// Brings `state` up to date with the row's keys at absolute positions `keys`: as many calls as one likes, over
/// ascending ranges that meet at multiples of [`KEY_TILE`], give the bits of one call over all of them.
///
/// # Panics
/// When the job contradicts itself: tensors of another rank or width than each other, a page outside the
/// cache or missing from `pages`, state or scratch too short, an `isa` that this machine lacks. Plans are
/// checked before they come here.
pub(crate) fn accumulate(
    isa: Isa,
    job: &TileJob<'_>,
    keys: Range<usize>,
    state: &mut TileState<'_>,
    scratch: &mut [u32],
) {
    assert!(isa.is_supported(), "{isa} does not run here");
    let bf16 = job.q.dtype() == DType::Bf16 && job.keys[0].k.dtype() == DType::Bf16;
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 if bf16 => drive::<body::Bf16Body>(isa, job, keys, state, scratch),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Avx512 => drive::<body::Avx512Body>(isa, job, keys, state, scratch),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2Fma => drive::<body::Avx2Body>(isa, job, keys, state, scratch),
        // Advanced SIMD is part of every AArch64, so the plain body is compiled for it.
        _ => {
            let _ = bf16;
            drive::<PortableBody>(isa, job, keys, state, scratch);
        }
    }
}

/// The scratch, cut into its areas.
struct Areas {
    queries: *mut u32,
    keys: *mut u32,
    values: *mut u32,
    scores: *mut f32,
    stage: *mut u32,
}

impl Areas {
    fn cut(scratch: &mut [u32], rows: usize, dk: usize, dv: usize) -> Areas {
        let needed = scratch_words(rows, dk, dv);
        assert!(scratch.len() >= needed, "tile scratch: {needed} words needed, {} there", scratch.len());
        let (dk, dv) = (dk.next_multiple_of(PAD), dv.next_multiple_of(2 * PAD));
        let base = scratch.as_mut_ptr();
        let mut next = base.align_offset(64).min(PAD);
        let mut take = |words: usize| {
            let at = base.wrapping_add(next);
            next += words.next_multiple_of(PAD);
            at
        };
        Areas {
            queries: take(rows.next_multiple_of(MAX_ROWS) * dk + PAD),
            keys: take(KEY_TILE * dk),
            values: take(KEY_TILE * dv),
            scores: take(MAX_ROWS * KEY_TILE).cast(),
            stage: take(PAD * dk.max(dv)),
        }
    }
}

/// The walk over key tiles, with the body `B`.
fn drive<B: Body>(
    isa: Isa,
    job: &TileJob<'_>,
    keys: Range<usize>,
    state: &mut TileState<'_>,
    scratch: &mut [u32],
) {
    let rows = job.rows();
    let (dk, dv) = (job.q.shape()[2], job.keys[0].v.width());
    let kv_dtype = job.keys[0].k.dtype();
    check(job, state);
    let areas = Areas::cut(scratch, rows, dk, dv);
    let key_words = dk.div_ceil(B::PER_WORD);
    let block_words = key_words.next_multiple_of(PAD) * B::ROWS;

    let shape = pack::Packing { dtype: job.q.dtype(), width: dk, span: (0, 0), codes: None };
    for (b, first) in (0..rows).step_by(B::ROWS).enumerate() {
        let mut pointers = [std::ptr::null(); MAX_ROWS];
        let present = B::ROWS.min(rows - first);
        for (r, pointer) in pointers[..present].iter_mut().enumerate() {
            *pointer = query_row(job, first + r);
        }
        // SAFETY: `check` holds the tile inside `q`, whose rows are contiguous; `accumulate` checked the
        // instruction set; the area holds every block and 16 words more.
        unsafe {
            let to = areas.queries.add(b * block_words);
            B::pack_queries(&pointers[..present], &shape, to, areas.stage);
        }
    }

    let reach = job.reach(&keys);
    let logits = Scores::of(job);
    let row_bytes = [job.keys[0].k.row_bytes(), job.keys[0].v.row_bytes()];
    let blocks = rows.div_ceil(B::ROWS);
    let mut base = reach.start / KEY_TILE * KEY_TILE;
    let mut next = Tile::of(job, base, &keys);
    while base < reach.end {
        let tile = next;
        next = Tile::of(job, base + KEY_TILE, &keys);
        if tile.seen == 0 {
            base += KEY_TILE;
            continue;
        }
        let span = (tile.seen.trailing_zeros() as usize, 128 - tile.seen.leading_zeros() as usize);
        // SAFETY: `rows_of` checked every page and slot against the tensors; the areas hold a whole tile.
        unsafe {
            let [key_codes, value_codes] = tile.codes(isa);
            let shape = pack::Packing { dtype: kv_dtype, width: dk, span, codes: key_codes };
            B::pack_keys(&tile.keys, &shape, areas.keys, areas.stage);
            let shape = pack::Packing { dtype: kv_dtype, width: dv, span, codes: value_codes };
            B::pack_values(&tile.values, &shape, areas.values, areas.stage);
        }
        for (b, first) in (0..rows).step_by(B::ROWS).enumerate() {
            let present = B::ROWS.min(rows - first);
            let mut visible = [u128::MAX; MAX_ROWS];
            if !tile.whole {
                for r in 0..present {
                    visible[r] = job.visible(first + r, base, &keys, tile.places.as_ref());
                }
            }
            let block = Block {
                rows: present,
                visible,
                logits: logits.of_block(job, first, present, base, tile.places.as_ref()),
                key_words,
                dv,
                q: areas.queries.wrapping_add(b * block_words),
                keys: areas.keys,
                values: areas.values,
                scores: areas.scores,
                m: state.m[first..first + present].as_mut_ptr(),
                l: state.l[first..first + present].as_mut_ptr(),
                o: state.o[first * dv..(first + present) * dv].as_mut_ptr(),
            };
            // The next tile's rows are spread over the blocks of this one, and arrive while it is computed.
            let (from, to) = (b * KEY_TILE / blocks, (b + 1) * KEY_TILE / blocks);
            // SAFETY: the areas were just packed for this span; the state's slices were cut for
            // `present` rows; `accumulate` checked the instruction set.
            unsafe {
                for row in next.keys[from..to].iter().filter(|row| !row.is_null()) {
                    B::prefetch(*row, row_bytes[0]);
                }
                for row in next.values[from..to].iter().filter(|row| !row.is_null()) {
                    B::prefetch(*row, row_bytes[1]);
                }
                B::attend(&block);
            }
        }
        base += KEY_TILE;
    }
}

/// A key tile, before it is packed.
struct Tile {
    /// The keys that some query of the tile of queries sees.
    seen: u128,
    /// Whether every query sees every key.
    whole: bool,
    /// Which keys they are, where mods ask.
    places: Option<Places>,
    keys: pack::KeyRows,
    values: pack::KeyRows,
    /// Where the scales of keys and of values lie, of codes.
    scales: Option<[pack::KeyRows; 2]>,
}

impl Tile {
    fn of(job: &TileJob<'_>, base: usize, keys: &Range<usize>) -> Tile {
        let places =
            job.mods.as_ref().filter(|_| base < job.kv_len).map(|mods| mods.places(base, job.kv_len));
        let whole = job.sees_whole(base, keys, places.as_ref());
        let seen = if whole { u128::MAX } else { job.seen(base, keys, places.as_ref()) };
        let valued = if planted("masked-v-not-zeroed") && seen != 0 {
            (u128::MAX >> seen.leading_zeros()) & (u128::MAX << seen.trailing_zeros())
        } else {
            seen
        };
        Tile {
            seen,
            whole,
            places,
            keys: rows_of(&job.keys, Side::Keys, base, seen),
            values: rows_of(&job.keys, Side::Values, base, valued),
            scales: job.keys[0].scales.map(|_| {
                let of = |side, seen| rows_of(&job.keys, side, base, seen);
                [of(Side::KeyScales, seen), of(Side::ValueScales, valued)]
            }),
        }
    }

    /// How codes of keys and of values are widened.
    fn codes(&self, isa: Isa) -> [Option<pack::Codes<'_>>; 2] {
        let of = |side: usize| {
            self.scales.as_ref().map(|scales| pack::Codes { scales: &scales[side], widen: widen_on(isa) })
        };
        [of(0), of(1)]
    }
}

/// How the job's scores become logits.
enum Scores {
    Scaled(f32),
    General,
    Modified,
}

impl Scores {
    fn of(job: &TileJob<'_>) -> Scores {
        let modified = job.mods.as_ref().is_some_and(|mods| mods.change_scores());
        if modified || job.mods.is_some() && job.sm_scale < 0.0 {
            return Scores::Modified;
        }
        let plain = job.logits_soft_cap <= 0.0 && job.alibi_slopes.is_none();
        // A negative scale would turn the maximum around, so it is applied before.
        if plain && job.sm_scale >= 0.0 { Scores::Scaled(job.sm_scale * LOG2_E) } else { Scores::General }
    }

    fn of_block<'a>(
        &self,
        job: &'a TileJob<'a>,
        first: usize,
        rows: usize,
        base: usize,
        places: Option<&'a Places>,
    ) -> Logits<'a> {
        match (self, &job.mods, places) {
            (Scores::Scaled(scale), ..) => return Logits::Scaled(*scale),
            (Scores::Modified, Some(mods), Some(places)) => {
                return Logits::Modified { sm_scale: job.sm_scale, mods, places, first, group: job.group };
            }
            _ => {}
        }
        let (mut slope, mut distance) = ([0.0; MAX_ROWS], [0.0; MAX_ROWS]);
        if let Some(slopes) = job.alibi_slopes {
            for r in 0..rows {
                let (t, h) = ((first + r) / job.group, (first + r) % job.group);
                slope[r] = slopes[job.kv_head * job.group + h];
                distance[r] = (base as i64 - (job.q_pos0 + t as i64)) as f32;
            }
            if planted("alibi-sign") {
                slope = slope.map(|slope| -slope);
            }
        }
        let cap = if planted("dropped-soft-cap") { 0.0 } else { job.logits_soft_cap };
        Logits::General { sm_scale: job.sm_scale, cap, slope, distance }
    }
}

/// Refuses a job that contradicts itself.
fn check(job: &TileJob<'_>, state: &TileState<'_>) {
    let q = job.q.shape();
    assert!(q.len() == 3 && q[2] > 0, "q {q:?}");
    assert!(job.q.dtype().is_float() && job.q.inner_contiguous(), "{:?}", job.q);
    assert!(job.q.device() == crate::Device::Cpu, "{:?}", job.q);
    let (dtype, dv) = (job.keys[0].k.dtype(), job.keys[0].v.width());
    for run in &job.keys {
        assert!(run.k.width() == q[2] && run.v.width() == dv && dv > 0, "widths of q {q:?} and of keys");
        assert!(run.k.dtype() == dtype && run.v.dtype() == dtype, "keys and values of several dtypes");
        assert!(run.scales.is_some() == (dtype == DType::E4m3), "codes have scales, and nothing else");
    }
    assert!(job.tokens > 0 && job.t0 + job.tokens <= q[0], "{} tokens at {} of {}", job.tokens, job.t0, q[0]);
    let heads = (job.kv_head + 1) * job.group;
    assert!(job.group > 0 && heads <= q[1], "head {} of {}", job.kv_head, q[1]);
    let rows = job.rows();
    let lengths = [state.m.len(), state.l.len(), state.o.len()];
    assert!(lengths == [rows, rows, rows * dv], "state of {rows} rows: {lengths:?}");
    let origin = job.keys[0].origin;
    assert!(origin <= job.kv_begin as i64, "page offset {origin} past {}", job.kv_begin);
    if let Some(slopes) = job.alibi_slopes {
        assert!(slopes.len() >= heads, "{} slopes for {heads} heads", slopes.len());
    }
}

/// Where row `r` of the tile begins.
fn query_row(job: &TileJob<'_>, r: usize) -> *const u8 {
    let t = job.t0 + r / job.group;
    let h = if planted("gqa-head-mapping") {
        job.kv_head + r % job.group * (job.q.shape()[1] / job.group)
    } else {
        job.kv_head * job.group + r % job.group
    };
    let strides = job.q.strides();
    job.q.as_ptr().wrapping_add((t * strides[0] + h * strides[1]) * job.q.dtype().size())
}
