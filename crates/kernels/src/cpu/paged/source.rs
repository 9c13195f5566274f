//! Where an item of the tile family finds its queries and keys, by what the list is over.

use super::call::Call;
use super::tile::{KeyRun, Slots, TileMods};
use crate::TensorRef;

/// What differs between lists.
pub(super) struct Source<'a> {
    /// `[T, H, D]`: the queries that the row's tokens index.
    pub(super) q: TensorRef<'a>,
    /// The row's first token in `q`.
    pub(super) q_begin: usize,
    /// Where its keys and values lie.
    pub(super) keys: [KeyRun<'a>; 2],
    /// What else happens to scores.
    pub(super) mods: Option<TileMods<'a>>,
}

/// The source of row `index` under key head `kv_head`, `q_first` being its first query token within the row.
pub(super) fn of<'a>(call: &'a Call<'a>, index: usize, q_first: usize, kv_head: usize) -> Source<'a> {
    match call.work.stored {
        #[cfg(feature = "dense")]
        crate::paged::Stored::Segments => segments(call, index, kv_head),
        #[cfg(feature = "flex")]
        crate::paged::Stored::Blocks => blocks(call, index, q_first, kv_head),
        _ => {
            let _ = q_first;
            pages(call, index, kv_head)
        }
    }
}

/// The row's page ids.
fn page_ids<'a>(call: &'a Call<'a>, index: usize) -> &'a [i32] {
    let row = &call.work.rows[index];
    &call.work.pages[row.page_begin as usize..][..row.page_count as usize]
}

fn pages<'a>(call: &'a Call<'a>, index: usize, kv_head: usize) -> Source<'a> {
    let row = &call.work.rows[index];
    let run = KeyRun {
        k: Slots::of_pages(call.k, kv_head),
        v: Slots::of_pages(call.v, kv_head),
        scales: call.extra.scales.map(|scales| scales.map(|scales| Slots::of_scales(scales, kv_head))),
        pages: page_ids(call, index),
        origin: row.kv_offset.into(),
        end: row.kv_len as usize,
    };
    Source { q: call.q, q_begin: row.q_begin as usize, keys: [run; 2], mods: None }
}

#[cfg(feature = "dense")]
fn segments<'a>(call: &'a Call<'a>, index: usize, kv_head: usize) -> Source<'a> {
    use crate::mutant::planted;

    let row = &call.work.rows[index];
    let segment = &call.work.segments.rows[index];
    let prefix_len = i64::from(segment.prefix_len);
    let shift = i64::from(planted("dense-prefix-shifted") && prefix_len > 0);
    let fresh = KeyRun {
        k: Slots::of_packed(call.k, kv_head),
        v: Slots::of_packed(call.v, kv_head),
        scales: None,
        pages: &[0],
        origin: prefix_len - shift - i64::from(segment.fresh_begin),
        end: row.kv_len as usize,
    };
    let prefix = match call.extra.prefix {
        Some([k, v]) if segment.prefix_len > 0 => {
            let (k, v, pages): (_, _, &[i32]) = if call.work.segments.paged {
                (Slots::of_pages(k, kv_head), Slots::of_pages(v, kv_head), page_ids(call, index))
            } else {
                (Slots::of_packed(k, kv_head), Slots::of_packed(v, kv_head), &[0])
            };
            let origin = -i64::from(segment.prefix_begin);
            KeyRun { k, v, scales: None, pages, origin, end: segment.prefix_len as usize }
        }
        _ => KeyRun { origin: 0, end: 0, ..fresh },
    };
    Source { q: call.q, q_begin: row.q_begin as usize, keys: [prefix, fresh], mods: None }
}

#[cfg(feature = "flex")]
fn blocks<'a>(call: &'a Call<'a>, index: usize, q_first: usize, kv_head: usize) -> Source<'a> {
    let list = &call.work.blocks;
    let row = &call.work.rows[index];
    let real = "an index of the list's, which was made for these shapes";
    // Rows of one head each have a plane a head; the others have one a batch, and all heads.
    let (plane, q_begin) = (row.q_begin as usize / list.q_len, row.q_begin as usize % list.q_len);
    let group = list.num_qo_heads / list.num_kv_heads;
    let (batch, head) = if list.per_head {
        (plane / list.num_qo_heads, plane % list.num_qo_heads)
    } else {
        (plane, kv_head * group)
    };
    let q = call.q.select(0, batch).expect(real);
    let q = if list.per_head { q.narrow(0, head, 1).expect(real) } else { q };
    let rows = |tensor: TensorRef<'a>| {
        let rows = tensor.select(0, batch).and_then(|tensor| tensor.select(0, head / group)).expect(real);
        Slots::of_blocks(rows, call.geometry.page_size)
    };
    let ids = page_ids(call, index);
    let beside = row.page_begin as usize..(row.page_begin + row.page_count) as usize;
    let (k, v) = (rows(call.k), rows(call.v));
    let run = KeyRun { k, v, scales: None, pages: ids, origin: 0, end: row.kv_len as usize };
    let mods = call.extra.mods.map(|mods| TileMods {
        mods,
        batch,
        head,
        q_idx: q_begin + q_first,
        block: call.geometry.page_size,
        positions: if list.positions.is_empty() { ids } else { &list.positions[beside.clone()] },
        partial: list.partial.get(beside).unwrap_or_default(),
    });
    Source { q: q.transpose(0, 1), q_begin, keys: [run; 2], mods }
}
