// Attention over latents in e4m3 on a Hopper: 64 query vectors a block, by three warpgroups.
//
//   producer   makes tiles of bf16 out of codes, which is exact, and lays the block's queries out
//   first      scores, softmax, and the left half of the result's columns
//   second     the right half, with weights and factors that the first leaves in shared memory
//
// A latent is [512 e4m3 | 4 f32 | E bf16]. Scales never meet codes: a score is what the rotary lanes give, and then, for each 128
// lanes, their product times their scale, in f32; a weight is times its key's scale before it meets values, once for each 128
// columns.
//
// Defines: DEPTH, 512 or 576: lanes of a latent, padded to a multiple of 64; PIECES of the largest item, a multiple of those that
// one token's heads make. Queries are bf16.
#include "codes.cuh"

typedef Bf16 Element;
constexpr u32 ROWS = 64, STAGES = 2;
#include "latent_softmax.cuh"

constexpr u32 THREADS = 3 * GROUP, CONSUMERS = 2 * GROUP;
constexpr u32 WIDTH = 512, SCALES = WIDTH / LATENT_GROUP;
constexpr u32 COLUMNS = DEPTH / LANES, ROPE_STEPS = (DEPTH - WIDTH) / 16;
constexpr u32 TILE_BYTES = COLUMNS * BLOCK_BYTES;
// From the first lane under a scale to the rotary ones.
constexpr u32 ROPE_AT = WIDTH / LANES * BLOCK_BYTES;
static_assert(DEPTH == 512 || DEPTH == 576, "see above");

constexpr u32 RING_AT = COLUMNS * BLOCK_BYTES;
constexpr u32 WEIGHTS_AT = RING_AT + STAGES * TILE_BYTES;
// Of each tile of the ring, SCALES rows of a number a key.
constexpr u32 SCALES_AT = WEIGHTS_AT + BLOCK_BYTES;
constexpr u32 FACTORS_AT = SCALES_AT + STAGES * SCALES * KEYS * 4;
constexpr u32 TOLD_AT = FACTORS_AT + ROWS * 4;

// What groups of a block tell each other: marks of the ring; marks of a unit and its queries, and the unit, two in turn; and what the
// first hands to the second, again and again: weights and factors are there; they may be written over. Every thread arrives.
struct Told {
    Mark full[STAGES], empty[STAGES], queries, queries_read, there, free;
    Unit units[2];
};
constexpr u32 SHARED_BYTES = TOLD_AT + sizeof(Told);
static_assert(sizeof(Told) == 320, "as in exec/latents.rs");
static_assert(SHARED_BYTES <= 232448, "what a block of a Hopper has");

DEVICE const float* scales_of(const u8* shared, u32 slot, u32 group) {
    return reinterpret_cast<const float*>(shared + SCALES_AT) + (slot * SCALES + group) * KEYS;
}

// ---- producer ----

DEVICE U4 words_at(const u8* from) { return U4{word_at(from), word_at(from + 4), word_at(from + 8), word_at(from + 12)}; }

// Eight threads have a row of a tile, and every sixteenth row.
constexpr u32 TIMES = KEYS / (GROUP / PIECE), CHUNKS = WIDTH / 16 / PIECE;
// What a thread has of a row: each eighth 16 codes of it, eight rotary lanes, and of the first threads a scale.
struct Share {
    U4 codes[CHUNKS], rope;
    u32 scale;
};
DEVICE Share share_of(const u8* latent, u32 E, bool aligned) {
    const u32 piece = thread_x() % PIECE;
    const bool rope = ROPE_STEPS > 0 && piece * PIECE < E;
    Share share{};
    if (!latent) return share;
    const u8 *codes = latent + piece * 16, *scale = latent + WIDTH + 4 * (piece % SCALES), *lanes = latent + WIDTH + 4 * SCALES + piece * 16;
    if (aligned) {
        UNROLL
        for (u32 j = 0; j < CHUNKS; j++) share.codes[j] = load16(codes + j * PIECE * 16);
        share.scale = *reinterpret_cast<const u32*>(scale);
        if (rope) share.rope = load16(lanes);
    } else {
        UNROLL
        for (u32 j = 0; j < CHUNKS; j++) share.codes[j] = words_at(codes + j * PIECE * 16);
        share.scale = word_at(scale);
        if (rope) share.rope = words_at(lanes);
    }
    return share;
}
// Rows of a unit's tiles, in the order in which a thread takes them. Page ids are asked for eight rows before they are needed, a
// row's bytes to come near three, and the bytes themselves one.
constexpr u32 FAR = 8, NEAR = 3;
struct Ahead {
    i32 ids[FAR];  // pages of the rows after the one in hand; -1: not seen
    u32 key;       // of the one in hand

    void find(const Keys& keys, const Unit& unit, u32 after) {
        const u32 of = key + after * (KEYS / TIMES), offset = of - keys.kv_offset;
        ids[after - 1] = -1;
        if (of >= unit.lo && of < unit.to) ids[after - 1] = keys.pages[keys.S == 1 ? offset : offset / keys.S];
    }
    // Where the row so many after the one in hand lies.
    const u8* at(const Keys& keys, u32 after) const {
        const u32 offset = key + after * (KEYS / TIMES) - keys.kv_offset, slot = keys.S == 1 ? 0 : offset % keys.S;
        const u64 place = keys.k + u64(i64(ids[after - 1]) * keys.k_page + i64(slot) * keys.k_slot);
        return ids[after - 1] < 0 ? nullptr : reinterpret_cast<const u8*>(place);
    }
    void ask(const Keys& keys, u32 after) const {
        const u32 piece = thread_x() % PIECE, line = piece < 5 ? piece * 128 : WIDTH + SCALES * 4 + 2 * (DEPTH - WIDTH) - 1;
        const u8* latent = at(keys, after);
        if (latent && piece < 6) prefetch_l2(latent + line);
    }
    void next(const Keys& keys, const Unit& unit) {
        UNROLL
        for (u32 i = 0; i + 1 < FAR; i++) ids[i] = ids[i + 1];
        key += KEYS / TIMES;
        find(keys, unit, FAR);
        ask(keys, NEAR);
    }
};
// Lays it into row `row` of a tile, and its scales beside.
DEVICE void lay(u8* tile, float* scales, u32 row, const Share& share) {
    const u32 piece = thread_x() % PIECE;
    u8* to = tile + row * LANES * 2;
    UNROLL
    for (u32 j = 0; j < CHUNKS; j++) {
        // 16 codes are two pieces, of which half of the threads write the second one first: none meets another in a bank.
        const u32 chunk = j * PIECE + piece, turned = piece / 4, at = chunk % 4 * 2;
        const Widened wide = widened(share.codes[j], turned);
        u8* block = to + chunk / 4 * BLOCK_BYTES;
        store16(block + ((at + turned) ^ (row % 8)) * 16, wide.first);
        store16(block + ((at + 1 - turned) ^ (row % 8)) * 16, wide.second);
    }
    if (ROPE_STEPS > 0) store16(to + WIDTH / LANES * BLOCK_BYTES + (piece ^ (row % 8)) * 16, share.rope);
    if (piece < SCALES) scales[piece * KEYS + row] = bits_float(share.scale);
}

DEVICE void produce(const Attend& p, u8* shared, Told& told) {
    const u32 thread = thread_x() % GROUP, D = p.D, E = D - WIDTH;
    const bool aligned = p.flags & ALIGNED;
    const u32 row = thread / PIECE, piece = thread % PIECE;
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
        NO_UNROLL
        for (u32 i = 0; i < TIMES; i++) {
            const u32 row_of = row + i * (ROWS / TIMES), lane = unit.first + row_of;
            const Element *nope = nullptr, *pe = nullptr;
            if (lane < unit.output.lanes) {
                const i64 token = lane / p.H, head = lane % p.H;
                nope = reinterpret_cast<const Element*>(queries.at) + token * queries.token + head * queries.head;
                pe = reinterpret_cast<const Element*>(queries.pe_at) + token * queries.pe_token + head * queries.pe_head;
            }
            u8* to = shared + row_of * LANES * 2 + (piece ^ (row_of % 8)) * 16;
            UNROLL
            for (u32 block = 0; block < COLUMNS; block++) {
                // What may be named where nothing is read.
                if (aligned && !nope) cp_async_16(to + block * BLOCK_BYTES, reinterpret_cast<const void*>(p.q.at), false);
                else put(to + block * BLOCK_BYTES, nope, pe, block * LANES + piece * PIECE, WIDTH, D, aligned);
            }
        }
    };
    walk(p, [&](const Unit& unit) {
        const Keys keys = keys_of<LATENTS>(p, unit.row_index, unit.row, 0, 1);
        const u32 begin = unit.tile(), end = unit.tiles();
        // In hand is the row before the first.
        Ahead ahead;
        ahead.key = begin * KEYS + row - KEYS / TIMES;
        UNROLL
        for (u32 i = 1; i <= FAR; i++) ahead.find(keys, unit, i);
        UNROLL
        for (u32 i = 1; i <= NEAR; i++) ahead.ask(keys, i);
        Share share = share_of(ahead.at(keys, 1), E, aligned);
        // The first tile goes ahead: the queries' place is free later than a tile's.
        u32 tile = begin;
        NO_UNROLL
        do {
            if (tile < end) {
                u8* to = shared + RING_AT + turn.slot * TILE_BYTES;
                float* scales = reinterpret_cast<float*>(shared + SCALES_AT) + turn.slot * SCALES * KEYS;
                mark_wait(&told.empty[turn.slot], turn.parity ^ 1);
                NO_UNROLL
                for (u32 i = 0; i < TIMES; i++) {
                    const Share now = share;
                    ahead.next(keys, unit);
                    share = share_of(ahead.at(keys, 1), E, aligned);
                    lay(to, scales, row + i * (KEYS / TIMES), now);
                }
                async_fence();
                mark_arrive(&told.full[turn.slot]);
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

// A descriptor of whose lower word the compiler knows nothing.
DEVICE u64 again(u64 desc) { return (desc & ~0xffffffffull) | opaque(u32(desc)); }

// Half of a tile's keys: as many as a thread has registers for what one group of lanes gives beside what all gave before.
constexpr u32 HALF = KEYS / 2;
// Scores of STEPS times 16 lanes, against half of a tile.
template <u32 STEPS>
DEVICE void multiply(float (&sums)[HALF / 2], u64 queries, u64 keys) {
    // Steps' places are computed from here again, rather than kept for the other half.
    queries = again(queries), keys = again(keys);
    wgmma_fence();
    UNROLL
    for (u32 step = 0; step < STEPS; step++) {
        const u32 bytes = step / 4 * BLOCK_BYTES + step % 4 * 32;
        wgmma_ss<Element, HALF, false, false>(sums, after(queries, bytes), after(keys, bytes), step != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(sums);
}

// Half of a thread's columns: those of two groups of 128 lanes.
struct Sums {
    float of[2][LATENT_GROUP / 2];

    void clear() {
        UNROLL
        for (u32 part = 0; part < 2; part++)
            UNROLL
            for (u32 i = 0; i < LATENT_GROUP / 2; i++) of[part][i] = 0.0f;
    }
    void scale(float upper, float lower) {
        // Only multiplications by 1 are left out.
        if (warp_all(upper == 1.0f && lower == 1.0f)) return;
        UNROLL
        for (u32 part = 0; part < 2; part++)
            UNROLL
            for (u32 i = 0; i < LATENT_GROUP / 2; i++) of[part][i] *= i / 2 % 2 ? lower : upper;
    }
};
// Adds the values of a group's 128 lanes, `weights(k, i, first, second)` being the i-th pair of weights of 16 keys.
template <class Weights>
DEVICE void add_values(float (&sums)[LATENT_GROUP / 2], const u8* tile, const float* scales, u32 group, Weights weights) {
    const u32 t = opaque(thread_x()) % 4;
    // What they are rounded to, then what rounding left of them.
    UNROLL
    for (u32 pass = 0; pass < 2; pass++) {
        u32 scaled[KEYS / 16][4];
        UNROLL
        for (u32 k = 0; k < KEYS / 16; k++)
            UNROLL
            for (u32 i = 0; i < 4; i++) {
                const Two scale = *reinterpret_cast<const Two*>(scales + 16 * k + i / 2 * 8 + 2 * t);
                const Two pair = weights(k, i);
                scaled[k][i] = pack<Element>(pair.x * scale.x, pair.y * scale.y);
                if (pass) scaled[k][i] = rest_of(pair.x * scale.x, pair.y * scale.y, scaled[k][i]);
            }
        const u64 values = again(after(tile_desc(tile, BLOCK_BYTES, EIGHT_ROWS), group * (LATENT_GROUP / LANES) * BLOCK_BYTES));
        pin(sums);
        wgmma_fence();
        UNROLL
        for (u32 k = 0; k < KEYS / 16; k++) wgmma_rs<Element, LATENT_GROUP, true>(sums, scaled[k], after(values, k * 2 * EIGHT_ROWS), true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(sums);
    }
}

// Writes half of a block's results, or of its unfinished state.
DEVICE void store(const Attend& p, const Unit& unit, const Sums& sums, u32 half, const float (&factors)[2]) {
    UNROLL
    for (u32 r = 0; r < 2; r++) {
        const u32 lane_of = unit.first + my_row() + 8 * r;
        if (lane_of >= unit.output.lanes) continue;
        const u32 first_column = half * (WIDTH / 2) + lane() % 4 * 2;
        float* state = unit.output.direct() ? nullptr : unit.output.acc(lane_of);
        Element* to = unit.output.direct() ? output_row<Element>(p, unit.output, lane_of) : nullptr;
        const bool pairs = reinterpret_cast<u64>(to) % 4 == 0;
        UNROLL
        for (u32 part = 0; part < 2; part++)
            UNROLL
            for (u32 j = 0; j < LATENT_GROUP / 8; j++) {
                const u32 column = first_column + part * LATENT_GROUP + 8 * j;
                const float a = sums.of[part][4 * j + 2 * r], b = sums.of[part][4 * j + 2 * r + 1];
                if (state) {
                    *reinterpret_cast<Two*>(state + column) = Two{a, b};
                    continue;
                }
                // -0 becomes 0: whether a hidden key was skipped or weighed 0 must not show.
                const u32 word = pack<Element>(a * factors[r] + 0.0f, b * factors[r] + 0.0f);
                if (pairs) *reinterpret_cast<u32*>(to + column) = word;
                else to[column].bits = u16(word), to[column + 1].bits = u16(word >> 16);
            }
    }
}

DEVICE void consume_first(const Attend& p, u8* shared, Told& told) {
    u32 turns = 0;
    // Scores grow with what they are made of, but for a scale that is not positive: then they are scaled first.
    const float scale = p.scale * LOG2_E, step = scale > 0.0f ? scale : 1.0f;
    Turn turn{0, 0};
    each_told(told, [&](const Unit& unit) {
        Sums out;
        float top[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
        out.clear();
        const u32 begin = unit.tile(), end = unit.tiles();
        NO_UNROLL
        for (u32 tile = begin; tile < end; tile++) {
            // What follows from the thread is computed again for each tile, rather than kept in registers.
            const u32 thread = opaque(thread_x()), t = thread % 4, row = thread % GROUP / 32 * 16 + thread % 32 / 4;
            const u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            const u64 queries = tile_desc(shared, 0, EIGHT_ROWS);
            mark_wait(&told.full[turn.slot], turn.parity);
            async_fence();
            float scores[KEYS / 2];
            UNROLL
            for (u32 half = 0; half < 2; half++) {
                const u64 keys = tile_desc(latents + half * (BLOCK_BYTES / 2), 0, EIGHT_ROWS);
                float some[HALF / 2];
                if (ROPE_STEPS > 0) {
                    multiply<(ROPE_STEPS > 0 ? ROPE_STEPS : 1)>(some, after(queries, ROPE_AT), after(keys, ROPE_AT));
                } else {
                    UNROLL
                    for (u32 i = 0; i < HALF / 2; i++) some[i] = 0.0f;
                }
                NO_UNROLL
                for (u32 group = 0; group < SCALES; group++) {
                    const u32 before = group * (LATENT_GROUP / LANES) * BLOCK_BYTES;
                    float part[HALF / 2];
                    multiply<LATENT_GROUP / 16>(part, after(queries, before), after(keys, before));
                    const float* scales = scales_of(shared, turn.slot, group) + half * HALF + 2 * t;
                    UNROLL
                    for (u32 j = 0; j < HALF / 8; j++) {
                        const Two of = *reinterpret_cast<const Two*>(scales + 8 * j);
                        UNROLL
                        for (u32 i = 0; i < 4; i++) some[4 * j + i] = fused(part[4 * j + i], i % 2 ? of.y : of.x, some[4 * j + i]);
                    }
                }
                UNROLL
                for (u32 i = 0; i < HALF / 2; i++) scores[half * (HALF / 2) + i] = some[i];
            }
            if (!(scale > 0.0f)) {
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) scores[i] *= scale;
            }
            if (tile * KEYS < unit.lo || tile * KEYS + KEYS > unit.all_see) {
                const u32 limits[2] = {unit.limit(unit.first + row), unit.limit(unit.first + row + 8)}, lo = unit.lo;
                UNROLL
                for (u32 i = 0; i < KEYS / 2; i++) {
                    const u32 key = tile * KEYS + i / 4 * 8 + t * 2 + i % 2;
                    if (key < lo || key >= limits[i / 2 % 2]) scores[i] = -infinity();
                }
            }
            float alpha[2];
            weigh(scores, step, top, sum, alpha);
            mark_wait(&told.free, turns % 2 ^ 1);
            // Where this lane's row of each pair of 8 x 8 matrices of weights goes; pieces are turned by the row.
            const u32 weight_row = thread % GROUP / 32 * 16 + thread % 16;
            u8* weights = shared + WEIGHTS_AT + weight_row * LANES * 2;
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++) {
                u32 packed[4];
                UNROLL
                for (u32 i = 0; i < 4; i++) packed[i] = pack<Element>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
                stmatrix_x4(weights + ((2 * k + thread % 32 / 16) ^ (weight_row % 8)) * 16, packed);
            }
            float* factors = reinterpret_cast<float*>(shared + FACTORS_AT) + row;
            if (t == 0) factors[0] = alpha[0], factors[8] = alpha[1];
            mark_arrive(&told.there);
            turns++;

            out.scale(alpha[0], alpha[1]);
            UNROLL
            for (u32 group = 0; group < 2; group++)
                add_values(out.of[group], latents, scales_of(shared, turn.slot, group), group,
                           [&](u32 k, u32 i) { return Two{scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]}; });
            mark_arrive(&told.empty[turn.slot]);
            turn.next();
        }
        mark_arrive(&told.queries_read);

        const u32 t = lane() % 4, row = my_row();
        float factor[2];
        conclude(p, unit, top, sum, factor);
        mark_wait(&told.free, turns % 2 ^ 1);
        float* factors = reinterpret_cast<float*>(shared + FACTORS_AT) + row;
        if (t == 0) factors[0] = factor[0], factors[8] = factor[1];
        mark_arrive(&told.there);
        turns++;
        store(p, unit, out, 0, factor);
    });
}

DEVICE void consume_second(const Attend& p, u8* shared, Told& told) {
    const float* factors = reinterpret_cast<const float*>(shared + FACTORS_AT);
    Turn turn{0, 0};
    u32 turns = 0;
    each_told(told, [&](const Unit& unit) {
        Sums out;
        out.clear();
        const u32 begin = unit.tile(), end = unit.tiles();
        NO_UNROLL
        for (u32 tile = begin; tile < end; tile++) {
            const u32 thread = opaque(thread_x()), row = thread % GROUP / 32 * 16 + thread % 32 / 4;
            const u32 weight_row = thread % GROUP / 32 * 16 + thread % 16;
            const u8* weights = shared + WEIGHTS_AT + weight_row * LANES * 2;
            const u8* latents = shared + RING_AT + turn.slot * TILE_BYTES;
            mark_wait(&told.full[turn.slot], turn.parity);
            mark_wait(&told.there, turns % 2);
            async_fence();
            u32 packed[KEYS / 16][4];
            UNROLL
            for (u32 k = 0; k < KEYS / 16; k++) ldmatrix_x4(packed[k], weights + ((2 * k + thread % 32 / 16) ^ (weight_row % 8)) * 16);
            const float upper = factors[row], lower = factors[row + 8];
            mark_arrive(&told.free);
            turns++;
            out.scale(upper, lower);
            UNROLL
            for (u32 group = 0; group < 2; group++)
                add_values(out.of[group], latents, scales_of(shared, turn.slot, 2 + group), 2 + group, [&](u32 k, u32 i) {
                    return Two{bits_float(packed[k][i] << 16), bits_float(packed[k][i] & 0xffff0000u)};
                });
            mark_arrive(&told.empty[turn.slot]);
            turn.next();
        }
        mark_arrive(&told.queries_read);
        mark_wait(&told.there, turns % 2);
        const float factor[2] = {factors[my_row()], factors[my_row() + 8]};
        mark_arrive(&told.free);
        turns++;
        store(p, unit, out, 1, factor);
    });
}

MSTAR_KERNEL(latent_codes, Attend, THREADS, 1) {
    SHARED(shared);
    Told& told = *reinterpret_cast<Told*>(shared + TOLD_AT);
    if (thread_x() == 0) {
        UNROLL
        for (u32 slot = 0; slot < STAGES; slot++) {
            mark_init(&told.full[slot], GROUP);
            mark_init(&told.empty[slot], CONSUMERS);
        }
        mark_init(&told.queries, GROUP + 1);
        mark_init(&told.queries_read, CONSUMERS);
        mark_init(&told.there, GROUP);
        mark_init(&told.free, GROUP);
        marks_ready();
    }
    block_sync();
    const u32 group = group_index();
    // Of the registers that a block of so many threads is launched with, no more can be had: 168 each.
    if (group == 2) {
        registers_fewer<88>();
        produce(p, shared, told);
    } else if (group == 0) {
        registers_more<208>();
        consume_first(p, shared, told);
    } else {
        registers_more<208>();
        consume_second(p, shared, told);
    }
}
