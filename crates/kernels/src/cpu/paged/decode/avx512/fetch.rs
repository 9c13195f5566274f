//! Fetching what is read next, beside what is read now.

use std::arch::x86_64::*;

use super::super::body::Ahead;

/// Hands out the lines of an [`Ahead`] a few at a time, evenly over a loop.
pub(super) struct Fetch<'a> {
    ahead: Ahead<'a>,
    rows: std::slice::Iter<'a, *const u8>,
    then: std::slice::Iter<'a, *const u8>,
    row: *const u8,
    stretches: usize,
    at: *const u8,
    left: usize,
    /// Lines a turn, in 256ths, and what is owed.
    rate: usize,
    owed: usize,
}

impl<'a> Fetch<'a> {
    pub(super) fn new(ahead: &Ahead<'a>, turns: usize) -> Fetch<'a> {
        let rate = (ahead.total() * 256).div_ceil(turns.max(1));
        let (rows, then, nowhere) = (ahead.rows.iter(), ahead.then.iter(), std::ptr::null());
        Fetch { ahead: *ahead, rows, then, row: nowhere, stretches: 0, at: nowhere, left: 0, rate, owed: 0 }
    }

    /// Moves to the next stretch, if there is one.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn next(&mut self) -> bool {
        if self.stretches == 0 {
            let Some(&row) = self.rows.next() else { return false };
            (self.row, self.stretches) = (row, self.ahead.stretches);
            if let Some(&then) = self.then.next() {
                _mm_prefetch::<_MM_HINT_T1>(then.cast());
            }
        }
        (self.at, self.left) = (self.row, self.ahead.lines);
        self.row = self.row.wrapping_add(self.ahead.stride);
        self.stretches -= 1;
        true
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn turn(&mut self) {
        self.owed += self.rate;
        while self.owed >= 256 {
            self.owed -= 256;
            if self.left == 0 && !self.next() {
                self.rate = 0;
                return;
            }
            _mm_prefetch::<_MM_HINT_T1>(self.at.cast());
            self.at = self.at.wrapping_add(64);
            self.left -= 1;
        }
    }
}
