// What the kernels of index scores are given.
#pragma once

#include "table.cuh"

struct Scores {
    const Table* table;
    const u8* q;           // [T, Hi, Di]: first element
    const float* weights;  // [T, Hi]
    const u8* keys;        // [P, S, W]
    float* to;             // [rows, to_stride]: row `to_row` first
    i64 q_token, q_head, weight_token;  // elements
    i64 key_page, key_slot;             // bytes
    i64 to_stride;
    u32 heads, width, S;   // Hi, Di, slots a page
    u32 row_begin, row_end, to_row;
    u32 to_width;          // keys that a row has room for, -inf past those that it sees; 0: leave the rest as it is
    u32 chunk;             // keys that a block takes at once
    u32* states;           // what the pick of these rows counts in, which is to be zeros; 16-byte aligned
    u64 state_words;       // a multiple of 4
    u64 table_bytes;       // that the table has room for
};
static_assert(sizeof(Scores) == 144, "as in exec/select.rs");

// Zeros for the kernels behind this one.
DEVICE void clear_states(const Scores& p) {
    const u64 step = u64(grid_x()) * threads();
    for (u64 four = u64(block_x()) * threads() + thread_x(); four < p.state_words / 4; four += step)
        store16(p.states + four * 4, U4{0, 0, 0, 0});
}

// The larger of x and 0; NaN stays NaN.
DEVICE float relu(float x) { return x <= 0.0f ? 0.0f : x; }

// The e4m3 number of the lowest byte; NaN stays NaN.
DEVICE float e4m3(u32 code) {
    u32 magnitude = code & 0x7f;
    // Exponent and mantissa where an f32 has them, 120 powers of two too low.
    float v = bits_float(magnitude << 20) * 1.329227995784916e36f;
    u32 bits = magnitude == 0x7f ? 0x7fc00000u : float_bits(v);
    return bits_float(bits | (code & 0x80) << 24);
}
