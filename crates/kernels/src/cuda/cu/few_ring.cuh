// How the warps of decode_few.cu go through keys, and a ring of each warp's own that keeps keys and values on their way.
//
// A block takes an item in rounds: nodes of the row's tree of one leaf or, where all of it is seen, of 1 << MOST_ROUND leaves. Each
// warp has a quarter of a round, so that it meets the others at a round's end alone. A leaf's quarters are of equal length, whole
// steps of KEYS keys.
#pragma once

#include "task.cuh"

constexpr u32 WARPS = 4, THREADS = 32 * WARPS;
// Keys that a warp takes at a time; where a head is narrow, as many as make a stage worth its overhead.
constexpr u32 KEYS = WIDTH + VALUES <= 128 ? 32 : 16;
constexpr u32 K_BYTES = KEYS * WIDTH * 2, STAGE = KEYS * (WIDTH + VALUES) * 2;
// Leaves of a round at most, as a power of two: what a warp has registers for the states of.
constexpr u32 MOST_ROUND = VALUES <= 128 ? (COLUMNS == 8 && VALUES <= (GENERAL ? 64 : 128) ? 2 : 1) : GENERAL || WIDTH > 256 ? 0 : 1;

// Where a warp is among an item's keys.
struct Path {
    u32 round, level;  // where the round starts, and its leaves as a power of two
    u32 index;         // its first leaf
    u32 at, stop;      // the warp's next keys, and the end of its part
    u32 quarter;       // keys of a quarter of a leaf
};
// The round that starts at `round`; the warp's part of it may be empty.
DEVICE void begin_round(Path& w, const Task& task) {
    const u32 lo = task.lo, hi = task.hi, leaf = task.leaf_keys, whole = lo <= w.round ? hi - w.round : 0;
    w.level = 0;
    if (MOST_ROUND > 0 && w.index % (1 << MOST_ROUND) == 0 && whole >> MOST_ROUND >= leaf) w.level = MOST_ROUND;
    // Of a leaf that is not seen whole, what is seen is divided.
    const u32 begin = most(w.round, lo & ~(KEYS - 1)), end = hi - w.round > leaf ? w.round + leaf : hi;
    w.quarter = (end - begin + 4 * KEYS - 1) / (4 * KEYS) * KEYS;
    const u32 part = w.quarter << w.level;
    w.at = begin + warp() * part, w.stop = least(w.at + part, w.level ? ~0u : end);
}
// The item's first round.
DEVICE void begin_path(Path& w, const Task& task) {
    w.index = task.lo / task.leaf_keys, w.round = w.index * task.leaf_keys;
    begin_round(w, task);
}
// Whether the round is the item's last.
DEVICE bool is_last(const Path& w, const Task& task) { return task.hi - w.round <= task.leaf_keys << w.level; }
// Goes to the next round.
DEVICE void next_round(Path& w, const Task& task) {
    w.round += task.leaf_keys << w.level, w.index += 1u << w.level;
    begin_round(w, task);
}

// The side of a warp that fetches: which keys are next, and where this lane's lies (of KEYS, key lane % KEYS).
struct Fetch {
    u32 index, end, from, column;
    u32 lo, hi;          // the item's keys
    Path path;
    u64 k, v;            // the head's share in page 0
    u32 at, slot;        // where the list has the page of the key, and its slot there
    i32 page;            // its id
    bool masked, even;   // whether a mask decides; whether pages hold 16 neighbours from a multiple of 16 on
    bool seen, together; // whether the key is; whether all of the warp's are, and 16 neighbours lie in one page
};
// Asks where this lane's key lies.
DEVICE void locate(const Attend& p, Fetch& f) {
    const u32 base = f.path.at, key = base + lane() % KEYS;
    f.seen = key >= f.lo && key < f.hi;
    if (f.masked) {
        // A key that the mask hides from every query is not read: its value may be anything.
        const u64 bits = seen_bits(p, task_of(p, f.index), base);
        f.seen = f.seen && (bits >> (key - base) & 1);
    }
    f.together = f.even && warp_all(f.seen);
    if (f.seen) f.page = pages_of(p.image)[f.at];
}
// Goes to the next keys that there are, if any; `fresh`: to the first of all.
DEVICE void settle(const Attend& p, Fetch& f, bool fresh) {
    if (!fresh && f.index >= f.end) return;
    f.path.at += KEYS;
    if (!fresh && f.path.at < f.path.stop) {
        f.slot += KEYS;
        if (p.S >= KEYS) {
            if (f.slot >= p.S) f.slot -= p.S, f.at++;
        } else {
            f.at += f.slot / p.S, f.slot %= p.S;
        }
        locate(p, f);
        return;
    }
    bool next = fresh;
    NO_UNROLL
    do {
        if (!next && is_last(f.path, task_of(p, f.index))) {
            if (next_part<COLUMNS, VALUES>(p, task_of(p, f.index).q_count, f.from, f.column)) f.index += grid_x();
            if (f.index >= f.end) return;
            next = true;
        }
        const Task& task = task_of(p, f.index);
        if (next) {
            f.lo = task.lo, f.hi = task.hi, f.masked = task.mask_words != 0;
            f.even = ((p.S | task.kv_offset) & 15) == 0;
            f.k = p.k.at + u64(i64(task.head) * p.k.stride[2] * 2);
            f.v = p.v.at + u64((i64(task.head) * p.v.stride[2] + f.column) * 2);
            // What was read of no task is of no consequence.
            if (f.index >= f.end) return;
            prefetch_l2(&task_of(p, least(f.index + grid_x(), f.end - 1)));
            begin_path(f.path, task);
            next = false;
        } else {
            next_round(f.path, task);
        }
    } while (f.path.at >= f.path.stop);
    const Task& task = task_of(p, f.index);
    const u32 key = f.path.at + lane() % KEYS, offset_of = task.kv_offset;
    f.at = task.page_begin;
    u32 offset = key - offset_of;
    if (key < offset_of) {
        // Keys may begin before the first page does.
        const u32 before = (offset_of - key + p.S - 1) / p.S;
        f.at -= before, offset += before * p.S;
    }
    if ((p.S & (p.S - 1)) == 0) f.at += offset >> popcount(p.S - 1), f.slot = offset & (p.S - 1);
    else f.at += offset / p.S, f.slot = offset % p.S;
    locate(p, f);
}

// Starts the copies of KEYS rows that lie anywhere: `at` is row r's in lane r, 0 for a row of zeros.
template <u32 W>
DEVICE void bring_lanes(u8* tile, u32 l, u64 at, u32 width, bool whole) {
    constexpr u32 CHUNKS = W / 8, TURNS = KEYS * CHUNKS / 32, SOME = 4;
    static_assert(TURNS % SOME == 0, "whole turns");
    if (whole) {
        NO_UNROLL
        for (u32 turn = 0; turn < TURNS; turn += SOME) {
            UNROLL
            for (u32 i = 0; i < SOME; i++) {
                const u32 n = (turn + i) * 32 + l, r = n / CHUNKS, chunk = n % CHUNKS;
                const u64 row = u64(shfl_idx(u32(at), r)) | u64(shfl_idx(u32(at >> 32), r)) << 32;
                bring(chunk_at<W>(tile, r, chunk), row, width, chunk);
            }
        }
    } else {
        NO_UNROLL
        for (u32 n = l; n < KEYS * CHUNKS; n += 32) {
            const u32 r = n / CHUNKS, chunk = n % CHUNKS;
            const u64 row = u64(shfl_idx(u32(at), r)) | u64(shfl_idx(u32(at >> 32), r)) << 32;
            bring_slowly(chunk_at<W>(tile, r, chunk), row, width, chunk);
        }
    }
}
// Starts the copies of the next keys and values, and closes their group; an empty one past the end.
DEVICE void fetch(const Attend& p, Fetch& f, u8* stage, bool whole) {
    if (f.index < f.end) {
        const u32 l = opaque(lane()), width = p.Dv - f.column;
        const i64 k_slot = p.k.stride[1] * 2, v_slot = p.v.stride[1] * 2;
        const i64 page = f.page, slot = f.slot;
        u64 k = f.k + u64(page * p.k.stride[0] * 2 + slot * k_slot);
        u64 v = f.v + u64(page * p.v.stride[0] * 2 + slot * v_slot);
        if (whole && f.together && u64(k_slot | v_slot) < 1u << 27) {
            UNROLL
            for (u32 first = 0; first < KEYS; first += 16) {
                u64 k_at = k, v_at = v;
                if (KEYS > 16) {
                    k_at = u64(shfl_idx(u32(k), first + l % 16)) | u64(shfl_idx(u32(k >> 32), first + l % 16)) << 32;
                    v_at = u64(shfl_idx(u32(v), first + l % 16)) | u64(shfl_idx(u32(v >> 32), first + l % 16)) << 32;
                }
                bring_rows<WIDTH>(stage, first, l, k_at - l % 16 * u32(k_slot), u32(k_slot), p.D);
                bring_rows<VALUES>(stage + K_BYTES, first, l, v_at - l % 16 * u32(v_slot), u32(v_slot), width);
            }
        } else {
            bring_lanes<WIDTH>(stage, l, f.seen ? k : 0, p.D, whole);
            bring_lanes<VALUES>(stage + K_BYTES, l, f.seen ? v : 0, width, whole);
        }
    }
    cp_async_commit();
}
