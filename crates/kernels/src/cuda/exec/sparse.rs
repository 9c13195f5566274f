//! Attention over picks on a device.

use std::cell::Cell;

use bytemuck::{Pod, Zeroable};

use crate::cpu::paged::{Out, state_len};
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::launch::launch_next;
use crate::cuda::{Context, Function, Launch, launch};
use crate::dsa::{DeviceTable, FEW_QUERIES};
use crate::mla::Geometry;
use crate::paged::LATENT_TREE_HEADS;
use crate::{DType, Device, Error, Kernels, Result, Stream, TensorMut, TensorRef};

use super::merge::Joiner;
use super::params::{ALIGNED, Attend, Place, View, Walk, number};
use super::{Choice, latents, merge};

/// Picks a leaf of a row of few queries.
const LEAF: usize = 512;
/// The same under heads so few that an item may have several leaves, up to two to the [`TREE_LEVEL`].
const TREE_LEAF: usize = 128;
/// As `AT_HAND` in `cu/latent_few.cu`.
const TREE_LEVEL: u32 = 3;
/// Items that there are to be at most before one has more leaves: two for each multiprocessor of a large device.
const MANY_ITEMS: usize = 264;
/// Bytes of the states of a panel of rows, unless [`LEAST_ROWS`] need more.
const PANEL_BYTES: usize = 256 << 20;
/// Rows of a panel at least, when there are so many.
const LEAST_ROWS: usize = 8;
/// Bytes of shared memory of `picks_order` in `cu/picks.cu`.
const ORDER_SHARED: u32 = 64;
/// Threads of the kernels that join a row's items.
const MERGE_THREADS: u32 = 128;
/// Bytes of a work list's head, and what is lost where it and its items end.
const LIST_HEAD: usize = 80 + 64 + 16;

/// As `Sparse` in `cu/sparse.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Sparse {
    table: u64,
    selection: u64,
    counts: u64,
    sorted: u64,
    partials: u64,
    q: u64,
    q_pe: u64,
    latents: u64,
    o: u64,
    lse: u64,
    selection_stride: i64,
    q_token: i64,
    q_head: i64,
    pe_token: i64,
    pe_head: i64,
    page: i64,
    slot: i64,
    o_token: i64,
    o_head: i64,
    lse_token: i64,
    lse_head: i64,
    heads: u32,
    c: u32,
    e: u32,
    page_size: u32,
    topk: u32,
    leaves: u32,
    row_begin: u32,
    row_end: u32,
    scale: f32,
    aligned: u32,
    leaf: u32,
    level: u32,
    apart: u64,
    image: u64,
}

const _: () = assert!(size_of::<Sparse>() == 232);

/// One call, checked, its arrays those of the table.
pub(crate) struct Picks<'a> {
    pub(crate) geometry: Geometry,
    pub(crate) sm_scale: f32,
    /// `[T, H, C]`.
    pub(crate) q_nope: TensorRef<'a>,
    /// `[T, H, E]`.
    pub(crate) q_pe: TensorRef<'a>,
    /// `[P, S, C + E]`.
    pub(crate) latent: TensorRef<'a>,
    /// `[T, K]` i32.
    pub(crate) selection: TensorRef<'a>,
    pub(crate) table: &'a DeviceTable,
    pub(crate) o: Out,
    pub(crate) lse: Option<Out>,
}

/// How picks of rows of few queries are cut: picks a leaf, and leaves an item, as a power of two. The latter changes no bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    leaf: usize,
    level: u32,
}

impl Cut {
    const PLAIN: Cut = Cut { leaf: LEAF, level: 0 };

    /// Longer leaves for many heads, whose states are large, where a Hopper's kernel takes a list of them.
    fn listed(geometry: &Geometry, rows: usize, topk: usize) -> Cut {
        match geometry.num_qo_heads {
            // Over codes no kernel joins leaves, and an end of one costs more than it does elsewhere.
            0..=64 if geometry.kv_dtype == DType::E4m3 => Cut { leaf: 2 * LEAF, level: 0 },
            heads if heads <= LATENT_TREE_HEADS => Cut::tree(rows, topk),
            0..=32 => Cut::PLAIN,
            33..=64 => Cut { leaf: 2 * LEAF, level: 0 },
            _ => Cut { leaf: 4 * LEAF, level: 0 },
        }
    }

    /// For so many rows, where the kernel joins leaves.
    fn tree(rows: usize, topk: usize) -> Cut {
        let few =
            |&level: &u32| rows.saturating_mul(Cut { leaf: TREE_LEAF, level }.items(topk)) <= MANY_ITEMS;
        Cut { leaf: TREE_LEAF, level: (0..TREE_LEVEL).find(few).unwrap_or(TREE_LEVEL) }
    }

    /// Most rows that are cut so, of up to `rows`.
    fn most_rows(level: u32, rows: usize, topk: usize) -> usize {
        let most =
            if level == TREE_LEVEL { rows } else { MANY_ITEMS / Cut { leaf: TREE_LEAF, level }.items(topk) };
        most.min(rows)
    }

    /// Items of a row of `topk` picks.
    fn items(self, topk: usize) -> usize {
        topk.div_ceil(self.leaf << self.level).max(1)
    }
}

/// How the workspace of a call is cut, in bytes: numbers of picks, picks in order, states.
struct Sizes {
    counts: usize,
    sorted: usize,
    /// States of one row.
    row: usize,
    leaves: usize,
    topk: usize,
}

impl Sizes {
    fn of(geometry: &Geometry, rows: usize, topk: usize, cut: Cut) -> Sizes {
        let leaves = cut.items(topk);
        // A row of one leaf writes its result.
        let states = if leaves == 1 { 0 } else { leaves };
        let state = state_len(geometry.num_qo_heads, geometry.kv_lora_rank);
        let line = |words: usize| words.saturating_mul(4).checked_next_multiple_of(64).unwrap_or(usize::MAX);
        Sizes {
            counts: line(rows),
            sorted: line(rows.saturating_mul(topk)),
            row: states.saturating_mul(state).saturating_mul(4),
            leaves,
            topk,
        }
    }

    /// Bytes of a work list of one row, but for its head: the row, tasks, items and their members, pages.
    fn listed(&self) -> usize {
        (48 + self.leaves * (80 + 40 + 16)).saturating_add(self.topk.saturating_mul(4))
    }

    /// Rows of a panel in `room` bytes, and how many of them have states: of all rows up to `few` do.
    fn panel(&self, rows: usize, few: usize, room: usize) -> (usize, usize) {
        if self.panel_bytes(rows, few) <= room {
            return (rows, few);
        }
        let panel = (room.saturating_sub(LIST_HEAD) / self.row.saturating_add(self.listed())).min(rows);
        (panel, panel.min(few))
    }

    /// Bytes of a panel, of which so many rows have states.
    fn panel_bytes(&self, rows: usize, few: usize) -> usize {
        let listed = rows.saturating_mul(self.listed());
        few.saturating_mul(self.row).saturating_add(listed).saturating_add(LIST_HEAD)
    }
}

/// Bytes that [`attend`] needs for up to so many rows of up to `topk` picks, wherever the workspace starts.
pub(crate) fn bytes(geometry: &Geometry, rows: usize, topk: usize) -> usize {
    let of = |rows: usize, cut: Cut| {
        let sizes = Sizes::of(geometry, rows, topk, cut);
        let panel = (PANEL_BYTES / sizes.row.max(1)).max(LEAST_ROWS).min(rows);
        sizes
            .counts
            .saturating_add(sizes.sorted)
            .saturating_add(sizes.panel_bytes(panel, panel))
            .saturating_add(63)
    };
    let trees = if geometry.num_qo_heads <= LATENT_TREE_HEADS { 0..TREE_LEVEL + 1 } else { 0..0 };
    let trees = trees.map(|level| of(Cut::most_rows(level, rows, topk), Cut { leaf: TREE_LEAF, level }));
    trees.chain([of(rows, Cut::PLAIN)]).max().unwrap_or(0)
}

/// The kernels of a layer.
struct Kinds {
    /// Around the picks, by entry.
    picks: Key,
    /// Over them, where tensor cores serve.
    over: Option<Choice>,
    /// A Hopper's kernel of work lists over latents, to which picks are pages of one slot.
    list: Option<Choice>,
}

fn choose(geometry: &Geometry, kernels: Kernels, context: &Context) -> Kinds {
    let heads = geometry.num_qo_heads;
    let picks = Key::new(Unit::PICKS, "picks_order")
        .with("Q_TYPE", number(geometry.q_dtype))
        .with("KV_TYPE", number(geometry.kv_dtype));
    let key = Key::new(Unit::SPARSE, "sparse_attend");
    let over = latents::variant(key, &geometry.one_head(), heads, heads, context);
    // Whatever the batch: the two have other bits. A Hopper's is the faster one, but for many rows of few heads.
    let list = match kernels.settled() {
        Kernels::Mma => None,
        Kernels::Auto | Kernels::Wgmma => {
            latents::hopper(&geometry.one_head(), Walk::Few, heads, heads, false, context)
        }
    };
    Kinds { picks, over, list }
}

/// The kernel in `cu/picks.cu` that joins a row's items.
fn joining(joiner: Joiner) -> &'static str {
    match joiner {
        Joiner::Few => "picks_merge_few",
        Joiner::Near => "picks_merge_near",
        Joiner::Many => "picks_merge_many",
    }
}

/// How far pages of latents lie apart in steps of a slot, and the elements of a step, if every slot is a whole number of steps from
/// the first, and so many that a list can name them.
fn steps(latent: &TensorRef<'_>) -> Option<(usize, usize)> {
    let [pages, slots] = [0, 1].map(|axis| latent.shape()[axis]);
    let [page, slot] = [0, 1].map(|axis| latent.strides()[axis]);
    let step = if slots == 1 { page } else { slot };
    if step == 0 || pages > 1 && !page.is_multiple_of(step) {
        return None;
    }
    let apart = if pages > 1 { page / step } else { 0 };
    let last = pages.saturating_sub(1).checked_mul(apart)?.checked_add(slots)?;
    (last <= i32::MAX as usize).then_some((apart, step))
}

/// Compiles and loads what attending such a layer's picks will run.
pub(crate) fn prepare(device: Device, geometry: &Geometry, kernels: Kernels) -> Result<()> {
    let Kinds { picks, over, list } = choose(geometry, kernels, Context::of(device)?);
    let entry = |entry| Key { entry, ..picks.clone() };
    let mut keys = vec![entry("picks_order")];
    if over.is_some() || list.is_some() {
        keys.extend(Joiner::ALL.map(|joiner| entry(joining(joiner))));
    }
    if over.is_none() {
        keys.push(entry("picks_plain"));
    }
    keys.extend([over, list].into_iter().flatten().map(|choice| choice.key));
    jit::prepare(device, &keys)
}

/// Attends every row that has a request over its picks.
///
/// # Errors
/// A workspace that is too small; a kernel that cannot be built or launched.
pub(crate) fn attend(stream: &Stream, picks: &Picks<'_>, workspace: &mut TensorMut<'_>) -> Result<()> {
    let Picks { geometry, q_nope, q_pe, latent, selection, table, .. } = picks;
    let (rows, topk) = (selection.shape()[0], selection.shape()[1]);
    if rows == 0 {
        return Ok(());
    }
    let device = stream.device();
    let context = Context::of(device)?;
    let Kinds { picks: key, over, list } = choose(geometry, table.kernels(), context);
    let steps = steps(latent);
    let list = list.filter(|_| steps.is_some());
    let cut = list.as_ref().map_or(Cut::PLAIN, |_| Cut::listed(geometry, rows, topk));
    let sizes = Sizes::of(geometry, rows, topk, cut);
    let available = workspace.numel();
    let base = workspace.as_mut_ptr() as u64;
    let counts = base.next_multiple_of(64);
    let fixed = (counts - base) as usize + sizes.counts + sizes.sorted;
    // Rows of few queries, the others being one leaf each. A captured call has others later, of as many requests.
    let few = rows.min(table.num_requests().saturating_mul(FEW_QUERIES));
    let (panel, few) = sizes.panel(rows, few, available.saturating_sub(fixed));
    if available < fixed || panel == 0 {
        return Err(Error::Workspace { needed: bytes(geometry, rows, topk), available });
    }
    let entry = |entry| jit::function(device, &Key { entry, ..key.clone() });
    let (c, e) = (geometry.kv_lora_rank, geometry.qk_rope_head_dim);
    let aligned = c.is_multiple_of(8)
        && e.is_multiple_of(8)
        && View::aligned(q_nope)
        && (e == 0 || View::aligned(q_pe))
        && View::aligned(latent);
    let mut params = Sparse {
        table: table.address(),
        selection: selection.as_ptr() as u64,
        counts,
        sorted: counts + sizes.counts as u64,
        partials: counts + (sizes.counts + sizes.sorted) as u64,
        q: q_nope.as_ptr() as u64,
        q_pe: q_pe.as_ptr() as u64,
        latents: latent.as_ptr() as u64,
        o: picks.o.ptr as u64,
        lse: picks.lse.as_ref().map_or(0, |lse| lse.ptr as u64),
        selection_stride: selection.strides()[0] as i64,
        q_token: q_nope.strides()[0] as i64,
        q_head: q_nope.strides()[1] as i64,
        pe_token: q_pe.strides()[0] as i64,
        pe_head: q_pe.strides()[1] as i64,
        page: latent.strides()[0] as i64,
        slot: latent.strides()[1] as i64,
        o_token: picks.o.strides[0] as i64,
        o_head: picks.o.strides[1] as i64,
        lse_token: picks.lse.as_ref().map_or(0, |lse| lse.strides[0] as i64),
        lse_head: picks.lse.as_ref().map_or(0, |lse| lse.strides[1] as i64),
        heads: geometry.num_qo_heads as u32,
        c: c as u32,
        e: e as u32,
        page_size: geometry.page_size as u32,
        topk: topk as u32,
        leaves: sizes.leaves as u32,
        row_begin: 0,
        row_end: rows as u32,
        scale: picks.sm_scale,
        aligned: aligned.into(),
        leaf: cut.leaf as u32,
        level: cut.level,
        apart: 0,
        image: 0,
    };
    let sms = context.sm_count() as usize;
    // Whether a kernel of this call was put in.
    let next = Cell::new(false);
    let put = |function: &Function, params: &Sparse, units: usize, most: usize, block: u32, shared: u32| {
        let how = Launch { grid: [units.min(most * sms) as u32, 1, 1], block, shared };
        // SAFETY: the kernel takes a `Sparse`; the call was checked: tensors of these shapes on this device, a table whose requests'
        // positions lie in the pages, picks that are looked up only where they were stored, a workspace cut by `Sizes`.
        unsafe {
            match next.replace(true) {
                true => launch_next(function, stream, how, params),
                false => launch(function, stream, how, params),
            }
        }
    };
    let order = entry("picks_order")?;
    let slices = |width: usize| c.div_ceil(width) * geometry.num_qo_heads;
    let (choice, listed) = match (&list, &over) {
        (Some(list), _) => (list, true),
        (None, Some(over)) => (over, false),
        (None, None) => {
            put(&order, &params, rows, 8, 256, ORDER_SHARED)?;
            return put(&entry("picks_plain")?, &params, rows * slices(1024), 8, 256, 256);
        }
    };
    let attend = jit::function(device, &choice.key)?;
    let joiner = Joiner::of(few * slices(merge::SLICE), sizes.leaves <= merge::NEAR);
    let merge = entry(joining(joiner))?;
    let fit = merge.blocks_per_sm(MERGE_THREADS, 0)?.max(1) as usize;
    let each = attend.blocks_per_sm(choice.threads, choice.shared)?.max(1) as usize;
    // A list lies behind the states, at a multiple of 64.
    let image = (params.partials + (few * sizes.row) as u64).next_multiple_of(64);
    let (apart, step) = steps.unwrap_or_default();
    if listed {
        (params.image, params.apart) = (image, apart as u64);
    }
    let view = View { at: params.latents, stride: [step as i64, step as i64, 0] };
    let list = Attend {
        image,
        partials: params.partials,
        q: View::of(q_nope),
        q_pe: View::of(q_pe),
        k: view,
        v: view,
        o: Place::of(&picks.o),
        lse: picks.lse.as_ref().map(Place::of).unwrap_or_default(),
        window_left: -1,
        h: params.heads,
        g: 1,
        d: params.c + params.e,
        dv: params.c,
        s: 1,
        scale: params.scale,
        flags: if aligned { ALIGNED } else { 0 },
        walk: Walk::All as u32,
        ..Attend::default()
    };
    for first in (0..rows).step_by(panel) {
        (params.row_begin, params.row_end) = (first as u32, rows.min(first + panel) as u32);
        let count = rows.min(first + panel) - first;
        put(&order, &params, count, 8, 256, ORDER_SHARED)?;
        let units = count * sizes.leaves * latents::pieces(&choice.key);
        if listed {
            let grid = [units.min(each * sms) as u32, 1, 1];
            let how = Launch { grid, block: choice.threads, shared: choice.shared };
            // SAFETY: the kernel takes an `Attend`; the kernel before it wrote the list, of rows of this call, pages that are slots
            // of its latents, and states in its workspace.
            unsafe { launch_next(&attend, stream, how, &list) }?;
        } else {
            put(&attend, &params, units, each, choice.threads, choice.shared)?;
        }
        if sizes.leaves > 1 {
            put(&merge, &params, (count.min(few) * slices(32)).div_ceil(4), fit, MERGE_THREADS, 0)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::DType;

    use super::*;

    #[test]
    fn what_many_rows_need_does_for_fewer_however_they_are_cut() {
        let geometry = Geometry {
            num_qo_heads: 16,
            kv_lora_rank: 512,
            qk_rope_head_dim: 64,
            page_size: 64,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        };
        for topk in [100, 129, 2048, 40_000] {
            for most in [1, 7, 64, 300] {
                let room = bytes(&geometry, most, topk);
                let mut before = Cut::tree(1, topk);
                assert_eq!((before.leaf, before.level), (TREE_LEAF, if topk > 33_792 { 1 } else { 0 }));
                for rows in 1..=most {
                    let cut = Cut::tree(rows, topk);
                    assert!(cut.level >= before.level && cut.level <= TREE_LEVEL);
                    assert!(cut.level == TREE_LEVEL || rows * cut.items(topk) <= MANY_ITEMS);
                    before = cut;
                    for cut in [cut, Cut::PLAIN] {
                        let sizes = Sizes::of(&geometry, rows, topk, cut);
                        let left = room - 63 - sizes.counts - sizes.sorted;
                        // All at once, or as many as panels may be.
                        let panel = (PANEL_BYTES / sizes.row.max(1)).max(LEAST_ROWS).min(rows);
                        assert!(
                            sizes.panel(rows, rows, left).0 >= panel,
                            "{rows} of {most} rows of {topk} picks"
                        );
                    }
                }
            }
        }
    }
}
