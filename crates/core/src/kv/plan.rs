//! Packing a step's segments into the field's arrays: rows, page tables, slots and positions.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use mstar_kernels::mutant::planted;

use super::PageId;
use super::stream::Stream;
use crate::resource::PaddedShape;
use crate::{Label, PlanId, RequestId, Slot, StepSerial};

/// One segment in a plan, in packed order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvRow {
    /// Whose stream; a padded row has a dummy id.
    pub request: RequestId,
    /// Which of its streams.
    pub label: Label,
    /// Query tokens: the segment's span.
    pub q_len: usize,
    /// Absolute position one past the last token, the step's own included.
    pub kv_len: usize,
    /// Absolute position of slot 0 of the first listed page: a multiple of the page size, 0 unless retention gave pages back.
    pub kv_offset: usize,
    /// Slots of the first listed page that lie before the stream's first kept token.
    pub page_start: usize,
    /// The stream's generation when the plan was made.
    pub generation: u64,
}

/// The packed rows and page tables of one plan label. Names and meaning of the arrays are the field's;
/// `R` rows, `T` tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPlan {
    /// Which plan this is.
    pub id: PlanId,
    /// `[R]`.
    pub rows: Vec<KvRow>,
    /// `[R + 1]`: where each row's tokens start.
    pub qo_indptr: Vec<i32>,
    /// `[R + 1]`: where each row's pages start in `kv_indices`.
    pub kv_indptr: Vec<i32>,
    /// Page ids, row after row: those that `kv_len` tokens need and no more.
    pub kv_indices: Vec<i32>,
    /// `[R]`: tokens in each row's last page, `1..=S`; 0 for a row without pages.
    pub kv_last_page_len: Vec<i32>,
    /// `[T]`: the cache slot (`page * S + slot`) that each token is written to; -1 writes nothing.
    pub slots: Vec<i64>,
    /// `[T]`: each token's absolute position; -1 for padding.
    pub positions: Vec<i32>,
    /// Rows that are real; the others pad the plan to its bucket: `kv_len` 0, no pages, slots -1. In a bucket that reads
    /// alone fill, the padding tokens lie past the last row.
    pub real_rows: usize,
}

/// One admitted segment: the stream as the step sees it, its own tokens counted in `stream.len`.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) request: RequestId,
    pub(super) label: Label,
    pub(super) span: usize,
    pub(super) stream: Stream,
}

impl KvPlan {
    fn empty(id: PlanId) -> KvPlan {
        KvPlan {
            id,
            rows: Vec::new(),
            qo_indptr: Vec::new(),
            kv_indptr: Vec::new(),
            kv_indices: Vec::new(),
            kv_last_page_len: Vec::new(),
            slots: Vec::new(),
            positions: Vec::new(),
            real_rows: 0,
        }
    }

    /// Fills the plan, from nothing, keeping only its memory.
    fn pack<'a>(
        &mut self,
        id: PlanId,
        rows: impl Iterator<Item = &'a Row>,
        page_size: usize,
        bucket: Option<PaddedShape>,
    ) -> Result<(), String> {
        self.id = id;
        self.rows.clear();
        self.slots.clear();
        self.positions.clear();
        self.kv_indices.clear();
        self.kv_last_page_len.clear();
        for indptr in [&mut self.qo_indptr, &mut self.kv_indptr] {
            indptr.clear();
            indptr.push(0);
        }
        for row in rows {
            self.push(row, page_size)?;
        }
        self.real_rows = self.rows.len();
        bucket.map_or(Ok(()), |shape| self.pad(shape))
    }

    fn push(&mut self, row: &Row, page_size: usize) -> Result<(), String> {
        let stream = &row.stream;
        let kv_len = stream.len;
        let used = stream.used_pages(kv_len, page_size);
        stream.table.append_to(&mut self.kv_indices, used);
        for position in kv_len - row.span..kv_len {
            let slot = stream.slot(position, page_size).ok_or_else(|| {
                format!("broken invariant: {} ({}) has no page for {position}", row.request, row.label)
            })?;
            self.slots.push(slot);
            self.positions.push(indptr(position)?);
        }
        let kv_offset = stream.kv_offset(page_size);
        let mut last = if used == 0 { 0 } else { kv_len - kv_offset - (used - 1) * page_size };
        if planted("last-page-len-plus-one") {
            last += 1;
        }
        self.rows.push(KvRow {
            request: row.request.clone(),
            label: row.label.clone(),
            q_len: row.span,
            kv_len,
            kv_offset,
            page_start: stream.page_start(page_size),
            generation: stream.generation,
        });
        self.qo_indptr.push(indptr(self.slots.len())?);
        self.kv_indptr.push(indptr(self.kv_indices.len())?);
        self.kv_last_page_len.push(indptr(last)?);
        Ok(())
    }

    /// Adds rows without keys until the plan has the bucket's shape; they share the tokens that are left. Where reads alone
    /// (contexts of span 0) fill the rows, the bucket's tokens are nobody's: there is no query among them to displace.
    fn pad(&mut self, shape: PaddedShape) -> Result<(), String> {
        let (rows, tokens) = (self.rows.len(), self.slots.len());
        let reads_fill_it = tokens == 0 && rows == shape.rows;
        let left_over = rows == shape.rows && tokens < shape.tokens && !reads_fill_it;
        if rows > shape.rows || tokens > shape.tokens || left_over {
            return Err(format!(
                "{rows} rows of {tokens} tokens do not fit a bucket of {} rows and {} tokens: padding tokens \
                 need a row of their own",
                shape.rows, shape.tokens
            ));
        }
        let nowhere = if planted("padded-row-writes") { 0 } else { -1 };
        let padded = shape.rows - rows;
        for i in 0..padded {
            let left = shape.tokens - self.slots.len();
            let q_len = left.div_ceil(padded - i);
            self.slots.resize(self.slots.len() + q_len, nowhere);
            self.positions.resize(self.slots.len(), -1);
            self.rows.push(KvRow {
                request: RequestId::dummy(rows + i),
                label: self.id.label.clone(),
                q_len,
                kv_len: 0,
                kv_offset: 0,
                page_start: 0,
                generation: 0,
            });
            self.qo_indptr.push(indptr(self.slots.len())?);
            self.kv_indptr.push(indptr(self.kv_indices.len())?);
            self.kv_last_page_len.push(0);
        }
        self.slots.resize(shape.tokens, nowhere);
        self.positions.resize(shape.tokens, -1);
        Ok(())
    }

    /// Page ids of row `row`.
    ///
    /// # Panics
    /// When the plan has no such row.
    #[track_caller]
    pub fn pages(&self, row: usize) -> &[PageId] {
        &self.kv_indices[self.kv_indptr[row] as usize..self.kv_indptr[row + 1] as usize]
    }
}

fn indptr(n: usize) -> Result<i32, String> {
    i32::try_from(n).map_err(|_| format!("{n} entries do not fit the 32-bit arrays of a plan"))
}

/// The plans of every (slot, label), each reused once nobody reads it any more.
#[derive(Debug, Default)]
pub(super) struct PlanShelf {
    plans: HashMap<(Slot, Label), Vec<Arc<KvPlan>>>,
}

/// Plans kept for one (slot, label): the one in use, and one that a backend may still hold.
const KEPT: usize = 2;

impl PlanShelf {
    /// Packs rows into the plan `id`; it is the one served from now on. On an error the one before stays.
    pub(super) fn pack<'a>(
        &mut self,
        id: PlanId,
        rows: impl Iterator<Item = &'a Row>,
        page_size: usize,
        bucket: Option<PaddedShape>,
    ) -> Result<(), String> {
        let kept = self.plans.entry((id.slot, id.label.clone())).or_default();
        // The oldest is free to reuse when nobody else holds it, unless it is the only one and thus being served.
        let reusable = kept.len() == KEPT && Arc::get_mut(&mut kept[0]).is_some();
        let mut plan = if reusable { kept.remove(0) } else { Arc::new(KvPlan::empty(id.clone())) };
        let filled = Arc::get_mut(&mut plan).expect("nobody else holds it").pack(id, rows, page_size, bucket);
        filled?;
        kept.push(plan);
        let extra = kept.len().saturating_sub(KEPT);
        kept.drain(..extra);
        Ok(())
    }

    /// The plan of this very id.
    pub(super) fn get(&self, id: &PlanId) -> Option<Arc<KvPlan>> {
        let newest = self.plans.get(&(id.slot, id.label.clone()))?.last()?;
        (newest.id.serial == id.serial).then(|| newest.clone())
    }

    /// Forgets that a step was planned; the memory stays.
    pub(super) fn forget(&mut self, slot: Slot, serial: StepSerial) {
        for ((_, label), kept) in self.plans.iter_mut().filter(|((s, _), _)| *s == slot) {
            if kept.last().is_some_and(|plan| plan.id.serial == serial) {
                // An id that no step has: the arrays stay for reuse, and are never served.
                match kept.last_mut().and_then(Arc::get_mut) {
                    Some(plan) => plan.id = PlanId { slot, label: label.clone(), serial: NEVER },
                    None => drop(kept.pop()),
                }
            }
        }
    }
}

/// A serial that no step has.
const NEVER: StepSerial = StepSerial(u64::MAX);

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, pages: &[PageId], len: usize, span: usize) -> Row {
        let mut stream = Stream::empty(3, None);
        pages.iter().for_each(|&page| stream.table.push(page));
        stream.len = len;
        Row { request: name.into(), label: Label::main(), span, stream }
    }

    fn id(serial: u64) -> PlanId {
        PlanId { slot: Slot(0), label: Label::main(), serial: StepSerial(serial) }
    }

    #[test]
    fn rows_are_packed_in_order_with_empty_rows_and_full_pages() {
        let rows = [
            row("a", &[5, 3], 7, 3),
            row("b", &[], 0, 0),
            row("c", &[2, 9, 8], 8, 1), // a spare page, which is not listed
            row("d", &[4], 4, 0),
        ];
        let mut shelf = PlanShelf::default();
        shelf.pack(id(1), rows.iter(), 4, None).unwrap();
        let plan = shelf.get(&id(1)).unwrap();
        assert_eq!(plan.qo_indptr, [0, 3, 3, 4, 4]);
        assert_eq!(plan.kv_indptr, [0, 2, 2, 4, 5]);
        assert_eq!(plan.kv_indices, [5, 3, 2, 9, 4]);
        assert_eq!(plan.kv_last_page_len, [3, 0, 4, 4]);
        assert_eq!(plan.slots, [12, 13, 14, 39]);
        assert_eq!(plan.positions, [4, 5, 6, 7]);
        assert_eq!((plan.real_rows, plan.rows[2].kv_len, plan.pages(2)), (4, 8, &[2, 9][..]));
    }

    #[test]
    fn f13_a_plan_reused_for_a_shorter_request_lists_nothing_of_the_longer() {
        let long = row("long", &(1..=64).collect::<Vec<_>>(), 256, 1);
        let short = row("short", &[7, 8, 9], 10, 1);
        let mut shelf = PlanShelf::default();
        for serial in 0..4 {
            shelf.pack(id(serial), [long.clone()].iter(), 4, None).unwrap();
        }
        shelf.pack(id(4), [short].iter(), 4, Some(PaddedShape { rows: 3, tokens: 4 })).unwrap();
        let plan = shelf.get(&id(4)).unwrap();
        assert_eq!((&plan.kv_indices[..], &plan.kv_indptr[..]), (&[7, 8, 9][..], &[0, 3, 3, 3][..]));
        assert!(shelf.get(&id(3)).is_none());
    }

    #[test]
    fn padded_rows_have_no_keys_and_write_nothing() {
        let mut shelf = PlanShelf::default();
        let rows = [row("a", &[5], 2, 1)];
        shelf.pack(id(1), rows.iter(), 4, Some(PaddedShape { rows: 3, tokens: 4 })).unwrap();
        let plan = shelf.get(&id(1)).unwrap();
        assert_eq!((plan.real_rows, plan.rows.len()), (1, 3));
        assert_eq!(plan.qo_indptr, [0, 1, 3, 4]);
        assert_eq!(plan.kv_indptr, [0, 1, 1, 1]);
        assert_eq!((&plan.slots[..], &plan.positions[..]), (&[21, -1, -1, -1][..], &[1, -1, -1, -1][..]));
        assert!(plan.rows[1..].iter().all(|r| r.kv_len == 0 && r.request.is_dummy()));
        for (rows_in, tokens) in [(0, 4), (1, 4), (3, 0)] {
            let shape = PaddedShape { rows: rows_in, tokens };
            assert!(shelf.pack(id(2), rows.iter(), 4, Some(shape)).is_err());
            assert_eq!(shelf.get(&id(1)).unwrap(), plan);
        }
    }

    #[test]
    fn reads_that_fill_a_bucket_take_its_shape_and_write_nothing() {
        let mut shelf = PlanShelf::default();
        let reads = [row("a", &[5, 6], 7, 0), row("b", &[8], 4, 0)];
        for (rows, qo_indptr) in [(2, &[0, 0, 0][..]), (3, &[0, 0, 0, 3])] {
            shelf.pack(id(1), reads.iter(), 4, Some(PaddedShape { rows, tokens: 3 })).unwrap();
            let plan = shelf.get(&id(1)).unwrap();
            assert_eq!((plan.real_rows, plan.rows.len(), &plan.qo_indptr[..]), (2, rows, qo_indptr));
            assert_eq!((&plan.slots[..], &plan.positions[..]), (&[-1; 3][..], &[-1; 3][..]));
            assert_eq!((plan.pages(0), plan.pages(1)), (&[5, 6][..], &[8][..]));
        }
        // A query among them has a place, and tokens without one would have to move it.
        let query = [row("a", &[5, 6], 7, 1), row("b", &[8], 4, 0)];
        let full = PaddedShape { rows: 2, tokens: 3 };
        assert!(shelf.pack(id(2), query.iter(), 4, Some(full)).unwrap_err().contains("a row of their own"));
    }

    #[test]
    fn plans_alternate_between_two_memories_and_a_held_one_is_never_rewritten() {
        let mut shelf = PlanShelf::default();
        let rows = [row("a", &[5], 2, 1)];
        let mut held = Vec::new();
        for serial in 0..5 {
            shelf.pack(id(serial), rows.iter(), 4, None).unwrap();
            held.push(shelf.get(&id(serial)).unwrap());
        }
        assert!(held.iter().enumerate().all(|(i, plan)| plan.id == id(i as u64)));
        shelf.forget(Slot(0), StepSerial(4));
        assert!(shelf.get(&id(4)).is_none());
        held.clear();
        let mut seen = std::collections::HashSet::new();
        for serial in 5..11 {
            shelf.pack(id(serial), rows.iter(), 4, None).unwrap();
            seen.insert(Arc::as_ptr(&shelf.get(&id(serial)).unwrap()));
        }
        assert!(seen.len() <= KEPT + 1);
    }
}
