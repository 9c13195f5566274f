//! Whose keys each query row scores, where they lie, and what may be wrong with that.

use crate::mutant::planted;
use crate::{Error, Result};

/// The rows and page tables of a call: `T` rows, `R` requests, `P` pages of `S` slots.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// `[T]`: whose keys; -1 for a row that sees none.
    pub row_request: &'a [i32],
    /// `[T]`: each row sees its request's keys `0..=position`.
    pub positions: &'a [i32],
    /// `[R + 1]`: where each request's page ids start.
    pub kv_indptr: &'a [i32],
    /// Page ids.
    pub kv_indices: &'a [i32],
    /// `[R]`: slot of the request's first token in its first page.
    pub page_start: &'a [i32],
    /// `[R]`: keys stored.
    pub kv_lens: &'a [i32],
}

fn refuse<T>(array: &'static str, index: usize, got: i32, why: String) -> Result<T> {
    Err(Error::Index { array, index, got: got.into(), why })
}

fn length(tensor: &'static str, got: usize, letters: &str, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape { tensor, expected: format!("[{letters}] = [{expected}]"), got: vec![got] })
}

impl<'a> Table<'a> {
    /// Refuses a table that names what is not there. Afterwards every row's keys lie in pages of the pool.
    pub(crate) fn check(&self, rows: usize, num_pages: usize, page_size: usize) -> Result<()> {
        let requests = self.check_lengths(rows)?;
        let mut before = 0;
        for (index, &start) in self.kv_indptr.iter().enumerate() {
            if start < before || start as usize > self.kv_indices.len() || (index == 0 && start != 0) {
                let entries = self.kv_indices.len();
                let why =
                    format!("starts at 0, never decreases, ends within {entries} entries of kv_indices");
                return refuse("kv_indptr", index, start, why);
            }
            before = start;
        }
        for request in 0..requests {
            self.check_request(request, page_size)?;
        }
        let used = &self.kv_indices[..before as usize];
        let top = used.iter().fold(0u32, |top, &page| top.max(page as u32));
        if top as usize >= num_pages && !used.is_empty() {
            let bad = |&page: &i32| page < 0 || page as usize >= num_pages;
            let index = used.iter().position(bad).expect("the largest entry is out of range");
            let request = self.kv_indptr.partition_point(|&start| start as usize <= index) - 1;
            let why = format!("page of request {request}; the pool has pages 0..{num_pages}");
            return refuse("kv_indices", index, used[index], why);
        }
        for row in 0..rows {
            let request = self.row_request[row];
            if request == -1 {
                continue;
            }
            if request < 0 || request as usize >= requests {
                let why = format!("row {row} is one of {requests} requests' or, with -1, of none");
                return refuse("row_request", row, request, why);
            }
            let (position, keys) = (self.positions[row], self.kv_lens[request as usize]);
            if position < 0 || position >= keys {
                let why = format!("row {row} scores the keys of request {request}, which has {keys}");
                return refuse("positions", row, position, why);
            }
        }
        Ok(())
    }

    /// Refuses arrays whose lengths do not belong together; the number of requests.
    pub(super) fn check_lengths(&self, rows: usize) -> Result<usize> {
        let Some(requests) = self.kv_indptr.len().checked_sub(1) else {
            return Err(Error::Shape { tensor: "kv_indptr", expected: "[R + 1]".into(), got: vec![0] });
        };
        length("row_request", self.row_request.len(), "T", rows)?;
        length("positions", self.positions.len(), "T", rows)?;
        length("page_start", self.page_start.len(), "R", requests)?;
        length("kv_lens", self.kv_lens.len(), "R", requests)?;
        Ok(requests)
    }

    fn check_request(&self, request: usize, page_size: usize) -> Result<()> {
        let start = self.page_start[request];
        if start < 0 || start as usize > page_size {
            let why =
                format!("request {request}'s first key is in one of {page_size} slots of its first page");
            return refuse("page_start", request, start, why);
        }
        let pages = self.pages(request).len();
        let slots = pages.saturating_mul(page_size).saturating_sub(start as usize);
        let keys = self.kv_lens[request];
        if keys < 0 || keys as usize > slots {
            let why = format!(
                "request {request} has {pages} pages of {page_size}, {slots} slots from its first key"
            );
            return refuse("kv_lens", request, keys, why);
        }
        Ok(())
    }

    /// The pages of a request, in order.
    pub(crate) fn pages(&self, request: usize) -> &'a [i32] {
        &self.kv_indices[self.kv_indptr[request] as usize..self.kv_indptr[request + 1] as usize]
    }

    /// Keys that a row sees.
    pub(crate) fn seen(&self, row: usize) -> usize {
        let request = self.row_request[row];
        if request < 0 {
            return 0;
        }
        let seen = self.positions[row] as usize + 1;
        if planted("index-prefix-forgotten") {
            return seen.min(self.row_request.iter().filter(|&&other| other == request).count());
        }
        seen
    }
}
