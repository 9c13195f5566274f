// The keys of largest score of each row, ascending by position, of equal ones the earlier, never NaN; -1 where there are no more.
//
// A block has a row. Scores are mapped to integers that order as they do (0 and -0 alike, NaN below all); three rounds count them
// by 11, 11 and 10 bits and find the integer of the last pick; one sweep in position order then writes all above it and the first
// that equal it. Counts are integers: nothing depends on the order of atomics.

#include "table.cuh"

struct Topk {
    const Table* table;
    const float* scores;  // [rows, score_stride]: row `row_begin` first; 16-byte aligned rows
    i32* to;              // [T, to_stride]
    i64 score_stride, to_stride;
    u32 topk, row_begin, row_end, reserved;
};
static_assert(sizeof(Topk) == 56, "as in exec/select.rs");

constexpr u32 THREADS = 1024, WARPS = 32, CLASSES = 2048;

DEVICE u32 order_of(float x) {
    u32 bits = float_bits(x + 0.0f);
    u32 order = bits ^ (u32(i32(bits) >> 31) | 0x80000000u);
    return x != x ? 0 : order;
}

// The sum of `v` of the threads below, for the whole block; `sums` are WARPS words. Two barriers.
DEVICE u32 sum_below(u32 v, u32* sums, u32& all) {
    u32 running = v;
    UNROLL
    for (u32 by = 1; by < 32; by *= 2) {
        u32 below = shfl_up(running, by);
        if (lane() >= by) running += below;
    }
    block_sync();
    if (lane() == 31) sums[warp()] = running;
    block_sync();
    u32 of_warp = sums[lane()], before = of_warp;
    UNROLL
    for (u32 by = 1; by < 32; by *= 2) {
        u32 below = shfl_up(before, by);
        if (lane() >= by) before += below;
    }
    all = shfl_idx(before, 31);
    u32 through = shfl_idx(before, warp()), own = shfl_idx(of_warp, warp());
    return through - own + running - v;
}

// Four scores from `at` on as integers; 0, which is never picked, past the end.
struct Orders {
    u32 of[4];
};
DEVICE Orders orders_at(const float* scores, u32 at, u32 seen) {
    Orders r;
    if (at >= seen) {
        r.of[0] = r.of[1] = r.of[2] = r.of[3] = 0;
        return r;
    }
    U4 v = load16(scores + at);
    u32 words[4] = {v.x, v.y, v.z, v.w};
    UNROLL
    for (u32 i = 0; i < 4; i++) r.of[i] = at + i < seen ? order_of(bits_float(words[i])) : 0;
    return r;
}

MSTAR_KERNEL(topk, Topk, THREADS, 1) {
    SHARED(shared);
    u32* counts = reinterpret_cast<u32*>(shared);
    u32* sums = counts + CLASSES;
    u32* found = sums + WARPS;
    const u32 end_row = least(p.row_end, p.table->rows);
    for (u32 row = p.row_begin + block_x(); row < end_row; row += grid_x()) {
        const u32 seen = u32(least(i64(seen_of(p.table, row)), p.score_stride));
        const float* scores = p.scores + i64(row - p.row_begin) * p.score_stride;
        i32* to = p.to + i64(row) * p.to_stride;
        // All above `cut` are picked, and the first `ties` that equal it.
        u32 cut = 0, ties = 0;
        if (p.topk == 0) continue;
        if (seen > p.topk) {
            u32 left = p.topk, base = 0, shift = 32;
            NO_UNROLL
            for (u32 round = 0; round < 3; round++) {
                const u32 digit = round == 2 ? 10 : 11, above = shift;
                shift -= digit;
                counts[thread_x()] = 0, counts[thread_x() + THREADS] = 0;
                block_sync();
                NO_UNROLL
                for (u32 at = thread_x() * 4; at < seen; at += THREADS * 4) {
                    Orders orders = orders_at(scores, at, seen);
                    UNROLL
                    for (u32 i = 0; i < 4; i++) {
                        u32 order = orders.of[i];
                        if (order != 0 && (round == 0 || order >> above == base >> above))
                            atomic_add(counts + (order >> shift & ((1u << digit) - 1)), 1);
                    }
                }
                block_sync();
                // Threads take two classes each, from the top.
                u32 first = CLASSES - 1 - 2 * thread_x();
                u32 upper = counts[first], lower = counts[first - 1], all;
                u32 before = sum_below(upper + lower, sums, all);
                if (round == 0 && all <= p.topk) {
                    // All that are not NaN.
                    cut = 0, ties = 0;
                    break;
                }
                if (before < left && left <= before + upper) found[0] = first, found[1] = left - before;
                else if (before + upper < left && left <= before + upper + lower)
                    found[0] = first - 1, found[1] = left - before - upper;
                block_sync();
                base |= found[0] << shift, left = found[1];
                cut = base, ties = left;
            }
        }
        u32 picked = 0, equal_before = 0, above_before = 0;
        NO_UNROLL
        for (u32 from = 0; from < seen; from += THREADS * 4) {
            u32 at = from + thread_x() * 4;
            Orders orders = orders_at(scores, at, seen);
            u32 here = 0;
            UNROLL
            for (u32 i = 0; i < 4; i++) here += u32(orders.of[i] > cut) + (u32(ties != 0 && orders.of[i] == cut) << 16);
            u32 all, before = sum_below(here, sums, all);
            u32 above = above_before + (before & 0xffff), equal = equal_before + (before >> 16);
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                bool is_above = orders.of[i] > cut, is_equal = ties != 0 && orders.of[i] == cut;
                u32 rank = above + least(equal, ties);
                if (is_above || (is_equal && equal < ties)) to[rank] = i32(at + i);
                above += is_above, equal += is_equal;
            }
            above_before += all & 0xffff, equal_before += all >> 16;
        }
        picked = above_before + least(equal_before, ties);
        for (u32 i = picked + thread_x(); i < p.topk; i += THREADS) to[i] = -1;
        block_sync();
    }
}
