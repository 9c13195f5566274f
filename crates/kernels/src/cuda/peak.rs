//! What a device can do at most, measured in the program that is judged by it: plain reads of memory, and products of matrices on
//! the tensor cores (`mma.sync`; Hopper's own instructions reach more).

use bytemuck::{Pod, Zeroable};

use super::jit::{self, Key, Unit};
use super::{Context, Launch, launch};
use crate::{Device, Error, Result, Stream, TensorRef};

const PEAK: Unit = Unit::of("peak.cu", include_str!("cu/peak.cu"));
const READ: (&str, u32) = ("read_all", 512);
const MULTIPLY: (&str, u32) = ("multiply", 256);
/// Operations of one round of a warp: eight products of 16 x 16 by 16 x 8.
const ROUND: f64 = (8 * 2 * 16 * 16 * 8) as f64;

/// As in `cu/peak.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Peak {
    at: u64,
    count: u64,
    sink: u64,
}

/// Compiles and loads both kernels, so that neither does so while it is timed.
///
/// # Errors
/// A kernel that cannot be built; a device that is not there.
pub fn prepare(device: Device) -> Result<()> {
    jit::prepare(device, &keys())
}

/// Both kernels.
pub(super) fn keys() -> Vec<Key> {
    vec![Key::new(PEAK, READ.0), Key::new(PEAK, MULTIPLY.0)]
}

/// Reads the bytes of a contiguous tensor once, in stream order, and keeps nothing of them; up to 15 bytes at the end are left.
///
/// # Errors
/// A tensor of another device, with gaps, or that does not start on 16 bytes.
pub fn read(stream: &Stream, src: TensorRef<'_>) -> Result<()> {
    if src.device() != stream.device() {
        return Err(Error::DeviceMismatch { tensor: "src", expected: stream.device(), got: src.device() });
    }
    if !src.is_contiguous() {
        let (shape, strides) = (src.shape().to_vec(), src.strides().to_vec());
        return Err(Error::Layout { tensor: "src", shape, strides });
    }
    let at = src.as_ptr() as usize;
    if !at.is_multiple_of(16) {
        let why = "a plain read starts on 16 bytes".into();
        return Err(Error::Parameter { name: "src", why, got: format!("address {at:#x}") });
    }
    let count = (src.numel() * src.dtype().size() / 16) as u64;
    // SAFETY: `count` pieces of the tensor lie at `at`, on this device; nothing is written.
    unsafe { go(stream, READ, &Peak { at: at as u64, count, sink: 0 }) }.map(drop)
}

/// Multiplies bf16 matrices in registers for `rounds` rounds a warp, in stream order; returns the operations of all warps.
///
/// # Errors
/// A device that is not there; a kernel that cannot be built.
pub fn multiply(stream: &Stream, rounds: u64) -> Result<f64> {
    // SAFETY: the kernel touches no memory.
    let threads = unsafe { go(stream, MULTIPLY, &Peak { at: 0, count: rounds, sink: 0 }) }?;
    Ok(f64::from(threads / 32) * rounds as f64 * ROUND)
}

/// Fills the device with blocks; returns the threads.
///
/// # Safety
/// What `params` names is there.
unsafe fn go(stream: &Stream, (entry, block): (&'static str, u32), params: &Peak) -> Result<u32> {
    let context = Context::of(stream.device())?;
    let function = jit::function(stream.device(), &Key::new(PEAK, entry))?;
    let blocks = function.blocks_per_sm(block, 0)? * context.sm_count();
    // SAFETY: the caller's; the parameter is that of the kernel.
    unsafe { launch(&function, stream, Launch { grid: [blocks, 1, 1], block, shared: 0 }, params) }?;
    Ok(blocks * block)
}
