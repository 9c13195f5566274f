//! A list that serves the batch of the next step too: rows grew within their last leaves, or their pages moved.
//!
//! What a device's list is cut into follows from the leaves of its rows alone. While those stay, the items, merges and places of
//! partial states stay, and only the rows, the page ids and what tasks repeat of them are written anew: a step whose rows grew by
//! a token costs its rows and one comparison of the page ids. Costs of items then are those that the list was cut by; they order
//! it, and change no bit.

use crate::mutant::planted;
use crate::plan::{Planned, Schedule};
use crate::work::{Row, WorkList};

use super::balance::balance_rows;
use super::schedule::{leaves, same_row, visible};
use super::{Family, Geometry, PageTable, ScheduleOptions, Stored, Target, Variant};

/// What a list needed to be that of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewed {
    /// Nothing: it was that already.
    Same,
    /// Other rows or page ids, which it has now.
    Rows,
    /// To be made anew: it is as it was.
    Not,
}

impl Renewed {
    /// What that is to a plan; `None` where there is no plan yet.
    pub(crate) fn planned(self) -> Option<Planned> {
        match self {
            Renewed::Same => Some(Planned::Unchanged),
            Renewed::Rows => Some(Planned::Changed),
            Renewed::Not => None,
        }
    }
}

/// Makes `list`, cut with `options`, that of a batch, if that takes no new cut. A table that would be refused, or has a mask, is
/// never served.
pub(crate) fn renew(
    list: &mut WorkList,
    stored: Stored,
    geometry: &Geometry,
    variant: &Variant,
    table: &PageTable<'_>,
    options: &ScheduleOptions,
) -> Renewed {
    let rows = table.num_rows();
    let padded = options.pad_to.unwrap_or(list.num_tokens);
    let alike = stored == list.stored
        && *geometry == list.geometry
        && *variant == list.variant
        && table.mask.is_none()
        && table.num_pages == list.num_pages
        && list.rows.len() == rows + usize::from(list.padded)
        && (padded, options.target, options.kernels) == (list.num_tokens, list.target, list.kernels)
        && (options.schedule, options.processors) == (list.schedule, list.processors)
        && table.check_rows(geometry).is_ok();
    if !alike {
        return Renewed::Not;
    }
    let mut same = true;
    for index in 0..rows {
        let new = table.row(geometry, stored, options.target, options.kernels, index);
        if !same_row(list, new, index) {
            same = false;
            if list.target != Target::Blocks
                || list.schedule == Schedule::Invariant && !is_cut_alike(variant, &list.rows[index], &new)
            {
                return Renewed::Not;
            }
        }
    }
    // Leaves that come of the whole batch are those of this one, or the list is another.
    let mut balanced = std::mem::take(&mut list.scratch.balanced);
    balanced.clear();
    if !same && list.schedule == Schedule::Throughput {
        balanced.extend(
            (0..rows).map(|index| table.row(geometry, stored, options.target, options.kernels, index)),
        );
        balanced.extend_from_slice(&list.rows[rows..]);
        balance_rows(list, &mut balanced, options);
    }
    let kept = |new: &Row, old: &Row| new == old || is_cut_alike(variant, old, new);
    let alike = planted("renewed-keeps-its-leaves")
        || balanced.iter().zip(&list.rows).all(|(new, old)| kept(new, old));
    list.scratch.balanced = balanced;
    if !alike {
        return Renewed::Not;
    }
    let used = &table.kv_indices[..table.kv_indptr[rows] as usize];
    let pages_same = used == &list.pages[..];
    if same && pages_same {
        return Renewed::Same;
    }
    // Which pages rows share decides how a list for threads is cut.
    if list.target != Target::Blocks || !pages_same && table.check_pages().is_err() {
        return Renewed::Not;
    }
    for index in 0..rows {
        let leaf_keys = list.rows[index].leaf_keys;
        list.rows[index] = table.row(geometry, stored, options.target, options.kernels, index);
        if list.schedule == Schedule::Throughput {
            list.rows[index].leaf_keys = leaf_keys;
        }
    }
    // Tasks are those of the first items, in their order.
    for (task, item) in list.tasks.iter_mut().zip(&list.items) {
        let row = &list.rows[list.members[item.member_begin as usize].row as usize];
        let (lo, hi) = visible(&list.variant, row, item.q_begin, item.q_begin + item.q_count);
        let border = |leaf: u32| u64::from(leaf) * u64::from(row.leaf_keys);
        task.lo = border(item.leaf_begin).max(lo.into()) as u32;
        task.hi = border(item.leaf_end).min(hi.into()) as u32;
        (task.page_begin, task.kv_offset) = (row.page_begin, row.kv_offset);
        task.first = i64::from(row.kv_len) - i64::from(row.q_len) + i64::from(item.q_begin);
    }
    if !pages_same {
        list.pages.clear();
        list.pages.extend_from_slice(used);
    }
    list.staged.renewed(!pages_same);
    Renewed::Rows
}

/// Whether a row's items are those that it had.
fn is_cut_alike(variant: &Variant, old: &Row, new: &Row) -> bool {
    // Rows of many queries are cut by what each of their tiles sees.
    let few = [Family::Decode as u32, Family::Latent as u32].contains(&old.family);
    let cut = |row: &Row| leaves(row, visible(variant, row, 0, row.q_len));
    let shape = |row: &Row| (row.mask_begin, row.q_begin, row.q_len, row.family, row.leaf_keys);
    few && shape(old) == shape(new) && cut(old) == cut(new)
}

#[cfg(all(test, feature = "paged"))]
pub(super) mod tests {
    use crate::DType;
    use crate::paged::schedule;
    use crate::work::Item;

    use super::*;

    pub(in crate::paged) const S: usize = 16;
    /// Pages that there are.
    const PAGES: usize = 1 << 20;

    /// Rows of one query token but for the last, page ids that descend, and a list for each step.
    pub(in crate::paged) struct Batch {
        qo_indptr: Vec<i32>,
        kv_indptr: Vec<i32>,
        pub(in crate::paged) kv_indices: Vec<i32>,
        last: Vec<i32>,
    }

    impl Batch {
        pub(in crate::paged) fn of(kv_lens: &[usize], q_last: i32, first_page: i32) -> Batch {
            let rows = kv_lens.len() as i32;
            let mut kv_indptr = vec![0];
            kv_lens
                .iter()
                .for_each(|len| kv_indptr.push(kv_indptr[kv_indptr.len() - 1] + len.div_ceil(S) as i32));
            let pages = kv_indptr[kv_lens.len()];
            Batch {
                qo_indptr: (0..rows).chain([rows - 1 + q_last]).collect(),
                kv_indices: (0..pages).map(|page| first_page + pages - page).collect(),
                kv_indptr,
                last: kv_lens.iter().map(|len| (len.max(&1) - 1) as i32 % S as i32 + 1).collect(),
            }
        }

        pub(in crate::paged) fn table(&self) -> PageTable<'_> {
            PageTable {
                qo_indptr: &self.qo_indptr,
                kv_indptr: &self.kv_indptr,
                kv_indices: &self.kv_indices,
                kv_last_page_len: &self.last,
                num_pages: PAGES,
                ..PageTable::default()
            }
        }

        /// The list of these rows over latents of 512 and 64 lanes, under so many heads.
        #[cfg(feature = "mla")]
        pub(in crate::paged) fn over_latents(&self, heads: usize, options: &ScheduleOptions) -> WorkList {
            let geometry = crate::mla::Geometry {
                num_qo_heads: heads,
                kv_lora_rank: 512,
                qk_rope_head_dim: 64,
                page_size: S,
                q_dtype: DType::Bf16,
                kv_dtype: DType::Bf16,
            };
            let variant = crate::mla::Variant { sm_scale: 1.0, causal: true };
            let mut list = WorkList::default();
            crate::mla::schedule(&geometry, &variant, &self.table(), options, &mut list).unwrap();
            list
        }
    }

    fn geometry() -> Geometry {
        Geometry {
            num_qo_heads: 4,
            num_kv_heads: 2,
            head_dim_qk: 64,
            head_dim_vo: 64,
            page_size: S,
            q_dtype: DType::Bf16,
            kv_dtype: DType::Bf16,
        }
    }

    fn options(target: Target) -> ScheduleOptions {
        ScheduleOptions { workers: 2, target, ..ScheduleOptions::default() }
    }

    /// Everything that a kernel reads of a list, in an order of its own for items of about the same cost.
    fn read(list: &WorkList) -> impl PartialEq + std::fmt::Debug + use<> {
        let mut items: Vec<Item> = list.items.iter().map(|item| Item { cost: 0, ..*item }).collect();
        items.sort_by_key(|item| (item.member_begin, item.kv_head_begin));
        let arrays =
            (list.rows.clone(), items, list.members.clone(), list.merges.clone(), list.parts.clone());
        let mut tasks = list.tasks.clone();
        tasks.sort_by_key(|task| (task.token, task.head, task.lo));
        let sizes = (list.partial_len, list.few, list.num_tokens, list.max_lanes);
        (arrays, tasks, list.pages.clone(), sizes, (list.tickets, list.fused))
    }

    #[test]
    fn a_renewed_list_is_what_a_new_one_would_be() {
        let mut tally = [0; 3];
        let throughput = ScheduleOptions { schedule: Schedule::Throughput, ..options(Target::Blocks) };
        for (window_left, options) in
            [(None, options(Target::Blocks)), (Some(100), options(Target::Blocks)), (None, throughput)]
        {
            let variant = Variant { window_left, ..Variant::causal(64) };
            let mut list = WorkList::default();
            for step in 0..1100 {
                let lens = [1 + step, 700 + step, 0, 40 + step / 2];
                // Rows of several queries; and now and then all pages move.
                let batch = Batch::of(&lens, if step % 400 == 399 { 2 } else { 1 }, (step / 100) as i32);
                let table = batch.table();
                let done = renew(&mut list, Stored::Heads, &geometry(), &variant, &table, &options);
                tally[done as usize] += 1;
                if done == Renewed::Not {
                    schedule(&geometry(), &variant, &table, &options, &mut list).unwrap();
                }
                let mut anew = WorkList::default();
                schedule(&geometry(), &variant, &table, &options, &mut anew).unwrap();
                assert_eq!(read(&list), read(&anew), "step {step}");
                let again = renew(&mut list, Stored::Heads, &geometry(), &variant, &table, &options);
                assert_eq!(again, Renewed::Same);
            }
        }
        assert!(tally[Renewed::Rows as usize] > 3100, "{tally:?}");
    }

    #[test]
    fn what_would_be_refused_or_is_cut_otherwise_leaves_the_list_as_it_was() {
        let variant = Variant::causal(64);
        let blocks = options(Target::Blocks);
        let before = Batch::of(&[100, 600], 1, 0);
        let mut list = WorkList::default();
        schedule(&geometry(), &variant, &before.table(), &blocks, &mut list).unwrap();
        let as_it_was = read(&list);
        let grown = || Batch::of(&[101, 601], 1, 0);
        let mut beyond = grown();
        beyond.kv_indices[3] = PAGES as i32;
        let mut negative = grown();
        negative.kv_indices[40] = -1;
        let mut long_page = grown();
        long_page.last[0] = 17;
        let mut backwards = grown();
        backwards.kv_indptr[1] = 60;
        let leaf = Batch::of(&[513, 600], 1, 0);
        let queries = Batch::of(&[101, 601], 2, 0);
        let fewer = Batch::of(&[100], 1, 0);
        for other in [beyond, negative, long_page, backwards, leaf, queries, fewer] {
            let done = renew(&mut list, Stored::Heads, &geometry(), &variant, &other.table(), &blocks);
            assert_eq!(done, Renewed::Not, "{:?}", other.kv_indptr);
            assert_eq!(read(&list), as_it_was);
        }
        let table = grown();
        for (stored, geometry, variant, options) in [
            (Stored::Latents, geometry(), variant, blocks),
            (Stored::Heads, Geometry { page_size: 8, ..geometry() }, variant, blocks),
            (Stored::Heads, geometry(), Variant { sm_scale: 0.5, ..variant }, blocks),
            (Stored::Heads, geometry(), variant, options(Target::Threads)),
            (Stored::Heads, geometry(), variant, ScheduleOptions { pad_to: Some(9), ..blocks }),
        ] {
            let done = renew(&mut list, stored, &geometry, &variant, &table.table(), &options);
            assert_eq!(done, Renewed::Not);
        }
        assert_eq!(
            renew(&mut list, Stored::Heads, &geometry(), &variant, &table.table(), &blocks),
            Renewed::Rows
        );
    }

    #[test]
    fn threads_cut_by_what_rows_share_and_cut_again() {
        let (variant, threads) = (Variant::causal(64), options(Target::Threads));
        let mut list = WorkList::default();
        let batch = Batch::of(&[100, 600], 1, 0);
        schedule(&geometry(), &variant, &batch.table(), &threads, &mut list).unwrap();
        let mut to =
            |batch: &Batch| renew(&mut list, Stored::Heads, &geometry(), &variant, &batch.table(), &threads);
        assert_eq!(to(&Batch::of(&[101, 601], 1, 0)), Renewed::Not);
        assert_eq!(to(&Batch::of(&[100, 600], 1, 1)), Renewed::Not);
        assert_eq!(to(&batch), Renewed::Same);
    }
}
