//! Moving whole tensors between the host and devices, in stream order.

use crate::cuda;
use crate::{Device, Error, Result, Stream, TensorMut, TensorRef};

/// Copies `src` into `dst`: contiguous tensors of one dtype and shape. On a device's stream at least one of them is on that
/// device. Returns when host memory of either side may be used again, so it waits for the stream where one is on the host;
/// between devices it waits for nothing. An empty tensor copies nothing.
///
/// # Errors
/// [`Error::Shape`], [`Error::DTypeMismatch`], [`Error::Layout`] or [`Error::DeviceMismatch`], and nothing was copied;
/// [`Error::Cuda`] when the driver refuses, as it does in a capture if one side is on the host, or when work before it went wrong.
pub fn copy(stream: &Stream, src: TensorRef<'_>, dst: TensorMut<'_>) -> Result<()> {
    let waits = src.device() == Device::Cpu || dst.device() == Device::Cpu;
    // SAFETY: where the host takes part, this waits below before either borrow ends.
    unsafe { copy_async(stream, src, dst)? };
    if waits { stream.synchronize() } else { Ok(()) }
}

/// As [`copy`], but it never waits for pinned host memory ([`Buffer::pinned`](crate::Buffer::pinned)). From other host memory the
/// driver stages: a call that reads it returns when it has been read, one that writes it when it has been written.
///
/// # Errors
/// As [`copy`].
///
/// # Safety
/// Until the stream has passed the copy, both memories are there, nobody writes `src`, and nobody reads or writes `dst`, other
/// than in stream order. In a graph this holds for each replay.
pub unsafe fn copy_async(stream: &Stream, src: TensorRef<'_>, mut dst: TensorMut<'_>) -> Result<()> {
    if dst.shape() != src.shape() {
        let expected = format!("that of src, {:?}", src.shape());
        return Err(Error::Shape { tensor: "dst", expected, got: dst.shape().to_vec() });
    }
    if dst.dtype() != src.dtype() {
        let expected = format!("that of src, {}", src.dtype());
        return Err(Error::DTypeMismatch { tensor: "dst", expected, got: dst.dtype() });
    }
    let layout = |tensor, shape: &[usize], strides: &[usize]| {
        Err(Error::Layout { tensor, shape: shape.to_vec(), strides: strides.to_vec() })
    };
    if !src.is_contiguous() {
        return layout("src", src.shape(), src.strides());
    }
    if !dst.is_contiguous() {
        return layout("dst", dst.shape(), dst.strides());
    }
    let (here, from, to) = (stream.device(), src.device(), dst.device());
    let on_a_device = |device| device != Device::Cpu;
    // On the CPU both sides are here; on a device one is, and the other is there too or on the host or another card.
    let (fits, tensor, got) = match here {
        Device::Cpu if from != here => (false, "src", from),
        Device::Cpu => (to == here, "dst", to),
        _ if from == here || to == here => (true, "src", from),
        _ => {
            (false, if on_a_device(from) { "src" } else { "dst" }, if on_a_device(from) { from } else { to })
        }
    };
    if !fits {
        return Err(Error::DeviceMismatch { tensor, expected: here, got });
    }
    let bytes = src.numel() * src.dtype().size();
    if bytes == 0 {
        return Ok(());
    }
    let (src, dst) = (src.as_ptr(), dst.as_mut_ptr());
    if here == Device::Cpu {
        // SAFETY: two contiguous views of `bytes` bytes; a unique borrow overlaps no other.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) };
        return Ok(());
    }
    // SAFETY: both views are `bytes` bytes on their devices, one of which is the stream's; the rest is the caller's.
    unsafe { cuda::transfer(stream, (from, src), (to, dst), bytes) }
}

/// Sets every byte of a contiguous tensor of the stream's device, in stream order; on a device it waits for nothing.
///
/// # Errors
/// [`Error::Layout`] or [`Error::DeviceMismatch`], and nothing was written; [`Error::Cuda`].
pub fn fill(stream: &Stream, mut dst: TensorMut<'_>, byte: u8) -> Result<()> {
    if !dst.is_contiguous() {
        let (shape, strides) = (dst.shape().to_vec(), dst.strides().to_vec());
        return Err(Error::Layout { tensor: "dst", shape, strides });
    }
    if dst.device() != stream.device() {
        return Err(Error::DeviceMismatch { tensor: "dst", expected: stream.device(), got: dst.device() });
    }
    let bytes = dst.numel() * dst.dtype().size();
    match (bytes, stream.device()) {
        (0, _) => Ok(()),
        // SAFETY: a contiguous view of `bytes` writable bytes.
        (_, Device::Cpu) => unsafe {
            dst.as_mut_ptr().write_bytes(byte, bytes);
            Ok(())
        },
        // SAFETY: as above, on the stream's device.
        _ => unsafe { cuda::fill(stream, dst.as_mut_ptr(), byte, bytes) },
    }
}
