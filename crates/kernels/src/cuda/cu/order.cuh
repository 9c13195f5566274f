// Scores as integers that order as they do, and the classes that a pick counts them in first.
#pragma once

#include "ptx.cuh"

// A class is an integer's leading bits.
constexpr u32 BELOW = 19, CLASSES = 1u << (32 - BELOW);

// 0 and -0 alike, NaN below all.
DEVICE u32 order_of(float x) {
    u32 bits = float_bits(x + 0.0f);
    u32 order = bits ^ (u32(i32(bits) >> 31) | 0x80000000u);
    return x != x ? 0 : order;
}
