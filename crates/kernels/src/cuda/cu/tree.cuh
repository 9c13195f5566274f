// Nodes of a row's tree that lie in memory, joined by one warp for one query vector and some columns of its value, four a lane: a node
// at a time for 128 columns, or, where there are fewer query vectors than a device has warps, four at a time for 32.
//
// The nodes are neighbours of one height: `first`..`first + count`, counted over the whole tree. A pair of siblings is joined as
// soon as both are there, and what has no left sibling goes up as it is: the order of the additions follows from the indices alone.
#pragma once

#include "node.cuh"

// Nodes a lane has on their way at once; heights that the lanes of a node climb by themselves; heights above them.
constexpr u32 ON_THEIR_WAY = 8, CLIMBED = 5, ABOVE = 24;

// A warp has 1 << ACROSS nodes at a time, and as many lanes of each; columns of the value that it has of them, four a lane.
template <u32 ACROSS>
constexpr u32 NODE_LANES = 32 >> ACROSS;
template <u32 ACROSS>
constexpr u32 WARP_COLUMNS = 4 * NODE_LANES<ACROSS>;
// The first of this lane's four columns, and which of the nodes that are joined at a time it works for.
template <u32 ACROSS>
DEVICE u32 lane_column() {
    return lane() % NODE_LANES<ACROSS> * 4;
}
template <u32 ACROSS>
DEVICE u32 lane_node() {
    return lane() / NODE_LANES<ACROSS>;
}

// Query vectors with 128 columns from which on there are enough of them for all warps of a device.
constexpr u64 MANY_VECTORS = 512;

DEVICE Node node_across(const Node& node, u32 by) {
    const Node other{shfl_xor(node.m, by), shfl_xor(node.l, by),
                     Floats{shfl_xor(node.acc.x, by), shfl_xor(node.acc.y, by), shfl_xor(node.acc.z, by), shfl_xor(node.acc.w, by)}};
    return lane() & by ? joined(other, node) : joined(node, other);
}

// `load(i)` is the i-th node, 0..count, of this lane's columns. By all lanes of a warp, which agree on all but columns.
template <u32 ACROSS, class Load>
DEVICE Node join_tree(u32 first, u32 count, Load load) {
    static_assert(ACROSS == 0 || ACROSS == 2, "what is joined across lanes below");
    const Node none{-infinity(), 0.0f, Floats{0.0f, 0.0f, 0.0f, 0.0f}};
    const u32 last = first + count - 1, mine = lane_node<ACROSS>();
    // As low as can be with all nodes under one: so many of them for the lanes of a node.
    u32 under = 0;
    NO_UNROLL
    while (under < CLIMBED && first >> (under + ACROSS) != last >> (under + ACROSS)) under++;
    Node above[ABOVE], node = none;
    u32 waits = 0;
    NO_UNROLL
    for (u32 round = first >> (under + ACROSS); round <= last >> (under + ACROSS); round++) {
        const u32 subtree = (round << ACROSS) + mine, begin = most(subtree << under, first), end = least((subtree + 1) << under, last + 1);
        Node left[CLIMBED];
        u32 waiting = 0;
        node = none;
        NO_UNROLL
        for (u32 from = begin; from < end; from += ON_THEIR_WAY) {
            Node next[ON_THEIR_WAY];
            // Nothing is asked under a condition, which would make each wait for the one before; the last is asked again instead.
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
        if (ACROSS == 2) {
            warp_sync();
            node = node_across(node_across(node, 8), 16);
        }
        if (first >> (under + ACROSS) == last >> (under + ACROSS)) break;
        NO_UNROLL
        for (u32 k = 0; k < ABOVE; k++) {
            if (round != last >> (under + ACROSS) && !(round >> k & 1)) {
                above[k] = node, waits |= 1u << k;
                break;
            }
            if (waits >> k & 1) node = joined(above[k], node), waits &= ~(1u << k);
        }
    }
    return node;
}
