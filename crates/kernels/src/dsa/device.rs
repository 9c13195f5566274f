//! A call's rows and page tables where a device reads them.

use bytemuck::{Pod, Zeroable};

use super::Table;
#[cfg(feature = "cuda")]
use crate::Error;
use crate::{Device, Kernels, Result, Staged, Stream};

/// The row arrays and page tables of [`select_at`](super::select_at), [`scores_at`](super::scores_at) and
/// [`sparse_attend_at`](super::sparse_attend_at), at an address that stays: a captured call goes over what was
/// [set](DeviceTable::set) last. On the CPU it is plain memory that nobody reads.
#[derive(Debug)]
pub struct DeviceTable {
    staged: Staged,
    rows: usize,
    requests: usize,
    /// Most keys that a row is foreseen to see.
    keys: usize,
    /// Most keys that a row sees.
    seen: usize,
    /// Which kernels calls over it run.
    kernels: Kernels,
}

/// As `Table` in `cu/table.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Header {
    rows: u32,
    requests: u32,
    keys: u32,
    reserved: u32,
    /// Bytes from the header to each array.
    at: [u32; 8],
}

const _: () = assert!(size_of::<Header>() == 48);

/// Bytes of a table of so many rows, requests and page ids.
fn bytes(rows: usize, requests: usize, pages: usize) -> usize {
    let words = 4 * rows + 4 * requests + 3 + pages;
    size_of::<Header>() + 4 * words
}

/// Query rows of a request up to which each is cut into leaves of picks, when they are attended; rows of more are many enough.
pub(crate) const FEW_QUERIES: usize = 8;

/// How many rows before each, and before the end, are of requests of up to [`FEW_QUERIES`] rows, and how many of larger ones:
/// `[T + 1]` each. `queries` has a number a request, whatever it was.
fn count_rows(row_request: &[i32], queries: &mut [i32], few: &mut [i32], many: &mut [i32]) {
    queries.fill(0);
    // What is no request is refused by the call.
    let of = |request: i32, queries: &[i32]| usize::try_from(request).ok().filter(|&of| of < queries.len());
    for &request in row_request {
        if let Some(at) = of(request, queries) {
            queries[at] += 1;
        }
    }
    let (mut before_few, mut before_many) = (0, 0);
    for (row, &request) in row_request.iter().enumerate() {
        (few[row], many[row]) = (before_few, before_many);
        if let Some(at) = of(request, queries) {
            let is_few = queries[at] as usize <= FEW_QUERIES;
            before_few += i32::from(is_few);
            before_many += i32::from(!is_few);
        }
    }
    (few[row_request.len()], many[row_request.len()]) = (before_few, before_many);
}

impl DeviceTable {
    /// Room for tables of up to so many rows, requests and page ids, of rows that see up to `keys` keys each. What is larger
    /// makes it grow, which moves it.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn with_capacity(
        stream: &Stream,
        rows: usize,
        requests: usize,
        pages: usize,
        keys: usize,
    ) -> Result<DeviceTable> {
        let staged = Staged::with_capacity(stream, bytes(rows, requests, pages))?;
        Ok(DeviceTable { staged, rows: 0, requests: 0, keys, seen: 0, kernels: Kernels::Auto })
    }

    /// The same, for calls that run such kernels; `auto` where this is not said. Those are what
    /// [`prepare_select`](super::prepare_select) and [`prepare_sparse`](super::prepare_sparse) are to be asked for.
    pub fn with_kernels(self, kernels: Kernels) -> DeviceTable {
        DeviceTable { kernels, ..self }
    }

    /// Which kernels calls over it run.
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }

    /// Makes this the table of another batch, in stream order; never waits. The arrays are those that the calls over it are
    /// given, which check them.
    ///
    /// # Errors
    /// A stream of another device; memory that cannot be had. Arrays of lengths that do not belong together are refused as the
    /// calls would.
    pub fn set(&mut self, stream: &Stream, table: &Table<'_>) -> Result<()> {
        let (rows, requests) = (table.row_request.len(), table.kv_lens.len());
        table.check_lengths(rows)?;
        let pages = table.kv_indptr.last().map_or(0, |&end| end.max(0) as usize);
        let pages = &table.kv_indices[..pages.min(table.kv_indices.len())];
        let sees = |row: usize| if table.row_request[row] < 0 { 0 } else { table.positions[row].max(-1) + 1 };
        let seen = (0..rows).map(sees).max().unwrap_or(0) as usize;
        let arrays =
            [table.row_request, table.positions, table.kv_indptr, pages, table.page_start, table.kv_lens];
        let mut header =
            Header { rows: rows as u32, requests: requests as u32, keys: seen as u32, ..Header::default() };
        let mut end = size_of::<Header>();
        for (at, array) in header.at.iter_mut().zip(arrays) {
            *at = end as u32;
            end += size_of_val(array);
        }
        // Rows counted, and behind them what they are counted in.
        let counted = end;
        (header.at[6], header.at[7]) = (counted as u32, (counted + 4 * (rows + 1)) as u32);
        end += 4 * (2 * (rows + 1) + requests);
        self.staged.set_with(stream, end, |to| {
            to[..size_of::<Header>()].copy_from_slice(bytemuck::bytes_of(&header));
            for (&at, array) in header.at.iter().zip(arrays) {
                to[at as usize..][..size_of_val(array)].copy_from_slice(bytemuck::cast_slice(array));
            }
            let words: &mut [i32] = bytemuck::cast_slice_mut(&mut to[counted..end]);
            let (few, words) = words.split_at_mut(rows + 1);
            let (many, queries) = words.split_at_mut(rows + 1);
            count_rows(table.row_request, queries, few, many);
        })?;
        (self.rows, self.requests, self.seen) = (rows, requests, seen);
        Ok(())
    }

    /// The device that reads it.
    pub fn device(&self) -> Device {
        self.staged.device()
    }

    /// `T`: rows that were set last.
    pub fn num_rows(&self) -> usize {
        self.rows
    }

    /// `R`: requests that were set last.
    pub fn num_requests(&self) -> usize {
        self.requests
    }

    /// Most keys that a row may see, or sees where that is more: scratch for scores is cut by it. A captured call has room for
    /// as many as it was when it was captured.
    pub fn max_keys(&self) -> usize {
        self.keys.max(self.seen)
    }

    /// Refuses a table that is not there, or of another number of rows.
    #[cfg(feature = "cuda")]
    pub(super) fn has_rows(&self, rows: usize, device: Device) -> Result<()> {
        if self.device() != device {
            return Err(Error::DeviceMismatch { tensor: "table", expected: device, got: self.device() });
        }
        if self.rows != rows {
            let expected = format!("that of a batch of {rows} rows; set it first");
            return Err(Error::Shape { tensor: "table", expected, got: vec![self.rows] });
        }
        Ok(())
    }

    /// Refuses a table that is not there, or not that of a call over `table`.
    #[cfg(feature = "cuda")]
    pub(super) fn is_of(&self, table: &Table<'_>, device: Device) -> Result<()> {
        if self.device() != device {
            return Err(Error::DeviceMismatch { tensor: "table", expected: device, got: self.device() });
        }
        let (got, wanted) = ([self.rows, self.requests], [table.row_request.len(), table.kv_lens.len()]);
        if got != wanted {
            let expected =
                format!("that of a batch of {} rows of {} requests; set it first", wanted[0], wanted[1]);
            return Err(Error::Shape { tensor: "table", expected, got: got.to_vec() });
        }
        Ok(())
    }

    /// Bytes that it has room for.
    #[cfg(feature = "cuda")]
    pub(crate) fn room(&self) -> usize {
        self.staged.capacity()
    }

    /// Where kernels find it.
    pub fn address(&self) -> u64 {
        self.staged.address() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_with_its_batch_and_keeps_what_rows_may_see() {
        let stream = Stream::cpu();
        let mut on = DeviceTable::with_capacity(&stream, 1, 1, 1, 7).unwrap();
        let before = on.address();
        let one = Table {
            row_request: &[0],
            positions: &[4],
            kv_indptr: &[0, 1],
            kv_indices: &[3],
            page_start: &[0],
            kv_lens: &[5],
        };
        on.set(&stream, &one).unwrap();
        assert_eq!((on.address(), on.num_rows(), on.num_requests(), on.max_keys()), (before, 1, 1, 7));
        let more = Table { row_request: &[0; 9], positions: &[4, 1, 2, 8, 9, 0, 0, 0, 0], ..one };
        on.set(&stream, &more).unwrap();
        assert_eq!((on.num_rows(), on.max_keys()), (9, 10));
        assert!(on.set(&stream, &Table { positions: &[1], ..more }).is_err());
        assert_eq!(on.num_rows(), 9);
    }

    #[test]
    fn rows_are_counted_by_how_many_their_request_has() {
        let requests = [[0; 3].as_slice(), &[-1], &[2; FEW_QUERIES + 1], &[0; 5], &[1, 7]].concat();
        let (mut few, mut many) = (vec![9; requests.len() + 1], vec![9; requests.len() + 1]);
        count_rows(&requests, &mut [9; 3], &mut few, &mut many);
        assert_eq!(few[..6], [0, 1, 2, 3, 3, 3]);
        assert_eq!((few[13], few[18], few[19], few[20]), (3, 8, 9, 9));
        assert_eq!((many[4], many[5], many[13], many[20]), (0, 1, 9, 9));
    }
}
