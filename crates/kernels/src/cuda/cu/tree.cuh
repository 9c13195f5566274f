// Nodes of a row's tree that lie in memory, joined by one warp for one query vector and some columns of its value, four a lane: all
// lanes for 128 columns, or, where there are fewer query vectors than a device has warps, eight lanes each for 32.
//
// The nodes are neighbours of one height: `first`..`first + count`, counted over the whole tree. A pair of siblings is joined as
// soon as both are there, and what has no sibling goes up as it is: the order of the additions follows from the indices alone.
//
// Thirty-two nodes that have an ancestor of their own are a chunk. First its lanes climb, a node each, with what a query vector has
// one of: so all factors are known, and columns are sums of products without a branch.
#pragma once

#include "node.cuh"

// Heights of a chunk; nodes whose columns a lane has at once; heights above chunks.
constexpr u32 CLIMBED = 5, CHUNK = 1 << CLIMBED, RUN = 8, ABOVE = 24;

// A warp joins 1 << ACROSS runs of a chunk at a time, and has as many lanes for each; columns of the value, four a lane.
template <u32 ACROSS>
constexpr u32 NODE_LANES = 32 >> ACROSS;
template <u32 ACROSS>
constexpr u32 WARP_COLUMNS = 4 * NODE_LANES<ACROSS>;
// The first of this lane's four columns, and which of the runs that are joined at a time it works for.
template <u32 ACROSS>
DEVICE u32 lane_column() {
    return lane() % NODE_LANES<ACROSS> * 4;
}
template <u32 ACROSS>
DEVICE u32 lane_run() {
    return lane() / NODE_LANES<ACROSS>;
}

// Where a node's figures are, and this lane's columns of it.
struct Spot {
    const float *m, *l, *acc;
};

// Nodes seen by lanes: lane i has what node i's ancestors are multiplied by on their way, and what its ancestor at the last height is.
template <u32 HEIGHTS>
struct Climb {
    float by[HEIGHTS], m, l;
    u32 empty;  // a bit a node: it changes nothing, whatever its columns hold
};
template <u32 HEIGHTS>
DEVICE Climb<HEIGHTS> climb(float m, float l) {
    Climb<HEIGHTS> up;
    // A node whose sum is NaN is not empty.
    up.empty = ballot(m == -infinity() && l == l);
    UNROLL
    for (u32 k = 0; k < HEIGHTS; k++) {
        const u32 bit = 1u << k;
        const bool right = lane() & bit;
        const float m_other = shfl_xor(m, bit), l_other = shfl_xor(l, bit);
        const float top = right ? most(m_other, m) : most(m, m_other), reference = top == -infinity() ? 0.0f : top;
        up.by[k] = ex2(m - reference);
        const float by_other = shfl_xor(up.by[k], bit);
        l = right ? both(l_other, by_other, l, up.by[k]) : both(l, up.by[k], l_other, by_other);
        m = top;
    }
    up.m = m, up.l = l;
    return up;
}

DEVICE Floats both(const Floats& a, float fa, const Floats& b, float fb) {
    return Floats{both(a.x, fa, b.x, fb), both(a.y, fa, b.y, fb), both(a.z, fa, b.z, fb), both(a.w, fa, b.w, fb)};
}
// Joins two neighbours of height `k`, of which the nodes `a` and `b` of the chunk are the first ones.
template <u32 HEIGHTS>
DEVICE Floats meet(const Climb<HEIGHTS>& up, u32 k, const Floats& left, u32 a, const Floats& right, u32 b) {
    return both(left, shfl_idx(up.by[k], a), right, shfl_idx(up.by[k], b));
}

// The columns of N nodes of a chunk, a power of two, from `from` on, a multiple of it.
template <u32 N>
struct Run {
    Floats acc[N];

    // `columns(i)` is where node i's are, of begin..end.
    template <class Columns>
    void ask(u32 from, u32 begin, u32 end, Columns columns) {
        // Nothing is asked under a condition, which would make each wait for the one before: a neighbour is asked again instead.
        UNROLL
        for (u32 i = 0; i < N; i++) acc[i] = floats_at(columns(least(most(from + i, begin), end - 1)));
    }
    Floats joined(const Climb<CLIMBED>& up, u32 from) {
        UNROLL
        for (u32 i = 0; i < N; i++)
            if (up.empty >> (from + i) & 1) acc[i] = Floats{};
        UNROLL
        for (u32 k = 0; 1u << k < N; k++)
            UNROLL
            for (u32 i = 0; i < N; i += 2u << k) acc[i] = meet(up, k, acc[i], from + i, acc[i + (1u << k)], from + i + (1u << k));
        return acc[0];
    }
};
template <u32 N, class Columns>
DEVICE Floats run_of(const Climb<CLIMBED>& up, u32 from, u32 begin, u32 end, Columns columns) {
    Run<N> run;
    run.ask(from, begin, end, columns);
    return run.joined(up, from);
}

// A chunk's root: of its nodes, begin..end are there. `spot(i)` is where node i is.
template <u32 ACROSS, class At>
DEVICE Node join_chunk(u32 begin, u32 end, At spot) {
    const bool mine = lane() >= begin && lane() < end;
    const Spot at = spot(mine ? lane() : begin);
    const float m = *at.m, l = *at.l;
    auto columns = [&](u32 i) { return spot(i).acc; };
    Run<RUN> own;
    if (ACROSS == 2) own.ask(lane_run<ACROSS>() * RUN, begin, end, columns);
    const Climb<CLIMBED> up = climb<CLIMBED>(mine ? m : -infinity(), mine ? l : 0.0f);
    Floats acc{};
    if (ACROSS == 2) {
        acc = own.joined(up, lane_run<ACROSS>() * RUN);
        UNROLL
        for (u32 k = 3; k < CLIMBED; k++) {
            const u32 across = 1u << k;
            const Floats other{shfl_xor(acc.x, across), shfl_xor(acc.y, across), shfl_xor(acc.z, across), shfl_xor(acc.w, across)};
            const bool right = lane() & across;
            const u32 left_run = lane_run<ACROSS>() & ~((1u << (k - 2)) - 1), a = left_run * RUN, b = a + (1u << k);
            acc = meet(up, k, right ? other : acc, a, right ? acc : other, b);
        }
    } else if (begin / 2 == (end - 1) / 2) {
        acc = run_of<2>(up, begin & ~1u, begin, end, columns);
    } else if (begin / 4 == (end - 1) / 4) {
        acc = run_of<4>(up, begin & ~3u, begin, end, columns);
    } else {
        Floats eight{}, sixteen{};
        NO_UNROLL
        for (u32 run = 0; run < CHUNK / RUN; run++) {
            acc = Floats{};
            if (run >= begin / RUN && run <= (end - 1) / RUN) acc = run_of<RUN>(up, run * RUN, begin, end, columns);
            if (run % 2 == 0) {
                eight = acc;
                continue;
            }
            acc = meet(up, 3, eight, (run - 1) * RUN, acc, run * RUN);
            if (run == 1) sixteen = acc;
            else acc = meet(up, 4, sixteen, 0, acc, 2 * RUN);
        }
    }
    return Node{up.m, up.l, acc};
}

// The node above `count` neighbours from `first` on; `spot(i)` is where the i-th of them is. By all lanes of a warp, which agree on all but
// columns.
template <u32 ACROSS, class At>
DEVICE Node join_tree(u32 first, u32 count, At spot) {
    static_assert(ACROSS == 0 || ACROSS == 2, "runs of a chunk at a time");
    const u32 past = first + count, last = (past - 1) / CHUNK;
    Node above[ABOVE], node;
    u32 waits = 0;
    NO_UNROLL
    for (u32 index = first / CHUNK;; index++) {
        const u32 from = index * CHUNK;
        node = join_chunk<ACROSS>(most(first, from) - from, least(past - from, CHUNK), [&](u32 i) { return spot(from + i - first); });
        if (first / CHUNK == last) break;
        NO_UNROLL
        for (u32 k = 0; k < ABOVE; k++) {
            if (index != last && !(index >> k & 1)) {
                above[k] = node, waits |= 1u << k;
                break;
            }
            if (waits >> k & 1) node = joined(above[k], node), waits &= ~(1u << k);
        }
        if (index == last) break;
    }
    return node;
}
