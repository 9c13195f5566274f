//! Partial results joined on a device; `lse` checks them and calls this.

use bytemuck::{Pod, Zeroable};

use crate::cpu::merge::Rows;
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::{Context, Launch, launch};
use crate::{DType, Error, Result, Stream};

/// Most partial results that one call joins.
pub(crate) const MOST: usize = 60;
const WARPS: usize = 8;

/// As in `cu/join.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
struct Partial {
    o: u64,
    lse: u64,
    o_token: i64,
    o_head: i64,
    lse_token: i64,
    lse_head: i64,
    dtype: u32,
    reserved: u32,
}

/// As in `cu/join.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Join {
    out: Partial,
    parts: u32,
    tokens: u32,
    heads: u32,
    width: u32,
    part: [[Partial; 10]; MOST / 10],
}

const _: () = assert!(size_of::<Partial>() == 56 && size_of::<Join>() == 72 + 56 * MOST);

fn number(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

impl Partial {
    fn of((o, lse): &(Rows, Rows)) -> Partial {
        Partial {
            o: o.ptr as u64,
            lse: lse.ptr as u64,
            o_token: o.strides[0] as i64,
            o_head: o.strides[1] as i64,
            lse_token: lse.strides[0] as i64,
            lse_head: lse.strides[1] as i64,
            dtype: number(o.dtype),
            reserved: 0,
        }
    }
}

/// Joins `inputs` into `out`, `(o, lse)` each, of `shape` `[T, H, W]`. The caller checked that all are on the stream's device and
/// that nothing but the first input overlaps `out`.
///
/// # Errors
/// More than [`MOST`] inputs; a kernel that cannot be built; what a launch is refused with.
pub(crate) fn join(
    stream: &Stream,
    inputs: &[(Rows, Rows)],
    out: &(Rows, Rows),
    shape: [usize; 3],
) -> Result<()> {
    if inputs.len() > MOST {
        let why = format!("a device joins at most {MOST} at once; join some of them first");
        return Err(Error::Parameter { name: "parts", why, got: inputs.len().to_string() });
    }
    let [tokens, heads, width] = shape;
    if tokens * heads == 0 {
        return Ok(());
    }
    let mut params = Join {
        out: Partial::of(out),
        parts: inputs.len() as u32,
        tokens: tokens as u32,
        heads: heads as u32,
        width: width as u32,
        part: Zeroable::zeroed(),
    };
    for (to, input) in params.part.as_flattened_mut().iter_mut().zip(inputs) {
        *to = Partial::of(input);
    }
    let device = stream.device();
    let function =
        jit::function(device, &Key::new(Unit::JOIN, "join").with("OUT_TYPE", number(out.0.dtype).into()))?;
    let most = 8 * Context::of(device)?.sm_count() as usize;
    let blocks = (tokens * heads).div_ceil(WARPS).clamp(1, most) as u32;
    let how = Launch { grid: [blocks, 1, 1], block: WARPS as u32 * 32, shared: 0 };
    // SAFETY: every row has `width` floats of its dtype on this device, checked by the caller; rows of `out` are apart.
    unsafe { launch(&function, stream, how, &params) }
}
