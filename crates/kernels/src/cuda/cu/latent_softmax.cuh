// Softmax of a warpgroup that has 64 query vectors' scores of a tile: this thread has two rows, columns 2 t and the next of each eight,
// t = lane % 4.
#pragma once

#include "latent_unit.cuh"

// This thread's rows of a product: the first, and the one 8 below it.
DEVICE u32 my_row() { return warp() % 4 * 16 + lane() / 4; }

struct alignas(8) Two {
    float x, y;
};

// What scores of a tile, times `step` base-2 logits, stand against: `top` of this thread's rows grows, and what was summed before shrinks
// by `alpha`.
DEVICE void stand(const float (&scores)[KEYS / 2], float step, float (&top)[2], float (&alpha)[2], float (&reference)[2]) {
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        // A NaN is passed over here, and makes the sum NaN.
        float most_now = -infinity();
        UNROLL
        for (u32 j = 0; j < KEYS / 8; j++)
            most_now = larger(most_now, larger(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
        most_now = larger(most_now, shfl_xor(most_now, 1));
        most_now = larger(most_now, shfl_xor(most_now, 2));
        most_now = larger(top[r], most_now * step);
        reference[r] = most_now == -infinity() ? 0.0f : most_now;
        alpha[r] = top[r] == -infinity() ? 1.0f : ex2(top[r] - most_now);
        top[r] = most_now;
    }
}
// Scores of 16 keys, from the 16 k-th on, become weights, which are added up in `now`, even and odd columns of a row each.
DEVICE void weigh_some(float (&scores)[KEYS / 2], u32 k, float step, const float (&reference)[2], float (&now)[2][2]) {
    UNROLL
    for (u32 j = 2 * k; j < 2 * k + 2; j++)
        UNROLL
        for (u32 i = 0; i < 4; i++) {
            float& s = scores[4 * j + i];
            s = ex2(fused(s, step, -reference[i / 2]));
            now[i / 2][i % 2] += s;
        }
}
// `sum` is of this thread's rows, of its columns alone (`add_up`).
DEVICE void add_weights(float (&sum)[2], const float (&alpha)[2], const float (&now)[2][2]) {
    UNROLL
    for (u32 r = 0; r < 2; r++) sum[r] = sum[r] * alpha[r] + (now[r][0] + now[r][1]);
}
// All of it at once.
DEVICE void weigh(float (&scores)[KEYS / 2], float step, float (&top)[2], float (&sum)[2], float (&alpha)[2]) {
    float reference[2], now[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    stand(scores, step, top, alpha, reference);
    UNROLL
    for (u32 k = 0; k < KEYS / 16; k++) weigh_some(scores, k, step, reference, now);
    add_weights(sum, alpha, now);
}
// The sums of this thread's rows, of all columns.
DEVICE void add_up(float (&sum)[2]) {
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        sum[r] += shfl_xor(sum[r], 1);
        sum[r] += shfl_xor(sum[r], 2);
    }
}
// The end of a unit's rows: results are to be times `factor`; of an unfinished state, what its sums stand against is written.
DEVICE void conclude(const Attend& p, const Unit& unit, const float (&top)[2], const float (&sum)[2], float (&factor)[2]) {
    const u32 t = lane() % 4, row = my_row();
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 lane_of = unit.first + row + 8 * r;
        factor[r] = 1.0f;
        if (lane_of >= unit.output.lanes) continue;
        if (unit.output.direct()) {
            factor[r] = finish(p, unit.output, lane_of, top[r], sum[r], t == 0);
        } else if (t == 0) {
            *unit.output.m(lane_of) = top[r], *unit.output.l(lane_of) = sum[r];
        }
    }
}
