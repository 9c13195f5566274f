// The unfinished states of latent_few.cu's items: of a leaf, and the nodes above leaves that wait for a sibling, joined as a merge would
// join them. Those of less than eight leaves wait in registers, others in the workspace.
#pragma once

#include "latent_tasks.cuh"

// What a thread has of an unfinished state: sums over its group's values, and of each query vector the largest score and the sum of
// weights.
struct State {
    float out[HALF][ROWS / 2], top[MINE], sum[MINE];

    void clear() {
        UNROLL
        for (u32 part = 0; part < HALF; part++)
            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) out[part][i] = 0.0f;
        UNROLL
        for (u32 c = 0; c < MINE; c++) top[c] = -infinity(), sum[c] = 0.0f;
    }
    void scale(const float (&factors)[MINE]) {
        bool same = true;
        UNROLL
        for (u32 c = 0; c < MINE; c++) same = same && factors[c] == 1.0f;
        // Only multiplications by 1 are left out.
        if (warp_all(same)) return;
        UNROLL
        for (u32 part = 0; part < HALF; part++)
            UNROLL
            for (u32 i = 0; i < ROWS / 2; i++) out[part][i] *= factors[i / 4 * 2 + i % 2];
    }
};

// Joins the state of keys to the left; as merge.cu joins nodes.
DEVICE void join_left(State& state, const State& left) {
    float fa[MINE], fb[MINE];
    UNROLL
    for (u32 c = 0; c < MINE; c++) {
        const float top = left.top[c], sum = left.sum[c];
        const bool none = top == -infinity() && sum == sum, all = state.top[c] == -infinity() && state.sum[c] == state.sum[c];
        const float m = most(top, state.top[c]), reference = m == -infinity() ? 0.0f : m;
        // Empty states are identities; one whose sum is NaN is not empty.
        fa[c] = none ? 0.0f : all ? 1.0f : ex2(top - reference);
        fb[c] = all ? 0.0f : none ? 1.0f : ex2(state.top[c] - reference);
        if (all) state.top[c] = top, state.sum[c] = sum;
        else if (!none) state.top[c] = m, state.sum[c] = fused(sum, fa[c], state.sum[c] * fb[c]);
    }
    UNROLL
    for (u32 part = 0; part < HALF; part++)
        UNROLL
        for (u32 i = 0; i < ROWS / 2; i++) {
            const u32 c = i / 4 * 2 + i % 2;
            state.out[part][i] = fused(left.out[part][i], fa[c], state.out[part][i] * fb[c]);
        }
}

// What a thread has of a node of eight leaves or more waits in the workspace, as it is, where the state of the leaf that completes it would
// be and in the one before: only for states of 16 query vectors and whole values, and rows that begin with their first leaf.
DEVICE U4* waiting(const Attend& p, const Task& task, u32 leaf) {
    return reinterpret_cast<U4*>(p.partials + task.state + u64(leaf - 1) * state_len(task.q_count * p.H, p.Dv)) + thread_x();
}
DEVICE void put_node(U4* at, const State& node) {
    UNROLL
    for (u32 i = 0; i < HALF * ROWS / 8; i++) {
        const float* of = &node.out[i / (ROWS / 8)][i % (ROWS / 8) * 4];
        at[(i + 2) * 2 * GROUP] = U4{float_bits(of[0]), float_bits(of[1]), float_bits(of[2]), float_bits(of[3])};
    }
    at[0] = U4{float_bits(node.top[0]), float_bits(node.top[1]), float_bits(node.top[2]), float_bits(node.top[3])};
    at[2 * GROUP] = U4{float_bits(node.sum[0]), float_bits(node.sum[1]), float_bits(node.sum[2]), float_bits(node.sum[3])};
}
DEVICE void take_node(const U4* at, State& node) {
    UNROLL
    for (u32 i = 0; i < HALF * ROWS / 8; i++) {
        float* of = &node.out[i / (ROWS / 8)][i % (ROWS / 8) * 4];
        const U4 v = at[(i + 2) * 2 * GROUP];
        of[0] = bits_float(v.x), of[1] = bits_float(v.y), of[2] = bits_float(v.z), of[3] = bits_float(v.w);
    }
    const U4 top = at[0], sum = at[2 * GROUP];
    node.top[0] = bits_float(top.x), node.top[1] = bits_float(top.y), node.top[2] = bits_float(top.z), node.top[3] = bits_float(top.w);
    node.sum[0] = bits_float(sum.x), node.sum[1] = bits_float(sum.y), node.sum[2] = bits_float(sum.z), node.sum[3] = bits_float(sum.w);
}

// The nodes of an item that wait for a sibling.
struct Tree {
    State left[AT_HAND ? AT_HAND : 1];
    u32 waits;  // a bit a height

    // A leaf's node, joined with those left of it as far as their parents are complete; at the item's end, with all.
    void join(const Attend& p, const Task& task, State& state, u32 leaf, bool last) {
        bool climbs = true;
        UNROLL
        for (i32 k = 0; k < i32(AT_HAND); k++) {
            if (!climbs) continue;
            climbs = last || (leaf >> k & 1);
            if (climbs) {
                if (waits >> k & 1) join_left(state, left[k]);
                waits &= ~(1u << k);
            } else {
                left[k] = state, waits |= 1u << k;
            }
        }
        NO_UNROLL
        for (u32 k = AT_HAND; HEIGHT > AT_HAND && climbs; k++) {
            if (k == HEIGHT) break;
            climbs = last || (leaf >> k & 1);
            if (climbs) {
                if (waits >> k & 1) {
                    take_node(waiting(p, task, (leaf >> k << k) - 1), left[0]);
                    join_left(state, left[0]);
                }
                waits &= ~(1u << k);
            } else {
                put_node(waiting(p, task, leaf), state);
                waits |= 1u << k;
            }
        }
    }
};
