//! Queries and keys as the multiplication reads them.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use half::bf16;

use super::body::{BLOCK, Body};
use super::exec::Call;
use crate::TensorRef;
use crate::cpu::Isa;
use crate::cpu::address::token_offset;
use crate::dsa::{KeyFormat, e4m3_to_f32, float};

/// One request's keys, as addresses.
pub(super) struct Keys<'a> {
    base: *const u8,
    pages: &'a [i32],
    page_start: usize,
    page_size: usize,
    /// Bytes from one page, and from one slot, to the next.
    page_stride: u64,
    slot_stride: u64,
}

impl<'a> Keys<'a> {
    pub(super) fn new(call: &Call<'a>, request: usize) -> Keys<'a> {
        let (strides, size) = (call.keys.strides(), call.keys.dtype().size());
        Keys {
            base: call.keys.as_ptr(),
            pages: call.table.pages(request),
            page_start: call.table.page_start[request] as usize,
            page_size: call.keys.shape()[1],
            page_stride: (strides[0] * size) as u64,
            slot_stride: (strides[1] * size) as u64,
        }
    }

    /// Where keys `first..end` start; null past `end`.
    pub(super) fn locate(&self, first: usize, end: usize) -> [*const u8; BLOCK] {
        let mut rows = [std::ptr::null(); BLOCK];
        let offset = self.page_start + first;
        let (mut page, mut slot) = (offset / self.page_size, offset % self.page_size);
        for row in &mut rows[..BLOCK.min(end.saturating_sub(first))] {
            if slot == self.page_size {
                (page, slot) = (page + 1, 0);
            }
            let at = token_offset(self.pages[page] as u32, slot as u32, self.page_stride, self.slot_stride);
            *row = self.base.wrapping_add(at as usize);
            slot += 1;
        }
        rows
    }
}

/// Packs the heads of a row: `[Hi, depth]` words.
///
/// # Safety
/// `q` is `[T, Hi, Di]` of a float type with contiguous lanes, on the CPU, and `row` is below `T`.
pub(super) unsafe fn queries(q: &TensorRef<'_>, row: usize, pairs: bool, out: &mut [u32]) {
    let (heads, width, size) = (q.shape()[1], q.shape()[2], q.dtype().size());
    for (head, out) in out.chunks_exact_mut(out.len() / heads).enumerate() {
        let at = (row * q.strides()[0] + head * q.strides()[1]) * size;
        let from = q.as_ptr().wrapping_add(at);
        // SAFETY: `width` lanes start there.
        let lane = |lane: usize| unsafe { float(q.dtype(), from, lane) };
        words(width, pairs, lane, |step, word| out[step] = word);
    }
}

/// Packs keys as `[depth, BLOCK]` words, zeros where there is none, and their scales.
///
/// # Safety
/// Each row that is not null is a key of `width` lanes in the format.
pub(super) unsafe fn keys(
    body: &Body,
    format: KeyFormat,
    rows: &[*const u8; BLOCK],
    width: usize,
    out: &mut [u32],
    scales: &mut [f32],
) {
    if format == KeyFormat::Fp8 {
        for (scale, &row) in scales.iter_mut().zip(rows) {
            *scale = match row.is_null() {
                true => 1.0,
                // SAFETY: an fp8 key is `width` bytes and then its scale.
                false => unsafe { row.add(width).cast::<f32>().read_unaligned() },
            };
        }
    }
    match body.isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has the instructions; the caller's promise.
        Isa::Avx512 | Isa::Avx512Bf16 => unsafe { avx512::keys(format, body.pairs, rows, width, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2Fma => unsafe { avx2::keys(format, rows, width, out) },
        // SAFETY: the caller's promise.
        _ => unsafe { plain(format, rows, width, out) },
    }
}

/// Lane `lane` of the key at `from`, without its scale.
///
/// # Safety
/// The key has more lanes than `lane` in its format.
#[inline(always)]
unsafe fn number(format: KeyFormat, from: *const u8, lane: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match format {
            KeyFormat::Fp8 => e4m3_to_f32(from.add(lane).read()),
            _ => float(format.dtype(), from, lane),
        }
    }
}

/// Packs keys one lane a word.
///
/// # Safety
/// Each row that is not null has `width` readable lanes of the format.
unsafe fn plain(format: KeyFormat, rows: &[*const u8; BLOCK], width: usize, out: &mut [u32]) {
    for (key, &from) in rows.iter().enumerate() {
        if from.is_null() {
            out[key..].iter_mut().step_by(BLOCK).for_each(|word| *word = 0);
            continue;
        }
        for (step, word) in out[key..].iter_mut().step_by(BLOCK).enumerate().take(width) {
            // SAFETY: `width` lanes start there.
            *word = unsafe { number(format, from, step) }.to_bits();
        }
    }
}

/// The words of a vector: one lane each, or two as bf16.
fn words(width: usize, pairs: bool, lane: impl Fn(usize) -> f32, mut put: impl FnMut(usize, u32)) {
    if !pairs {
        return (0..width).for_each(|d| put(d, lane(d).to_bits()));
    }
    let half = |d: usize| if d < width { u32::from(bf16::from_f32(lane(d)).to_bits()) } else { 0 };
    (0..width.div_ceil(2)).for_each(|step| put(step, half(2 * step) | half(2 * step + 1) << 16));
}
