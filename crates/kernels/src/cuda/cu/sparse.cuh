// What the kernels of attention over picks are given: rows `row_begin..row_end` of a call, each over the latents that it picked.
#pragma once

#include "finish.cuh"
#include "table.cuh"

struct Sparse {
    const Table* table;
    const i32* selection;     // [T, K]: positions within the row's request, in any order; what was not stored picks nothing
    u32* counts;              // [T]: picks of each row, and SORTED where they are to be read from `sorted`
    i32* sorted;              // [T, K]: ascending, of rows that list their picks otherwise
    float* partials;          // states of rows of several leaves: [rows of few queries, leaves], each state_len(H, C)
    const u8* q;              // [T, H, C]
    const u8* q_pe;           // [T, H, E]
    const u8* latents;        // [P, S, C + E]
    u8* o;                    // [T, H, C]
    float* lse;               // [T, H], or null
    i64 selection_stride, q_token, q_head, pe_token, pe_head, page, slot, o_token, o_head, lse_token, lse_head;  // elements
    u32 H, C, E, S;
    u32 topk;                 // K
    u32 leaves;               // items of a row of few queries: as many as K picks have
    u32 row_begin, row_end;
    float scale;              // sm_scale
    u32 aligned;              // queries and latents start at multiples of 16 bytes
    u32 leaf, level;          // picks a leaf of rows of few queries, those of requests of many being one leaf each; leaves of an item, as a power of two
    u64 apart;                // slots that a page is from the next, of a list
    u8* image;                // where the rows are put as a work list over latents in pages of one slot, or null
};
static_assert(sizeof(Sparse) == 232, "as in exec/sparse.rs");

// In `counts`: the picks were not listed in ascending order.
constexpr u32 SORTED = 1u << 31;

struct Picks {
    const i32* positions;
    u32 count;
};
DEVICE Picks picks_of(const Sparse& p, u32 row) {
    u32 count = p.counts[row];
    return Picks{count & SORTED ? p.sorted + u64(row) * p.topk : p.selection + i64(row) * p.selection_stride, count & ~SORTED};
}
// One past the last row that there is.
DEVICE u32 end_row(const Sparse& p) { return most(p.row_begin, least(p.row_end, p.table->rows)); }
// Picks of an item of a row: how long its leaves are follows from its own request alone; rows of requests of many are one leaf each.
DEVICE u32 span_of(const Sparse& p, u32 row) { return many_rows(p.table, row, row + 1) ? ONE_LEAF : p.leaf << p.level; }
// The state of an item of a row of several: as list.cuh has them, H lanes.
DEVICE float* state_of(const Sparse& p, u32 row, u32 item) {
    return p.partials + (u64(few_rows(p.table, p.row_begin, row)) * p.leaves + item) * state_len(p.H, p.C);
}
// Writes a row's log-sum-exp under a head; the factor of its output.
DEVICE float finish(const Sparse& p, u32 row, u32 head, float m, float l, bool write) {
    Root r = root(m, l, nullptr);
    if (write && p.lse) p.lse[i64(row) * p.lse_token + i64(head) * p.lse_head] = r.lse;
    return r.factor;
}
