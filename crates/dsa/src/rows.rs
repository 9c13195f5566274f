//! One plan label's rows, and which of their queries attend a pick.

use std::ops::Range;

use mstar_core::attend::SparseWork;
use mstar_core::kv::{KvPlan, KvRow};
use mstar_core::{Label, RequestId};
use mstar_kernels::dsa::Table;
use mstar_kernels::mutant::planted;
use mstar_kernels::paged::PageTable;

/// One stream's rows of a step: `q_len` queries from query `q_start` on, the first at position `ctx_start`.
///
/// Positions are the request's own, as its cache keeps it: position 0 is the first token that was not given back, at slot
/// `page_start` of the first of its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DsaSpan {
    /// Whose.
    pub request_id: RequestId,
    /// Which of its streams.
    pub label: Label,
    /// Its first query among the plan's.
    pub q_start: usize,
    /// Its queries.
    pub q_len: usize,
    /// Position of the first query: the keys that were kept before the step.
    pub ctx_start: usize,
    /// Its page ids, as a range of [`DsaPlan::pages`].
    pub pages: Range<usize>,
    /// Slots of the first page that lie before position 0.
    pub page_start: usize,
    /// Tokens given back before position 0: what to add to a position for the stream's own count.
    pub kept_from: usize,
}

/// A label's rows this step. `T` queries, padding among them; `R` rows, padded ones among them.
///
/// A query sees the keys `0..=position` of its request. One that sees at most `topk` attends them all, as a row of the
/// [dense](DsaPlan::dense) table: the queries of a row that do come first, and form a row of their own that ends with the
/// last of them. The others are selected. Which it is depends on the query alone, never on who else is in the plan.
///
/// What was selected last lives in the forward's cursor ([`mstar_core::Forward::last_selection`]), since one plan serves
/// several layers.
#[derive(Clone, Debug, Default)]
pub struct DsaPlan {
    /// The real rows, in packed order; none for rows of a foreign table, which have no names.
    pub spans: Vec<DsaSpan>,
    /// Whether some query sees more than `topk` keys, and so attends a pick.
    pub needs_selection: bool,
    /// Page ids of the rows, back to back.
    pub pages: Vec<i32>,
    /// `[R + 1]`: where each row's pages start in `pages`.
    pub row_page_offset: Vec<i32>,
    /// `[R + 1]`: where each row's queries start.
    pub qo_indptr: Vec<i32>,
    /// `[R]`: slots of each row's first page before its first kept token.
    pub row_start: Vec<i32>,
    /// `[R]`: keys that each row holds, the step's own included.
    pub row_keys: Vec<i32>,
    /// `[R]`: tokens of each row that were given back: position 0 in the stream's own count.
    pub row_kept_from: Vec<i32>,
    /// `[T]`: the row of each query that is selected; -1 for the others, and for padding.
    pub row_request: Vec<i32>,
    /// `[T]`: each query's position in its request; -1 for padding.
    pub positions: Vec<i32>,
    /// `[T]`: 0 for a query that is selected, else -1: `row_request` for a row by itself.
    pub(crate) alone: Vec<i32>,
    /// Queries that attend all they see.
    pub dense_queries: usize,
    /// Pairs of a query and a key in one full layer.
    pub work: SparseWork,
    dense: Dense,
}

/// A row as it came: lengths and places in the stream's own count.
#[derive(Clone, Copy, Debug)]
struct Row {
    q_len: usize,
    kv_len: usize,
    kv_offset: usize,
    page_start: usize,
}

/// Rows whose queries attend all they see; the queries of a row without keys stand for those that are selected.
#[derive(Clone, Debug, Default)]
struct Dense {
    qo_indptr: Vec<i32>,
    kv_indptr: Vec<i32>,
    kv_indices: Vec<i32>,
    kv_last_page_len: Vec<i32>,
    kv_offset: Vec<i64>,
    page_start: Vec<i32>,
}

impl DsaPlan {
    /// The rows of a cache's plan, over pages of `page_size` slots.
    pub fn new(kv: &KvPlan, page_size: usize, topk: usize) -> DsaPlan {
        let mut plan = DsaPlan::default();
        plan.make(kv, page_size, topk);
        plan
    }

    /// Makes room for `rows` rows, `tokens` queries and `pages` page ids, so that planning up to there moves nothing.
    pub fn reserve(&mut self, rows: usize, tokens: usize, pages: usize) {
        fn room<T>(list: &mut Vec<T>, entries: usize) {
            list.reserve(entries.saturating_sub(list.len()));
        }
        for list in [&mut self.row_start, &mut self.row_keys, &mut self.row_kept_from] {
            room(list, rows);
        }
        for list in [&mut self.row_page_offset, &mut self.qo_indptr] {
            room(list, rows + 1);
        }
        room(&mut self.spans, rows);
        room(&mut self.pages, pages);
        for list in [&mut self.row_request, &mut self.positions, &mut self.alone] {
            room(list, tokens);
        }
        // A row that crosses `topk` is two.
        let dense = &mut self.dense;
        for list in [&mut dense.qo_indptr, &mut dense.kv_indptr] {
            room(list, 2 * rows + 1);
        }
        for list in [&mut dense.kv_last_page_len, &mut dense.page_start] {
            room(list, 2 * rows);
        }
        room(&mut dense.kv_offset, 2 * rows);
        room(&mut dense.kv_indices, pages);
    }

    /// Makes this the plan of other rows, in the memory it has.
    pub fn make(&mut self, kv: &KvPlan, page_size: usize, topk: usize) {
        self.clear();
        for (index, row) in kv.rows.iter().enumerate() {
            let KvRow { q_len, kv_len, kv_offset, page_start, .. } = *row;
            let of = Row { q_len, kv_len, kv_offset, page_start };
            let (q_start, pages) = (self.positions.len(), self.pages.len());
            if index >= kv.real_rows {
                self.push_padding(of, page_size);
                continue;
            }
            self.push(of, kv.pages(index), page_size, topk);
            let kept_from = kv_offset + page_start;
            self.spans.push(DsaSpan {
                request_id: row.request.clone(),
                label: row.label.clone(),
                q_start,
                q_len,
                ctx_start: kv_len.saturating_sub(kept_from).saturating_sub(q_len),
                pages: pages..self.pages.len(),
                page_start,
                kept_from,
            });
        }
        self.finish(kv.slots.len(), topk);
    }

    /// Makes this the plan of the rows of a table that was checked, padded to `tokens` queries.
    pub(crate) fn make_of(&mut self, table: &PageTable<'_>, page_size: usize, tokens: usize, topk: usize) {
        self.clear();
        for row in 0..table.num_rows() {
            let entries = table.kv_indptr[row] as usize..table.kv_indptr[row + 1] as usize;
            let pages = &table.kv_indices[entries];
            let kv_offset = table.kv_offset.map_or(0, |offsets| offsets[row] as usize);
            let page_start = match pages.len() {
                0 => 0,
                _ => table.page_start.map_or(0, |starts| starts[row] as usize),
            };
            let slots = match pages.len() {
                0 => 0,
                n => (n - 1) * page_size + table.kv_last_page_len[row] as usize,
            };
            let q_len = (table.qo_indptr[row + 1] - table.qo_indptr[row]) as usize;
            let of = Row { q_len, kv_len: kv_offset + slots, kv_offset, page_start };
            self.push(of, pages, page_size, topk);
        }
        self.finish(tokens.max(table.num_tokens()), topk);
    }

    /// Rows and pages as the kernels take them.
    pub(crate) fn table(&self) -> Table<'_> {
        Table {
            row_request: &self.row_request,
            positions: &self.positions,
            kv_indptr: &self.row_page_offset,
            kv_indices: &self.pages,
            page_start: &self.row_start,
            kv_lens: &self.row_keys,
        }
    }

    fn finish(&mut self, tokens: usize, topk: usize) {
        self.pad(tokens); // Behind the last row there may be tokens that are nobody's.
        self.needs_selection = match planted("dsa-needs-selection-off-by-one") {
            true => self.positions.iter().any(|&position| position as i64 > topk as i64),
            false => self.row_request.iter().any(|&row| row >= 0),
        };
    }

    fn pad(&mut self, tokens: usize) {
        for list in [&mut self.row_request, &mut self.positions, &mut self.alone] {
            list.resize(tokens, -1);
        }
    }

    fn clear(&mut self) {
        self.spans.clear();
        let DsaPlan { pages, row_start, row_keys, row_kept_from, row_request, positions, alone, .. } = self;
        for list in [pages, row_start, row_keys, row_kept_from, row_request, positions, alone] {
            list.clear();
        }
        for indptr in [&mut self.row_page_offset, &mut self.qo_indptr] {
            indptr.clear();
            indptr.push(0);
        }
        (self.dense_queries, self.work) = (0, SparseWork::default());
        let dense = &mut self.dense;
        for list in [&mut dense.kv_indices, &mut dense.kv_last_page_len, &mut dense.page_start] {
            list.clear();
        }
        dense.kv_offset.clear();
        for indptr in [&mut dense.qo_indptr, &mut dense.kv_indptr] {
            indptr.clear();
            indptr.push(0);
        }
    }

    /// Adds what both kinds of row have; says how many keys it holds.
    fn push_row(&mut self, row: Row, pages: &[i32]) -> usize {
        let kept_from = row.kv_offset + row.page_start;
        let keys = row.kv_len.saturating_sub(kept_from);
        self.pages.extend_from_slice(pages);
        self.row_page_offset.push(self.pages.len() as i32);
        self.qo_indptr.push(self.qo_indptr[self.qo_indptr.len() - 1] + row.q_len as i32);
        let page_start = if planted("dsa-page-start-ignored") { 0 } else { row.page_start };
        self.row_start.push(page_start as i32);
        self.row_keys.push(keys as i32);
        self.row_kept_from.push(kept_from as i32);
        keys
    }

    fn push_padding(&mut self, row: Row, page_size: usize) {
        self.push_row(row, &[]);
        self.pad(self.positions.len() + row.q_len);
        self.dense.push(row, &[], row.q_len, 0, page_size);
    }

    fn push(&mut self, row: Row, pages: &[i32], page_size: usize, topk: usize) {
        let index = self.row_keys.len() as i32;
        let keys = self.push_row(row, pages);
        // Queries before the first kept key see nothing; only a foreign table has them.
        let (blind, ctx_start) = (row.q_len.saturating_sub(keys), keys.saturating_sub(row.q_len));
        let planted_more = usize::from(planted("dsa-dense-row-sees-one-more"));
        let dense = (topk + planted_more + blind).saturating_sub(ctx_start).min(row.q_len);
        for query in 0..row.q_len {
            let seen = (ctx_start + query + 1).saturating_sub(blind);
            let forgets = query >= dense && planted("dsa-prefix-forgotten");
            self.row_request.push(if query < dense { -1 } else { index });
            self.alone.push(if query < dense { -1 } else { 0 });
            self.positions.push(if forgets { query as i32 } else { seen as i32 - 1 });
            self.work.dense += seen as u64;
            self.work.attended += if query < dense { seen as u64 } else { topk as u64 };
            self.work.scored += if query < dense { 0 } else { seen as u64 };
        }
        self.dense_queries += dense;
        let selected = row.q_len - dense;
        if dense > 0 || selected == 0 {
            self.dense.push(row, pages, dense, row.kv_len - selected, page_size);
        }
        if selected > 0 {
            self.dense.push(row, &[], selected, 0, page_size);
        }
    }

    /// `T`: queries, padding among them.
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// `R`: rows, padded ones among them.
    pub fn num_rows(&self) -> usize {
        self.row_keys.len()
    }

    /// Whether every query, padding among them, is selected, so that no row is dense.
    pub(crate) fn all_selected(&self) -> bool {
        self.row_request.iter().all(|&row| row >= 0)
    }

    /// Keys of the longest row.
    pub fn max_keys(&self) -> usize {
        self.row_keys.iter().copied().max().unwrap_or(0) as usize
    }

    /// The rows whose queries attend every key that they see, over a pool of `num_pages` pages: causal, each ending with
    /// its last such query. Selected queries are rows without keys there, and so are padded ones.
    pub fn dense(&self, num_pages: usize) -> PageTable<'_> {
        let dense = &self.dense;
        PageTable {
            qo_indptr: &dense.qo_indptr,
            kv_indptr: &dense.kv_indptr,
            kv_indices: &dense.kv_indices,
            kv_last_page_len: &dense.kv_last_page_len,
            kv_offset: Some(&dense.kv_offset),
            page_start: Some(&dense.page_start),
            mask: None,
            num_pages,
        }
    }
}

impl Dense {
    /// A row of `q_len` queries that ends at `kv_len`, in the stream's own count.
    fn push(&mut self, row: Row, pages: &[i32], q_len: usize, kv_len: usize, page_size: usize) {
        let slots = if pages.is_empty() { 0 } else { kv_len.saturating_sub(row.kv_offset) };
        let used = slots.div_ceil(page_size.max(1));
        self.kv_indices.extend_from_slice(&pages[..used]);
        self.qo_indptr.push(self.qo_indptr[self.qo_indptr.len() - 1] + q_len as i32);
        self.kv_indptr.push(self.kv_indices.len() as i32);
        self.kv_last_page_len.push(if used == 0 { 0 } else { (slots - (used - 1) * page_size) as i32 });
        let (offset, start) = if used == 0 { (0, 0) } else { (row.kv_offset, row.page_start) };
        self.kv_offset.push(offset as i64);
        self.page_start.push(start as i32);
    }
}

#[cfg(test)]
mod tests;
