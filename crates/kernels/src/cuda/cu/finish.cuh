// The end of an item: its unfinished states for a merge, or the row's results.
#pragma once

#include "list.cuh"

constexpr float LN_2 = 0.693147180559945309f;
constexpr float LOG2_E = 1.44269504088896341f;

// Where the results of some query tokens of a row under one key head go.
struct Output {
    float* state;  // null: these are the row's results
    u32 lanes, group, head_begin, token_begin, width;

    bool direct() const { return state == nullptr; }
    // The packed token and the query head of a lane.
    u32 token(u32 lane) const { return token_begin + lane / group; }
    u32 head(u32 lane) const { return head_begin + lane % group; }
    // The parts of a lane's unfinished state: m in base-2 units, -inf for a lane that saw nothing.
    float* m(u32 lane) const { return state + lane; }
    float* l(u32 lane) const { return state + state_lanes(lanes) + lane; }
    float* acc(u32 lane) const { return state + 2 * state_lanes(lanes) + lane * state_width(width); }
};

DEVICE Output output_at(const Attend& p, const Row& row, u32 q_begin, u32 q_count, u32 kv_head, u64 partial) {
    Output out;
    out.group = p.H / p.G;
    out.lanes = q_count * out.group;
    out.head_begin = kv_head * out.group;
    out.token_begin = row.q_begin + q_begin;
    out.width = p.Dv;
    out.state = partial == DIRECT ? nullptr : p.partials + partial + kv_head * state_len(out.lanes, p.Dv);
    return out;
}
// Of an item: one member, one key head.
DEVICE Output output_of(const Attend& p, const Item& item, const Member& member, const Row& row) {
    return output_at(p, row, item.q_begin, item.q_count, item.kv_head_begin, member.partial);
}

// What a lane's weighted sum is multiplied by at the end, and its natural log-sum-exp.
struct Root {
    float factor, lse;
};
DEVICE Root root(float m, float l, const float* sink) {
    // Nothing was seen, unless what was seen is NaN.
    if (m == -infinity()) return l != l ? Root{l, l} : Root{0.0f, -infinity()};
    if (!sink) return Root{1.0f / l, fused(m, LN_2, lg2(l) * LN_2)};
    float other = *sink * LOG2_E, top = most(m, other);
    if (m != m) top = m;
    float shrink = ex2(m - top), total = fused(l, shrink, ex2(other - top));
    return Root{shrink / total, fused(top, LN_2, lg2(total) * LN_2)};
}

// Writes what a lane has one of, lse and largest score, if `write`; the factor of its output. The sink joins here, once.
DEVICE float finish(const Attend& p, const Output& out, u32 lane, float m, float l, bool write) {
    u32 token = out.token(lane), head = out.head(lane);
    Root r = root(m, l, p.sinks ? p.sinks + head : nullptr);
    if (write && p.lse.at) reinterpret_cast<float*>(p.lse.at)[place_of(p.lse, token, head)] = r.lse;
    if (write && p.max_scores.at) {
        float top = r.lse != r.lse ? r.lse : m * LN_2;
        reinterpret_cast<float*>(p.max_scores.at)[place_of(p.max_scores, token, head)] = top;
    }
    return r.factor;
}
// Where a lane's output begins. Write `sum * factor + 0.0f`: -0 becomes 0, so that a hidden key never shows.
template <class T>
DEVICE T* output_row(const Attend& p, const Output& out, u32 lane) {
    return reinterpret_cast<T*>(p.o.at) + place_of(p.o, out.token(lane), out.head(lane));
}

// Query vectors that see nothing, which merges without parts stand for, where no merge is launched behind this one: their 0 and -inf.
// By `warps` warps of each block, of which this is number `w`; the blocks that have least to do come first.
template <class T>
DEVICE void leave_empties(const Attend& p, u32 w, u32 warps) {
    constexpr u32 CUT = 8;
    if (!p.empties) return;
    const Image* image = p.image;
    const u32 all = (image->merges - (p.tickets ? image->fused : 0)) * CUT;
    NO_UNROLL
    for (u32 at = grid_x() - 1 - block_x(); at < all; at += grid_x()) {
        const Merge merge = merges_of(image)[at / CUT];
        const Output out = output_at(p, rows_of(image)[merge.row], merge.q_begin, merge.q_count, merge.kv_head_begin, DIRECT);
        NO_UNROLL
        for (u32 of = at % CUT * warps + w; of < out.lanes; of += CUT * warps) {
            finish(p, out, of, -infinity(), 0.0f, lane() == 0);
            T* to = output_row<T>(p, out, of);
            NO_UNROLL
            for (u32 column = lane(); column < p.Dv; column += 32) to[column] = from_float<T>(0.0f);
        }
    }
}
