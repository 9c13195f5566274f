//! Appending tokens to a cache of e4m3: a scatter that quantises on its way.

use half::{bf16, f16};
use rayon::prelude::*;

use super::{LATENT_GROUP, e4m3_to_f32, f32_to_e4m3, float, latent_bytes, latent_scales, scale_of};
use crate::cpu::address::{split_slot, token_offset};
use crate::cpu::scatter::check_slots;
use crate::cpu::tokens::{SERIAL_BYTES, apart, strided};
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

/// Writes token `t` of `entries` `[T, G, D]` (keys or values: f32, bf16 or f16; any outer strides) as e4m3 to slot `slots[t]` of
/// `codes` `[P, S, G, D]` and `scales` `[P, S, G]` f32, in stream order. `slots` is `[T]` i64, contiguous, on the stream's device;
/// -1 (padding) writes nothing, and where a slot is repeated the last of its tokens stays.
///
/// A token has one scale a head: its largest magnitude over 448, so that nothing saturates; 1 for a row of zeros, and never below
/// the smallest normal f32. A lane is rounded to the nearest e4m3 of `lane / scale`, ties to even. NaN lanes stay NaN and do not
/// count towards the scale; a row with an infinity has scale `inf`, under which every lane is NaN.
///
/// On a device a slot out of range writes nothing, since only the device can see it; and tokens that go to one slot leave any
/// mixture of themselves there: give each a slot of its own.
///
/// # Errors
/// Shapes, dtypes or layouts that do not fit, or on the CPU a slot that is neither -1 nor below `P * S`, with its index: nothing
/// is then written. A device without a kernel.
pub fn store_heads(
    stream: &Stream,
    slots: TensorRef<'_>,
    entries: TensorRef<'_>,
    codes: TensorMut<'_>,
    scales: TensorMut<'_>,
) -> Result<()> {
    let side = [HeadsInCodes { entries, codes, scales }];
    check_heads(stream, &slots, &side[0])?;
    #[cfg(feature = "cuda")]
    if stream.device() != Device::Cpu {
        return crate::cuda::store::heads(stream, &slots, side);
    }
    side.into_iter().try_for_each(|side| store_here(&slots, side))
}

/// As [`store_heads`] of keys and values of the same tokens. On a device both go at once, where two calls would take twice as long.
///
/// # Errors
/// As [`store_heads`]; nothing is then written of either.
pub fn store_both_heads(stream: &Stream, slots: TensorRef<'_>, both: [HeadsInCodes<'_>; 2]) -> Result<()> {
    for side in &both {
        check_heads(stream, &slots, side)?;
    }
    #[cfg(feature = "cuda")]
    if stream.device() != Device::Cpu {
        return crate::cuda::store::heads(stream, &slots, both);
    }
    both.into_iter().try_for_each(|side| store_here(&slots, side))
}

/// One side, keys or values, of what [`store_both_heads`] writes.
#[derive(Debug)]
pub struct HeadsInCodes<'a> {
    /// `[T, G, D]`: f32, bf16 or f16; any outer strides.
    pub entries: TensorRef<'a>,
    /// `[P, S, G, D]`, e4m3.
    pub codes: TensorMut<'a>,
    /// `[P, S, G]`, f32.
    pub scales: TensorMut<'a>,
}

/// What [`store_heads`] refuses.
fn check_heads(stream: &Stream, slots: &TensorRef<'_>, side: &HeadsInCodes<'_>) -> Result<()> {
    let HeadsInCodes { entries, codes, scales } = side;
    let device = crate::device::supported("storing keys and values as e4m3", stream)?;
    entries.expect("entries", "[T, G, D]", &[None, None, None], None, device)?;
    let (tokens, heads, width) = (entries.shape()[0], entries.shape()[1], entries.shape()[2]);
    floats("entries", entries)?;
    codes.expect(
        "codes",
        "[P, S, G, D]",
        &[None, None, Some(heads), Some(width)],
        Some(DType::E4m3),
        device,
    )?;
    let (pages, page_size) = (codes.shape()[0], codes.shape()[1]);
    let wanted = [Some(pages), Some(page_size), Some(heads)];
    scales.expect("scales", "[P, S, G]", &wanted, Some(DType::F32), device)?;
    apart("codes", codes)?;
    apart("scales", scales)?;
    slots.expect("slots", "[T]", &[Some(tokens)], Some(DType::I64), device)?;
    if !slots.is_contiguous() {
        return Err(strided("slots", slots));
    }
    match slots.as_slice::<i64>() {
        Some(slots) => check_slots(slots, pages, page_size).map(drop),
        None => Ok(()),
    }
}

/// Stores what was checked, on the CPU.
fn store_here(slots: &TensorRef<'_>, side: HeadsInCodes<'_>) -> Result<()> {
    let HeadsInCodes { entries, mut codes, mut scales } = side;
    let (heads, width, page_size) = (entries.shape()[1], entries.shape()[2], codes.shape()[1]);
    let Some(slots) = slots.as_slice::<i64>() else { return Err(strided("slots", slots)) };
    let from = Source::of(&entries);
    let to = Target { base: codes.as_mut_ptr(), strides: axes(codes.strides()), size: 1 };
    let beside = Target { base: scales.as_mut_ptr(), strides: axes(scales.strides()), size: 4 };
    // Threads share heads and never tokens, so that the last of several tokens for one slot stays.
    let head = |head: usize| {
        for (token, &slot) in slots.iter().enumerate() {
            let Ok(slot) = u64::try_from(slot) else { continue };
            let slot = split_slot(slot, page_size as u64);
            // SAFETY: the slot is below P * S, token and head are in range, and this thread alone writes this head.
            unsafe {
                let row = from.at(token, head);
                let scale = quantise(from.dtype, row, width, to.at(slot, head));
                beside.at(slot, head).cast::<f32>().write_unaligned(scale);
            }
        }
    };
    if slots.len() * heads * width < SERIAL_BYTES || heads < 2 {
        (0..heads).for_each(head);
    } else {
        (0..heads).into_par_iter().for_each(head);
    }
    Ok(())
}

/// Writes token `t` of `ckv` `[T, C]` and `kpe` `[T, E]` (f32, bf16 or f16; any outer stride) to slot `slots[t]` of `cache`
/// `[P, S, B]` u8, `B` being [`latent_bytes`](super::latent_bytes): `[C e4m3 | ceil(C / 128) f32 | E bf16]`. `C` is a multiple of 4
/// and `E` of 2, so that scales are aligned. Scales and rounding are those of [`store_heads`], for each 128 lanes; rotary lanes
/// are rounded to bf16, ties to even.
///
/// # Errors
/// As [`store_heads`].
pub fn store_latents(
    stream: &Stream,
    slots: TensorRef<'_>,
    ckv: TensorRef<'_>,
    kpe: TensorRef<'_>,
    mut cache: TensorMut<'_>,
) -> Result<()> {
    let device = crate::device::supported("storing latents as e4m3", stream)?;
    ckv.expect("ckv", "[T, C]", &[None, None], None, device)?;
    let (tokens, c) = (ckv.shape()[0], ckv.shape()[1]);
    kpe.expect("kpe", "[T, E]", &[Some(tokens), None], None, device)?;
    let e = kpe.shape()[1];
    floats("ckv", &ckv)?;
    floats("kpe", &kpe)?;
    check_latent(c, e)?;
    let wanted = [None, None, Some(latent_bytes(c, e))];
    cache.expect("cache", "[P, S, C + 4 * ceil(C / 128) + 2 * E]", &wanted, Some(DType::U8), device)?;
    apart("cache", &cache)?;
    let (pages, page_size) = (cache.shape()[0], cache.shape()[1]);
    slots.expect("slots", "[T]", &[Some(tokens)], Some(DType::I64), device)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        if !slots.is_contiguous() {
            return Err(strided("slots", &slots));
        }
        return crate::cuda::store::latents(stream, &slots, &ckv, &kpe, &mut cache);
    }
    let Some(slots) = slots.as_slice::<i64>() else { return Err(strided("slots", &slots)) };
    check_slots(slots, pages, page_size)?;
    let (from, rope) = (Source::of(&ckv), Source::of(&kpe));
    let strides = [cache.strides()[0] as u64, cache.strides()[1] as u64, 0];
    let to = Target { base: cache.as_mut_ptr(), strides, size: 1 };
    for (token, &slot) in slots.iter().enumerate() {
        let Ok(slot) = u64::try_from(slot) else { continue };
        // SAFETY: the slot is below P * S and the token below T; a slot has `latent_bytes` bytes, which hold the codes, the
        // scales and the rotary lanes one after another; nobody else writes meanwhile.
        unsafe {
            let stored = to.at(split_slot(slot, page_size as u64), 0);
            let row = from.at(token, 0);
            for group in 0..latent_scales(c) {
                let first = group * LATENT_GROUP;
                let lanes = LATENT_GROUP.min(c - first);
                let scale =
                    quantise(from.dtype, row.add(first * from.dtype.size()), lanes, stored.add(first));
                stored.add(c + 4 * group).cast::<f32>().write_unaligned(scale);
            }
            let (row, to) = (rope.at(token, 0), stored.add(c + 4 * latent_scales(c)).cast::<bf16>());
            for lane in 0..e {
                to.add(lane).write_unaligned(bf16::from_f32(float(rope.dtype, row, lane)));
            }
        }
    }
    Ok(())
}

/// Refuses widths of a latent under which its scales would not be aligned.
///
/// # Errors
/// [`Error::Parameter`] of `kv_lora_rank` or `qk_rope_head_dim`.
pub fn check_latent(c: usize, e: usize) -> Result<()> {
    let refuse = |name, multiple: usize, got: usize| {
        let why = format!("latents in fp8_e4m3 have a multiple of {multiple}, so that scales are aligned");
        Err(Error::Parameter { name, why, got: got.to_string() })
    };
    match (c % 4, e % 2) {
        _ if c == 0 => refuse("kv_lora_rank", 4, c),
        (0, 0) => Ok(()),
        (0, _) => refuse("qk_rope_head_dim", 2, e),
        _ => refuse("kv_lora_rank", 4, c),
    }
}

fn floats(tensor: &'static str, got: &TensorRef<'_>) -> Result<()> {
    if got.dtype().is_float() {
        return Ok(());
    }
    Err(Error::DTypeMismatch { tensor, expected: "f32, bf16 or f16".into(), got: got.dtype() })
}

/// Has the kernels of [`store_heads`], or of [`store_latents`], built and loaded, so that storing compiles nothing. Nothing on the
/// CPU.
///
/// # Errors
/// A kernel that cannot be built; a device that is not there.
pub fn prepare_store(device: Device, latents: bool) -> Result<()> {
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::store::prepare(device, latents);
    }
    let _ = (device, latents);
    Ok(())
}

/// Strides of pages, slots and heads.
fn axes(strides: &[usize]) -> [u64; 3] {
    [strides[0] as u64, strides[1] as u64, strides[2] as u64]
}

/// Tokens as addresses.
struct Source {
    base: *const u8,
    dtype: DType,
    /// Elements from one token to the next, and from one head to the next.
    strides: [usize; 2],
}

// SAFETY: an address that is only read.
unsafe impl Sync for Source {}

impl Source {
    fn of(tensor: &TensorRef<'_>) -> Source {
        let strides = tensor.strides();
        let head = if strides.len() == 3 { strides[1] } else { 0 };
        Source { base: tensor.as_ptr(), dtype: tensor.dtype(), strides: [strides[0], head] }
    }

    fn at(&self, token: usize, head: usize) -> *const u8 {
        let elements = token * self.strides[0] + head * self.strides[1];
        self.base.wrapping_add(elements * self.dtype.size())
    }
}

/// Slots of a cache as addresses.
struct Target {
    base: *mut u8,
    /// Elements from one page, slot and head to the next.
    strides: [u64; 3],
    size: usize,
}

// SAFETY: an address; threads write disjoint heads.
unsafe impl Sync for Target {}

impl Target {
    fn at(&self, (page, slot): (u32, u32), head: usize) -> *mut u8 {
        let [pages, slots, heads] = self.strides;
        let elements = token_offset(page, slot, pages, slots) + head as u64 * heads;
        self.base.wrapping_add(elements as usize * self.size)
    }
}

/// A float that can be read as f32.
trait Lane: Copy {
    fn widen(self) -> f32;
}

impl Lane for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Lane for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Lane for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Writes `count` lanes as codes, and returns their scale.
///
/// # Safety
/// `count` elements of the dtype are readable at `from`, and as many bytes writable at `to`, which nobody else touches.
unsafe fn quantise(dtype: DType, from: *const u8, count: usize, to: *mut u8) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Bf16 => lanes::<bf16>(from.cast(), count, to),
            DType::F16 => lanes::<f16>(from.cast(), count, to),
            _ => lanes::<f32>(from.cast(), count, to),
        }
    }
}

/// # Safety
/// As [`quantise`].
unsafe fn lanes<T: Lane>(from: *const T, count: usize, to: *mut u8) -> f32 {
    // SAFETY: the caller's promise; any address will do for an unaligned read.
    unsafe {
        let mut largest = 0u32;
        for lane in 0..count {
            // Magnitudes order as integers; NaN does not count.
            let magnitude = from.add(lane).read_unaligned().widen().to_bits() & 0x7fff_ffff;
            largest = largest.max(if magnitude > 0x7f80_0000 { 0 } else { magnitude });
        }
        let scale = scale_of(f32::from_bits(largest));
        for lane in 0..count {
            *to.add(lane) = f32_to_e4m3(from.add(lane).read_unaligned().widen() / scale);
        }
        scale
    }
}

/// Lane `lane` of a latent in its stored form, `[C e4m3 | ceil(C / 128) f32 | E bf16]`, `C` being `kv_lora_rank`.
///
/// # Panics
/// When `stored` is shorter than that.
pub fn dequantise_latent(stored: &[u8], kv_lora_rank: usize, lane: usize) -> f32 {
    let scales = &stored[kv_lora_rank..];
    if lane < kv_lora_rank {
        let scale = scales[lane / LATENT_GROUP * 4..][..4].try_into().expect("four bytes");
        return e4m3_to_f32(stored[lane]) * f32::from_ne_bytes(scale);
    }
    let at = 4 * latent_scales(kv_lora_rank) + 2 * (lane - kv_lora_rank);
    bf16::from_ne_bytes(scales[at..][..2].try_into().expect("two bytes")).to_f32()
}
