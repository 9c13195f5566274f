// The leaves of an item of the Hopper's kernels over latents for many heads: their states are joined in the block, as a merge would join
// them.
//
// There are no registers for a second state. A node of a row's tree that waits for its sibling lies in the workspace, where the item's
// leaves behind its first one would leave their states: each thread's columns as it has them, so that only the thread that wrote them
// reads them.
//
// Defines: those of latent_ring.cuh, with ROWS 64.
#pragma once

#include "latent_ring.cuh"
#include "latent_softmax.cuh"

// Columns of a group.
constexpr u32 HALF = WIDTH / 2;

// The tile behind the leaf that is summed, and the heights at which nodes wait: a stack, the lowest last.
struct Leaves {
    u32 border, waits;

    explicit Leaves(const Unit& unit) {
        border = (unit.lo / unit.row.leaf_keys + 1) * (unit.row.leaf_keys / KEYS), waits = 0;
    }
    // One past the last tile of the leaf, of a unit whose tiles end there.
    u32 stop(u32 end) const { return least(border, end); }
    // The node of the leaf that ends is joined with those left of it as far as their parents are complete, and waits; the item's last
    // leaf with all. `join` and `put` are called with the place of the node that waits.
    template <class Join, class Put>
    void rise(const Unit& unit, bool last, Join join, Put put) {
        const u32 tiles = unit.row.leaf_keys / KEYS, leaf = border / tiles - 1;
        u32 height = 0;
        NO_UNROLL
        for (; last ? waits >> height != 0 : leaf >> height & 1; height++) {
            if (!(waits >> height & 1)) continue;
            waits &= ~(1u << height);
            join(popcount(waits));
        }
        if (last) return;
        put(popcount(waits));
        waits |= 1u << height, border += tiles;
    }
};

// A node that waits, the `at`-th of them.
DEVICE Output waiting(const Attend& p, const Unit& unit, u32 at) {
    Output node = unit.output;
    node.state = p.partials + u64(unit.waits) * STATE_LINE + at * state_len(node.lanes, node.width);
    return node;
}
// This thread's sums of half of the columns, four at a time as products leave them, each group of threads' together.
constexpr u32 FOURS = HALF / 8;
DEVICE U4* fours_of(const Output& node, const Unit& unit, u32 half) {
    return reinterpret_cast<U4*>(node.acc(unit.first)) + half * FOURS * GROUP + thread_x() % GROUP;
}
// Half of a node begins to wait.
DEVICE void put_half(const Output& node, const Unit& unit, const float (&sums)[HALF / 2], u32 half) {
    U4* to = fours_of(node, unit, half);
    UNROLL
    for (u32 j = 0; j < FOURS; j++) {
        const float* of = &sums[4 * j];
        store16(to + j * GROUP, U4{float_bits(of[0]), float_bits(of[1]), float_bits(of[2]), float_bits(of[3])});
    }
}
// What waits, times `left` of this thread's rows, and what is right of it, times `right`.
DEVICE void join_half(const Output& node, const Unit& unit, float (&sums)[HALF / 2], u32 half, const float (&left)[2],
                      const float (&right)[2]) {
    // Loads that are on their way at once.
    constexpr u32 AHEAD = 8;
    const U4* from = fours_of(node, unit, half);
    UNROLL
    for (u32 begin = 0; begin < FOURS; begin += AHEAD) {
        U4 fours[AHEAD];
        UNROLL
        for (u32 i = 0; i < AHEAD; i++) fours[i] = load16_fresh(from + (begin + i) * GROUP);
        UNROLL
        for (u32 i = 0; i < AHEAD; i++) {
            float* of = &sums[4 * (begin + i)];
            const float other[4] = {bits_float(fours[i].x), bits_float(fours[i].y), bits_float(fours[i].z), bits_float(fours[i].w)};
            UNROLL
            for (u32 c = 0; c < 4; c++) of[c] = fused(other[c], left[c / 2], of[c] * right[c / 2]);
        }
    }
}

// What this thread's rows have one of, of a node that begins to wait.
DEVICE void put_figures(const Output& node, const Unit& unit, const float (&top)[2], const float (&sum)[2]) {
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 lane_of = unit.first + my_row() + 8 * r;
        if (lane() % 4 == 0 && lane_of < node.lanes) *node.m(lane_of) = top[r], *node.l(lane_of) = sum[r];
    }
}
// Those of the node that waits and of what is right of it become the join's, and say what the columns of both are multiplied by.
DEVICE void join_figures(const Output& node, const Unit& unit, float (&top)[2], float (&sum)[2], float (&left)[2], float (&right)[2]) {
    // One lane of a row's wrote them.
    warp_sync();
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 lane_of = unit.first + my_row() + 8 * r;
        left[r] = 0.0f, right[r] = 1.0f;
        if (lane_of >= node.lanes) continue;
        const float m = load_fresh(node.m(lane_of)), l = load_fresh(node.l(lane_of));
        // Empty states are identities; one whose sum is NaN is not empty.
        const bool none = m == -infinity() && l == l, all = top[r] == -infinity() && sum[r] == sum[r];
        const float both = most(m, top[r]), reference = both == -infinity() ? 0.0f : both;
        left[r] = none ? 0.0f : all ? 1.0f : ex2(m - reference);
        right[r] = all ? 0.0f : none ? 1.0f : ex2(top[r] - reference);
        if (all) top[r] = m, sum[r] = l;
        else if (!none) top[r] = both, sum[r] = fused(l, left[r], sum[r] * right[r]);
    }
}
