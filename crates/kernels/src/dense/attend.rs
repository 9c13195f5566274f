//! The call: one layer's dense attention over a work list, into the caller's buffers.

use crate::cpu::Isa;
use crate::cpu::paged::{Call, Extra, Out};
use crate::cpu::tokens::apart;
use crate::dispatch::{self, HeadValues};
use crate::paged::Stored;
use crate::work::WorkList;
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

/// What [`attend`] reads and writes. `T` query tokens, `U` packed keys, `P` pages of `S` slots; other letters are the
/// [`Geometry`](super::Geometry)'s.
#[derive(Debug)]
pub struct AttendParams<'a> {
    /// What to do, made by [`schedule`](super::schedule); carries geometry and variant.
    pub work: &'a WorkList,
    /// `[T, H, D]`, of the geometry's `q_dtype`; any outer strides.
    pub q: TensorRef<'a>,
    /// Keys of the prefixes, of the geometry's `kv_dtype`, any outer strides: `[U, G, D]` when the table's prefixes are packed,
    /// `[P, S, G, D]` when they lie in pages. Given when the table has prefixes, and not when it is of none.
    pub k_prefix: Option<TensorRef<'a>>,
    /// As `k_prefix`, `Dv` wide.
    pub v_prefix: Option<TensorRef<'a>>,
    /// `[U, G, D]`: fresh keys, of the geometry's `kv_dtype`; any outer strides. `U` is at least the table's.
    pub k: TensorRef<'a>,
    /// `[U, G, Dv]`, as `k`.
    pub v: TensorRef<'a>,
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
/// A key that some query of a row sees and another does not must be finite; a key that no query of the row sees may
/// hold anything, NaN included.
///
/// # Errors
/// A list of another family; tensors of another shape, dtype, layout or device than the list was made for; a prefix
/// missing or not asked for; a workspace that is too small; a device without a kernel.
pub fn attend(stream: &Stream, params: AttendParams<'_>) -> Result<()> {
    let AttendParams { work, q, k_prefix, v_prefix, k, v, mut o, lse, workspace, workers } = params;
    let device = crate::device::supported("dense attention", stream)?;
    if work.stored != Stored::Segments {
        let why = "the list is not of dense attention; make it by dense::schedule".into();
        return Err(Error::Parameter { name: "work", why, got: format!("a list over {:?}", work.stored) });
    }
    let geometry = work.geometry();
    let (tokens, h) = (Some(work.num_tokens()), Some(geometry.num_qo_heads));
    let (g, d, dv) = (Some(geometry.num_kv_heads), Some(geometry.head_dim_qk), Some(geometry.head_dim_vo));
    let (q_dtype, kv_dtype) = (Some(geometry.q_dtype), Some(geometry.kv_dtype));
    q.expect("q", "[T, H, D]", &[tokens, h, d], q_dtype, device)?;
    k.expect("k", "[U, G, D]", &[None, g, d], kv_dtype, device)?;
    v.expect("v", "[U, G, Dv]", &[None, g, dv], kv_dtype, device)?;
    at_least("k", &k, work.segments.fresh)?;
    at_least("v", &v, work.segments.fresh)?;
    let prefix = prefix(work, k_prefix, v_prefix, device)?;
    o.expect("o", "[T, H, Dv]", &[tokens, h, dv], q_dtype, device)?;
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
        q,
        q_pe: None,
        k,
        v,
        sinks: None,
        alibi_slopes: None,
        o: Out::of(&mut o),
        lse: lse.map(|mut lse| Out::of(&mut lse)),
        extra: Extra { prefix, ..Extra::default() },
    };
    dispatch::attend(stream, call, HeadValues::default(), workspace, workers)
}

/// Refuses a tensor with fewer entries along its first axis.
fn at_least(name: &'static str, tensor: &TensorRef<'_>, entries: usize) -> Result<()> {
    if tensor.shape()[0] >= entries {
        return Ok(());
    }
    let expected = format!("at least {entries} along the first axis");
    Err(Error::Shape { tensor: name, expected, got: tensor.shape().to_vec() })
}

/// The prefixes' keys and values, checked against the list.
fn prefix<'a>(
    work: &WorkList,
    k: Option<TensorRef<'a>>,
    v: Option<TensorRef<'a>>,
    device: Device,
) -> Result<Option<[TensorRef<'a>; 2]>> {
    let geometry = work.geometry();
    let (g, s) = (Some(geometry.num_kv_heads), Some(geometry.page_size));
    let paged = work.segments.paged;
    let wanted = paged || work.segments.packed > 0;
    let refuse = |why: &str, got: &str| {
        Err(Error::Parameter { name: "k_prefix, v_prefix", why: why.into(), got: got.into() })
    };
    let (k, v) = match (k, v) {
        (None, None) if wanted => {
            return refuse("the table has prefixes: give both", "none");
        }
        (None, None) => return Ok(None),
        (Some(k), Some(v)) if work.segments.prefixed => (k, v),
        (Some(_), Some(_)) => return refuse("the table has no prefixes: leave them out", "both"),
        _ => return refuse("give both or none", "one"),
    };
    let widths = [geometry.head_dim_qk, geometry.head_dim_vo];
    for (name, tensor, width) in [("k_prefix", &k, widths[0]), ("v_prefix", &v, widths[1])] {
        let dtype = Some(geometry.kv_dtype);
        if paged {
            tensor.expect(name, "[P, S, G, D]", &[None, s, g, Some(width)], dtype, device)?;
            at_least(name, tensor, work.num_pages())?;
        } else {
            tensor.expect(name, "[U, G, D]", &[None, g, Some(width)], dtype, device)?;
            at_least(name, tensor, work.segments.packed)?;
        }
    }
    Ok(Some([k, v]))
}
