// A ring of tiles in shared memory: which tile lies where, and in which turn of the ring.
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

// One arrival of a warp that has read what a mark speaks of.
DEVICE void released(Mark* mark) {
    warp_sync();
    if (lane() == 0) mark_arrive(mark);
}
