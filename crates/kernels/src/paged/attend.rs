//! The call: one layer's attention over a work list, into the caller's buffers.

use crate::cpu::Isa;
use crate::cpu::paged::{Call, Extra, Out};
use crate::cpu::tokens::apart;
use crate::dispatch::{self, HeadValues};
use crate::work::WorkList;
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

use super::Stored;

/// What [`attend`] reads and writes. Letters are the work list's: `T` query tokens, `H`, `G`, `D`, `Dv`, `P`, `S`.
#[derive(Debug)]
pub struct AttendParams<'a> {
    /// What to do; carries geometry and variant.
    pub work: &'a WorkList,
    /// `[T, H, D]`, of the geometry's `q_dtype`; any outer strides.
    pub q: TensorRef<'a>,
    /// `[P, S, G, D]`, of the geometry's `kv_dtype`; any outer strides. `P` is at least the table's.
    pub k: TensorRef<'a>,
    /// `[P, S, G, Dv]`, as `k`.
    pub v: TensorRef<'a>,
    /// Scales of keys and of values, each `[P, S, G]` f32, any strides: given exactly when `kv_dtype` is e4m3, where lane `d` of a
    /// key is its scale times its code.
    pub kv_scales: Option<[TensorRef<'a>; 2]>,
    /// `[H]` f32, natural-log units, contiguous; given exactly when the variant has sinks.
    pub sinks: Option<TensorRef<'a>>,
    /// `[H]` f32, contiguous; given exactly when the variant has ALiBi.
    pub alibi_slopes: Option<TensorRef<'a>>,
    /// `[T, H, Dv]`, of the geometry's `q_dtype`; every element is written.
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
/// A key that some query of a row sees and another does not must be finite; a key that no query of the row sees
/// may hold anything, NaN included.
///
/// # Errors
/// Tensors of another shape, dtype, layout or device than the list was made for; sinks or slopes given without
/// the variant asking, or missing; a workspace that is too small; a device without a kernel.
pub fn attend(stream: &Stream, params: AttendParams<'_>) -> Result<()> {
    let AttendParams { work, q, k, v, kv_scales, sinks, alibi_slopes, mut o, lse, workspace, workers } =
        params;
    let device = crate::device::supported("paged attention", stream)?;
    if work.stored != Stored::Heads {
        let why = "the list is of latent attention; run it by mla::attend".into();
        return Err(Error::Parameter { name: "work", why, got: "latents".into() });
    }
    let geometry = work.geometry();
    let tokens = Some(work.num_tokens());
    let (h, g, s) = (Some(geometry.num_qo_heads), Some(geometry.num_kv_heads), Some(geometry.page_size));
    let (d, dv) = (Some(geometry.head_dim_qk), Some(geometry.head_dim_vo));
    let (q_dtype, kv_dtype) = (Some(geometry.q_dtype), Some(geometry.kv_dtype));
    q.expect("q", "[T, H, D]", &[tokens, h, d], q_dtype, device)?;
    k.expect("k", "[P, S, G, D]", &[None, s, g, d], kv_dtype, device)?;
    v.expect("v", "[P, S, G, Dv]", &[None, s, g, dv], kv_dtype, device)?;
    for (name, tensor) in [("k", &k), ("v", &v)] {
        if tensor.shape()[0] < work.num_pages() {
            let expected = format!("[P, S, G, D] with P at least {}", work.num_pages());
            return Err(Error::Shape { tensor: name, expected, got: tensor.shape().to_vec() });
        }
    }
    if k.shape()[0] != v.shape()[0] {
        let expected = format!("[P, S, G, Dv] with k's P = {}", k.shape()[0]);
        return Err(Error::Shape { tensor: "v", expected, got: v.shape().to_vec() });
    }
    check_scales(kv_scales, geometry.kv_dtype == DType::E4m3, &[Some(k.shape()[0]), s, g], device)?;
    o.expect("o", "[T, H, Dv]", &[tokens, h, dv], q_dtype, device)?;
    apart("o", &o)?;
    if let Some(lse) = &lse {
        lse.expect("lse", "[T, H]", &[tokens, h], Some(DType::F32), device)?;
        apart("lse", lse)?;
    }
    let sinks = head_values("sinks", sinks, work.variant().sinks, h, device)?;
    let alibi_slopes = head_values("alibi_slopes", alibi_slopes, work.variant().alibi, h, device)?;
    let call = Call {
        work,
        geometry: *geometry,
        variant: *work.variant(),
        isa: Isa::current(),
        q,
        q_pe: None,
        k,
        v,
        sinks: None,
        alibi_slopes: None,
        o: Out::of(&mut o),
        lse: lse.map(|mut lse| Out::of(&mut lse)),
        extra: Extra { scales: kv_scales, ..Extra::default() },
    };
    dispatch::attend(stream, call, HeadValues { sinks, alibi_slopes }, workspace, workers)
}

fn check_scales(
    given: Option<[TensorRef<'_>; 2]>,
    wanted: bool,
    shape: &[Option<usize>],
    device: Device,
) -> Result<()> {
    let refuse =
        |why: &str, got: &str| Err(Error::Parameter { name: "kv_scales", why: why.into(), got: got.into() });
    match (given, wanted) {
        (None, false) => Ok(()),
        (None, true) => refuse("keys and values in fp8_e4m3 come with theirs, [P, S, G] f32 each", "none"),
        (Some(_), false) => refuse("kv_dtype is not fp8_e4m3: leave them out", "tensors"),
        (Some([k, v]), true) => {
            k.expect("k_scales", "[P, S, G]", shape, Some(DType::F32), device)?;
            v.expect("v_scales", "[P, S, G]", shape, Some(DType::F32), device)
        }
    }
}

fn head_values<'a>(
    name: &'static str,
    given: Option<TensorRef<'a>>,
    wanted: bool,
    heads: Option<usize>,
    device: Device,
) -> Result<Option<TensorRef<'a>>> {
    let refuse = |why: &str, got: &str| Err(Error::Parameter { name, why: why.into(), got: got.into() });
    match (given, wanted) {
        (None, false) => Ok(None),
        (None, true) => refuse("the variant was planned with them; give [H] f32", "none"),
        (Some(_), false) => refuse("the variant was planned without them; plan with them", "a tensor"),
        (Some(tensor), true) => {
            tensor.expect(name, "[H]", &[heads], Some(DType::F32), device)?;
            Ok(Some(tensor))
        }
    }
}
