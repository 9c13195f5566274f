// The keys of largest score of each row, ascending by position, of equal ones the earlier, never NaN; -1 where there are no more.
//
// Scores are mapped to integers that order as they do (0 and -0 alike, NaN below all). A row is cut into segments of SEGMENT keys,
// a block each:
//   topk_count  counts a row's keys by their leading bits, its class, over all of its segments
//   topk_pick   finds the class of the last pick, and keeps of each segment the keys of that class and of those above, in order;
//               the last block of a row to do so finds the integer of the last pick among them, and writes the picks
// Counts are integers and lists keep the order of positions: nothing depends on which block comes first.

#include "table.cuh"

struct Topk {
    const Table* table;
    const float* scores;  // [rows, score_stride]: row `row_begin` first; 16-byte aligned rows
    u32* lists;           // [rows, list_stride]: what a row's segments keep; where the scores were, if nobody wants them any more
    u32* states;          // [rows, STATE]: zeros at first
    u32* lengths;         // [rows, segments]: keys that a segment keeps
    i32* to;              // [T, to_stride]
    i64 score_stride, list_stride, to_stride;
    u32 topk, row_begin, row_end;
    u32 segments;         // that the longest row has
    u32 width;            // scores that a row has room for, a multiple of 4
    u32 reserved;
};
static_assert(sizeof(Topk) == 96, "as in exec/select.rs");

constexpr u32 THREADS = 512, WARPS = 16, KEYS = 8;
constexpr u32 SEGMENT = THREADS * KEYS;
// Blocks that may ask for all of a row's counts and yet not be felt.
constexpr u32 FEW_BLOCKS = 64;
// A class is an integer's leading bits; GROUP classes are counted together once more.
constexpr u32 BELOW = 19, CLASSES = 1u << (32 - BELOW), GROUP = CLASSES / THREADS;
// Of a row: counts of classes, of groups, and blocks that have come.
constexpr u32 GROUPS_AT = CLASSES, TICKET_AT = GROUPS_AT + THREADS, STATE = TICKET_AT + 16;
// What is kept of a key in 32 bits: whether its class is above that of the last pick, the integer's other bits, and where in its
// segment it lies.
constexpr u32 PLACE = 12, ABOVE = 1u << 31;
static_assert(SEGMENT == 1u << PLACE && BELOW + PLACE == 31, "an entry's parts fill it");
// In shared memory: sums of warps and what was found, first entries of segments, counters, entries.
constexpr u32 FOUND_AT = WARPS, STARTS_AT = FOUND_AT + 16, MOST_STARTS = 512, COUNTERS_AT = STARTS_AT + MOST_STARTS;
// Bits below a class are counted by the upper ones, then by the lower ones.
constexpr u32 LOWER_BITS = 9, LOWER = 1u << LOWER_BITS, UPPER = 1u << (BELOW - LOWER_BITS);
static_assert(UPPER == 2 * THREADS && LOWER == THREADS, "counters of a thread");
constexpr u32 LIST_AT = COUNTERS_AT + UPPER + LOWER, MOST_LISTED = 7680;
static_assert((LIST_AT + MOST_LISTED) * 4 == 39040, "as in exec/select.rs");

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
    u32 of_warp = sums[lane() % WARPS], before = of_warp;
    UNROLL
    for (u32 by = 1; by < WARPS; by *= 2) {
        u32 below = shfl_up(before, by);
        if (lane() % WARPS >= by) before += below;
    }
    all = shfl_idx(before, WARPS - 1);
    u32 through = shfl_idx(before, warp()), own = shfl_idx(of_warp, warp());
    return through - own + running - v;
}

// This thread's keys of a segment as integers; 0, which is never picked, past the end.
struct Orders {
    u32 of[KEYS];
};
// Asks for them, as far as the row has room: loads that need not wait for the table.
struct Asked {
    U4 fours[KEYS / 4];
};
DEVICE Asked ask(const Topk& p, u32 index) {
    const float* scores = p.scores + i64(index / p.segments) * p.score_stride;
    Asked r;
    UNROLL
    for (u32 i = 0; i < KEYS / 4; i++) {
        i64 at = i64(index % p.segments) * SEGMENT + thread_x() * KEYS + i * 4;
        r.fours[i] = at < i64(p.width) ? load16(scores + at) : U4{0, 0, 0, 0};
    }
    return r;
}
DEVICE Orders orders_of(const Asked& asked, u32 from, u32 seen) {
    Orders r;
    UNROLL
    for (u32 four = 0; four < KEYS; four += 4) {
        u32 at = from + thread_x() * KEYS + four;
        const U4& v = asked.fours[four / 4];
        u32 words[4] = {v.x, v.y, v.z, v.w};
        UNROLL
        for (u32 i = 0; i < 4; i++) r.of[four + i] = at + i < seen ? order_of(bits_float(words[i])) : 0;
    }
    return r;
}

// A block's segment of a row.
struct Unit {
    u32 row, segment, seen;
    u32 *list, *state;
};
DEVICE Unit unit_of(const Topk& p, u32 unit) {
    u32 row = p.row_begin + unit / p.segments, of_panel = unit / p.segments;
    u32 seen = row >= p.table->rows ? 0 : least(seen_of(p.table, row), p.width);
    return Unit{row, unit % p.segments, seen, p.lists + i64(of_panel) * p.list_stride, p.states + u64(of_panel) * STATE};
}
DEVICE u32 units_of(const Topk& p) { return (p.row_end - p.row_begin) * p.segments; }

MSTAR_KERNEL(topk_count, Topk, THREADS, 2) {
    SHARED(shared);
    u32* counts = reinterpret_cast<u32*>(shared);
    for (u32 index = block_x(); index < units_of(p); index += grid_x()) {
        const Asked asked = ask(p, index);
        block_sync();
        UNROLL
        for (u32 i = 0; i < GROUP / 4; i++) store16(counts + (i * THREADS + thread_x()) * 4, U4{0, 0, 0, 0});
        block_sync();
        const Unit unit = unit_of(p, index);
        // A row that sees no more than it picks has nothing to count.
        if (unit.segment * SEGMENT >= unit.seen || unit.seen <= p.topk) continue;
        const Orders orders = orders_of(asked, unit.segment * SEGMENT, unit.seen);
        UNROLL
        for (u32 i = 0; i < KEYS; i++)
            if (orders.of[i] != 0) atomic_add(counts + (orders.of[i] >> BELOW), 1);
        block_sync();
        u32 together = 0;
        UNROLL
        for (u32 i = 0; i < GROUP; i += 4) {
            u32 first = thread_x() * GROUP + i;
            U4 v = load16(counts + first);
            together += v.x + v.y + v.z + v.w;
            if (v.x) atomic_add(unit.state + first, v.x);
            if (v.y) atomic_add(unit.state + first + 1, v.y);
            if (v.z) atomic_add(unit.state + first + 2, v.z);
            if (v.w) atomic_add(unit.state + first + 3, v.w);
        }
        if (together) atomic_add(unit.state + GROUPS_AT + thread_x(), together);
    }
}

// The class of a row's last pick, and how many of it are picked; of a row whose keys are all picked, no class and 0.
struct Last {
    u32 of, left;
};
// Threads have a group each, from the top.
DEVICE u32 my_group() { return THREADS - 1 - thread_x(); }
// The counts of a thread's classes.
struct Counted {
    U4 fours[GROUP / 4];
};
DEVICE Counted counted_in(const u32* state) {
    Counted r;
    UNROLL
    for (u32 i = 0; i < GROUP / 4; i++) r.fours[i] = load16(state + my_group() * GROUP + i * 4);
    return r;
}
// Where `soon`, `counted` has been asked for, as is worth it where there are few blocks to ask.
DEVICE Last last_of(const u32* state, u32 topk, bool soon, Counted counted, u32* shared) {
    u32* found = shared + FOUND_AT;
    u32 here = 0;
    if (soon) {
        UNROLL
        for (u32 i = 0; i < GROUP / 4; i++) {
            const U4& v = counted.fours[i];
            here += v.x + v.y + v.z + v.w;
        }
    } else {
        here = state[GROUPS_AT + my_group()];
    }
    u32 group = my_group(), all, before = sum_below(here, shared, all);
    if (all <= topk) return Last{0, 0};
    if (before < topk && topk <= before + here) {
        if (!soon) counted = counted_in(state);
        const U4(&four)[GROUP / 4] = counted.fours;
        UNROLL
        for (u32 i = GROUP / 4; i-- > 0;) {
            u32 counts[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
            UNROLL
            for (u32 j = 4; j-- > 0;) {
                if (before < topk && topk <= before + counts[j]) found[0] = group * GROUP + i * 4 + j, found[1] = topk - before;
                before += counts[j];
            }
        }
    }
    block_sync();
    return Last{found[0], found[1]};
}

// Which of a block's runs of counters, a thread each, has the one where counting from the top reaches `left`; that thread gets how many
// come before its run, the others ~0. `sums` are WARPS words; one barrier.
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
        u32 below = shfl_up(running, by);
        if (lane() >= by) running += below;
    }
    before += running - count;
    return before < left && left <= before + count ? before : ~0u;
}

// The bits below the class of the last of `left` picks among a list's entries of its class, and how many that equal it are picked.
// Both sets of counters are zeros.
DEVICE Last last_below(const u32* list, u32 length, u32 left, u32* shared) {
    u32 *found = shared + FOUND_AT, *upper = shared + COUNTERS_AT, *lower = upper + UPPER;
    for (u32 i = thread_x(); i < length; i += THREADS) {
        u32 entry = list[i];
        if (!(entry & ABOVE)) atomic_add(upper + (entry >> (PLACE + LOWER_BITS)), 1);
    }
    block_sync();
    // Two counters a thread, from the top.
    const u32 first = UPPER - 1 - 2 * thread_x(), high = upper[first], low = upper[first - 1];
    u32 before = reached(high + low, left, shared);
    if (before != ~0u) {
        if (left <= before + high) found[0] = first, found[1] = left - before;
        else found[0] = first - 1, found[1] = left - before - high;
    }
    block_sync();
    const u32 base = found[0];
    left = found[1];
    for (u32 i = thread_x(); i < length; i += THREADS) {
        u32 entry = list[i], below = entry >> PLACE;
        if (!(entry & ABOVE) && below >> LOWER_BITS == base) atomic_add(lower + (below & (LOWER - 1)), 1);
    }
    block_sync();
    const u32 mine = LOWER - 1 - thread_x();
    before = reached(lower[mine], left, shared);
    if (before != ~0u) found[0] = mine, found[1] = left - before;
    block_sync();
    return Last{base << LOWER_BITS | found[0], found[1]};
}

// Writes a row's picks, all of whose segments have left their lists.
DEVICE void write_picks(const Topk& p, const Unit& unit, u32 left, u32* shared) {
    const u32 segments = most(1u, (unit.seen + SEGMENT - 1) / SEGMENT);
    u32* lengths = p.lengths + u64(unit.row - p.row_begin) * p.segments;
    u32* lists = unit.list;
    // Many loads a lane before the first is stored; a warp's first segment's before its length is known.
    constexpr u32 AHEAD = 8;
    u32 entries[AHEAD];
    auto ask_entries = [&](u32 segment, u32 first, u32 count) {
        UNROLL
        for (u32 i = 0; i < AHEAD; i++)
            entries[i] = first + 32 * i < count ? load_here(lists + u64(segment) * SEGMENT + first + 32 * i) : 0;
    };
    ask_entries(warp(), lane(), warp() < segments ? least(SEGMENT, unit.seen - least(unit.seen, warp() * SEGMENT)) : 0);
    for (u32 at = thread_x(); at < UPPER + LOWER; at += THREADS) shared[COUNTERS_AT + at] = 0;
    // Where each segment's entries come among all of the row.
    u32* starts = segments <= MOST_STARTS ? shared + STARTS_AT : lengths;
    u32 length = 0, all;
    for (u32 from = 0; from < segments; from += THREADS) {
        u32 segment = from + thread_x(), own = segment < segments ? lengths[segment] : 0;
        u32 before = sum_below(own, shared, all);
        if (segment < segments) starts[segment] = length + before;
        length += all;
    }
    block_sync();
    auto end_of = [&](u32 segment) { return segment + 1 < segments ? starts[segment + 1] : length; };
    // One list, in shared memory if it has room, else moved together where it is.
    const bool fits = length <= MOST_LISTED;
    u32* list = fits ? shared + LIST_AT : lists;
    if (fits) {
        for (u32 segment = warp(); segment < segments; segment += WARPS) {
            const u32 start = starts[segment], count = end_of(segment) - start;
            for (u32 first = lane(); first < count; first += 32 * AHEAD) {
                if (segment != warp() || first != lane()) ask_entries(segment, first, count);
                UNROLL
                for (u32 i = 0; i < AHEAD; i++)
                    if (first + 32 * i < count) shared[LIST_AT + start + first + 32 * i] = entries[i];
            }
        }
    } else {
        for (u32 segment = 1; segment < segments; segment++) {
            const u32 start = starts[segment], count = end_of(segment) - start;
            for (u32 i = thread_x(); i - thread_x() < count; i += THREADS) {
                u32 entry = i < count ? lists[u64(segment) * SEGMENT + i] : 0;
                block_sync();
                if (i < count) lists[start + i] = entry;
            }
        }
    }
    block_sync();
    Last last{0, 0};
    if (left != 0) last = last_below(list, length, left, shared);
    // Neighbouring entries are one thread's.
    const u32 each = (length + THREADS - 1) / THREADS, first = least(thread_x() * each, length), end = least(first + each, length);
    u32 above = 0, equal = 0;
    for (u32 i = first; i < end; i++) {
        u32 key = list[i] >> PLACE;
        above += key > last.of || left == 0, equal += key == last.of && left != 0;
    }
    u32 all_above, all_equal;
    if (fits) {
        // Both at once: neither has more than 16 bits.
        static_assert(MOST_LISTED < 1u << 16, "see there");
        const u32 both = sum_below(above | equal << 16, shared, all);
        above = both & 0xffff, equal = both >> 16, all_above = all & 0xffff, all_equal = all >> 16;
    } else {
        above = sum_below(above, shared, all_above), equal = sum_below(equal, shared, all_equal);
    }
    i32* to = p.to + i64(unit.row) * p.to_stride;
    // The segment of the first entry: the last that starts at or before it.
    u32 segment = 0, past = segments;
    while (past - segment > 1) {
        u32 middle = segment + (past - segment) / 2;
        if (starts[middle] <= first) segment = middle;
        else past = middle;
    }
    for (u32 i = first; i < end; i++) {
        while (i >= end_of(segment)) segment++;
        u32 entry = list[i], key = entry >> PLACE;
        bool is_above = key > last.of || left == 0, is_equal = key == last.of && left != 0;
        u32 rank = above + least(equal, last.left);
        if (is_above || (is_equal && equal < last.left)) to[rank] = i32(segment * SEGMENT + (entry & (SEGMENT - 1)));
        above += is_above, equal += is_equal;
    }
    for (u32 i = all_above + least(all_equal, last.left) + thread_x(); i < p.topk; i += THREADS) to[i] = -1;
}

MSTAR_KERNEL(topk_pick, Topk, THREADS, 2) {
    SHARED(memory);
    u32* shared = reinterpret_cast<u32*>(memory);
    u32* found = shared + FOUND_AT;
    const bool soon = units_of(p) <= FEW_BLOCKS;
    for (u32 index = block_x(); index < units_of(p); index += grid_x()) {
        const Asked asked = ask(p, index);
        const u32* state = p.states + u64(index / p.segments) * STATE;
        Counted counted = {};
        if (soon) counted = counted_in(state);
        const Unit unit = unit_of(p, index);
        if (unit.row >= p.table->rows) continue;
        const u32 from = unit.segment * SEGMENT, segments = most(1u, (unit.seen + SEGMENT - 1) / SEGMENT);
        if (unit.segment >= segments) continue;
        const Orders orders = orders_of(asked, from, unit.seen);
        Last last{0, 0};
        if (unit.seen > p.topk) last = last_of(unit.state, p.topk, soon, counted, shared);
        u32 entries[KEYS], kept = 0;
        UNROLL
        for (u32 i = 0; i < KEYS; i++) {
            u32 order = orders.of[i], of = order >> BELOW, place = thread_x() * KEYS + i;
            bool above = last.left == 0 ? order != 0 : of > last.of, same = last.left != 0 && of == last.of;
            entries[i] = (above ? ABOVE : 0) | (order & ((1u << BELOW) - 1)) << PLACE | place;
            kept |= u32(above || same) << i;
        }
        u32 all, rank = sum_below(popcount(kept), shared, all);
        u32* list = unit.list + from;
        UNROLL
        for (u32 i = 0; i < KEYS; i++)
            if (kept >> i & 1) list[rank++] = entries[i];
        if (thread_x() == 0) p.lengths[u64(unit.row - p.row_begin) * p.segments + unit.segment] = all;
        block_sync();
        if (thread_x() == 0) found[2] = take_ticket(unit.state + TICKET_AT);
        block_sync();
        if (found[2] + 1 == segments) write_picks(p, unit, last.left, shared);
        block_sync();
    }
}
