//! Weighted values, added to the accumulators of a few lanes at a time.

use std::arch::x86_64::*;

use super::super::body::{TILE, VALUE_KEYS, Values};
use super::fetch::Fetch;
use super::load::Load;

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
pub(super) unsafe fn values<K: Load>(job: &Values<'_>) {
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
