// What the Hopper's kernels over latents share: what a block works on, and the warpgroup that gathers latents into a ring of tiles.
//
// Every head reads the same latents, and a latent's first lanes are its value: a tile in shared memory is the keys of one product
// and the values of the other. Tiles lie at multiples of KEYS, so that what else a block works on changes no bit. Items of more
// than ROWS query vectors are cut into pieces, which read the same latents.
//
// Defines: Q_TYPE (1 bf16, 2 f16), ROWS (query vectors a block), DEPTH (lanes of a latent, padded to a multiple of 64), WIDTH
// (lanes of its value, padded to 128, 256 or 512), STAGES (tiles of the ring), PIECES (of the largest item, a multiple of those
// that one token's heads make).
#pragma once

#include "element.cuh"
#include "finish.cuh"
#include "gather.cuh"
#include "hopper.cuh"

constexpr u32 GROUP = 128, KEYS = 64;
// A tile in shared memory: blocks of 64 rows and 64 lanes, rows of 128 bytes whose 16-byte pieces are turned by the row.
constexpr u32 LANES = 64, PIECE = 8, BLOCK_BYTES = KEYS * LANES * 2;
constexpr u32 COLUMNS = (DEPTH > WIDTH ? DEPTH : WIDTH) / LANES;
constexpr u32 TILE_BYTES = COLUMNS * BLOCK_BYTES;
constexpr u32 EIGHT_ROWS = 8 * LANES * 2;
static_assert(DEPTH % LANES == 0 && (WIDTH == 128 || WIDTH == 256 || WIDTH == 512), "see above");

// The room of a tile is given back in shares of as many neighbouring rows, as soon as nobody needs them.
constexpr u32 SHARES = ROWS < 64 ? 1 : 4, SHARE_KEYS = KEYS / SHARES;

// Shared memory: queries, the ring, and what the consumers have beside them.
constexpr u32 QUERY_BLOCK_BYTES = ROWS * LANES * 2;
constexpr u32 RING_AT = DEPTH / LANES * QUERY_BLOCK_BYTES;
constexpr u32 AFTER_RING = RING_AT + STAGES * TILE_BYTES;
static_assert(RING_AT % 1024 == 0, "tiles start where turns of their rows do");

// What a block works on: up to ROWS query vectors of an item, and the keys that they see.
struct Unit {
    Row row;
    Output output;
    u32 row_index, q_begin, first;
    u32 lo, to;  // keys lo..to
    u32 hi, H;
    i64 before;  // keys that token 0 of the item sees under causality
    bool causal;
    bool over;   // there is no more to do

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
    // Pieces that every item has are neighbours, so that the second finds the latents of the first nearby; those that only
    // items of several tokens have come after all of them.
    const u32 sure = (p.H + ROWS - 1) / ROWS, units = (span.end - span.begin) * sure;
    NO_UNROLL
    for (u32 at = block_x(); at < units / sure * PIECES; at += grid_x()) {
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
        unit.causal = p.flags & CAUSAL, unit.over = false;
        // Query `i` of a row is at position kv_len - q_len + i.
        unit.before = i64(unit.row.kv_len) - i64(unit.row.q_len) + i64(item.q_begin) + 1;
        unit.to = unit.limit(least(unit.first + ROWS, unit.output.lanes) - 1);
        each(unit);
    }
}

// What groups of a block tell each other: marks of tiles, and of shares of their room; marks of a unit and its queries, and the
// unit, two in turn.
struct Told {
    Mark full[STAGES], empty[STAGES][SHARES], queries, queries_read;
    Unit units[2];
};

// Where a tile of the ring is, and which turn of the ring it belongs to.
struct Turn {
    u32 slot, parity;
    void next() {
        slot += 1;
        if (slot == STAGES) slot = 0, parity ^= 1;
    }
};

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

// What threads of the producer have: eight of them a row of 128 bytes, and every sixteenth row.
constexpr u32 TIMES = KEYS / (GROUP / PIECE), QUERY_TIMES = ROWS / (GROUP / PIECE);
static_assert(ROWS % (GROUP / PIECE) == 0, "rows for each thread");

// The pages that this thread's latents of a tile are in, asked for long before they are needed.
struct Lookup {
    i32 page[TIMES];
    u32 slot[TIMES];
};
constexpr i32 NOWHERE = -1;
DEVICE Lookup look_up(const Keys& keys, const Unit& unit, u32 tile) {
    Lookup found;
    UNROLL
    for (u32 i = 0; i < TIMES; i++) {
        const u32 key = tile * KEYS + thread_x() % GROUP / PIECE + i * (KEYS / TIMES);
        found.page[i] = NOWHERE, found.slot[i] = 0;
        if (key >= unit.lo && key < unit.to) {
            const u32 offset = key - keys.kv_offset, page = offset / keys.S;
            found.page[i] = keys.pages[page], found.slot[i] = offset - page * keys.S;
        }
    }
    return found;
}
// Where they lie; null for keys that nobody sees.
struct Latents {
    const Element* at[TIMES];
    const Element* somewhere;  // what may be named where nothing is read
};
DEVICE Latents latents_at(const Keys& keys, const Lookup& found) {
    Latents latents;
    latents.somewhere = reinterpret_cast<const Element*>(keys.k);
    UNROLL
    for (u32 i = 0; i < TIMES; i++) {
        const u64 at = keys.k + u64(i64(found.page[i]) * keys.k_page + i64(found.slot[i]) * keys.k_slot);
        latents.at[i] = found.page[i] == NOWHERE ? nullptr : reinterpret_cast<const Element*>(at);
    }
    return latents;
}
// This thread's pieces of its i-th latent of a tile, one after the other as they lie in memory. A latent as wide as the tile has none
// beyond it, and each copy is one instruction.
DEVICE void fetch(u8* to, const Latents& latents, u32 i, u32 D, bool aligned) {
    const u32 piece = thread_x() % PIECE;
    const Element* latent = latents.at[i];
    to += i * (BLOCK_BYTES / TIMES);
    if (aligned && D == COLUMNS * LANES) {
        const bool there = latent != nullptr;
        const Element* from = there ? latent + piece * PIECE : latents.somewhere;
        UNROLL
        for (u32 block = 0; block < COLUMNS; block++) cp_async_16(to + block * BLOCK_BYTES, from + block * LANES, there);
        return;
    }
    NO_UNROLL
    for (u32 block = 0; block < COLUMNS; block++)
        put(to + block * BLOCK_BYTES, latent, latent, block * LANES + piece * PIECE, D, D, aligned);
}

DEVICE void announce(Mark* mark, bool aligned) {
    if (aligned) {
        mark_arrive_after_copies(mark);
    } else {
        async_fence();
        mark_arrive(mark);
    }
}

DEVICE void produce(const Attend& p, u8* shared, Told& told) {
    const u32 thread = thread_x() % GROUP, C = p.Dv, D = p.D;
    const bool aligned = (p.flags & ALIGNED) && C % 8 == 0 && D % 8 == 0;
    const u32 row = thread / PIECE, piece = thread % PIECE;
    const u32 at = row * LANES * 2 + (piece ^ (row % 8)) * 16;
    Turn turn{0, 0};
    u32 count = 0;
    auto tell = [&](const Unit& unit) {
        mark_wait(&told.queries_read, count % 2 ^ 1);
        // Copies arrive by themselves, which says nothing of what was stored: that has an arrival of its own.
        if (thread == 0) {
            told.units[count % 2] = unit;
            mark_arrive(&told.queries);
        }
    };
    auto fetch_queries = [&](const Unit& unit) {
        const Queries queries = queries_of<LATENTS>(p, unit.row, unit.q_begin, 0, sizeof(Element));
        const Element *nope[QUERY_TIMES], *pe[QUERY_TIMES];
        UNROLL
        for (u32 i = 0; i < QUERY_TIMES; i++) {
            const u32 lane = unit.first + row + i * (ROWS / QUERY_TIMES);
            nope[i] = pe[i] = nullptr;
            if (lane < unit.output.lanes) {
                const i64 token = lane / p.H, head = lane % p.H;
                nope[i] = reinterpret_cast<const Element*>(queries.at) + token * queries.token + head * queries.head;
                pe[i] = reinterpret_cast<const Element*>(queries.pe_at) + token * queries.pe_token + head * queries.pe_head;
            }
        }
        if (aligned && C == WIDTH && D == DEPTH) {
            UNROLL
            for (u32 i = 0; i < QUERY_TIMES; i++) {
                const bool there = nope[i] != nullptr;
                const Element* from = there ? nope[i] + piece * PIECE : reinterpret_cast<const Element*>(p.q.at);
                const Element* pe_from = there ? pe[i] + piece * PIECE : from;
                UNROLL
                for (u32 block = 0; block < DEPTH / LANES; block++)
                    cp_async_16(shared + block * QUERY_BLOCK_BYTES + i * (QUERY_BLOCK_BYTES / QUERY_TIMES) + at,
                                block < WIDTH / LANES ? from + block * LANES : pe_from + (block * LANES - WIDTH), there);
            }
            return;
        }
        NO_UNROLL
        for (u32 block = 0; block < DEPTH / LANES; block++)
            UNROLL
            for (u32 i = 0; i < QUERY_TIMES; i++)
                put(shared + block * QUERY_BLOCK_BYTES + i * (QUERY_BLOCK_BYTES / QUERY_TIMES) + at, nope[i], pe[i],
                    block * LANES + piece * PIECE, C, D, aligned);
    };
    walk(p, [&](const Unit& unit) {
        const Keys keys = keys_of<LATENTS>(p, unit.row_index, unit.row, 0, sizeof(Element));
        const u32 begin = unit.tile(), end = unit.tiles();
        Lookup next = look_up(keys, unit, begin);
        // The first tile goes ahead: the queries' place is free later than a tile's.
        u32 tile = begin;
        NO_UNROLL
        do {
            if (tile < end) {
                const Latents latents = latents_at(keys, next);
                next = look_up(keys, unit, tile + 1);
                UNROLL
                for (u32 i = 0; i < TIMES; i++) {
                    if (i % (TIMES / SHARES) == 0) mark_wait(&told.empty[turn.slot][i / (TIMES / SHARES)], turn.parity ^ 1);
                    fetch(shared + RING_AT + turn.slot * TILE_BYTES + at, latents, i, D, aligned);
                }
                announce(&told.full[turn.slot], aligned);
                turn.next();
            }
            if (tile == begin) {
                tell(unit);
                if (begin < end) fetch_queries(unit);
                announce(&told.queries, aligned);
                count += 1;
            }
            tile += 1;
        } while (tile < end);
    });
    Unit last{};
    last.over = true;
    tell(last);
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

// Calls `each(unit)` for what the producer tells of; in the order in which it does.
template <class Each>
DEVICE void each_told(Told& told, Each each) {
    NO_UNROLL
    for (u32 count = 0;; count++) {
        mark_wait(&told.queries, count % 2);
        const Unit& unit = told.units[count % 2];
        if (unit.over) break;
        each(unit);
    }
}

// By all threads of a block, before any of them works; so many warps read tiles and queries.
DEVICE void start(Told& told, u32 warps) {
    if (thread_x() == 0) {
        UNROLL
        for (u32 slot = 0; slot < STAGES; slot++) {
            mark_init(&told.full[slot], GROUP);
            UNROLL
            for (u32 share = 0; share < SHARES; share++) mark_init(&told.empty[slot][share], warps);
        }
        mark_init(&told.queries, GROUP + 1);
        mark_init(&told.queries_read, warps);
        marks_ready();
    }
    block_sync();
}
