//! AVX-512 bodies: sixteen scores at a time, folded together; bf16 dot products where the machine has them.
//!
//! Sixteen accumulators hold `lanes x keys` scores (4 x 4, 2 x 8 or 1 x 16), each summed over the head width
//! in one register. They are then folded by one transposing tree of additions: each step adds, for two registers at
//! once, one half of each to its other half. Every score takes the same path through the tree, so its bits do not
//! depend on which of the sixteen it is.

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::DType;

use super::body::{Ahead, Body, Scores, ScoresFn, TILE, Transform, VALUE_KEYS, Values, ValuesFn};
use super::generic::{EXP2, TANH_LIMIT, TANH_P, TANH_Q, undefined};

/// Elements that load as sixteen f32.
trait Load: Copy + 'static {
    /// Sixteen elements from `at`.
    ///
    /// # Safety
    /// AVX-512 F and BW; sixteen readable elements.
    unsafe fn load(at: *const Self) -> __m512;

    /// Those of sixteen elements whose bit is set; 0 for the others, which are not read.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; the elements of set bits are readable.
    unsafe fn load_some(at: *const Self, mask: __mmask16) -> __m512;

    /// Thirty-two elements from `at`, in the order that is cheapest to load; [`Load::deal`] puts sums in that order.
    ///
    /// # Safety
    /// AVX-512 F and BW; thirty-two readable elements.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_pair(at: *const Self) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe { [Self::load(at), Self::load(at.add(16))] }
    }

    /// From the order of elements to that of [`Load::load_pair`].
    ///
    /// # Safety
    /// AVX-512 F.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn deal(sums: [__m512; 2]) -> [__m512; 2] {
        sums
    }

    /// Undoes [`Load::deal`].
    ///
    /// # Safety
    /// AVX-512 F.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn gather(sums: [__m512; 2]) -> [__m512; 2] {
        sums
    }
}

impl Load for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, at) }
    }
}

impl Load for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const bf16) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_loadu_si256(at.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const bf16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
    }

    // Elements of even index, then those of odd: a shift and a mask, where widening in order takes four operations.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_pair(at: *const bf16) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        let bits = unsafe { _mm512_loadu_si512(at.cast()) };
        let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(odd)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn deal([low, high]: [__m512; 2]) -> [__m512; 2] {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
        [_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn gather([even, odd]: [__m512; 2]) -> [__m512; 2] {
        let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        let high = _mm512_or_si512(low, _mm512_set1_epi32(8));
        [_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)]
    }
}

impl Load for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const f16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const f16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) })
    }
}

/// Adds `a`'s halves into the low half of the result and `b`'s into the high half, at each of four scales.
macro_rules! fold_pair {
    ($a:expr, $b:expr, 8) => {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b01_00_01_00>($a, $b),
            _mm512_shuffle_f32x4::<0b11_10_11_10>($a, $b),
        )
    };
    ($a:expr, $b:expr, 4) => {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b10_00_10_00>($a, $b),
            _mm512_shuffle_f32x4::<0b11_01_11_01>($a, $b),
        )
    };
    ($a:expr, $b:expr, 2) => {
        _mm512_add_ps(_mm512_shuffle_ps::<0b01_00_01_00>($a, $b), _mm512_shuffle_ps::<0b11_10_11_10>($a, $b))
    };
    ($a:expr, $b:expr, 1) => {
        _mm512_add_ps(_mm512_shuffle_ps::<0b10_00_10_00>($a, $b), _mm512_shuffle_ps::<0b11_01_11_01>($a, $b))
    };
}

/// The sums of sixteen registers, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fold16(v: &[__m512; 16]) -> __m512 {
    // Registers four apart meet first, so that the last step leaves sum i in lane i.
    let mut a = [_mm512_setzero_ps(); 8];
    for i in 0..4 {
        a[i] = fold_pair!(v[i], v[i + 8], 8);
        a[i + 4] = fold_pair!(v[i + 4], v[i + 12], 8);
    }
    // a[i]: low half of v[i], high half of v[i + 8], eight partial sums each.
    let mut b = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        b[i] = fold_pair!(a[i], a[i + 4], 4);
    }
    // b[i]: quarters v[i], v[i + 8], v[i + 4], v[i + 12].
    let c = [fold_pair!(b[0], b[2], 2), fold_pair!(b[1], b[3], 2)];
    // Within each quarter: two partial sums of its i, two of i + 2.
    let d = fold_pair!(c[0], c[1], 1);
    // Within each quarter: i, i + 2, i + 1, i + 3.
    let order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    _mm512_permutexvar_ps(order, d)
}

/// `LANES x KEYS` scores, 16 in all. Keys past `count` repeat the last one and are not stored.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn score_block<K: Load, const LANES: usize, const KEYS: usize>(
    job: &Scores<'_>,
    head: usize,
    lane: usize,
    first: usize,
    fetch: &mut Fetch<'_>,
) {
    let count = KEYS.min(job.keys.len() - first);
    let mut keys = [std::ptr::null::<K>(); KEYS];
    for i in 0..KEYS {
        keys[i] = job.keys[first + i.min(count - 1)].wrapping_add(head * job.key_head).cast();
    }
    let q = job.q.wrapping_add(head * job.q_head).cast::<f32>();
    let mut sums = [_mm512_setzero_ps(); 16];
    let whole = job.head_dim / 16 * 16;
    // SAFETY: queries are packed `q_stride` floats apart and padded past `head_dim`; each key names
    // `head_dim` readable elements, the tail by mask; prefetching reads nothing.
    unsafe {
        let q = q.add(lane * job.q_stride);
        for at in (0..whole).step_by(16) {
            fetch.turn();
            let mut queries = [_mm512_setzero_ps(); LANES];
            for l in 0..LANES {
                queries[l] = _mm512_loadu_ps(q.add(l * job.q_stride + at));
            }
            for k in 0..KEYS {
                let key = K::load(keys[k].add(at));
                for l in 0..LANES {
                    sums[l * KEYS + k] = _mm512_fmadd_ps(queries[l], key, sums[l * KEYS + k]);
                }
            }
        }
        if whole < job.head_dim {
            let mask = (1u16 << (job.head_dim - whole)) - 1;
            for k in 0..KEYS {
                let key = K::load_some(keys[k].add(whole), mask);
                for l in 0..LANES {
                    let query = _mm512_loadu_ps(q.add(l * job.q_stride + whole));
                    sums[l * KEYS + k] = _mm512_fmadd_ps(query, key, sums[l * KEYS + k]);
                }
            }
        }
        store::<LANES, KEYS>(job, head * job.lanes + lane, first, count, fold16(&sums));
    }
}

/// As [`score_block`], with bf16 dot products of bf16 queries.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn score_block_bf16<const LANES: usize, const KEYS: usize>(
    job: &Scores<'_>,
    head: usize,
    lane: usize,
    first: usize,
    fetch: &mut Fetch<'_>,
) {
    let count = KEYS.min(job.keys.len() - first);
    let mut keys = [std::ptr::null::<bf16>(); KEYS];
    for i in 0..KEYS {
        keys[i] = job.keys[first + i.min(count - 1)].wrapping_add(head * job.key_head).cast();
    }
    let q = job.q.wrapping_add(head * job.q_head).cast::<bf16>();
    let mut sums = [_mm512_setzero_ps(); 16];
    let whole = job.head_dim / 32 * 32;
    // SAFETY: as in `score_block`; queries are bf16 here, padded to a multiple of 32.
    unsafe {
        let q = q.add(lane * job.q_stride);
        let pairs = |v: __m512i| std::mem::transmute::<__m512i, __m512bh>(v);
        for at in (0..whole).step_by(32) {
            fetch.turn();
            let mut queries = [_mm512_setzero_si512(); LANES];
            for l in 0..LANES {
                queries[l] = _mm512_loadu_si512(q.add(l * job.q_stride + at).cast());
            }
            for k in 0..KEYS {
                let key = pairs(_mm512_loadu_si512(keys[k].add(at).cast()));
                for l in 0..LANES {
                    sums[l * KEYS + k] = _mm512_dpbf16_ps(sums[l * KEYS + k], pairs(queries[l]), key);
                }
            }
        }
        if whole < job.head_dim {
            let mask = (1u32 << (job.head_dim - whole)) - 1;
            for k in 0..KEYS {
                let key = pairs(_mm512_maskz_loadu_epi16(mask, keys[k].add(whole).cast()));
                for l in 0..LANES {
                    let query = pairs(_mm512_loadu_si512(q.add(l * job.q_stride + whole).cast()));
                    sums[l * KEYS + k] = _mm512_dpbf16_ps(sums[l * KEYS + k], query, key);
                }
            }
        }
        store::<LANES, KEYS>(job, head * job.lanes + lane, first, count, fold16(&sums));
    }
}

/// Stores `KEYS` scores of each of `LANES` lanes, `count` of which are wanted; `lane` counts through all heads.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn store<const LANES: usize, const KEYS: usize>(
    job: &Scores<'_>,
    lane: usize,
    first: usize,
    count: usize,
    sums: __m512,
) {
    let wanted = (1u32 << count) - 1;
    // Lanes in order, each in the lowest `KEYS` places of a register.
    let turn = |by: usize| match by * KEYS {
        0 => sums,
        4 => _mm512_shuffle_f32x4::<1>(sums, sums),
        8 => _mm512_shuffle_f32x4::<0b1110>(sums, sums),
        _ => _mm512_shuffle_f32x4::<3>(sums, sums),
    };
    for l in 0..LANES {
        // SAFETY: scores have room for TILE keys a lane, of which the block's are `first..first + count`; others are
        // not written, by width or by mask.
        unsafe {
            let at = job.scores.add((lane + l) * TILE + first);
            match KEYS {
                // A whole block is stored plainly at its own width: 64 masked bytes would reach into the next cache line.
                4 if count == 4 => _mm_storeu_ps(at, _mm512_castps512_ps128(turn(l))),
                8 if count == 8 => _mm256_storeu_ps(at, _mm512_castps512_ps256(turn(l))),
                _ => _mm512_mask_storeu_ps(at, wanted as u16, turn(l)),
            }
        }
    }
}

/// Hands out the lines of an [`Ahead`] a few at a time, evenly over a loop.
struct Fetch<'a> {
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
    fn new(ahead: &Ahead<'a>, turns: usize) -> Fetch<'a> {
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
    fn turn(&mut self) {
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

macro_rules! scores {
    ($name:ident, $features:literal, $width:literal, $block:ident $(, $k:ident)?) => {
        #[target_feature(enable = $features)]
        unsafe fn $name$(<$k: Load>)?(job: &Scores<'_>) {
            // The fewest tokens that fill every block: a row of all heads is then read from front to back.
            let step = 16 >> (job.lanes.trailing_zeros().min(2));
            let count = job.keys.len();
            let blocks = job.lanes / 4 * (step / 4) + job.lanes % 4 / 2 * (step / 8) + job.lanes % 2;
            // Lines are fetched one by one beside those that are read: a burst would keep the reads waiting.
            let turns = count.div_ceil(step) * job.heads * blocks * (job.head_dim / $width).max(1);
            let mut fetch = Fetch::new(&job.ahead, turns);
            for begin in (0..count).step_by(step) {
                let end = count.min(begin + step);
                for head in 0..job.heads {
                    let mut lane = 0;
                    // SAFETY: the caller's promise covers every block of `heads x lanes x keys`.
                    unsafe {
                        while lane + 4 <= job.lanes {
                            for first in (begin..end).step_by(4) {
                                $block::<$($k,)? 4, 4>(job, head, lane, first, &mut fetch);
                            }
                            lane += 4;
                        }
                        if lane + 2 <= job.lanes {
                            for first in (begin..end).step_by(8) {
                                $block::<$($k,)? 2, 8>(job, head, lane, first, &mut fetch);
                            }
                            lane += 2;
                        }
                        if lane < job.lanes {
                            $block::<$($k,)? 1, 16>(job, head, lane, begin, &mut fetch);
                        }
                    }
                }
            }
        }
    };
}
scores!(scores_f32, "avx512f,avx512bw,avx512dq,avx512vl", 16, score_block, K);
scores!(scores_bf16, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16", 32, score_block_bf16);

/// Values that the value blocks work on: some of a run's, under one head.
struct Block<'a> {
    values: &'a [*const u8],
    /// Bytes from the first head's value to this head's.
    offset: usize,
    /// `[lanes, TILE]`, at the first value.
    weights: *const f32,
    /// `[lanes, acc_stride]`.
    acc: *mut f32,
    acc_stride: usize,
    head_dim: usize,
    /// Whether accumulators are in the order of elements before, and are to be after; that of [`Load::deal`] otherwise.
    first: bool,
    last: bool,
}

/// Adds weighted values to 64 columns of `LANES` accumulators.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn value_block<K: Load, const LANES: usize>(
    block: &Block<'_>,
    lane: usize,
    column: usize,
    fetch: &mut Fetch<'_>,
) {
    let mut sums = [[[_mm512_setzero_ps(); 2]; 2]; LANES];
    // SAFETY: the accumulator has `acc_stride` floats a lane, which hold these columns; weights hold TILE floats a
    // lane; each value names `head_dim` readable elements, these columns among them.
    unsafe {
        let acc = block.acc.add(lane * block.acc_stride + column);
        for l in 0..LANES {
            for i in 0..2 {
                let at = acc.add(l * block.acc_stride + 32 * i);
                sums[l][i] = [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16))];
            }
        }
        if block.first {
            for sum in sums.as_flattened_mut() {
                *sum = K::deal(*sum);
            }
        }
        let weights = block.weights.add(lane * TILE);
        for (key, &row) in block.values.iter().enumerate() {
            let row = row.add(block.offset).cast::<K>().add(column);
            let values = [K::load_pair(row), K::load_pair(row.add(32))];
            for l in 0..LANES {
                let weight = _mm512_set1_ps(*weights.add(l * TILE + key));
                for i in 0..2 {
                    for j in 0..2 {
                        sums[l][i][j] = _mm512_fmadd_ps(weight, values[i][j], sums[l][i][j]);
                    }
                }
            }
            fetch.turn();
        }
        if block.last {
            for sum in sums.as_flattened_mut() {
                *sum = K::gather(*sum);
            }
        }
        for l in 0..LANES {
            for i in 0..2 {
                let at = acc.add(l * block.acc_stride + 32 * i);
                let [low, high] = sums[l][i];
                _mm512_storeu_ps(at, low);
                _mm512_storeu_ps(at.add(16), high);
            }
        }
    }
}

/// Adds weighted values to up to 16 columns of `LANES` accumulators.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn value_rest<K: Load, const LANES: usize>(
    block: &Block<'_>,
    lane: usize,
    column: usize,
    fetch: &mut Fetch<'_>,
) {
    let left = block.head_dim - column;
    let mask = if left >= 16 { u16::MAX } else { (1u16 << left) - 1 };
    let mut sums = [_mm512_setzero_ps(); LANES];
    // SAFETY: as in `value_block`, where `acc_stride` is a multiple of 16; columns past the last are not read, by mask.
    unsafe {
        let acc = block.acc.add(lane * block.acc_stride + column);
        for l in 0..LANES {
            sums[l] = _mm512_loadu_ps(acc.add(l * block.acc_stride));
        }
        let weights = block.weights.add(lane * TILE);
        for (key, &row) in block.values.iter().enumerate() {
            let value = K::load_some(row.add(block.offset).cast::<K>().add(column), mask);
            for l in 0..LANES {
                let weight = _mm512_set1_ps(*weights.add(l * TILE + key));
                sums[l] = _mm512_fmadd_ps(weight, value, sums[l]);
            }
            fetch.turn();
        }
        for l in 0..LANES {
            _mm512_storeu_ps(acc.add(l * block.acc_stride), sums[l]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn value_columns<K: Load, const LANES: usize>(block: &Block<'_>, lane: usize, fetch: &mut Fetch<'_>) {
    let mut column = 0;
    // SAFETY: the caller's promise covers every block of lanes and columns.
    unsafe {
        while column + 64 <= block.head_dim {
            value_block::<K, LANES>(block, lane, column, fetch);
            column += 64;
        }
        while column < block.head_dim {
            value_rest::<K, LANES>(block, lane, column, fetch);
            column += 16;
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn values<K: Load>(job: &Values<'_>) {
    let passes = job.lanes / 4 + job.lanes % 4 / 2 + job.lanes % 2;
    let columns = job.head_dim / 64 + (job.head_dim % 64).div_ceil(16);
    let mut fetch = Fetch::new(&job.ahead, job.values.len() * job.heads * columns * passes);
    for (index, values) in job.values.chunks(VALUE_KEYS).enumerate() {
        for head in 0..job.heads {
            // SAFETY: the caller's promise covers every block of heads, lanes, keys and columns.
            unsafe {
                let block = Block {
                    values,
                    offset: head * job.value_head,
                    weights: job.weights.add(head * job.lanes * TILE + index * VALUE_KEYS),
                    acc: job.acc.add(head * job.acc_head),
                    acc_stride: job.acc_stride,
                    head_dim: job.head_dim,
                    first: index == 0,
                    last: (index + 1) * VALUE_KEYS >= job.values.len(),
                };
                let mut lane = 0;
                while lane + 4 <= job.lanes {
                    value_columns::<K, 4>(&block, lane, &mut fetch);
                    lane += 4;
                }
                if lane + 2 <= job.lanes {
                    value_columns::<K, 2>(&block, lane, &mut fetch);
                    lane += 2;
                }
                if lane < job.lanes {
                    value_columns::<K, 1>(&block, lane, &mut fetch);
                }
            }
        }
    }
}

/// `2^x`; see the portable one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn exp2(x: __m512) -> __m512 {
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let f = _mm512_sub_ps(x, n);
    let mut p = _mm512_set1_ps(EXP2[0]);
    for &coefficient in &EXP2[1..] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(coefficient));
    }
    _mm512_scalef_ps(p, n)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn softmax(scores: &mut [f32; TILE], seen: u64, m: &mut f32, l: &mut f32, c: f32) -> f32 {
    let masks: [__mmask16; 4] = std::array::from_fn(|i| (seen >> (16 * i)) as u16);
    let at = scores.as_mut_ptr();
    let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut s = [lowest; 4];
    for i in 0..4 {
        // SAFETY: a tile has four times sixteen scores; hidden ones are not read.
        s[i] = unsafe { _mm512_mask_loadu_ps(lowest, masks[i], at.add(16 * i)) };
    }
    let top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(s[0], s[1]), _mm512_max_ps(s[2], s[3])));
    let before = *m;
    let now = if top > before { top } else { before };
    if (0..4).any(|i| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(s[i], s[i]) != 0) {
        return undefined(scores, m, l, now);
    }
    if now == f32::NEG_INFINITY {
        scores.fill(0.0);
        return 1.0;
    }
    let (mv, cv) = (_mm512_set1_ps(now), _mm512_set1_ps(c));
    let mut sum = _mm512_setzero_ps();
    for i in 0..4 {
        // A hidden score, or one of -inf, has no exponent to speak of: its weight is 0 by mask.
        let x = _mm512_mul_ps(_mm512_sub_ps(s[i], mv), cv);
        let real = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(s[i], lowest) & masks[i];
        let weight = _mm512_maskz_mov_ps(real, exp2(x));
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(at.add(16 * i), weight) };
        sum = _mm512_add_ps(sum, weight);
    }
    let alpha = if before == f32::NEG_INFINITY {
        1.0
    } else {
        _mm512_cvtss_f32(exp2(_mm512_set1_ps((before - now) * c)))
    };
    *m = now;
    *l = (*l).mul_add(alpha, _mm512_reduce_add_ps(sum));
    alpha
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn transform(scores: &mut [f32; TILE], by: &Transform) {
    let at = scores.as_mut_ptr();
    let ramp = _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.);
    for i in 0..4 {
        // SAFETY: a tile has four times sixteen scores.
        unsafe {
            let mut s = _mm512_mul_ps(_mm512_loadu_ps(at.add(16 * i)), _mm512_set1_ps(by.sm_scale));
            if by.cap > 0.0 {
                s = _mm512_mul_ps(s, _mm512_set1_ps(1.0 / by.cap));
                s = _mm512_mul_ps(tanh(s), _mm512_set1_ps(by.cap));
            }
            if by.slope != 0.0 {
                let distance = _mm512_add_ps(ramp, _mm512_set1_ps(by.distance + 16.0 * i as f32));
                s = _mm512_fmadd_ps(_mm512_set1_ps(by.slope), distance, s);
            }
            _mm512_storeu_ps(at.add(16 * i), s);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn tanh(x: __m512) -> __m512 {
    let limit = _mm512_set1_ps(TANH_LIMIT);
    let x = _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
    let square = _mm512_mul_ps(x, x);
    let (mut p, mut q) = (_mm512_set1_ps(TANH_P[0]), _mm512_set1_ps(TANH_Q[0]));
    for &coefficient in &TANH_P[1..] {
        p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(coefficient));
    }
    for &coefficient in &TANH_Q[1..] {
        q = _mm512_fmadd_ps(q, square, _mm512_set1_ps(coefficient));
    }
    _mm512_div_ps(_mm512_mul_ps(x, p), q)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn rescale(acc: &mut [f32], alpha: f32) {
    for value in acc {
        *value *= alpha;
    }
}

/// The body for stored elements of `kv_dtype`; with `dot`, queries are bf16 and multiplied as such.
pub(super) fn body(kv_dtype: DType, dot: bool) -> Body {
    let (scores, values): (ScoresFn, ValuesFn) = match kv_dtype {
        DType::Bf16 if dot => (scores_bf16, values::<bf16>),
        DType::Bf16 => (scores_f32::<bf16>, values::<bf16>),
        DType::F16 => (scores_f32::<f16>, values::<f16>),
        _ => (scores_f32::<f32>, values::<f32>),
    };
    Body { q_bf16: dot, scores, values, transform, softmax, rescale }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn folding_sixteen_registers_gives_each_its_own_sum_by_the_same_additions() {
        if !Isa::Avx512.is_supported() {
            return;
        }
        let row: [f32; 16] = std::array::from_fn(|i| (i as f32 * 1.7).sin() * 10f32.powi(i as i32 % 7));
        // SAFETY: the instruction set was probed.
        let folded = |at: usize| unsafe {
            let mut v = [_mm512_setzero_ps(); 16];
            v[at] = _mm512_loadu_ps(row.as_ptr());
            let mut out = [0f32; 16];
            _mm512_storeu_ps(out.as_mut_ptr(), fold16(&v));
            out
        };
        let first = folded(0)[0];
        assert!((first - row.iter().sum::<f32>()).abs() < 1.0);
        for at in 0..16 {
            for (i, &sum) in folded(at).iter().enumerate() {
                assert_eq!(sum, if i == at { first } else { 0.0 }, "register {at}, sum {i}");
            }
        }
    }
}
