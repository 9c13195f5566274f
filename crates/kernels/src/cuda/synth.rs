//! Synthetic queries, keys and values filled in on a device; `synth` checks and calls this.

use bytemuck::{Pod, Zeroable};

use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::{Context, Launch, launch};
use crate::{DType, Result, Stream, TensorMut, TensorRef};

const THREADS: u32 = 256;

/// As in `cu/synth.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Fill {
    keys: u64,
    out: u64,
    stem: u64,
    token: i64,
    head: i64,
    tokens: u32,
    heads: u32,
    width: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<Fill>() == 56);

/// Fills `out` `[T, heads, D]` (or `[T, D]`, one head), f32, bf16 or f16 with contiguous lanes, by `keys` `[T]`, contiguous: both on
/// the stream's device, as the caller checked.
///
/// # Errors
/// A kernel that cannot be built; what a launch is refused with.
pub(crate) fn fill(stream: &Stream, stem: u64, keys: &TensorRef<'_>, out: &mut TensorMut<'_>) -> Result<()> {
    let shape = out.shape();
    let (tokens, width) = (shape[0], shape[shape.len() - 1]);
    let (heads, head) = if shape.len() == 3 { (shape[1], out.strides()[1]) } else { (1, 0) };
    let all = tokens * heads * width.div_ceil(2);
    if all == 0 {
        return Ok(());
    }
    let dtype = match out.dtype() {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    };
    let params = Fill {
        keys: keys.as_ptr() as u64,
        token: out.strides()[0] as i64,
        head: head as i64,
        out: out.as_mut_ptr() as u64,
        stem,
        tokens: tokens as u32,
        heads: heads as u32,
        width: width as u32,
        reserved: 0,
    };
    let device = stream.device();
    let function = jit::function(device, &Key::new(Unit::SYNTH, "synth").with("OUT_TYPE", dtype))?;
    let most = 8 * Context::of(device)?.sm_count() as usize;
    let blocks = all.div_ceil(THREADS as usize).clamp(1, most) as u32;
    let how = Launch { grid: [blocks, 1, 1], block: THREADS, shared: 0 };
    // SAFETY: the caller checked both tensors, and that elements of `out` are apart.
    unsafe { launch(&function, stream, how, &params) }
}
