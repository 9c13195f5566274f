// Nodes of a row's tree that lie in memory, joined by one warp for one query vector and 32 columns of its value: four at a time, eight
// lanes each, four columns a lane.
//
// The nodes are neighbours of one height: `first`..`first + count`, counted over the whole tree. A pair of siblings is joined as
// soon as both are there, and what has no left sibling goes up as it is: the order of the additions follows from the indices alone.
#pragma once

#include "node.cuh"

// Nodes a lane has on their way at once; heights that eight lanes climb by themselves; heights above them.
constexpr u32 ON_THEIR_WAY = 8, CLIMBED = 5, ABOVE = 24;
// Columns of a warp.
constexpr u32 WARP_COLUMNS = 32;

// The four columns that this lane has, and which of four neighbours.
DEVICE u32 lane_columns() { return lane() % 8 * 4; }

DEVICE Node node_across(const Node& node, u32 by) {
    const Node other{shfl_xor(node.m, by), shfl_xor(node.l, by),
                     Floats{shfl_xor(node.acc.x, by), shfl_xor(node.acc.y, by), shfl_xor(node.acc.z, by), shfl_xor(node.acc.w, by)}};
    return lane() & by ? joined(other, node) : joined(node, other);
}

// `load(i)` is the i-th node, 0..count, of this lane's columns. By all lanes of a warp, which agree on all but columns.
template <class Load>
DEVICE Node join_tree(u32 first, u32 count, Load load) {
    const Node none{-infinity(), 0.0f, Floats{0.0f, 0.0f, 0.0f, 0.0f}};
    const u32 last = first + count - 1, mine = lane() / 8;
    // As low as can be with all nodes under one: so many of them for each eight lanes.
    u32 under = 0;
    NO_UNROLL
    while (under < CLIMBED && first >> (under + 2) != last >> (under + 2)) under++;
    Node above[ABOVE], node = none;
    u32 waits = 0;
    NO_UNROLL
    for (u32 round = first >> (under + 2); round <= last >> (under + 2); round++) {
        const u32 subtree = 4 * round + mine, begin = most(subtree << under, first), end = least((subtree + 1) << under, last + 1);
        Node left[CLIMBED];
        u32 waiting = 0;
        node = none;
        NO_UNROLL
        for (u32 from = begin; from < end; from += ON_THEIR_WAY) {
            Node next[ON_THEIR_WAY];
            UNROLL
            for (u32 i = 0; i < ON_THEIR_WAY; i++) next[i] = load(least(from + i, end - 1) - first);
            UNROLL
            for (u32 i = 0; i < ON_THEIR_WAY; i++) {
                const u32 index = from + i;
                if (index >= end) break;
                node = next[i];
                bool climbs = true;
                UNROLL
                for (u32 k = 0; k < CLIMBED; k++) {
                    if (!climbs || k >= under) continue;
                    climbs = index + 1 == end || (index >> k & 1);
                    if (!climbs) {
                        left[k] = node, waiting |= 1u << k;
                    } else if (waiting >> k & 1) {
                        node = joined(left[k], node), waiting &= ~(1u << k);
                    }
                }
            }
        }
        warp_sync();
        node = node_across(node_across(node, 8), 16);
        if (first >> (under + 2) == last >> (under + 2)) break;
        NO_UNROLL
        for (u32 k = 0; k < ABOVE; k++) {
            if (round != last >> (under + 2) && !(round >> k & 1)) {
                above[k] = node, waits |= 1u << k;
                break;
            }
            if (waits >> k & 1) node = joined(above[k], node), waits &= ~(1u << k);
        }
    }
    return node;
}
