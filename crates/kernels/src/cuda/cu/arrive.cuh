// The last block to arrive joins the nodes of a row's tree, so that no second launch does.
//
// Items are nodes of one height. Those of them that have a parent FAN_BITS above in common are joined by whichever block finds,
// from a ticket, that all of them are there; what it makes is that parent, or the row's result. Which block that is changes no bit.
// A ticket that has served is 0 again: a captured run finds it as the first one did.
#pragma once

#include "node.cuh"

constexpr u32 FAN_BITS = 4, FAN = 1 << FAN_BITS;
// Columns of a value that a warp has at once.
constexpr u32 SPAN = 128;

// Where the states of a row's leaves lie, under one key head.
struct States {
    float* at;
    u64 stride;  // from leaf to leaf
    u32 first;   // the first leaf
};
DEVICE States states_of(const Attend& p, const Task& task) {
    u32 len = state_len(task.q_count * (p.H / p.G), p.Dv);
    return States{p.partials + task.state + u64(task.head) * len, u64(p.G) * len, task.leaf_first};
}
// The state of a node that starts at `leaf`, or with the row.
DEVICE float* state_at(const States& states, u32 leaf) {
    return states.at + u64(most(leaf, states.first) - states.first) * states.stride;
}

// Joins the nodes begin..end of a height, children of one parent, for one query vector and these columns. All are on their way
// before the first is needed; children that are not there are empty.
DEVICE Node join_nodes(const Output& out, const States& states, u32 level, u32 begin, u32 end, u32 of, u32 column) {
    const u32 base = begin & ~(FAN - 1), top = end - 1 - base;
    // A state is padded to whole lines, which are multiples of four floats. Lanes past it load what they do not use.
    const u32 at = column < out.width ? column : 0;
    Node nodes[FAN];
    UNROLL
    for (u32 i = 0; i < FAN; i++) {
        nodes[i] = Node{-infinity(), 0.0f, Floats{0.0f, 0.0f, 0.0f, 0.0f}};
        if (base + i < begin || i > top) continue;
        Output state = out;
        state.state = state_at(states, (base + i) << level);
        nodes[i].m = load_fresh(state.m(of)), nodes[i].l = load_fresh(state.l(of));
        const U4 v = load16_fresh(state.acc(of) + at);
        nodes[i].acc = Floats{bits_float(v.x), bits_float(v.y), bits_float(v.z), bits_float(v.w)};
    }
    UNROLL
    for (u32 h = 1; h < FAN; h *= 2) {
        UNROLL
        for (u32 i = 0; i < FAN; i += 2 * h) {
            if (i + h <= top) meet(nodes[i], nodes[i + h]);
        }
    }
    return nodes[0];
}

// Called by all threads of a block (4 warps) whose item's states are written. `sums`: 129 words.
template <class T>
DEVICE void arrive(const Attend& p, const Task& task, u32 leaf, float* sums) {
    const States states = states_of(p, task);
    Output out;
    out.group = p.H / p.G, out.lanes = task.q_count * out.group, out.width = p.Dv;
    out.head_begin = task.head * out.group, out.token_begin = task.token, out.state = nullptr;
    u32* tickets = p.tickets + task.ticket;
    u32* seen = reinterpret_cast<u32*>(sums + 128);
    const u32 last = task.leaf_end - 1, slices = (p.Dv + SPAN - 1) / SPAN;
    u32 level = task.level, node = leaf >> level;
    for (;;) {
        const u32 lowest = task.leaf_first >> level, highest = last >> level, parent = node >> FAN_BITS;
        const bool whole = lowest >> FAN_BITS == highest >> FAN_BITS;
        const u32 begin = most(lowest, parent << FAN_BITS), end = least(highest + 1, (parent + 1) << FAN_BITS);
        const u32 above = task.leaf_first >> (level + FAN_BITS);
        block_sync();
        if (thread_x() == 0) {
            u32* ticket = tickets + (whole ? 0 : parent - above);
            u32 before = take_ticket(ticket);
            if (before + 1 == end - begin) *ticket = 0;
            *seen = before + 1;
        }
        block_sync();
        if (*seen != end - begin) return;
        NO_UNROLL
        for (u32 unit = warp(); unit < out.lanes * slices; unit += 4) {
            const u32 of = unit / slices, column = unit % slices * SPAN + 4 * lane();
            const Node sum = join_nodes(out, states, level, begin, end, of, column);
            if (whole) {
                float factor = finish(p, out, of, sum.m, sum.l, column == 0);
                T* to = output_row<T>(p, out, of) + column;
                float values[4] = {sum.acc.x, sum.acc.y, sum.acc.z, sum.acc.w};
                UNROLL
                for (u32 i = 0; i < 4; i++) {
                    if (column + i < p.Dv) to[i] = from_float<T>(values[i] * factor + 0.0f);
                }
            } else {
                Output state = out;
                state.state = state_at(states, parent << (level + FAN_BITS));
                U4 v{float_bits(sum.acc.x), float_bits(sum.acc.y), float_bits(sum.acc.z), float_bits(sum.acc.w)};
                if (column < p.Dv) store16(state.acc(of) + column, v);
                if (lane() == 0) sums[of] = sum.m, sums[64 + of] = sum.l;
            }
        }
        if (whole) return;
        // Warps that share a query vector have read its figures by now.
        block_sync();
        if (thread_x() < out.lanes) {
            Output state = out;
            state.state = state_at(states, parent << (level + FAN_BITS));
            *state.m(thread_x()) = sums[thread_x()], *state.l(thread_x()) = sums[64 + thread_x()];
        }
        tickets += (last >> (level + FAN_BITS)) - above + 1;
        level += FAN_BITS, node = parent;
    }
}
