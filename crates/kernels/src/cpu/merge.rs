//! Merging partial attention results, row by row: weights in f64, values in f32, memory streamed once.
//!
//! A row is one query of one head. Rows are independent, so threads share them and no bit depends on how. The loops over a
//! row multiply and add without fusing, the same on every instruction set: the compiler vectorises them once for each.

use half::f16;

use super::isa::Isa;
use super::round::to_bf16;
use super::tokens::SERIAL_BYTES;
use crate::DType;

/// `[T, H, W]` floats with contiguous `W`, or `[T, H]`, by address.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: DType,
    /// Of the first two axes, in elements.
    pub(crate) strides: [usize; 2],
}

// SAFETY: an address; each thread reads rows that nobody writes, and writes rows that are its own.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    fn at(&self, t: usize, h: usize) -> *mut u8 {
        self.ptr.wrapping_add((t * self.strides[0] + h * self.strides[1]) * self.dtype.size())
    }
}

/// A merge of `inputs` into `out`; `(o, lse)` each.
pub(crate) struct Merge<'a> {
    pub(crate) inputs: &'a [(Rows, Rows)],
    pub(crate) out: (Rows, Rows),
    /// Whether the first input is `out` itself.
    pub(crate) in_place: bool,
    /// `[T, H, W]`.
    pub(crate) shape: [usize; 3],
}

/// Normalised weights of some lses, and the merged lse; the third argument is room for as many terms.
pub(crate) type Weigh = fn(&[f32], &mut [f32], &mut [f64]) -> f32;

impl Merge<'_> {
    /// Merges every row.
    ///
    /// # Safety
    /// Every array has the shape, `o` of f32, bf16 or f16 and `lse` of f32, in memory that is readable, and for `out`
    /// writable, without two elements in one place; only the first input of an `in_place` merge overlaps `out`.
    pub(crate) unsafe fn run(&self, weigh: Weigh) {
        let [tokens, heads, width] = self.shape;
        let rows = tokens * heads;
        let bytes = rows.saturating_mul(width).saturating_mul(4);
        let kernel = kernel(Isa::current());
        // Some parts more than threads, so that one that is late holds nobody up for long.
        let parts = if bytes < SERIAL_BYTES { 1 } else { (4 * rayon::current_num_threads()).min(rows) };
        let part = |part: usize| {
            // SAFETY: the caller's promise; parts have no row in common, and `kernel` is this machine's.
            unsafe { self.part(rows * part / parts..rows * (part + 1) / parts, weigh, kernel) }
        };
        if parts > 1 {
            in_parts(0, parts, &part);
        } else {
            part(0);
        }
    }

    /// # Safety
    /// As [`Merge::run`]; nobody else writes these rows, and the machine runs `kernel`.
    unsafe fn part(&self, rows: std::ops::Range<usize>, weigh: Weigh, kernel: Kernel) {
        let [_, heads, width] = self.shape;
        let inputs = self.inputs.len();
        let (mut lses, mut weights, mut terms) = (vec![0f32; inputs], vec![0f32; inputs], vec![0f64; inputs]);
        let (mut sources, mut sum) = (Vec::with_capacity(inputs), vec![0f32; width]);
        for row in rows {
            let (t, h) = (row / heads, row % heads);
            for (lse, (_, rows)) in lses.iter_mut().zip(self.inputs) {
                // SAFETY: the row is in the arrays.
                *lse = unsafe { rows.at(t, h).cast::<f32>().read() };
            }
            let lse = weigh(&lses, &mut weights, &mut terms);
            sources.clear();
            // What weighs nothing is not read: it may hold anything.
            let live = self.inputs.iter().zip(&weights).filter(|(_, weight)| **weight != 0.0);
            sources.extend(live.map(|((o, _), &weight)| Source { ptr: o.at(t, h), dtype: o.dtype, weight }));
            let out = (self.out.0.at(t, h), self.out.0.dtype);
            // SAFETY: rows of `width` floats in their arrays; the machine runs the kernel.
            unsafe {
                kernel(&sources, self.in_place, out, &mut sum);
                self.out.1.at(t, h).cast::<f32>().write(lse);
            }
        }
    }
}

/// A row that weighs something.
#[derive(Clone, Copy)]
struct Source {
    ptr: *const u8,
    dtype: DType,
    weight: f32,
}

/// Writes the weighted sum of the sources to a row of `sum.len()` floats. `true` says that a source may be that row.
///
/// Safe to call where the instructions it was compiled for are there, every row is one of so many floats of its dtype, and
/// nobody else touches the row written.
type Kernel = unsafe fn(&[Source], bool, (*mut u8, DType), &mut [f32]);

fn kernel(isa: Isa) -> Kernel {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Avx512 => avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2Fma => avx2,
        _ => merged,
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn avx512(sources: &[Source], in_place: bool, out: (*mut u8, DType), sum: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { merged(sources, in_place, out, sum) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2(sources: &[Source], in_place: bool, out: (*mut u8, DType), sum: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { merged(sources, in_place, out, sum) }
}

/// # Safety
/// As [`Kernel`].
#[inline(always)]
unsafe fn merged(sources: &[Source], in_place: bool, out: (*mut u8, DType), sum: &mut [f32]) {
    // Two parts of one dtype into a third of it are nearly every merge: no row in between.
    if let ([a, b], false) = (sources, in_place)
        && a.dtype == b.dtype
        && a.dtype == out.1
    {
        match a.dtype {
            // SAFETY: the caller's promise; `out` is apart from both.
            DType::F32 => return unsafe { pair::<f32>(a, b, out.0, sum.len()) },
            // SAFETY: as above.
            DType::Bf16 => return unsafe { pair::<Bits>(a, b, out.0, sum.len()) },
            _ => {}
        }
    }
    sum.fill(0.0);
    for (index, source) in sources.iter().enumerate() {
        // SAFETY: the caller's promise; `sum` is nobody's row.
        unsafe {
            match source.dtype {
                DType::Bf16 => add::<Bits>(source, index == 0, sum),
                DType::F16 => add::<f16>(source, index == 0, sum),
                _ => add::<f32>(source, index == 0, sum),
            }
        }
    }
    // SAFETY: as above; no source is read any more.
    unsafe {
        match out.1 {
            DType::Bf16 => store::<Bits>(sum, out.0),
            DType::F16 => store::<f16>(sum, out.0),
            _ => store::<f32>(sum, out.0),
        }
    }
}

/// A stored float.
trait Number: Copy {
    fn get(self) -> f32;
    fn put(value: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn get(self) -> f32 {
        self
    }
    #[inline(always)]
    fn put(value: f32) -> f32 {
        value
    }
}

/// A bf16 by its bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Bits(u16);

impl Number for Bits {
    #[inline(always)]
    fn get(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
    #[inline(always)]
    fn put(value: f32) -> Bits {
        Bits(to_bf16(value))
    }
}

impl Number for f16 {
    #[inline(always)]
    fn get(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn put(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

/// # Safety
/// Both sources and `out` are rows of `width` numbers, and `out` is apart from both.
#[inline(always)]
unsafe fn pair<N: Number>(a: &Source, b: &Source, out: *mut u8, width: usize) {
    // SAFETY: the caller's promise; views hold their elements aligned.
    let (x, y, out) = unsafe {
        (
            std::slice::from_raw_parts(a.ptr.cast::<N>(), width),
            std::slice::from_raw_parts(b.ptr.cast::<N>(), width),
            std::slice::from_raw_parts_mut(out.cast::<N>(), width),
        )
    };
    for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
        *out = N::put(a.weight * x.get() + b.weight * y.get());
    }
}

/// # Safety
/// The source is a row of `sum.len()` numbers.
#[inline(always)]
unsafe fn add<N: Number>(source: &Source, first: bool, sum: &mut [f32]) {
    // SAFETY: the caller's promise; views hold their elements aligned.
    let row = unsafe { std::slice::from_raw_parts(source.ptr.cast::<N>(), sum.len()) };
    if first {
        // Not added to 0, which would lose the sign of -0.
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum = source.weight * x.get());
    } else {
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += source.weight * x.get());
    }
}

/// # Safety
/// `out` is a row of `sum.len()` numbers that nobody else touches.
#[inline(always)]
unsafe fn store<N: Number>(sum: &[f32], out: *mut u8) {
    // SAFETY: the caller's promise; views hold their elements aligned.
    let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<N>(), sum.len()) };
    out.iter_mut().zip(sum).for_each(|(out, &sum)| *out = N::put(sum));
}

/// Calls `work` for each part, without allocating.
fn in_parts(from: usize, to: usize, work: &(impl Fn(usize) + Sync)) {
    if to - from == 1 {
        return work(from);
    }
    let middle = from + (to - from) / 2;
    rayon::join(|| in_parts(from, middle, work), || in_parts(middle, to, work));
}
