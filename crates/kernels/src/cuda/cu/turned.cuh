// Products turned round, so that few query vectors pad nothing, by a warpgroup: scores are keys [64 x depth] times queries, and the result's
// columns are values [64 of the width x keys] times weights. A tile in shared memory is the left operand of both. A thread has, of a
// product, rows (keys, or columns of the result) lane / 4 and 8 below it of its warp's 16, and query vectors 8 j + 2 (lane % 4) and the next.
//
// Defines: those of latent_unit.cuh.
#pragma once

#include "latent_unit.cuh"

constexpr u32 WARPS = 4;
// Query vectors that a thread has; floats that the warps tell each other of all.
constexpr u32 MINE = ROWS / 4, EXCHANGED = WARPS * ROWS;
// The named barrier of the group that makes weights.
constexpr u32 TOGETHER = 1;

// The query vector of a thread's c-th column.
DEVICE u32 my_column(u32 c) { return c / 2 * 8 + lane() % 4 * 2 + c % 2; }

// Joins what the rows of a product have of each query vector: over the lanes of a warp, then over warps, through EXCHANGED floats that
// nobody reads any more.
template <class Join>
DEVICE void join_rows(float (&of)[MINE], float* exchange, Join join) {
    UNROLL
    for (u32 c = 0; c < MINE; c++)
        UNROLL
        for (u32 by = 4; by < 32; by *= 2) of[c] = join(of[c], shfl_xor(of[c], by));
    if (lane() < 4)
        UNROLL
        for (u32 c = 0; c < MINE; c++) exchange[warp() % WARPS * ROWS + my_column(c)] = of[c];
    named_sync(TOGETHER, GROUP);
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const float* said = exchange + my_column(c);
        of[c] = join(join(said[0], said[ROWS]), join(said[2 * ROWS], said[3 * ROWS]));
    }
}
