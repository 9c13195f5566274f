// A ring of tiles that decode.cu keeps in flight by cp.async, over the borders of leaves and items too, so that it never drains. Page ids
// are asked for a tile before they are needed.
//
// Defines: those of decode.cu.
#pragma once

#include "codes.cuh"
#include "task.cuh"

constexpr u32 THREADS = 128;
#ifndef CODES
#define CODES 0
#endif
static_assert(!CODES || KV_TYPE == 1, "what codes are served for");
// A tile as products read it; in the ring; beside the ring, of codes a tile as products read it, and a scale for each key and value of
// the ring.
constexpr u32 SIZE = CODES ? 1 : 2, K_BYTES = 64 * WIDTH * 2, V_BYTES = 64 * VALUES * 2;
constexpr u32 STAGE = (K_BYTES + V_BYTES) / 2 * SIZE, SCALES_AT = STAGES * STAGE + K_BYTES + V_BYTES;
constexpr u32 RING_BYTES = CODES ? SCALES_AT + STAGES * 2 * 64 * 4 : STAGES * STAGE;

// The side of a block that fetches: which tile is next, and where this lane's key in it lies (of the warp's 16, key lane % 16).
struct Fetch {
    u32 index, end, from, column;
    u32 lo, hi, tile, tile_end;
    u64 k, v;            // the head's share in page 0
    u32 at, slot;        // where the list has the page of the key, and its slot there
    u32 step_pages, step_slots;  // from a tile to the next
    i32 page;            // its id
    bool masked, even;   // whether a mask decides; whether pages hold 16 neighbours from a multiple of 16 on
    bool seen, together; // whether the key is; whether all of the warp's are, and lie in one page
};
// Asks where this lane's key of the tile lies.
DEVICE void locate(const Attend& p, Fetch& f) {
    u32 base = f.tile * 64, key = base + 16 * warp() + (lane() & 15);
    f.seen = f.together = false;
    if (f.index >= f.end) return;
    f.seen = key >= f.lo && key < f.hi;
    if (f.masked) {
        // A key that the mask hides from every query is not read: its value may be anything.
        const u64 bits = seen_bits(p, task_of(p, f.index), base);
        f.seen = f.seen && (bits >> (key - base) & 1);
    }
    f.together = f.even && warp_all(f.seen);
    if (f.seen) f.page = pages_of(p.image)[f.at];
}
// Begins a part of an item: its first tile.
DEVICE void begin(const Attend& p, Fetch& f, const Task& task) {
    const u32 offset_of = task.kv_offset;
    f.lo = task.lo, f.hi = task.hi, f.masked = task.mask_words != 0;
    f.even = ((p.S | offset_of) & 15) == 0;
    f.k = p.k.at + u64(i64(task.head) * p.k.stride[2] * SIZE);
    f.v = p.v.at + u64((i64(task.head) * p.v.stride[2] + f.column) * SIZE);
    f.tile = f.lo / 64, f.tile_end = (f.hi + 63) / 64;
    // A tile may begin before the first page does.
    u32 key = f.tile * 64 + 16 * warp() + (lane() & 15);
    u32 before = key < offset_of ? (offset_of - key + p.S - 1) / p.S : 0;
    u32 offset = key + before * p.S - offset_of;
    f.at = task.page_begin + offset / p.S - before, f.slot = offset % p.S;
    locate(p, f);
}
// Goes to the next tile that there is, if any.
DEVICE void settle(const Attend& p, Fetch& f) {
    f.tile++;
    if (f.tile < f.tile_end) {
        f.at += f.step_pages, f.slot += f.step_slots;
        if (f.slot >= p.S) f.slot -= p.S, f.at++;
        locate(p, f);
        return;
    }
    if (next_part<ROWS, VALUES>(p, task_of(p, f.index).q_count, f.from, f.column)) f.index += grid_x();
    if (f.index >= f.end) return;
    begin(p, f, task_of(p, f.index));
    prefetch_l2(&task_of(p, least(f.index + grid_x(), f.end - 1)));
}

// Starts the copies of 16 rows that lie anywhere: `at` is row r's in lane r, 0 for a row of zeros.
template <u32 W>
DEVICE void bring_lanes(u8* tile, u32 first, u32 l, u64 at, u32 width, bool whole) {
    constexpr u32 CHUNKS = W / 8;
    if (whole) {
        UNROLL
        for (u32 i = 0; i < 16 * CHUNKS / 32; i++) {
            u32 n = i * 32 + l, r = n / CHUNKS, chunk = n % CHUNKS;
            u64 row = u64(shfl_idx(u32(at), r)) | u64(shfl_idx(u32(at >> 32), r)) << 32;
            bring(chunk_at<W>(tile, first + r, chunk), row, width, chunk);
        }
    } else {
        NO_UNROLL
        for (u32 n = l; n < 16 * CHUNKS; n += 32) {
            u32 r = n / CHUNKS, chunk = n % CHUNKS;
            u64 row = u64(shfl_idx(u32(at), r)) | u64(shfl_idx(u32(at >> 32), r)) << 32;
            bring_slowly(chunk_at<W>(tile, first + r, chunk), row, width, chunk);
        }
    }
}
// The same of codes, which keep the order that they have: rows of W bytes.
template <u32 W>
DEVICE void bring_codes(u8* rows, u32 first, u32 l, u64 at, u32 width, bool whole) {
    constexpr u32 CHUNKS = W / 16;
    NO_UNROLL
    for (u32 n = l; n < 16 * CHUNKS; n += 32) {
        const u32 r = n / CHUNKS, from = n % CHUNKS * 16;
        const u64 row = u64(shfl_idx(u32(at), r)) | u64(shfl_idx(u32(at >> 32), r)) << 32;
        u8* to = rows + (first + r) * W + from;
        if (whole) {
            cp_async_16(to, reinterpret_cast<const void*>(row + from), row != 0 && from < width);
        } else {
            NO_UNROLL
            for (u32 i = 0; i < 16; i++) to[i] = row != 0 && from + i < width ? reinterpret_cast<const u8*>(row)[from + i] : u8(0);
        }
    }
}
// Makes a warp's 16 rows of a tile of them.
template <u32 W>
DEVICE void widen_rows(u8* to, const u8* rows, u32 first, u32 l) {
    constexpr u32 CHUNKS = W / 16;
    UNROLL
    for (u32 i = 0; i < 16 * CHUNKS / 32; i++) {
        const u32 n = i * 32 + l, r = first + n / CHUNKS, chunk = n % CHUNKS, turned = chunk / 4 % 2;
        // Half of the lanes write their second piece first, so that none meets another in a bank.
        const Widened wide = widened(load16(rows + r * W + chunk * 16), turned);
        store16(chunk_at<W>(to, r, 2 * chunk + turned), wide.first);
        store16(chunk_at<W>(to, r, 2 * chunk + 1 - turned), wide.second);
    }
}
// Starts the copy of a scale for each of the warp's 16 keys, or 1 where nothing is seen; half of the lanes those of keys.
DEVICE void bring_scales(const Attend& p, const Fetch& f, float* scales) {
    const View& from = lane() < 16 ? p.k_scales : p.v_scales;
    float* to = scales + (lane() < 16 ? 0 : 64) + warp() * 16 + lane() % 16;
    if (!f.seen) {
        *to = 1.0f;
        return;
    }
    const i64 head = task_of(p, f.index).head;
    cp_async_4(to, reinterpret_cast<const float*>(from.at) + i64(f.page) * from.stride[0] + i64(f.slot) * from.stride[1] + head * from.stride[2]);
}

// Starts the copies of this warp's 16 keys and values of the next tile, and closes their group; an empty one past the end.
DEVICE void fetch(const Attend& p, Fetch& f, u8* stage, float* scales, bool whole) {
    if (f.index < f.end) {
        const u32 thread = opaque(thread_x()), l = thread % 32, first = thread / 32 * 16;
        const u32 width = p.Dv - f.column, r = l % 16;
        const i64 k_slot = p.k.stride[1] * SIZE, v_slot = p.v.stride[1] * SIZE;
        const i64 page = f.page, slot = f.slot;
        u64 k = f.k + u64(page * p.k.stride[0] * SIZE + slot * k_slot);
        u64 v = f.v + u64(page * p.v.stride[0] * SIZE + slot * v_slot);
        if (CODES) {
            bring_codes<WIDTH>(stage, first, l, f.seen ? k : 0, p.D, whole);
            bring_codes<VALUES>(stage + STAGE / (WIDTH + VALUES) * WIDTH, first, l, f.seen ? v : 0, width, whole);
            bring_scales(p, f, scales);
        } else if (whole && f.together && u64(k_slot | v_slot) < 1u << 27) {
            bring_rows<WIDTH>(stage, first, l, k - r * u32(k_slot), u32(k_slot), p.D);
            bring_rows<VALUES>(stage + K_BYTES, first, l, v - r * u32(v_slot), u32(v_slot), width);
        } else {
            bring_lanes<WIDTH>(stage, first, l, f.seen ? k : 0, p.D, whole);
            bring_lanes<VALUES>(stage + K_BYTES, first, l, f.seen ? v : 0, width, whole);
        }
        settle(p, f);
    }
    cp_async_commit();
}

// The scales of a tile of the ring: of 64 keys, then of 64 values.
DEVICE float* scales_of(u8* memory, u32 slot) { return reinterpret_cast<float*>(memory + (CODES ? SCALES_AT : 0)) + slot * 128; }
