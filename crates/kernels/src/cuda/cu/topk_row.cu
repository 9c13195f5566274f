// The keys of largest score of each row, ascending by position, of equal ones the earlier, never NaN; -1 where there are no more.
//
// A row is a cluster's, in one launch: each of its BLOCKS blocks has a run of neighbouring keys, each thread a run of these. Scores are
// mapped to integers that order as they do (0 and -0 alike, NaN below all), which are counted by their leading bits, then by the next
// ones where the last pick lies, until all that is left of it are picked or no bits are left. Blocks add their counters up in two steps: each
// sums a share of them over the cluster, and sends the sums to all. Then every block knows the last pick, tells the others how many it has
// above and at it, and writes its own. Counts are integers and keys keep their order: nothing depends on which block comes first.
//
// Defines: BLOCKS (of a cluster: 1, 2, 4 or 8).

#include "cluster.cuh"
#include "table.cuh"

struct Topk {
    const Table* table;
    const float* scores;  // [rows, score_stride]: row `row_begin` first; 16-byte aligned rows
    i32* to;              // [T, to_stride]
    i64 score_stride, to_stride;
    u32 topk, row_begin, row_end;
    u32 width;            // scores that a row has room for, a multiple of 4
};
static_assert(sizeof(Topk) == 56, "as in exec/select.rs");

constexpr u32 THREADS = 512, WARPS = THREADS / 32;
// Bits that are counted at a time, and their counters: four a thread.
constexpr u32 BITS = 11, COUNTERS = 1 << BITS;
static_assert(COUNTERS == 4 * THREADS && BLOCKS <= WARPS, "a piece of counters for each thread");
// Four keys each that a thread has at once, and of its run the first ones, which it keeps.
constexpr u32 AHEAD = 4;
// In shared memory, in words: counters; of this block's share, what each block has; sums of all; sums of warps; what was found; how many each
// block has above and at the last pick, and marks, of two rows in turn; keys.
constexpr u32 COUNTS_AT = 0, SHARES_AT = COUNTS_AT + COUNTERS, TOTALS_AT = SHARES_AT + COUNTERS, SUMS_AT = TOTALS_AT + COUNTERS;
constexpr u32 FOUND_AT = SUMS_AT + WARPS, ENDS_AT = FOUND_AT + 4, MARKS_AT = ENDS_AT + 2 * BLOCKS * 4, KEYS_AT = MARKS_AT + 8;
static_assert(KEYS_AT % 4 == 0 && MARKS_AT % 4 == 0, "words of 16 bytes");
static_assert((KEYS_AT + AHEAD * THREADS * 4) * 4 == 57456 + BLOCKS * 32, "as in exec/select.rs");

struct Marks {
    Mark shares, totals, ends[2];
};

DEVICE u32 order_of(u32 score) {
    const float x = bits_float(score);
    const u32 bits = float_bits(x + 0.0f), order = bits ^ (u32(i32(bits) >> 31) | 0x80000000u);
    return x != x ? 0 : order;
}

// The sum of `v` of the threads below, for the whole block. Two barriers.
DEVICE u32 sum_below(u32 v, u32* sums, u32& all) {
    u32 running = v;
    UNROLL
    for (u32 by = 1; by < 32; by *= 2) {
        const u32 below = shfl_up(running, by);
        if (lane() >= by) running += below;
    }
    block_sync();
    if (lane() == 31) sums[warp()] = running;
    block_sync();
    const u32 of_warp = sums[lane() % WARPS];
    u32 before = of_warp;
    UNROLL
    for (u32 by = 1; by < WARPS; by *= 2) {
        const u32 below = shfl_up(before, by);
        if (lane() % WARPS >= by) before += below;
    }
    all = shfl_idx(before, WARPS - 1);
    return shfl_idx(before, warp()) - shfl_idx(of_warp, warp()) + running - v;
}
// Which of a block's runs of counters, a thread each, has the one where counting reaches `left`; that thread gets how many come before its
// run, the others ~0. One barrier.
DEVICE u32 reached(u32 count, u32 left, u32* sums) {
    const u32 of_warp = warp_add(count);
    if (lane() == 0) sums[warp()] = of_warp;
    block_sync();
    u32 before = 0;
    UNROLL
    for (u32 w = 0; w < WARPS; w += 4) {
        const U4 four = load16(sums + w);
        const u32 those[4] = {four.x, four.y, four.z, four.w};
        UNROLL
        for (u32 i = 0; i < 4; i++) before += w + i < warp() ? those[i] : 0;
    }
    if (before >= left || left > before + of_warp) return ~0u;
    u32 running = count;
    UNROLL
    for (u32 by = 1; by < 32; by *= 2) {
        const u32 below = shfl_up(running, by);
        if (lane() >= by) running += below;
    }
    before += running - count;
    return before < left && left <= before + count ? before : ~0u;
}

// A thread's run of a row's keys.
struct Run {
    const float* scores;  // of the row
    u32 begin, fours, seen, width;
};
// Calls `each(order, i)` for a thread's keys from the i-th on, four at a time: 0 for what is not there. Of the first time round they are kept.
template <class Each>
DEVICE void each_four(const Run& run, u32* kept, bool first, Each each) {
    NO_UNROLL
    for (u32 base = 0; base < run.fours; base += AHEAD) {
        U4 fours[AHEAD];
        if (base == 0 && !first) {
            UNROLL
            for (u32 i = 0; i < AHEAD; i++) fours[i] = load16(kept + i * THREADS * 4);
        } else {
            UNROLL
            for (u32 i = 0; i < AHEAD; i++) {
                const u32 at = run.begin + (base + i) * 4;
                fours[i] = base + i < run.fours && at < run.width ? load16(run.scores + at) : U4{0, 0, 0, 0};
            }
            UNROLL
            for (u32 i = 0; i < AHEAD; i++) {
                const u32 at = run.begin + (base + i) * 4, there = base + i < run.fours && at < run.seen ? run.seen - at : 0;
                U4& v = fours[i];
                v.x = there > 0 ? order_of(v.x) : 0, v.y = there > 1 ? order_of(v.y) : 0;
                v.z = there > 2 ? order_of(v.z) : 0, v.w = there > 3 ? order_of(v.w) : 0;
                if (base == 0) store16(kept + i * THREADS * 4, v);
            }
        }
        UNROLL
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 orders[4] = {fours[i].x, fours[i].y, fours[i].z, fours[i].w};
            each(orders, (base + i) * 4);
        }
    }
}

// The sums of all blocks' counters, which are zeros again; `phase` is how often they were summed before. Behind a barrier of what counted.
DEVICE void sum_up(u32* shared, Marks& marks, u32 phase) {
    constexpr u32 PIECES = THREADS / BLOCKS;
    const u32 thread = thread_x(), rank = cluster_rank();
    if (thread == 0) {
        mark_arrive_expecting(&marks.shares, COUNTERS * 4);
        mark_arrive_expecting(&marks.totals, COUNTERS * 4);
    }
    // A piece is four counters. Those of a share go to the block that sums it.
    u32* mine = shared + COUNTS_AT + thread * 4;
    const U4 counts = load16(mine);
    store16(mine, U4{0, 0, 0, 0});
    const u32 to = thread / PIECES, piece = thread % PIECES;
    remote_send16(remote_of(shared + SHARES_AT + (rank * PIECES + piece) * 4, to), counts, remote_of(&marks.shares, to));
    mark_wait(&marks.shares, phase % 2);
    U4 sum{0, 0, 0, 0};
    UNROLL
    for (u32 of = 0; of < BLOCKS; of++) {
        const U4 v = load16(shared + SHARES_AT + (of * PIECES + piece) * 4);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    // One thread for each piece and block.
    remote_send16(remote_of(shared + TOTALS_AT + (rank * PIECES + piece) * 4, to), sum, remote_of(&marks.totals, to));
    mark_wait(&marks.totals, phase % 2);
}

MSTAR_KERNEL_OF_CLUSTERS(topk_row, Topk, THREADS, 2, BLOCKS) {
    SHARED(memory);
    u32* shared = reinterpret_cast<u32*>(memory);
    u32 *sums = shared + SUMS_AT, *found = shared + FOUND_AT, *kept = shared + KEYS_AT + thread_x() * 4;
    Marks& marks = *reinterpret_cast<Marks*>(shared + MARKS_AT);
    const u32 rank = cluster_rank(), thread = thread_x();
    if (thread == 0) {
        mark_init(&marks.shares, 1), mark_init(&marks.totals, 1);
        mark_init(&marks.ends[0], 1), mark_init(&marks.ends[1], 1);
        marks_ready();
    }
    u32* counters = shared + COUNTS_AT;
    store16(counters + thread * 4, U4{0, 0, 0, 0});
    cluster_sync();
    u32 phase = 0, turn = 0;
    const u32 end = least(p.row_end, p.table->rows);
    NO_UNROLL
    for (u32 row = p.row_begin + block_x() / BLOCKS; row < end; row += grid_x() / BLOCKS, turn++) {
        Run run;
        run.scores = p.scores + i64(row - p.row_begin) * p.score_stride, run.width = p.width;
        run.seen = least(seen_of(p.table, row), p.width);
        run.fours = (run.seen + 4 * THREADS * BLOCKS - 1) / (4 * THREADS * BLOCKS);
        run.begin = (rank * THREADS + thread) * run.fours * 4;
        // The last pick is among integers low..low + span, of which so many are picked; 0: all that are there. Bits of theirs that differ.
        u32 low = 1, span = ~1u, left = p.topk, shift = 32;
        bool first = true;
        if (run.seen <= p.topk) shift = left = 0;
        NO_UNROLL
        while (shift > 0) {
            const u32 below = shift > BITS ? shift - BITS : 0;
            each_four(run, kept, first, [&](const u32(&orders)[4], u32) {
                UNROLL
                for (u32 i = 0; i < 4; i++) {
                    const u32 order = orders[i];
                    if (order - low <= span) atomic_add(counters + (order >> below) % COUNTERS, 1);
                }
            });
            first = false;
            block_sync();
            if (thread == 0) found[2] = 0;
            sum_up(shared, marks, phase++);
            // Four counters a thread, from the top.
            const u32 piece = THREADS - 1 - thread;
            const U4 v = load16(shared + TOTALS_AT + piece * 4);
            const u32 counts[4] = {v.x, v.y, v.z, v.w};
            u32 before = reached(v.x + v.y + v.z + v.w, left, sums);
            if (before != ~0u) {
                UNROLL
                for (u32 i = 4; i-- > 0;) {
                    if (before < left && left <= before + counts[i])
                        found[0] = piece * 4 + i, found[1] = left - before, found[2] = counts[i];
                    before += counts[i];
                }
            }
            block_sync();
            // No more than are picked.
            if (found[2] == 0) {
                left = 0;
                break;
            }
            low = (shift == 32 ? 0 : low) | found[0] << below, span = (1u << below) - 1, left = found[1], shift = below;
            if (left == found[2]) break;
        }
        if (left == 0) low = 0, span = 0;
        auto is_above = [&](u32 order) { return order > low + span; };
        auto is_equal = [&](u32 order) { return left != 0 && order - low <= span; };
        u32 above = 0, equal = 0;
        each_four(run, kept, first, [&](const u32(&orders)[4], u32) {
            UNROLL
            for (u32 i = 0; i < 4; i++) above += is_above(orders[i]), equal += is_equal(orders[i]);
        });
        u32 all_above, all_equal;
        if (run.fours * 4 * THREADS < 1 << 16) {
            // Both at once: neither has more than 16 bits.
            const u32 both = sum_below(above | equal << 16, sums, all_above);
            above = both & 0xffff, equal = both >> 16, all_equal = all_above >> 16, all_above &= 0xffff;
        } else {
            above = sum_below(above, sums, all_above), equal = sum_below(equal, sums, all_equal);
        }
        // How many come before this block's.
        u32* ends = shared + ENDS_AT + turn % 2 * BLOCKS * 4;
        Mark* mark = &marks.ends[turn % 2];
        if (thread == 0) mark_arrive_expecting(mark, BLOCKS * 16);
        if (thread < BLOCKS) remote_send16(remote_of(ends + rank * 4, thread), U4{all_above, all_equal, 0, 0}, remote_of(mark, thread));
        mark_wait(mark, turn / 2 % 2);
        u32 picked_above = 0, picked_equal = 0;
        UNROLL
        for (u32 b = 0; b < BLOCKS; b++) {
            const U4 v = load16(ends + b * 4);
            picked_above += v.x, picked_equal += v.y;
            if (b < rank) above += v.x, equal += v.y;
        }
        i32* to = p.to + i64(row) * p.to_stride;
        each_four(run, kept, first, [&](const u32(&orders)[4], u32 from) {
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                const bool over = is_above(orders[i]), same = is_equal(orders[i]);
                if (over || (same && equal < left)) to[above + least(equal, left)] = i32(run.begin + from + i);
                above += over, equal += same;
            }
        });
        for (u32 i = picked_above + least(picked_equal, left) + rank * THREADS + thread; i < p.topk; i += THREADS * BLOCKS) to[i] = -1;
    }
}
