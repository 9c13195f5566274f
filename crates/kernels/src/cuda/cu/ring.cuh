// A ring of tiles in shared memory, and what the groups of a block tell each other around it: which tiles are there, which are read, and
// what the block works on.
//
// A kernel's `Told` has marks `queries` (told of, and there) and `queries_read`, and `units[2]`, what the block works on, in turn: of which
// `over` says that there is no more.
//
// Defines: STAGES, tiles of the ring.
#pragma once

#include "hopper.cuh"

// Threads of a group.
constexpr u32 GROUP = 128;

// Where a tile of the ring is, and which turn of the ring it belongs to.
struct Turn {
    u32 slot, parity;
    void next() {
        slot += 1;
        if (slot == STAGES) slot = 0, parity ^= 1;
    }
};

// ---- producer ----

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
// `thread`.
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

// One arrival of a warp that has read what a mark speaks of.
DEVICE void released(Mark* mark) {
    warp_sync();
    if (lane() == 0) mark_arrive(mark);
}

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

