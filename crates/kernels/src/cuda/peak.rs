//! What a device can do at most, measured in the program that is judged by it: plain reads of memory, and products of matrices on
//! the tensor cores, by the instructions that reach the most there: `wgmma` on a Hopper, `mma.sync` elsewhere.

use bytemuck::{Pod, Zeroable};

use super::jit::{self, Key, Unit};
use super::{Context, Launch, launch};
use crate::{Device, Error, Result, Stream, TensorRef};

const PEAK: Unit = Unit::of("peak.cu", include_str!("cu/peak.cu"));
const READ: (&str, u32) = ("read_all", 512);
const MULTIPLY: (&str, u32) = ("multiply", 256);
/// Operations of one round of a warp: eight products of 16 x 16 by 16 x 8.
const ROUND: f64 = (8 * 2 * 16 * 16 * 8) as f64;
const GROUPS: Unit = Unit::of("peak_groups.cu", include_str!("cu/peak_groups.cu"));
const MULTIPLY_GROUPS: (&str, u32) = ("multiply_groups", 256);
/// Operations of one round of a warpgroup: 64 x 64 by 64 x 256.
const GROUP_ROUND: f64 = (2 * 64 * 64 * 256) as f64;
/// Its operands: two of 64 x 64, one of 64 x 256.
const GROUP_SHARED: u32 = 2 * 64 * 64 * 2 + 64 * 256 * 2;

/// As in `cu/peak.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Peak {
    at: u64,
    count: u64,
    sink: u64,
}

/// Compiles and loads the kernels, so that none does so while it is timed.
///
/// # Errors
/// A kernel that cannot be built; a device that is not there.
pub fn prepare(device: Device) -> Result<()> {
    let hopper = Context::of(device)?.is_hopper();
    let keys: Vec<Key> = keys().into_iter().filter(|key| hopper || !key.unit.needs_hopper()).collect();
    jit::prepare(device, &keys)
}

/// The kernels.
pub(super) fn keys() -> Vec<Key> {
    vec![Key::new(PEAK, READ.0), Key::new(PEAK, MULTIPLY.0), Key::new(GROUPS, MULTIPLY_GROUPS.0)]
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
    unsafe { go(stream, PEAK, READ, 0, &Peak { at: at as u64, count, sink: 0 }) }.map(drop)
}

/// Multiplies bf16 matrices for `rounds` rounds, in stream order, out of registers or a Hopper's shared memory; returns the
/// operations of all warps.
///
/// # Errors
/// A device that is not there; a kernel that cannot be built.
pub fn multiply(stream: &Stream, rounds: u64) -> Result<f64> {
    let groups = Context::of(stream.device())?.is_hopper();
    if groups { multiply_groups(stream, rounds) } else { multiply_warps(stream, rounds) }
}

/// [`multiply`] by `mma.sync`.
pub(super) fn multiply_warps(stream: &Stream, rounds: u64) -> Result<f64> {
    // SAFETY: the kernel touches no memory.
    let threads = unsafe { go(stream, PEAK, MULTIPLY, 0, &Peak { at: 0, count: rounds, sink: 0 }) }?;
    Ok(f64::from(threads / 32) * rounds as f64 * ROUND)
}

/// [`multiply`] by `wgmma`, on a Hopper.
pub(super) fn multiply_groups(stream: &Stream, rounds: u64) -> Result<f64> {
    let params = Peak { at: 0, count: rounds, sink: 0 };
    // SAFETY: the kernel touches no memory but its own.
    let threads = unsafe { go(stream, GROUPS, MULTIPLY_GROUPS, GROUP_SHARED, &params) }?;
    Ok(f64::from(threads / 128) * rounds as f64 * GROUP_ROUND)
}

/// Fills the device with blocks; returns the threads.
///
/// # Safety
/// What `params` names is there.
unsafe fn go(
    stream: &Stream,
    unit: Unit,
    (entry, block): (&'static str, u32),
    shared: u32,
    params: &Peak,
) -> Result<u32> {
    let context = Context::of(stream.device())?;
    let function = jit::function(stream.device(), &Key::new(unit, entry))?;
    let blocks = function.blocks_per_sm(block, shared)? * context.sm_count();
    // SAFETY: the caller's; the parameter is that of the kernel.
    unsafe { launch(&function, stream, Launch { grid: [blocks, 1, 1], block, shared }, params) }?;
    Ok(blocks * block)
}
