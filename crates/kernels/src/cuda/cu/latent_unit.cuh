// What the Hopper's kernels over latents share, whatever their tiles are made of: what a block works on, and what its groups do alike.
//
// A kernel's `Told` has marks `queries` (told of, and there) and `queries_read`, and `units[2]`, what the block works on, in turn: of which
// `over` says that there is no more.
//
// Items of more than ROWS query vectors are cut into pieces, which read the same latents. Tiles lie at multiples of KEYS, so that what
// else a block works on changes no bit.
//
// Defines: ROWS (query vectors a block), STAGES (tiles of the ring), PIECES (of the largest item, a multiple of those that one token's
// heads make); `Element`, the type of queries and of tiles, and KEYS, latents of a tile.
#pragma once

#include "finish.cuh"
#include "gather.cuh"
#include "hopper.cuh"
#include "ring.cuh"

// A tile in shared memory: blocks of KEYS rows and 64 lanes, rows of 128 bytes whose 16-byte pieces are turned by the row.
constexpr u32 LANES = 64, PIECE = 8, BLOCK_BYTES = KEYS * LANES * 2, EIGHT_ROWS = 8 * LANES * 2;

// What a block works on: up to ROWS query vectors of an item, and the keys that they see.
struct Unit {
    Row row;
    Output output;
    u32 row_index, q_begin, first;
    u32 lo, to;  // keys lo..to
    u32 hi, H;
    u32 all_see; // keys that every query vector sees, from lo on
    i64 before;  // keys that token 0 of the item sees under causality
    bool causal;
    bool over;   // there is no more to do
    u32 waits;   // where nodes of its tree wait, in lines from the start of the workspace

    // One past the last key that a lane of the item sees.
    u32 limit(u32 lane) const {
        return causal ? u32(least(most(before + i64(lane / H), i64(0)), i64(hi))) : hi;
    }
    u32 tile() const { return lo / KEYS; }
    u32 tiles() const { return lo < to ? (to + KEYS - 1) / KEYS : lo / KEYS; }
};

static_assert(sizeof(Unit) == 128, "as in exec/latents.rs");

// Calls `each(unit)` for what this block is to do.
template <class Each>
DEVICE void walk(const Attend& p, Each each) {
    const Image* image = p.image;
    const Span span = items_of(p);
    // Pieces that every item has are neighbours, so that the second finds the latents of the first nearby; those that only some items
    // have come after all of them, as many at a time.
    const u32 sure = (most(image->least, p.H) + ROWS - 1) / ROWS, units = (span.end - span.begin) * sure;
    NO_UNROLL
    for (u32 at = block_x(); at < units * ((PIECES + sure - 1) / sure); at += grid_x()) {
        const Item item = items_of(image)[span.begin + at % units / sure];
        const Member member = members_of(image)[item.member_begin];
        Unit unit;
        unit.row = rows_of(image)[member.row];
        unit.output = output_of(p, item, member, unit.row);
        unit.row_index = member.row, unit.q_begin = item.q_begin;
        unit.first = (at / units * sure + at % sure) * ROWS;
        if (unit.first >= unit.output.lanes) continue;
        const Reach reach = reach_of(p, unit.row, item);
        unit.lo = reach.lo, unit.hi = reach.hi, unit.H = p.H;
        unit.causal = p.flags & CAUSAL, unit.over = false, unit.waits = member.waits;
        // Query `i` of a row is at position kv_len - q_len + i.
        unit.before = i64(unit.row.kv_len) - i64(unit.row.q_len) + i64(item.q_begin) + 1;
        unit.to = unit.limit(least(unit.first + ROWS, unit.output.lanes) - 1);
        unit.all_see = unit.limit(unit.first);
        each(unit);
    }
}

// ---- producer ----

// Eight lanes of a row, from lane `at` on: C of them lie at `a`, the others at `b`; null for a row of zeros.
DEVICE void put(u8* to, const Element* a, const Element* b, u32 at, u32 C, u32 D, bool aligned) {
    if (aligned) {
        const bool there = a && at < D;
        const Element* from = at < C ? a + at : b + (at - C);
        cp_async_16(to, there ? from : a, there);
        return;
    }
    u32 words[4];
    UNROLL
    for (u32 i = 0; i < 4; i++) {
        u32 pair = 0;
        UNROLL
        for (u32 e = 0; e < 2; e++) {
            u32 lane_at = at + 2 * i + e;
            if (a && lane_at < D) pair |= u32((lane_at < C ? a[lane_at] : b[lane_at - C]).bits) << (16 * e);
        }
        words[i] = pair;
    }
    store16(to, U4{words[0], words[1], words[2], words[3]});
}

// The arrival of a thread whose copies, or plain stores, are on their way.
DEVICE void announce(Mark* mark, bool aligned) {
    if (aligned) {
        mark_arrive_after_copies(mark);
    } else {
        async_fence();
        mark_arrive(mark);
    }
}

// Tells of a unit, the count-th of them, as soon as the one two before it is read. By all threads that produce, of which this is number
// `thread`: each arrives for the unit's queries behind this, so that none of them waits for a mark that has turned twice.
template <class Told, class Unit>
DEVICE void tell(Told& told, const Unit& unit, u32 count, u32 thread) {
    mark_wait(&told.queries_read, count % 2 ^ 1);
    // Copies arrive by themselves, which says nothing of what was stored: that has an arrival of its own.
    if (thread == 0) {
        told.units[count % 2] = unit;
        mark_arrive(&told.queries);
    }
}
// That there is no more to do.
template <class Told>
DEVICE void tell_over(Told& told, u32 count, u32 thread) {
    mark_wait(&told.queries_read, count % 2 ^ 1);
    if (thread == 0) {
        told.units[count % 2].over = true;
        mark_arrive(&told.queries);
    }
}
// The same where each thread's copies arrive; then waits for them.
template <class Told>
DEVICE void tell_end(Told& told, u32 count, u32 thread, bool aligned) {
    tell_over(told, count, thread);
    announce(&told.queries, aligned);
    cp_async_commit();
    cp_async_wait<0>();
}

// ---- consumers ----

// The descriptor of what lies so many bytes behind; addresses never carry out of the lower word.
DEVICE u64 after(u64 desc, u32 bytes) { return (desc & ~0xffffffffull) | (u32(desc) + (bytes >> 4)); }

// Calls `each(unit, count)` for what the producer tells of; in the order in which it does.
template <class Told, class Each>
DEVICE void each_told(Told& told, Each each) {
    NO_UNROLL
    for (u32 count = 0;; count++) {
        mark_wait(&told.queries, count % 2);
        const auto& unit = told.units[count % 2];
        if (unit.over) break;
        each(unit, count);
    }
}
