//! Arrays of per-token entries as addresses: what scatter, gather and page copies share.

use crate::{Device, Error, Result, TensorMut, TensorRef};

/// Bytes below which one thread copies everything.
pub(crate) const SERIAL_BYTES: usize = 1 << 18;

/// An array whose entries are `[A, B]` or `[B]` with contiguous `B`, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Tokens {
    base: *mut u8,
    /// From one page, or one token of a packed array, to the next.
    pub(crate) outer: u64,
    /// From one token of a page to the next; 0 for a packed array.
    pub(crate) inner: u64,
    /// `A`.
    pub(super) chunks: usize,
    chunk_bytes: usize,
    chunk_stride: usize,
}

// SAFETY: an address; its users write disjoint entries, or disjoint chunks of one entry, from each thread.
unsafe impl Send for Tokens {}
// SAFETY: as above.
unsafe impl Sync for Tokens {}

impl Tokens {
    /// Describes a tensor whose first `outer_axes` axes (1: tokens, 2: pages and slots) lead to entries.
    pub(super) fn of(
        name: &'static str,
        base: *mut u8,
        tensor: &TensorRef<'_>,
        outer_axes: usize,
        device: Device,
    ) -> Result<Tokens> {
        let (shape, strides, size) = (tensor.shape(), tensor.strides(), tensor.dtype().size());
        if tensor.device() != device {
            return Err(Error::DeviceMismatch { tensor: name, expected: device, got: tensor.device() });
        }
        let inner = shape.len().checked_sub(outer_axes);
        if !matches!(inner, Some(1 | 2)) {
            let expected = ["[T, W] or [T, G, D]", "[P, S, W] or [P, S, G, D]"][outer_axes - 1].to_string();
            return Err(Error::Shape { tensor: name, expected, got: shape.to_vec() });
        }
        if !tensor.inner_contiguous() {
            return Err(Error::Layout { tensor: name, shape: shape.to_vec(), strides: strides.to_vec() });
        }
        let last = shape.len() - 1;
        let (mut chunks, mut stride) =
            if inner == Some(2) { (shape[last - 1], strides[last - 1]) } else { (1, 0) };
        let mut width = shape[last];
        if chunks > 1 && stride == width {
            (chunks, width, stride) = (1, width * chunks, 0);
        }
        Ok(Tokens {
            base,
            outer: (strides[0] * size) as u64,
            inner: if outer_axes == 2 { (strides[1] * size) as u64 } else { 0 },
            chunks,
            chunk_bytes: width * size,
            chunk_stride: stride * size,
        })
    }

    /// Bytes of an entry.
    pub(super) fn entry_bytes(&self) -> usize {
        self.chunks * self.chunk_bytes
    }

    /// The entry that starts `offset` bytes from the array's start.
    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        self.base.wrapping_add(offset as usize)
    }

    /// The runs of bytes in which entries of both go, and the bytes of each. Equal inner axes may coalesce on one side only; then
    /// both are walked in the finer chunks.
    pub(crate) fn finer(a: &Tokens, b: &Tokens) -> (usize, usize) {
        if a.chunks >= b.chunks { (a.chunks, a.chunk_bytes) } else { (b.chunks, b.chunk_bytes) }
    }

    /// Bytes from one of `chunks` runs of `bytes` bytes to the next.
    pub(crate) fn chunk_step(&self, chunks: usize, bytes: usize) -> usize {
        if self.chunks == chunks { self.chunk_stride } else { bytes }
    }

    /// Fills an entry with zeros.
    ///
    /// # Safety
    /// The entry lies in the array, and nobody else reads or writes it.
    pub(super) unsafe fn zero(&self, to: *mut u8) {
        for chunk in 0..self.chunks {
            // SAFETY: the caller's promise.
            unsafe { to.wrapping_add(chunk * self.chunk_stride).write_bytes(0, self.chunk_bytes) };
        }
    }

    /// Copies part `part` of `parts` of the entry at `from` to the entry at `to` of `target`.
    ///
    /// # Safety
    /// Both entries lie in their arrays, which have equal inner axes and dtypes and do not overlap; nobody else
    /// reads or writes that part of `to`.
    pub(super) unsafe fn copy_part(
        &self,
        from: *const u8,
        target: &Tokens,
        to: *mut u8,
        part: usize,
        parts: usize,
    ) {
        let (chunks, bytes) = Tokens::finer(self, target);
        let (from_stride, to_stride) = (self.chunk_step(chunks, bytes), target.chunk_step(chunks, bytes));
        if chunks == 1 {
            let (begin, end) = (bytes * part / parts, bytes * (part + 1) / parts);
            // SAFETY: the caller's promise; the bytes lie in the entry.
            unsafe { std::ptr::copy_nonoverlapping(from.add(begin), to.add(begin), end - begin) };
            return;
        }
        for chunk in chunks * part / parts..chunks * (part + 1) / parts {
            let (from, to) = (from.wrapping_add(chunk * from_stride), to.wrapping_add(chunk * to_stride));
            // SAFETY: the caller's promise; chunk `chunk` of either entry starts there and has `bytes` bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        }
    }
}

/// Refuses two arrays whose entries differ.
pub(super) fn same_entries(
    name: &'static str,
    got: &TensorRef<'_>,
    got_outer: usize,
    like: &TensorRef<'_>,
    like_outer: usize,
) -> Result<()> {
    let wanted = like.shape().get(like_outer..).unwrap_or_default();
    if got.shape().get(got_outer..).unwrap_or_default() != wanted {
        let expected = format!("entries of {wanted:?}");
        return Err(Error::Shape { tensor: name, expected, got: got.shape().to_vec() });
    }
    if got.dtype() != like.dtype() {
        let expected = like.dtype().to_string();
        return Err(Error::DTypeMismatch { tensor: name, expected, got: got.dtype() });
    }
    Ok(())
}

/// Refuses a writable tensor in which two elements share memory, which two threads could then write at once.
pub(crate) fn apart(name: &'static str, tensor: &TensorMut<'_>) -> Result<()> {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    // In order of stride, each axis must step over all that the smaller ones reach.
    let mut axes = [(0usize, 0usize); crate::view::MAX_RANK];
    for (axis, place) in axes.iter_mut().enumerate().take(shape.len()) {
        *place = (strides[axis], shape[axis]);
    }
    let axes = &mut axes[..shape.len()];
    axes.sort_unstable();
    let mut reach = 1usize;
    for &(stride, extent) in axes.iter() {
        if extent > 1 && stride < reach && tensor.numel() > 0 {
            let why = format!("strides of shape {shape:?} make elements overlap");
            return Err(Error::Parameter { name, why, got: format!("{strides:?}") });
        }
        reach += extent.saturating_sub(1) * stride;
    }
    Ok(())
}

/// The refusal of an array that is not contiguous.
pub(crate) fn strided(tensor: &'static str, got: &TensorRef<'_>) -> Error {
    Error::Layout { tensor, shape: got.shape().to_vec(), strides: got.strides().to_vec() }
}

/// The stream's device must be the CPU.
#[cfg(feature = "dsa")]
pub(crate) fn on_cpu(operation: &'static str, stream: &crate::Stream) -> Result<()> {
    match stream.device() {
        Device::Cpu => Ok(()),
        device => {
            let why = "this build has it on the CPU only".into();
            Err(Error::Unsupported { operation, device, why })
        }
    }
}
