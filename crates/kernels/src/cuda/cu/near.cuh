// Up to eight neighbours of a row's tree that lie in memory, joined by one warp for one query vector and some slices of its columns: the
// same joins in the same order as tree.cuh's, whose chunks of 32 nodes a short row does not need.
//
// Figures and columns of all nodes are asked for at once, and factors are found once for all slices.
#pragma once

#include "tree.cuh"

// Heights that the neighbours climb at most, and their number; columns of a slice, four a lane.
constexpr u32 NEAR_HEIGHTS = 3, NEAR = 1 << NEAR_HEIGHTS, SLICE = WARP_COLUMNS<0>;

// Slices of 128 columns that a warp takes of one query vector, of `all` slices of all vectors: one, where warps are enough.
DEVICE u32 slices_each(u32 all, u32 warps) { return all <= warps ? 1 : all <= 2 * warps ? 2 : 4; }

// The node above `count` neighbours, of which `first`, counted over the whole tree, and the last have an ancestor NEAR_HEIGHTS above in
// common: calls `figures(m, l)` with what it has one of, then `each(slice, acc)` for slices `slice`..`past` of `width` columns.
// `spot(i)` is where the i-th of the neighbours is. By all lanes of a warp.
template <class At, class Figures, class Each>
DEVICE void join_near(u32 first, u32 count, u32 slice, u32 past, u32 width, At spot, Figures figures, Each each) {
    const u32 last = first + count - 1, heights = first / 2 == last / 2 ? 1 : first / 4 == last / 4 ? 2 : 3;
    // NEAR columns of a lane are on their way at once: of so many nodes, of so many slices.
    const u32 nodes = 1u << heights, slices = NEAR >> heights, from = first & ~(nodes - 1);
    // Lane i has what node `from + i` has one of.
    const u32 own = from + lane();
    const bool mine = own >= first && own <= last;
    const Spot at = spot(mine ? own - first : 0);
    const float m = *at.m, l = *at.l;
    Floats acc[NEAR];
    auto ask = [&]() {
        UNROLL
        for (u32 e = 0; e < NEAR; e++) {
            // Nothing is asked under a condition, which would make each wait for the one before: something that is there instead.
            const u32 node = least(most(from + e % nodes, first), last) - first, s = slice + (e >> heights);
            const u32 column = s * SLICE + 4 * lane();
            acc[e] = floats_at(spot(node).acc + (s < past && column < width ? column : 0));
        }
    };
    ask();
    const Climb<NEAR_HEIGHTS> up = climb<NEAR_HEIGHTS>(mine ? m : -infinity(), mine ? l : 0.0f);
    figures(shfl_idx(up.m, 0), shfl_idx(up.l, 0));
    NO_UNROLL
    for (;;) {
        UNROLL
        for (u32 e = 0; e < NEAR; e++)
            if (up.empty >> e % nodes & 1) acc[e] = Floats{};
        UNROLL
        for (u32 k = 0; k < NEAR_HEIGHTS; k++) {
            if (k >= heights) continue;
            UNROLL
            for (u32 e = 0; e < NEAR; e += 2u << k) {
                const u32 of = e % nodes;
                acc[e] = meet(up, k, acc[e], of, acc[e + (1u << k)], of + (1u << k));
            }
        }
        UNROLL
        for (u32 e = 0; e < NEAR; e += 2) {
            const u32 s = slice + (e >> heights);
            if (e % nodes == 0 && s < past) each(s, acc[e]);
        }
        slice += slices;
        if (slice >= past) break;
        ask();
    }
}

// Four neighbouring results, of which `room` are there, each times `factor`; one store where they lie so.
template <class T>
DEVICE void put_four(T* to, const Floats& acc, float factor, u32 room) {
    struct alignas(4 * sizeof(T)) Four {
        T of[4];
    };
    // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
    const float values[4] = {acc.x * factor + 0.0f, acc.y * factor + 0.0f, acc.z * factor + 0.0f, acc.w * factor + 0.0f};
    if (room >= 4 && reinterpret_cast<u64>(to) % sizeof(Four) == 0) {
        Four four;
        UNROLL
        for (u32 i = 0; i < 4; i++) four.of[i] = from_float<T>(values[i]);
        *reinterpret_cast<Four*>(to) = four;
        return;
    }
    UNROLL
    for (u32 i = 0; i < 4; i++)
        if (i < room) to[i] = from_float<T>(values[i]);
}
