// The warpgroup that gathers latents into a ring of tiles, for the Hopper's kernels over latents as they lie.
//
// Every head reads the same latents, and a latent's first lanes are its value: a tile in shared memory is the keys of one product
// and the values of the other.
//
// Defines: those of latent_unit.cuh; Q_TYPE (1 bf16, 2 f16), DEPTH (lanes of a latent, padded to a multiple of 64), WIDTH (lanes of its
// value, padded to 128, 256 or 512); BOXES (0 or not given: latents come by copies of 16 bytes; 1: a tile that lies whole in a page and is
// seen whole comes as boxes of 64 columns, each with marks of its own); CLUSTER (not given: 1; 2, with BOXES: neighbouring blocks, which work
// on query vectors of the same tokens, each ask for every other box, and have both get it).
#pragma once

#include "cluster.cuh"
#include "element.cuh"

constexpr u32 KEYS = 64;
#include "latent_unit.cuh"

#ifndef BOXES
#define BOXES 0
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
static_assert(CLUSTER == 1 || (CLUSTER == 2 && BOXES), "boxes are shared, and so is their room");

// Blocks of columns of a tile, and those that are values.
constexpr u32 COLUMNS = (DEPTH > WIDTH ? DEPTH : WIDTH) / LANES, VALUES = WIDTH / LANES;
constexpr u32 TILE_BYTES = COLUMNS * BLOCK_BYTES;
static_assert(DEPTH % LANES == 0 && (WIDTH == 128 || WIDTH == 256 || WIDTH == 512), "see above");

// A tile comes as a whole, or block by block; its room is given back in shares of as many neighbouring rows, or block by block, as soon
// as nobody needs them.
constexpr u32 FULLS = BOXES ? COLUMNS : 1, SHARES = BOXES ? COLUMNS : ROWS < 64 ? 1 : 4;

// The order in which scores are summed over a tile's blocks, and blocks come: what is no value first, whose room is free first, then the
// left half, then the right one, as their values are multiplied.
DEVICE constexpr u32 column_at(u32 i) { return (i + VALUES) % COLUMNS; }

// Shared memory: queries, the ring, and what the consumers have beside them.
constexpr u32 QUERY_BLOCK_BYTES = ROWS * LANES * 2;
constexpr u32 RING_AT = DEPTH / LANES * QUERY_BLOCK_BYTES;
constexpr u32 AFTER_RING = RING_AT + STAGES * TILE_BYTES;
static_assert(RING_AT % 1024 == 0, "tiles start where turns of their rows do");

// The parameter where BOXES is 1.
struct AttendMapped {
    Attend attend;
    u64 reserved[5];
    TensorMap map;
};
static_assert(sizeof(AttendMapped) == 704, "as in exec/params.rs");

// What groups of a block tell each other: marks of tiles or their blocks, and of shares of their room; marks of a unit and its queries,
// and the unit, two in turn.
struct Told {
    Mark full[STAGES][FULLS], empty[STAGES][SHARES], queries, queries_read;
    Unit units[2];
};

// One arrival of a warp that needs the room of a tile or a block no more: at the mark of each block that may ask for something there.
DEVICE void room(Mark* mark) {
    if (CLUSTER == 1) return released(mark);
    warp_sync();
    if (lane() < CLUSTER) remote_arrive(remote_of(mark, lane()));
}

// ---- producer ----

// What threads of the producer have: eight of them a row of 128 bytes, and every sixteenth row.
constexpr u32 TIMES = KEYS / (GROUP / PIECE), QUERY_TIMES = ROWS / (GROUP / PIECE);
constexpr u32 SHARE_TIMES = TIMES >= SHARES ? TIMES / SHARES : 1;
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

// This thread's pieces of the queries whose lanes lie at `nope` and `pe`, null for rows of zeros. Each copy is one instruction where a
// query is as wide as a tile.
DEVICE void put_queries(const Attend& p, u8* to, const Element* const (&nope)[QUERY_TIMES], const Element* const (&pe)[QUERY_TIMES],
                        bool aligned) {
    const u32 piece = thread_x() % PIECE, C = p.Dv, D = p.D;
    if (aligned && C == WIDTH && D == DEPTH) {
        UNROLL
        for (u32 i = 0; i < QUERY_TIMES; i++) {
            const bool there = nope[i] != nullptr;
            const Element* from = there ? nope[i] + piece * PIECE : reinterpret_cast<const Element*>(p.q.at);
            const Element* pe_from = there ? pe[i] + piece * PIECE : from;
            UNROLL
            for (u32 block = 0; block < DEPTH / LANES; block++)
                cp_async_16(to + block * QUERY_BLOCK_BYTES + i * (QUERY_BLOCK_BYTES / QUERY_TIMES),
                            block < WIDTH / LANES ? from + block * LANES : pe_from + (block * LANES - WIDTH), there);
        }
        return;
    }
    NO_UNROLL
    for (u32 block = 0; block < DEPTH / LANES; block++)
        UNROLL
        for (u32 i = 0; i < QUERY_TIMES; i++)
            put(to + block * QUERY_BLOCK_BYTES + i * (QUERY_BLOCK_BYTES / QUERY_TIMES), nope[i], pe[i],
                block * LANES + piece * PIECE, C, D, aligned);
}

// Where a tile that is boxes starts; `whole` is false for one that has to be gathered.
struct Spot {
    i32 page;
    u32 slot;
    bool whole;
};
DEVICE Spot spot_of(const Attend& p, const Keys& keys, const Unit& unit, u32 tile) {
    const u32 key = tile * KEYS;
    Spot spot{NOWHERE, 0, false};
    if ((p.flags & MAPPED) && key >= unit.lo && key + KEYS <= unit.to) {
        const u32 offset = key - keys.kv_offset, page = offset / keys.S;
        spot.slot = offset - page * keys.S;
        spot.whole = spot.slot + KEYS <= keys.S;
        spot.page = keys.pages[page];
    }
    return spot;
}
// Asks for the blocks of a tile, by one warp, each as soon as there is room; in a cluster, where both have it, and each for every other one.
// Both expect them all: by then the last turn's have come to both.
DEVICE void ask_boxes(const TensorMap& map, u8* tile, const Spot& spot, Told& told, const Turn& turn, u32 rank) {
    UNROLL
    for (u32 i = 0; i < COLUMNS; i++) {
        const u32 column = column_at(i);
        Mark* full = &told.full[turn.slot][column % FULLS];
        u8* to = tile + column * BLOCK_BYTES;
        mark_wait(&told.empty[turn.slot][column % SHARES], turn.parity ^ 1);
        if (elected()) {
            mark_arrive_expecting(full, BLOCK_BYTES);
            if (CLUSTER == 1) {
                box_3d(to, map, i32(column * LANES), i32(spot.slot), spot.page, full);
            } else if ((i + turn.slot) % CLUSTER == rank) {
                box_3d_to((1 << CLUSTER) - 1, to, map, i32(column * LANES), i32(spot.slot), spot.page, full);
            }
        }
    }
}
// The barrier around a tile that the whole group gathers.
constexpr u32 GATHERED = 1;

// `map` of the latents [pages, slots, lanes] where BOXES is 1, in boxes of 64 slots and 64 lanes, and flags have MAPPED where there is one.
DEVICE void produce(const Attend& p, const TensorMap* map, u8* shared, Told& told) {
    const u32 thread = thread_x() % GROUP, C = p.Dv, D = p.D;
    const bool aligned = (p.flags & ALIGNED) && C % 8 == 0 && D % 8 == 0;
    const u32 row = thread / PIECE, piece = thread % PIECE;
    const u32 at = row * LANES * 2 + (piece ^ (row % 8)) * 16;
    // The warp that asks for boxes, known to be a whole one.
    const bool asks = shfl_idx(thread / 32, 0) == 0;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    Turn turn{0, 0};
    u32 count = 0;
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
        put_queries(p, shared + at, nope, pe, aligned);
    };
    // A tile that is no boxes: an end of what is seen, or what lies in several pages. Threads that had nothing to do with boxes come from
    // where they were.
    auto gather = [&](const Keys& keys, const Unit& unit, u32 tile, u8* to) {
        const Latents latents = latents_at(keys, look_up(keys, unit, tile));
        if (asks) {
            UNROLL
            for (u32 share = 0; share < SHARES; share++) mark_wait(&told.empty[turn.slot][share], turn.parity ^ 1);
        }
        named_sync(GATHERED, GROUP);
        UNROLL
        for (u32 i = 0; i < TIMES; i++) fetch(to + at, latents, i, D, aligned);
        cp_async_commit();
        cp_async_wait<0>();
        async_fence();
        named_sync(GATHERED, GROUP);
        if (thread < FULLS) mark_arrive(&told.full[turn.slot][thread]);
    };
    walk(p, [&](const Unit& unit) {
        const Keys keys = keys_of<LATENTS>(p, unit.row_index, unit.row, 0, sizeof(Element));
        const u32 begin = unit.tile(), end = unit.tiles();
        Lookup next;
        Spot spot;
        if (BOXES) spot = spot_of(p, keys, unit, begin);
        else next = look_up(keys, unit, begin);
        // The first tile goes ahead: the queries' place is free later than a tile's.
        u32 tile = begin;
        NO_UNROLL
        do {
            if (tile < end) {
                u8* to = shared + RING_AT + turn.slot * TILE_BYTES;
                if (BOXES) {
                    const Spot here = spot;
                    spot = spot_of(p, keys, unit, tile + 1);
                    if (here.whole) {
                        if (asks) ask_boxes(*map, to, here, told, turn, rank);
                    } else {
                        gather(keys, unit, tile, to);
                    }
                } else {
                    const Latents latents = latents_at(keys, next);
                    next = look_up(keys, unit, tile + 1);
                    UNROLL
                    for (u32 i = 0; i < TIMES; i++) {
                        if (i % SHARE_TIMES == 0) mark_wait(&told.empty[turn.slot][i / SHARE_TIMES % SHARES], turn.parity ^ 1);
                        fetch(to + at, latents, i, D, aligned);
                    }
                    announce(&told.full[turn.slot][0], aligned);
                }
                turn.next();
            }
            if (tile == begin) {
                tell(told, unit, count, thread);
                if (begin < end) fetch_queries(unit);
                announce(&told.queries, aligned);
                count += 1;
            }
            tile += 1;
        } while (tile < end);
    });
    tell_end(told, count, thread, aligned);
}

// ---- consumers ----

// By all threads of a block, before any of them works; so many warps read tiles and queries.
DEVICE void start(Told& told, u32 warps) {
    if (thread_x() == 0) {
        UNROLL
        for (u32 slot = 0; slot < STAGES; slot++) {
            UNROLL
            for (u32 i = 0; i < FULLS; i++) mark_init(&told.full[slot][i], BOXES ? 1 : GROUP);
            // Of boxes each group gives back its own.
            UNROLL
            for (u32 share = 0; share < SHARES; share++) mark_init(&told.empty[slot][share], (BOXES ? warps / 2 : warps) * CLUSTER);
        }
        mark_init(&told.queries, GROUP + 1);
        mark_init(&told.queries_read, warps);
        marks_ready();
    }
    if (CLUSTER > 1) cluster_sync();
    else block_sync();
}
