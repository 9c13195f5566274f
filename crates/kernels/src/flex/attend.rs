//! The call: one layer's block-mask attention over a work list, into the caller's buffers.

use crate::cpu::Isa;
use crate::cpu::paged::{Call, Extra, Mods, Out, Planes};
use crate::cpu::tokens::apart;
use crate::dispatch::{self, HeadValues};
use crate::paged::{Stored, Variant};
use crate::work::WorkList;
use crate::{DType, Device, Error, Result, Stream, TensorMut, TensorRef};

use super::{MaskMod, ScoreMod};

/// What [`attend`] reads and writes. Letters are those of [`Geometry`](super::Geometry) and [`Blocks`](super::Blocks).
#[derive(Debug)]
pub struct AttendParams<'a> {
    /// What to do, made by [`schedule`](super::schedule).
    pub work: &'a WorkList,
    /// `[B, H, L, D]`, of the geometry's `q_dtype`; any outer strides.
    pub q: TensorRef<'a>,
    /// `[B, G, M, D]`, of the geometry's `kv_dtype`; any outer strides.
    pub k: TensorRef<'a>,
    /// `[B, G, M, Dv]`, as `k`.
    pub v: TensorRef<'a>,
    /// Factor of the dot product; finite.
    pub sm_scale: f32,
    /// Position of query 0 among the keys, for mods.
    pub q_offset: i64,
    /// What happens to scores, in this order.
    pub score_mods: &'a [ScoreMod<'a>],
    /// What is seen of blocks that are visible in part; at least one where there are such.
    pub mask_mods: &'a [MaskMod<'a>],
    /// `[B, H, L, Dv]`, of the geometry's `q_dtype`; any outer strides; every element is written.
    pub o: TensorMut<'a>,
    /// `[B, H, L]` f32, any strides: natural log-sum-exp, `-inf` where a query sees nothing.
    pub lse: Option<TensorMut<'a>>,
    /// `[B, H, L]` f32, any strides: each query's largest score after the mods, `-inf` where it sees nothing.
    pub max_scores: Option<TensorMut<'a>>,
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
/// A key that some query of a block of queries sees and another does not must be finite; blocks that no query sees, and
/// keys that masks hide from all queries of a block, may hold anything, NaN included.
///
/// # Errors
/// A list of another family; tensors of another shape, dtype, layout or device than the list was made for; a scale that
/// is not finite; mods whose tables have another size, or that have no CPU half; partial blocks without a mask mod; a
/// workspace that is too small; a device without a kernel.
pub fn attend(stream: &Stream, params: AttendParams<'_>) -> Result<()> {
    let AttendParams { work, q, k, v, mut o, lse, max_scores, workspace, workers, .. } = params;
    let device = crate::device::supported("block-mask attention", stream)?;
    if work.stored != Stored::Blocks {
        let why = "the list is not of block-mask attention; make it by flex::schedule".into();
        return Err(Error::Parameter { name: "work", why, got: format!("a list over {:?}", work.stored) });
    }
    let (geometry, list) = (work.geometry(), &work.blocks);
    let (b, h, g) = (Some(list.batch), Some(list.num_qo_heads), Some(list.num_kv_heads));
    let (l, m) = (Some(list.q_len), Some(list.kv_len));
    let (d, dv) = (Some(geometry.head_dim_qk), Some(geometry.head_dim_vo));
    let (q_dtype, kv_dtype) = (Some(geometry.q_dtype), Some(geometry.kv_dtype));
    q.expect("q", "[B, H, L, D]", &[b, h, l, d], q_dtype, device)?;
    k.expect("k", "[B, G, M, D]", &[b, g, m, d], kv_dtype, device)?;
    v.expect("v", "[B, G, M, Dv]", &[b, g, m, dv], kv_dtype, device)?;
    o.expect("o", "[B, H, L, Dv]", &[b, h, l, dv], q_dtype, device)?;
    apart("o", &o)?;
    for (name, tensor) in [("lse", &lse), ("max_scores", &max_scores)] {
        if let Some(tensor) = tensor {
            per_query(name, tensor, [list.batch, list.num_qo_heads, list.q_len], device)?;
        }
    }
    if !params.sm_scale.is_finite() {
        let (why, got) = ("must be finite".into(), params.sm_scale.to_string());
        return Err(Error::Parameter { name: "sm_scale", why, got });
    }
    check_scores(work, params.score_mods, device)?;
    check_masks(work, params.mask_mods, device)?;
    let mods = Mods { score: params.score_mods, mask: params.mask_mods, q_offset: params.q_offset };
    let call = Call {
        work,
        geometry: *geometry,
        variant: Variant { sm_scale: params.sm_scale, ..*work.variant() },
        isa: Isa::current(),
        q,
        q_pe: None,
        k,
        v,
        sinks: None,
        alibi_slopes: None,
        o: planes(work, &mut o),
        lse: lse.map(|mut lse| planes(work, &mut lse)),
        extra: Extra {
            max_scores: max_scores.map(|mut scores| planes(work, &mut scores)),
            mods: Some(mods),
            ..Extra::default()
        },
    };
    dispatch::attend(stream, call, HeadValues::default(), workspace, workers)
}

/// Has a list ready on the stream's device, with the mods that calls over it will have: belongs to planning. On the CPU there is
/// nothing to do. Calls with other mods are refused on a device until the list is staged with theirs.
///
/// # Errors
/// Mods that [`attend`] would refuse, or that have no CUDA half; a list that was not cut for a device; a kernel that cannot be
/// built; memory that cannot be had.
pub fn stage(
    stream: &Stream,
    work: &mut WorkList,
    score_mods: &[ScoreMod<'_>],
    mask_mods: &[MaskMod<'_>],
) -> Result<()> {
    let device = crate::device::supported("block-mask attention", stream)?;
    check_scores(work, score_mods, device)?;
    check_masks(work, mask_mods, device)?;
    #[cfg(feature = "cuda")]
    if device != Device::Cpu {
        return crate::cuda::exec::stage_blocks(work, stream, score_mods, mask_mods);
    }
    Ok(())
}

/// Refuses what is not `[B, H, L]` f32; no axis of it need be contiguous.
fn per_query(name: &'static str, tensor: &TensorMut<'_>, shape: [usize; 3], device: Device) -> Result<()> {
    if tensor.shape() != shape {
        let expected = format!("[B, H, L] = {shape:?}");
        return Err(Error::Shape { tensor: name, expected, got: tensor.shape().to_vec() });
    }
    if tensor.dtype() != DType::F32 {
        let expected = DType::F32.to_string();
        return Err(Error::DTypeMismatch { tensor: name, expected, got: tensor.dtype() });
    }
    if tensor.device() != device {
        return Err(Error::DeviceMismatch { tensor: name, expected: device, got: tensor.device() });
    }
    apart(name, tensor)
}

/// `[B, H, L, ..]` as the list's packed tokens see it.
fn planes(work: &WorkList, tensor: &mut TensorMut<'_>) -> Out {
    let [batch, head, token] = [0, 1, 2].map(|axis| tensor.strides()[axis]);
    let tokens = work.blocks.q_len.max(1);
    let mut out = Out::of(tensor);
    if work.blocks.per_head {
        out.strides = [token, 0];
        out.planes = Planes { tokens, heads: work.blocks.num_qo_heads, strides: [batch, head] };
    } else {
        out.strides = [token, head];
        out.planes = Planes { tokens, heads: 1, strides: [batch, 0] };
    }
    out
}

fn length(tensor: &'static str, letters: &str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape { tensor, expected: format!("{letters} = [{expected}]"), got: vec![got] })
}

fn no_cpu_half<T>(name: &'static str, of: &str) -> Result<T> {
    let why = "it has no CPU half; give UserMod::cpu".into();
    Err(Error::Parameter { name, why, got: of.into() })
}

fn check_scores(work: &WorkList, mods: &[ScoreMod<'_>], device: Device) -> Result<()> {
    let heads = work.blocks.num_qo_heads;
    for score in mods {
        match score {
            ScoreMod::None | ScoreMod::Causal => {}
            ScoreMod::Alibi { slopes } => {
                length("slopes", "[H]", slopes.len(), heads)?;
                if let Some(slope) = slopes.iter().find(|slope| !slope.is_finite()) {
                    let (why, got) = ("must be finite".into(), slope.to_string());
                    return Err(Error::Parameter { name: "slopes", why, got });
                }
            }
            ScoreMod::RelBias { table, window } => {
                let width = window.saturating_mul(2).saturating_add(1);
                length("table", "[H * (2 W + 1)]", table.len(), heads.saturating_mul(width))?;
            }
            ScoreMod::SoftCap(cap) => {
                if !(cap.is_finite() && *cap > 0.0) {
                    let why = "must be finite and above 0; leave it out for no cap".into();
                    return Err(Error::Parameter { name: "soft_cap", why, got: cap.to_string() });
                }
            }
            ScoreMod::User(user) if device == Device::Cpu && user.cpu.is_none() => {
                return no_cpu_half("score_mods", &user.name);
            }
            ScoreMod::User(_) => {}
        }
    }
    Ok(())
}

fn check_masks(work: &WorkList, mods: &[MaskMod<'_>], device: Device) -> Result<()> {
    let list = &work.blocks;
    if list.any_partial && mods.is_empty() {
        let why =
            "some blocks are visible in part: give the mods that say which keys of them are seen".into();
        return Err(Error::Parameter { name: "mask_mods", why, got: "none".into() });
    }
    for mask in mods {
        match mask {
            MaskMod::None | MaskMod::Causal | MaskMod::SlidingWindow { .. } => {}
            MaskMod::Document { q_ids, kv_ids } => {
                length("q_ids", "[L]", q_ids.len(), list.q_len)?;
                if kv_ids.len() < list.key_bound {
                    let expected = format!("at least [{}], the keys that blocks may be", list.key_bound);
                    return Err(Error::Shape { tensor: "kv_ids", expected, got: vec![kv_ids.len()] });
                }
            }
            MaskMod::User(user) if device == Device::Cpu && user.cpu.is_none() => {
                return no_cpu_half("mask_mods", &user.name);
            }
            MaskMod::User(_) => {}
        }
    }
    Ok(())
}
