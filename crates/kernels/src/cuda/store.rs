//! Tokens into a cache of e4m3 on a device; `fp8` checks and calls this.

use bytemuck::{Pod, Zeroable};

use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::{Context, Launch, launch};
use crate::{DType, Device, Result, Stream, TensorMut, TensorRef, fp8};

const THREADS: u32 = 256;
const WARPS: usize = 8;
const HEADS: &str = "store_heads";
const LATENTS: &str = "store_latents";

/// As in `cu/store.cu`; distances in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Store {
    slots: u64,
    from: u64,
    pe: u64,
    to: u64,
    scales: u64,
    from_token: i64,
    from_head: i64,
    pe_token: i64,
    to_page: i64,
    to_slot: i64,
    to_head: i64,
    scale_page: i64,
    scale_slot: i64,
    scale_head: i64,
    tokens: u64,
    limit: u64,
    page_size: u32,
    heads: u32,
    width: u32,
    pe_width: u32,
    dtype: u32,
    pe_dtype: u32,
}

/// As in `cu/store.cu`: one side, or two.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Both {
    of: [Store; 2],
}

const _: () = assert!(size_of::<Store>() == 152 && size_of::<Both>() == 304);

/// Compiles and loads what stores keys and values, or latents.
///
/// # Errors
/// A kernel that cannot be built; a device that is not there.
pub(crate) fn prepare(device: Device, latents: bool) -> Result<()> {
    jit::prepare(device, &[key(if latents { LATENTS } else { HEADS })])
}

fn key(entry: &'static str) -> Key {
    Key::new(Unit::STORE, entry)
}

fn number(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// Bytes between neighbours of an axis.
fn step(tensor: &TensorRef<'_>, axis: usize) -> i64 {
    (tensor.strides()[axis] * tensor.dtype().size()) as i64
}

fn slots_of(to: &TensorRef<'_>) -> (u64, u32) {
    let [pages, page_size] = [to.shape()[0], to.shape()[1]];
    (pages.saturating_mul(page_size) as u64, page_size as u32)
}

/// What [`store_heads`](fp8::store_heads) does, for one side or two. All was checked, and `slots` is contiguous.
///
/// # Errors
/// A kernel that cannot be built; what a launch is refused with.
pub(crate) fn heads<'a>(
    stream: &Stream,
    slots: &TensorRef<'_>,
    sides: impl IntoIterator<Item = fp8::HeadsInCodes<'a>>,
) -> Result<()> {
    let mut params = Both::default();
    let mut units = 0usize;
    for (of, mut side) in params.of.iter_mut().zip(sides) {
        let (to, beside) = (side.codes.as_mut_ptr() as u64, side.scales.as_mut_ptr() as u64);
        let (entries, codes, scales) = (&side.entries, side.codes.as_ref(), side.scales.as_ref());
        let (limit, page_size) = slots_of(&codes);
        let (tokens, heads) = (entries.shape()[0], entries.shape()[1]);
        *of = Store {
            slots: slots.as_ptr() as u64,
            from: entries.as_ptr() as u64,
            to,
            scales: beside,
            from_token: step(entries, 0),
            from_head: step(entries, 1),
            to_page: step(&codes, 0),
            to_slot: step(&codes, 1),
            to_head: step(&codes, 2),
            scale_page: step(&scales, 0),
            scale_slot: step(&scales, 1),
            scale_head: step(&scales, 2),
            tokens: tokens as u64,
            limit,
            page_size,
            heads: heads as u32,
            width: entries.shape()[2] as u32,
            dtype: number(entries.dtype()),
            ..Store::default()
        };
        units = units.saturating_add(tokens.saturating_mul(heads));
    }
    go(stream, HEADS, units, &params)
}

/// What [`store_latents`](fp8::store_latents) does. All was checked, and `slots` is contiguous.
///
/// # Errors
/// As [`heads`].
pub(crate) fn latents(
    stream: &Stream,
    slots: &TensorRef<'_>,
    ckv: &TensorRef<'_>,
    kpe: &TensorRef<'_>,
    cache: &mut TensorMut<'_>,
) -> Result<()> {
    let (limit, page_size) = slots_of(&cache.as_ref());
    let to = cache.as_mut_ptr() as u64;
    let cache = cache.as_ref();
    let (tokens, c, e) = (ckv.shape()[0], ckv.shape()[1], kpe.shape()[1]);
    let params = Store {
        slots: slots.as_ptr() as u64,
        from: ckv.as_ptr() as u64,
        pe: kpe.as_ptr() as u64,
        to,
        from_token: step(ckv, 0),
        pe_token: step(kpe, 0),
        to_page: step(&cache, 0),
        to_slot: step(&cache, 1),
        tokens: tokens as u64,
        limit,
        page_size,
        width: c as u32,
        pe_width: e as u32,
        dtype: number(ckv.dtype()),
        pe_dtype: number(kpe.dtype()),
        ..Store::default()
    };
    let parts = fp8::latent_scales(c) + usize::from(e > 0);
    go(stream, LATENTS, tokens.saturating_mul(parts), &params)
}

/// A warp for each of `units`.
fn go<P: Pod>(stream: &Stream, entry: &'static str, units: usize, params: &P) -> Result<()> {
    if units == 0 {
        return Ok(());
    }
    let device = stream.device();
    let function = jit::function(device, &key(entry))?;
    let most = 8 * Context::of(device)?.sm_count() as usize;
    let blocks = units.div_ceil(WARPS).clamp(1, most) as u32;
    let how = Launch { grid: [blocks, 1, 1], block: THREADS, shared: 0 };
    // SAFETY: the kernel takes a `Store`, or a `Both`, whose tensors the caller checked to have these shapes on this device; slots out of range
    // write nothing.
    unsafe { launch(&function, stream, how, params) }
}
