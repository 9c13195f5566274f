//! The parameters of kernels that walk a list, as `cu/list.cuh` has them.

use bytemuck::{Pod, Zeroable};

use crate::cpu::paged::Out;
use crate::cuda::tensor_map::TensorMap;
use crate::{DType, TensorRef};

/// A tensor whose innermost axis is contiguous.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct View {
    /// Its first element.
    pub(crate) at: u64,
    /// Elements between neighbours of its outer axes.
    pub(crate) stride: [i64; 3],
}

impl View {
    /// A tensor of up to four axes.
    pub(crate) fn of(tensor: &TensorRef<'_>) -> View {
        let mut stride = [0; 3];
        let outer = tensor.strides().len().saturating_sub(1).min(3);
        for (to, &from) in stride.iter_mut().zip(&tensor.strides()[..outer]) {
            *to = from as i64;
        }
        View { at: tensor.as_ptr() as u64, stride }
    }

    /// A tensor of three axes, of which none needs to be contiguous.
    pub(crate) fn strided(tensor: &TensorRef<'_>) -> View {
        let strides = tensor.strides();
        View { at: tensor.as_ptr() as u64, stride: [0, 1, 2].map(|axis| strides[axis] as i64) }
    }

    /// Whether every row of the tensor starts on 16 bytes. An axis of one entry is never stepped along.
    pub(crate) fn aligned(tensor: &TensorRef<'_>) -> bool {
        View::aligned_to(tensor, 16)
    }

    /// Whether every row of the tensor starts on a multiple of so many bytes.
    pub(crate) fn aligned_to(tensor: &TensorRef<'_>, bytes: usize) -> bool {
        let size = tensor.dtype().size();
        let outer = tensor.shape().len().saturating_sub(1);
        let steps = tensor.shape()[..outer].iter().zip(tensor.strides());
        (tensor.as_ptr() as usize).is_multiple_of(bytes)
            && steps
                .into_iter()
                .all(|(&extent, &stride)| extent <= 1 || (stride * size).is_multiple_of(bytes))
    }
}

/// Where a result goes; see [`Out`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Place {
    /// 0: it is not wanted.
    pub(crate) at: u64,
    pub(crate) token: i64,
    pub(crate) head: i64,
    pub(crate) plane_tokens: u64,
    pub(crate) plane_heads: u64,
    pub(crate) plane_batch: i64,
    pub(crate) plane_head: i64,
}

impl Place {
    pub(crate) fn of(out: &Out) -> Place {
        let planes = &out.planes;
        Place {
            at: out.ptr as u64,
            token: out.strides[0] as i64,
            head: out.strides[1] as i64,
            plane_tokens: planes.tokens as u64,
            plane_heads: planes.heads as u64,
            plane_batch: planes.strides[0] as i64,
            plane_head: planes.strides[1] as i64,
        }
    }
}

/// One layer over a list.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Attend {
    pub(crate) image: u64,
    pub(crate) partials: u64,
    pub(crate) q: View,
    pub(crate) q_pe: View,
    pub(crate) k: View,
    pub(crate) v: View,
    pub(crate) k_prefix: View,
    pub(crate) v_prefix: View,
    pub(crate) o: Place,
    pub(crate) lse: Place,
    pub(crate) max_scores: Place,
    pub(crate) sinks: u64,
    pub(crate) slopes: u64,
    pub(crate) window_left: i64,
    pub(crate) q_offset: i64,
    pub(crate) h: u32,
    pub(crate) g: u32,
    pub(crate) d: u32,
    pub(crate) dv: u32,
    pub(crate) s: u32,
    pub(crate) q_len: u32,
    pub(crate) kv_len: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) scale: f32,
    pub(crate) soft_cap: f32,
    pub(crate) flags: u32,
    pub(crate) walk: u32,
    /// Not 0: no merge is launched behind this; those that there are have no parts, and this launch writes what they stand for.
    pub(crate) empties: u32,
    /// Of the decode kernel: zeros, which it leaves as zeros; 0 where merges are launched behind it.
    pub(crate) tickets: u64,
    /// Of keys and values in e4m3, every axis with its stride.
    pub(crate) k_scales: View,
    pub(crate) v_scales: View,
}

/// [`Attend::flags`].
pub(crate) const CAUSAL: u32 = 1;
/// Over blocks, rows are of one query head each.
pub(crate) const PER_HEAD: u32 = 2;
/// Prefixes lie in pages.
pub(crate) const PREFIX_PAGES: u32 = 4;
/// Everything read starts on 16 bytes.
pub(crate) const ALIGNED: u32 = 8;
/// There is a map of the keys.
pub(crate) const MAPPED: u32 = 16;

/// One layer over a list, for a kernel that asks for boxes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct AttendMapped {
    pub(crate) attend: Attend,
    pub(crate) reserved: [u64; 5],
    /// Of the latents [P, S, C + E].
    pub(crate) map: TensorMap,
}

/// One layer over a list, for a kernel that asks for boxes of keys and values a head, and of queries.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct AttendBoxes {
    pub(crate) attend: Attend,
    /// A zero, which it leaves as one, by which blocks take turns; 0 where they take items in a fixed order.
    pub(crate) turns: u64,
    /// Slots of a page in a box; 0 where no box has pages.
    pub(crate) slots: u32,
    pub(crate) reserved: [u32; 7],
    pub(crate) maps: Maps,
}

/// What such a kernel is told of tensors.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub(crate) struct Maps {
    /// Of fresh keys [U, G, D], or of pages [P, S, G, D].
    pub(crate) keys: TensorMap,
    /// The same, Dv wide.
    pub(crate) values: TensorMap,
    /// [T, H, D].
    pub(crate) queries: TensorMap,
    /// Of prefixes, where there are some: packed [U, G, D], or pages [P, S, G, D].
    pub(crate) key_prefix: TensorMap,
    /// The same, Dv wide.
    pub(crate) value_prefix: TensorMap,
}

const _: () = {
    // `cu/latent_ring.cuh` and `cu/tile_ring.cuh` assert the same numbers, and `cu/list.cuh` those below.
    assert!(size_of::<AttendMapped>() == 704 && size_of::<AttendBoxes>() == 1216);
    assert!(size_of::<View>() == 32 && size_of::<Place>() == 56 && size_of::<Attend>() == 536);
};

/// Which items a launch walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Walk {
    /// All of them.
    All = 0,
    /// Those of few query vectors.
    Few = 1,
    /// Those of tiles.
    Many = 2,
}

/// A dtype as kernels' defines name it.
pub(crate) fn number(dtype: DType) -> i64 {
    match dtype {
        DType::Bf16 => 1,
        DType::F16 => 2,
        DType::E4m3 => 3,
        _ => 0,
    }
}
