//! Tensor maps: what a Hopper is told of a tensor, so that one instruction copies a box of it to shared memory.
//!
//! A box lands row after row, its innermost axis a row. With [`Swizzle::B128`] rows are 128 bytes and 16-byte piece `c` of row `r` lies at
//! `c ^ r % 8`, which is where `tile_desc` of `cu/hopper.cuh` looks for a product's operand. What lies beyond the tensor is zeros. A kernel
//! takes a map as a member of its one parameter, and names boxes by `box_2d` and `box_3d`.

use bytemuck::{Pod, Zeroable};

use super::Context;
use crate::{DType, Error, Result, TensorRef};

/// A map as a driver encodes it; nobody else reads it. The emulated device has an encoding of its own.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(crate) struct TensorMap(pub(super) [u64; 16]);

/// Most axes of a map.
pub(crate) const MOST_AXES: usize = 5;

/// How 16-byte pieces of a box's rows are permuted in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Swizzle {
    /// As they are in memory.
    #[allow(
        dead_code,
        reason = "a kind that a map may have; the emulated device knows it, and tests ask for it"
    )]
    None,
    /// Within every 8 rows of 128 bytes, as operands of products lie.
    B128,
}

/// What a map says, its axes from the innermost on: checked, so that what a driver refuses beyond it is a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Boxes {
    /// First element, on 16 bytes.
    pub(super) at: u64,
    pub(super) dtype: DType,
    pub(super) axes: usize,
    /// Elements along each axis.
    pub(super) extent: [u64; MOST_AXES],
    /// Bytes between neighbours along each axis but the innermost, whose elements follow each other.
    pub(super) stride: [u64; MOST_AXES],
    /// Elements of a box along each axis.
    pub(super) boxed: [u32; MOST_AXES],
    pub(super) swizzle: Swizzle,
}

impl Boxes {
    /// Boxes `boxed` of a tensor whose last axis is contiguous; `boxed` counts axes as the tensor does, the last one innermost.
    ///
    /// # Errors
    /// [`Error::Parameter`]: more than 5 axes, an empty one or one of more than 2^32 elements, an innermost one whose elements do not follow each other, a box of
    /// another number of axes, a base or stride that is no multiple of 16 bytes, a stride of 0, a
    /// stride of 2^40 bytes, a side of a box that is 0 or more than 256 elements, or rows of a box that are no multiple of 16 bytes or, where
    /// they are permuted, more than 128.
    pub(crate) fn of(tensor: &TensorRef<'_>, boxed: &[u32], swizzle: Swizzle) -> Result<Boxes> {
        let refuse =
            |why: &str, got: String| Err(Error::Parameter { name: "tensor map", why: why.into(), got });
        let (shape, strides) = (tensor.shape(), tensor.strides());
        let axes = shape.len();
        if !(1..=MOST_AXES).contains(&axes) || boxed.len() != axes {
            return refuse("a map has 1 to 5 axes, and a box as many", format!("{axes} and {}", boxed.len()));
        }
        let (dtype, size) = (tensor.dtype(), tensor.dtype().size() as u64);
        let mut made = Boxes {
            at: tensor.as_ptr() as u64,
            dtype,
            axes,
            extent: [1; MOST_AXES],
            stride: [0; MOST_AXES],
            boxed: [1; MOST_AXES],
            swizzle,
        };
        if !made.at.is_multiple_of(16) {
            return refuse("a mapped tensor starts on 16 bytes", format!("{:#x}", made.at));
        }
        if strides[axes - 1] != 1 && shape[axes - 1] > 1 {
            return refuse("the innermost axis is contiguous", format!("a stride of {}", strides[axes - 1]));
        }
        for (to, from) in (0..axes).rev().enumerate() {
            let (extent, side) = (shape[from] as u64, boxed[from]);
            if !(1..=1 << 32).contains(&extent) {
                return refuse("an axis has 1 to 2^32 elements", format!("{extent} along axis {from}"));
            }
            if !(1..=256).contains(&side) {
                return refuse(
                    "a box has 1 to 256 elements along an axis",
                    format!("{side} along axis {from}"),
                );
            }
            (made.extent[to], made.boxed[to]) = (extent, side);
            if to == 0 {
                continue;
            }
            // An axis of one element is never stepped along.
            let row = (made.extent[0] * size).next_multiple_of(16);
            let stride = if extent > 1 { strides[from] as u64 * size } else { row };
            if !stride.is_multiple_of(16) || stride >= 1 << 40 || stride == 0 {
                return refuse(
                    "strides are multiples of 16 bytes below 2^40",
                    format!("{stride} along axis {from}"),
                );
            }
            made.stride[to] = stride;
        }
        let row = u64::from(made.boxed[0]) * size;
        if !row.is_multiple_of(16) || swizzle == Swizzle::B128 && row > 128 {
            return refuse(
                "a box's rows are multiples of 16 bytes, at most 128 where permuted",
                format!("{row}"),
            );
        }
        Ok(made)
    }

    /// Bytes of a box, all of which a mark counts wherever the box lies.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.boxed.iter().map(|&side| side as usize).product::<usize>() * self.dtype.size()
    }

    /// The map of these boxes.
    ///
    /// # Errors
    /// [`Error::Cuda`]: what the driver refuses.
    pub(crate) fn map(&self, context: &Context) -> Result<TensorMap> {
        context.ask(|api, _| api.encode_map(self))
    }
}
