// Many query vectors: tiles of queries over tiles of keys, as FlashAttention-2 does it (Dao, arXiv 2307.08691), over pages,
// segments or blocks.
//
// A block works for WARPS x SPREAD x 16 of an item's query vectors at a time. Queries stay in shared memory; a tile of keys and
// values is summed while the next one is on its way, gathered by a table of addresses that is made one tile further ahead.
// Scores and weights live in registers. Tiles start at multiples of KEYS; those that no query sees are not visited, those that
// no query of a warp sees cost it nothing, and only those at an edge are masked.
//
// Defines: KV_TYPE; SOURCE; WIDTH, the padded head width; VALUES, the padded value columns of a pass; WARPS; SPREAD, times 16
// rows of a warp; KEYS of a tile, 32 or 64; GENERAL 1 where a soft cap or slopes change scores; over blocks SCORES, SCORE_0 ..,
// MASKS, MASK_0 .. (mods.cuh); RESIDENT blocks an SM.
#include "mods.cuh"
#include "tile.cuh"

constexpr u32 THREADS = 32 * WARPS;
constexpr u32 WARP_ROWS = 16 * SPREAD, QUERIES = WARPS * WARP_ROWS;
constexpr u32 K_BYTES = KEYS * WIDTH * 2, V_BYTES = KEYS * VALUES * 2, STAGE = K_BYTES + V_BYTES;
constexpr u32 Q_BYTES = QUERIES * WIDTH * 2;
constexpr u32 STEPS = WIDTH / 16, COLUMNS = VALUES / 8, TILES = KEYS / 8;
// Scores leave the product as they are, and the scale enters the exponent.
constexpr bool RAW = GENERAL == 0 && SCORES == 0;
static_assert(2 * KEYS <= THREADS, "a thread for each key and each value of a tile");
static_assert(KEYS == 32 || KEYS == 64, "a tile lies in one word of a custom mask");

// What the rows of the block are.
struct Lane {
    u32 lo, hi;   // what it sees, a mask aside
    u32 token;    // of its row
    float slope;
};
// Where a tile's keys and values lie, 0: not seen by any query; over blocks also which keys they are.
struct Addresses {
    u64 k[KEYS], v[KEYS];
    i32 index[KEYS];
    u32 partial[KEYS / 32];  // bits of keys of which a mask decides
    i32 last[KEYS / 32];     // the largest index
};
// What lies behind the queries and two stages.
struct Room {
    Addresses of[3];
    Lane lanes[QUERIES];
    u32 seen[WARPS][4];
};

// The part of a tile's addresses that this thread finds.
struct Found {
    u64 at;
    i32 index;
    bool partial;
};
DEVICE Found find(const Keys& keys, const Reach& reach, u32 base) {
    u32 key = base + thread_x() % KEYS;
    Found found{0, -1, false};
    if (thread_x() < 2 * KEYS && key >= reach.lo && key < reach.hi) {
        Place2 place = key_at<SOURCE>(keys, key);
        found.at = thread_x() < KEYS ? place.k : place.v;
        if (SOURCE == BLOCKS && SCORES + MASKS > 0) {
            Key of = block_key(keys, key);
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
        return;
    }
    to.k[t] = found.at;
    if (SOURCE == BLOCKS && SCORES + MASKS > 0) {
        to.index[t] = found.index;
        u32 bits = ballot(found.partial), last = warp_max(u32(found.index + 1));
        if (lane() == 0) to.partial[t / 32] = bits, to.last[t / 32] = i32(last) - 1;
    }
}

// Starts the copies of a tile's keys and values.
DEVICE void fetch(const Attend& p, const Addresses& of, u8* stage, u32 column, bool whole) {
    constexpr u32 K_CHUNKS = WIDTH / 8, V_CHUNKS = VALUES / 8;
    UNROLL
    for (u32 i = 0; i < KEYS * K_CHUNKS / THREADS; i++) {
        u32 at = i * THREADS + thread_x(), r = at / K_CHUNKS, chunk = at % K_CHUNKS;
        bring(chunk_at<WIDTH>(stage, r, chunk), of.k[r], p.D, chunk, whole);
    }
    UNROLL
    for (u32 i = 0; i < KEYS * V_CHUNKS / THREADS; i++) {
        u32 at = i * THREADS + thread_x(), r = at / V_CHUNKS, chunk = at % V_CHUNKS;
        u64 row = of.v[r];
        bring(chunk_at<VALUES>(stage + K_BYTES, r, chunk), row ? row + 2 * column : row, p.Dv - column, chunk, whole);
    }
}

// The scores of a warp's rows against a tile.
DEVICE void score(float (&x)[SPREAD][TILES][4], u8* queries, u8* keys) {
    u32 first = warp() * WARP_ROWS;
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        UNROLL
        for (u32 n = 0; n < TILES; n++) x[s][n][0] = x[s][n][1] = x[s][n][2] = x[s][n][3] = 0.0f;
    }
    UNROLL
    for (u32 k = 0; k < STEPS; k++) {
        u32 a[SPREAD][4];
        UNROLL
        for (u32 s = 0; s < SPREAD; s++) load_a<WIDTH>(a[s], queries, first + 16 * s, k);
        UNROLL
        for (u32 n = 0; n < TILES; n += 2) {
            u32 b[2], c[2];
            load_k<WIDTH>(b, c, keys, 8 * n, k);
            UNROLL
            for (u32 s = 0; s < SPREAD; s++) {
                mma<T>(x[s][n], a[s], b);
                mma<T>(x[s][n + 1], a[s], c);
            }
        }
    }
}

// The tile of a row's running softmax; m is in units of the scores (not RAW: base-2 logits), l is this lane's share.
struct Running {
    float m[SPREAD][2], l[SPREAD][2];
    float o[SPREAD][COLUMNS][4];
};

// Turns scores into weights, rounded to pairs for the product with values, and shrinks what was summed before.
DEVICE void weigh(float (&x)[SPREAD][TILES][4], u32 (&w)[SPREAD][TILES][2], float factor, Running& state) {
    UNROLL
    for (u32 s = 0; s < SPREAD; s++) {
        UNROLL
        for (u32 r = 0; r < 2; r++) {
            float top = x[s][0][2 * r];
            UNROLL
            for (u32 n = 0; n < TILES; n++) top = larger(top, larger(x[s][n][2 * r], x[s][n][2 * r + 1]));
            Step step = step_of(state.m[s][r], row_max(top), factor);
            state.m[s][r] = step.m;
            float sum = 0.0f;
            UNROLL
            for (u32 n = 0; n < TILES; n++) {
                float a = ex2(fused(x[s][n][2 * r], factor, -step.reference));
                float b = ex2(fused(x[s][n][2 * r + 1], factor, -step.reference));
                sum += a + b;
                w[s][n][r] = pack<T>(a, b);
            }
            state.l[s][r] = fused(state.l[s][r], step.shrink, sum);
            UNROLL
            for (u32 n = 0; n < COLUMNS; n++) {
                state.o[s][n][2 * r] *= step.shrink;
                state.o[s][n][2 * r + 1] *= step.shrink;
            }
        }
    }
}

DEVICE void add_values(const u32 (&w)[SPREAD][TILES][2], u8* values, Running& state) {
    UNROLL
    for (u32 k = 0; k < KEYS / 16; k++) {
        UNROLL
        for (u32 n = 0; n < COLUMNS; n += 2) {
            u32 b[2], c[2];
            load_v<VALUES>(b, c, values, 16 * k, n / 2);
            UNROLL
            for (u32 s = 0; s < SPREAD; s++) {
                u32 a[4] = {w[s][2 * k][0], w[s][2 * k][1], w[s][2 * k + 1][0], w[s][2 * k + 1][1]};
                mma<T>(state.o[s][n], a, b);
                mma<T>(state.o[s][n + 1], a, c);
            }
        }
    }
}

MSTAR_KERNEL(tile, Attend, THREADS, RESIDENT) {
    SHARED(memory);
    u8* queries = memory;
    u8* stages = memory + Q_BYTES;
    Room& room = *reinterpret_cast<Room*>(memory + Q_BYTES + 2 * STAGE);
    const bool whole = (p.flags & ALIGNED) && p.D % 8 == 0 && p.Dv % 8 == 0;
    const u32 group = p.H / p.G, g = lane() / 4, t = lane() % 4;
    const Scale scale = scale_of<!RAW>(p);
    const float factor = RAW ? scale.factor : 1.0f;
    const Span span = items_of(p);
    for (u32 index = span.begin + block_x(); index < span.end; index += grid_x()) {
        const Item item = items_of(p.image)[index];
        const Member member = members_of(p.image)[item.member_begin];
        const Row row = rows_of(p.image)[member.row];
        const Reach reach = reach_of(p, row, item);
        const u32 lanes = item.q_count * group;
        const Queries q = queries_of<SOURCE>(p, row, item.q_begin, item.kv_head_begin, 2);
        const Keys keys = keys_of<SOURCE>(p, member.row, row, item.kv_head_begin, 2);
        // Wider values and more query vectors than the block holds take more passes.
        const u32 passes = (p.Dv + VALUES - 1) / VALUES;
        NO_UNROLL
        for (u32 turn = 0; turn < passes * ((lanes + QUERIES - 1) / QUERIES); turn++) {
            const u32 from = turn / passes * QUERIES, column = turn % passes * VALUES;
            block_sync();
            // The tokens of this turn, and what they reach together.
            const u32 first = item.q_begin + from / group, end = item.q_begin + (least(from + QUERIES, lanes) - 1) / group;
            Reach reached = reach;
            reached.lo = most(reach.lo, span_of(p, row, reach, first).lo);
            if (p.flags & CAUSAL) {
                i64 past = i64(row.kv_len) - i64(row.q_len) + i64(end) + 1;
                reached.hi = u32(most(i64(reach.lo), least(i64(reach.hi), past)));
            }
            u32 base = reached.lo / KEYS * KEYS;
            Found found = find(keys, reached, base);
            note(room.of[0], found);
            found = find(keys, reached, base + KEYS);
            note(room.of[1], found);
            for (u32 i = thread_x(); i < QUERIES; i += THREADS) {
                u32 of = least(from + i, lanes - 1), token = item.q_begin + of / group;
                Reach sees = span_of(p, row, reach, token);
                float slope = GENERAL && p.slopes ? p.slopes[q.first_head + of % group] : 0.0f;
                room.lanes[i] = Lane{sees.lo, sees.hi, token, slope};
            }
            bring_queries<WIDTH, QUERIES, THREADS>(p, q, queries, from, lanes, group, scale.negate);
            block_sync();
            if (reached.lo < reached.hi) fetch(p, room.of[0], stages, column, whole);
            cp_async_commit();
            // What some row of the warp sees, and what all of them do.
            u32 some_lo, some_hi, all_lo, all_hi;
            {
                Lane of = room.lanes[warp() * WARP_ROWS + lane() % WARP_ROWS];
                all_lo = warp_max(of.lo), some_lo = ~warp_max(~of.lo);
                some_hi = warp_max(of.hi), all_hi = ~warp_max(~of.hi);
            }
            Running state;
            UNROLL
            for (u32 s = 0; s < SPREAD; s++) {
                state.m[s][0] = state.m[s][1] = -infinity();
                state.l[s][0] = state.l[s][1] = 0.0f;
                UNROLL
                for (u32 n = 0; n < COLUMNS; n++) {
                    state.o[s][n][0] = state.o[s][n][1] = state.o[s][n][2] = state.o[s][n][3] = 0.0f;
                }
            }
            u32 parity = 0, slot = 0;
            NO_UNROLL
            for (; base < reached.hi && reached.lo < reached.hi; base += KEYS) {
                const Addresses& here = room.of[slot];
                const u32 next = slot == 2 ? 0 : slot + 1, after = next == 2 ? 0 : next + 1;
                u8* stage = stages + parity * STAGE;
                parity ^= 1;
                cp_async_wait<0>();
                block_sync();
                if (base + KEYS < reached.hi) fetch(p, room.of[next], stages + parity * STAGE, column, whole);
                cp_async_commit();
                found = find(keys, reached, base + 2 * KEYS);
                const bool mine = base < some_hi && base + KEYS > some_lo;
                // Whether a mask may leave a key to no query at all.
                bool holes = row.mask_words != 0, edge = base < all_lo || base + KEYS > all_hi;
                if (SOURCE == BLOCKS && SCORES + MASKS > 0) {
                    u32 partial = here.partial[0] | here.partial[KEYS / 32 - 1];
                    holes = holes || partial != 0;
#if SCORES > 0
                    holes = holes || i64(most(here.last[0], here.last[KEYS / 32 - 1])) > p.q_offset + q.q_idx;
#endif
                }
                float x[SPREAD][TILES][4];
                if (mine) {
                    score(x, queries, stage);
                    if (!RAW || edge || holes) {
                        UNROLL
                        for (u32 s = 0; s < SPREAD; s++) {
                            UNROLL
                            for (u32 r = 0; r < 2; r++) {
                                const u32 place = warp() * WARP_ROWS + 16 * s + 8 * r + g;
                                const Lane of = room.lanes[place];
                                u64 bits = ~0ull;
                                if (edge) bits = range_bits(of.lo, of.hi, base);
                                if (row.mask_words) bits &= mask_word(p, row, of.token, base / 64 * 64) >> (base % 64);
                                const u32 token = of.token - item.q_begin;
                                Pair pair{q.batch, q.first_head + (least(from + place, lanes - 1)) % group, i32(q.q_idx + token), 0,
                                          p.q_offset};
                                const float distance =
                                    GENERAL ? float(i64(base) - (i64(row.kv_len) - i64(row.q_len) + i64(of.token))) : 0.0f;
                                UNROLL
                                for (u32 n = 0; n < TILES; n++) {
                                    UNROLL
                                    for (u32 i = 0; i < 2; i++) {
                                        float& v = x[s][n][2 * r + i];
                                        const u32 at = 8 * n + 2 * t + i;
                                        if (GENERAL) {
                                            v *= p.scale;
                                            if (p.soft_cap > 0.0f) v = p.soft_cap * tanh_exact(v / p.soft_cap);
                                            v = fused(of.slope, distance + float(at), v) * LOG2_E;
                                        }
                                        bool sees = (bits >> at) & 1;
                                        if (SOURCE == BLOCKS && SCORES + MASKS > 0) {
                                            pair.k_idx = here.index[at];
                                            if (here.partial[at / 32] >> (at % 32) & 1) sees = sees && keep(p.image, pair);
                                            if (SCORES > 0) v = change(p.image, v * p.scale, pair) * LOG2_E;
                                        }
                                        if (!sees) v = -infinity();
                                    }
                                }
                            }
                        }
                    }
                }
                if (holes) {
                    // A value whose key no query sees may be anything, also NaN: make it 0.
                    u32 seen = 0;
                    if (mine) {
                        UNROLL
                        for (u32 s = 0; s < SPREAD; s++) {
                            UNROLL
                            for (u32 n = 0; n < TILES; n++) {
                                UNROLL
                                for (u32 i = 0; i < 4; i++) seen |= u32(x[s][n][i] != -infinity()) << (2 * n + i % 2);
                            }
                        }
                    }
                    seen |= shfl_xor(seen, 4);
                    seen |= shfl_xor(seen, 8);
                    seen |= shfl_xor(seen, 16);
                    if (g == 0) room.seen[warp()][t] = seen;
                    block_sync();
                    NO_UNROLL
                    for (u32 i = thread_x(); i < KEYS * (VALUES / 8); i += THREADS) {
                        u32 key = i / (VALUES / 8), any = 0;
                        UNROLL
                        for (u32 w = 0; w < WARPS; w++) any |= room.seen[w][key % 8 / 2];
                        if (!(any >> (2 * (key / 8) + key % 2) & 1)) {
                            store16(chunk_at<VALUES>(stage + K_BYTES, key, i % (VALUES / 8)), U4{0, 0, 0, 0});
                        }
                    }
                    block_sync();
                }
                if (mine) {
                    u32 w[SPREAD][TILES][2];
                    weigh(x, w, factor, state);
                    add_values(w, stage + K_BYTES, state);
                }
                note(room.of[after], found);
                slot = next;
            }
            cp_async_wait<0>();
            const Output out = output_of(p, item, member, row);
            UNROLL
            for (u32 s = 0; s < SPREAD; s++) {
                UNROLL
                for (u32 r = 0; r < 2; r++) {
                    const float m = state.m[s][r] * factor, l = row_sum(state.l[s][r]);
                    const u32 of = from + warp() * WARP_ROWS + 16 * s + 8 * r + g;
                    if (of >= lanes) continue;
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
    }
}
