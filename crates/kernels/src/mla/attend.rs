//! The call: one layer's latent attention over a work list, into the caller's buffers.

use crate::cpu::Isa;
use crate::cpu::paged::{Call, Extra, Out};
use crate::cpu::tokens::apart;
use crate::dispatch::{self, HeadValues};
use crate::paged::Stored;
use crate::work::WorkList;
use crate::{DType, Error, Result, Stream, TensorMut, TensorRef};

/// What [`attend`] reads and writes. `T` query tokens, `P` pages; other letters are the [`Geometry`](super::Geometry)'s.
#[derive(Debug)]
pub struct AttendParams<'a> {
    /// What to do, made by [`schedule`](super::schedule); carries geometry and variant.
    pub work: &'a WorkList,
    /// `[T, H, C]`, of the geometry's `q_dtype`: queries multiplied into latent space; any outer strides.
    pub q_nope: TensorRef<'a>,
    /// `[T, H, E]`, as `q_nope`: the rotary part; empty when `E` is 0.
    pub q_pe: TensorRef<'a>,
    /// `[P, S, C + E]`, of the geometry's `kv_dtype`: `[ckv | kpe]` a token; any outer strides. `P` is at least the
    /// table's. Of e4m3 `[P, S, B]` u8, as [`fp8`](crate::fp8) has it.
    pub latent: TensorRef<'a>,
    /// `[T, H, C]`, of the geometry's `q_dtype`, in latent space; every element is written.
    pub o: TensorMut<'a>,
    /// `[T, H]` f32: natural log-sum-exp, `-inf` where a query sees nothing.
    pub lse: Option<TensorMut<'a>>,
    /// `[n]` u8, contiguous: scratch of at least [`workspace_bytes`]; its content means nothing before or after.
    pub workspace: TensorMut<'a>,
    /// Threads to use at most; the caller's rayon pool decides which.
    pub workers: usize,
}

/// Bytes that [`attend`] needs for a list with up to `workers` threads, wherever the workspace starts.
pub fn workspace_bytes(work: &WorkList, workers: usize) -> usize {
    dispatch::workspace_bytes(work, workers)
}

/// Attends one layer. Allocates nothing, and writes nothing when it refuses.
///
/// A latent that some query of a row sees and another does not must be finite; a latent that no query of the row
/// sees may hold anything, NaN included.
///
/// # Errors
/// A list that [`paged::schedule`](crate::paged::schedule) made; tensors of another shape, dtype, layout or device than
/// the list was made for; a workspace that is too small; a device without a kernel.
pub fn attend(stream: &Stream, params: AttendParams<'_>) -> Result<()> {
    let AttendParams { work, q_nope, q_pe, latent, mut o, lse, workspace, workers } = params;
    let device = crate::device::supported("latent attention", stream)?;
    if work.stored != Stored::Latents {
        let why = "the list is not of latent attention; make it by mla::schedule".into();
        return Err(Error::Parameter { name: "work", why, got: "a list over keys and values".into() });
    }
    let geometry = work.geometry();
    let (tokens, h) = (Some(work.num_tokens()), Some(geometry.num_qo_heads));
    let (depth, width) = (geometry.head_dim_qk, geometry.head_dim_vo);
    let q_dtype = Some(geometry.q_dtype);
    let (slot, kv_dtype) = super::geometry::slot(geometry.kv_dtype, width, depth - width);
    q_nope.expect("q_nope", "[T, H, C]", &[tokens, h, Some(width)], q_dtype, device)?;
    q_pe.expect("q_pe", "[T, H, E]", &[tokens, h, Some(depth - width)], q_dtype, device)?;
    let page = [None, Some(geometry.page_size), Some(slot)];
    let expected = if geometry.is_fp8() { "[P, S, C + 4 * ceil(C / 128) + 2 * E]" } else { "[P, S, C + E]" };
    latent.expect("latent", expected, &page, Some(kv_dtype), device)?;
    if latent.shape()[0] < work.num_pages() {
        let expected = format!("[P, S, C + E] with P at least {}", work.num_pages());
        return Err(Error::Shape { tensor: "latent", expected, got: latent.shape().to_vec() });
    }
    o.expect("o", "[T, H, C]", &[tokens, h, Some(width)], q_dtype, device)?;
    apart("o", &o)?;
    if let Some(lse) = &lse {
        lse.expect("lse", "[T, H]", &[tokens, h], Some(DType::F32), device)?;
        apart("lse", lse)?;
    }
    let call = Call {
        work,
        geometry: *geometry,
        variant: *work.variant(),
        isa: Isa::current(),
        q: q_nope,
        q_pe: Some(q_pe),
        k: latent,
        v: latent,
        sinks: None,
        alibi_slopes: None,
        o: Out::of(&mut o),
        lse: lse.map(|mut lse| Out::of(&mut lse)),
        extra: Extra::default(),
    };
    dispatch::attend(stream, call, HeadValues::default(), workspace, workers)
}
