// Where latent_few.cu's block has what, the tasks that it works on, and the group that gathers their tiles of latents and their queries.
//
// A tile has two parts: the lanes that are its values, and those behind them, which the first product alone reads: of these there is
// one less, and the weights lie where they were. So three tiles fit where a latent has 576 lanes: one that is summed, and two that
// are under way.
//
// Defines: those of latent_few.cu.
#pragma once

#include "latent_ring.cuh"
#include "turned.cuh"

constexpr u32 THREADS = 3 * GROUP;
static_assert(ROWS == 16 || ROWS == 32, "columns of a product");
// Registers of threads, of which a block has 168 each when it begins: groups that ask for more in all wait for ever.
constexpr u32 PRODUCER = 104, CONSUMER = 200;
static_assert(PRODUCER + 2 * CONSUMER <= 3 * 168, "see above");
// Most leaves of an item, as a power of two; paged/family.rs has the same.
constexpr u32 HEIGHT = ROWS == 16 ? 5 : 0;
// Heights whose nodes wait in registers; paged/family.rs has the same.
constexpr u32 AT_HAND = HEIGHT < 3 ? HEIGHT : 3;
// Blocks of 64 columns of the result, and those of a group.
constexpr u32 PARTS = WIDTH / LANES, HALF = PARTS / 2;
// Blocks of a tile behind its values, and how many tiles have them at once.
constexpr u32 REST = COLUMNS - PARTS, RESTS = STAGES == 2 ? 2 : STAGES - 1;

// Shared memory: queries, values, what is behind them, weights (ROWS rows of 64 keys, two turns) where nothing is, what warps tell each
// other of each query vector, and what the first group tells the second, each in two turns, so that nobody waits for readers.
constexpr u32 VALUE_BYTES = PARTS * BLOCK_BYTES, REST_BYTES = REST * BLOCK_BYTES, WEIGHT_BYTES = ROWS * KEYS * 2;
constexpr u32 REST_AT = RING_AT + STAGES * VALUE_BYTES;
constexpr u32 WEIGHTS_AT = REST_AT + RESTS * REST_BYTES;
constexpr u32 EXCHANGE_AT = WEIGHTS_AT + (REST ? 0 : 2 * WEIGHT_BYTES);
constexpr u32 FACTORS_AT = EXCHANGE_AT + 2 * EXCHANGED * 4;
constexpr u32 TOLD_FROM = FACTORS_AT + 2 * 2 * ROWS * 4;

// What a block works on: an item's query vectors from `first` on, which lies where a task has its key head: latents have one.
struct Work {
    Task task;

    u32 first() const { return task.head; }
};
// What groups tell each other: marks of tiles; marks of an item and its queries; what the first hands to the second is there, and may be
// written over, two in turn; and the item, two in turn. But for tiles every thread arrives: what one lane's arrival says of its warp, a
// race checker does not follow.
struct FewTold {
    Mark full[STAGES], empty[STAGES], queries, queries_read, there[2], free[2];
    Work works[2];
};
constexpr u32 SHARED_BYTES = TOLD_FROM + sizeof(FewTold);
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");
static_assert(sizeof(Work) == 80 && TOLD_FROM % 16 == 0, "as in exec/latents.rs");

// What groups find out of an item.
struct Share {
    u32 lo, to;   // keys lo..to are seen by some query vector of the block
    u32 hi, H;
    i64 before;   // keys that token 0 of the item sees under causality
    u32 lanes;    // query vectors of the item
    bool causal;

    // One past the last key that a lane of the item sees.
    u32 limit(u32 lane) const { return causal ? u32(least(most(before + i64(lane / H), i64(0)), i64(hi))) : hi; }
    u32 tile() const { return lo / KEYS; }
    u32 tiles() const { return lo < to ? (to + KEYS - 1) / KEYS : lo / KEYS; }
};

DEVICE Share share_of(const Attend& p, const Work& work) {
    const Task& task = work.task;
    Share share;
    share.lo = task.lo, share.hi = task.hi, share.H = p.H, share.lanes = task.q_count * p.H;
    // Query `i` of a row is at position kv_len - q_len + i.
    share.before = task.first + 1, share.causal = p.flags & CAUSAL;
    share.to = share.lanes ? share.limit(least(work.first() + ROWS, share.lanes) - 1) : task.lo;
    return share;
}
// Where an item's unfinished state goes; null where it writes the results.
DEVICE float* state_of(const Attend& p, const Task& task) {
    if (task.leaf_first >> task.level == (task.leaf_end - 1) >> task.level) return nullptr;
    const u32 leaf = most(task.lo / task.leaf_keys >> task.level << task.level, task.leaf_first);
    return p.partials + task.state + u64(leaf - task.leaf_first) * state_len(task.q_count * p.H, p.Dv);
}

// Calls `each(work, next, settled)` for what this block is to do. A task is read while the one before it is worked on: `next` is what
// comes then once `each` has asked, as it does once, whether it is there.
template <class Each>
DEVICE void walk_tasks(const Attend& p, Each each) {
    const Task* tasks = tasks_of(p.image);
    // The image has room for a task a block: what is read before it is known whether there is one is of no consequence.
    Work next{tasks[block_x()]};
    next.task.head = 0;
    const u32 count = p.image->few, pieces = least((p.image->lanes + ROWS - 1) / ROWS, u32(PIECES));
    // A piece of every item, then those that only items of several tokens have.
    const u32 units = count * pieces;
    u32 at = block_x();
    auto take = [&]() { next.task = tasks[at % count], next.task.head = at / count * ROWS; };
    if (at >= count && at < units) take();
    // Past what is not there: pieces that an item does not have, and items of picks that nobody has.
    auto skip = [&]() {
        NO_UNROLL
        while (at < units && next.first() >= next.task.q_count * p.H) {
            at += grid_x();
            if (at < units) take();
        }
    };
    skip();
    NO_UNROLL
    while (at < units) {
        const Work work = next;
        at += grid_x();
        if (at < units) take();
        each(work, next, [&]() {
            skip();
            return at < units;
        });
    }
}

// ---- producer ----

// Page ids of this thread's latents of a tile: they are asked for a tile before they are needed.
struct Ids {
    i32 page[TIMES];
};
// Where an item's latents are looked up.
struct Book {
    const i32* pages;
    u32 lo, to, kv_offset;
    bool whole;  // a tile lies in one page
};
DEVICE Book book_of(const Attend& p, const Work& work) {
    const Share share = share_of(p, work);
    const Task& task = work.task;
    return Book{pages_of(p.image) + task.page_begin, share.lo, share.to, task.kv_offset,
                p.S % KEYS == 0 && task.kv_offset % KEYS == 0};
}
DEVICE u32 my_key(u32 tile, u32 i) { return tile * KEYS + thread_x() % GROUP / PIECE + i * (KEYS / TIMES); }
DEVICE Ids ids_of(const Attend& p, const Book& book, u32 tile) {
    Ids ids{};
    if (book.whole) {
        i32 page = 0;
        if (tile * KEYS < book.to) page = book.pages[(tile * KEYS - book.kv_offset) / p.S];
        UNROLL
        for (u32 i = 0; i < TIMES; i++) ids.page[i] = page;
        return ids;
    }
    UNROLL
    for (u32 i = 0; i < TIMES; i++) {
        const u32 key = my_key(tile, i);
        if (key >= book.lo && key < book.to) ids.page[i] = book.pages[(key - book.kv_offset) / p.S];
    }
    return ids;
}
// Where they lie; null for keys that nobody sees.
DEVICE Latents places_of(const Attend& p, const Book& book, u32 tile, const Ids& ids) {
    Latents latents;
    latents.somewhere = reinterpret_cast<const Element*>(p.k.at);
    const u32 whole_slot = book.whole ? (tile * KEYS - book.kv_offset) % p.S : 0;
    UNROLL
    for (u32 i = 0; i < TIMES; i++) {
        const u32 key = my_key(tile, i);
        const u32 slot = book.whole ? whole_slot + (key - tile * KEYS) : (key - book.kv_offset) % p.S;
        const bool seen = key >= book.lo && key < book.to;
        const i64 at = i64(ids.page[i]) * p.k.stride[0] + i64(slot) * p.k.stride[1];
        latents.at[i] = seen ? latents.somewhere + at : nullptr;
    }
    return latents;
}
// What a loop that is not unrolled takes from registers.
template <u32 N>
DEVICE const Element* one_of(const Element* const (&of)[N], u32 i) {
    const Element* one = of[0];
    UNROLL
    for (u32 k = 1; k < N; k++)
        if (i == k) one = of[k];
    return one;
}
// This thread's pieces of blocks of a tile, from block BEGIN to END. Each copy is one instruction where a latent is as wide as the tile.
template <u32 BEGIN, u32 END>
DEVICE void fetch_blocks(u8* to, const Latents& latents, u32 D, bool aligned) {
    const u32 piece = thread_x() % PIECE;
    if (aligned && D == COLUMNS * LANES) {
        // Row by row: neighbours in memory are asked for together.
        UNROLL
        for (u32 i = 0; i < TIMES; i++) {
            const bool there = latents.at[i] != nullptr;
            const Element* from = there ? latents.at[i] + piece * PIECE : latents.somewhere;
            UNROLL
            for (u32 block = BEGIN; block < END; block++)
                cp_async_16(to + (block - BEGIN) * BLOCK_BYTES + i * (BLOCK_BYTES / TIMES), from + block * LANES, there);
        }
        return;
    }
    NO_UNROLL
    for (u32 block = BEGIN; block < END; block++)
        NO_UNROLL
        for (u32 i = 0; i < TIMES; i++) {
            const Element* from = one_of(latents.at, i);
            put(to + (block - BEGIN) * BLOCK_BYTES + i * (BLOCK_BYTES / TIMES), from, from, block * LANES + piece * PIECE, D, D, aligned);
        }
}

// Whether rows of blocks share out a group's threads evenly, which `fetch_in_line` takes them to.
constexpr bool IN_LINE = (PARTS & (PARTS - 1)) == 0 && (REST & (REST - 1)) == 0;

// Blocks BEGIN to END of a tile whose latents follow each other in memory, and are as wide as it: neighbours in memory are asked for together,
// each copy being one instruction.
template <u32 BEGIN, u32 END>
DEVICE void fetch_in_line(u8* to, const Element* latents) {
    constexpr u32 BLOCKS = END > BEGIN ? END - BEGIN : 1, AT_ONCE = GROUP / (BLOCKS * PIECE);
    const u32 thread = thread_x() % GROUP, row = thread / (BLOCKS * PIECE), piece = thread % (BLOCKS * PIECE);
    const Element* from = latents + row * (COLUMNS * LANES) + BEGIN * LANES + piece * 8;
    to += piece / PIECE * BLOCK_BYTES + row * LANES * 2;
    UNROLL
    for (u32 k = 0; k < KEYS / AT_ONCE; k++)
        cp_async_16(to + k * AT_ONCE * LANES * 2 + ((piece ^ (row + k * AT_ONCE)) % 8) * 16, from + k * AT_ONCE * (COLUMNS * LANES), true);
}

DEVICE void fetch_queries(const Attend& p, u8* to, const Work& work, bool aligned) {
    const u32 row = thread_x() % GROUP / PIECE, lanes = work.task.q_count * p.H;
    const Element *nope[QUERY_TIMES], *pe[QUERY_TIMES];
    UNROLL
    for (u32 i = 0; i < QUERY_TIMES; i++) {
        const u32 lane_of = work.first() + row + i * (ROWS / QUERY_TIMES);
        nope[i] = pe[i] = nullptr;
        if (lane_of < lanes) {
            const i64 token = i64(work.task.token) + lane_of / p.H, head = lane_of % p.H;
            nope[i] = reinterpret_cast<const Element*>(p.q.at) + token * p.q.stride[0] + head * p.q.stride[1];
            pe[i] = reinterpret_cast<const Element*>(p.q_pe.at) + token * p.q_pe.stride[0] + head * p.q_pe.stride[1];
        }
    }
    put_queries(p, to, nope, pe, aligned);
}

DEVICE void produce_few(const Attend& p, u8* shared, FewTold& told) {
    const u32 thread = thread_x() % GROUP;
    const bool aligned = (p.flags & ALIGNED) && p.Dv % 8 == 0 && p.D % 8 == 0;
    const u32 row = thread / PIECE, at = row * LANES * 2 + (thread % PIECE ^ row % 8) * 16;
    const bool in_line = IN_LINE && aligned && p.D == COLUMNS * LANES && p.k.stride[1] == i64(p.D);
    Turn turn{0, 0};
    u32 count = 0, rest = 0;
    auto tell = [&](const Work& work) {
        mark_wait(&told.queries_read, count % 2 ^ 1);
        // Copies arrive by themselves, which says nothing of what was stored: that has an arrival of its own.
        if (thread == 0) {
            told.works[count % 2] = work;
            mark_arrive(&told.queries);
        }
        count += 1;
    };
    Book book{};
    Ids ids{};
    bool begun = false;
    walk_tasks(p, [&](const Work& work, const Work& next, auto settled) {
        const Share share = share_of(p, work);
        const u32 begin = share.tile(), end = share.tiles();
        if (!begun) book = book_of(p, work), ids = ids_of(p, book, begin);
        Book book_after{};
        u32 tile = begin;
        // The first tile goes ahead: the queries' place is free later than a tile's.
        NO_UNROLL
        do {
            const Ids mine = ids;
            if (tile + 1 < end) {
                ids = ids_of(p, book, tile + 1);
            } else if ((begun = settled())) {
                book_after = book_of(p, next);
                ids = ids_of(p, book_after, book_after.lo / KEYS);
            }
            if (tile < end) {
                mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
                u8 *values = shared + RING_AT + turn.slot * VALUE_BYTES, *behind = shared + REST_AT + rest * REST_BYTES;
                Mark* full = &told.full[turn.slot];
                turn.next();
                rest = rest + 1 == RESTS ? 0 : rest + 1;
                // What lies behind the values, of which there is one less, is free as soon as the next tile's values have room.
                auto await_rest = [&]() {
                    if (RESTS < STAGES) mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
                };
                if (in_line && book.whole && tile * KEYS >= book.lo && tile * KEYS + KEYS <= book.to) {
                    const i64 slot = (tile * KEYS - book.kv_offset) % p.S;
                    const Element* latents = reinterpret_cast<const Element*>(p.k.at) + i64(mine.page[0]) * p.k.stride[0] + slot * p.k.stride[1];
                    fetch_in_line<0, PARTS>(values, latents);
                    if (REST) {
                        await_rest();
                        fetch_in_line<PARTS, COLUMNS>(behind, latents);
                    }
                } else {
                    const Latents latents = places_of(p, book, tile, mine);
                    fetch_blocks<0, PARTS>(values + at, latents, p.D, aligned);
                    if (REST) {
                        await_rest();
                        fetch_blocks<PARTS, COLUMNS>(behind + at, latents, p.D, aligned);
                    }
                }
                announce(full, aligned);
            }
            if (tile == begin) {
                tell(work);
                if (begin < end) fetch_queries(p, shared + at, work, aligned);
                announce(&told.queries, aligned);
            }
            tile += 1;
        } while (tile < end);
        book = book_after;
    });
    Work last{};
    tell(last);
    announce(&told.queries, aligned);
    cp_async_commit();
    cp_async_wait<0>();
}
