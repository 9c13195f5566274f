//! Tensor maps and the boxes that kernels ask for by them (`tensor_map.rs`, `cu/hopper.cuh`).

use bytemuck::{Pod, Zeroable};

use super::products::is_hopper;
use super::*;
use crate::TensorRef;
use crate::cuda::jit::{self, Key, Unit};
use crate::cuda::tensor_map::{Boxes, Swizzle, TensorMap};

/// Boxes at four corners land one after the other, two a mark; the bytes of shared memory that they are then in go out as they are.
const UNIT: Unit = Unit::of(
    "boxes.cu",
    r#"
#include "hopper.cuh"
struct Params { u64 out; i32 corner[4][3]; u32 axes, bytes; TensorMap map; };
MSTAR_KERNEL(boxes, Params, 64, 1) {
    SHARED(memory);
    Mark* marks = reinterpret_cast<Mark*>(memory + 4 * p.bytes);
    if (thread_x() == 0) {
        prefetch_map(p.map);
        mark_init(marks, 1);
        mark_init(marks + 1, 2);
        marks_ready();
    }
    block_sync();
    // The second warp asks, so that it is seen that any may.
    if (warp() == 1 && elected()) {
        for (u32 i = 0; i < 4; i++) {
            Mark* mark = marks + i / 2;
            if (i == 0) mark_arrive_expecting(mark, 2 * p.bytes);
            if (i >= 2) mark_arrive_expecting(mark, p.bytes);
            const i32* at = p.corner[i];
            if (p.axes == 2) box_2d(memory + i * p.bytes, p.map, at[0], at[1], mark);
            else box_3d(memory + i * p.bytes, p.map, at[0], at[1], at[2], mark);
        }
    }
    mark_wait(marks, 0);
    mark_wait(marks + 1, 0);
    for (u32 i = thread_x(); i < 4 * p.bytes / 16; i += 64)
        store16(reinterpret_cast<u8*>(p.out) + 16 * i, load16(memory + 16 * i));
}
"#,
);

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    out: u64,
    corner: [[i32; 3]; 4],
    axes: u32,
    bytes: u32,
    map: TensorMap,
}

/// The tensor's elements, all different and none of them 0: their index and one.
fn numbers(count: usize) -> Vec<u16> {
    (1..=count as u16).collect()
}

/// A tensor of `shape` whose outer axes are `strides` apart, on the device, and four boxes of it at `corners` (innermost first).
fn check(shape: &[usize], strides: &[usize], boxed: &[u32], swizzle: Swizzle, corners: [[i32; 3]; 4]) {
    let (context, owned) = (context().unwrap(), OwnedStream::new(DEVICE).unwrap());
    let stream = owned.stream();
    let count: usize =
        1 + shape.iter().zip(strides).map(|(&extent, &stride)| (extent - 1) * stride).sum::<usize>();
    let host = numbers(count);
    let mut memory = Buffer::zeroed_on(DEVICE, 2 * count + 16).unwrap();
    let bytes: &[u8] = bytemuck::cast_slice(&host);
    let to = memory.tensor_mut(0, DType::U8, &[bytes.len()]).unwrap();
    copy(&stream, TensorRef::from_slice(bytes, &[bytes.len()]).unwrap(), to).unwrap();
    // SAFETY: the tensor's last element is the buffer's `count`-th, and nobody writes it.
    let tensor =
        unsafe { TensorRef::from_raw_parts(memory.as_ptr(), DEVICE, DType::Bf16, shape, strides) }.unwrap();
    let boxes = Boxes::of(&tensor, boxed, swizzle).unwrap();
    let axes = shape.len();
    let out = Buffer::zeroed_on(DEVICE, 4 * boxes.bytes()).unwrap();
    let map = boxes.map(context).unwrap();
    let params = Params {
        out: out.as_ptr() as u64,
        corner: corners,
        axes: axes as u32,
        bytes: boxes.bytes() as u32,
        map,
    };
    let function = jit::function(DEVICE, &Key::new(UNIT, "boxes")).unwrap();
    let how = Launch { grid: [1, 1, 1], block: 64, shared: 48 << 10 };
    // SAFETY: the kernel's one parameter; its addresses are of buffers that live until the copy below has waited.
    unsafe { launch(&function, &stream, how, &params) }.unwrap();
    let mut got = vec![0u8; 4 * boxes.bytes()];
    let from = out.tensor(0, DType::U8, &[got.len()]).unwrap();
    let length = [got.len()];
    copy(&stream, from, crate::TensorMut::from_slice(&mut got[..], &length).unwrap()).unwrap();
    let got: &[u16] = bytemuck::cast_slice(&got);
    let row = *boxed.last().unwrap() as usize;
    let rows = boxes.bytes() / 2 / row;
    for (b, corner) in corners.iter().enumerate() {
        for (r, x) in (0..rows).flat_map(|r| (0..row).map(move |x| (r, x))) {
            // Where the element lies in the tensor, axes from the innermost on.
            let mut at = vec![i64::from(corner[0]) + x as i64];
            let mut left = r;
            for axis in 1..axes {
                let side = boxed[axes - 1 - axis] as usize;
                at.push(i64::from(corner[axis]) + (left % side) as i64);
                left /= side;
            }
            let outer = shape.iter().rev().zip(&at).all(|(&extent, &at)| (0..extent as i64).contains(&at));
            let index =
                || strides.iter().rev().zip(&at).map(|(&stride, &at)| stride * at as usize).sum::<usize>();
            let expected = if outer { host[index()] } else { 0 };
            let piece = x / 8;
            let place = match swizzle {
                Swizzle::None => r * row + x,
                Swizzle::B128 => r * 64 + (piece ^ (r % 8)) * 8 + x % 8,
            };
            assert_eq!(got[b * rows * row + place], expected, "box {b} at {corner:?}: row {r}, element {x}");
        }
    }
}

#[test]
fn boxes_land_as_operands_of_products_lie_and_zeros_beyond_the_tensor() {
    if !is_hopper("boxes_land") {
        return;
    }
    // Corners are multiples of 8 along a row, as a card demands. Slots are further apart than they are wide, pages than their slots, and neither in order of their strides.
    let corners = [[0, 0, 0], [64, 8, 2], [-8, 3, 1], [32, -4, 3]];
    check(&[4, 16, 88], &[16 * 96 + 8, 96, 1], &[1, 16, 64], Swizzle::B128, corners);
    check(&[4, 16, 72], &[80, 4 * 80, 1], &[2, 8, 64], Swizzle::B128, corners);
    check(&[24, 72], &[72, 1], &[16, 64], Swizzle::B128, [[0, 0, 0], [8, 9, 0], [64, 23, 0], [200, 2, 0]]);
    check(&[24, 72], &[72, 1], &[8, 24], Swizzle::None, [[0, 0, 0], [8, 9, 0], [64, 23, 0], [-16, -4, 0]]);
}

#[test]
fn maps_are_refused_what_a_driver_would_not_take() {
    let memory = vec![half::bf16::ZERO; 4096];
    let base = (memory.as_ptr() as usize).wrapping_neg() % 16 / 2;
    let tensor = |offset: usize, shape: &[usize], strides: &[usize]| {
        TensorRef::from_slice_strided(&memory[offset..], shape, strides).unwrap()
    };
    let why = |tensor: &TensorRef<'_>, boxed: &[u32], swizzle| {
        Boxes::of(tensor, boxed, swizzle).map(|boxes| boxes.bytes()).map_err(|error| error.to_string())
    };
    let good = tensor(base, &[16, 64], &[72, 1]);
    assert_eq!(why(&good, &[8, 64], Swizzle::B128), Ok(1024));
    // An axis of one element has whatever stride.
    assert_eq!(why(&tensor(base, &[1, 64], &[3, 1]), &[8, 64], Swizzle::B128), Ok(1024));
    for (tensor, boxed, swizzle, named) in [
        (tensor(base + 1, &[16, 64], &[72, 1]), &[8, 64][..], Swizzle::B128, "16 bytes"),
        (tensor(base, &[16, 64], &[68, 1]), &[8, 64], Swizzle::B128, "strides"),
        (tensor(base, &[16, 64], &[72, 2]), &[8, 64], Swizzle::B128, "contiguous"),
        (tensor(base, &[16, 0], &[72, 1]), &[8, 64], Swizzle::B128, "an axis"),
        (good, &[0, 64], Swizzle::B128, "1 to 256"),
        (good, &[257, 64], Swizzle::B128, "1 to 256"),
        (good, &[8, 72], Swizzle::B128, "at most 128"),
        (good, &[8, 4], Swizzle::None, "multiples of 16"),
        (good, &[64], Swizzle::None, "axes"),
    ] {
        let told = why(&tensor, boxed, swizzle).unwrap_err();
        assert!(told.contains("tensor map") && told.contains(named), "{told}, which says nothing of {named}");
    }
}
