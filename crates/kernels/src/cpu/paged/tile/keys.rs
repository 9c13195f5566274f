//! Where a row's keys and values lie: runs of positions, each in pages of slots.
//!
//! Packed keys are one page, blocks of a sequence are pages, and a row's keys may be two runs, a prefix and what
//! is fresh. The kernel asks for the rows of a tile of positions and never knows the difference, so where a key lies
//! changes no bit.

use std::marker::PhantomData;

use super::body::KEY_TILE;
use super::pack::KeyRows;
use crate::{DType, TensorRef};

/// One head's keys, or values, in pages of slots.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'a> {
    start: *const u8,
    dtype: DType,
    /// Elements of a slot's row.
    width: usize,
    /// Bytes from one page to the next, and from one slot to the next.
    strides: [usize; 2],
    pages: usize,
    page_size: usize,
    /// Slots of the last page.
    last_page: usize,
    lifetime: PhantomData<&'a [u8]>,
}

impl<'a> Slots<'a> {
    fn new(
        rows: TensorRef<'a>,
        strides: [usize; 2],
        pages: usize,
        page_size: usize,
        last_page: usize,
    ) -> Self {
        let size = rows.dtype().size();
        let stored = rows.dtype().is_float() || rows.dtype() == DType::E4m3;
        assert!(stored && rows.inner_contiguous(), "{rows:?}");
        assert!(rows.device() == crate::Device::Cpu, "{rows:?}");
        Slots {
            start: rows.as_ptr(),
            dtype: rows.dtype(),
            width: rows.shape().last().copied().unwrap_or(0),
            strides: strides.map(|stride| stride * size),
            pages,
            page_size,
            last_page,
            lifetime: PhantomData,
        }
    }

    /// Head `head` of `[P, S, G, D]`.
    pub(crate) fn of_pages(tensor: TensorRef<'a>, head: usize) -> Slots<'a> {
        let rows = tensor.select(2, head).expect("the caller's head is one of the tensor's");
        let (shape, strides) = (rows.shape(), rows.strides());
        Slots::new(rows, [strides[0], strides[1]], shape[0], shape[1], shape[1])
    }

    /// The scales of head `head` of `[P, S, G]`, as rows of one.
    pub(crate) fn of_scales(tensor: TensorRef<'a>, head: usize) -> Slots<'a> {
        let scales = tensor.select(2, head).expect("the caller's head is one of the tensor's");
        let rows = scales.insert_axis(2);
        let (shape, strides) = (rows.shape(), rows.strides());
        Slots::new(rows, [strides[0], strides[1]], shape[0], shape[1], shape[1])
    }

    #[cfg(feature = "dense")]
    /// Head `head` of `[U, G, D]`: one page of `U` slots.
    pub(crate) fn of_packed(tensor: TensorRef<'a>, head: usize) -> Slots<'a> {
        let rows = tensor.select(1, head).expect("the caller's head is one of the tensor's");
        let slots = rows.shape()[0];
        Slots::new(rows, [0, rows.strides()[0]], 1, slots.max(1), slots)
    }

    #[cfg(feature = "flex")]
    /// `[M, D]` cut into blocks of `block` keys, the last of which may be shorter.
    pub(crate) fn of_blocks(rows: TensorRef<'a>, block: usize) -> Slots<'a> {
        let (keys, stride) = (rows.shape()[0], rows.strides()[0]);
        let pages = keys.div_ceil(block);
        Slots::new(rows, [block * stride, stride], pages, block, keys - pages.saturating_sub(1) * block)
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.width * self.dtype.size()
    }
}

/// A run of positions, and where its keys and values lie.
#[derive(Clone, Copy)]
pub(crate) struct KeyRun<'a> {
    pub(crate) k: Slots<'a>,
    pub(crate) v: Slots<'a>,
    /// The scales of keys and of values that are e4m3.
    pub(crate) scales: Option<[Slots<'a>; 2]>,
    /// The run's pages, in order.
    pub(crate) pages: &'a [i32],
    /// Absolute position of slot 0 of `pages[0]`.
    pub(crate) origin: i64,
    /// One past the run's last position; it begins where the run before it ends.
    pub(crate) end: usize,
}

impl KeyRun<'_> {
    /// Writes where the rows of `slots` at the positions `base + from..base + to` begin.
    #[inline]
    fn lay(&self, slots: &Slots<'_>, base: usize, (from, to): (usize, usize), rows: &mut KeyRows) {
        let at = usize::try_from((base + from) as i64 - self.origin).expect("positions lie past the origin");
        let (mut index, mut slot) = (at / slots.page_size, at % slots.page_size);
        let mut i = from;
        while i < to {
            let page = usize::try_from(self.pages[index]).unwrap_or(usize::MAX);
            assert!(page < slots.pages, "page {page} of {}", slots.pages);
            let end = (i + slots.page_size - slot).min(to);
            let room = if page + 1 == slots.pages { slots.last_page } else { slots.page_size };
            assert!(slot + end - i <= room, "slot {} of {room}", slot + end - i - 1);
            let start = slots.start.wrapping_add(page * slots.strides[0]);
            for row in rows[i..end].iter_mut() {
                *row = start.wrapping_add(slot * slots.strides[1]);
                slot += 1;
            }
            (i, index, slot) = (end, index + 1, 0);
        }
    }
}

/// Keys or values, or the scales of either.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Keys,
    Values,
    KeyScales,
    ValueScales,
}

/// Where the rows of a side at the tile of positions at `base` begin, for those in `seen`; null for the others.
pub(super) fn rows_of(runs: &[KeyRun<'_>; 2], side: Side, base: usize, seen: u128) -> KeyRows {
    let mut rows = [std::ptr::null(); KEY_TILE];
    if seen == 0 {
        return rows;
    }
    let (first, last) = (seen.trailing_zeros() as usize, 127 - seen.leading_zeros() as usize);
    let mut from = first;
    for run in runs {
        let to = run.end.saturating_sub(base).min(last + 1);
        if from < to {
            let slots = match (side, &run.scales) {
                (Side::Keys, _) => &run.k,
                (Side::Values, _) => &run.v,
                (Side::KeyScales, Some([scales, _])) | (Side::ValueScales, Some([_, scales])) => scales,
                (Side::KeyScales | Side::ValueScales, None) => panic!("codes come with scales"),
            };
            run.lay(slots, base, (from, to), &mut rows);
            from = to;
        }
    }
    assert!(from == last + 1, "position {} is in no run", base + from);
    // Holes that a mask leaves.
    let mut unseen = !(seen | !(u128::MAX << first) | !(u128::MAX >> (127 - last)));
    while unseen != 0 {
        rows[unseen.trailing_zeros() as usize] = std::ptr::null();
        unseen &= unseen - 1;
    }
    rows
}
