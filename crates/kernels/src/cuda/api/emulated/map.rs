//! A tensor map as the emulated device encodes it: `emulator/emulated_hopper.hpp` reads the same words.

use crate::cuda::tensor_map::{Boxes, Swizzle, TensorMap};

/// What the first word starts with, so that other bytes are told from a map.
const MARKED: u64 = 0x4d61_7073;

pub(super) fn encode(boxes: &Boxes) -> TensorMap {
    let mut words = [0; 16];
    let swizzle = u64::from(boxes.swizzle == Swizzle::B128);
    words[0] = MARKED | (boxes.dtype.size() as u64) << 32 | (boxes.axes as u64) << 40 | swizzle << 48;
    words[1] = boxes.at;
    words[2..7].copy_from_slice(&boxes.extent);
    words[7..11].copy_from_slice(&boxes.stride[1..]);
    for (axis, &side) in boxes.boxed.iter().enumerate() {
        words[11 + axis / 2] |= u64::from(side) << (32 * (axis % 2));
    }
    TensorMap(words)
}
