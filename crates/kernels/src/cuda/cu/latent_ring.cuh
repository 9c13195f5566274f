// The warpgroup that gathers latents into a ring of tiles, for the Hopper's kernels over latents as they lie.
//
// Every head reads the same latents, and a latent's first lanes are its value: a tile in shared memory is the keys of one product
// and the values of the other.
//
// Defines: those of latent_unit.cuh; Q_TYPE (1 bf16, 2 f16), DEPTH (lanes of a latent, padded to a multiple of 64), WIDTH (lanes of its
// value, padded to 128, 256 or 512).
#pragma once

#include "element.cuh"
#include "latent_unit.cuh"

constexpr u32 COLUMNS = (DEPTH > WIDTH ? DEPTH : WIDTH) / LANES;
constexpr u32 TILE_BYTES = COLUMNS * BLOCK_BYTES;
static_assert(DEPTH % LANES == 0 && (WIDTH == 128 || WIDTH == 256 || WIDTH == 512), "see above");

// The room of a tile is given back in shares of as many neighbouring rows, as soon as nobody needs them.
constexpr u32 SHARES = ROWS < 64 ? 1 : 4, SHARE_KEYS = KEYS / SHARES;

// Shared memory: queries, the ring, and what the consumers have beside them.
constexpr u32 QUERY_BLOCK_BYTES = ROWS * LANES * 2;
constexpr u32 RING_AT = DEPTH / LANES * QUERY_BLOCK_BYTES;
constexpr u32 AFTER_RING = RING_AT + STAGES * TILE_BYTES;
static_assert(RING_AT % 1024 == 0, "tiles start where turns of their rows do");

// What groups of a block tell each other: marks of tiles, and of shares of their room; marks of a unit and its queries, and the
// unit, two in turn.
struct Told {
    Mark full[STAGES], empty[STAGES][SHARES], queries, queries_read;
    Unit units[2];
};

// ---- producer ----

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
        put_queries(p, shared + at, nope, pe, aligned);
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
