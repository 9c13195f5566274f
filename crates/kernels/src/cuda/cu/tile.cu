// Many query vectors: tiles of queries over tiles of keys, as FlashAttention-2 does it (Dao, arXiv 2307.08691), over pages,
// segments or blocks.
//
// A block works for WARPS x SPREAD x 16 of an item's query vectors at a time. Queries stay in shared memory; a tile of keys and
// values is summed while the next one is on its way, gathered by a table of addresses that is made one tile further ahead.
// Scores and weights live in registers. Tiles start at multiples of KEYS; those that no query sees are not visited, those that
// no query of a warp sees cost it nothing, and only those at an edge are masked.
//
// Keys and values in e4m3 (CODES 1, over pages, with queries of bf16) come as they lie and are made bf16 once they are there, which is
// exact; their scales meet scores, and weights before these meet values.
//
// Defines: KV_TYPE; CODES; SOURCE; WIDTH, the padded head width; VALUES, the padded value columns of a pass; WARPS; SPREAD, times 16
// rows of a warp; KEYS of a tile, 32 or 64; GENERAL 1 where a soft cap or slopes change scores; over blocks SCORES, SCORE_0 ..,
// MASKS, MASK_0 .. (mods.cuh), and WHOLE 1 where a tile's keys are neighbours in the sequence; RESIDENT blocks an SM.
#include "codes.cuh"
#include "mods.cuh"
#include "tile.cuh"

#ifndef CODES
#define CODES 0
#endif
#ifndef WHOLE
#define WHOLE 0
#endif
#ifndef SCORE_0
#define SCORE_0 0
#endif
#ifndef SCORE_1
#define SCORE_1 0
#endif
#ifndef SCORE_2
#define SCORE_2 0
#endif
#ifndef SCORE_3
#define SCORE_3 0
#endif
#ifndef SCORE_4
#define SCORE_4 0
#endif
#ifndef SCORE_5
#define SCORE_5 0
#endif
#ifndef SCORE_6
#define SCORE_6 0
#endif
#ifndef SCORE_7
#define SCORE_7 0
#endif

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 WARP_ROWS = 16 * SPREAD, QUERIES = WARPS * WARP_ROWS;
constexpr u32 K_BYTES = KEYS * WIDTH * 2, V_BYTES = KEYS * VALUES * 2, STAGE = K_BYTES + V_BYTES;
constexpr u32 Q_BYTES = QUERIES * WIDTH * 2;
// Of codes there is one stage as products read it, and two as codes lie.
constexpr u32 SIZE = CODES ? 1 : 2, CODE_BYTES = KEYS * (WIDTH + VALUES), SCALED = CODES ? KEYS : 1;
static_assert(!CODES || (SOURCE == PAGES && KV_TYPE == 1), "what codes are served for");
constexpr u32 STEPS = WIDTH / 16, COLUMNS = VALUES / 8, TILES = KEYS / 8;
constexpr bool MODDED = SOURCE == BLOCKS && SCORES + MASKS > 0;
// The score mods that only hide keys are taken for masks; whether some hides, and whether some does more.
#define MSTAR_EITHER(WHICH)                                                                                            \
    ((SCORES > 0 && WHICH(SCORE_0)) || (SCORES > 1 && WHICH(SCORE_1)) || (SCORES > 2 && WHICH(SCORE_2)) ||           \
     (SCORES > 3 && WHICH(SCORE_3)) || (SCORES > 4 && WHICH(SCORE_4)) || (SCORES > 5 && WHICH(SCORE_5)) ||           \
     (SCORES > 6 && WHICH(SCORE_6)) || (SCORES > 7 && WHICH(SCORE_7)))
#define MSTAR_HIDES(MOD) ((MOD) == SCORE_CAUSAL)
#define MSTAR_CHANGES(MOD) ((MOD) > SCORE_CAUSAL)
#define MSTAR_OF_USER(MOD) ((MOD) == SCORE_USER)
constexpr bool CAUSAL_MOD = MSTAR_EITHER(MSTAR_HIDES), CHANGING = MSTAR_EITHER(MSTAR_CHANGES);
// Scores are base-2 logits before mods change them; a user's mod takes natural ones.
constexpr bool BINARY = !MSTAR_EITHER(MSTAR_OF_USER);
// Scores leave the product as they are, and the scale enters the exponent.
constexpr bool RAW = GENERAL == 0 && !CHANGING;
static_assert(2 * KEYS <= THREADS, "a thread for each key and each value of a tile");
static_assert(KEYS == 32 || KEYS == 64, "a tile lies in one word of a custom mask");

// What the rows of the block are.
struct Lane {
    u32 lo, hi;   // what it sees, a mask aside
    u32 token;    // of its row
    float slope;
};
// What some row of a warp sees, and what all of its rows do.
struct Bounds {
    u32 some_lo, some_hi, all_lo, all_hi;
};
// Where a tile's keys and values lie, 0: not seen by any query; over blocks also which keys they are.
struct Addresses {
    u64 k[KEYS], v[KEYS];
    i32 index[KEYS];
    u32 partial[KEYS / 32];  // bits of keys of which a mask decides
    i32 last[KEYS / 32];     // the largest index
    float k_scale[SCALED], v_scale[SCALED];  // of codes
};
// What the block works on; kept here and not in registers, which scores and sums fill.
struct Desk {
    u32 index, from, column;  // the item; the first of its query vectors, and of the value columns, that are in turn
    u32 lanes;                // query vectors of the item
    Item item;
    Member member;
    Row row;
    Queries q;
    Keys keys;
    Reach reach;    // of the item
    Reach reached;  // of the query vectors in turn
};
// What lies behind the queries and two stages.
struct Room {
    Addresses of[3];
    Lane lanes[QUERIES];
    Bounds bounds[WARPS];
    u32 seen[WARPS][4];
    float factor;                     // of scores in exponents
    u32 sees[SPREAD][THREADS];       // by each lane's rows
    float tops[2 * SPREAD][THREADS];  // the largest logits of each lane's rows, base 2
    float sums[2 * SPREAD][THREADS];  // of weights, each lane's share
    Desk desk;
};

// As exec/heads.rs asks for it.
constexpr u32 ROOM = 3 * (20 * KEYS + KEYS / 4) + (CODES ? 24 * KEYS : 0) + 16 * QUERIES + 32 * WARPS + 20 * SPREAD * THREADS + 544;
static_assert(sizeof(Room) <= ROOM, "exec/heads.rs gives a block this much");

// Lays an item on the desk. The other functions of the desk go on from there; one thread calls them.
DEVICE void open(const Attend& p, Desk& desk) {
    if (desk.index >= items_of(p).end) return;
    desk.from = desk.column = 0;
    desk.item = items_of(p.image)[desk.index];
    desk.member = members_of(p.image)[desk.item.member_begin];
    desk.row = rows_of(p.image)[desk.member.row];
    desk.lanes = desk.item.q_count * (p.H / p.G);
    desk.reach = reach_of(p, desk.row, desk.item);
    desk.q = queries_of<SOURCE>(p, desk.row, desk.item.q_begin, desk.item.kv_head_begin, 2);
    desk.keys = keys_of<SOURCE>(p, desk.member.row, desk.row, desk.item.kv_head_begin, SIZE);
}
// What the query vectors in turn reach together.
DEVICE void reach_out(const Attend& p, Desk& desk) {
    if (desk.index >= items_of(p).end) return;
    const u32 group = p.H / p.G;
    u32 first = desk.item.q_begin + desk.from / group;
    u32 last = desk.item.q_begin + (least(desk.from + QUERIES, desk.lanes) - 1) / group;
    Reach reached = desk.reach;
    reached.lo = most(reached.lo, span_of(p, desk.row, reached, first).lo);
    if (p.flags & CAUSAL) {
        i64 past = i64(desk.row.kv_len) - i64(desk.row.q_len) + i64(last) + 1;
        reached.hi = u32(most(i64(reached.lo), least(i64(reached.hi), past)));
    }
    desk.reached = reached;
}
// Values that are wider, and query vectors that are more, than the block holds take turns.
DEVICE void advance(const Attend& p, Desk& desk) {
    desk.column += VALUES;
    if (desk.column < p.Dv) return;
    desk.column = 0, desk.from += QUERIES;
    if (desk.from < desk.lanes) return;
    desk.index += grid_x();
    open(p, desk);
}

// The part of a tile's addresses that this thread finds.
struct Found {
    u64 at;
    i32 index;
    bool partial;
    float scale;
};
DEVICE Found find(const Attend& p, const Desk& desk, u32 base) {
    u32 key = base + thread_x() % KEYS;
    Found found{0, -1, false, 1.0f};
    if (thread_x() < 2 * KEYS && key >= desk.reached.lo && key < desk.reached.hi) {
        Place2 place = key_at<SOURCE>(desk.keys, key);
        found.at = thread_x() < KEYS ? place.k : place.v + SIZE * desk.column;
        if (CODES) found.scale = key_scale(thread_x() < KEYS ? p.k_scales : p.v_scales, desk.keys, desk.item.kv_head_begin, key);
        if (MODDED) {
            Key of = block_key(desk.keys, key);
            found.index = of.index, found.partial = of.partial;
        }
    }
    return found;
}
// Called by whole warps.
DEVICE void note(Addresses& to, const Found& found) {
    u32 t = thread_x();
    if (t >= 2 * KEYS) return;
    if (t >= KEYS) {
        to.v[t - KEYS] = found.at;
        if (CODES) to.v_scale[t - KEYS] = found.scale;
        return;
    }
    to.k[t] = found.at;
    if (CODES) to.k_scale[t] = found.scale;
    if (MODDED) {
        to.index[t] = found.index;
        u32 bits = ballot(found.partial), last = warp_max(u32(found.index + 1));
        if (lane() == 0) to.partial[t / 32] = bits, to.last[t / 32] = i32(last) - 1;
    }
}

// Starts the copies of a tile's keys and values; `whole`: rows are aligned and of whole chunks.
DEVICE void fetch(const Attend& p, const Addresses& of, u8* stage, u32 column) {
    const bool whole = (p.flags & ALIGNED) && p.D % 8 == 0 && p.Dv % 8 == 0;
    constexpr u32 K_CHUNKS = WIDTH / 8, V_CHUNKS = VALUES / 8;
    const u32 width = p.Dv - column, thread = opaque(thread_x());
    if (whole) {
        UNROLL
        for (u32 i = 0; i < KEYS * K_CHUNKS / THREADS; i++) {
            u32 at = i * THREADS + thread, r = at / K_CHUNKS, chunk = at % K_CHUNKS;
            bring(chunk_at<WIDTH>(stage, r, chunk), of.k[r], p.D, chunk);
        }
        UNROLL
        for (u32 i = 0; i < KEYS * V_CHUNKS / THREADS; i++) {
            u32 at = i * THREADS + thread, r = at / V_CHUNKS, chunk = at % V_CHUNKS;
            bring(chunk_at<VALUES>(stage + K_BYTES, r, chunk), of.v[r], width, chunk);
        }
    } else {
        NO_UNROLL
        for (u32 at = thread; at < KEYS * K_CHUNKS; at += THREADS) {
            u32 r = at / K_CHUNKS, chunk = at % K_CHUNKS;
            bring_slowly(chunk_at<WIDTH>(stage, r, chunk), of.k[r], p.D, chunk);
        }
        NO_UNROLL
        for (u32 at = thread; at < KEYS * V_CHUNKS; at += THREADS) {
            u32 r = at / V_CHUNKS, chunk = at % V_CHUNKS;
            bring_slowly(chunk_at<VALUES>(stage + K_BYTES, r, chunk), of.v[r], width, chunk);
        }
    }
}

// The same of codes, which come as they lie: rows of WIDTH bytes, then rows of VALUES bytes; zeros past their ends.
DEVICE void fetch_codes(const Attend& p, const Addresses& of, u8* raw, u32 column) {
    const bool whole = (p.flags & ALIGNED) && p.D % 16 == 0 && p.Dv % 16 == 0;
    constexpr u32 K_CHUNKS = WIDTH / 16, V_CHUNKS = VALUES / 16;
    const u32 width = p.Dv - column, thread = opaque(thread_x());
    NO_UNROLL
    for (u32 at = thread; at < KEYS * (K_CHUNKS + V_CHUNKS); at += THREADS) {
        const bool value = at >= KEYS * K_CHUNKS;
        const u32 n = value ? at - KEYS * K_CHUNKS : at, r = n / (value ? V_CHUNKS : K_CHUNKS), chunk = n % (value ? V_CHUNKS : K_CHUNKS);
        const u64 row = value ? of.v[r] : of.k[r];
        const u32 lanes = value ? width : p.D, first = chunk * 16;
        u8* to = raw + at * 16;
        if (whole) {
            cp_async_16(to, reinterpret_cast<const void*>(row + first), row != 0 && first < lanes);
            continue;
        }
        NO_UNROLL
        for (u32 i = 0; i < 16; i++) to[i] = row != 0 && first + i < lanes ? reinterpret_cast<const u8*>(row)[first + i] : u8(0);
    }
}
// Makes a tile of them.
template <u32 W>
DEVICE void widen_rows(u8* to, const u8* raw, u32 thread) {
    constexpr u32 CHUNKS = W / 16;
    UNROLL
    for (u32 i = 0; i < KEYS * CHUNKS / THREADS; i++) {
        const u32 at = i * THREADS + thread, r = at / CHUNKS, chunk = at % CHUNKS, turned = chunk / 4 % 2;
        // Half of the threads write their second piece first, so that none meets another in a bank.
        const Widened wide = widened(load16(raw + at * 16), turned);
        store16(chunk_at<W>(to, r, 2 * chunk + turned), wide.first);
        store16(chunk_at<W>(to, r, 2 * chunk + 1 - turned), wide.second);
    }
}
DEVICE void widen(u8* stage, const u8* raw) {
    const u32 thread = opaque(thread_x());
    widen_rows<WIDTH>(stage, raw, thread);
    widen_rows<VALUES>(stage + K_BYTES, raw + KEYS * WIDTH, thread);
}

// The scores of a warp's rows against a tile.
DEVICE void score(float (&x)[SPREAD][TILES][4], u8* queries, u8* keys) {
    const u32 thread = opaque(thread_x()), first = thread / 32 * WARP_ROWS, l = thread % 32;
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        UNROLL
        for (u32 n = 0; n < TILES; n++) x[s][n][0] = x[s][n][1] = x[s][n][2] = x[s][n][3] = 0.0f;
    }
    UNROLL
    for (u32 k = 0; k < STEPS; k++) {
        u32 a[SPREAD][4];
        UNROLL
        for (u32 s = 0; s < SPREAD; s++) load_a<WIDTH>(a[s], queries, first + 16 * s, k, l);
        UNROLL
        for (u32 n = 0; n < TILES; n += 2) {
            u32 b[2], c[2];
            load_k<WIDTH>(b, c, keys, 8 * n, k, l);
            UNROLL
            for (u32 s = 0; s < SPREAD; s++) {
                mma<T>(x[s][n], a[s], b);
                mma<T>(x[s][n + 1], a[s], c);
            }
        }
    }
}

// The weighted sums of a lane's rows.
struct Running {
    float o[SPREAD][COLUMNS][4];
};

// Turns scores into weights and adds the values that they weigh; what was summed before shrinks first. Weights are made 16 keys
// at a time, so that the units of exponentials and of products work side by side.
DEVICE void add_values(Room& room, const Addresses& here, float (&x)[SPREAD][TILES][4], u8* values, Running& state) {
    const float factor = RAW ? room.factor : 1.0f;
    const u32 thread = opaque(thread_x()), l = thread % 32;
    float sum[SPREAD][2], m[SPREAD][2];
    float shrink[SPREAD][2];
    bool grown = false;
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            float top = x[s][0][2 * r];
            UNROLL
            for (u32 n = 0; n < TILES; n++) top = larger(top, larger(x[s][n][2 * r], x[s][n][2 * r + 1]));
            m[s][r] = room.tops[2 * s + r][thread];
            shrink[s][r] = step_of(m[s][r], row_max(top), factor);
            room.tops[2 * s + r][thread] = m[s][r];
            grown = grown || shrink[s][r] != 1.0f;
            sum[s][r] = room.sums[2 * s + r][thread] * shrink[s][r];
        }
    }
    // Products with exactly 1 may be left out.
    if (warp_any(grown)) {
        UNROLL
        for (u32 s = 0; s < SPREAD; s++) {
            UNROLL
            for (u32 n = 0; n < COLUMNS; n++) {
                UNROLL
                for (u32 i = 0; i < 4; i++) state.o[s][n][i] *= shrink[s][i / 2];
            }
        }
    }
    UNROLL
    for (u32 k = 0; k < KEYS / 16; k++) {
        u32 a[SPREAD][4], rest[CODES ? SPREAD : 1][4];
        UNROLL
        for (u32 s = 0; s < SPREAD; s++) {
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                const u32 n = 2 * k + i / 2, r = i % 2;
                float v = ex2(fused(x[s][n][2 * r], factor, -m[s][r]));
                float w = ex2(fused(x[s][n][2 * r + 1], factor, -m[s][r]));
                sum[s][r] += v + w;
                if (CODES) v *= here.v_scale[8 * n + 2 * (l % 4)], w *= here.v_scale[8 * n + 2 * (l % 4) + 1];
                a[s][i] = pack<T>(v, w);
                if (CODES) rest[CODES ? s : 0][i] = rest_of(v, w, a[s][i]);
            }
        }
        UNROLL
        for (u32 n = 0; n < COLUMNS; n += 2) {
            u32 b[2], c[2];
            load_v<VALUES>(b, c, values, 16 * k, n / 2, l);
            UNROLL
            for (u32 s = 0; s < SPREAD; s++) {
                mma<T>(state.o[s][n], a[s], b);
                mma<T>(state.o[s][n + 1], a[s], c);
                if (CODES) mma<T>(state.o[s][n], rest[CODES ? s : 0], b), mma<T>(state.o[s][n + 1], rest[CODES ? s : 0], c);
            }
        }
    }
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) room.sums[2 * s][thread] = sum[s][0], room.sums[2 * s + 1][thread] = sum[s][1];
}

// Which row of the block is 16 s + 8 r + g of a warp, and what mods are told about it.
DEVICE u32 place_of_row(u32 thread, u32 s, u32 r) { return thread / 32 * WARP_ROWS + 16 * s + 8 * r + thread % 32 / 4; }
DEVICE Pair pair_of(const Attend& p, const Desk& desk, const Lane& of, u32 place) {
    const u32 head = desk.q.first_head + least(desk.from + place, desk.lanes - 1) % (p.H / p.G);
    return Pair{desk.q.batch, head, i32(desk.q.q_idx + (of.token - desk.item.q_begin)), 0, p.q_offset};
}

// What this lane's rows see of the tile at `base`: bit 16 r + 2 n + i is column 8 n + 2 t + i of row r. Known before there are
// scores, which leave no room.
DEVICE void look(const Attend& p, const Room& room, const Addresses& here, u32 base, u32 (&seen)[SPREAD]) {
    const Desk& desk = room.desk;
    const u32 thread = opaque(thread_x()), t = thread % 4;
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) seen[s] = 0;
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        NO_UNROLL
        for (u32 r = 0; r < 2; r++) {
            const u32 place = place_of_row(thread, s, r);
            const Lane of = room.lanes[place];
            u64 bits = range_bits(of.lo, of.hi, base);
            if (desk.row.mask_words) bits &= mask_word(p, desk.row, of.token, base / 64 * 64) >> (base % 64);
            bits >>= 2 * t;
            Pair pair{0, 0, 0, 0, 0};
            if (MODDED) pair = pair_of(p, desk, of, place);
            u32 sees = 0;
            NO_UNROLL
            for (u32 n = 0; n < TILES; n++) {
                u32 both = u32(bits) & 3;
                bits >>= 8;
                if (MODDED) {
                    UNROLL
                    for (u32 i = 0; i < 2; i++) {
                        const u32 at = 8 * n + 2 * t + i;
                        pair.k_idx = here.index[at];
                        bool keeps_it = !CAUSAL_MOD || distance(pair) <= 0;
                        if (here.partial[at / 32] >> (at % 32) & 1) keeps_it = keeps_it && keep(p.image, pair);
                        if (!keeps_it) both &= ~(1u << i);
                    }
                }
                sees |= both << (2 * n);
            }
            seen[s] |= sees << (16 * r);
        }
    }
}

// A value whose key no query of the block sees may be anything, also NaN: makes it 0.
DEVICE void blank(Room& room, u8* values, const u32 (&seen)[SPREAD]) {
    u32 all = 0;
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) all |= seen[s] | seen[s] >> 16;
    all |= shfl_xor(all, 4);
    all |= shfl_xor(all, 8);
    all |= shfl_xor(all, 16);
    if (lane() < 4) room.seen[warp()][lane()] = all;
    block_sync();
    NO_UNROLL
    for (u32 i = thread_x(); i < KEYS * (VALUES / 8); i += THREADS) {
        u32 key = i / (VALUES / 8), any = 0;
        NO_UNROLL
        for (u32 w = 0; w < WARPS; w++) any |= room.seen[w][key % 8 / 2];
        if (!(any >> (2 * (key / 8) + key % 2) & 1)) {
            store16(chunk_at<VALUES>(values, key, i % (VALUES / 8)), U4{0, 0, 0, 0});
        }
    }
    block_sync();
}

// What happens to scores but for the scale of RAW ones, which become base-2 logits.
DEVICE void change_scores(const Attend& p, const Room& room, const Addresses& here, u32 base, float (&x)[SPREAD][TILES][4]) {
    const Desk& desk = room.desk;
    const float scale = BINARY ? p.scale * LOG2_E : p.scale;
    const Cap cap = cap_of(GENERAL ? p.soft_cap : 1.0f);
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            const u32 thread = opaque(thread_x()), t = thread % 4, place = place_of_row(thread, s, r);
            const Lane of = room.lanes[place];
            Pair pair{0, 0, 0, 0, 0};
            Ahead first{0, 0.0f};
            if (CHANGING) pair = pair_of(p, desk, of, place);
            if (CHANGING && WHOLE) {
                pair.k_idx = here.index[0] + i32(2 * t);
                first = ahead_of(pair);
            }
            const float slope = of.slope * LOG2_E;
            float distance = 0.0f;
            if (GENERAL) distance = float(i64(base + 2 * t) - (i64(desk.row.kv_len) - i64(desk.row.q_len) + i64(of.token)));
            UNROLL
            for (u32 n = 0; n < TILES; n++) {
                UNROLL
                for (u32 i = 0; i < 2; i++) {
                    float v = x[s][n][2 * r + i] * scale;
                    if (GENERAL) {
                        if (p.soft_cap > 0.0f) v = capped(cap, v);
                        v = fused(slope, distance + float(8 * n + i), v);
                    }
                    if (CHANGING) {
                        Pair other = pair;
                        Ahead ahead{first.by + i32(8 * n + i), first.far + float(8 * n + i)};
                        if (WHOLE) {
                            other.k_idx += i32(8 * n + i);
                        } else {
                            other.k_idx = here.index[8 * n + 2 * t + i];
                            ahead = ahead_of(other);
                        }
                        v = change<BINARY>(p.image, v, other, ahead);
                    }
                    x[s][n][2 * r + i] = BINARY ? v : v * LOG2_E;
                }
            }
        }
    }
}

// Takes the tile at `base`, which is in `stage`.
DEVICE void step(const Attend& p, Room& room, u8* queries, u8* stage, u32 base, Running& state) {
    const Addresses& here = room.of[base / KEYS % 3];
    const Bounds bounds = room.bounds[warp()];
    const bool mine = warp_any(base < bounds.some_hi && base + KEYS > bounds.some_lo);
    // Whether a mask may leave a key to no query at all.
    bool holes = room.desk.row.mask_words != 0;
    if (MODDED) {
        holes = holes || (here.partial[0] | here.partial[KEYS / 32 - 1]) != 0;
        if (CAUSAL_MOD) holes = holes || i64(most(here.last[0], here.last[KEYS / 32 - 1])) > p.q_offset + room.desk.q.q_idx;
    }
    const bool edge = holes || base < bounds.all_lo || base + KEYS > bounds.all_hi;
    u32 seen[SPREAD];
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) seen[s] = ~0u;
    if (edge) look(p, room, here, base, seen);
    if (holes) blank(room, stage + K_BYTES, seen);
    if (!mine) return;
    if (edge) {
        UNROLL
        for (u32 s = 0; s < SPREAD; s++) room.sees[s][thread_x()] = seen[s];
    }
    float x[SPREAD][TILES][4];
    score(x, queries, stage);
    if (CODES) {
        const u32 t = opaque(thread_x()) % 4;
        UNROLL
        for (u32 n = 0; n < TILES; n++) {
            UNROLL
            for (u32 i = 0; i < 2; i++) {
                const float scale = here.k_scale[8 * n + 2 * t + i];
                UNROLL
                for (u32 s = 0; s < SPREAD; s++) x[s][n][i] *= scale, x[s][n][2 + i] *= scale;
            }
        }
    }
    if (!RAW) change_scores(p, room, here, base, x);
    if (edge) {
        UNROLL
        for (u32 s = 0; s < SPREAD; s++) {
            const u32 sees = room.sees[s][opaque(thread_x())];
            UNROLL
            for (u32 n = 0; n < TILES; n++) {
                UNROLL
                for (u32 i = 0; i < 4; i++) {
                    if (!(sees >> (16 * (i / 2) + 2 * n + i % 2) & 1)) x[s][n][i] = -infinity();
                }
            }
        }
    }
    add_values(room, here, x, stage + K_BYTES, state);
}

// Hands the states on, or finishes.
DEVICE void leave(const Attend& p, const Room& room, const Running& state) {
    const Desk& desk = room.desk;
    const Output out = output_of(p, desk.item, desk.member, desk.row);
    const u32 column = desk.column, g = lane() / 4, t = lane() % 4;
    float sum[SPREAD][2];
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        UNROLL
        for (u32 r = 0; r < 2; r++) sum[s][r] = row_sum(room.sums[2 * s + r][thread_x()]);
    }
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            const float m = top_of(room.tops[2 * s + r][thread_x()]), l = sum[s][r];
            const u32 of = desk.from + warp() * WARP_ROWS + 16 * s + 8 * r + g;
            if (of >= desk.lanes) continue;
            if (out.direct()) {
                const float f = finish(p, out, of, m, l, t == 0 && column == 0);
                T* to = output_row<T>(p, out, of);
                UNROLL
                for (u32 n = 0; n < COLUMNS; n++) {
                    u32 at = column + 8 * n + 2 * t;
                    float a = state.o[s][n][2 * r] * f + 0.0f, b = state.o[s][n][2 * r + 1] * f + 0.0f;
                    if (at < p.Dv) store_pair(to + at, a, b, at + 1 < p.Dv);
                }
            } else {
                if (t == 0 && column == 0) *out.m(of) = m, *out.l(of) = l;
                float* to = out.acc(of);
                UNROLL
                for (u32 n = 0; n < COLUMNS; n++) {
                    u32 at = column + 8 * n + 2 * t;
                    if (at < p.Dv) to[at] = state.o[s][n][2 * r];
                    if (at + 1 < p.Dv) to[at + 1] = state.o[s][n][2 * r + 1];
                }
            }
        }
    }
}

MSTAR_KERNEL(tile, Attend, THREADS, RESIDENT) {
    SHARED(memory);
    u8* queries = memory;
    u8* stages = memory + Q_BYTES;
    Room& room = *reinterpret_cast<Room*>(memory + Q_BYTES + 2 * STAGE);
    const u32 g = lane() / 4, t = lane() % 4;
    const Scale scale = scale_of<!RAW>(p);
    Desk& desk = room.desk;
    if (thread_x() == 0) {
        room.factor = scale.factor;
        desk.index = items_of(p).begin + block_x();
        open(p, desk);
        reach_out(p, desk);
    }
    NO_UNROLL
    while (true) {
        block_sync();
        if (desk.index >= items_of(p).end) break;
        const u32 from = desk.from, group = p.H / p.G;
        for (u32 i = thread_x(); i < QUERIES; i += THREADS) {
            u32 of = least(from + i, desk.lanes - 1), token = desk.item.q_begin + of / group;
            Reach sees = span_of(p, desk.row, desk.reach, token);
            float slope = GENERAL && p.slopes ? p.slopes[desk.q.first_head + of % group] : 0.0f;
            room.lanes[i] = Lane{sees.lo, sees.hi, token, slope};
        }
        u32 base = desk.reached.lo / KEYS * KEYS;
        {
            Found found = find(p, desk, base);
            note(room.of[base / KEYS % 3], found);
            found = find(p, desk, base + KEYS);
            note(room.of[(base / KEYS + 1) % 3], found);
        }
        bring_queries<WIDTH, QUERIES, THREADS>(p, desk.q, queries, from, desk.lanes, group, scale.negate);
        block_sync();
        u8* raw = stages + STAGE;
        if (base < desk.reached.hi) {
            if (CODES) fetch_codes(p, room.of[base / KEYS % 3], raw + base / KEYS % 2 * CODE_BYTES, desk.column);
            else fetch(p, room.of[base / KEYS % 3], stages + base / KEYS % 2 * STAGE, desk.column);
        }
        cp_async_commit();
        // What some row of the warp sees, and what all of them do.
        {
            Lane of = room.lanes[warp() * WARP_ROWS + lane() % WARP_ROWS];
            Bounds bounds{~warp_max(~of.lo), warp_max(of.hi), warp_max(of.lo), ~warp_max(~of.hi)};
            // A warp without a row of the item sees nothing.
            if (from + warp() * WARP_ROWS >= desk.lanes) bounds = Bounds{~0u, 0, 0, ~0u};
            if (lane() == 0) room.bounds[warp()] = bounds;
            warp_sync();
        }
        Running state;
        UNROLL
        for (u32 s = 0; s < SPREAD; s++) {
            room.tops[2 * s][thread_x()] = room.tops[2 * s + 1][thread_x()] = LOWEST;
            room.sums[2 * s][thread_x()] = room.sums[2 * s + 1][thread_x()] = 0.0f;
            UNROLL
            for (u32 n = 0; n < COLUMNS; n++) {
                state.o[s][n][0] = state.o[s][n][1] = state.o[s][n][2] = state.o[s][n][3] = 0.0f;
            }
        }
        NO_UNROLL
        for (; base < desk.reached.hi; base += KEYS) {
            cp_async_wait<0>();
            block_sync();
            if (base + KEYS < desk.reached.hi) {
                u32 next = base / KEYS + 1;
                if (CODES) fetch_codes(p, room.of[next % 3], raw + next % 2 * CODE_BYTES, desk.column);
                else fetch(p, room.of[next % 3], stages + next % 2 * STAGE, desk.column);
            }
            cp_async_commit();
            // The address is on its way while the tile is taken; where mods are asked there is no register for it.
            Found found = find(p, desk, base + 2 * KEYS);
            if (CODES) {
                widen(stages, raw + base / KEYS % 2 * CODE_BYTES);
                block_sync();
            }
            if (MODDED) note(room.of[(base / KEYS + 2) % 3], found);
            step(p, room, queries, CODES ? stages : stages + base / KEYS % 2 * STAGE, base, state);
            if (!MODDED) note(room.of[(base / KEYS + 2) % 3], found);
        }
        cp_async_wait<0>();
        leave(p, room, state);
        block_sync();
        if (thread_x() == 0) {
            advance(p, desk);
            reach_out(p, desk);
        }
    }
}
