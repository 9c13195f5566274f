// Whole entries from place to place: tokens into pages, pages into tokens, rows by index, pages to pages. Bytes move as they are,
// whatever they mean: 16 at a time where both sides lie so, else 4, 2 or 1 (UNIT says which).
//
// Where entries go is an array on the device (the *_at kernels), or comes with the launch, some hundred at a time.
#include "ptx.cuh"

#if UNIT == 16
typedef U4 Piece;
#elif UNIT == 4
typedef u32 Piece;
#elif UNIT == 2
typedef u16 Piece;
#else
typedef u8 Piece;
#endif
constexpr u32 THREADS = 256, WARPS = THREADS / 32;

// Entries of `chunks` runs of `chunk_bytes` bytes each, a multiple of UNIT. All distances are in bytes.
struct Array {
    u64 at;
    i64 outer;  // from one page, or one token of a packed array, to the next
    i64 inner;  // from one slot of a page to the next
    i64 chunk;  // from one run of an entry to the next
};
struct Move {
    Array from, to;
    u64 indices;  // on the device; 0: `list`
    u64 entries;  // how many there are
    u64 limit;    // what an index must be below; those that are not move nothing
    u64 first;    // of a gather from pages: the offset of token 0
    u32 page_size, chunks, chunk_bytes, begin;  // begin: the entry that list[0] is for
};
struct Both {
    Move of[2];  // by the same indices
};
constexpr u32 LISTED = 480;
struct Listed {
    Move move;
    i64 list[LISTED];
};
static_assert(sizeof(Move) == 112 && sizeof(Both) == 224 && sizeof(Listed) == 112 + 8 * LISTED, "as in moves.rs");

// One warp moves an entry; zeros if there is no `from`.
DEVICE void move_entry(const Move& move, u64 from, u64 to) {
    const u32 each = move.chunk_bytes / UNIT, all = each * move.chunks;
    for (u32 i = lane(); i < all; i += 32) {
        u32 chunk = i / each, piece = i % each;
        Piece value = {};
        if (from) value = reinterpret_cast<const Piece*>(from + u64(i64(chunk) * move.from.chunk))[piece];
        reinterpret_cast<Piece*>(to + u64(i64(chunk) * move.to.chunk))[piece] = value;
    }
}
DEVICE u64 slot_of(const Array& array, u64 slot, u32 page_size) {
    const u64 page = slot / page_size;
    return array.at + u64(i64(page) * array.outer + i64(slot - page * page_size) * array.inner);
}
DEVICE u64 entry_of(const Array& array, u64 entry) { return array.at + u64(i64(entry) * array.outer); }

// A piece, asked for here and no later.
#if UNIT == 16
DEVICE Piece piece_here(const Piece* from) { return load16_fresh(from); }
#else
DEVICE Piece piece_here(const Piece* from) { return *from; }
#endif

// Entry e of `from` goes to slot index[e] of the pages `to`; -1: nowhere. What goes there, where it lies in a row, is on its way before
// it is known where to.
DEVICE void scatter_one(const Move& move, u64 entry, i64 slot) {
    constexpr u32 AT_ONCE = 4;
    const u64 from = entry_of(move.from, entry);
    const auto is_there = [&] { return slot >= 0 && u64(slot) < move.limit; };
    if (move.chunks != 1) {
        if (is_there()) move_entry(move, from, slot_of(move.to, u64(slot), move.page_size));
        return;
    }
    const u32 all = move.chunk_bytes / UNIT;
    NO_UNROLL
    for (u32 first = lane(); first < all; first += 32 * AT_ONCE) {
        Piece pieces[AT_ONCE];
        UNROLL
        for (u32 i = 0; i < AT_ONCE; i++)
            if (first + 32 * i < all) pieces[i] = piece_here(reinterpret_cast<const Piece*>(from) + first + 32 * i);
        if (!is_there()) return;
        Piece* to = reinterpret_cast<Piece*>(slot_of(move.to, u64(slot), move.page_size)) + first;
        UNROLL
        for (u32 i = 0; i < AT_ONCE; i++)
            if (first + 32 * i < all) to[32 * i] = pieces[i];
    }
}
// Row index[e] of `from` becomes row e of `to`; negative: zeros.
DEVICE void gather_one(const Move& move, u64 entry, i64 row) {
    if (row >= 0 && u64(row) >= move.limit) return;
    move_entry(move, row < 0 ? 0 : entry_of(move.from, u64(row)), entry_of(move.to, entry));
}
// Token e lies at offset first + e of the pages that are listed; page is that of the offset.
DEVICE void unpage_one(const Move& move, u64 entry, i64 page) {
    if (page < 0 || u64(page) >= move.limit) return;
    u64 slot = (move.first + entry) % move.page_size;
    move_entry(move, move.from.at + u64(page * move.from.outer + i64(slot) * move.from.inner), entry_of(move.to, entry));
}

#define MSTAR_EACH(ENTRY, COUNT) \
    for (u64 ENTRY = u64(block_x()) * WARPS + warp(); ENTRY < (COUNT); ENTRY += u64(grid_x()) * WARPS)

MSTAR_KERNEL(scatter_at, Move, 256, 4) {
    MSTAR_EACH(entry, p.entries) scatter_one(p, entry, reinterpret_cast<const i64*>(p.indices)[entry]);
}
// Two sides of each token, keys and values or the parts of a latent, a warp each.
MSTAR_KERNEL(scatter_both, Both, 256, 4) {
    MSTAR_EACH(at, 2 * p.of[0].entries) {
        const u32 side = at >= p.of[0].entries;
        const u64 entry = side ? at - p.of[0].entries : at;
        scatter_one(p.of[side], entry, reinterpret_cast<const i64*>(p.of[0].indices)[entry]);
    }
}
MSTAR_KERNEL(scatter_list, Listed, 256, 4) {
    MSTAR_EACH(entry, p.move.entries) scatter_one(p.move, p.move.begin + entry, p.list[entry]);
}
MSTAR_KERNEL(gather_at, Move, 256, 4) {
    MSTAR_EACH(entry, p.entries) gather_one(p, entry, reinterpret_cast<const i64*>(p.indices)[entry]);
}
MSTAR_KERNEL(gather_list, Listed, 256, 4) {
    MSTAR_EACH(entry, p.move.entries) gather_one(p.move, p.move.begin + entry, p.list[entry]);
}
MSTAR_KERNEL(unpage_at, Move, 256, 4) {
    MSTAR_EACH(entry, p.entries) {
        unpage_one(p, entry, reinterpret_cast<const i32*>(p.indices)[(p.first + entry) / p.page_size]);
    }
}
// list[0] is the page of offset first + begin.
MSTAR_KERNEL(unpage_list, Listed, 256, 4) {
    MSTAR_EACH(entry, p.move.entries) {
        u64 of = p.move.begin + entry;
        u64 page = (p.move.first + of) / p.move.page_size - (p.move.first + p.move.begin) / p.move.page_size;
        unpage_one(p.move, of, p.list[page]);
    }
}
// Pairs (from, to) of pages in the list, each with the tokens that are copied in the third.
MSTAR_KERNEL(copy_list, Listed, 256, 4) {
    const u32 page_size = p.move.page_size;
    MSTAR_EACH(entry, p.move.entries * page_size) {
        const u64 of = entry / page_size, slot = entry % page_size;
        if (slot >= u64(p.list[3 * of + 2])) continue;
        u64 from = p.move.from.at + u64(p.list[3 * of] * p.move.from.outer + i64(slot) * p.move.from.inner);
        u64 to = p.move.to.at + u64(p.list[3 * of + 1] * p.move.to.outer + i64(slot) * p.move.to.inner);
        move_entry(p.move, from, to);
    }
}
