// The warpgroups that make tiles of bf16 out of latents in e4m3, which is exact, and lay them into a ring beside their scales; and what
// groups of such a block tell each other.
//
//   producers  copy latents as they are, some rows ahead, widen them into tiles, and lay the block's queries out
//   scores     a group that makes weights of a tile; these take the room of its rotary lanes, which nobody needs any more
//   values     groups that add them up
//
// Scales never meet codes: a score is what the rotary lanes give, and then, for each 128 lanes, their product times their scale, in f32;
// a weight is times its key's scale before it is rounded for a product, once for each 128 columns. What that rounding adds to the sum of
// a row's weights is summed as well, and the result is divided by what was in fact added up: a row that one key decides would have that
// key's scale rounded in every lane alike.
//
// Defines: those of latent_unit.cuh; DEPTH, 512 or 576: lanes of a latent, padded to a multiple of 64. Before it: ROWS, KEYS, STAGES;
// PRODUCERS, threads that widen, the block's last; AHEAD, batches of rows that are on their way. Queries are bf16.
#pragma once

#include "codes.cuh"

typedef Bf16 Element;
#include "latent_unit.cuh"

constexpr u32 WIDTH = 512, SCALES = WIDTH / LATENT_GROUP;
constexpr u32 COLUMNS = DEPTH / LANES, ROPE_STEPS = (DEPTH - WIDTH) / 16;
// From the first lane under a scale to the rotary ones, which every tile has room for; of queries, a block of 64 lanes.
constexpr u32 ROPE_AT = WIDTH / LANES * BLOCK_BYTES, TILE_BYTES = ROPE_AT + BLOCK_BYTES, QUERY_BLOCK_BYTES = ROWS * LANES * 2;
static_assert(DEPTH == 512 || DEPTH == 576, "see above");

struct alignas(8) Scale {
    float of, inverse;  // the latter 0 where it, or a rounding times it, might be none
};
// Eight threads have a row of a batch: of each 128 codes 16, and eight rotary lanes. A tile has so many batches.
constexpr u32 BATCH = PRODUCERS / PIECE, TIMES = KEYS / BATCH, CHUNKS = WIDTH / 16 / PIECE;
static_assert(CHUNKS == SCALES, "a chunk of a row has lanes of one scale");
// What is on its way of a batch: what each thread is to widen, where no other thread looks, and the scales of each row.
constexpr u32 SHARE_BYTES = PRODUCERS * 16, ROPE_SHARE = CHUNKS, RAW_SCALES_AT = (CHUNKS + 1) * SHARE_BYTES;
constexpr u32 RAW_BYTES = RAW_SCALES_AT + BATCH * SCALES * 4;

constexpr u32 RING_AT = COLUMNS * QUERY_BLOCK_BYTES;
// Of each tile of the ring, SCALES rows of a scale a key, for values and for scores.
constexpr u32 SCALES_AT = RING_AT + STAGES * TILE_BYTES, KEY_SCALES_AT = SCALES_AT + STAGES * SCALES * KEYS * sizeof(Scale);
// Batches that are on their way; pages of two lots of batches, of which a warp asks for its own rows' of a lot at once.
constexpr u32 LOT = 8;
static_assert(AHEAD < LOT, "pages are there before what lies in them is asked for");
constexpr u32 RAW_AT = KEY_SCALES_AT + STAGES * SCALES * KEYS * 4, PAGES_AT = RAW_AT + AHEAD * RAW_BYTES;
constexpr u32 BOOK_AT = PAGES_AT + 2 * LOT * BATCH * 4, AFTER_RING = BOOK_AT + 192;
static_assert(RING_AT % 1024 == 0, "tiles start where turns of their rows do");

// Marks of the ring's tiles, of their weights, and that their room is free; of a unit and its queries, and the unit, two in turn; of
// what ends a unit. Every thread arrives.
struct Told {
    Mark full[STAGES], weighed[STAGES], empty[STAGES], queries, queries_read, ended[2];
    Unit units[2];
};
static_assert(sizeof(Told) == (3 * STAGES + 4) * 8 + 256, "as in exec/latents.rs");

DEVICE Scale* scales_of(u8* shared, u32 slot, u32 group) {
    return reinterpret_cast<Scale*>(shared + SCALES_AT) + (slot * SCALES + group) * KEYS;
}
DEVICE float* key_scales_of(u8* shared, u32 slot, u32 group) {
    return reinterpret_cast<float*>(shared + KEY_SCALES_AT) + (slot * SCALES + group) * KEYS;
}
DEVICE Scale scale_with(u32 bits) {
    const u32 exponent = bits >> 23 & 0xff;
    const float of = bits_float(bits);
    return Scale{of, exponent > 26 && exponent < 253 ? reciprocal(of) : 0.0f};
}

// ---- producer ----

DEVICE U4 words_at(const u8* from) { return U4{word_at(from), word_at(from + 4), word_at(from + 8), word_at(from + 12)}; }

// A thread's row of a batch, and which eighth of it. Of eight lanes that store together four have a row and four the next one, so that the
// first halves of what they widen, even pieces turned by the row, meet in no bank.
struct Mine {
    u32 row, piece;
};
DEVICE Mine mine_of(u32 thread) {
    const u32 lane = thread % 32;
    return Mine{thread / 32 * 4 + lane / 16 * 2 + lane / 4 % 2, lane / 8 % 2 * 4 + lane % 4};
}
// Joins what the eight threads of a row say.
DEVICE u32 said_of_row(u32 bits) {
    bits |= shfl_xor(bits, 1);
    bits |= shfl_xor(bits, 2);
    return bits | shfl_xor(bits, 8);
}

// A unit, and what its latents are looked up by; in shared memory, until all who widen have read it.
struct Book {
    const i32* pages;
    u64 latents;
    i64 page, slot;  // bytes
    u32 S, kv_offset;
    Unit unit;
};
static_assert(sizeof(Book) <= 192, "its room");

// The copies of a thread: of its row of each batch, from a unit's first tile on.
template <bool ALIGNED>
struct Copies {
    u8* shared;
    const i32* pages;
    u64 latents, page;
    u32 S, kv_offset, lo, to, first, thread, piece, row, E;

    Copies(u8* shared, const Book& book, u32 thread, u32 E) : shared(shared), thread(thread), E(E) {
        const Mine mine = mine_of(thread);
        row = mine.row, piece = mine.piece;
        pages = book.pages, latents = book.latents + piece * 16, page = u64(book.page);
        S = book.S, kv_offset = book.kv_offset, lo = book.unit.lo, to = book.unit.to;
        first = book.unit.tile() * KEYS;
    }
    bool seen(u32 key) const { return key >= lo && key < to; }
    i32* page_at(u32 batch, u32 row) const { return reinterpret_cast<i32*>(shared + PAGES_AT) + batch % (2 * LOT) * BATCH + row; }
    u8* raw(u32 stage) const { return shared + RAW_AT + stage * RAW_BYTES; }

    // Asks for the pages of a lot of batches, the first of which is `batch`: of the four rows of this thread's warp.
    void ask_pages(u32 batch) const {
        const u32 of = batch + thread % 32 / 4, row_of = thread / 32 * 4 + thread % 4, key = first + of * BATCH + row_of;
        if (!seen(key)) return;
        const u32 offset = key - kv_offset;
        cp_async_4(page_at(of, row_of), pages + (S == 1 ? offset : offset / S));
    }
    // Asks for a batch's bytes, whose page is there. A key that nobody sees has codes and scales of 0.
    void ask(const Book& book, u32 batch, u32 stage) const {
        const u32 key = first + batch * BATCH + row;
        const bool there = seen(key);
        u64 at = latents + page * (there ? u32(*page_at(batch, row)) : 0);
        if (S != 1) at += u64(book.slot) * (there ? (key - kv_offset) % S : 0);
        u8* to = raw(stage) + thread * 16;
        UNROLL
        for (u32 j = 0; j < CHUNKS; j++) copy(to + j * SHARE_BYTES, at + j * PIECE * 16, there);
        if (ROPE_STEPS > 0) copy(to + ROPE_SHARE * SHARE_BYTES, at + WIDTH + 4 * SCALES, there && piece * PIECE < E);
        if (piece == 0) copy(raw(stage) + RAW_SCALES_AT + row * SCALES * 4, at + WIDTH, there);
    }
    static void copy(u8* to, u64 from, bool there) {
        if (ALIGNED) cp_async_16(to, reinterpret_cast<const void*>(from), there);
        else store16(to, there ? words_at(reinterpret_cast<const u8*>(from)) : U4{0, 0, 0, 0});
    }
};

// Not zero where some of sixteen codes is NaN.
DEVICE u32 nans_in(const U4& codes) {
    return (((codes.x & 0x7f7f7f7fu) + 0x01010101u) | ((codes.y & 0x7f7f7f7fu) + 0x01010101u) | ((codes.z & 0x7f7f7f7fu) + 0x01010101u) |
            ((codes.w & 0x7f7f7f7fu) + 0x01010101u)) &
           0x80808080u;
}
// Four codes as bf16, exactly, but for NaN: their digits lie over two bytes, of which one has the sign, and count 2^-120 of them there.
DEVICE void widen(u32 codes, u32& first, u32& second) {
    const u32 upper = (codes >> 4 & 0x07070707u) | (codes & 0x80808080u), lower = codes << 4 & 0xf0f0f0f0u;
    first = multiply_bf16(permuted(lower, upper, 0x5140), 0x7b807b80u), second = multiply_bf16(permuted(lower, upper, 0x7362), 0x7b807b80u);
}
// Where a thread lays what it has of a tile's first batch: its chunks are two pieces of blocks of 64 lanes, of every second block one; and
// its row's scales.
struct Laying {
    u8 *first, *second, *rope;
    Scale* scale;
    float* key_scale;

    Laying(u8* shared, u32 slot, const Mine& mine) {
        u8* row = shared + RING_AT + slot * TILE_BYTES + mine.row * LANES * 2;
        const u32 first_piece = mine.piece % 4 * 2 ^ mine.row % 8;
        first = row + mine.piece / 4 * BLOCK_BYTES + first_piece * 16, second = row + mine.piece / 4 * BLOCK_BYTES + (first_piece ^ 1) * 16;
        rope = row + ROPE_AT + (mine.piece ^ mine.row % 8) * 16;
        scale = scales_of(shared, slot, mine.piece % SCALES) + mine.row;
        key_scale = key_scales_of(shared, slot, mine.piece % SCALES) + mine.row;
    }
};
// Lays what a thread has of a tile's i-th batch, which has come, and the scales of its row beside; those of scores are NaN where a code is,
// so that a score is, and all that its weight weighs.
DEVICE void lay(const Laying& at, u32 i, const u8* raw, const Mine& mine, u32 thread) {
    U4 chunks[CHUNKS];
    UNROLL
    for (u32 j = 0; j < CHUNKS; j++) chunks[j] = load16(raw + j * SHARE_BYTES + thread * 16);
    const u32 scale = reinterpret_cast<const u32*>(raw + RAW_SCALES_AT)[mine.row * SCALES + mine.piece % SCALES];
    // A bit a chunk; seldom is there any.
    u32 nans = 0;
    UNROLL
    for (u32 j = 0; j < CHUNKS; j++) nans |= nans_in(chunks[j]);
    if (ballot(nans != 0) != 0) {
        nans = 0;
        UNROLL
        for (u32 j = 0; j < CHUNKS; j++) nans |= nans_in(chunks[j]) ? 1u << j : 0;
        nans = said_of_row(nans);
    }
    if (ROPE_STEPS > 0) store16(at.rope + i * BATCH * LANES * 2, load16(raw + ROPE_SHARE * SHARE_BYTES + thread * 16));
    UNROLL
    for (u32 j = 0; j < CHUNKS; j++) {
        const u32 words[4] = {chunks[j].x, chunks[j].y, chunks[j].z, chunks[j].w};
        u32 pairs[8];
        UNROLL
        for (u32 k = 0; k < 4; k++) widen(words[k], pairs[2 * k], pairs[2 * k + 1]);
        const u32 offset = i * BATCH * LANES * 2 + j * (PIECE / 4) * BLOCK_BYTES;
        store16(at.first + offset, U4{pairs[0], pairs[1], pairs[2], pairs[3]});
        store16(at.second + offset, U4{pairs[4], pairs[5], pairs[6], pairs[7]});
    }
    const Scale with = scale_with(scale);
    if (mine.piece < SCALES) {
        at.scale[i * BATCH] = with;
        at.key_scale[i * BATCH] = bits_float(nans >> mine.piece & 1 ? 0x7fc00000u : scale);
    }
}

// Lays a unit's queries out, a row of blocks by eight threads.
DEVICE void lay_queries(const Attend& p, u8* shared, const Unit& unit, u32 thread, bool aligned) {
    const Queries queries = queries_of<LATENTS>(p, unit.row, unit.q_begin, 0, sizeof(Element));
    const u32 piece = thread % PIECE, D = p.D;
    NO_UNROLL
    for (u32 row = thread / PIECE; row < ROWS; row += BATCH) {
        const u32 lane = unit.first + row;
        const Element *nope = nullptr, *pe = nullptr;
        if (lane < unit.output.lanes) {
            const i64 token = lane / p.H, head = lane % p.H;
            nope = reinterpret_cast<const Element*>(queries.at) + token * queries.token + head * queries.head;
            pe = reinterpret_cast<const Element*>(queries.pe_at) + token * queries.pe_token + head * queries.pe_head;
        }
        u8* to = shared + row * LANES * 2 + (piece ^ row % 8) * 16;
        if (aligned) {
            // What may be named where nothing is read.
            const void* nothing = reinterpret_cast<const void*>(p.q.at);
            UNROLL
            for (u32 block = 0; block < WIDTH / LANES; block++)
                cp_async_16(to + block * QUERY_BLOCK_BYTES, nope ? nope + block * LANES + piece * PIECE : nothing, nope);
            const bool there = nope && WIDTH + piece * PIECE < D;
            if (ROPE_STEPS > 0) cp_async_16(to + WIDTH / LANES * QUERY_BLOCK_BYTES, there ? pe + piece * PIECE : nothing, there);
        } else {
            NO_UNROLL
            for (u32 block = 0; block < COLUMNS; block++)
                put(to + block * QUERY_BLOCK_BYTES, nope, pe, block * LANES + piece * PIECE, WIDTH, D, false);
        }
    }
}

// The barrier of those who widen.
constexpr u32 WIDENERS = 2;

template <bool ALIGNED>
DEVICE void produce(const Attend& p, u8* shared, Told& told) {
    const u32 thread = thread_x() % PRODUCERS;
    Turn turn{0, 0};
    u32 count = 0;
    walk(p, [&](const Unit& found) {
        Book& book = *reinterpret_cast<Book*>(shared + BOOK_AT);
        // Some may still read what the last one's book says.
        named_sync(WIDENERS, PRODUCERS);
        if (thread == 0) {
            const Keys keys = keys_of<LATENTS>(p, found.row_index, found.row, 0, 1);
            book = Book{keys.pages, keys.k, keys.k_page, keys.k_slot, keys.S, keys.kv_offset, found};
        }
        named_sync(WIDENERS, PRODUCERS);
        const u32 tiles = book.unit.tiles() - book.unit.tile();
        const Copies<ALIGNED> copies(shared, book, thread, p.D - WIDTH);
        const Mine mine = mine_of(thread);
        copies.ask_pages(0);
        cp_async_commit();
        cp_async_wait<0>();
        warp_sync();
        u32 batch = 0, stage = 0;
        NO_UNROLL
        for (; batch < AHEAD; batch++) {
            copies.ask(book, batch, batch);
            cp_async_commit();
        }
        // A block's first queries are asked for at once; later ones' place is free later than a tile's, of which one goes ahead.
        const u32 before = count > 0 && tiles > 0 ? 1 : 0;
        NO_UNROLL
        for (u32 tile = 0;; tile++) {
            if (tile == before) {
                tell(told, book.unit, count, thread);
                if (tiles > 0) lay_queries(p, shared, book.unit, thread, ALIGNED);
                announce(&told.queries, ALIGNED);
                count += 1;
            }
            if (tile >= tiles) break;
            const Laying at(shared, turn.slot, mine);
            mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
            UNROLL
            for (u32 i = 0; i < TIMES; i++) {
                // What was asked for so many batches ago has come: this one's bytes, and pages of those asked for next.
                cp_async_wait<AHEAD - 1>();
                warp_sync();
                lay(at, i, copies.raw(stage), mine, thread);
                warp_sync();
                copies.ask(book, batch, stage);
                if ((batch - AHEAD) % LOT == 0) copies.ask_pages(batch - AHEAD + LOT);
                cp_async_commit();
                batch += 1, stage = stage + 1 == AHEAD ? 0 : stage + 1;
            }
            // Those who read a tile fence.
            mark_arrive(&told.full[turn.slot]);
            turn.next();
        }
        cp_async_wait<0>();
    });
    tell_end(told, count, thread, ALIGNED);
}
DEVICE void produce(const Attend& p, u8* shared, Told& told) {
    if (p.flags & ALIGNED) produce<true>(p, shared, told);
    else produce<false>(p, shared, told);
}

// ---- consumers ----

// Of the tiles that a block has had, which one's turn it is in the ring.
DEVICE Turn turn_of(u32 tiles) { return Turn{tiles % STAGES, tiles / STAGES % 2}; }

// By all threads of a block, before any of them works; so many threads add values.
DEVICE void start(Told& told, u32 adders) {
    if (thread_x() == 0) {
        UNROLL
        for (u32 slot = 0; slot < STAGES; slot++) {
            mark_init(&told.full[slot], PRODUCERS);
            mark_init(&told.weighed[slot], GROUP);
            mark_init(&told.empty[slot], adders);
        }
        mark_init(&told.queries, PRODUCERS + 1);
        mark_init(&told.queries_read, GROUP + adders);
        mark_init(&told.ended[0], GROUP);
        mark_init(&told.ended[1], GROUP);
        marks_ready();
    }
    block_sync();
}
