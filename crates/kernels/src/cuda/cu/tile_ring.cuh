// The warpgroup that brings queries, and tiles of keys and values, into a ring: as boxes where a tensor map has them, else gathered.
//
// A tile lies in blocks of 64 lanes, rows of 128 bytes whose 16-byte pieces are turned by the row, as products read them. Keys that nobody
// sees are read too, where a box has them, and hidden by what scores become; values that no query of the row sees, which may be
// anything, are not: a tile with such a value is gathered, and has zeros there.
//
// Defines: those of tile.cuh; SOURCE; WIDTH, the padded head width; VALUES, the padded width of a value; KEYS of a tile; STAGES.
#pragma once

#include "ring.cuh"
#include "tile.cuh"

constexpr u32 QUERIES = 128, LANES = 64, PIECE = 8, ROW_BYTES = LANES * 2, EIGHT_ROWS = 8 * ROW_BYTES;
constexpr u32 BLOCK_BYTES = KEYS * ROW_BYTES, QUERY_BLOCK_BYTES = QUERIES * ROW_BYTES;
constexpr u32 QUERY_BYTES = WIDTH / LANES * QUERY_BLOCK_BYTES;
constexpr u32 KEY_BYTES = WIDTH / LANES * BLOCK_BYTES, VALUE_BYTES = VALUES / LANES * BLOCK_BYTES;
static_assert(WIDTH % LANES == 0 && VALUES % LANES == 0 && KEYS % 16 == 0 && SOURCE == SEGMENTS, "what tiles are served for");

// The parameter: maps of queries [T, H, D], fresh keys and values [U, G, D], and packed prefixes of both, where flags have MAPPED.
struct AttendBoxes {
    Attend attend;
    u64 reserved[5];
    TensorMap keys, values, queries, key_prefix, value_prefix;
};
static_assert(sizeof(AttendBoxes) == 1216, "as in exec/params.rs");

// What a block works on: an item.
struct Unit {
    Output output;
    Reach reach;      // of the item
    i64 first;        // position of its first query token
    bool over;

    u32 tile() const { return reach.lo / KEYS; }
    u32 tiles() const { return reach.lo < reach.hi ? (reach.hi + KEYS - 1) / KEYS : reach.lo / KEYS; }
};

// What the groups of a block tell each other.
struct Told {
    Mark keys[STAGES], keys_read[STAGES], values[STAGES], values_read[STAGES], queries, queries_read;
    Unit units[2];
};

// Shared memory: queries, keys, values, marks.
constexpr u32 KEYS_AT = QUERY_BYTES, VALUES_AT = KEYS_AT + STAGES * KEY_BYTES, TOLD_AT = VALUES_AT + STAGES * VALUE_BYTES;
constexpr u32 SHARED_BYTES = TOLD_AT + sizeof(Told);
static_assert(sizeof(Told) <= 32 * STAGES + 16 + 2 * 80, "as in exec/heads.rs");
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

// Calls `each(unit, item, row_index)` for what this block is to do. Items are listed largest first: every other round goes from the last
// block to the first, so that blocks have about as much.
template <class Each>
DEVICE void walk(const Attend& p, Each each) {
    const Span span = items_of(p);
    const u32 count = span.end - span.begin;
    NO_UNROLL
    for (u32 from = 0, round = 0; from < count; from += grid_x(), round++) {
        const u32 at = from + (round % 2 ? grid_x() - 1 - block_x() : block_x());
        if (at >= count) continue;
        const Item item = items_of(p.image)[span.begin + at];
        const Member member = members_of(p.image)[item.member_begin];
        const Row row = rows_of(p.image)[member.row];
        Unit unit;
        unit.output = output_of(p, item, member, row);
        unit.reach = reach_of(p, row, item);
        unit.first = i64(row.kv_len) - i64(row.q_len) + i64(item.q_begin);
        unit.over = false;
        each(unit, item, member.row, row);
    }
}

// ---- producer ----

// The barrier around what the whole group gathers.
constexpr u32 GATHERED = 1;

// Where a tile of a row lies, if a box has it: in its prefix or among fresh keys.
struct Spot {
    bool boxed, fresh;
    i32 at;
};
DEVICE Spot spot_of(const Attend& p, const Segment& segment, u32 base) {
    const bool fresh = base >= segment.prefix_len;
    const bool prefix = base + KEYS <= segment.prefix_len && !(p.flags & PREFIX_PAGES);
    const u32 at = fresh ? segment.fresh_begin + (base - segment.prefix_len) : segment.prefix_begin + base;
    return Spot{(p.flags & MAPPED) && (fresh || prefix), fresh, i32(at)};
}
// Asks for the blocks of a tile, W lanes wide.
template <u32 W>
DEVICE void ask_boxes(const TensorMap& map, u8* tile, u32 head, i32 at, Mark* there) {
    mark_arrive_expecting(there, W / LANES * BLOCK_BYTES);
    UNROLL
    for (u32 i = 0; i < W / LANES; i++) box_3d(tile + i * BLOCK_BYTES, map, i32(i * LANES), i32(head), at, there);
}
// Where row `row` and its piece `piece` lie in a block.
DEVICE u32 piece_at(u32 row, u32 piece) { return row * ROW_BYTES + (piece ^ (row % 8)) * 16; }

// This thread's share of a row of `width` elements: zeros past its end, and for a row that is not there (0).
template <u32 W, u32 BYTES>
DEVICE void bring_row(u8* tile, u32 row, u64 from, u32 width, bool whole) {
    const u32 piece = thread_x() % PIECE;
    NO_UNROLL
    for (u32 i = 0; i < W / LANES; i++) {
        u8* to = tile + i * BYTES + piece_at(row, piece);
        if (whole) bring(to, from, width, i * PIECE + piece);
        else bring_slowly(to, from, width, i * PIECE + piece);
    }
}
// Once the copies of the whole group are there, products may read them.
DEVICE void gathered() {
    cp_async_commit();
    cp_async_wait<0>();
    async_fence();
    named_sync(GATHERED, GROUP);
}

DEVICE void produce(const AttendBoxes& maps, u8* shared, Told& told) {
    const Attend& p = maps.attend;
    const u32 thread = thread_x() % GROUP;
    const bool negate = scale_of<false>(p).negate;
    const bool whole = (p.flags & ALIGNED) && p.D % 8 == 0 && p.Dv % 8 == 0;
    // The warp that asks for boxes, known to be a whole one.
    const bool asks = shfl_idx(thread / 32, 0) == 0;
    Turn keys_turn{0, 0}, values_turn{0, 0};
    u32 count = 0;
    walk(p, [&](const Unit& unit, const Item& item, u32 row_index, const Row& row) {
        const Segment segment = segments_of(p.image)[row_index];
        const u32 head = item.kv_head_begin;
        // What some query of the row sees: all of it is numbers.
        const u32 seen_lo = p.window_left < 0
                                ? row.kv_begin
                                : u32(most(i64(row.kv_begin), i64(row.kv_len) - i64(row.q_len) - p.window_left));
        const u32 seen_hi = row.kv_len;
        // A tile by the whole group: the threads that had nothing to do with boxes come from where they were.
        auto gather = [&](u8* tile, u32 base, bool values, Mark* there, Mark* read, u32 parity) {
            if (asks) mark_wait(read, parity);
            named_sync(GATHERED, GROUP);
            const Keys keys = keys_of<SOURCE>(p, row_index, row, head, 2);
            NO_UNROLL
            for (u32 r = thread / PIECE; r < KEYS; r += GROUP / PIECE) {
                const u32 key = base + r;
                Place2 place{0, 0};
                if (key >= seen_lo && key < seen_hi) place = key_at<SOURCE>(keys, key);
                if (values) bring_row<VALUES, BLOCK_BYTES>(tile, r, place.v, p.Dv, whole);
                else bring_row<WIDTH, BLOCK_BYTES>(tile, r, place.k, p.D, whole);
            }
            gathered();
            if (thread == 0) mark_arrive(there);
        };
        auto bring_keys = [&](u32 base) {
            u8* tile = shared + KEYS_AT + keys_turn.slot * KEY_BYTES;
            Mark *there = &told.keys[keys_turn.slot], *read = &told.keys_read[keys_turn.slot];
            const u32 parity = keys_turn.parity ^ 1;
            const Spot spot = spot_of(p, segment, base);
            if (!spot.boxed) {
                gather(tile, base, false, there, read, parity);
            } else if (asks) {
                mark_wait(read, parity);
                if (elected()) ask_boxes<WIDTH>(spot.fresh ? maps.keys : maps.key_prefix, tile, head, spot.at, there);
            }
            keys_turn.next();
        };
        auto bring_values = [&](u32 base) {
            u8* tile = shared + VALUES_AT + values_turn.slot * VALUE_BYTES;
            Mark *there = &told.values[values_turn.slot], *read = &told.values_read[values_turn.slot];
            const u32 parity = values_turn.parity ^ 1;
            const Spot spot = spot_of(p, segment, base);
            if (!spot.boxed || base < seen_lo || base + KEYS > seen_hi) {
                gather(tile, base, true, there, read, parity);
            } else if (asks) {
                mark_wait(read, parity);
                if (elected()) ask_boxes<VALUES>(spot.fresh ? maps.values : maps.value_prefix, tile, head, spot.at, there);
            }
            values_turn.next();
        };
        auto bring_queries = [&] {
            const u32 group = unit.output.group, lanes = unit.output.lanes;
            if ((p.flags & MAPPED) && !negate) {
                // Rows are (token, head of the group): a box of both.
                if (asks && elected()) {
                    const u32 rows = QUERIES / group * group;
                    mark_arrive_expecting(&told.queries, WIDTH / LANES * rows * ROW_BYTES);
                    UNROLL
                    for (u32 i = 0; i < WIDTH / LANES; i++)
                        box_3d(shared + i * QUERY_BLOCK_BYTES, maps.queries, i32(i * LANES), i32(unit.output.head_begin),
                               i32(unit.output.token_begin), &told.queries);
                }
                return;
            }
            const Queries queries = queries_of<SOURCE>(p, row, item.q_begin, head, 2);
            NO_UNROLL
            for (u32 r = thread / PIECE; r < QUERIES; r += GROUP / PIECE) {
                const T* from = nullptr;
                if (r < lanes) {
                    const i64 at = i64(r / group) * queries.token + i64(r % group) * queries.head;
                    from = reinterpret_cast<const T*>(queries.at) + at;
                }
                NO_UNROLL
                for (u32 i = 0; i < WIDTH / LANES; i++) {
                    const u32 piece = thread % PIECE;
                    U4 v{0, 0, 0, 0};
                    if (from) v = load_chunk(from, p.D, i * PIECE + piece, whole);
                    v = U4{turned(v.x, negate), turned(v.y, negate), turned(v.z, negate), turned(v.w, negate)};
                    store16(shared + i * QUERY_BLOCK_BYTES + piece_at(r, piece), v);
                }
            }
            gathered();
            if (thread == 0) mark_arrive(&told.queries);
        };
        const u32 begin = unit.tile(), end = unit.tiles();
        // The first tile goes ahead: the queries' place is free later than a tile's.
        NO_UNROLL
        for (u32 tile = begin; tile <= end; tile++) {
            if (tile < end) bring_keys(tile * KEYS);
            if (tile == begin) {
                tell(told, unit, count, thread);
                bring_queries();
                count += 1;
            } else {
                bring_values((tile - 1) * KEYS);
            }
        }
    });
    tell_over(told, count, thread);
    if (thread == 0) mark_arrive(&told.queries);
}

// By all threads of a block, before any of them works; so many warps read tiles and queries.
DEVICE void start(Told& told, u32 warps) {
    if (thread_x() == 0) {
        UNROLL
        for (u32 slot = 0; slot < STAGES; slot++) {
            mark_init(&told.keys[slot], 1), mark_init(&told.values[slot], 1);
            mark_init(&told.keys_read[slot], warps), mark_init(&told.values_read[slot], warps);
        }
        // That there is something, and that its queries are there.
        mark_init(&told.queries, 2);
        mark_init(&told.queries_read, warps);
        marks_ready();
    }
    block_sync();
}
