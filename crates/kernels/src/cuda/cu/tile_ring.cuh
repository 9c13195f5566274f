// The warpgroup that brings queries, and tiles of keys and values, into a ring: as boxes where a tensor map has them, else gathered.
//
// A tile lies in blocks of 64 lanes, rows of 128 bytes whose 16-byte pieces are turned by the row, as products read them. Keys that nobody
// sees are read too, where a box has them, and hidden by what scores become; values that no query of the row sees, which may be
// anything, are not: a tile with such a value is gathered, and has zeros there.
//
// Defines: those of tile.cuh; GENERAL, of which queries are not turned; SOURCE; WIDTH, the padded head width; VALUES, the padded width of a value; CONSUMERS, groups of 64 query
// vectors; KEYS of a tile; STAGES; QUERY_STAGES, how many items' queries have room: of two, the second's come while the first is
// worked on.
#pragma once

#include "ring.cuh"
#include "tile.cuh"

constexpr u32 ROWS = 64, QUERIES = CONSUMERS * ROWS, LANES = 64, PIECE = 8, ROW_BYTES = LANES * 2, EIGHT_ROWS = 8 * ROW_BYTES;
constexpr u32 BLOCK_BYTES = KEYS * ROW_BYTES, QUERY_BLOCK_BYTES = QUERIES * ROW_BYTES;
constexpr u32 QUERY_BYTES = WIDTH / LANES * QUERY_BLOCK_BYTES;
constexpr u32 KEY_BYTES = WIDTH / LANES * BLOCK_BYTES, VALUE_BYTES = VALUES / LANES * BLOCK_BYTES;
static_assert(WIDTH % LANES == 0 && VALUES % LANES == 0 && KEYS % 16 == 0 && (SOURCE == SEGMENTS || SOURCE == PAGES), "what tiles are served for");

// The parameter: maps, where flags have MAPPED, of queries [T, H, D]; of keys and values, fresh ones [U, G, D] or pages [P, S, G, D], a
// tile's keys or `slots` of them a box; and of prefixes of both, packed or in pages as flags say. Where `slots` is 0 no box has pages.
struct AttendBoxes {
    Attend attend;
    u32* turns;  // 0, which it leaves as 0: items that blocks have taken beyond the first of each; null where they take them in a fixed order
    u32 slots, reserved[7];
    TensorMap keys, values, queries, key_prefix, value_prefix;
};
static_assert(sizeof(AttendBoxes) == 1216, "as in exec/params.rs");

// What a block works on: an item.
struct Unit {
    Output output;
    Reach reach;      // of the item
    i64 first;        // position of its first query token
    u64 mask_begin;   // of that token in the custom mask
    u32 mask_words;   // 0: there is none
    bool over;

    u32 tile() const { return reach.lo / KEYS; }
    u32 tiles() const { return reach.lo < reach.hi ? (reach.hi + KEYS - 1) / KEYS : reach.lo / KEYS; }
};

// What the group that produces knows of an item beside.
struct Work {
    Unit unit;
    Row row;
    Segment segment;
    u32 row_index, head, q_begin, q_count;
};

// What the groups of a block tell each other.
struct Told {
    Mark keys[STAGES], keys_read[STAGES], values[STAGES], values_read[STAGES];
    Mark queries[QUERY_STAGES], queries_read[QUERY_STAGES];  // of queries, and of units
    Unit units[2];
    Work works[2];  // the item that the producer is at, and the next
};

// Shared memory: queries, keys, values, marks.
constexpr u32 KEYS_AT = QUERY_STAGES * QUERY_BYTES, VALUES_AT = KEYS_AT + STAGES * KEY_BYTES, TOLD_AT = VALUES_AT + STAGES * VALUE_BYTES;
constexpr u32 SHARED_BYTES = TOLD_AT + sizeof(Told);
static_assert(sizeof(Told) <= 32 * STAGES + 16 * QUERY_STAGES + 2 * 80 + 2 * 160, "as in exec/heads.rs");
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

// The barrier of the group that produces.
constexpr u32 GATHERED = 1;

// Looks the `at`-th item of a launch up, three loads one behind the other.
DEVICE void look_up(const Attend& p, Work& work, u32 at) {
    const Span span = items_of(p);
    work.unit.over = at >= span.end - span.begin;
    if (work.unit.over) return;
    const Item item = items_of(p.image)[span.begin + at];
    const Member member = members_of(p.image)[item.member_begin];
    const Row row = rows_of(p.image)[member.row];
    work.unit.output = output_of(p, item, member, row);
    work.unit.reach = reach_of(p, row, item);
    work.unit.first = i64(row.kv_len) - i64(row.q_len) + i64(item.q_begin);
    work.unit.mask_words = SOURCE == PAGES ? row.mask_words : 0;
    work.unit.mask_begin = row.mask_begin + u64(item.q_begin) * row.mask_words;
    work.row = row, work.row_index = member.row;
    work.head = item.kv_head_begin, work.q_begin = item.q_begin, work.q_count = item.q_count;
    if (SOURCE == SEGMENTS) work.segment = segments_of(p.image)[member.row];
}

// Calls `each(work)` for what this block is to do, by the group that produces; a thread of its second warp, which has nothing to do with boxes,
// looks the next item up meanwhile. Items are listed largest first, and blocks take the next one as they come to it: who works on what
// changes no bit. Where nothing counts them, every other round goes from the last block to the first, so that blocks have about as much.
template <class Each>
DEVICE void walk(const AttendBoxes& maps, Told& told, Each each) {
    const Attend& p = maps.attend;
    const Span span = items_of(p);
    const bool scout = thread_x() % GROUP == 32;
    if (scout) look_up(p, told.works[0], block_x());
    warp_sync();
    named_sync(GATHERED, GROUP);
    NO_UNROLL
    for (u32 round = 0;; round++) {
        const Work& work = told.works[round % 2];
        if (work.unit.over) break;
        if (scout) {
            u32 next = (round + 1) * grid_x() + (round % 2 ? block_x() : grid_x() - 1 - block_x());
            if (maps.turns) {
                // Every block is refused once: the last one of all refusals starts anew.
                const u32 ticket = atomic_add(maps.turns, 1);
                if (ticket + 1 == span.end - span.begin) *maps.turns = 0;
                next = ticket + grid_x();
            }
            look_up(p, told.works[(round + 1) % 2], next);
        }
        warp_sync();
        each(work);
        named_sync(GATHERED, GROUP);
    }
}

// Where a unit's queries are, and which turn it is.
DEVICE Turn query_turn(u32 count) { return Turn{count % QUERY_STAGES, count / QUERY_STAGES % 2}; }
DEVICE u8* queries_at(u8* shared, u32 count) { return shared + count % QUERY_STAGES * QUERY_BYTES; }

// The word of the custom mask that has keys 64 `word` and on, for query token `t` of a unit.
DEVICE u64 masked(const Attend& p, const Unit& unit, u32 t, u32 word) {
    return word < unit.mask_words ? masks_of(p.image)[unit.mask_begin + u64(t) * unit.mask_words + word] : 0;
}

// ---- producer ----

// How a tile of a row comes, and from where on: `at` counts keys of a packed tensor, or slots of the row's pages.
enum : u32 { GATHER, FRESH, PACKED, PAGED };
struct Spot {
    u32 how, at;
};
DEVICE Spot spot_of(const AttendBoxes& maps, const Row& row, const Segment& segment, u32 base) {
    const Attend& p = maps.attend;
    u32 at = base - row.kv_offset;
    if (SOURCE == SEGMENTS) {
        const u32 prefix = segment.prefix_len;
        if (base >= prefix && p.flags & MAPPED) return Spot{FRESH, segment.fresh_begin + (base - prefix)};
        if (base + KEYS > prefix) return Spot{GATHER, 0};
        at = segment.prefix_begin + base;
        if (p.flags & MAPPED && !(p.flags & PREFIX_PAGES)) return Spot{PACKED, at};
    }
    const bool boxed = p.flags & MAPPED && maps.slots && (SOURCE == SEGMENTS || base >= row.kv_offset);
    return Spot{boxed && at % maps.slots == 0 ? PAGED : GATHER, at};
}
// Page ids of a tile's boxes, each in a lane of its own; asked for long before they are needed. Behind the row's last page nothing is seen,
// and it stands for others.
DEVICE i32 pages_of_tile(const AttendBoxes& maps, const Row& row, const Spot& spot) {
    if (spot.how != PAGED) return 0;
    const u32 page = (spot.at + least(lane(), KEYS / maps.slots - 1) * maps.slots) / maps.attend.S;
    return pages_of(maps.attend.image)[row.page_begin + least(page, row.page_count - 1)];
}
// Asks for a tile, W lanes wide; by a whole warp.
template <u32 W>
DEVICE void ask_boxes(const TensorMap& map, const AttendBoxes& maps, u8* tile, u32 head, const Spot& spot, i32 pages, Mark* there) {
    if (elected()) mark_arrive_expecting(there, W / LANES * BLOCK_BYTES);
    if (spot.how != PAGED) {
        if (elected()) {
            UNROLL
            for (u32 i = 0; i < W / LANES; i++) box_3d(tile + i * BLOCK_BYTES, map, i32(i * LANES), i32(head), i32(spot.at), there);
        }
        return;
    }
    u32 slot = spot.at % maps.attend.S;
    NO_UNROLL
    for (u32 key = 0, n = 0; key < KEYS; key += maps.slots, n++) {
        const i32 page = shfl_idx(pages, n);
        if (elected()) {
            UNROLL
            for (u32 i = 0; i < W / LANES; i++)
                box_4d(tile + i * BLOCK_BYTES + key * ROW_BYTES, map, i32(i * LANES), i32(head), i32(slot), page, there);
        }
        slot += maps.slots;
        if (slot == maps.attend.S) slot = 0;
    }
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

// Tells of the count-th unit, none: there is no more, as soon as there is room for its queries. By the warp that asks for boxes: to
// another one that comes late, when the unit may be over, a mark that has turned twice would look as if it had not.
DEVICE void tell(Told& told, const Unit* unit, u32 count) {
    const Turn turn = query_turn(count);
    mark_wait(&told.queries_read[turn.slot], turn.parity ^ 1);
    if (thread_x() % GROUP != 0) return;
    if (unit) told.units[count % 2] = *unit;
    else told.units[count % 2].over = true;
    mark_arrive(&told.queries[turn.slot]);
}

DEVICE void produce(const AttendBoxes& maps, u8* shared, Told& told) {
    const Attend& p = maps.attend;
    const u32 thread = thread_x() % GROUP;
    const bool negate = scale_of<GENERAL>(p).negate;
    const bool whole = (p.flags & ALIGNED) && p.D % 8 == 0 && p.Dv % 8 == 0;
    // The warp that asks for boxes, known to be a whole one.
    const bool asks = shfl_idx(thread / 32, 0) == 0;
    Turn keys_turn{0, 0}, values_turn{0, 0};
    u32 count = 0;
    if ((p.flags & MAPPED) && asks && elected()) prefetch_map(maps.keys), prefetch_map(maps.values), prefetch_map(maps.queries);
    walk(maps, told, [&](const Work& work) {
        const Unit& unit = work.unit;
        const Row& row = work.row;
        const Segment& segment = work.segment;
        const u32 head = work.head;
        // What some query of the row sees, a mask aside: all of it is numbers.
        const u32 seen_lo = p.window_left < 0
                                ? row.kv_begin
                                : u32(most(i64(row.kv_begin), i64(row.kv_len) - i64(row.q_len) - p.window_left));
        const u32 seen_hi = row.kv_len;
        // Whether some query of the item sees a key that a mask leaves to it.
        auto left = [&](u32 key) {
            NO_UNROLL
            for (u32 t = 0; t < work.q_count; t++) {
                const Reach seen = span_at(p, unit.reach, unit.first + i64(t));
                if (key >= seen.lo && key < seen.hi && masked(p, unit, t, key / 64) >> (key % 64) & 1) return true;
            }
            return false;
        };
        // A tile by the whole group: the threads that had nothing to do with boxes come from where they were.
        auto gather = [&](u8* tile, u32 base, bool values, Mark* there, Mark* read, u32 parity) {
            if (asks) mark_wait(read, parity);
            named_sync(GATHERED, GROUP);
            const Keys keys = keys_of<SOURCE>(p, work.row_index, row, head, 2);
            NO_UNROLL
            for (u32 r = thread / PIECE; r < KEYS; r += GROUP / PIECE) {
                const u32 key = base + r;
                Place2 place{0, 0};
                if (key >= seen_lo && key < seen_hi) place = key_at<SOURCE>(keys, key);
                if (values && unit.mask_words && !left(key)) place.v = 0;
                if (values) bring_row<VALUES, BLOCK_BYTES>(tile, r, place.v, p.Dv, whole);
                else bring_row<WIDTH, BLOCK_BYTES>(tile, r, place.k, p.D, whole);
            }
            gathered();
            if (thread == 0) mark_arrive(there);
        };
        auto bring_keys = [&](u32 base, i32 pages) {
            u8* tile = shared + KEYS_AT + keys_turn.slot * KEY_BYTES;
            Mark *there = &told.keys[keys_turn.slot], *read = &told.keys_read[keys_turn.slot];
            const u32 parity = keys_turn.parity ^ 1;
            const Spot spot = spot_of(maps, row, segment, base);
            if (spot.how == GATHER) {
                gather(tile, base, false, there, read, parity);
            } else if (asks) {
                mark_wait(read, parity);
                const bool prefix = SOURCE == SEGMENTS && spot.how != FRESH;
                ask_boxes<WIDTH>(prefix ? maps.key_prefix : maps.keys, maps, tile, head, spot, pages, there);
            }
            keys_turn.next();
        };
        auto bring_values = [&](u32 base, i32 pages) {
            u8* tile = shared + VALUES_AT + values_turn.slot * VALUE_BYTES;
            Mark *there = &told.values[values_turn.slot], *read = &told.values_read[values_turn.slot];
            const u32 parity = values_turn.parity ^ 1;
            const Spot spot = spot_of(maps, row, segment, base);
            if (spot.how == GATHER || base < seen_lo || base + KEYS > seen_hi || unit.mask_words) {
                gather(tile, base, true, there, read, parity);
            } else if (asks) {
                mark_wait(read, parity);
                const bool prefix = SOURCE == SEGMENTS && spot.how != FRESH;
                ask_boxes<VALUES>(prefix ? maps.value_prefix : maps.values, maps, tile, head, spot, pages, there);
            }
            values_turn.next();
        };
        auto pages_at = [&](u32 tile) { return asks ? pages_of_tile(maps, row, spot_of(maps, row, segment, tile * KEYS)) : 0; };
        auto bring_queries = [&] {
            u8* to = queries_at(shared, count);
            Mark* there = &told.queries[count % QUERY_STAGES];
            const u32 group = unit.output.group, lanes = unit.output.lanes;
            if ((p.flags & MAPPED) && !negate) {
                // Rows are (token, head of the group): a box of both.
                if (asks && elected()) {
                    const u32 rows = QUERIES / group * group;
                    mark_arrive_expecting(there, WIDTH / LANES * rows * ROW_BYTES);
                    UNROLL
                    for (u32 i = 0; i < WIDTH / LANES; i++)
                        box_3d(to + i * QUERY_BLOCK_BYTES, maps.queries, i32(i * LANES), i32(unit.output.head_begin),
                               i32(unit.output.token_begin), there);
                }
                return;
            }
            // There is room, the first warp knows.
            named_sync(GATHERED, GROUP);
            const Queries queries = queries_of<SOURCE>(p, row, work.q_begin, head, 2);
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
                    store16(to + i * QUERY_BLOCK_BYTES + piece_at(r, piece), v);
                }
            }
            gathered();
            if (thread == 0) mark_arrive(there);
        };
        const u32 begin = unit.tile(), end = unit.tiles();
        i32 pages = begin < end ? pages_at(begin) : 0, before = 0;
        // The first tile goes ahead: the queries' place is free later than a tile's.
        NO_UNROLL
        for (u32 tile = begin; tile <= end; tile++) {
            if (tile < end) bring_keys(tile * KEYS, pages);
            if (tile == begin) {
                if (asks) tell(told, &unit, count);
                bring_queries();
                count += 1;
            } else {
                bring_values((tile - 1) * KEYS, before);
            }
            before = pages;
            if (tile + 1 < end) pages = pages_at(tile + 1);
        }
    });
    if (asks) tell(told, nullptr, count);
    if (thread == 0) mark_arrive(&told.queries[count % QUERY_STAGES]);
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
        UNROLL
        for (u32 slot = 0; slot < QUERY_STAGES; slot++) mark_init(&told.queries[slot], 2), mark_init(&told.queries_read[slot], warps);
        marks_ready();
    }
    block_sync();
}
