//! A KV cache's plan, with what a step says of its rows, as the arrays that kernels take.

use std::borrow::Cow;

use mstar_kernels::mutant::planted;

use crate::kv::KvPlan;
use crate::step::{AttentionStep, MaskKeys, RowMask, Step};
use crate::{Error, ResourceName, Result};

/// Rows and pages of one plan, whose names and meaning are the field's. `R` rows; optional arrays are empty when no row needs them.
#[derive(Clone, Copy, Debug)]
pub struct RowTable<'a> {
    /// `[R + 1]`: where each row's queries start.
    pub qo_indptr: &'a [i32],
    /// `[R + 1]`: where each row's pages start in `kv_indices`.
    pub kv_indptr: &'a [i32],
    /// Page ids, row after row.
    pub kv_indices: &'a [i32],
    /// `[R]`: tokens in each row's last page.
    pub kv_last_page_len: &'a [i32],
    /// `[R]` or empty: absolute position of slot 0 of each row's first page.
    pub kv_offset: &'a [i64],
    /// `[R]` or empty: slots of each row's first page before its first kept token.
    pub page_start: &'a [i32],
    /// `[R]`: one past each row's last key.
    pub kv_len: &'a [i32],
    /// One byte a pair of query and key, for the rows that have a mask.
    pub mask: &'a [u8],
    /// `[R + 1]`, or empty without masks.
    pub mask_indptr: &'a [i64],
    /// Whether queries see no later key.
    pub causal: bool,
    /// Pages of the pool.
    pub num_pages: usize,
}

/// The arrays of a [`RowTable`]: borrowed from the cache's plan where they are the same, else made here.
#[derive(Clone, Debug, Default)]
pub struct Arrays<'a> {
    /// `[R + 1]`.
    pub qo_indptr: Cow<'a, [i32]>,
    /// `[R + 1]`.
    pub kv_indptr: Cow<'a, [i32]>,
    /// Page ids, row after row.
    pub kv_indices: Cow<'a, [i32]>,
    /// `[R]`.
    pub kv_last_page_len: Cow<'a, [i32]>,
    /// `[R]` or empty.
    pub kv_offset: Vec<i64>,
    /// `[R]` or empty.
    pub page_start: Vec<i32>,
    /// `[R]`.
    pub kv_len: Vec<i32>,
    /// One byte a pair of query and key, for the rows that have a mask.
    pub mask: Vec<u8>,
    /// `[R + 1]`, or empty without masks.
    pub mask_indptr: Vec<i64>,
}

impl<'a> Arrays<'a> {
    /// The rows of `plan` as they are.
    pub fn of_plan(plan: &'a KvPlan) -> Arrays<'a> {
        let mut arrays = Arrays {
            qo_indptr: Cow::Borrowed(&plan.qo_indptr),
            kv_indptr: Cow::Borrowed(&plan.kv_indptr),
            kv_indices: Cow::Borrowed(&plan.kv_indices),
            kv_last_page_len: Cow::Borrowed(&plan.kv_last_page_len),
            kv_len: plan.rows.iter().map(|row| row.kv_len as i32).collect(),
            ..Arrays::default()
        };
        if plan.rows.iter().any(|row| row.kv_offset != 0) {
            arrays.kv_offset = plan.rows.iter().map(|row| row.kv_offset as i64).collect();
        }
        if plan.rows.iter().any(|row| row.page_start != 0) {
            arrays.page_start = plan.rows.iter().map(|row| row.page_start as i32).collect();
        }
        arrays
    }

    /// The rows of `plan` without the step's own entries: what was stored before it. `kv_len` is then where those start.
    pub fn context_only(plan: &KvPlan, page_size: usize) -> Arrays<'_> {
        let mut arrays = Arrays::of_plan(plan);
        let (mut kv_indptr, mut kv_indices, mut last) = (vec![0], Vec::new(), Vec::new());
        for (index, row) in plan.rows.iter().enumerate() {
            let own = if planted("context-only-keeps-own") { 0 } else { row.q_len };
            let kv_len = row.kv_len.saturating_sub(own);
            let slots = kv_len.saturating_sub(row.kv_offset);
            let pages = slots.div_ceil(page_size);
            let begin = plan.kv_indptr[index] as usize;
            kv_indices.extend_from_slice(&plan.kv_indices[begin..begin + pages]);
            kv_indptr.push(kv_indices.len() as i32);
            last.push(if pages == 0 { 0 } else { (slots - (pages - 1) * page_size) as i32 });
            if !planted("kv-len-buf-after") {
                arrays.kv_len[index] = kv_len as i32;
            }
        }
        arrays.kv_indptr = Cow::Owned(kv_indptr);
        arrays.kv_indices = Cow::Owned(kv_indices);
        arrays.kv_last_page_len = Cow::Owned(last);
        arrays
    }

    /// Adds the masks that the step declares for rows of `plan`, and says how many found their row.
    ///
    /// # Errors
    /// A mask of another size than its row, which names the request and both sizes.
    pub fn add_masks(&mut self, plan: &KvPlan, masks: &[RowMask], resource: &ResourceName) -> Result<usize> {
        let of_row = |index: usize| {
            let row = &plan.rows[index];
            masks.iter().find(|mask| mask.request == row.request && mask.label == row.label)
        };
        let found = (0..plan.real_rows).filter(|&index| of_row(index).is_some()).count();
        if found == 0 {
            return Ok(0);
        }
        self.mask_indptr.push(0);
        for (index, row) in plan.rows.iter().enumerate() {
            if let Some(mask) = of_row(index).filter(|_| index < plan.real_rows) {
                append(&mut self.mask, mask, row.q_len, row.kv_len, resource)?;
            }
            self.mask_indptr.push(self.mask.len() as i64);
        }
        Ok(found)
    }

    /// The arrays, borrowed.
    pub fn table(&self, causal: bool, num_pages: usize) -> RowTable<'_> {
        RowTable {
            qo_indptr: &self.qo_indptr,
            kv_indptr: &self.kv_indptr,
            kv_indices: &self.kv_indices,
            kv_last_page_len: &self.kv_last_page_len,
            kv_offset: &self.kv_offset,
            page_start: &self.page_start,
            kv_len: &self.kv_len,
            mask: &self.mask,
            mask_indptr: &self.mask_indptr,
            causal,
            num_pages,
        }
    }
}

/// Appends one row's `[q_len, kv_len]` bytes.
fn append(
    bytes: &mut Vec<u8>,
    mask: &RowMask,
    q_len: usize,
    kv_len: usize,
    resource: &ResourceName,
) -> Result<()> {
    let (given, columns, letters) = match &mask.visible {
        MaskKeys::Own(own) => (own, q_len, "[q_len, q_len]"),
        MaskKeys::All(all) => (all, kv_len, "[q_len, kv_len]"),
    };
    if given.len() != q_len * columns {
        let why = format!(
            "the mask of request {} ({}) has {} entries; {letters} = [{q_len}, {columns}] has {}",
            mask.request,
            mask.label,
            given.len(),
            q_len * columns
        );
        return Err(Error::Step { resource: resource.clone(), why });
    }
    for query in 0..q_len {
        bytes.extend(std::iter::repeat_n(1, kv_len - columns));
        bytes.extend(given[query * columns..(query + 1) * columns].iter().map(|&seen| u8::from(seen)));
    }
    Ok(())
}

/// Query tokens, keys and pairs of both that a plan's layer cannot do without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    /// Query tokens.
    pub tokens: u64,
    /// Keys that some query of their row sees, each counted once a row.
    pub keys: u64,
    /// Pairs of a query and a key that it sees. Custom masks are not looked into, so that a masked row counts as much
    /// as causality and window leave it.
    pub pairs: u64,
}

impl RowTable<'_> {
    /// `R`.
    pub fn num_rows(&self) -> usize {
        self.kv_len.len()
    }

    /// What causality and a window leave of the rows.
    pub fn pairs(&self, window_left: Option<usize>) -> Pairs {
        let mut seen = Pairs::default();
        for row in 0..self.kv_len.len() {
            let q_len = i64::from(self.qo_indptr[row + 1] - self.qo_indptr[row]);
            let kv_len = i64::from(self.kv_len[row]);
            let offset = self.kv_offset.get(row).copied().unwrap_or(0);
            let begin = (offset + self.page_start.get(row).map_or(0, |&start| i64::from(start))).min(kv_len);
            let window = window_left.map_or(i64::MAX, |left| left as i64);
            seen.tokens += q_len as u64;
            let mut first = kv_len;
            for query in 0..q_len {
                let position = kv_len - q_len + query;
                let end = if self.causal { (position + 1).min(kv_len) } else { kv_len };
                let start = position.saturating_sub(window).max(begin);
                seen.pairs += (end - start).max(0) as u64;
                first = first.min(start.max(0));
            }
            seen.keys += (kv_len - first).max(0) as u64;
        }
        seen
    }
}

/// What a step says to an attention resource; nothing said is the default.
///
/// # Errors
/// A declaration of another kind.
pub fn declared(step: &Step, resource: &ResourceName) -> Result<AttentionStep> {
    match (step.resources.get(resource), step.attention(resource)) {
        (None, _) => Ok(AttentionStep::default()),
        (_, Some(attention)) => Ok(attention.clone()),
        (Some(other), None) => {
            let why = format!("is an attention resource and was given {other:?}");
            Err(Error::Step { resource: resource.clone(), why })
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kv::KvRow;
    use crate::{Label, PlanId, RequestId, Slot, StepSerial};

    use super::*;

    /// Rows of (q_len, kv_len) on consecutive pages of 4 slots.
    fn plan(rows: &[(usize, usize)]) -> KvPlan {
        let id = PlanId { slot: Slot(0), label: Label::main(), serial: StepSerial(1) };
        let mut plan = KvPlan {
            id,
            rows: vec![],
            qo_indptr: vec![0],
            kv_indptr: vec![0],
            kv_indices: vec![],
            kv_last_page_len: vec![],
            slots: vec![],
            positions: vec![],
            real_rows: rows.len(),
        };
        for (index, &(q_len, kv_len)) in rows.iter().enumerate() {
            let pages = kv_len.div_ceil(4);
            let request = RequestId::new(format!("r{index}"));
            let label = Label::main();
            let row = KvRow { request, label, q_len, kv_len, kv_offset: 0, page_start: 0, generation: 0 };
            plan.rows.push(row);
            plan.kv_indices.extend((0..pages).map(|page| (10 * index + page) as i32));
            plan.qo_indptr.push(plan.qo_indptr[index] + q_len as i32);
            plan.kv_indptr.push(plan.kv_indices.len() as i32);
            plan.kv_last_page_len.push(if pages == 0 { 0 } else { (kv_len - (pages - 1) * 4) as i32 });
        }
        plan
    }

    #[test]
    fn context_only_rows_end_where_the_steps_entries_start() {
        let plan = plan(&[(3, 11), (2, 2), (1, 5), (0, 4)]);
        let arrays = Arrays::context_only(&plan, 4);
        assert_eq!(arrays.kv_len, [8, 0, 4, 4]);
        assert_eq!(*arrays.kv_indptr, [0, 2, 2, 3, 4]);
        assert_eq!(*arrays.kv_indices, [0, 1, 20, 30]);
        assert_eq!(*arrays.kv_last_page_len, [4, 0, 4, 4]);
    }

    #[test]
    fn pairs_follow_causality_and_window() {
        let plan = plan(&[(3, 11), (2, 2), (1, 5), (0, 4)]);
        let seen = |causal, window| {
            let Pairs { tokens, keys, pairs } = Arrays::of_plan(&plan).table(causal, 40).pairs(window);
            (tokens, keys, pairs)
        };
        assert_eq!(seen(true, None), (6, 18, 9 + 10 + 11 + 1 + 2 + 5));
        assert_eq!(seen(false, None), (6, 18, 33 + 4 + 5));
        assert_eq!(seen(true, Some(2)), (6, 5 + 2 + 3, 9 + 1 + 2 + 3));
    }

    fn mask(request: &str, visible: MaskKeys) -> RowMask {
        RowMask { request: request.into(), label: Label::main(), visible }
    }

    #[test]
    fn a_tree_mask_lets_every_stored_key_through() {
        let plan = plan(&[(1, 3), (2, 5)]);
        let mut arrays = Arrays::of_plan(&plan);
        let own = MaskKeys::Own([true, false, false, true].into());
        assert_eq!(arrays.add_masks(&plan, &[mask("r1", own)], &"attn".into()).unwrap(), 1);
        assert_eq!(arrays.mask_indptr, [0, 0, 10]);
        assert_eq!(arrays.mask, [1, 1, 1, 1, 0, 1, 1, 1, 0, 1]);
    }

    #[test]
    fn a_mask_of_the_wrong_size_names_the_request_and_both_sizes() {
        let plan = plan(&[(2, 5)]);
        let all = MaskKeys::All([true; 9].into());
        let said = Arrays::of_plan(&plan).add_masks(&plan, &[mask("r0", all)], &"attn".into()).unwrap_err();
        assert!(
            said.to_string().contains("r0 (main) has 9 entries; [q_len, kv_len] = [2, 5] has 10"),
            "{said}"
        );
    }
}
