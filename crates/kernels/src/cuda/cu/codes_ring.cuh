// The warpgroups that make tiles of bf16 out of latents in e4m3, which is exact, and lay them into a ring beside their scales; and what
// groups of such a block tell each other.
//
//   producers  widen tiles, and lay the block's queries out
//   scores     a group that makes weights of a tile; these take the room of its rotary lanes, which nobody needs any more
//   values     groups that add them up
//
// Scales never meet codes: a score is what the rotary lanes give, and then, for each 128 lanes, their product times their scale, in f32;
// a weight is times its key's scale before it is rounded for a product, once for each 128 columns. What that rounding adds to the sum of
// a row's weights is summed as well, and the result is divided by what was in fact added up: a row that one key decides would have that
// key's scale rounded in every lane alike.
//
// Defines: those of latent_unit.cuh but STAGES; DEPTH, 512 or 576: lanes of a latent, padded to a multiple of 64. Before it: ROWS,
// PRODUCERS, threads that widen, the block's last. Queries are bf16.
#pragma once

#include "codes.cuh"

typedef Bf16 Element;
constexpr u32 STAGES = 2;
#include "latent_unit.cuh"

constexpr u32 WIDTH = 512, SCALES = WIDTH / LATENT_GROUP;
constexpr u32 COLUMNS = DEPTH / LANES, ROPE_STEPS = (DEPTH - WIDTH) / 16;
// From the first lane under a scale to the rotary ones, which every tile has room for; of queries, a block of 64 lanes.
constexpr u32 ROPE_AT = WIDTH / LANES * BLOCK_BYTES, TILE_BYTES = ROPE_AT + BLOCK_BYTES, QUERY_BLOCK_BYTES = ROWS * LANES * 2;
static_assert(DEPTH == 512 || DEPTH == 576, "see above");

struct alignas(8) Scale {
    float of, inverse;  // the latter 0 where it, or a rounding times it, might be none
};
constexpr u32 RING_AT = COLUMNS * QUERY_BLOCK_BYTES;
// Of each tile of the ring, SCALES rows of a scale a key, for values and for scores.
constexpr u32 SCALES_AT = RING_AT + STAGES * TILE_BYTES, KEY_SCALES_AT = SCALES_AT + STAGES * SCALES * KEYS * sizeof(Scale);
// Where the latents of so many tiles lie, of which the last are yet to be looked up.
constexpr u32 PLACES = 4, PLACES_AT = KEY_SCALES_AT + STAGES * SCALES * KEYS * 4;
constexpr u32 BOOK_AT = PLACES_AT + PLACES * KEYS * 8, AFTER_RING = BOOK_AT + 192;
static_assert(RING_AT % 1024 == 0, "tiles start where turns of their rows do");

// Marks of the ring's tiles, of their weights, and that their room is free; of a unit and its queries, and the unit, two in turn; of
// what ends a unit. Every thread arrives.
struct Told {
    Mark full[STAGES], weighed[STAGES], empty[STAGES], queries, queries_read, ended[2];
    Unit units[2];
};
static_assert(sizeof(Told) == 336, "as in exec/latents.rs");

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

// Eight threads have a row of a tile, and every so many rows one.
constexpr u32 APART = PRODUCERS / PIECE, TIMES = KEYS / APART, CHUNKS = WIDTH / 16 / PIECE;
// What a thread has of a row: each eighth 16 codes of it, eight rotary lanes, and of the first threads a scale.
struct Share {
    U4 codes[CHUNKS], rope;
    u32 scale;
};
// Where a row's bytes lie, and whether somebody sees it: of others, which lie where something may be read, scales are 0, and what codes
// stand for is finite.
constexpr u64 UNSEEN = 1ull << 63;
template <bool ALIGNED>
struct Latent {
    u64 place;

    bool seen() const { return !(place & UNSEEN); }
    const u8* at(u32 offset) const { return reinterpret_cast<const u8*>(place & ~UNSEEN) + offset; }
    U4 load(u32 offset) const {
        const u8* from = at(offset + thread_x() % PIECE * 16);
        return ALIGNED ? load16_once(from) : words_at(from);
    }
    U4 codes(u32 chunk) const { return load(chunk * PIECE * 16); }
    U4 lanes(u32 E) const {
        U4 words{0, 0, 0, 0};
        if (thread_x() % PIECE * PIECE < E) words = load(WIDTH + 4 * SCALES);
        return words;
    }
    u32 scale() const {
        const u8* from = at(WIDTH + 4 * (thread_x() % SCALES));
        const u32 word = ALIGNED ? float_bits(load_here(reinterpret_cast<const float*>(from))) : word_at(from);
        return seen() ? word : 0;
    }
    // Asks for the lines that they are in.
    void ask(u32 E) const {
        const u32 piece = thread_x() % PIECE, line = piece < 5 ? piece * 128 : WIDTH + SCALES * 4 + 2 * E - 1;
        if (seen() && piece < 6) prefetch_l2(at(line));
    }
};
DEVICE u64* places_of(u8* shared, u32 tile) { return reinterpret_cast<u64*>(shared + PLACES_AT) + tile % PLACES * KEYS; }
// A unit, and what its latents are looked up by; in shared memory, rather than in everybody's registers.
struct Book {
    const i32* pages;
    u64 latents;
    i64 page, slot;  // bytes
    u32 S, kv_offset;
    Unit unit;

    // The page of a key, -1 where nobody sees it, and where it lies there.
    i32 page_of(u32 key) const {
        const u32 offset = key - kv_offset;
        i32 of = -1;
        if (key >= unit.lo && key < unit.to) of = pages[S == 1 ? offset : offset / S];
        return of;
    }
    u64 place_in(i32 of, u32 key) const {
        const u32 offset = key - kv_offset, in = S == 1 ? 0 : offset % S;
        return of < 0 ? latents | UNSEEN : latents + u64(i64(of) * page + i64(in) * slot);
    }
};
static_assert(sizeof(Book) <= 192, "its room");

// Not zero where some of sixteen codes is NaN.
DEVICE u32 nans_in(const U4& codes) {
    return (((codes.x & 0x7f7f7f7fu) + 0x01010101u) | ((codes.y & 0x7f7f7f7fu) + 0x01010101u) | ((codes.z & 0x7f7f7f7fu) + 0x01010101u) |
            ((codes.w & 0x7f7f7f7fu) + 0x01010101u)) &
           0x80808080u;
}
// Lays a share into row `row` of a tile, and its scales beside; those of scores are NaN where a code is, so that a score is, and all that
// its weight weighs. What has been laid gives its registers to what `next` has in its place.
template <bool ALIGNED>
DEVICE void lay(u8* tile, Scale* scales, float* key_scales, u32 row, u32 E, Share& share, const Latent<ALIGNED>& next) {
    const u32 piece = thread_x() % PIECE, turned = piece / 4;
    u8* to = tile + row * LANES * 2;
    u32 nans = 0;
    UNROLL
    for (u32 j = 0; j < CHUNKS; j++) {
        // 16 codes are two pieces, of which half of the threads write the second one first: none meets another in a bank.
        const u32 chunk = j * PIECE + piece, at = chunk % 4 * 2;
        const U4 codes = share.codes[j];
        share.codes[j] = next.codes(j);
        const u32 words[4] = {turned ? codes.z : codes.x, turned ? codes.w : codes.y, turned ? codes.x : codes.z, turned ? codes.y : codes.w};
        u32 pairs[8];
        UNROLL
        for (u32 i = 0; i < 8; i++) pairs[i] = widened(permuted(words[i / 2], i % 2 ? 0x3424 : 0x1404));
        // A chunk has lanes of one scale: of the row's eight threads, one writes what all have seen.
        const u32 said = ballot(nans_in(codes) != 0) >> lane() / PIECE * PIECE & 0xff;
        if (piece == j) nans = said;
        u8* block = to + chunk / 4 * BLOCK_BYTES;
        store16(block + ((at + turned) ^ (row % 8)) * 16, U4{pairs[0], pairs[1], pairs[2], pairs[3]});
        store16(block + ((at + 1 - turned) ^ (row % 8)) * 16, U4{pairs[4], pairs[5], pairs[6], pairs[7]});
    }
    static_assert(PIECE * 16 == LATENT_GROUP && CHUNKS == SCALES, "a chunk's scale");
    if (ROPE_STEPS > 0) store16(to + WIDTH / LANES * BLOCK_BYTES + (piece ^ (row % 8)) * 16, share.rope);
    share.rope = next.lanes(E);
    if (piece < SCALES) {
        scales[piece * KEYS + row] = scale_with(share.scale);
        key_scales[piece * KEYS + row] = bits_float(nans ? 0x7fc00000u : share.scale);
    }
    share.scale = next.scale();
}

// The barrier of those who widen.
constexpr u32 WIDENERS = 2;

template <bool ALIGNED>
DEVICE void produce(const Attend& p, u8* shared, Told& told) {
    constexpr bool aligned = ALIGNED;
    const u32 thread = thread_x() % PRODUCERS, D = p.D, E = D - WIDTH;
    const u32 row = thread / PIECE, piece = thread % PIECE;
    Turn turn{0, 0};
    u32 count = 0;
    auto fetch_queries = [&](const Unit& unit) {
        const Queries queries = queries_of<LATENTS>(p, unit.row, unit.q_begin, 0, sizeof(Element));
        NO_UNROLL
        for (u32 i = 0; i < (ROWS + APART - 1) / APART; i++) {
            const u32 row_of = row + i * APART, lane = unit.first + row_of;
            if (ROWS < APART && row_of >= ROWS) break;
            const Element *nope = nullptr, *pe = nullptr;
            if (lane < unit.output.lanes) {
                const i64 token = lane / p.H, head = lane % p.H;
                nope = reinterpret_cast<const Element*>(queries.at) + token * queries.token + head * queries.head;
                pe = reinterpret_cast<const Element*>(queries.pe_at) + token * queries.pe_token + head * queries.pe_head;
            }
            u8* to = shared + row_of * LANES * 2 + (piece ^ (row_of % 8)) * 16;
            NO_UNROLL
            for (u32 block = 0; block < COLUMNS; block++) {
                // What may be named where nothing is read.
                if (aligned && !nope) cp_async_16(to + block * QUERY_BLOCK_BYTES, reinterpret_cast<const void*>(p.q.at), false);
                else put(to + block * QUERY_BLOCK_BYTES, nope, pe, block * LANES + piece * PIECE, WIDTH, D, aligned);
            }
        }
    };
    walk(p, [&](const Unit& found) {
        Book& book = *reinterpret_cast<Book*>(shared + BOOK_AT);
        // Of a unit of few keys some may still read what the last one's book says.
        named_sync(WIDENERS, PRODUCERS);
        if (thread == 0) {
            const Keys keys = keys_of<LATENTS>(p, found.row_index, found.row, 0, 1);
            book = Book{keys.pages, keys.k, keys.k_page, keys.k_slot, keys.S, keys.kv_offset, found};
        }
        named_sync(WIDENERS, PRODUCERS);
        const Unit& unit = book.unit;
        const u32 begin = unit.tile(), end = unit.tiles();
        // A thread knows the page of one key of a tile, two tiles ahead of the one in hand, and asks for another's.
        const u32 mine = begin * KEYS + thread;
        i32 page = -1;
        if (thread < KEYS) {
            const i32 pages[2] = {book.page_of(mine), book.page_of(mine + KEYS)};
            page = book.page_of(mine + 2 * KEYS);
            places_of(shared, begin)[thread] = book.place_in(pages[0], mine);
            places_of(shared, begin + 1)[thread] = book.place_in(pages[1], mine + KEYS);
        }
        named_sync(WIDENERS, PRODUCERS);
        auto latent = [&](u32 tile, u32 of) { return Latent<ALIGNED>{places_of(shared, tile)[of]}; };
        Share share{};
        if (begin < end) {
            UNROLL
            for (u32 i = 1; i < TIMES; i++) latent(begin, row + i * APART).ask(E);
            const Latent<ALIGNED> first = latent(begin, row);
            UNROLL
            for (u32 j = 0; j < CHUNKS; j++) share.codes[j] = first.codes(j);
            share.rope = first.lanes(E), share.scale = first.scale();
        }
        // The first tile goes ahead: the queries' place is free later than a tile's.
        u32 tile = begin;
        NO_UNROLL
        do {
            if (tile < end) {
                u8* to = shared + RING_AT + turn.slot * TILE_BYTES;
                Scale* scales = scales_of(shared, turn.slot, 0);
                float* key_scales = key_scales_of(shared, turn.slot, 0);
                mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
                NO_UNROLL
                for (u32 i = 0; i < TIMES; i++) {
                    // Bytes are asked for a tile before they are needed, and loaded a row before.
                    latent(tile + 1, row + i * APART).ask(E);
                    const bool last = i + 1 == TIMES;
                    lay(to, scales, key_scales, row + i * APART, E, share, latent(tile + last, row + (last ? 0 : i + 1) * APART));
                }
                if (thread < KEYS) {
                    const u32 key = (tile + 2) * KEYS + thread;
                    places_of(shared, tile + 2)[thread] = book.place_in(page, key);
                    page = book.page_of(key + KEYS);
                }
                named_sync(WIDENERS, PRODUCERS);
                async_fence();
                mark_arrive(&told.full[turn.slot]);
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
